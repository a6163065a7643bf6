//! `/v1/responses` on the wire, over a scripted model.

use crate::common::*;
use lapidary::service::{FinishKind, Format, RequestError, ServiceEvent};
use serde_json::{Value, json};

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
        let tool = json!({ "type": "function", "name": "weather", "parameters": { "type": "object" } });
        let body = json!({ "model": "m", "input": "hello", "tools": [tool] });
        let whole = server.post("/v1/responses", &body).await;
        assert_eq!(whole.status, 200, "{}", whole.body);
        snapshot("response_whole.json", &whole.body);
        let mut body = body;
        body["stream"] = json!(true);
        let stream = server.post("/v1/responses", &body).await;
        snapshot("response_stream.txt", &stream.body);
        let events = chunks(&stream.body);
        for (number, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number, "{event}");
        }
        let last = &events.last().unwrap()["response"];
        let without_ids = |output: &Value| {
            let mut output = output.clone();
            for item in output.as_array_mut().unwrap() {
                item["id"] = "".into();
            }
            output
        };
        assert_eq!(without_ids(&last["output"]), without_ids(&whole.json()["output"]));
        assert_eq!(last["usage"], whole.json()["usage"]);
    });
}

#[test]
fn logprobs_stand_beside_the_text_whole_and_streamed() {
    run(async {
        let plan = || {
            Plan::Say(vec![vec![
                started(7, 3),
                token("on", 4, -0.5),
                token("ce", 5, -1.0),
                finished(stop(), 2, 0),
            ]])
        };
        let server = Server::new([plan(), plan(), plan()]);
        let include = json!(["message.output_text.logprobs", "reasoning.encrypted_content"]);
        let body = json!({ "input": "hello", "include": include, "top_logprobs": 2 });
        let whole = server.post("/v1/responses", &body).await;
        assert_eq!(whole.header("x-lapidary-ignored"), "include[1]");
        let logprobs = whole.json()["output"][0]["content"][0]["logprobs"].clone();
        assert_eq!((&logprobs[1]["token"], &logprobs[1]["logprob"]), (&json!("ce"), &json!(-1.0)));
        assert_eq!(logprobs[1]["top_logprobs"][1]["token"], "~");
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let stream = server.post("/v1/responses", &streamed).await;
        let events = chunks(&stream.body);
        let of = |kind: &str| -> Vec<Value> {
            events.iter().filter(|e| e["type"] == kind).map(|e| e["logprobs"].clone()).collect()
        };
        let deltas: Vec<Value> =
            of("response.output_text.delta").iter().flat_map(|l| l.as_array().unwrap().clone()).collect();
        assert_eq!(json!(deltas), logprobs);
        assert_eq!(of("response.output_text.done"), std::slice::from_ref(&logprobs));
        assert_eq!(events.last().unwrap()["response"]["output"][0]["content"][0]["logprobs"], logprobs);
        // None unless they are asked for.
        server.post("/v1/responses", &json!({ "input": "hello" })).await;
        let asked: Vec<_> =
            server.model.chats.lock().unwrap().iter().map(|c| c.generation.logprobs).collect();
        assert_eq!(asked, [Some(2), Some(2), None]);
        for (field, value) in
            [("top_logprobs", json!(21)), ("capture", json!({})), ("prompt_logprobs", json!(1))]
        {
            let mut body = json!({ "input": "hello" });
            body[field] = value;
            let answer = server.post("/v1/responses", &body).await;
            assert_eq!((answer.status.as_u16(), &answer.json()["error"]["param"]), (400, &json!(field)));
        }
    });
}

#[test]
fn items_become_the_conversation() {
    run(async {
        let server = Server::new([plan()]);
        let body = json!({
            "instructions": "be brief",
            "input": [
                { "role": "user", "content": [{ "type": "input_text", "text": "weather?" }] },
                { "type": "reasoning", "id": "r", "summary": [], "content": [{ "type": "reasoning_text", "text": "hm" }] },
                { "type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}" },
                { "type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}" },
                { "type": "function_call_output", "call_id": "c1", "output": "sunny" },
                { "type": "function_call_output", "call_id": "c2", "output": "noon" },
            ],
            "text": { "format": { "type": "json_schema", "name": "s", "schema": { "type": "object" } } },
            "reasoning": { "effort": "high" }, "max_output_tokens": 9,
        });
        let answer = server.post("/v1/responses", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let request = server.model.chats.lock().unwrap().remove(0);
        let messages = json!(request.input.messages);
        assert_eq!(messages[0], json!({ "role": "system", "content": "be brief" }));
        assert_eq!(messages[2]["reasoning_content"], "hm");
        assert_eq!(messages[2]["tool_calls"][1]["function"]["name"], "time");
        assert_eq!(messages[4], json!({ "role": "tool", "tool_call_id": "c2", "content": "noon" }));
        assert!(matches!(request.format, Format::JsonSchema { .. }));
        assert_eq!((request.input.enable_thinking, request.generation.max_tokens), (Some(true), Some(9)));
    });
}

#[test]
fn what_needs_a_memory_is_refused_by_name() {
    run(async {
        for (fields, param) in [
            (json!({ "previous_response_id": "resp_1" }), "previous_response_id"),
            (json!({ "conversation": "c" }), "conversation"),
            (json!({ "background": true }), "background"),
            (json!({ "truncation": "auto" }), "truncation"),
            (json!({ "input": [] }), "input"),
            (
                json!({ "input": [{ "type": "function_call_output", "call_id": "x", "output": "y" }] }),
                "input[0].call_id",
            ),
            (json!({ "input": [{ "type": "item_reference", "id": "x" }] }), "input[0]"),
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0]"),
        ] {
            let mut body = json!({ "input": "hello" });
            for (name, value) in fields.as_object().unwrap() {
                body[name] = value.clone();
            }
            let answer = Server::new([]).post("/v1/responses", &body).await;
            assert_eq!(answer.status, 400, "{fields}");
            assert_eq!(answer.json()["error"]["param"], param, "{}", answer.body);
        }
        assert_eq!(Server::new([]).get("/v1/responses/resp_1").await.status, 400);
    });
}

#[test]
fn a_limit_and_a_failure_have_their_own_last_event() {
    run(async {
        let failed = ServiceEvent::Failed(RequestError::NonFinite { position: 1 });
        let server = Server::new([
            Plan::Say(vec![vec![started(7, 0), text("a"), finished(FinishKind::Length, 1, 0)]]),
            Plan::Say(vec![vec![started(7, 0), text("a"), failed]]),
        ]);
        let body = json!({ "input": "hello", "stream": true });
        let cut = chunks(&server.post("/v1/responses", &body).await.body).pop().unwrap();
        assert_eq!(cut["type"], "response.incomplete");
        assert_eq!(cut["response"]["incomplete_details"]["reason"], "max_output_tokens");
        let broken = chunks(&server.post("/v1/responses", &body).await.body).pop().unwrap();
        assert_eq!(broken["type"], "response.failed");
        assert_eq!(broken["response"]["error"]["code"], "non_finite_logits");
    });
}
