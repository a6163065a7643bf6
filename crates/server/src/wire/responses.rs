//! The request of `POST /v1/responses`.
//!
//! The server keeps nothing from request to request: a conversation comes whole in `input`.

use lapidary::ChatInput;
use lapidary::service::{ChatRequest, Format, ParallelCalls};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::MAX_TOP_LOGPROBS;
use super::message;
use super::sampling::request;
use super::thinking::{Reasoning, Switches};
use super::values::TextOr;
use crate::body::Ignored;
use crate::error::ApiError;
use crate::options::ServerOptions;

request! {
    /// The body.
    pub struct ResponsesBody {
        pub model: Option<String>,
        pub input: TextOr<Item>,
        pub instructions: Option<String>,
        pub stream: Option<bool>,
        pub max_output_tokens: Option<usize>,
        pub tools: Option<Vec<Tool>>,
        pub tool_choice: Option<Value>,
        pub parallel_tool_calls: Option<bool>,
        pub text: Option<TextOptions>,
        pub top_logprobs: Option<u32>,
        pub include: Option<Vec<String>>,
        pub reasoning: Option<Reasoning>,
        pub reasoning_effort: Option<String>,
        pub thinking: Option<Value>,
        pub enable_thinking: Option<bool>,
        pub chat_template_kwargs: Option<Map<String, Value>>,
        pub truncation: Option<String>,
        pub store: Option<bool>,
        pub metadata: Option<Value>,
        // Known in order to be refused by name.
        pub previous_response_id: Option<Value>,
        pub conversation: Option<Value>,
        pub background: Option<bool>,
        pub prompt: Option<Value>,
        // Known, and without effect on an answer.
        #[allow(dead_code)]
        pub user: Option<Value>,
        #[allow(dead_code)]
        pub safety_identifier: Option<Value>,
        #[allow(dead_code)]
        pub prompt_cache_key: Option<Value>,
        #[allow(dead_code)]
        pub service_tier: Option<Value>,
    }
}

/// An item of the input. What it is decides which fields it has.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, dead_code, reason = "the names are the API's; some are known and have no effect")]
pub struct Item {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub role: Option<String>,
    pub content: Option<TextOr<Part>>,
    pub call_id: Option<String>,
    pub name: Option<String>,
    pub arguments: Option<String>,
    pub output: Option<TextOr<Part>>,
    id: Option<String>,
    status: Option<String>,
    summary: Option<Value>,
    encrypted_content: Option<Value>,
}

/// A part of an item.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, dead_code, reason = "the names are the API's; some are known and have no effect")]
pub struct Part {
    #[serde(rename = "type")]
    pub kind: String,
    pub text: Option<String>,
    pub refusal: Option<String>,
    annotations: Option<Value>,
    logprobs: Option<Value>,
    image_url: Option<Value>,
    file_id: Option<Value>,
    detail: Option<Value>,
}

/// A declared tool.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, dead_code, reason = "the names are the API's; schemas are always followed")]
pub struct Tool {
    #[serde(rename = "type")]
    pub kind: String,
    pub name: Option<String>,
    pub description: Option<String>,
    pub parameters: Option<Value>,
    pub strict: Option<bool>,
}

/// `text`.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct TextOptions {
    pub format: Option<TextFormat>,
}

/// `text.format`.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, dead_code, reason = "the names are the API's; a description has no effect")]
pub struct TextFormat {
    #[serde(rename = "type")]
    pub kind: String,
    pub name: Option<String>,
    pub description: Option<String>,
    pub schema: Option<Value>,
    pub strict: Option<bool>,
}

/// What a reply repeats of its request.
#[derive(Debug, Clone, Default)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct Echo {
    pub instructions: Value,
    pub max_output_tokens: Option<usize>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub tools: Value,
    pub tool_choice: Value,
    pub parallel: bool,
    pub format: Value,
    pub effort: Option<String>,
    pub metadata: Value,
}

