//! `/v1/chat/completions` on the wire, over a scripted model.

use crate::common::*;
use lapidary::service::{FinishKind, Format, ParallelCalls, RequestError, ServiceEvent, ToolChoice};
use serde_json::{Value, json};

fn hello() -> Value {
    json!({ "model": "m", "messages": [{ "role": "user", "content": "hello" }] })
}

fn with(extra: Value) -> Value {
    let mut body = hello();
    for (name, value) in extra.as_object().expect("fields") {
        body[name] = value.clone();
    }
    body
}

fn plain() -> Plan {
    Plan::Say(vec![vec![started(7, 3), text("Hi"), text(" there"), finished(stop(), 2, 0)]])
}

#[test]
fn a_whole_reply() {
    run(async {
        let server = Server::new([plain()]);
        let answer = server.post("/v1/chat/completions", &hello()).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.header("content-type"), "application/json");
        assert!(answer.header("x-request-id").starts_with("req-"));
        snapshot("chat_whole.json", &answer.body);
    });
}

#[test]
fn a_streamed_reply() {
    run(async {
        let server = Server::new([plain()]);
        let body = with(json!({ "stream": true, "stream_options": { "include_usage": true } }));
        let answer = server.post("/v1/chat/completions", &body).await;
        assert!(answer.header("content-type").starts_with("text/event-stream"));
        snapshot("chat_stream.txt", &answer.body);
    });
}

fn thinks_and_calls() -> Plan {
    Plan::Say(vec![vec![
        started(7, 3),
        thought("Let me "),
        thought("see."),
        text("One moment."),
        call_begin(0, "weather"),
        call_arguments(0, "{\"city\":"),
        call_arguments(0, "\"Bern\"}"),
        call_begin(1, "time"),
        call_arguments(1, "{}"),
        finished(FinishKind::ToolCalls, 20, 4),
    ]])
}

#[test]
fn e01_f05_thoughts_and_calls_on_the_wire() {
    run(async {
        let tools = json!([
            { "type": "function", "function": { "name": "weather", "parameters": { "type": "object" } } },
            { "type": "function", "function": { "name": "time" } },
        ]);
        let server = Server::new([thinks_and_calls(), thinks_and_calls()]);
        let whole = server.post("/v1/chat/completions", &with(json!({ "tools": tools }))).await;
        snapshot("chat_calls_whole.json", &whole.body);
        let body =
            with(json!({ "tools": tools, "stream": true, "stream_options": { "include_usage": true } }));
        let stream = server.post("/v1/chat/completions", &body).await;
        snapshot("chat_calls_stream.txt", &stream.body);

        // The two modes say the same, and deltas of calls have no nulls and no repeated heads.
        let whole = whole.json();
        let message = &whole["choices"][0]["message"];
        let mut reasoning = String::new();
        let mut arguments = vec![String::new(); 2];
        let mut heads = vec![];
        for chunk in chunks(&stream.body) {
            let delta = &chunk["choices"][0]["delta"];
            reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                assert!(!call.to_string().contains("null"), "{call}");
                if call.get("id").is_some() {
                    heads.push(call.clone());
                }
                arguments[call["index"].as_u64().unwrap() as usize] +=
                    call["function"]["arguments"].as_str().unwrap();
            }
        }
        assert_eq!(message["reasoning_content"], reasoning);
        assert_eq!(heads.len(), 2);
        for (i, arguments) in arguments.iter().enumerate() {
            assert_eq!(message["tool_calls"][i]["function"]["arguments"], *arguments);
            assert_eq!(message["tool_calls"][i]["id"], heads[i]["id"]);
        }
        let usage = chunks(&stream.body).last().unwrap()["usage"].clone();
        assert_eq!(usage, whole["usage"], "K08: one usage in both modes");
    });
}

