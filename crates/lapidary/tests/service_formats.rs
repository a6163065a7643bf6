//! Answers of a given form over a scripted engine that would rather say something else.

#[allow(dead_code, reason = "each file uses some of it")]
#[path = "common/said.rs"]
mod said;

use std::sync::Arc;

use lapidary::service::scripted::{Scripted, Speaker};
use lapidary::service::{
    ChatRequest, CompletionPrompt, CompletionRequest, Format, ServiceEvent, ServiceOptions,
};
use lapidary_engine::sampling::TokenMask;
use said::{
    CALL, STOP, ask, bad_field, formatted, ids, person, refusal, run, says, says_text, thinking, tokenizer,
    with_tools,
};
use serde_json::{Value, json};

#[test]
fn g01_a_model_that_loves_white_space_still_closes_its_object() {
    let tokenizer = tokenizer();
    let vocab = tokenizer.vocab_size();
    let blank = |id: u32| {
        let mut bytes = Vec::new();
        !tokenizer.is_special(id)
            && tokenizer.append_bytes(id, &mut bytes).is_ok()
            && !bytes.is_empty()
            && bytes.iter().all(u8::is_ascii_whitespace)
    };
    let blanks: Arc<Vec<u32>> = Arc::new((0..vocab).filter(|&id| blank(id)).collect());
    let wish = ids(r#"{"name":"x","age":7}"#);
    let casting = move |_: &[u32], _: usize| -> Box<dyn Speaker> {
        let (blanks, mut wish) = (blanks.clone(), wish.clone().into_iter());
        let mut in_string = false;
        Box::new(move |mask: Option<&TokenMask>| {
            let loved = blanks.iter().copied().find(|&id| mask.is_none_or(|m| m.allows(id)));
            match loved.filter(|_| !in_string) {
                Some(id) => Some(id),
                None => {
                    let next = Speaker::next(&mut wish, mask);
                    // Inside the string of this script everything is free, and it would never end.
                    in_string = next.is_some_and(|id| [ids("\"x")[0], ids("x")[0]].contains(&id));
                    next
                }
            }
        })
    };
    let engine = Scripted::new(4096, vocab as usize, Box::new(casting));
    let service = engine.service(self::tokenizer(), ServiceOptions::default()).unwrap();
    let mut request = formatted(
        ask("q"),
        json!({ "type": "object", "properties": { "age": { "type": "integer" }, "ok": { "type": "boolean" } }, "required": ["age", "ok"], "additionalProperties": false }),
    );
    request.generation.max_tokens = Some(400);
    let (whole, _) = run(&service, request);
    serde_json::from_str::<Value>(&whole.text).unwrap_or_else(|e| panic!("{:?}: {e}", whole.text));
    let longest = whole.text.split(|c: char| !c.is_ascii_whitespace()).map(str::len).max();
    assert!(longest > Some(1) && longest <= Some(lapidary_text::MAX_WHITESPACE), "{:?}", whole.text);
    assert_eq!(whole.reason, Some(STOP));
}

#[test]
fn g02_a_free_thought_then_strict_json() {
    let document = r#"{"name":"Ada","age":36}"#;
    let mut reply = ids("<|channel>thought\nnot {json} at all\n<channel|>Sure! ");
    reply.extend(ids(document));
    let (service, _) = says(vec![reply]);
    let (whole, events) = run(&service, formatted(thinking(ask("q")), person()));
    assert_eq!(whole.thought, "not {json} at all");
    let value: Value = serde_json::from_str(&whole.text).unwrap_or_else(|e| panic!("{:?}: {e}", whole.text));
    assert!(value["name"].is_string() && value["age"].is_i64(), "{value}");
    assert_eq!(whole.reason, Some(STOP));
    // The thought comes before the document.
    let place = |f: fn(&ServiceEvent) -> bool| events.iter().position(f);
    let last_thought = events.iter().rposition(|e| matches!(e, ServiceEvent::Thought { .. }));
    assert!(last_thought < place(|e| matches!(e, ServiceEvent::Text { .. })));
    // Without thinking no thought may open, and the document begins at once.
    let mut reply = ids("<|channel>thought\n");
    reply.extend(ids(document));
    let (whole, _) = run(&says(vec![reply]).0, formatted(ask("q"), person()));
    assert_eq!((whole.thought.as_str(), whole.text.as_str()), ("", document));
    // A thought that would end the turn, or that has used up its budget, still gives a document.
    for reply in ["<|channel>thought\nend of turn<turn|><|tool_call>", "<|channel>thought\non and on"] {
        let script = ids(reply);
        let word = ids(" on")[0];
        let casting = move |_: &[u32], _: usize| -> Box<dyn Speaker> {
            let mut script = script.clone().into_iter();
            let mut thoughts = std::iter::repeat_n(word, 40);
            let mut wish = ids(document).into_iter();
            Box::new(move |mask: Option<&TokenMask>| {
                script
                    .find(|&id| mask.is_none_or(|m| m.allows(id)))
                    .or_else(|| thoughts.next().filter(|&id| mask.is_none_or(|m| m.allows(id))))
                    .or_else(|| Speaker::next(&mut wish, mask))
            })
        };
        let engine = Scripted::new(4096, 4096, Box::new(casting));
        let service = engine.service(tokenizer(), ServiceOptions::default()).unwrap();
        let mut request = formatted(thinking(ask("q")), person());
        request.thinking_budget = Some(10);
        let (whole, _) = run(&service, request);
        assert_eq!(whole.usage.reasoning_tokens, 10);
        serde_json::from_str::<Value>(&whole.text).unwrap_or_else(|e| panic!("{:?}: {e}", whole.text));
    }
}

#[test]
fn a_format_beside_tools_leaves_the_model_the_choice() {
    let document = r#"{"name":"Ada","age":36}"#;
    for (reply, calls) in [(format!("{CALL}<|tool_response>"), 1), (format!("{document}<turn|>"), 0)] {
        let (whole, _) = run(&says_text(&reply), formatted(with_tools(ask("q")), person()));
        assert_eq!(whole.calls.len(), calls, "{reply}");
        assert_eq!(whole.text, if calls == 0 { document } else { "" });
    }
}

#[test]
fn g03_bad_formats_are_refused_by_field_and_the_next_request_is_served() {
    let service = says_text(r#"{"a":1}<turn|>"#);
    for (format, field) in [
        (json!({ "properties": { "foo": "bar" } }), "format.schema.properties.foo"),
        (json!({ "$ref": "#" }), "format.schema.$ref"),
        (json!(7), "format.schema"),
        (json!({ "contains": {} }), "format.schema.contains"),
        (json!({ "description": "x".repeat(1 << 20) }), "format.schema"),
    ] {
        assert_eq!(bad_field(refusal(&service, formatted(ask("q"), format))), field);
    }
    for (format, field) in [
        (Format::Regex("(".to_owned()), "format.regex"),
        (Format::Lark("start: (".to_owned()), "format.grammar"),
    ] {
        let request = ChatRequest { format, ..ask("q") };
        assert_eq!(bad_field(refusal(&service, request)), field);
    }
    let (whole, _) = run(&service, ChatRequest { format: Format::JsonObject, ..ask("q") });
    assert_eq!(whole.text, r#"{"a":1}"#);
}

#[test]
fn expressions_and_grammars_hold_in_chats_and_completions() {
    let service = says_text("well, yes it is<turn|>");
    let (whole, _) = run(&service, ChatRequest { format: Format::Regex("(yes|no)".to_owned()), ..ask("q") });
    assert!(["yes", "no"].contains(&whole.text.as_str()), "{}", whole.text);
    let request = CompletionRequest {
        prompt: CompletionPrompt::Text("q".to_owned()),
        format: Format::Lark("start: \"y\" \"es\"?".to_owned()),
        ..CompletionRequest::default()
    };
    let whole = service.complete(request).unwrap().remove(0).collect_blocking().unwrap();
    assert!(["y", "yes"].contains(&whole.text.as_str()), "{}", whole.text);
}
