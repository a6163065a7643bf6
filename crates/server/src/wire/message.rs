//! Messages, tools and calls, as OpenAI's chat format has them.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use lapidary::service::ToolChoice;

use super::values::TextOr;
use crate::error::ApiError;

/// A message of a conversation.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct Message {
    pub role: String,
    pub content: Option<TextOr<Part>>,
    pub name: Option<String>,
    pub tool_calls: Option<Vec<Call>>,
    pub tool_call_id: Option<String>,
    pub reasoning_content: Option<String>,
    pub reasoning: Option<String>,
    pub refusal: Option<String>,
}

/// A part of a message.
#[derive(Debug, Clone, Deserialize)]
#[allow(
    missing_docs,
    dead_code,
    reason = "the names are the API's; the media are known in order to be refused"
)]
pub struct Part {
    #[serde(rename = "type")]
    pub kind: String,
    pub text: Option<String>,
    pub refusal: Option<String>,
    image_url: Option<Value>,
    input_audio: Option<Value>,
    video_url: Option<Value>,
    file: Option<Value>,
}

/// A call in the history.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, dead_code, reason = "the names are the API's; there is one type of call")]
pub struct Call {
    pub id: Option<String>,
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub function: CalledFunction,
}

/// What a call calls.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct CalledFunction {
    pub name: String,
    /// JSON text, or the object itself.
    pub arguments: Option<Value>,
}

/// A declared tool.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct Tool {
    #[serde(rename = "type")]
    pub kind: String,
    pub function: Option<Function>,
}

/// The function of a declared tool.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, dead_code, reason = "the names are the API's; schemas are always followed")]
pub struct Function {
    pub name: String,
    pub description: Option<String>,
    pub parameters: Option<Value>,
    pub strict: Option<bool>,
}

/// The conversation as the service takes it.
///
/// # Errors
/// The message that is wrong, by its place.
pub fn conversation(messages: Vec<Message>) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::bad_request(Some("messages"), "expected at least one message"));
    }
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    // Ids of the calls that a tool message may answer.
    let mut open: Option<Vec<Option<String>>> = None;
    for (place, message) in messages.into_iter().enumerate() {
        let field = |name: &str| format!("messages[{place}].{name}");
        let refuse = |name: &str, text: &str| Err(ApiError::bad_request(Some(&field(name)), text));
        let role = match message.role.as_str() {
            // One word for the same thing.
            "system" | "developer" => "system",
            "user" => "user",
            "assistant" => "assistant",
            "tool" => "tool",
            "function" => {
                return refuse(
                    "role",
                    "messages of functions are not taken; send role tool with tool_call_id",
                );
            }
            other => {
                return refuse(
                    "role",
                    &format!("expected system, developer, user, assistant or tool, got {other:?}"),
                );
            }
        };
        let content = match message.content {
            Some(TextOr::Text(text)) => Value::String(text),
            Some(TextOr::Parts(parts)) => text_parts(place, parts)?,
            None if role == "assistant" => match message.refusal {
                Some(refusal) => Value::String(refusal),
                None => Value::Null,
            },
            None => return refuse("content", "expected a string or a list of parts"),
        };
        let mut value = Map::new();
        value.insert("role".into(), role.into());
        value.insert("content".into(), content);
        if let Some(name) = message.name {
            value.insert("name".into(), name.into());
        }
        if role == "tool" {
            // A result that belongs to no call would leave no trace in the prompt.
            let Some(open) = &open else {
                return refuse(
                    "role",
                    "a tool message follows the assistant's message with the call that it answers",
                );
            };
            if let Some(id) = message.tool_call_id {
                if !open.iter().any(|known| known.as_ref() == Some(&id)) {
                    return refuse(
                        "tool_call_id",
                        &format!("there is no call {id:?} in the assistant's message before"),
                    );
                }
                value.insert("tool_call_id".into(), id.into());
            } else {
                return refuse("tool_call_id", "expected the id of the call that the message answers");
            }
        } else {
            open = None;
        }
        if let Some(calls) = message.tool_calls.filter(|calls| !calls.is_empty()) {
            if role != "assistant" {
                return refuse("tool_calls", "only the assistant calls tools");
            }
            open = Some(calls.iter().map(|call| call.id.clone()).collect());
            value.insert("tool_calls".into(), calls.into_iter().map(call).collect());
        }
        if let Some(reasoning) = message.reasoning_content.or(message.reasoning) {
            value.insert("reasoning_content".into(), reasoning.into());
        }
        out.push(Value::Object(value));
    }
    Ok(out)
}