#[test]
fn k08_usage_is_the_same_object_in_both_modes_and_counts_the_prompt_once() {
    run(async {
        let plan = || Plan::Say(vec![vec![started(7, 3), thought("a"), text("b"), finished(stop(), 5, 2)]]);
        let server = Server::new([plan(), plan()]);
        let whole = server.post("/v1/chat/completions", &with(json!({ "n": 3 }))).await.json();
        let body = with(json!({ "n": 3, "stream": true, "stream_options": { "include_usage": true } }));
        let stream = server.post("/v1/chat/completions", &body).await;
        let expected = json!({
            "prompt_tokens": 7, "completion_tokens": 15, "total_tokens": 22,
            "prompt_tokens_details": { "cached_tokens": 3 },
            "completion_tokens_details": { "reasoning_tokens": 6 },
        });
        assert_eq!(whole["usage"], expected);
        let chunks = chunks(&stream.body);
        assert_eq!(chunks.last().unwrap()["usage"], expected);
        assert!(chunks[..chunks.len() - 1].iter().all(|chunk| chunk["usage"].is_null()));
        let indices: Vec<u64> =
            whole["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, [0, 1, 2]);
    });
}

#[test]
fn logprobs_in_both_modes() {
    run(async {
        let plan = || {
            Plan::Say(vec![vec![
                started(7, 0),
                token("Hé", 5, -0.25),
                token("y", 6, -1.5),
                finished(stop(), 2, 0),
            ]])
        };
        let server = Server::new([plan(), plan()]);
        let asked = json!({ "logprobs": true, "top_logprobs": 2 });
        let whole = server.post("/v1/chat/completions", &with(asked)).await.json();
        let content = whole["choices"][0]["logprobs"]["content"].clone();
        assert_eq!(content[0]["bytes"], json!([72, 195, 169]));
        assert_eq!(content[1]["top_logprobs"][1], json!({ "token": "~", "logprob": -8.5, "bytes": [126] }));
        let body = with(json!({ "logprobs": true, "top_logprobs": 2, "stream": true }));
        let stream = server.post("/v1/chat/completions", &body).await;
        let streamed: Vec<Value> = chunks(&stream.body)
            .iter()
            .flat_map(|chunk| {
                chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default()
            })
            .collect();
        assert_eq!(json!(streamed), content);
        assert_eq!(server.model.chats.lock().unwrap()[0].generation.logprobs, Some(2));
    });
}

#[test]
fn every_field_reaches_the_model() {
    run(async {
        let server = Server::new([plain()]);
        let body = with(json!({
            "temperature": 0.5, "top_p": 0.75, "top_k": 5, "min_p": 0.125, "presence_penalty": 1, "frequency_penalty": -1,
            "repetition_penalty": 1.25, "logit_bias": { "17": 2, "4": -100 }, "seed": -1, "n": 2, "stop": ["a", "b"],
            "stop_token_ids": [9], "ignore_eos": true, "max_completion_tokens": 50, "min_tokens": 3, "priority": -2,
            "timeout": 1.5, "parallel_tool_calls": false, "tool_choice": { "type": "function", "function": { "name": "f" } },
            "tools": [{ "type": "function", "function": { "name": "f" } }],
            "response_format": { "type": "json_schema", "json_schema": { "name": "s", "schema": { "type": "object" }, "strict": true } },
            "reasoning_effort": "low", "user": "u", "metadata": {}, "chat_template_kwargs": { "preserve_thinking": true, "x": 1 },
        }));
        let answer = server.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.header("x-lapidary-ignored"), "");
        let request = server.model.chats.lock().unwrap().remove(0);
        let g = &request.generation;
        assert_eq!((g.temperature, g.top_p, g.top_k, g.min_p), (Some(0.5), Some(0.75), Some(5), Some(0.125)));
        assert_eq!(
            (g.presence_penalty, g.frequency_penalty, g.repetition_penalty),
            (Some(1.), Some(-1.), Some(1.25))
        );
        assert_eq!(g.logit_bias, [(17, 2.), (4, -100.)]);
        assert_eq!(
            (g.seed, g.n, g.ignore_eos, g.max_tokens, g.min_tokens),
            (Some(u64::MAX), 2, true, Some(50), 3)
        );
        assert_eq!((g.stop.clone(), g.stop_ids.clone()), (vec!["a".to_owned(), "b".to_owned()], vec![9]));
        assert_eq!((g.priority, g.timeout), (-2, Some(std::time::Duration::from_millis(1500))));
        assert_eq!(request.parallel_tool_calls, ParallelCalls::One);
        assert_eq!(request.tool_choice, ToolChoice::Named("f".into()));
        assert!(
            matches!(&request.format, Format::JsonSchema { name: Some(name), strict: true, .. } if name == "s")
        );
        assert_eq!((request.input.enable_thinking, request.thinking_budget), (Some(true), Some(512)));
        assert_eq!(request.input.preserve_thinking, Some(true));
        assert_eq!(json!(request.input.extra), json!({ "x": 1 }));
    });
}

