//! Holds requests against what can be done, before anything is queued. Every refusal names its field.

use lapidary_engine::sampling::{SamplingError, SamplingParams};
use lapidary_text::{Error as TextError, Tokenizer};
use serde_json::Value;

use super::error::RequestError;
use super::request::{ChatRequest, GenerationParams, ToolChoice};
use crate::Defaults;

/// Most stop strings, and bytes of one. Each is looked for at every character.
pub(super) const MAX_STOPS: usize = 32;
const MAX_STOP_BYTES: usize = 1024;

/// Messages have a form that a template can take, and no part that nobody could read.
pub(super) fn messages(messages: &[Value]) -> Result<(), RequestError> {
    if messages.is_empty() {
        return Err(RequestError::bad("messages", "expected at least one message"));
    }
    for (m, message) in messages.iter().enumerate() {
        let field = format!("messages[{m}]");
        if !message.is_object() {
            return Err(RequestError::bad(field, "expected an object"));
        }
        if !message["role"].is_string() {
            return Err(RequestError::bad(format!("{field}.role"), "expected a string"));
        }
        match &message["content"] {
            Value::Null | Value::String(_) => {}
            Value::Array(parts) => {
                for (p, part) in parts.iter().enumerate() {
                    let field = format!("{field}.content[{p}]");
                    let kind = part["type"].as_str().unwrap_or_default();
                    if kind != "text" {
                        let tower = match kind {
                            "image" | "image_url" | "input_image" | "video" => "vision",
                            "audio" | "input_audio" => "audio",
                            _ => {
                                return Err(RequestError::bad(
                                    field,
                                    format!("a part of type {kind:?} is not known; expected \"text\""),
                                ));
                            }
                        };
                        return Err(RequestError::Unsupported {
                            what: format!(
                                "{field}: a part of type {kind:?} needs the {tower} part of the model, which is not loaded; parts of type \"text\" can be read"
                            ),
                        });
                    }
                    if !part["text"].is_string() {
                        return Err(RequestError::bad(format!("{field}.text"), "expected a string"));
                    }
                }
            }
            // Google's own form of a tool's result.
            Value::Object(_) if message["role"] == "tool" => {}
            _ => {
                return Err(RequestError::bad(
                    format!("{field}.content"),
                    "expected a string, a list of parts, or null",
                ));
            }
        }
    }
    Ok(())
}

/// Tools have names that a call can spell, each its own, and the choice is among them.
pub(super) fn tools(request: &ChatRequest) -> Result<(), RequestError> {
    let mut names: Vec<&str> = Vec::new();
    for (t, tool) in request.input.tools.iter().enumerate() {
        let function = tool.get("function").unwrap_or(tool);
        let field = format!("tools[{t}].function.name");
        let Some(name) = function["name"].as_str() else {
            return Err(RequestError::bad(field, "expected a string"));
        };
        let spelled =
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
        if !spelled {
            return Err(RequestError::bad(field, "expected letters, digits, '_', '-' and '.' only"));
        }
        if names.contains(&name) {
            return Err(RequestError::bad(field, format!("there are two tools named {name:?}")));
        }
        if !matches!(function.get("parameters"), None | Some(Value::Null | Value::Object(_))) {
            let field = format!("tools[{t}].function.parameters");
            return Err(RequestError::bad(field, "expected a schema: an object"));
        }
        names.push(name);
    }
    match &request.tool_choice {
        ToolChoice::Required if names.is_empty() => {
            Err(RequestError::bad("tool_choice", "a call is required and no tool is declared"))
        }
        ToolChoice::Named(name) if !names.contains(&name.as_str()) => {
            Err(RequestError::bad("tool_choice", format!("no tool named {name:?} is declared")))
        }
        _ => Ok(()),
    }
}

