//! `/v1/completions` on the wire, over a scripted model.

use crate::common::*;
use lapidary::capture::{Captured, Values};
use lapidary::service::{Bos, CompletionPrompt, Markers, PromptToken, ServiceEvent, TopLogprob};
use serde_json::{Value, json};

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

fn of_prompt(text: &str, id: u32, logprob: Option<f32>) -> PromptToken {
    let bytes = text.as_bytes().to_vec();
    let best = TopLogprob { token: 9, text: "~".into(), bytes: b"~".to_vec(), logprob: -0.25 };
    let top = if logprob.is_some() { vec![best] } else { Vec::new() };
    PromptToken { token: id, text: text.to_owned(), bytes, logprob, top }
}

/// A prompt in two parts, an answer, activations.
fn looked_at() -> Plan {
    let prompt = |tokens| ServiceEvent::Prompt { tokens };
    let hidden =
        Captured { name: "hidden.3".into(), shape: vec![1, 2], values: Values::F32(vec![1.0, -2.0]) };
    let positions = Captured { name: "positions".into(), shape: vec![1], values: Values::I64(vec![2]) };
    Plan::Say(vec![vec![
        started(3, 0),
        prompt(vec![of_prompt("<bos>", 2, None)]),
        prompt(vec![of_prompt("Up", 7, Some(-3.5)), of_prompt("on", 8, Some(-0.5))]),
        token("ce", 5, -1.0),
        ServiceEvent::Captured { tensors: vec![positions, hidden] },
        finished(stop(), 1, 0),
    ]])
}

#[test]
fn an_echo_with_logprobs_tells_the_prompts_tokens_before_the_answers() {
    run(async {
        let expected = json!({
            "tokens": ["<bos>", "Up", "on", "ce"],
            "token_logprobs": [null, -3.5, -0.5, -1.0],
            "top_logprobs": [null, { "~": -0.25 }, { "~": -0.25 }, { "ce": -1.0, "~": -8.5 }],
            "text_offset": [0, 0, 2, 4],
        });
        let body =
            json!({ "prompt": "Upon", "echo": true, "logprobs": 1, "max_tokens": 1, "prompt_logprobs": 0 });
        let server = Server::new([looked_at(), looked_at()]);
        let whole = server.post("/v1/completions", &body).await.json();
        let choice = &whole["choices"][0];
        assert_eq!((&choice["text"], &choice["logprobs"]), (&json!("Uponce"), &expected));
        let first = &choice["prompt_logprobs"][1];
        assert_eq!((&first["7"]["logprob"], &first["9"]["rank"]), (&json!(-3.5), &json!(1)));
        assert_eq!(choice["prompt_logprobs"][0], json!(null));
        let request = server.model.completions.lock().unwrap().remove(0);
        assert_eq!((request.generation.prompt_logprobs, request.generation.logprobs), (Some(1), Some(1)));

        let mut body = body;
        body["stream"] = json!(true);
        let stream = server.post("/v1/completions", &body).await;
        let (mut text, mut lists) = (String::new(), [const { Vec::<Value>::new() }; 4]);
        for chunk in chunks(&stream.body) {
            let choice = &chunk["choices"][0];
            text += choice["text"].as_str().unwrap();
            for (list, name) in
                lists.iter_mut().zip(["tokens", "token_logprobs", "top_logprobs", "text_offset"])
            {
                list.extend(choice["logprobs"][name].as_array().into_iter().flatten().cloned());
            }
        }
        assert_eq!(text, "Uponce");
        assert_eq!(json!(lists[0]), expected["tokens"]);
        assert_eq!(json!(lists[1]), expected["token_logprobs"]);
        assert_eq!(json!(lists[2]), expected["top_logprobs"]);
        assert_eq!(json!(lists[3]), expected["text_offset"]);
    });
}

#[test]
fn steering_and_captures_reach_the_service_and_activations_come_back_whole_and_streamed() {
    run(async {
        let body = |stream: bool| {
            json!({
                "prompt": "Upon", "max_tokens": 1, "stream": stream,
                "steering": [
                    { "vector": "owls", "mode": "clamp", "to": 2, "layers": "3-9", "gate": 0.5 },
                    { "vector": { "1": [0.5, 0.25] }, "strength": -2 },
                ],
                "capture": { "layers": "3", "positions": "last" },
            })
        };
        let server = Server::new([looked_at(), looked_at()]);
        let whole = server.post("/v1/completions", &body(false)).await;
        let capture = whole.json()["choices"][0]["capture"].clone();
        let tensor = json!({ "dtype": "F32", "shape": [1, 2], "data": "AACAPwAAAMA=" });
        assert_eq!(capture, json!({ "positions": [2], "tensors": { "hidden.3": tensor } }), "{}", whole.body);
        assert_eq!(whole.header("x-lapidary-ignored"), "");
        let generation = server.model.completions.lock().unwrap().remove(0).generation;
        let specs = &generation.steering;
        assert_eq!((specs[0].vector.as_str(), specs[0].to, specs[0].gate), ("owls", Some(2.0), Some(0.5)));
        assert_eq!((specs[1].strength, &specs[1].vector), (-2.0, &generation.vectors[0].name));
        assert_eq!(generation.vectors[0].directions[&1], [0.5, 0.25]);
        assert!(generation.capture.is_some());
        let stream = server.post("/v1/completions", &body(true)).await;
        let found: Vec<Value> =
            chunks(&stream.body).iter().filter_map(|c| c["choices"][0].get("capture").cloned()).collect();
        assert_eq!(found, [capture]);
    });
}

#[test]
fn what_is_not_here_is_refused_by_name() {
    run(async {
        for (fields, param) in [
            (json!({ "prompt": "a", "suffix": "b" }), "suffix"),
            (json!({ "prompt": "a", "best_of": 3 }), "best_of"),
            (json!({ "prompt": "a", "logprobs": 21 }), "logprobs"),
            (json!({ "prompt": "a", "echo": true, "logprobs": 1, "n": 2, "stream": true }), "n"),
            (json!({ "prompt": "a", "prompt_logprobs": 1, "n": 2, "stream": true }), "n"),
            (json!({ "prompt": "a", "steering": 3 }), "steering"),
            (json!({ "prompt": "a", "steering": { "vector": "a", "mode": "twist" } }), "steering.mode"),
            (json!({ "prompt": "a", "steering": [{ "vector": { "1": [0, 0] } }] }), "steering[0].vector"),
            (json!({ "prompt": "a", "capture": { "layers": "x" } }), "capture.layers"),
            (json!({ "prompt": "a", "capture": { "everything": true } }), "capture.everything"),
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
