//! The replies of `POST /v1/responses`: whole, and as events.

use lapidary::service::{FinishKind, ServiceEvent, ServiceUsage, TokenLogprob};
use serde_json::{Value, json};

use super::chunks::{Meta, Remarks, token_logprobs};
use super::responses::Echo;
use crate::error::ApiError;
use crate::ids;
use crate::replies::Whole;
use crate::sse::{Frames, Out};

fn usage(usage: &ServiceUsage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": usage.reasoning_tokens },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

fn reasoning(id: &str, text: &str, status: &str) -> Value {
    let content = json!([{ "type": "reasoning_text", "text": text }]);
    json!({ "id": id, "type": "reasoning", "summary": [], "content": content, "status": status })
}

fn output_text(text: &str, tokens: &[TokenLogprob]) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": token_logprobs(tokens) })
}

fn message(id: &str, content: Vec<Value>, status: &str) -> Value {
    json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": content })
}

fn function_call(id: &str, call_id: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name, "arguments": arguments,
    })
}

/// The response object. `status` is `in_progress`, `completed`, `incomplete` or `failed`.
fn response(meta: &Meta, echo: &Echo, status: &str, output: &[Value], usage: Option<Value>) -> Value {
    json!({
        "id": meta.id,
        "object": "response",
        "created_at": meta.created,
        "status": status,
        "background": false,
        "error": null,
        "incomplete_details": if status == "incomplete" { json!({ "reason": "max_output_tokens" }) } else { Value::Null },
        "instructions": echo.instructions,
        "max_output_tokens": echo.max_output_tokens,
        "model": meta.model,
        "output": output,
        "parallel_tool_calls": echo.parallel,
        "previous_response_id": null,
        "reasoning": { "effort": echo.effort, "summary": null },
        "store": false,
        "temperature": echo.temperature,
        "text": { "format": echo.format },
        "tool_choice": echo.tool_choice,
        "tools": echo.tools,
        "top_p": echo.top_p,
        "truncation": "disabled",
        "usage": usage,
        "metadata": echo.metadata,
    })
}

fn status(reason: &FinishKind) -> &'static str {
    match reason {
        FinishKind::Length => "incomplete",
        FinishKind::Stop { .. } | FinishKind::ToolCalls => "completed",
    }
}

/// A whole reply.
pub fn whole(meta: &Meta, echo: &Echo, whole: &Whole) -> Value {
    let reply = &whole.reply;
    let status = status(whole.reason());
    let mut output = Vec::new();
    if !reply.thought.is_empty() {
        output.push(reasoning(&ids::fresh("rs_"), &reply.thought, "completed"));
    }
    if !reply.text.is_empty() {
        output.push(message(&ids::fresh("msg_"), vec![output_text(&reply.text, &reply.tokens)], status));
    }
    for (id, call) in &reply.calls {
        output.push(function_call(&ids::fresh("fc_"), id, &call.name, &call.arguments, "completed"));
    }
    let mut value = response(meta, echo, status, &output, Some(usage(&reply.usage)));
    if let Some(remarks) = Remarks::new(meta.clamped(whole.max_tokens), reply.unparsed_calls) {
        value["lapidary"] = json!(remarks);
    }
    value
}

/// The item in the making.
#[derive(Debug)]
enum Open {
    Thought { id: String, text: String },
    Text { id: String, text: String, tokens: Vec<TokenLogprob> },
    Call { id: String, index: usize, call_id: String, name: String, arguments: String },
}

/// The events of a streamed response.
#[derive(Debug)]
pub struct ResponseFrames {
    meta: Meta,
    echo: Echo,
    sequence: usize,
    open: Option<Open>,
    output: Vec<Value>,
    limit: Option<usize>,
    failed: bool,
}

impl ResponseFrames {
    /// Events of one reply.
    pub fn new(meta: Meta, echo: Echo) -> Self {
        ResponseFrames { meta, echo, sequence: 0, open: None, output: Vec::new(), limit: None, failed: false }
    }