fn text_parts(message: usize, parts: Vec<Part>) -> Result<Value, ApiError> {
    let mut out = Vec::with_capacity(parts.len());
    for (place, part) in parts.into_iter().enumerate() {
        let text = match part.kind.as_str() {
            "text" | "input_text" | "output_text" => part.text,
            "refusal" => part.refusal,
            kind => return Err(unreadable(&format!("messages[{message}].content[{place}]"), kind)),
        };
        let Some(text) = text else {
            let field = format!("messages[{message}].content[{place}].text");
            return Err(ApiError::bad_request(Some(&field), "expected the text of the part"));
        };
        out.push(json!({ "type": "text", "text": text }));
    }
    Ok(Value::Array(out))
}

/// A part of a message that cannot be read.
pub fn unreadable(field: &str, kind: &str) -> ApiError {
    let needs = match kind {
        "image_url" | "input_image" | "image" => "a vision tower, and this model is loaded without one",
        "input_audio" | "audio" => "an audio tower, and this model is loaded without one",
        "video_url" | "video" => "a vision tower, and this model is loaded without one",
        "file" | "input_file" | "document" => "a reader for files, and this server has none",
        _ => return ApiError::unsupported(Some(field), &format!("{field}: a part of type {kind:?}")),
    };
    ApiError::bad_request(Some(field), &format!("a part of type {kind:?} needs {needs}; only text is taken"))
}

fn call(call: Call) -> Value {
    let arguments = call.function.arguments.unwrap_or_else(|| json!({}));
    json!({
        "id": call.id,
        "type": "function",
        "function": { "name": call.function.name, "arguments": arguments },
    })
}

/// The declared tools as the service takes them.
///
/// # Errors
/// The tool that is wrong, by its place.
pub fn tools(tools: Vec<Tool>) -> Result<Vec<Value>, ApiError> {
    tools
        .into_iter()
        .enumerate()
        .map(|(place, tool)| {
            if tool.kind != "function" {
                let field = format!("tools[{place}].type");
                return Err(ApiError::unsupported(
                    Some(&field),
                    &format!("{field}: a tool of type {:?}", tool.kind),
                ));
            }
            let Some(function) = tool.function else {
                let field = format!("tools[{place}].function");
                return Err(ApiError::bad_request(
                    Some(&field),
                    "expected the function's name and parameters",
                ));
            };
            declaration(
                &format!("tools[{place}].function"),
                function.name,
                function.description,
                function.parameters,
            )
        })
        .collect()
}

/// A declaration of one tool.
///
/// # Errors
/// A name that the model could not spell in a call, or parameters that are no schema.
pub fn declaration(
    field: &str,
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
) -> Result<Value, ApiError> {
    let fits = |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b));
    if name.is_empty() || name.len() > 128 || !fits(&name) {
        let text = format!("expected 1 to 128 letters, digits, _, - or ., got {name:?}");
        return Err(ApiError::bad_request(Some(&format!("{field}.name")), &text));
    }
    let mut function = Map::new();
    function.insert("name".into(), name.into());
    function.insert("description".into(), description.unwrap_or_default().into());
    match parameters {
        None | Some(Value::Null) => {}
        Some(schema @ Value::Object(_)) => {
            function.insert("parameters".into(), schema);
        }
        Some(_) => {
            let text = "expected a JSON Schema of type object";
            return Err(ApiError::bad_request(Some(&format!("{field}.parameters")), text));
        }
    }
    Ok(json!({ "type": "function", "function": function }))
}

/// `tool_choice`: a word, or an object that names a function.
///
/// # Errors
/// Anything else.
pub fn tool_choice(value: Option<&Value>) -> Result<ToolChoice, ApiError> {
    let field = Some("tool_choice");
    match value {
        None | Some(Value::Null) => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" | "any" => Ok(ToolChoice::Required),
            _ => Err(ApiError::bad_request(
                field,
                &format!("expected auto, none, required or a function, got {word:?}"),
            )),
        },
        Some(Value::Object(object)) => {
            let kind = object.get("type").and_then(Value::as_str).unwrap_or("function");
            // The chat format nests the name, the Responses format does not.
            let name = object.get("function").and_then(|f| f.get("name")).or_else(|| object.get("name"));
            match (kind, name.and_then(Value::as_str)) {
                ("function" | "tool", Some(name)) => Ok(ToolChoice::Named(name.to_owned())),
                ("function" | "tool", None) => Err(ApiError::bad_request(
                    Some("tool_choice.function.name"),
                    "expected the name of a declared tool",
                )),
                (other, _) => Err(ApiError::unsupported(field, &format!("tool_choice: type {other:?}"))),
            }
        }
        Some(_) => Err(ApiError::bad_request(field, "expected a string or an object")),
    }
}