impl ResponsesBody {
    /// The request as the service takes it, and what the reply repeats of it.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn request(
        self,
        options: &ServerOptions,
        ignored: &mut Ignored,
    ) -> Result<(ChatRequest, Echo), ApiError> {
        self.refuse_what_is_not_here()?;
        if self.store == Some(true) {
            ignored.add("store");
            ignored.refuse_if(options.strict)?;
        }
        let mut sampling = self.sampling();
        sampling.max_tokens = match (self.max_output_tokens, self.max_tokens) {
            (Some(0), _) => {
                let text = "expected a whole number above 0, got 0";
                return Err(ApiError::bad_request(Some("max_output_tokens"), text));
            }
            (limit, other) => limit.or(other),
        };
        let mut generation = sampling.params(options)?;
        generation.logprobs = self.logprobs(options, ignored)?;
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        let mut switches = Switches::default();
        switches.reasoning(self.reasoning.as_ref())?;
        switches.effort("reasoning_effort", self.reasoning_effort.as_deref())?;
        switches.thinking(self.thinking.as_ref())?;
        switches.on("enable_thinking", self.enable_thinking)?;
        switches.template(&mut variables)?;
        let thinking = switches.settle();
        let tools = tools(self.tools.unwrap_or_default())?;
        let (format, format_echo) = format(self.text.and_then(|text| text.format))?;
        let echo = Echo {
            instructions: self.instructions.clone().into(),
            max_output_tokens: self.max_output_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            tools: tools.iter().map(flat).collect(),
            tool_choice: self.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            parallel: self.parallel_tool_calls.unwrap_or(true),
            format: format_echo,
            effort: self.reasoning.and_then(|r| r.effort),
            metadata: self.metadata.filter(|m| !m.is_null()).unwrap_or_else(|| json!({})),
        };
        let messages = conversation(self.instructions, self.input)?;
        let continue_final = messages.last().is_some_and(|m| m["role"] == "assistant");
        let input = ChatInput {
            messages,
            tools,
            continue_final,
            enable_thinking: thinking.on,
            extra: variables,
            ..ChatInput::default()
        };
        let request = ChatRequest {
            input,
            tool_choice: message::tool_choice(self.tool_choice.as_ref())?,
            parallel_tool_calls: if echo.parallel { ParallelCalls::Many } else { ParallelCalls::One },
            format,
            thinking_budget: thinking.budget,
            generation,
        };
        Ok((request, echo))
    }

    /// The answer's probabilities are told when `include` names them; `top_logprobs` alone asks for them too.
    fn logprobs(&self, options: &ServerOptions, ignored: &mut Ignored) -> Result<Option<u32>, ApiError> {
        let mut wanted = self.top_logprobs.is_some_and(|top| top > 0);
        for (i, name) in self.include.iter().flatten().enumerate() {
            match name.as_str() {
                "message.output_text.logprobs" => wanted = true,
                _ => ignored.add(&format!("include[{i}]")),
            }
        }
        ignored.refuse_if(options.strict)?;
        match self.top_logprobs {
            Some(top) if top > MAX_TOP_LOGPROBS => {
                let text = format!("expected a whole number from 0 to {MAX_TOP_LOGPROBS}, got {top}");
                Err(ApiError::bad_request(Some("top_logprobs"), &text))
            }
            top => Ok(wanted.then_some(top.unwrap_or(0))),
        }
    }

    fn refuse_what_is_not_here(&self) -> Result<(), ApiError> {
        let refuse = |field: &str, text: &str| Err(ApiError::bad_request(Some(field), text));
        let set = |value: &Option<Value>| value.as_ref().is_some_and(|v| !v.is_null());
        let whole = "this server keeps no responses; send the whole conversation in input";
        if set(&self.previous_response_id) {
            return refuse("previous_response_id", whole);
        }
        if set(&self.conversation) {
            return refuse("conversation", whole);
        }
        if set(&self.prompt) {
            return refuse("prompt", "this server keeps no prompts; send instructions and input");
        }
        if self.background == Some(true) {
            return refuse("background", "this server keeps no responses; use stream, or lapidary batch");
        }
        if self.truncation.as_deref().is_some_and(|t| t != "disabled") {
            return refuse("truncation", "nothing is cut out of a prompt here; expected disabled");
        }
        if self.prompt_logprobs.is_some() {
            return refuse("prompt_logprobs", "a response has no place for them; ask /v1/chat/completions");
        }
        if self.capture.is_some() {
            return refuse("capture", "a response has no place for it; ask /v1/chat/completions");
        }
        if self.n.is_some_and(|n| n != 1) {
            return refuse("n", "a response is one reply");
        }
        Ok(())
    }
}

/// A declaration as the Responses format has it: without the nested function.
fn flat(tool: &Value) -> Value {
    let mut flat = json!({ "type": "function", "strict": true, "parameters": null });
    if let Some(function) = tool["function"].as_object() {
        for (name, value) in function {
            flat[name] = value.clone();
        }
    }
    flat
}

fn tools(tools: Vec<Tool>) -> Result<Vec<Value>, ApiError> {
    tools
        .into_iter()
        .enumerate()
        .map(|(place, tool)| {
            let field = format!("tools[{place}]");
            if tool.kind != "function" {
                let what = format!("{field}: a tool of type {:?}", tool.kind);
                return Err(ApiError::unsupported(Some(&field), &what));
            }
            message::declaration(&field, tool.name.unwrap_or_default(), tool.description, tool.parameters)
        })
        .collect()
}

