//! `POST /v1/messages`, Anthropic's format: request, whole reply, events.

use lapidary::ChatInput;
use lapidary::service::{ChatRequest, FinishKind, ParallelCalls, ServiceEvent, ServiceUsage, ToolChoice};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chunks::{Meta, Remarks};
use super::format::{self, ResponseFormat, StructuredOutputs};
use super::message;
use super::sampling::request;
use super::thinking::{Reasoning, Switches};
use super::values::{Strings, TextOr};
use crate::error::ApiError;
use crate::options::ServerOptions;
use crate::replies::Whole;
use crate::sse::{Frames, Out};

/// Clients hand thoughts back with the signature that came with them. Ours proves nothing; it is there because it has
/// to be.
const SIGNATURE: &str = "lapidary";

request! {
    /// The body.
    pub struct MessagesBody {
        pub model: Option<String>,
        pub messages: Vec<Turn>,
        pub system: Option<TextOr<Block>>,
        pub stream: Option<bool>,
        pub stop_sequences: Option<Strings>,
        pub tools: Option<Vec<Tool>>,
        pub tool_choice: Option<Choice>,
        pub thinking: Option<Value>,
        pub reasoning_effort: Option<String>,
        pub reasoning: Option<Reasoning>,
        pub enable_thinking: Option<bool>,
        pub chat_template_kwargs: Option<Map<String, Value>>,
        pub response_format: Option<ResponseFormat>,
        pub structured_outputs: Option<StructuredOutputs>,
        // Known, and without effect on an answer.
        #[allow(dead_code)]
        pub metadata: Option<Value>,
        #[allow(dead_code)]
        pub service_tier: Option<Value>,
    }
}

/// A message.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct Turn {
    pub role: String,
    pub content: TextOr<Block>,
}

/// A block of a message.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, dead_code, reason = "the names are the API's; some are known and have no effect")]
pub struct Block {
    #[serde(rename = "type")]
    pub kind: String,
    pub text: Option<String>,
    pub id: Option<String>,
    pub name: Option<String>,
    pub input: Option<Value>,
    pub tool_use_id: Option<String>,
    pub content: Option<TextOr<Block>>,
    pub is_error: Option<bool>,
    pub thinking: Option<String>,
    signature: Option<Value>,
    data: Option<Value>,
    cache_control: Option<Value>,
    citations: Option<Value>,
    source: Option<Value>,
}

/// A declared tool.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, dead_code, reason = "the names are the API's; some are known and have no effect")]
pub struct Tool {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub name: String,
    pub description: Option<String>,
    pub input_schema: Option<Value>,
    cache_control: Option<Value>,
}

/// `tool_choice`.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct Choice {
    #[serde(rename = "type")]
    pub kind: String,
    pub name: Option<String>,
    pub disable_parallel_tool_use: Option<bool>,
}

impl MessagesBody {
    /// The request as the service takes it. `counting` asks for the prompt only, so that it needs no limit.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn request(self, options: &ServerOptions, counting: bool) -> Result<ChatRequest, ApiError> {
        let refuse = |field: &str, text: &str| Err(ApiError::bad_request(Some(field), text));
        match self.max_tokens {
            None if !counting => return refuse("max_tokens", "expected the most tokens of the reply"),
            Some(0) => return refuse("max_tokens", "expected a whole number above 0, got 0"),
            _ => {}
        }
        if self.n.is_some_and(|n| n != 1) {
            return refuse("n", "a message has one reply");
        }
        let mut sampling = self.sampling();
        if let Some(stops) = self.stop_sequences {
            sampling.stop.get_or_insert_default().0.extend(stops.0);
        }
        let generation = sampling.params(options)?;
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        let mut switches = Switches::default();
        switches.thinking(self.thinking.as_ref())?;
        switches.effort("reasoning_effort", self.reasoning_effort.as_deref())?;
        switches.reasoning(self.reasoning.as_ref())?;
        switches.on("enable_thinking", self.enable_thinking)?;
        switches.template(&mut variables)?;
        let thinking = switches.settle();
        let (tool_choice, parallel_tool_calls) = choice(self.tool_choice)?;
        let continue_final = self.messages.last().is_some_and(|m| m.role == "assistant");
        let input = ChatInput {
            messages: conversation(self.system, self.messages)?,
            tools: tools(self.tools.unwrap_or_default())?,
            continue_final,
            enable_thinking: thinking.on,
            extra: variables,
            ..ChatInput::default()
        };
        Ok(ChatRequest {
            input,
            tool_choice,
            parallel_tool_calls,
            format: format::format(self.response_format, self.structured_outputs)?,
            thinking_budget: thinking.budget,
            generation,
        })
    }
}

fn choice(choice: Option<Choice>) -> Result<(ToolChoice, ParallelCalls), ApiError> {
    let Some(choice) = choice else { return Ok((ToolChoice::Auto, ParallelCalls::Many)) };
    let parallel = match choice.disable_parallel_tool_use {
        Some(true) => ParallelCalls::One,
        _ => ParallelCalls::Many,
    };
    let kind = match (choice.kind.as_str(), choice.name) {
        ("auto", _) => ToolChoice::Auto,
        ("none", _) => ToolChoice::None,
        ("any", _) => ToolChoice::Required,
        ("tool", Some(name)) => ToolChoice::Named(name),
        ("tool", None) => {
            return Err(ApiError::bad_request(
                Some("tool_choice.name"),
                "expected the name of a declared tool",
            ));
        }
        (other, _) => {
            let text = format!("expected auto, any, tool or none, got {other:?}");
            return Err(ApiError::bad_request(Some("tool_choice.type"), &text));
        }
    };
    Ok((kind, parallel))
}

