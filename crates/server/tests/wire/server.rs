//! What holds for all routes: keys, names, unknown fields, limits, refusals, probes.

use std::time::Duration;

use crate::common::*;
use axum::body::Body;
use axum::http::Request;
use lapidary::service::RequestError;
use lapidary_server::{App, Keys, ServerOptions};
use serde_json::{Value, json};

fn hello() -> Value {
    json!({ "messages": [{ "role": "user", "content": "hello" }] })
}

fn plain() -> Plan {
    Plan::Say(vec![vec![started(7, 0), text("Hi"), finished(stop(), 1, 0)]])
}

#[test]
fn unknown_fields_are_named_or_refused() {
    run(async {
        let mut body = hello();
        body["frobnicate"] = json!(1);
        body["messages"][0]["mood"] = json!("good");
        body["store"] = json!(true);
        let server = Server::new([plain()]);
        let answer = server.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("x-lapidary-ignored"), "messages[0].mood, frobnicate, store");
        let server = Server::with(ServerOptions { strict: true, ..ServerOptions::default() }, []);
        let error = server.post("/v1/chat/completions", &body).await;
        assert_eq!(error.status, 400);
        assert_eq!(error.json()["error"]["code"], "unknown_field");
        let mut store = hello();
        store["store"] = json!(true);
        assert_eq!(server.post("/v1/chat/completions", &store).await.json()["error"]["param"], "store");
    });
}

#[test]
fn models_go_by_their_names() {
    run(async {
        let server = Server::new([plain()]);
        let list = server.get("/v1/models").await.json();
        assert_eq!(list["data"][1]["id"], "org/m");
        assert_eq!(list["data"][0]["max_model_len"], 512);
        assert_eq!(server.get("/v1/models/org/m").await.json()["id"], "org/m");
        assert_eq!(server.get("/v1/models/gpt").await.status, 404);
        let mut body = hello();
        body["model"] = json!("gpt");
        let error = server.post("/v1/chat/completions", &body).await;
        assert_eq!((error.status.as_u16(), &error.json()["error"]["code"]), (404, &json!("model_not_found")));
        body["model"] = json!("org/m");
        assert_eq!(server.post("/v1/chat/completions", &body).await.json()["model"], "org/m");
    });
}

#[test]
fn keys_guard_the_api_and_leave_probes_open() {
    run(async {
        let options = ServerOptions { keys: Keys::from_lines("secret"), ..ServerOptions::default() };
        let server = Server::with(options, [plain()]);
        for path in ["/v1/models", "/v1/nothing"] {
            let refused = server.get(path).await;
            assert_eq!(refused.status, 401, "{path}");
            assert_eq!(refused.header("www-authenticate"), "Bearer");
        }
        for path in ["/health", "/health/live", "/metrics"] {
            assert_eq!(server.get(path).await.status, 200, "{path}");
        }
        let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
        let request = request.header("authorization", "Bearer secret");
        let answer = server.send(request.body(Body::from(hello().to_string())).unwrap()).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
    });
}

#[test]
fn errors_have_the_form_of_their_api_and_a_request_id() {
    run(async {
        let server = Server::new([]);
        let not_json = server.post_text("/v1/chat/completions", "{").await;
        assert_eq!(not_json.status, 400);
        assert_eq!(not_json.json()["error"]["type"], "invalid_request_error");
        let none = server.get("/v1/nothing").await;
        assert_eq!((none.status.as_u16(), &none.json()["error"]["code"]), (404, &json!("not_found")));
        let method = server.get("/v1/chat/completions").await;
        assert_eq!(
            (method.status.as_u16(), &method.json()["error"]["code"]),
            (405, &json!("method_not_allowed"))
        );
        assert_eq!(method.header("allow"), "POST");
        let plain_text =
            Request::post("/v1/chat/completions").header("x-request-id", "mine-1").body(Body::from("{}"));
        let media = server.send(plain_text.unwrap()).await;
        assert_eq!(media.status, 415);
        assert_eq!(media.header("x-request-id"), "mine-1");
        assert_eq!(
            server.post("/v1/embeddings", &json!({ "input": "x" })).await.json()["error"]["code"],
            "unsupported"
        );
    });
}

#[test]
fn a_body_over_the_limit_is_413() {
    run(async {
        let server = Server::with(ServerOptions { body_limit: 1000, ..ServerOptions::default() }, [plain()]);
        let mut body = hello();
        body["messages"][0]["content"] = "x".repeat(1000).into();
        let answer = server.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 413);
        assert!(answer.json()["error"]["message"].as_str().unwrap().contains("1000"));
        assert_eq!(server.post("/v1/chat/completions", &hello()).await.status, 200);
    });
}