#[test]
fn e04_every_switch_for_thinking_and_none() {
    run(async {
        let cases = [
            (json!({}), None),
            (json!({ "reasoning_effort": "none" }), Some(false)),
            (json!({ "reasoning_effort": "high" }), Some(true)),
            (json!({ "enable_thinking": false }), Some(false)),
            (json!({ "chat_template_kwargs": { "enable_thinking": false } }), Some(false)),
            (json!({ "chat_template_kwargs": { "enable_thinking": true } }), Some(true)),
            (json!({ "thinking": { "type": "disabled" } }), Some(false)),
            (json!({ "thinking": { "type": "enabled", "budget_tokens": 64 } }), Some(true)),
            (json!({ "thinking": true }), Some(true)),
            (json!({ "reasoning": { "effort": "none" } }), Some(false)),
            (json!({ "reasoning": { "enabled": false } }), Some(false)),
        ];
        for (switch, on) in cases {
            let server = Server::new([plain()]);
            let answer = server.post("/v1/chat/completions", &with(switch.clone())).await;
            assert_eq!(answer.status, 200, "{switch}: {}", answer.body);
            assert_eq!(answer.header("x-lapidary-ignored"), "", "{switch}");
            assert_eq!(server.model.chats.lock().unwrap()[0].input.enable_thinking, on, "{switch}");
        }
        let server = Server::new([]);
        let body = with(json!({ "reasoning_effort": "high", "enable_thinking": false }));
        assert_eq!(server.post("/v1/chat/completions", &body).await.status, 400);
    });
}

#[test]
fn what_is_wrong_is_named() {
    run(async {
        let schema = json!({ "type": "json_schema" });
        let cases = [
            (json!({ "messages": [] }), "messages"),
            (json!({ "messages": [{ "role": "wizard", "content": "x" }] }), "messages[0].role"),
            (json!({ "messages": [{ "role": "user" }] }), "messages[0].content"),
            (json!({ "messages": [{ "role": "user", "content": 5 }] }), "messages[0].content"),
            (
                json!({ "messages": [{ "role": "tool", "content": "x", "tool_call_id": "a" }] }),
                "messages[0].role",
            ),
            (json!({ "temperature": "hot" }), "temperature"),
            (json!({ "n": 0 }), "n"),
            (json!({ "n": 1000 }), "n"),
            (json!({ "stop": ["a", ""] }), "stop[1]"),
            (json!({ "max_tokens": 0 }), "max_tokens"),
            (json!({ "max_tokens": 5, "max_completion_tokens": 6 }), "max_completion_tokens"),
            (json!({ "top_logprobs": 3 }), "top_logprobs"),
            (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs"),
            (json!({ "logit_bias": { "x": 1 } }), "logit_bias"),
            (json!({ "stop_token_ids": ["a"] }), "stop_token_ids[0]"),
            (json!({ "timeout": -1 }), "timeout"),
            (json!({ "response_format": schema }), "response_format.json_schema"),
            (json!({ "response_format": { "type": "yaml" } }), "response_format.type"),
            (json!({ "tool_choice": "sometimes" }), "tool_choice"),
            (
                json!({ "tools": [{ "type": "function", "function": { "name": "a b" } }] }),
                "tools[0].function.name",
            ),
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "functions": [] }), "functions"),
            (json!({ "modalities": ["text", "audio"] }), "modalities"),
            (json!({ "stream_options": { "include_usage": true } }), "stream_options"),
            (json!({ "reasoning_effort": "extreme" }), "reasoning_effort"),
        ];
        for (fields, param) in cases {
            let server = Server::new([]);
            let answer = server.post("/v1/chat/completions", &with(fields.clone())).await;
            let error = &answer.json()["error"];
            assert_eq!(answer.status, 400, "{fields}: {error}");
            assert_eq!(error["param"], param, "{fields}: {error}");
            assert!(error["message"].as_str().unwrap().contains(param), "{fields}: {error}");
        }
    });
}

