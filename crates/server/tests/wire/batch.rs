//! Batches of lines over a scripted model.

use std::collections::BTreeMap;
use std::fs;

use crate::common::*;
use lapidary_server::batch::{self, BatchError, Tally};
use serde_json::{Value, json};

fn line(id: &str, url: &str, body: Value) -> String {
    format!("{}\n", json!({ "custom_id": id, "method": "POST", "url": url, "body": body }))
}

fn chat(id: &str) -> String {
    line(id, "/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "hello" }] }))
}

fn plain() -> Plan {
    Plan::Say(vec![vec![started(7, 0), text("Hi"), finished(stop(), 1, 0)]])
}

fn replies(path: &std::path::Path) -> BTreeMap<String, Value> {
    let text = fs::read_to_string(path).unwrap();
    let parse = |line: &str| -> Value { serde_json::from_str(line).unwrap() };
    let all: Vec<Value> = text.lines().map(parse).collect();
    let by_id: BTreeMap<String, Value> =
        all.iter().map(|reply| (reply["custom_id"].as_str().unwrap().to_owned(), reply.clone())).collect();
    assert_eq!(by_id.len(), all.len(), "each id once: {text}");
    by_id
}

#[test]
fn every_line_is_answered_once_also_after_an_interruption() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
        let bad = line("bad", "/v1/chat/completions", json!({ "messages": [] }));
        fs::write(&input, [chat("a"), bad, chat("b"), "\n".into(), chat("c")].concat()).unwrap();
        let server = Server::new([plain(), plain(), plain()]);
        let mut seen = Vec::new();
        let tally = batch::run(&server.app, &input, &output, 2, |done, total| seen.push((done, total)))
            .await
            .unwrap();
        assert_eq!(tally, Tally { answered: 4, failed: 1, skipped: 0 });
        assert_eq!(seen.last(), Some(&(4, 4)));
        let all = replies(&output);
        assert_eq!(all["a"]["response"]["body"]["choices"][0]["message"]["content"], "Hi");
        assert_eq!(all["bad"]["response"]["status_code"], 400);

        // The last line is cut, as if the power had gone.
        let text = fs::read_to_string(&output).unwrap();
        let cut = text.trim_end().rfind('\n').unwrap() + 20;
        let lost = text
            .lines()
            .last()
            .map(|l| serde_json::from_str::<Value>(l).unwrap()["custom_id"].clone())
            .unwrap();
        fs::write(&output, &text[..cut]).unwrap();
        let server = Server::new([plain()]);
        let tally = batch::run(&server.app, &input, &output, 2, |_, _| {}).await.unwrap();
        assert_eq!((tally.answered, tally.skipped), (1, 3), "only {lost} runs again");
        assert_eq!(replies(&output).len(), 4);
        let tally = batch::run(&Server::new([]).app, &input, &output, 2, |_, _| {}).await.unwrap();
        assert_eq!(tally, Tally { answered: 0, failed: 0, skipped: 4 });
    });
}

#[test]
fn mistakes_are_named_before_anything_runs() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
        let streamed = json!({ "messages": [], "stream": true });
        for (lines, at, words) in [
            ([chat("a"), chat("a")].concat(), 2, "line 1"),
            ([chat("a"), "{".into()].concat(), 2, "EOF"),
            (line("a", "/v1/embeddings", json!({})), 1, "/v1/chat/completions"),
            (line("a", "/v1/chat/completions", streamed), 1, "stream"),
        ] {
            fs::write(&input, lines).unwrap();
            let error = batch::run(&Server::new([]).app, &input, &output, 2, |_, _| {}).await.unwrap_err();
            assert!(matches!(error, BatchError::Line { line, .. } if line == at), "{error}");
            assert!(error.to_string().contains(words), "{error}");
            assert!(!output.exists());
        }
        fs::write(&input, chat("a")).unwrap();
        fs::write(&output, "something else\n").unwrap();
        let error = batch::run(&Server::new([]).app, &input, &output, 2, |_, _| {}).await.unwrap_err();
        assert!(matches!(error, BatchError::Output { line: 1, .. }), "{error}");
        assert_eq!(fs::read_to_string(&output).unwrap(), "something else\n");
    });
}
