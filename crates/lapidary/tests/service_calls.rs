//! Tool calls over a scripted engine: free, forced, cut and garbled ones.

#[allow(dead_code, reason = "each file uses some of it")]
#[path = "common/said.rs"]
mod said;

use lapidary::service::{FinishKind, ParallelCalls, ServiceEvent, ToolChoice};
use lapidary_text::Specials;
use said::{CALL, STOP, ask, bad_field, ids, refusal, run, says, says_text, thinking, tokenizer, with_tools};
use serde_json::{Value, json};

#[test]
fn f05_f06_calls_are_the_same_in_every_cut_of_the_text() {
    let text = format!("I look.{CALL}<|tool_call>call:now{{}}<tool_call|>");
    let tokenizer = tokenizer();
    let expected =
        ("I look.", vec![("get_weather", r#"{"city":"Paris, \"FR\" {x}","days":3}"#), ("now", "{}")]);
    // Tokens are cut differently when the text before a marker is encoded in two pieces.
    for at in text.char_indices().map(|(at, _)| at).step_by(3) {
        let inside_marker = |at: usize| {
            ["<|tool_call>", "<tool_call|>", "<|\"|>"]
                .iter()
                .any(|marker| text.match_indices(marker).any(|(start, m)| at > start && at < start + m.len()))
        };
        if inside_marker(at) {
            continue;
        }
        let mut reply = tokenizer.encode(&text[..at], Specials::Parse);
        reply.extend(tokenizer.encode(&text[at..], Specials::Parse));
        reply.extend(tokenizer.specials().tool_response_open);
        let (service, _) = says(vec![reply]);
        let (whole, events) = run(&service, with_tools(ask("q")));
        assert_eq!(whole.text, expected.0, "{at}");
        let calls: Vec<(&str, &str)> =
            whole.calls.iter().map(|(_, c)| (c.name.as_str(), c.arguments.as_str())).collect();
        assert_eq!(calls, expected.1, "{at}");
        assert_eq!(whole.reason, Some(FinishKind::ToolCalls));
        // Each call begins before its arguments, with an index, a name and an id of its own.
        let mut open = Vec::new();
        for event in &events {
            match event {
                ServiceEvent::CallBegin { index, id, name } => {
                    assert_eq!(*index, open.len());
                    assert!(id.starts_with("call_") && !open.contains(id) && !name.is_empty());
                    open.push(id.clone());
                }
                ServiceEvent::CallArguments { index, .. } => assert_eq!(*index + 1, open.len()),
                _ => {}
            }
        }
    }
}

#[test]
fn f07_without_parallel_calls_generation_ends_after_the_first() {
    let mut reply = String::new();
    (0..9).for_each(|_| reply += "<|tool_call>call:now{}<tool_call|>");
    reply += "<|tool_response>";
    let service = says_text(&reply);
    let mut request = with_tools(ask("q"));
    let (many, _) = run(&service, request.clone());
    assert_eq!(many.calls.len(), 9);
    let mut known: Vec<&str> = many.calls.iter().map(|(id, _)| id.as_str()).collect();
    known.dedup();
    assert_eq!(known.len(), 9);
    request.parallel_tool_calls = ParallelCalls::One;
    let (one, _) = run(&service, request);
    assert_eq!(one.calls.len(), 1);
    assert_eq!(one.reason, Some(FinishKind::ToolCalls));
    assert_eq!(one.usage.completion_tokens, ids("<|tool_call>call:now{}<tool_call|>").len());
}

#[test]
fn f08_a_call_cut_anywhere_is_text_and_never_an_error() {
    let all = ids(CALL);
    for length in 1..all.len() {
        let (service, _) = says(vec![all[..length].to_vec()]);
        let (whole, _) = run(&service, with_tools(ask("q")));
        assert_eq!(whole.calls.len(), 0, "{length}");
        assert_eq!(whole.reason, Some(FinishKind::Length), "{length}");
        assert_eq!(whole.unparsed_calls, 1);
        if length > 1 {
            assert!(whole.text.starts_with("call"), "{length}: {:?}", whole.text);
        }
    }
    for garbage in [
        "<|tool_call>call:get_weather{city:<tool_call|> tail<turn|>",
        "<|tool_call>nonsense<tool_call|><turn|>",
    ] {
        let (whole, _) = run(&says_text(garbage), with_tools(ask("q")));
        assert_eq!((whole.calls.len(), whole.unparsed_calls, whole.reason), (0, 1, Some(STOP)));
        assert!(!whole.text.is_empty());
    }
}

#[test]
fn tool_choice_forces_or_forbids() {
    let text = format!("Let me talk a lot.{CALL}<turn|>");
    // Required: the script's text is masked away, the call comes.
    let (service, log) = says(vec![ids(&text)]);
    let mut request = with_tools(ask("q"));
    request.tool_choice = ToolChoice::Required;
    let (whole, _) = run(&service, request.clone());
    assert_eq!(whole.text, "");
    assert_eq!(whole.calls[0].1.name, "get_weather");
    let arguments: Value = serde_json::from_str(&whole.calls[0].1.arguments).unwrap();
    assert!(arguments["city"].is_string());
    assert_eq!(whole.reason, Some(FinishKind::ToolCalls));
    // Named: another tool than the model would like.
    request.tool_choice = ToolChoice::Named("now".to_owned());
    let (whole, _) = run(&service, request.clone());
    assert_eq!((whole.calls[0].1.name.as_str(), whole.calls.len()), ("now", 1));
    // None: the marker is never chosen, and a call spelled out is text.
    request.tool_choice = ToolChoice::None;
    let open = tokenizer().specials().tool_call_open.unwrap();
    let (whole, _) = run(&says_text("call:now{}<turn|>"), request.clone());
    assert_eq!((whole.calls.len(), whole.text.as_str()), (0, "call:now{}"));
    run(&service, request.clone());
    assert!(log.all().last().unwrap().sampling.suppress.contains(&open));
    // What cannot be chosen is refused.
    request.tool_choice = ToolChoice::Named("other".to_owned());
    assert_eq!(bad_field(refusal(&service, request.clone())), "tool_choice");
    request.input.tools.clear();
    request.tool_choice = ToolChoice::Required;
    assert_eq!(bad_field(refusal(&service, request)), "tool_choice");
}

#[test]
fn f05_a_call_that_a_grammar_holds_is_told_while_it_is_written() {
    let said = ids(CALL);
    let mut strict = with_tools(ask("q"));
    strict.input.tools[0]["function"]["strict"] = json!(true);
    let mut required = with_tools(ask("q"));
    required.tool_choice = ToolChoice::Required;
    for request in [strict, required] {
        let mut reply = said.clone();
        reply.extend(tokenizer().specials().tool_response_open);
        let (service, _) = says(vec![reply]);
        let (whole, events) = run(&service, request.clone());
        let expected = r#"{"city":"Paris, \"FR\" {x}","days":3}"#;
        assert_eq!(whole.calls[0].1.arguments, expected);
        assert_eq!((whole.reason, whole.unparsed_calls), (Some(FinishKind::ToolCalls), 0));
        let deltas = events.iter().filter(|e| matches!(e, ServiceEvent::CallArguments { .. })).count();
        assert!(deltas > 4, "{events:?}");
        // Cut by a limit, it stays as far as it was told; before its name is known it is text.
        for length in 1..said.len() {
            let mut request = request.clone();
            request.generation.max_tokens = Some(length);
            let (whole, _) = run(&service, request);
            assert_eq!((whole.reason, whole.unparsed_calls), (Some(FinishKind::Length), 1), "{length}");
            match whole.calls.first() {
                Some((_, call)) => {
                    assert_eq!((call.name.as_str(), whole.text.as_str()), ("get_weather", ""));
                    assert!(expected.starts_with(&call.arguments), "{length}: {}", call.arguments);
                }
                None => assert!(length == 1 || whole.text.starts_with("call"), "{length}: {:?}", whole.text),
            }
        }
    }
}

#[test]
fn a_forced_call_comes_behind_the_thought() {
    let reply = format!("<|channel>thought\nwhich tool\n<channel|>{CALL}<turn|>");
    let mut request = thinking(with_tools(ask("q")));
    request.tool_choice = ToolChoice::Required;
    request.parallel_tool_calls = ParallelCalls::One;
    let (whole, _) = run(&says_text(&reply), request);
    assert_eq!((whole.thought.as_str(), whole.calls.len()), ("which tool", 1));
}

#[test]
fn a_strict_tool_keeps_to_its_schema_in_a_free_reply() {
    let mut request = with_tools(ask("q"));
    request.input.tools[0]["function"]["strict"] = json!(true);
    // The script leaves the city out and gives days a string; the grammar has its way, and other text stays free.
    let reply = r#"Free text.<|tool_call>call:get_weather{days:<|"|>x<|"|>}<tool_call|><turn|>"#;
    let (whole, _) = run(&says_text(reply), request);
    assert_eq!(whole.text, "Free text.");
    let arguments: Value = serde_json::from_str(&whole.calls[0].1.arguments).unwrap();
    assert!(arguments["city"].is_string(), "{arguments}");
}
