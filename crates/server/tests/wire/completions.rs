//! `/v1/completions` on the wire, over a scripted model.

use crate::common::*;
use lapidary::service::{Bos, CompletionPrompt, Markers};
use serde_json::json;

fn plain() -> Plan {
    Plan::Say(vec![vec![started(7, 3), token("on", 4, -0.5), token("ce", 5, -1.0), finished(stop(), 2, 0)]])
}

#[test]
fn a_whole_reply_and_a_stream() {
    run(async {
        let server = Server::new([plain(), plain()]);
        let body = json!({ "model": "m", "prompt": "Up", "logprobs": 2 });
        let whole = server.post("/v1/completions", &body).await;
        snapshot("completion_whole.json", &whole.body);
        let body = json!({ "prompt": "Up", "logprobs": 2, "stream": true, "stream_options": { "include_usage": true } });
        let stream = server.post("/v1/completions", &body).await;
        snapshot("completion_stream.txt", &stream.body);
        assert_eq!(chunks(&stream.body).last().unwrap()["usage"], whole.json()["usage"]);
        let request = server.model.completions.lock().unwrap().remove(0);
        assert_eq!(request.prompt, CompletionPrompt::Text("Up".into()));
        assert_eq!((request.bos, request.markers), (Bos::One, Markers::Parse));
        assert_eq!(request.generation.max_tokens, Some(16), "OpenAI's default");
    });
}

#[test]
fn several_prompts_with_several_choices_are_numbered_prompt_by_prompt() {
    run(async {
        let say = |t: &str| Plan::Say(vec![vec![started(7, 3), text(t), finished(stop(), 2, 0)]]);
        let server = Server::new([say("a"), say("b"), say("a"), say("b")]);
        let body = json!({ "prompt": ["P", "Q"], "n": 2, "echo": true });
        let whole = server.post("/v1/completions", &body).await.json();
        let texts: Vec<&str> =
            whole["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
        assert_eq!(texts, ["Pa", "Pa", "Qb", "Qb"]);
        assert_eq!(whole["usage"]["prompt_tokens"], 14);
        assert_eq!(whole["usage"]["completion_tokens"], 8);
        let mut body = body.clone();
        body["stream"] = json!(true);
        let stream = server.post("/v1/completions", &body).await;
        let mut texts = vec![String::new(); 4];
        for chunk in chunks(&stream.body) {
            let choice = &chunk["choices"][0];
            texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
        }
        assert_eq!(texts, ["Pa", "Pa", "Qb", "Qb"]);
    });
}

#[test]
fn ids_as_a_prompt_and_without_bos() {
    run(async {
        let server = Server::new([plain()]);
        let body = json!({ "prompt": [80, 81], "add_special_tokens": false, "echo": true });
        assert!(
            server.post("/v1/completions", &body).await.json()["choices"][0]["text"]
                .as_str()
                .unwrap()
                .starts_with("PQ")
        );
        let request = server.model.completions.lock().unwrap().remove(0);
        assert_eq!(request.prompt, CompletionPrompt::Ids(vec![80, 81]));
        assert_eq!(request.bos, Bos::AsGiven);
    });
}

#[test]
fn what_is_not_here_is_refused_by_name() {
    run(async {
        for (fields, param) in [
            (json!({ "prompt": "a", "suffix": "b" }), "suffix"),
            (json!({ "prompt": "a", "best_of": 3 }), "best_of"),
            (json!({ "prompt": "a", "logprobs": 21 }), "logprobs"),
            (json!({ "prompt": "a", "echo": true, "logprobs": 1 }), "echo"),
            (json!({ "prompt": "a", "max_tokens": 0 }), "max_tokens"),
            (json!({ "prompt": [] }), "prompt"),
            (json!({ "prompt": [1, "a"] }), "prompt"),
            (json!({ "prompt": ["a", "b"], "n": 64 }), "prompt"),
        ] {
            let answer = Server::new([]).post("/v1/completions", &fields).await;
            assert_eq!(answer.status, 400, "{fields}");
            assert_eq!(answer.json()["error"]["param"], param, "{fields}: {}", answer.body);
        }
    });
}