/// The sampling parameters of a request: its own, else the model's.
pub(super) fn sampling(
    params: &GenerationParams,
    defaults: &Defaults,
    tokenizer: &Tokenizer,
    vocab: usize,
    max_logprobs: u32,
) -> Result<SamplingParams, RequestError> {
    let own = &defaults.sampling;
    for (field, asked) in [("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)] {
        if let Some(n) = asked.filter(|n| *n > max_logprobs) {
            let text = format!("{n} were asked for, at most {max_logprobs} are given");
            return Err(RequestError::bad(field, text));
        }
    }
    let mut logit_bias = Vec::with_capacity(params.logit_bias.len());
    for &(id, bias) in &params.logit_bias {
        let id = tokenizer.check_id(id).map_err(|_| no_such_id("logit_bias", id, tokenizer))?;
        logit_bias.push((id, bias));
    }
    let sampling = SamplingParams {
        temperature: params.temperature.unwrap_or(own.temperature),
        top_k: params.top_k.unwrap_or(own.top_k),
        top_p: params.top_p.unwrap_or(own.top_p),
        min_p: params.min_p.unwrap_or(own.min_p),
        repetition_penalty: params.repetition_penalty.unwrap_or(own.repetition_penalty),
        presence_penalty: params.presence_penalty.unwrap_or(own.presence_penalty),
        frequency_penalty: params.frequency_penalty.unwrap_or(own.frequency_penalty),
        logit_bias,
        suppress: own.suppress.clone(),
        seed: 0,
        logprobs: params.logprobs,
    };
    sampling.validate(vocab).map_err(sampling_error)?;
    Ok(sampling)
}

/// The rest of what a request says about generating.
pub(super) fn generation(
    params: &GenerationParams,
    tokenizer: &Tokenizer,
    max_n: usize,
) -> Result<Vec<u32>, RequestError> {
    if params.n == 0 || params.n > max_n {
        return Err(RequestError::bad("n", format!("expected 1 to {max_n}, found {}", params.n)));
    }
    if params.max_tokens == Some(0) {
        match params.prompt_logprobs {
            None => {
                return Err(RequestError::bad(
                    "max_tokens",
                    "expected at least 1; 0 goes with prompt_logprobs",
                ));
            }
            Some(_) if params.n > 1 => {
                return Err(RequestError::bad("n", "several replies without a token are one; expected 1"));
            }
            Some(_) => {}
        }
    }
    if let Some(max) = params.max_tokens.filter(|max| params.min_tokens > *max) {
        let min = params.min_tokens;
        return Err(RequestError::bad(
            "min_tokens",
            format!("{min} is more than max_tokens, which is {max}"),
        ));
    }
    if params.stop.len() > MAX_STOPS {
        return Err(RequestError::bad(
            "stop",
            format!("{} strings, at most {MAX_STOPS} are taken", params.stop.len()),
        ));
    }
    for (i, stop) in params.stop.iter().enumerate() {
        let field = format!("stop[{i}]");
        if stop.is_empty() {
            return Err(RequestError::bad(field, "an empty string would stop everything at once"));
        }
        if stop.len() > MAX_STOP_BYTES {
            let length = stop.len();
            return Err(RequestError::bad(
                field,
                format!("it has {length} bytes, at most {MAX_STOP_BYTES} are taken"),
            ));
        }
    }
    ids("stop_ids", &params.stop_ids, tokenizer)
}

/// Ids that the vocabulary has.
pub(super) fn ids(field: &str, ids: &[i64], tokenizer: &Tokenizer) -> Result<Vec<u32>, RequestError> {
    let each = ids.iter().enumerate();
    each.map(|(i, &id)| {
        tokenizer.check_id(id).map_err(|_| no_such_id(&format!("{field}[{i}]"), id, tokenizer))
    })
    .collect()
}

fn no_such_id(field: &str, id: i64, tokenizer: &Tokenizer) -> RequestError {
    let last = tokenizer.vocab_size().saturating_sub(1);
    RequestError::bad(field, format!("{id} is no token of this vocabulary, which has ids from 0 to {last}"))
}

/// What the sampler finds wrong, by field.
pub(super) fn sampling_error(error: SamplingError) -> RequestError {
    let field = match &error {
        SamplingError::Parameter { name, .. } | SamplingError::TokenOutOfRange { name, .. } => *name,
        SamplingError::DuplicateBias { .. } => "logit_bias",
        _ => return RequestError::Internal(error.to_string()),
    };
    RequestError::bad(field, error.to_string())
}

/// What the text layer finds wrong with a conversation.
pub(super) fn conversation_error(error: TextError) -> RequestError {
    match error {
        TextError::Conversation { field, problem } => RequestError::BadRequest { field, message: problem },
        TextError::Refused(message) => RequestError::bad("messages", message),
        // Odd fields of a message reach the template only there.
        error @ (TextError::Template(_) | TextError::Fuel(_)) => {
            RequestError::bad("messages", error.to_string())
        }
        error => RequestError::Internal(error.to_string()),
    }
}

/// What cannot be honoured in a format or a schema. `outer` is the request's field that holds it.
pub(super) fn grammar_error(outer: &str, error: TextError) -> RequestError {
    match error {
        TextError::Grammar { place, problem } if place.starts_with("tools") => {
            RequestError::BadRequest { field: place, message: problem }
        }
        TextError::Grammar { place, problem } if place == "vocabulary" => {
            RequestError::Unsupported { what: format!("{outer}: {problem}") }
        }
        TextError::Grammar { place, problem } => {
            RequestError::BadRequest { field: format!("{outer}.{place}"), message: problem }
        }
        TextError::MissingToken(token) => RequestError::Unsupported {
            what: format!("{outer}: this model's vocabulary has no {token} token, which calls of tools need"),
        },
        error => RequestError::bad(outer, error.to_string()),
    }
}