#[test]
fn refusals_map_to_their_status() {
    run(async {
        let cases = [
            (RequestError::Overloaded { retry_after: Duration::from_millis(2500) }, 429, "queue_full", "3"),
            (RequestError::ShuttingDown, 503, "unavailable", "5"),
            (RequestError::OutOfMemory("x".into()), 503, "out_of_memory", "1"),
            (RequestError::TimedOut { limit: Duration::from_secs(1) }, 408, "timeout", ""),
            (RequestError::Internal("x".into()), 500, "internal_error", ""),
            (RequestError::bad("logit_bias", "no such token"), 400, "invalid_value", ""),
            (RequestError::Unsupported { what: "the schema keyword x".into() }, 400, "unsupported", ""),
        ];
        for (error, status, code, retry) in cases {
            let server = Server::new([Plan::Refuse(error.clone()), plain()]);
            let answer = server.post("/v1/chat/completions", &hello()).await;
            assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (status, retry), "{error}");
            assert_eq!(answer.json()["error"]["code"], code);
            assert_eq!(
                server.post("/v1/chat/completions", &hello()).await.status,
                200,
                "the next one is served"
            );
        }
    });
}

#[test]
fn a_panic_ends_one_request() {
    run(async {
        let server = Server::new([Plan::Panic, plain()]);
        let answer = server.post("/v1/chat/completions", &hello()).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.json()["error"]["code"]),
            (500, &json!("internal_error"))
        );
        assert_eq!(server.post("/v1/chat/completions", &hello()).await.status, 200);
    });
}

#[test]
fn probes_follow_the_life_of_the_server() {
    run(async {
        let app = App::new(ServerOptions::default());
        let model = Scripted::new([]);
        let server = Server { model: model.clone(), app };
        assert_eq!(server.get("/health/live").await.status, 200);
        assert_eq!(server.get("/health").await.json()["status"], "loading");
        let early = server.post("/v1/chat/completions", &hello()).await;
        assert_eq!((early.status.as_u16(), early.header("retry-after")), (503, "5"));
        server.app.serve(model);
        assert_eq!(server.get("/health/ready").await.status, 200);
        server.app.begin_drain();
        assert_eq!(server.get("/health/live").await.status, 200);
        assert_eq!(server.get("/health/ready").await.json()["status"], "draining");
        assert_eq!(server.post("/v1/chat/completions", &hello()).await.status, 503);
    });
}

#[test]
fn cross_origin_reading_is_off_unless_asked_for() {
    run(async {
        let ask = |origin: &str| {
            let request = Request::get("/v1/models").header("origin", origin);
            request.body(Body::empty()).unwrap()
        };
        let allowed = "access-control-allow-origin";
        let server = Server::new([]);
        assert_eq!(server.send(ask("https://a.example")).await.header(allowed), "");
        let options = ServerOptions { cors: vec!["https://a.example".into()], ..ServerOptions::default() };
        let server = Server::with(options, []);
        assert_eq!(server.send(ask("https://a.example")).await.header(allowed), "https://a.example");
        assert_eq!(server.send(ask("https://b.example")).await.header(allowed), "");
        let preflight = Request::builder()
            .method("OPTIONS")
            .uri("/v1/chat/completions")
            .header("origin", "https://a.example");
        let answer = server.send(preflight.body(Body::empty()).unwrap()).await;
        assert_eq!((answer.status.as_u16(), answer.header(allowed)), (204, "https://a.example"));
        assert!(answer.header("access-control-allow-headers").contains("authorization"));
    });
}

#[test]
fn text_to_ids_and_back() {
    run(async {
        let server = Server::new([]);
        let ids = server.post("/tokenize", &json!({ "prompt": "ab" })).await.json();
        assert_eq!(ids, json!({ "count": 2, "max_model_len": 512, "tokens": [97, 98] }));
        let chat = server.post("/tokenize", &hello()).await.json();
        assert_eq!((&chat["count"], &chat["prompt"]), (&json!(5), &json!("hello")));
        assert_eq!(server.post("/detokenize", &json!({ "tokens": [97, 98] })).await.json()["prompt"], "ab");
        for wrong in [json!({ "tokens": [-1] }), json!({ "tokens": [300] }), json!({ "tokens": ["a"] })] {
            assert_eq!(server.post("/detokenize", &wrong).await.status, 400, "{wrong}");
        }
        assert_eq!(server.post("/tokenize", &json!({})).await.json()["error"]["param"], "prompt");
    });
}

#[test]
fn metrics_have_the_names_that_gateways_read() {
    run(async {
        let server = Server::new([plain()]);
        server.post("/v1/chat/completions", &hello()).await;
        let text = server.get("/metrics").await.body;
        for name in [
            "vllm:num_requests_running{model_name=\"m\"} 0",
            "vllm:num_requests_waiting{model_name=\"m\"} 0",
            "vllm:kv_cache_usage_perc{model_name=\"m\"} 0",
            "vllm:cache_config_info{model_name=\"m\",block_size=\"32\",num_gpu_blocks=\"0\"} 1",
            "vllm:inter_token_latency_seconds_count{model_name=\"m\"} 0",
            "vllm:time_to_first_token_seconds_count{model_name=\"m\"} 1",
            "vllm:prompt_tokens_total{model_name=\"m\"} 7",
            "vllm:generation_tokens_total{model_name=\"m\"} 1",
            "vllm:request_success_total{model_name=\"m\",finished_reason=\"stop\"} 1",
            "lapidary_http_requests_total{model_name=\"m\",method=\"POST\",route=\"/v1/chat/completions\",status=\"200\"} 1",
        ] {
            assert!(text.contains(&format!("{name}\n")), "{name} is not in\n{text}");
        }
    });
}