#[test]
fn k05_numbers_out_of_range_are_refused_in_the_body_or_reach_the_service_as_they_are() {
    run(async {
        for text in ["1e400", "\"abc\"", "1.5", "[1]", "{}"] {
            let server = Server::new([]);
            let body =
                format!(r#"{{"messages":[{{"role":"user","content":"x"}}],"stop_token_ids":[{text}]}}"#);
            let answer = server.post_text("/v1/chat/completions", &body).await;
            assert_eq!(answer.status, 400, "{text}: {}", answer.body);
        }
        // Ids that fit 64 bits are the service's to judge: it knows the vocabulary.
        for (text, id) in [
            ("-1", -1),
            ("2147483648", 1 << 31),
            ("4294967301", (1 << 32) + 5),
            ("18446744073709551615", i64::MAX),
        ] {
            let server = Server::new([plain()]);
            let body = format!(
                r#"{{"messages":[{{"role":"user","content":"x"}}],"stop_token_ids":[{text}],"logit_bias":{{"{id}":1}}}}"#
            );
            let answer = server.post_text("/v1/chat/completions", &body).await;
            assert_eq!(answer.status, 200, "{text}: {}", answer.body);
            let request = &server.model.chats.lock().unwrap()[0].generation;
            assert_eq!((request.stop_ids[0], request.logit_bias[0].0), (id, id));
        }
    });
}

#[test]
fn j04_a_picture_or_a_sound_is_refused_by_its_place() {
    run(async {
        let parts = [
            (json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,xyz" } }), "vision"),
            (json!({ "type": "input_audio", "input_audio": { "data": "xyz", "format": "wav" } }), "audio"),
        ];
        for (part, needs) in parts {
            let server = Server::new([]);
            let content = json!([{ "type": "text", "text": "what is this?" }, part]);
            let body = json!({ "messages": [{ "role": "user", "content": content }] });
            let answer = server.post("/v1/chat/completions", &body).await;
            let error = &answer.json()["error"];
            assert_eq!(answer.status, 400, "{error}");
            assert_eq!(error["param"], "messages[0].content[1]");
            assert!(error["message"].as_str().unwrap().contains(needs), "{error}");
        }
    });
}

#[test]
fn k03_an_oversize_prompt_is_400_with_both_counts_before_any_event() {
    run(async {
        for stream in [false, true] {
            let server =
                Server::new([Plan::Refuse(RequestError::PromptTooLong { tokens: 513, context: 512 })]);
            let answer = server.post("/v1/chat/completions", &with(json!({ "stream": stream }))).await;
            let error = &answer.json()["error"];
            assert_eq!(answer.status, 400);
            assert_eq!(
                (&error["type"], &error["code"]),
                (&json!("context_length_exceeded"), &json!("context_length_exceeded"))
            );
            assert_eq!((&error["prompt_tokens"], &error["context_tokens"]), (&json!(513), &json!(512)));
            assert!(
                error["message"].as_str().unwrap().contains("513")
                    && error["message"].as_str().unwrap().contains("512")
            );
        }
        // A limit that does not fit is clamped, and the reply says to what.
        let server = Server::new([plain(), plain()]);
        let whole = server.post("/v1/chat/completions", &with(json!({ "max_tokens": 1000 }))).await.json();
        assert_eq!(whole["choices"][0]["lapidary"]["max_tokens"], 100);
        let stream =
            server.post("/v1/chat/completions", &with(json!({ "max_tokens": 1000, "stream": true }))).await;
        let last = chunks(&stream.body).pop().unwrap();
        assert_eq!(last["choices"][0]["lapidary"]["max_tokens"], 100);
    });
}

#[test]
fn a08_a_reply_that_fails_ends_with_an_error_object() {
    run(async {
        let plan = || {
            let failed = ServiceEvent::Failed(RequestError::NonFinite { position: 9 });
            Plan::Say(vec![vec![started(7, 0), text("Hi"), failed]])
        };
        let server = Server::new([plan(), plan()]);
        let whole = server.post("/v1/chat/completions", &hello()).await;
        assert_eq!(whole.status, 500);
        assert_eq!(whole.json()["error"]["code"], "non_finite_logits");
        let stream = server.post("/v1/chat/completions", &with(json!({ "stream": true }))).await;
        let frames = frames(&stream.body);
        let last: Value = serde_json::from_str(frames.last().unwrap()).unwrap();
        assert_eq!(last["error"]["code"], "non_finite_logits");
        assert!(!stream.body.contains("[DONE]"), "a broken stream must not look complete");
        let metrics = server.get("/metrics").await.body;
        let counted = "lapidary_request_success_total{model_name=\"m\",finished_reason=\"non_finite\"} 2";
        assert!(metrics.contains(counted), "{metrics}");
    });
}

#[test]
fn f08_a_call_that_did_not_parse_is_text_with_a_flag() {
    run(async {
        let mut end = finished(FinishKind::Length, 9, 0);
        if let ServiceEvent::Finished { unparsed_calls, .. } = &mut end {
            *unparsed_calls = 1;
        }
        let server = Server::new([Plan::Say(vec![vec![started(7, 0), text("call:f{a"), end]])]);
        let answer = server.post("/v1/chat/completions", &hello()).await;
        assert_eq!(answer.status, 200);
        let choice = &answer.json()["choices"][0];
        assert_eq!(choice["message"]["content"], "call:f{a");
        assert_eq!(choice["lapidary"]["unparsed_tool_calls"], 1);
        assert_eq!(choice["finish_reason"], "length");
    });
}

#[test]
fn a_matched_stop_string_is_told() {
    run(async {
        let matched = FinishKind::Stop { matched: Some("END".into()) };
        let server = Server::new([Plan::Say(vec![vec![started(7, 0), text("a"), finished(matched, 3, 0)]])]);
        let choice =
            server.post("/v1/chat/completions", &with(json!({ "stop": "END" }))).await.json()["choices"][0]
                .clone();
        assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!("END")));
    });
}

#[test]
fn a_tool_loop_is_handed_over_in_order() {
    run(async {
        let server = Server::new([plain()]);
        let body = json!({ "messages": [
            { "role": "developer", "content": "be brief" },
            { "role": "user", "content": [{ "type": "text", "text": "weather?" }] },
            { "role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
                { "id": "c1", "type": "function", "function": { "name": "weather", "arguments": "{\"city\":\"Bern\"}" } },
            ] },
            { "role": "tool", "tool_call_id": "c1", "content": "sunny" },
        ] });
        let answer = server.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let messages = json!(server.model.chats.lock().unwrap()[0].input.messages);
        assert_eq!(messages[0]["role"], "system");
        assert_eq!(messages[2]["tool_calls"][0]["function"]["name"], "weather");
        assert_eq!(messages[2]["reasoning_content"], "hm");
        assert_eq!(messages[3], json!({ "role": "tool", "content": "sunny", "tool_call_id": "c1" }));
        // A result for a call that is not there would vanish from the prompt.
        let mut wrong = body.clone();
        wrong["messages"][3]["tool_call_id"] = "c2".into();
        assert_eq!(
            server.post("/v1/chat/completions", &wrong).await.json()["error"]["param"],
            "messages[3].tool_call_id"
        );
    });
}
