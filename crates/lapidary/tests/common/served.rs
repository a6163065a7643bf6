//! A service over the real engine and the built-in model, and what its tests have in common.

use std::path::Path;

use lapidary::service::{ChatRequest, GenerationParams, Service, ServiceOptions, WholeReply};
use lapidary::{ChatInput, Checkpoint, LoadOptions};
use serde_json::json;

/// Width of the model's residual stream.
pub const HIDDEN: usize = 256;

pub fn start(load: LoadOptions, options: ServiceOptions) -> Service {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/pebble-moe-q8_0.gguf");
    let checkpoint = Checkpoint::open(path).unwrap();
    Service::start(&checkpoint, &load, options, &mut |_| {}).unwrap()
}

pub fn load() -> LoadOptions {
    LoadOptions { context: Some(1024), chunk: 128, threads: Some(2), ..LoadOptions::default() }
}

pub fn pebble() -> Service {
    start(load(), ServiceOptions::default())
}

pub fn ask(text: &str) -> ChatRequest {
    let messages = vec![json!({ "role": "user", "content": text })];
    let input = ChatInput { messages, ..ChatInput::default() };
    ChatRequest { input, generation: greedy(), ..ChatRequest::default() }
}

pub fn greedy() -> GenerationParams {
    GenerationParams { temperature: Some(0.0), max_tokens: Some(120), ..GenerationParams::default() }
}

pub fn thinking(mut request: ChatRequest) -> ChatRequest {
    request.input.enable_thinking = Some(true);
    request
}

pub fn one(service: &Service, request: ChatRequest) -> WholeReply {
    let mut replies = service.chat(request).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(replies.len(), 1);
    replies.remove(0).collect_blocking().unwrap_or_else(|e| panic!("{e}"))
}

/// A direction as wide as the model.
pub fn wave(phase: usize) -> Vec<f32> {
    (0..HIDDEN).map(|i| ((i * (3 + phase)) as f32).sin()).collect()
}
