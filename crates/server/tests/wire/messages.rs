//! `/v1/messages` on the wire, over a scripted model.

use crate::common::*;
use lapidary::service::{FinishKind, ParallelCalls, RequestError, ServiceEvent, ToolChoice};
use serde_json::{Value, json};

fn hello() -> Value {
    json!({ "model": "m", "max_tokens": 50, "messages": [{ "role": "user", "content": "hello" }] })
}

fn with(extra: Value) -> Value {
    let mut body = hello();
    for (name, value) in extra.as_object().expect("fields") {
        body[name] = value.clone();
    }
    body
}

fn plan() -> Plan {
    Plan::Say(vec![vec![
        started(7, 3),
        thought("Let me "),
        thought("see."),
        text("One "),
        text("moment."),
        call_begin(0, "weather"),
        call_arguments(0, "{\"city\":"),
        call_arguments(0, "\"Bern\"}"),
        finished(FinishKind::ToolCalls, 20, 4),
    ]])
}

#[test]
fn whole_and_streamed() {
    run(async {
        let server = Server::new([plan(), plan()]);
        let whole = server.post("/v1/messages", &hello()).await;
        assert_eq!(whole.status, 200, "{}", whole.body);
        snapshot("message_whole.json", &whole.body);
        let stream = server.post("/v1/messages", &with(json!({ "stream": true }))).await;
        snapshot("message_stream.txt", &stream.body);
        // What the deltas add up to is what the whole says.
        let mut blocks: Vec<Value> = Vec::new();
        for event in chunks(&stream.body) {
            let index = event["index"].as_u64().unwrap_or_default() as usize;
            match event["type"].as_str().unwrap() {
                "content_block_start" => blocks.push(event["content_block"].clone()),
                "content_block_delta" => {
                    let delta = event["delta"].as_object().unwrap();
                    for name in ["text", "thinking", "signature", "partial_json"] {
                        let Some(more) = delta.get(name).and_then(Value::as_str) else { continue };
                        let before = blocks[index][name].as_str().unwrap_or_default().to_owned();
                        blocks[index][name] = (before + more).into();
                    }
                }
                _ => {}
            }
        }
        for block in &mut blocks {
            if let Some(text) = block.as_object_mut().unwrap().remove("partial_json") {
                block["input"] = serde_json::from_str(text.as_str().unwrap()).unwrap();
            }
        }
        assert_eq!(json!(blocks), whole.json()["content"]);
    });
}

#[test]
fn a_conversation_with_tools_and_thoughts_is_handed_over() {
    run(async {
        let server = Server::new([plan()]);
        let body = with(json!({
            "system": [{ "type": "text", "text": "be brief", "cache_control": { "type": "ephemeral" } }],
            "messages": [
                { "role": "user", "content": "weather?" },
                { "role": "assistant", "content": [
                    { "type": "thinking", "thinking": "hm", "signature": "s" },
                    { "type": "tool_use", "id": "c1", "name": "weather", "input": { "city": "Bern" } },
                ] },
                { "role": "user", "content": [
                    { "type": "tool_result", "tool_use_id": "c1", "content": [{ "type": "text", "text": "sunny" }] },
                    { "type": "text", "text": "and now?" },
                ] },
            ],
            "tools": [{ "name": "weather", "description": "d", "input_schema": { "type": "object" } }],
            "tool_choice": { "type": "any", "disable_parallel_tool_use": true },
            "thinking": { "type": "enabled", "budget_tokens": 2048 },
            "stop_sequences": ["END"], "top_k": 3,
        }));
        let answer = server.post("/v1/messages", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.header("x-lapidary-ignored"), "");
        assert_eq!(answer.header("request-id"), answer.header("x-request-id"));
        let request = server.model.chats.lock().unwrap().remove(0);
        let messages = json!(request.input.messages);
        assert_eq!(messages[0], json!({ "role": "system", "content": "be brief" }));
        assert_eq!(messages[2]["reasoning_content"], "hm");
        assert_eq!(
            messages[2]["tool_calls"][0]["function"],
            json!({ "name": "weather", "arguments": { "city": "Bern" } })
        );
        assert_eq!(messages[3], json!({ "role": "tool", "tool_call_id": "c1", "content": "sunny" }));
        assert_eq!(messages[4]["role"], "user");
        assert_eq!(
            (request.tool_choice, request.parallel_tool_calls),
            (ToolChoice::Required, ParallelCalls::One)
        );
        assert_eq!((request.input.enable_thinking, request.thinking_budget), (Some(true), Some(2048)));
        assert_eq!((request.generation.stop, request.generation.top_k), (vec!["END".to_owned()], Some(3)));
    });
}

#[test]
fn errors_have_anthropics_form() {
    run(async {
        let overloaded = RequestError::Overloaded { retry_after: std::time::Duration::from_secs(2) };
        let failed = ServiceEvent::Failed(RequestError::NonFinite { position: 1 });
        let server = Server::new([Plan::Refuse(overloaded), Plan::Say(vec![vec![started(7, 0), failed]])]);
        let mut no_limit = hello();
        no_limit.as_object_mut().unwrap().remove("max_tokens");
        let error = server.post("/v1/messages", &no_limit).await;
        assert_eq!(error.status, 400);
        assert_eq!(error.json()["type"], "error");
        assert_eq!(error.json()["error"]["type"], "invalid_request_error");
        assert_eq!(error.json()["request_id"], error.header("request-id"));
        let error = server.post("/v1/messages", &hello()).await;
        assert_eq!((error.status.as_u16(), error.header("retry-after")), (429, "2"));
        assert_eq!(error.json()["error"]["type"], "rate_limit_error");
        let stream = server.post("/v1/messages", &with(json!({ "stream": true }))).await;
        assert!(stream.body.contains("event: error\n"), "{}", stream.body);
        assert!(!stream.body.contains("message_stop"), "{}", stream.body);
        for (fields, param) in [
            (json!({ "messages": [{ "role": "system", "content": "x" }] }), "messages[0].role"),
            (
                json!({ "messages": [{ "role": "user", "content": [{ "type": "image", "source": {} }] }] }),
                "messages[0].content[0]",
            ),
            (
                json!({ "messages": [{ "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "x" }] }] }),
                "tool_use_id",
            ),
            (json!({ "tools": [{ "type": "bash_20250124", "name": "bash" }] }), "tools[0]"),
            (json!({ "tool_choice": { "type": "tool" } }), "tool_choice.name"),
        ] {
            let error = Server::new([]).post("/v1/messages", &with(fields.clone())).await;
            assert_eq!(error.status, 400, "{fields}");
            assert!(
                error.json()["error"]["message"].as_str().unwrap().contains(param),
                "{fields}: {}",
                error.body
            );
        }
    });
}

#[test]
fn the_prompt_is_counted() {
    run(async {
        let server = Server::new([]);
        let mut body = hello();
        body.as_object_mut().unwrap().remove("max_tokens");
        assert_eq!(
            server.post("/v1/messages/count_tokens", &body).await.json(),
            json!({ "input_tokens": 5 })
        );
    });
}