    fn write(&mut self, kind: &str, mut event: Value, out: &mut Out) {
        event["type"] = kind.into();
        event["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.named(kind, &event);
    }

    /// An event about the item in the making.
    fn about(&mut self, kind: &str, id: &str, mut event: Value, out: &mut Out) {
        event["item_id"] = id.into();
        event["output_index"] = self.output.len().into();
        self.write(kind, event, out);
    }

    fn add(&mut self, item: Value, out: &mut Out) {
        let event = json!({ "output_index": self.output.len(), "item": item });
        self.write("response.output_item.added", event, out);
    }

    fn close(&mut self, status: &str, out: &mut Out) {
        let item = match self.open.take() {
            None => return,
            Some(Open::Thought { id, text }) => {
                let event = json!({ "content_index": 0, "text": text });
                self.about("response.reasoning_text.done", &id, event, out);
                reasoning(&id, &text, "completed")
            }
            Some(Open::Text { id, text, tokens }) => {
                let logprobs = token_logprobs(&tokens);
                let event = json!({ "content_index": 0, "text": text, "logprobs": logprobs });
                self.about("response.output_text.done", &id, event, out);
                let part = output_text(&text, &tokens);
                self.about(
                    "response.content_part.done",
                    &id,
                    json!({ "content_index": 0, "part": part }),
                    out,
                );
                message(&id, vec![part], status)
            }
            Some(Open::Call { id, call_id, name, arguments, .. }) => {
                let event = json!({ "name": name, "arguments": arguments });
                self.about("response.function_call_arguments.done", &id, event, out);
                function_call(&id, &call_id, &name, &arguments, "completed")
            }
        };
        let event = json!({ "output_index": self.output.len(), "item": item });
        self.write("response.output_item.done", event, out);
        self.output.push(item);
    }
}

impl Frames for ResponseFrames {
    fn begin(&mut self, out: &mut Out) {
        for kind in ["response.created", "response.in_progress"] {
            let response = response(&self.meta, &self.echo, "in_progress", &[], None);
            self.write(kind, json!({ "response": response }), out);
        }
    }

    fn event(&mut self, _: usize, event: ServiceEvent, out: &mut Out) {
        match event {
            ServiceEvent::Started { max_tokens, .. } => self.limit = Some(max_tokens),
            ServiceEvent::Thought { delta, .. } => {
                if !matches!(self.open, Some(Open::Thought { .. })) {
                    self.close("completed", out);
                    let id = ids::fresh("rs_");
                    let item = json!({ "id": id, "type": "reasoning", "summary": [], "content": [], "status": "in_progress" });
                    self.add(item, out);
                    self.open = Some(Open::Thought { id, text: String::new() });
                }
                let Some(Open::Thought { id, text }) = &mut self.open else { return };
                text.push_str(&delta);
                let id = id.clone();
                self.about(
                    "response.reasoning_text.delta",
                    &id,
                    json!({ "content_index": 0, "delta": delta }),
                    out,
                );
            }
            ServiceEvent::Text { delta, tokens: more } => {
                if !matches!(self.open, Some(Open::Text { .. })) {
                    self.close("completed", out);
                    let id = ids::fresh("msg_");
                    self.add(message(&id, Vec::new(), "in_progress"), out);
                    let event = json!({ "content_index": 0, "part": output_text("", &[]) });
                    self.about("response.content_part.added", &id, event, out);
                    self.open = Some(Open::Text { id, text: String::new(), tokens: Vec::new() });
                }
                let Some(Open::Text { id, text, tokens }) = &mut self.open else { return };
                let event = json!({ "content_index": 0, "delta": delta, "logprobs": token_logprobs(&more) });
                text.push_str(&delta);
                tokens.extend(more);
                let id = id.clone();
                self.about("response.output_text.delta", &id, event, out);
            }
            ServiceEvent::CallBegin { index, id: call_id, name } => {
                self.close("completed", out);
                let id = ids::fresh("fc_");
                self.add(function_call(&id, &call_id, &name, "", "in_progress"), out);
                self.open = Some(Open::Call { id, index, call_id, name, arguments: String::new() });
            }
            ServiceEvent::CallArguments { index, delta } => {
                let Some(Open::Call { id, index: open, arguments, .. }) = &mut self.open else { return };
                debug_assert_eq!(*open, index, "calls come one after the other");
                arguments.push_str(&delta);
                let id = id.clone();
                self.about("response.function_call_arguments.delta", &id, json!({ "delta": delta }), out);
            }
            ServiceEvent::Finished { reason, usage: counts, unparsed_calls } => {
                let status = status(&reason);
                self.close(status, out);
                let mut value = response(&self.meta, &self.echo, status, &self.output, Some(usage(&counts)));
                if let Some(remarks) = Remarks::new(self.meta.clamped(self.limit), unparsed_calls) {
                    value["lapidary"] = json!(remarks);
                }
                self.write(&format!("response.{status}"), json!({ "response": value }), out);
            }
            ServiceEvent::Failed(error) => {
                self.failed = true;
                let error = ApiError::from(error);
                let mut value = response(&self.meta, &self.echo, "failed", &self.output, None);
                value["error"] =
                    json!({ "code": error.code().unwrap_or("server_error"), "message": error.to_string() });
                self.write("response.failed", json!({ "response": value }), out);
            }
            _ => {}
        }
    }

    fn ended(&self) -> bool {
        self.failed
    }

    fn end(&mut self, _: &mut Out) {}
}
