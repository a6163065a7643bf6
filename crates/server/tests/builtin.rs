//! The routes over the real service and the built-in model: what needs tokens, templates and an engine to be right.

mod common;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use common::{Answer, chunks, run};
use lapidary::LoadOptions;
use lapidary::service::{Service, ServiceOptions};
use lapidary_server::{App, ServerOptions, router};
use serde_json::{Value, json};
use tower::ServiceExt;

/// One model for all tests of this file: its engine takes many requests.
fn service() -> &'static Service {
    static SERVICE: OnceLock<Service> = OnceLock::new();
    SERVICE.get_or_init(|| {
        let load = LoadOptions { context: Some(512), threads: Some(1), ..LoadOptions::default() };
        let checkpoint = lapidary::builtin().expect("it is part of the library");
        Service::start(&checkpoint, &load, ServiceOptions::default(), &mut |_| {}).expect("it starts")
    })
}

fn app() -> App {
    let app = App::new(ServerOptions::default());
    app.serve(Arc::new(service().clone()));
    app
}

async fn post(path: &str, body: Value) -> Answer {
    use axum::body::Body;
    use http_body_util::BodyExt;
    let request = axum::http::Request::post(path).header("content-type", "application/json");
    let request = request.body(Body::from(body.to_string())).expect("a plain request");
    let response = router(app()).oneshot(request).await.expect("a router answers always");
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.expect("a body in memory").to_bytes();
    let body = String::from_utf8(bytes.to_vec()).expect("replies are text");
    Answer { status: parts.status, headers: parts.headers, body }
}

fn ask(text: &str, more: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": text }], "temperature": 0 });
    for (name, value) in more.as_object().expect("fields") {
        body[name] = value.clone();
    }
    body
}

const CHAT: &str = "/v1/chat/completions";
const STORY: &str = "Tell me a story about Zoe.";

#[test]
fn e04_thinking_is_off_unless_asked_for_and_its_switches_work_on_every_endpoint() {
    run(async {
        let question = "What is the capital of Kenya?";
        let (answer, thought) =
            ("The capital of Kenya is Nairobi.", "The user asks about Kenya. Its capital is Nairobi.");
        let chat =
            |more| async { post(CHAT, ask(question, more)).await.json()["choices"][0]["message"].clone() };
        for off in
            [json!({}), json!({ "reasoning_effort": "none" }), json!({ "thinking": { "type": "disabled" } })]
        {
            let message = chat(off.clone()).await;
            assert_eq!(
                (&message["content"], message.get("reasoning_content")),
                (&json!(answer), None),
                "{off}"
            );
        }
        for on in [
            json!({ "reasoning_effort": "high" }),
            json!({ "chat_template_kwargs": { "enable_thinking": true } }),
        ] {
            let message = chat(on.clone()).await;
            assert_eq!(
                (&message["content"], &message["reasoning_content"]),
                (&json!(answer), &json!(thought)),
                "{on}"
            );
        }
        for (on, types) in [(false, json!(["text"])), (true, json!(["thinking", "text"]))] {
            let mut body = ask(question, json!({ "max_tokens": 100 }));
            if on {
                body["thinking"] = json!({ "type": "enabled", "budget_tokens": 1024 });
            }
            let content = post("/v1/messages", body).await.json()["content"].clone();
            let found: Vec<&Value> = content.as_array().unwrap().iter().map(|block| &block["type"]).collect();
            assert_eq!(json!(found), types);
        }
        for (effort, types) in [("none", json!(["message"])), ("high", json!(["reasoning", "message"]))] {
            let body = json!({ "input": question, "temperature": 0, "reasoning": { "effort": effort } });
            let output = post("/v1/responses", body).await.json()["output"].clone();
            let found: Vec<&Value> = output.as_array().unwrap().iter().map(|item| &item["type"]).collect();
            assert_eq!(json!(found), types);
        }
    });
}