fn tools(tools: Vec<Tool>) -> Result<Vec<Value>, ApiError> {
    tools
        .into_iter()
        .enumerate()
        .map(|(place, tool)| {
            let field = format!("tools[{place}]");
            if let Some(kind) = tool.kind.filter(|kind| kind != "custom") {
                return Err(ApiError::unsupported(
                    Some(&field),
                    &format!("{field}: a tool of type {kind:?}"),
                ));
            }
            message::declaration(&field, tool.name, tool.description, tool.input_schema)
        })
        .collect()
}

/// The conversation in the form that templates know: results of tools become messages of their own.
fn conversation(system: Option<TextOr<Block>>, turns: Vec<Turn>) -> Result<Vec<Value>, ApiError> {
    if turns.is_empty() {
        return Err(ApiError::bad_request(Some("messages"), "expected at least one message"));
    }
    let mut out = Vec::new();
    if let Some(system) = system {
        out.push(json!({ "role": "system", "content": joined("system", system)? }));
    }
    // Ids of the calls that results may answer.
    let mut open: Vec<String> = Vec::new();
    for (place, turn) in turns.into_iter().enumerate() {
        let field = format!("messages[{place}]");
        let blocks = match turn.content {
            TextOr::Parts(blocks) => blocks,
            TextOr::Text(text) => {
                open.clear();
                if turn.role != "user" && turn.role != "assistant" {
                    return Err(wrong_role(&field, &turn.role));
                }
                out.push(json!({ "role": turn.role, "content": text }));
                continue;
            }
        };
        match turn.role.as_str() {
            "user" => user(&field, blocks, &mut open, &mut out)?,
            "assistant" => out.push(assistant(&field, blocks, &mut open)?),
            other => return Err(wrong_role(&field, other)),
        }
    }
    Ok(out)
}

fn wrong_role(field: &str, role: &str) -> ApiError {
    let text = format!("expected user or assistant, got {role:?}; instructions go in system");
    ApiError::bad_request(Some(&format!("{field}.role")), &text)
}

fn user(
    field: &str,
    blocks: Vec<Block>,
    open: &mut Vec<String>,
    out: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let mut texts = Vec::new();
    for (place, block) in blocks.into_iter().enumerate() {
        let field = format!("{field}.content[{place}]");
        match block.kind.as_str() {
            "text" => texts.push(json!({ "type": "text", "text": text_of(&field, block.text)? })),
            "tool_result" => {
                let id = block.tool_use_id.unwrap_or_default();
                if !open.contains(&id) {
                    let text = format!("there is no call {id:?} in the assistant's message before");
                    return Err(ApiError::bad_request(Some(&format!("{field}.tool_use_id")), &text));
                }
                let content =
                    block.content.map_or(Ok(String::new()), |c| joined(&format!("{field}.content"), c))?;
                let content = match block.is_error {
                    Some(true) => format!("error: {content}"),
                    _ => content,
                };
                out.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
            }
            kind => return Err(message::unreadable(&field, kind)),
        }
    }
    open.clear();
    if !texts.is_empty() {
        out.push(json!({ "role": "user", "content": texts }));
    }
    Ok(())
}

fn assistant(field: &str, blocks: Vec<Block>, open: &mut Vec<String>) -> Result<Value, ApiError> {
    open.clear();
    let (mut text, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
    for (place, block) in blocks.into_iter().enumerate() {
        let field = format!("{field}.content[{place}]");
        match block.kind.as_str() {
            "text" => text += &text_of(&field, block.text)?,
            "thinking" => thought += &block.thinking.unwrap_or_default(),
            // Thoughts that only another server can read.
            "redacted_thinking" => {}
            "tool_use" => {
                let Some(name) = block.name else {
                    return Err(ApiError::bad_request(
                        Some(&format!("{field}.name")),
                        "expected the tool's name",
                    ));
                };
                let id = block.id.unwrap_or_default();
                let arguments = block.input.unwrap_or_else(|| json!({}));
                open.push(id.clone());
                let function = json!({ "name": name, "arguments": arguments });
                calls.push(json!({ "id": id, "type": "function", "function": function }));
            }
            kind => return Err(message::unreadable(&field, kind)),
        }
    }
    let mut value = json!({ "role": "assistant", "content": text });
    if !thought.is_empty() {
        value["reasoning_content"] = thought.into();
    }
    if !calls.is_empty() {
        value["tool_calls"] = calls.into();
    }
    Ok(value)
}

fn text_of(field: &str, text: Option<String>) -> Result<String, ApiError> {
    text.ok_or_else(|| {
        ApiError::bad_request(Some(&format!("{field}.text")), "expected the text of the block")
    })
}

/// The text of something that may hold text only.
fn joined(field: &str, content: TextOr<Block>) -> Result<String, ApiError> {
    let blocks = match content {
        TextOr::Text(text) => return Ok(text),
        TextOr::Parts(blocks) => blocks,
    };
    let mut texts = Vec::with_capacity(blocks.len());
    for (place, block) in blocks.into_iter().enumerate() {
        let field = format!("{field}[{place}]");
        match block.kind.as_str() {
            "text" => texts.push(text_of(&field, block.text)?),
            kind => return Err(message::unreadable(&field, kind)),
        }
    }
    Ok(texts.join("\n"))
}

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
