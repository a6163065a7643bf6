//! The request of `POST /v1/messages`, in Anthropic's format.

use lapidary::ChatInput;
use lapidary::service::{ChatRequest, Format, ParallelCalls, ToolChoice};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::format::{self, ResponseFormat, StructuredOutputs};
use super::message;
use super::sampling::request;
use super::thinking::{Reasoning, Switches};
use super::values::{Strings, TextOr};
use crate::error::ApiError;
use crate::options::ServerOptions;

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
        pub output_config: Option<OutputConfig>,
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

/// `output_config`.
#[derive(Debug, Clone, Default, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct OutputConfig {
    pub effort: Option<String>,
    pub format: Option<OutputFormat>,
}

/// `output_config.format`.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct OutputFormat {
    #[serde(rename = "type")]
    pub kind: String,
    pub schema: Option<Value>,
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
        if self.prompt_logprobs.is_some() {
            return refuse("prompt_logprobs", "a message has no place for them; ask /v1/chat/completions");
        }
        if self.capture.is_some() {
            return refuse("capture", "a message has no place for it; ask /v1/chat/completions");
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
        let config = self.output_config.unwrap_or_default();
        // How much to think, not whether: effort alone switches nothing on here.
        switches.effort_if_on("output_config.effort", config.effort.as_deref())?;
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
            format: match config.format {
                Some(format) => of_output_config(format)?,
                None => format::format(self.response_format, self.structured_outputs)?,
            },
            thinking_budget: thinking.budget,
            generation,
        })
    }
}

fn of_output_config(format: OutputFormat) -> Result<Format, ApiError> {
    let field = "output_config.format";
    match (format.kind.as_str(), format.schema) {
        ("json_schema", Some(schema)) => Ok(Format::JsonSchema { schema, name: None, strict: true }),
        _ => Err(ApiError::bad_request(Some(field), "expected the type json_schema with a schema")),
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