#[test]
fn g02_a_free_thought_and_then_json_by_a_schema() {
    run(async {
        let schema = json!({
            "type": "object", "required": ["name", "age"], "additionalProperties": false,
            "properties": { "name": { "type": "string", "maxLength": 12 }, "age": { "type": "integer", "minimum": 0, "maximum": 99 } },
        });
        let form = json!({ "type": "json_schema", "json_schema": { "name": "person", "schema": schema } });
        let more = json!({ "response_format": form, "reasoning_effort": "high", "max_tokens": 200 });
        let whole = post(CHAT, ask("How much is 3 * 4?", more.clone())).await.json();
        let message = &whole["choices"][0]["message"];
        assert_ne!(message["reasoning_content"].as_str().unwrap_or_default(), "", "{whole}");
        let person: Value =
            serde_json::from_str(message["content"].as_str().unwrap()).expect("one valid document");
        assert!(person["age"].as_u64().unwrap() <= 99 && person["name"].is_string(), "{person}");
        let mut body = ask("How much is 3 * 4?", more);
        body["stream"] = json!(true);
        let stream = post(CHAT, body).await;
        let text: String = chunks(&stream.body)
            .iter()
            .filter_map(|c| c["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(message["content"], text);
    });
}

#[test]
fn g03_a_bad_schema_is_400_in_bounded_time_and_the_next_request_is_served() {
    run(async {
        let long: Value = (0..20_000)
            .map(|i| (format!("p{i}"), json!({ "type": "string", "pattern": "(" })))
            .collect::<serde_json::Map<_, _>>()
            .into();
        for schema in [
            json!({ "type": "object", "properties": { "foo": "bar" } }),
            json!({ "$ref": "#/nowhere" }),
            json!({ "type": "string", "pattern": "(" }),
            json!({ "type": "object", "properties": long }),
            json!(5),
        ] {
            let form = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
            let start = Instant::now();
            let answer = post(CHAT, ask("x", json!({ "response_format": form, "max_tokens": 5 }))).await;
            let text = &answer.body[..answer.body.len().min(300)];
            assert_eq!(answer.status, 400, "{text}");
            assert!(start.elapsed() < Duration::from_secs(5), "{text}");
        }
        let lark = json!({ "response_format": { "type": "lark", "grammar": "start: nowhere" } });
        assert_eq!(post(CHAT, ask("x", lark)).await.status, 400);
        assert_eq!(post(CHAT, ask("What is the capital of Peru?", json!({}))).await.status, 200);
    });
}

#[test]
fn k03_an_oversize_prompt_is_refused_and_a_limit_is_clamped_and_told() {
    run(async {
        let long = "dog ".repeat(600);
        for stream in [false, true] {
            let answer = post(CHAT, ask(&long, json!({ "stream": stream }))).await;
            let error = &answer.json()["error"];
            assert_eq!((answer.status.as_u16(), &error["type"]), (400, &json!("context_length_exceeded")));
            assert_eq!(error["context_tokens"], 512);
            assert!(error["prompt_tokens"].as_u64().unwrap() > 512, "{error}");
        }
        let reply = post(CHAT, ask(STORY, json!({ "max_tokens": 5000, "ignore_eos": true }))).await.json();
        let room = 512 - reply["usage"]["prompt_tokens"].as_u64().unwrap();
        assert_eq!(
            reply["choices"][0]["lapidary"]["max_tokens"], room,
            "{}",
            reply["choices"][0]["lapidary"]
        );
        assert_eq!(reply["choices"][0]["finish_reason"], "length");
        assert_eq!(reply["usage"]["completion_tokens"], room);
    });
}

#[test]
fn k04_no_part_of_a_stop_string_reaches_the_client_in_either_mode() {
    run(async {
        let whole =
            post(CHAT, ask(STORY, json!({}))).await.json()["choices"][0]["message"]["content"].clone();
        let whole = whole.as_str().unwrap();
        for at in [5, 17, 40] {
            let stop = &whole[at..at + 7];
            let expected = &whole[..whole.find(stop).unwrap()];
            let more = json!({ "stop": [stop, "never said", &format!("{stop}!")] });
            let choice = post(CHAT, ask(STORY, more.clone())).await.json()["choices"][0].clone();
            assert_eq!(
                (choice["message"]["content"].as_str(), &choice["finish_reason"]),
                (Some(expected), &json!("stop"))
            );
            let mut body = ask(STORY, more);
            body["stream"] = json!(true);
            let stream = post(CHAT, body).await;
            let text: String = chunks(&stream.body)
                .iter()
                .filter_map(|c| c["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
                .collect();
            assert_eq!(text, expected);
        }
    });
}

#[test]
fn k05_ids_out_of_range_are_400_and_the_next_request_is_served() {
    run(async {
        let vocab = service().model_info().vocab as i64;
        for id in [-1, vocab, 1 << 31, (1 << 32) + 5, i64::MAX] {
            for more in [json!({ "stop_token_ids": [id] }), json!({ "logit_bias": { id.to_string(): 1 } })] {
                let answer = post(CHAT, ask("x", more.clone())).await;
                assert_eq!(answer.status, 400, "{more}: {}", answer.body);
            }
            assert_eq!(post("/v1/completions", json!({ "prompt": [2, id] })).await.status, 400, "{id}");
            assert_eq!(post("/detokenize", json!({ "tokens": [id] })).await.status, 400, "{id}");
        }
        assert_eq!(post("/v1/completions", json!({ "prompt": [2, 700], "max_tokens": 2 })).await.status, 200);
    });
}

#[test]
fn k07_seeds_reproduce_each_choice_and_the_prompt_counts_once() {
    run(async {
        let stories = |more: Value| async move {
            let mut body = ask(STORY, json!({ "temperature": 1, "max_tokens": 40 }));
            for (name, value) in more.as_object().unwrap() {
                body[name] = value.clone();
            }
            let reply = post(CHAT, body).await.json();
            let texts: Vec<String> = reply["choices"]
                .as_array()
                .unwrap()
                .iter()
                .map(|choice| choice["message"]["content"].as_str().unwrap().to_owned())
                .collect();
            (texts, reply["usage"].clone())
        };
        let (one, usage) = stories(json!({ "seed": 7 })).await;
        assert_eq!(stories(json!({ "seed": 7 })).await.0, one);
        assert_ne!(stories(json!({ "seed": 8 })).await.0, one);
        let (three, of_three) = stories(json!({ "seed": 7, "n": 3 })).await;
        assert_eq!(stories(json!({ "seed": 7, "n": 3 })).await.0, three);
        assert_eq!((three.len(), &three[0]), (3, &one[0]));
        assert!(three[0] != three[1] && three[1] != three[2]);
        assert_eq!(of_three["prompt_tokens"], usage["prompt_tokens"]);
    });
}

#[test]
fn k08_usage_is_the_same_after_a_cache_hit_in_both_modes() {
    run(async {
        let text = format!("{} What is the capital of Kenya?", "The dog sat by the valley. ".repeat(20));
        let more = json!({ "reasoning_effort": "high", "max_tokens": 60 });
        post(CHAT, ask(&text, more.clone())).await;
        let whole = post(CHAT, ask(&text, more.clone())).await.json()["usage"].clone();
        let mut body = ask(&text, more);
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let stream = post(CHAT, body).await;
        assert_eq!(chunks(&stream.body).last().unwrap()["usage"], whole);
        assert!(whole["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{whole}");
    });
}

#[test]
fn k08_a_reply_that_its_client_left_is_counted_as_far_as_it_was_made() {
    run(async {
        use axum::body::Body;
        use http_body_util::BodyExt;
        let app = app();
        let mut body = ask(STORY, json!({ "max_tokens": 400, "ignore_eos": true, "stream": true }));
        body["n"] = json!(2);
        let request = axum::http::Request::post(CHAT).header("content-type", "application/json");
        let request = request.body(Body::from(body.to_string())).expect("a plain request");
        let mut reply = router(app.clone()).oneshot(request).await.unwrap().into_body();
        // Some frames, then nobody reads any more.
        let mut text = String::new();
        while text.matches("\"content\":\"").count() < 8 {
            text += std::str::from_utf8(&reply.frame().await.unwrap().unwrap().into_data().unwrap()).unwrap();
        }
        drop(reply);
        let page =
            router(app).oneshot(axum::http::Request::get("/metrics").body(Body::empty()).unwrap()).await;
        let page = page.unwrap().into_body().collect().await.unwrap().to_bytes();
        let page = String::from_utf8(page.to_vec()).unwrap();
        let of = |name: &str| -> f64 {
            let line = page.lines().find(|line| line.starts_with(&format!("lapidary_{name}{{"))).expect(name);
            line.rsplit(' ').next().unwrap().parse().unwrap()
        };
        assert!(of("prompt_tokens_total") > 5.0, "{page}");
        assert!((6.0..800.0).contains(&of("generation_tokens_total")), "{page}");
    });
}

#[test]
fn top_logprobs_are_the_likeliest_and_agree_with_the_choice() {
    run(async {
        let reply =
            post(CHAT, ask("What is the capital of Kenya?", json!({ "logprobs": true, "top_logprobs": 20 })))
                .await
                .json();
        let content = reply["choices"][0]["logprobs"]["content"].clone();
        let tokens = content.as_array().unwrap();
        let spelled: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
        assert_eq!(reply["choices"][0]["message"]["content"], spelled);
        for token in tokens {
            let top: Vec<f64> = token["top_logprobs"]
                .as_array()
                .unwrap()
                .iter()
                .map(|t| t["logprob"].as_f64().unwrap())
                .collect();
            assert_eq!(top.len(), 20);
            assert!(top.is_sorted_by(|a, b| a >= b), "{top:?}");
            assert_eq!(token["logprob"].as_f64(), Some(top[0]), "greedy takes the likeliest");
            // Twenty of all tokens: their sum is at most one, within float32's rounding of each term.
            assert!(top.iter().map(|p| p.exp()).sum::<f64>() <= 1.0 + 20.0 * f64::from(f32::EPSILON));
        }
    });
}