fn format(format: Option<TextFormat>) -> Result<(Format, Value), ApiError> {
    let Some(format) = format else { return Ok((Format::Text, json!({ "type": "text" }))) };
    match (format.kind.as_str(), format.schema) {
        ("text", _) => Ok((Format::Text, json!({ "type": "text" }))),
        ("json_object", _) => Ok((Format::JsonObject, json!({ "type": "json_object" }))),
        ("json_schema", Some(schema)) => {
            let strict = format.strict.unwrap_or(false);
            let name = format.name;
            let echo = json!({ "type": "json_schema", "name": name, "schema": schema, "strict": strict });
            Ok((Format::JsonSchema { schema, name, strict }, echo))
        }
        ("json_schema", None) => {
            Err(ApiError::bad_request(Some("text.format.schema"), "expected a JSON Schema"))
        }
        (other, _) => {
            let text = format!("expected text, json_object or json_schema, got {other:?}");
            Err(ApiError::bad_request(Some("text.format.type"), &text))
        }
    }
}

/// Items become messages: what the assistant thought, said and called in a row is one message of it.
fn conversation(instructions: Option<String>, input: TextOr<Item>) -> Result<Vec<Value>, ApiError> {
    let mut out: Vec<Value> = Vec::new();
    out.extend(instructions.map(|text| json!({ "role": "system", "content": text })));
    let items = match input {
        TextOr::Text(text) => {
            out.push(json!({ "role": "user", "content": text }));
            return Ok(out);
        }
        TextOr::Parts(items) => items,
    };
    if items.is_empty() {
        return Err(ApiError::bad_request(Some("input"), "expected a text or at least one item"));
    }
    // Thoughts wait for what they led to.
    let mut thought: Option<String> = None;
    for (place, item) in items.into_iter().enumerate() {
        let field = format!("input[{place}]");
        let refuse =
            |name: &str, text: &str| Err(ApiError::bad_request(Some(&format!("{field}.{name}")), text));
        match item.kind.as_deref().unwrap_or("message") {
            "message" => {
                let role = match item.role.as_deref() {
                    Some("system" | "developer") => "system",
                    Some("user") => "user",
                    Some("assistant") => "assistant",
                    other => {
                        let text = format!("expected system, developer, user or assistant, got {other:?}");
                        return refuse("role", &text);
                    }
                };
                let Some(content) = item.content else {
                    return refuse("content", "expected a text or a list of parts");
                };
                let content = texts(&format!("{field}.content"), content)?.concat();
                let mut message = json!({ "role": role, "content": content });
                if role == "assistant"
                    && let Some(thought) = thought.take()
                {
                    message["reasoning_content"] = thought.into();
                }
                out.push(message);
            }
            "reasoning" => {
                let Some(content) = item.content else { continue };
                let text = texts(&format!("{field}.content"), content)?.concat();
                thought.get_or_insert_default().push_str(&text);
            }
            "function_call" => {
                let (Some(id), Some(name)) = (item.call_id, item.name) else {
                    return refuse("call_id", "expected call_id and name");
                };
                let arguments = item.arguments.unwrap_or_else(|| "{}".to_owned());
                let call = json!({
                    "id": id, "type": "function", "function": { "name": name, "arguments": arguments },
                });
                if out.last().is_none_or(|last| last["role"] != "assistant") {
                    out.push(json!({ "role": "assistant", "content": null }));
                }
                let last = out.last_mut().expect("one was put there");
                if let Some(thought) = thought.take() {
                    last["reasoning_content"] = thought.into();
                }
                match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                }
            }
            "function_call_output" => {
                let id = item.call_id.unwrap_or_default();
                let is_it = |call: &Value| call["id"] == id.as_str();
                let calls =
                    out.iter().rev().find(|m| m["role"] != "tool").and_then(|m| m["tool_calls"].as_array());
                if !calls.is_some_and(|calls| calls.iter().any(is_it)) {
                    return refuse("call_id", &format!("there is no function_call {id:?} right before"));
                }
                let Some(output) = item.output else {
                    return refuse("output", "expected what the function gave");
                };
                let content = texts(&format!("{field}.output"), output)?.concat();
                out.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
            }
            kind => {
                let what = format!("{field}: an item of type {kind:?}");
                return Err(ApiError::unsupported(Some(&field), &what));
            }
        }
    }
    Ok(out)
}

fn texts(field: &str, content: TextOr<Part>) -> Result<Vec<String>, ApiError> {
    let parts = match content {
        TextOr::Text(text) => return Ok(vec![text]),
        TextOr::Parts(parts) => parts,
    };
    parts
        .into_iter()
        .enumerate()
        .map(|(place, part)| {
            let field = format!("{field}[{place}]");
            let text = match part.kind.as_str() {
                "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text" => part.text,
                "refusal" => part.refusal,
                kind => return Err(message::unreadable(&field, kind)),
            };
            text.ok_or_else(|| {
                ApiError::bad_request(Some(&format!("{field}.text")), "expected the text of the part")
            })
        })
        .collect()
}
