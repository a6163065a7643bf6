//! The replies of `POST /v1/messages`: whole, and as events.

use lapidary::service::{FinishKind, ServiceEvent, ServiceUsage};
use serde_json::{Value, json};

use super::chunks::{Meta, Remarks};
use crate::error::ApiError;
use crate::replies::Whole;
use crate::sse::{Frames, Out};

/// Clients hand thoughts back with the signature that came with them. Ours proves nothing; it is there because it has
/// to be.
const SIGNATURE: &str = "lapidary";

fn stop_reason(reason: &FinishKind) -> (&'static str, Option<&str>) {
    match reason {
        FinishKind::Stop { matched: Some(matched) } => ("stop_sequence", Some(matched)),
        FinishKind::Stop { matched: None } => ("end_turn", None),
        FinishKind::Length => ("max_tokens", None),
        FinishKind::ToolCalls => ("tool_use", None),
    }
}

/// Anthropic counts what came from a cache apart.
fn usage(usage: &ServiceUsage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "thinking_tokens": usage.reasoning_tokens },
    })
}

/// A whole reply.
pub fn whole(meta: &Meta, whole: &Whole) -> Value {
    let reply = &whole.reply;
    let mut content = Vec::new();
    if !reply.thought.is_empty() {
        content.push(json!({ "type": "thinking", "thinking": reply.thought, "signature": SIGNATURE }));
    }
    if !reply.text.is_empty() {
        content.push(json!({ "type": "text", "text": reply.text }));
    }
    for (id, call) in &reply.calls {
        // The arguments are the text of an object that our own parser wrote.
        let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
        content.push(json!({ "type": "tool_use", "id": id, "name": call.name, "input": input }));
    }
    let (reason, sequence) = stop_reason(whole.reason());
    let mut message = json!({
        "id": meta.id,
        "type": "message",
        "role": "assistant",
        "model": meta.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage(&reply.usage),
    });
    if let Some(remarks) = Remarks::new(meta.clamped(whole.max_tokens), reply.unparsed_calls) {
        message["lapidary"] = json!(remarks);
    }
    message
}

/// Which kind of block is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Thought,
    Text,
    Call(usize),
}

/// The events of a streamed message.
#[derive(Debug)]
pub struct MessageFrames {
    meta: Meta,
    request_id: String,
    open: Option<Open>,
    blocks: usize,
    limit: Option<usize>,
    failed: bool,
}

impl MessageFrames {
    /// Events of one reply.
    pub fn new(meta: Meta, request_id: &str) -> Self {
        MessageFrames {
            meta,
            request_id: request_id.to_owned(),
            open: None,
            blocks: 0,
            limit: None,
            failed: false,
        }
    }

    fn write(&self, kind: &str, mut event: Value, out: &mut Out) {
        event["type"] = kind.into();
        out.named(kind, &event);
    }

    fn close(&mut self, out: &mut Out) {
        let Some(open) = self.open.take() else { return };
        if open == Open::Thought {
            self.delta(json!({ "type": "signature_delta", "signature": SIGNATURE }), out);
        }
        self.write("content_block_stop", json!({ "index": self.blocks }), out);
        self.blocks += 1;
    }

    /// Makes sure that a block of that kind is open.
    fn switch(&mut self, to: Open, block: Value, out: &mut Out) {
        if self.open != Some(to) {
            self.close(out);
            self.open = Some(to);
            self.write("content_block_start", json!({ "index": self.blocks, "content_block": block }), out);
        }
    }

    fn delta(&self, delta: Value, out: &mut Out) {
        self.write("content_block_delta", json!({ "index": self.blocks, "delta": delta }), out);
    }
}

impl Frames for MessageFrames {
    fn event(&mut self, _: usize, event: ServiceEvent, out: &mut Out) {
        match event {
            ServiceEvent::Started { prompt_tokens, cached_tokens, max_tokens } => {
                self.limit = Some(max_tokens);
                let counts = ServiceUsage { prompt_tokens, cached_tokens, ..ServiceUsage::default() };
                let message = json!({
                    "id": self.meta.id,
                    "type": "message",
                    "role": "assistant",
                    "model": self.meta.model,
                    "content": [],
                    "stop_reason": null,
                    "stop_sequence": null,
                    "usage": usage(&counts),
                });
                self.write("message_start", json!({ "message": message }), out);
            }
            ServiceEvent::Thought { delta, .. } => {
                let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
                self.switch(Open::Thought, block, out);
                self.delta(json!({ "type": "thinking_delta", "thinking": delta }), out);
            }
            ServiceEvent::Text { delta, .. } => {
                self.switch(Open::Text, json!({ "type": "text", "text": "" }), out);
                self.delta(json!({ "type": "text_delta", "text": delta }), out);
            }
            ServiceEvent::CallBegin { index, id, name } => {
                let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                self.switch(Open::Call(index), block, out);
            }
            ServiceEvent::CallArguments { delta, .. } => {
                self.delta(json!({ "type": "input_json_delta", "partial_json": delta }), out);
            }
            ServiceEvent::Finished { reason, usage: counts, unparsed_calls } => {
                self.close(out);
                let (reason, sequence) = stop_reason(&reason);
                let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
                let mut event = json!({ "delta": delta, "usage": usage(&counts) });
                if let Some(remarks) = Remarks::new(self.meta.clamped(self.limit), unparsed_calls) {
                    event["lapidary"] = json!(remarks);
                }
                self.write("message_delta", event, out);
            }
            ServiceEvent::Failed(error) => {
                self.failed = true;
                out.named("error", &ApiError::from(error).anthropic(&self.request_id));
            }
            _ => {}
        }
    }

    fn ended(&self) -> bool {
        self.failed
    }

    fn end(&mut self, out: &mut Out) {
        self.write("message_stop", json!({}), out);
    }

    fn keep_alive(&mut self, _: usize, _: usize, out: &mut Out) {
        self.write("ping", json!({}), out);
    }
}
