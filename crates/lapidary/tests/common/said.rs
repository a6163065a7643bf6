//! A service over an engine that says what a script tells it to, and what its tests have in common.

use lapidary::service::scripted::{RequestLog, Scripted, Speaker};
use lapidary::service::{
    ChatRequest, FinishKind, Format, RequestError, Service, ServiceEvent, ServiceOptions, WholeReply,
};
use lapidary::{ChatInput, Tokenizer};
use lapidary_text::Specials;
use serde_json::{Value, json};

pub fn tokenizer() -> Tokenizer {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/pebble/moe/tokenizer.json");
    Tokenizer::from_json(&std::fs::read(path).unwrap()).unwrap()
}

pub fn ids(text: &str) -> Vec<u32> {
    tokenizer().encode(text, Specials::Parse)
}

/// A service whose requests are answered with these ids, in order; the last over and over.
pub fn says(replies: Vec<Vec<u32>>) -> (Service, RequestLog) {
    says_with(replies, ServiceOptions::default())
}

pub fn says_with(replies: Vec<Vec<u32>>, options: ServiceOptions) -> (Service, RequestLog) {
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
pub fn says_text(text: &str) -> Service {
    says(vec![ids(text)]).0
}

pub fn ask(text: &str) -> ChatRequest {
    let messages = vec![json!({ "role": "user", "content": text })];
    ChatRequest { input: ChatInput { messages, ..ChatInput::default() }, ..ChatRequest::default() }
}

pub fn thinking(mut request: ChatRequest) -> ChatRequest {
    request.input.enable_thinking = Some(true);
    request
}

pub fn with_tools(mut request: ChatRequest) -> ChatRequest {
    request.input.tools = tools();
    request
}

pub fn tools() -> Vec<Value> {
    vec![
        json!({ "type": "function", "function": { "name": "get_weather", "parameters": { "type": "object", "properties": { "city": { "type": "string" }, "days": { "type": "integer" } }, "required": ["city"] } } }),
        json!({ "type": "function", "function": { "name": "now" } }),
    ]
}

/// The one reply, put together, and its events.
pub fn run(service: &Service, request: ChatRequest) -> (WholeReply, Vec<ServiceEvent>) {
    let mut replies = service.chat(request).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(replies.len(), 1);
    events_of(replies.remove(0))
}

pub fn events_of(mut reply: lapidary::service::Reply) -> (WholeReply, Vec<ServiceEvent>) {
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

pub fn refusal(service: &Service, request: ChatRequest) -> RequestError {
    service.chat(request).expect_err("it should be refused")
}

#[track_caller]
pub fn bad_field(error: RequestError) -> String {
    match error {
        RequestError::BadRequest { field, message } => {
            assert!(!message.is_empty());
            field
        }
        other => panic!("{other:?}"),
    }
}

pub const STOP: FinishKind = FinishKind::Stop { matched: None };

/// A call as a model writes it.
pub const CALL: &str = r#"<|tool_call>call:get_weather{city:<|"|>Paris, "FR" {x}<|"|>,days:3}<tool_call|>"#;

pub fn person() -> Value {
    json!({ "type": "object", "properties": { "name": { "type": "string" }, "age": { "type": "integer" } }, "required": ["name", "age"], "additionalProperties": false })
}

pub fn formatted(mut request: ChatRequest, schema: Value) -> ChatRequest {
    request.format = Format::JsonSchema { schema, name: None, strict: true };
    request
}
