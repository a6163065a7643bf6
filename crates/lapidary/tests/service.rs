//! The service over a scripted engine: what a reply becomes, whatever the tokens are. Sections C to G, J and K of the hard
//! cases as far as neither a model nor a wire format is needed.

use std::sync::Arc;
use std::time::Duration;

use lapidary::service::scripted::{RequestLog, Scripted, Speaker};
use lapidary::service::{
    Bos, ChatRequest, CompletionPrompt, CompletionRequest, FinishKind, Format, GenerationParams, Markers,
    ParallelCalls, RequestError, Service, ServiceEvent, ServiceOptions, ToolChoice, WholeReply, choice_seed,
};
use lapidary::{ChatInput, ChatTemplate, Tokenizer};
use lapidary_engine::sampling::TokenMask;
use lapidary_text::Specials;
use serde_json::{Value, json};

fn tokenizer() -> Tokenizer {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/pebble/moe/tokenizer.json");
    Tokenizer::from_json(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(text: &str) -> Vec<u32> {
    tokenizer().encode(text, Specials::Parse)
}

/// A service whose requests are answered with these ids, in order; the last over and over.
fn says(replies: Vec<Vec<u32>>) -> (Service, RequestLog) {
    says_with(replies, ServiceOptions::default())
}

fn says_with(replies: Vec<Vec<u32>>, options: ServiceOptions) -> (Service, RequestLog) {
    let tokenizer = tokenizer();
    let vocab = tokenizer.vocab_size() as usize;
    let engine = Scripted::new(
        512,
        vocab,
        Box::new(move |_, number| {
            let reply = replies[number.min(replies.len() - 1)].clone();
            Box::new(reply.into_iter()) as Box<dyn Speaker>
        }),
    );
    let log = engine.log();
    (engine.service(tokenizer, options).unwrap(), log)
}

/// A service that says one text.
fn says_text(text: &str) -> Service {
    says(vec![ids(text)]).0
}

fn ask(text: &str) -> ChatRequest {
    let messages = vec![json!({ "role": "user", "content": text })];
    ChatRequest { input: ChatInput { messages, ..ChatInput::default() }, ..ChatRequest::default() }
}

fn thinking(mut request: ChatRequest) -> ChatRequest {
    request.input.enable_thinking = Some(true);
    request
}

fn with_tools(mut request: ChatRequest) -> ChatRequest {
    request.input.tools = tools();
    request
}

fn tools() -> Vec<Value> {
    vec![
        json!({ "type": "function", "function": { "name": "get_weather", "parameters": { "type": "object", "properties": { "city": { "type": "string" }, "days": { "type": "integer" } }, "required": ["city"] } } }),
        json!({ "type": "function", "function": { "name": "now" } }),
    ]
}

/// The one reply, put together, and its events.
fn run(service: &Service, request: ChatRequest) -> (WholeReply, Vec<ServiceEvent>) {
    let mut replies = service.chat(request).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(replies.len(), 1);
    events_of(replies.remove(0))
}

fn events_of(mut reply: lapidary::service::Reply) -> (WholeReply, Vec<ServiceEvent>) {
    let (mut whole, mut events) = (WholeReply::new(reply.index()), Vec::new());
    while let Some(event) = reply.next_blocking() {
        let ended =
            events.iter().any(|e| matches!(e, ServiceEvent::Finished { .. } | ServiceEvent::Failed(_)));
        assert!(!ended, "nothing comes after the end");
        whole.add(event.clone()).unwrap_or_else(|e| panic!("{e}"));
        events.push(event);
    }
    assert!(matches!(events.first(), Some(ServiceEvent::Started { .. })));
    (whole, events)
}

fn refusal(service: &Service, request: ChatRequest) -> RequestError {
    service.chat(request).expect_err("it should be refused")
}

#[track_caller]
fn bad_field(error: RequestError) -> String {
    match error {
        RequestError::BadRequest { field, message } => {
            assert!(!message.is_empty());
            field
        }
        other => panic!("{other:?}"),
    }
}

const STOP: FinishKind = FinishKind::Stop { matched: None };

#[test]
fn text_comes_in_deltas_and_ends_with_counts() {
    let service = says_text("Hello there, é😀!<turn|>never");
    let (whole, events) = run(&service, ask("hi"));
    assert_eq!(whole.text, "Hello there, é😀!");
    assert_eq!(whole.reason, Some(STOP));
    assert!(events.iter().filter(|e| matches!(e, ServiceEvent::Text { .. })).count() > 2);
    let prompt = service.apply_template(&ask("hi").input).unwrap().1.len();
    assert_eq!(whole.usage.prompt_tokens, prompt);
    assert_eq!(whole.usage.completion_tokens, ids("Hello there, é😀!").len());
    assert!(whole.usage.first_token.unwrap() <= whole.usage.total);
}

#[test]
fn d07_every_end_stops_and_none_is_shown() {
    for end in ["<eos>", "<turn|>", "<|tool_response>", "<|turn>"] {
        let (whole, _) = run(&says_text(&format!("answer{end}more")), ask("q"));
        assert_eq!((whole.text.as_str(), whole.reason), ("answer", Some(STOP)), "{end}");
        let completion = CompletionRequest {
            prompt: CompletionPrompt::Text("q".to_owned()),
            ..CompletionRequest::default()
        };
        if end != "<|turn>" {
            let whole = says_text(&format!("answer{end}more"))
                .complete(completion)
                .unwrap()
                .remove(0)
                .collect_blocking();
            assert_eq!(whole.unwrap().text, "answer", "{end}");
        }
    }
}

#[test]
fn d08_characters_in_bytes_come_whole_at_every_split() {
    // Byte tokens for an emoji family with joiners, cut off after each.
    let text = "a👨\u{200d}👩\u{200d}👧é日";
    let tokenizer = tokenizer();
    let all: Vec<u32> = text
        .bytes()
        .map(|b| tokenizer.token_id(&format!("<0x{b:02X}>")).expect("byte pieces are there"))
        .collect();
    let mut end = all.clone();
    end.extend(ids("<turn|>"));
    let (service, _) = says(vec![end]);
    let (whole, events) = run(&service, ask("q"));
    assert_eq!(whole.text, text);
    for event in events {
        if let ServiceEvent::Text { delta, .. } = event {
            assert!(!delta.contains('\u{fffd}'));
        }
    }
}

#[test]
fn e01_thoughts_go_to_their_own_events() {
    for (reply, thought, text) in [
        ("<|channel>thought\nso it is\n<channel|>Yes.<turn|>", "so it is", "Yes."),
        ("<|channel>thought\n<channel|>Yes.<turn|>", "", "Yes."),
        ("Yes.<turn|>", "", "Yes."),
        ("Yes.<channel|> No.<turn|>", "", "Yes. No."),
        ("<|channel>thought\nnever ends", "never ends", ""),
    ] {
        for request in [ask("q"), thinking(ask("q"))] {
            let (whole, _) = run(&says_text(reply), request);
            assert_eq!((whole.thought.as_str(), whole.text.as_str()), (thought, text), "{reply}");
        }
    }
}

#[test]
fn e05_a_budget_closes_a_thought_and_an_answer_follows() {
    let tokenizer = tokenizer();
    let open = tokenizer.specials().channel_open.unwrap();
    for budget in [0, 1, 7, 64] {
        // Thinks for ever: whenever it can, it opens a thought, and it never closes one by itself.
        let word = ids(" hmm")[0];
        let answer = ids("Done.<turn|>");
        let casting = move |_: &[u32], _: usize| -> Box<dyn Speaker> {
            let answer = answer.clone();
            let mut said = 0;
            let mut answering = 0;
            Box::new(move |mask: Option<&TokenMask>| {
                let may_open = mask.is_none_or(|mask| mask.allows(open));
                if said == 0 && may_open {
                    said += 1;
                    return Some(open);
                }
                // The guide forces the closer in its own time; afterwards opening is forbidden.
                if mask.is_some() && !may_open {
                    answering += 1;
                    return answer.get(answering - 1).copied();
                }
                said += 1;
                Some(word)
            })
        };
        let engine = Scripted::new(2000, tokenizer.vocab_size() as usize, Box::new(casting));
        let service = engine.service(self::tokenizer(), ServiceOptions::default()).unwrap();
        let mut request = thinking(ask("q"));
        request.thinking_budget = Some(budget);
        request.generation.max_tokens = Some(500);
        let (whole, _) = run(&service, request);
        assert_eq!(whole.text, "Done.", "budget {budget}");
        assert_eq!(whole.usage.reasoning_tokens, budget);
        // Opener, thought, closer, answer. Without any budget no thought opens.
        let thought = if budget == 0 { 0 } else { 1 + budget + 1 };
        assert_eq!(whole.usage.completion_tokens, thought + ids("Done.").len());
        assert_eq!(whole.reason, Some(STOP));
    }
}

#[test]
fn e05_a_short_thought_is_left_alone_and_the_default_holds() {
    let reply = "<|channel>thought\nshort\n<channel|>Yes.<turn|>";
    let counted = ids("thought\nshort\n").len();
    let (whole, _) = run(&says_text(reply), thinking(ask("q")));
    assert_eq!(whole.usage.reasoning_tokens, counted);
    let options = ServiceOptions { default_thinking_budget: Some(2), ..ServiceOptions::default() };
    let (service, _) = says_with(vec![ids(reply)], options);
    let (whole, _) = run(&service, thinking(ask("q")));
    assert_eq!(whole.usage.reasoning_tokens, 2);
    let mut request = thinking(ask("q"));
    request.thinking_budget = Some(100);
    assert_eq!(run(&service, request).0.thought, "short");
}

#[test]
fn e06_a_template_of_another_family_is_refused_when_asked_to() {
    let template =
        || ChatTemplate::new("{{ bos_token }}<|im_start|>{{ messages[0].content }}<|im_end|>").unwrap();
    let start = |strict_template| {
        let engine = Scripted::new(64, 4096, Box::new(|_, _| Box::new(Vec::new().into_iter())));
        let options = ServiceOptions { strict_template, ..ServiceOptions::default() };
        engine.service_with(tokenizer(), template(), options)
    };
    let error = start(true).expect_err("the markers are unknown").to_string();
    assert!(error.contains("<|im_start|>") && error.contains("<|im_end|>"), "{error}");
    start(false).unwrap();
}

#[test]
fn e07_a_trailing_assistant_message_is_continued() {
    let (service, log) = says(vec![ids(" and more<turn|>")]);
    let mut request = ask("q");
    request.input.messages.push(json!({ "role": "assistant", "content": "Once upon" }));
    request.input.continue_final = true;
    let (whole, _) = run(&service, request.clone());
    assert_eq!(whole.text, " and more");
    let prompt = tokenizer().decode(&log.all()[0].prompt).unwrap();
    assert!(prompt.ends_with("Once upon"), "{prompt}");
    // A contradiction is refused with its place.
    request.input.messages[1]["content"] = json!("<|channel>thought\nhalf a thought");
    assert_eq!(bad_field(refusal(&service, request)), "messages[1].content");
}

const CALL: &str = r#"<|tool_call>call:get_weather{city:<|"|>Paris, "FR" {x}<|"|>,days:3}<tool_call|>"#;

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

fn person() -> Value {
    json!({ "type": "object", "properties": { "name": { "type": "string" }, "age": { "type": "integer" } }, "required": ["name", "age"], "additionalProperties": false })
}

fn formatted(mut request: ChatRequest, schema: Value) -> ChatRequest {
    request.format = Format::JsonSchema { schema, name: None, strict: true };
    request
}

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

#[test]
fn j04_pictures_and_sounds_are_refused_by_place() {
    let service = says_text("x");
    for (kind, tower) in [("image_url", "vision"), ("input_audio", "audio"), ("video", "vision")] {
        let mut request = ask("q");
        request.input.messages[0]["content"] =
            json!([{ "type": "text", "text": "see" }, { "type": kind, kind: { "url": "data:" } }]);
        let RequestError::Unsupported { what } = refusal(&service, request) else { panic!("{kind}") };
        assert!(what.contains("messages[0].content[1]") && what.contains(tower), "{what}");
    }
}

#[test]
fn k03_a_prompt_without_room_is_refused_with_both_counts_and_a_wish_is_clamped() {
    let service = says_text("x<turn|>");
    let prompt = |tokens: usize| CompletionRequest {
        prompt: CompletionPrompt::Ids(vec![5; tokens]),
        generation: GenerationParams { max_tokens: Some(1_000_000), ..GenerationParams::default() },
        ..CompletionRequest::default()
    };
    for tokens in [512, 513, 5000] {
        assert_eq!(
            service.complete(prompt(tokens)).unwrap_err(),
            RequestError::PromptTooLong { tokens, context: 512 }
        );
    }
    let mut reply = service.complete(prompt(500)).unwrap().remove(0);
    let Some(ServiceEvent::Started { prompt_tokens: 500, max_tokens: 12, .. }) = reply.next_blocking() else {
        panic!("the reply is granted the rest of the context")
    };
    let long = "word ".repeat(600);
    assert!(matches!(refusal(&service, ask(&long)), RequestError::PromptTooLong { context: 512, .. }));
}

#[test]
fn k04_no_part_of_a_stop_string_reaches_the_client_in_any_cut() {
    let tokenizer = tokenizer();
    let text = "The quick brown fox.\nUser: é😀 own f";
    for (stops, shown, matched) in [
        (vec!["own fox"], "The quick br", Some("own fox")),
        (vec!["\nUser:"], "The quick brown fox.", Some("\nUser:")),
        (vec!["fox.", "quick brown fox."], "The ", Some("quick brown fox.")),
        (vec!["😀"], "The quick brown fox.\nUser: é", Some("😀")),
        (vec!["own fx"], text, None),
        (vec!["T"], "", Some("T")),
    ] {
        for at in text.char_indices().map(|(at, _)| at) {
            let mut reply = tokenizer.encode(&text[..at], Specials::Plain);
            reply.extend(tokenizer.encode(&text[at..], Specials::Plain));
            let length = reply.len();
            reply.extend(tokenizer.specials().turn_close);
            let (service, _) = says(vec![reply.clone()]);
            let mut request = ask("q");
            request.generation.stop = stops.iter().map(|s| (*s).to_owned()).collect();
            request.generation.logprobs = Some(1);
            let (whole, events) = run(&service, request.clone());
            assert_eq!(whole.text, shown, "{stops:?} {at}");
            let reason = FinishKind::Stop { matched: matched.map(str::to_owned) };
            assert_eq!(whole.reason, Some(reason), "{stops:?} {at}");
            // It ends with the token that completes the string.
            if let Some(matched) = matched {
                let end = text.find(matched).unwrap() + matched.len();
                let mut covered = 0;
                let mut bytes = Vec::new();
                while bytes.len() < end {
                    tokenizer.append_bytes(reply[covered], &mut bytes).unwrap();
                    covered += 1;
                }
                assert_eq!(whole.usage.completion_tokens, covered, "{stops:?} {at}");
            } else {
                assert_eq!(whole.usage.completion_tokens, length);
            }
            // Tokens are those of the visible text.
            let bytes: Vec<u8> = whole.tokens.iter().flat_map(|t| t.bytes.clone()).collect();
            assert!(bytes.starts_with(shown.as_bytes()), "{stops:?} {at}");
            for event in events {
                if let ServiceEvent::Text { delta, .. } = event {
                    assert!(!delta.is_empty());
                }
            }
            // The same for raw completions.
            let completion = CompletionRequest {
                prompt: CompletionPrompt::Text("q".to_owned()),
                generation: request.generation,
                ..CompletionRequest::default()
            };
            let raw = says(vec![reply]).0.complete(completion).unwrap().remove(0).collect_blocking().unwrap();
            assert_eq!((raw.text.as_str(), raw.reason), (shown, whole.reason));
        }
    }
}

#[test]
fn k04_stop_strings_work_behind_thoughts_and_in_json_and_at_an_undecided_place() {
    let mut request = thinking(ask("q"));
    request.generation.stop = vec!["END".to_owned()];
    let (whole, _) =
        run(&says_text("<|channel>thought\nEND of thought\n<channel|>Text END more<turn|>"), request);
    assert_eq!((whole.thought.as_str(), whole.text.as_str()), ("END of thought", "Text "));
    assert_eq!(whole.reason, Some(FinishKind::Stop { matched: Some("END".to_owned()) }));
    let mut request = formatted(ask("q"), person());
    request.generation.stop = vec!["age".to_owned()];
    let (whole, _) = run(&says_text(r#"{"name":"Ada","age":36}"#), request);
    assert_eq!(whole.text, r#"{"name":"Ada",""#);
    // "call:" may begin a call; as a stop string it ends the reply where it is complete.
    let mut request = with_tools(ask("q"));
    request.generation.stop = vec!["call:".to_owned()];
    let (whole, _) = run(&says_text("call:now{}<turn|>"), request);
    assert_eq!((whole.text.as_str(), whole.calls.len()), ("", 0));
    assert_eq!(whole.usage.completion_tokens, ids("call:").len());
}

#[test]
fn k05_ids_out_of_range_are_refused_by_field() {
    let service = says_text("x<turn|>");
    let vocab = i64::from(tokenizer().vocab_size());
    for id in [-1, vocab, 1 << 31, (1 << 32) + 5, i64::MIN, i64::MAX] {
        let generation = |g: GenerationParams| ChatRequest { generation: g, ..ask("q") };
        let bias = GenerationParams { logit_bias: vec![(3, 1.0), (id, 1.0)], ..GenerationParams::default() };
        assert_eq!(bad_field(refusal(&service, generation(bias))), "logit_bias");
        let stop = GenerationParams { stop_ids: vec![3, id], ..GenerationParams::default() };
        assert_eq!(bad_field(refusal(&service, generation(stop))), "stop_ids[1]");
        let prompt = CompletionPrompt::Ids(vec![3, 4, id]);
        let request = CompletionRequest { prompt, ..CompletionRequest::default() };
        assert_eq!(bad_field(service.complete(request).unwrap_err()), "prompt[2]");
        assert_eq!(bad_field(service.detokenize(&[id]).unwrap_err()), "tokens[0]");
    }
    assert_eq!(run(&service, ask("q")).0.text, "x");
}

#[test]
fn parameters_out_of_range_are_refused_by_field() {
    let service = says_text("x");
    type Change = fn(&mut GenerationParams);
    let cases: [(&str, Change); 16] = [
        ("temperature", |g| g.temperature = Some(-0.1)),
        ("temperature", |g| g.temperature = Some(f32::NAN)),
        ("top_p", |g| g.top_p = Some(1.5)),
        ("min_p", |g| g.min_p = Some(-1.0)),
        ("repetition_penalty", |g| g.repetition_penalty = Some(0.0)),
        ("presence_penalty", |g| g.presence_penalty = Some(3.0)),
        ("frequency_penalty", |g| g.frequency_penalty = Some(f32::INFINITY)),
        ("logit_bias", |g| g.logit_bias = vec![(1, f32::NAN)]),
        ("logit_bias", |g| g.logit_bias = vec![(1, 1.0), (1, 2.0)]),
        ("n", |g| g.n = 0),
        ("n", |g| g.n = 1000),
        ("max_tokens", |g| g.max_tokens = Some(0)),
        ("logprobs", |g| g.logprobs = Some(21)),
        ("stop", |g| g.stop = vec!["a".to_owned(); 33]),
        ("stop[1]", |g| g.stop = vec!["a".to_owned(), String::new()]),
        ("min_tokens", |g| (g.min_tokens, g.max_tokens) = (5, Some(4))),
    ];
    for (field, change) in cases {
        let mut request = ask("q");
        change(&mut request.generation);
        assert_eq!(bad_field(refusal(&service, request)), field);
    }
}

#[test]
fn conversations_of_the_wrong_form_are_refused_by_field() {
    let service = says_text("x");
    let call =
        |arguments: Value| json!([{ "id": "1", "function": { "name": "now", "arguments": arguments } }]);
    for (messages, field) in [
        (json!([]), "messages"),
        (json!(["hi"]), "messages[0]"),
        (json!([{ "content": "hi" }]), "messages[0].role"),
        (json!([{ "role": "user", "content": 7 }]), "messages[0].content"),
        (json!([{ "role": "user", "content": [{ "type": "text" }] }]), "messages[0].content[0].text"),
        (json!([{ "role": "user", "content": [{ "type": "odd" }] }]), "messages[0].content[0]"),
        (
            json!([{ "role": "user", "content": "q" }, { "role": "assistant", "tool_calls": call(json!("[1]")) }]),
            "messages[1].tool_calls[0].function.arguments",
        ),
    ] {
        let mut request = ask("q");
        request.input.messages = messages.as_array().unwrap().clone();
        assert_eq!(bad_field(refusal(&service, request)), field, "{messages}");
    }
    for (tools, field) in [
        (json!([{ "function": {} }]), "tools[0].function.name"),
        (json!([{ "function": { "name": "a b" } }]), "tools[0].function.name"),
        (json!([{ "function": { "name": "a" } }, { "function": { "name": "a" } }]), "tools[1].function.name"),
        (json!([{ "function": { "name": "a", "parameters": 3 } }]), "tools[0].function.parameters"),
    ] {
        let mut request = ask("q");
        request.input.tools = tools.as_array().unwrap().clone();
        assert_eq!(bad_field(refusal(&service, request)), field, "{tools}");
    }
}

#[test]
fn k07_seeds_of_choices_are_derived_and_each_is_its_own_reply() {
    let (service, log) = says(vec![ids("one<turn|>"), ids("two<turn|>"), ids("three<turn|>")]);
    let mut request = ask("q");
    (request.generation.n, request.generation.seed) = (3, Some(7));
    let replies = service.chat(request).unwrap();
    let texts: Vec<(usize, String)> =
        replies.into_iter().map(|r| r.collect_blocking().unwrap()).map(|w| (w.index, w.text)).collect();
    assert_eq!(texts.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1, 2]);
    let mut seeds: Vec<u64> = log.all().iter().map(|s| s.sampling.seed).collect();
    assert_eq!(seeds, [7, choice_seed(7, 1), choice_seed(7, 2)]);
    seeds.dedup();
    assert_eq!(seeds.len(), 3);
    // Without a seed two requests differ.
    run(&service, ask("q"));
    run(&service, ask("q"));
    let all = log.all();
    assert_ne!(all[3].sampling.seed, all[4].sampling.seed);
}

#[test]
fn the_models_defaults_hold_where_a_request_is_silent() {
    let (service, log) = says(vec![ids("x<turn|>")]);
    let mut request = ask("q");
    request.generation.top_k = Some(3);
    request.generation.logit_bias = vec![(9, -100.0)];
    run(&service, request);
    let seen = log.all().remove(0);
    let defaults = &service.model_info().defaults;
    assert_eq!(
        (seen.sampling.temperature, seen.sampling.top_p),
        (defaults.sampling.temperature, defaults.sampling.top_p)
    );
    assert_eq!((seen.sampling.top_k, seen.sampling.logit_bias), (3, vec![(9, -100.0)]));
    assert_eq!(seen.max_tokens, 512 - seen.prompt.len());
    assert!(defaults.stop_ids.iter().all(|id| seen.stop_ids.contains(id)));
    assert!(!seen.guided);
}

#[test]
fn ignore_eos_goes_on_and_own_stop_ids_still_end() {
    let (service, log) = says(vec![ids("one<turn|><eos>two Zed three<turn|>")]);
    let mut request = ask("q");
    request.generation.ignore_eos = true;
    let (whole, _) = run(&service, request.clone());
    assert_eq!((whole.text.as_str(), whole.reason), ("onetwo Zed three", Some(FinishKind::Length)));
    let zed = ids(" Zed")[0];
    request.generation.stop_ids = vec![i64::from(zed)];
    let (whole, _) = run(&service, request);
    assert_eq!((whole.text.as_str(), whole.reason), ("onetwo", Some(STOP)));
    assert_eq!(log.all()[1].stop_ids, [zed]);
}

#[test]
fn min_tokens_reaches_the_engine() {
    let (service, log) = says(vec![ids("a<turn|>b<turn|>")]);
    let mut request = ask("q");
    request.generation.min_tokens = 2;
    run(&service, request);
    assert_eq!(log.all()[0].min_tokens, 2);
}

#[test]
fn logprobs_belong_to_the_tokens_of_the_text() {
    let reply = r#"<|channel>thought
hm
<channel|>Hello é😀 "world" <turn|>"#;
    let mut request = thinking(ask("q"));
    request.generation.logprobs = Some(2);
    let service = says_text(reply);
    let (whole, events) = run(&service, request.clone());
    let bytes: Vec<u8> = whole.tokens.iter().flat_map(|t| t.bytes.clone()).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), whole.text);
    // Scripted logprobs count the reply's tokens, so that each shows its place.
    let all = ids(reply);
    for token in &whole.tokens {
        assert_eq!(all[(-token.logprob) as usize - 1], token.token);
        assert_eq!(token.top.len(), 2);
    }
    for event in &events {
        match event {
            ServiceEvent::Text { delta, tokens } => {
                let text: String = tokens.iter().map(|t| t.text.clone()).collect();
                assert!(
                    text.contains('\u{fffd}') || *delta == text || delta.is_empty(),
                    "{delta:?} {text:?}"
                );
            }
            ServiceEvent::Thought { delta, tokens } => {
                assert!(!delta.is_empty());
                assert!(tokens.iter().all(|t| t.logprob < 0.0));
            }
            _ => {}
        }
    }
    request.generation.logprobs = None;
    assert!(run(&service, request).0.tokens.is_empty());
}

#[test]
fn dropping_a_reply_cancels_it_and_only_it() {
    let tokenizer = tokenizer();
    let word = ids(" on")[0];
    let engine = Scripted::new(
        1 << 20,
        tokenizer.vocab_size() as usize,
        Box::new(move |_, _| Box::new(vec![word; 1 << 19].into_iter())),
    )
    .paced(Duration::from_micros(200));
    let log = engine.log();
    let service = engine.service(tokenizer, ServiceOptions::default()).unwrap();
    let mut kept = service.chat(ask("q")).unwrap().remove(0);
    for _ in 0..20 {
        let mut reply = service.chat(ask("q")).unwrap().remove(0);
        while !matches!(reply.next_blocking(), Some(ServiceEvent::Text { .. })) {}
    }
    let start = std::time::Instant::now();
    while log.active() > 1 {
        assert!(start.elapsed() < Duration::from_secs(5), "{} replies still run", log.active());
        std::thread::sleep(Duration::from_millis(1));
    }
    while !matches!(kept.next_blocking(), Some(ServiceEvent::Text { .. })) {}
    drop(kept);
}

#[test]
fn timeouts_overload_and_shutdown_are_told_apart() {
    let word = ids(" on")[0];
    let engine = || {
        Scripted::new(1 << 20, 4096, Box::new(move |_, _| Box::new(vec![word; 1 << 19].into_iter())))
            .paced(Duration::from_micros(300))
    };
    let service = engine().limited(1).service(tokenizer(), ServiceOptions::default()).unwrap();
    let mut request = ask("q");
    request.generation.timeout = Some(Duration::from_millis(50));
    let reply = service.chat(request.clone()).unwrap().remove(0);
    assert!(matches!(refusal(&service, ask("q")), RequestError::Overloaded { .. }));
    let error = reply.collect_blocking().unwrap_err();
    assert_eq!(error, RequestError::TimedOut { limit: Duration::from_millis(50) });
    let service = engine().service(tokenizer(), ServiceOptions::default()).unwrap();
    let reply = service.chat(ask("q")).unwrap().remove(0);
    service.drain(Duration::from_millis(20));
    assert_eq!(reply.collect_blocking().unwrap_err(), RequestError::ShuttingDown);
    assert_eq!(refusal(&service, ask("q")), RequestError::ShuttingDown);
}

#[test]
fn raw_prompts_have_one_bos_and_plain_markers_unless_told_otherwise() {
    let service = says_text("x");
    let bos = tokenizer().specials().bos.unwrap();
    let turn = tokenizer().specials().turn_open.unwrap();
    let encode = |text, bos, markers| service.tokenize(text, bos, markers).unwrap();
    for text in ["hi", "<bos>hi"] {
        let ids = encode(text, Bos::One, Markers::Plain);
        assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1, "{text}");
        assert_eq!(ids, encode("hi", Bos::One, Markers::Plain));
    }
    assert!(!encode("hi", Bos::AsGiven, Markers::Parse).contains(&bos));
    assert!(!encode("<|turn>hi", Bos::One, Markers::Plain).contains(&turn));
    assert!(encode("<|turn>hi", Bos::One, Markers::Parse).contains(&turn));
    let ids: Vec<i64> = encode("<|turn>é😀", Bos::One, Markers::Parse).into_iter().map(i64::from).collect();
    assert_eq!(service.detokenize(&ids).unwrap(), "<bos><|turn>é😀");
}
