//! The form of an answer: `response_format`, and the extensions for regular expressions and grammars.

use lapidary::service::Format;
use serde::Deserialize;
use serde_json::Value;

use crate::error::ApiError;

/// `response_format`.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct ResponseFormat {
    #[serde(rename = "type")]
    pub kind: String,
    pub json_schema: Option<JsonSchema>,
    /// With type regex.
    pub regex: Option<String>,
    /// With type lark.
    pub grammar: Option<String>,
}

/// The schema of an answer.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs, dead_code, reason = "the names are the API's; a description has no effect")]
pub struct JsonSchema {
    pub name: Option<String>,
    pub description: Option<String>,
    pub schema: Option<Value>,
    pub strict: Option<bool>,
}

/// vLLM's `structured_outputs`.
#[derive(Debug, Clone, Default, Deserialize)]
#[allow(missing_docs, reason = "the names are the API's")]
pub struct StructuredOutputs {
    pub json: Option<Value>,
    pub regex: Option<String>,
    pub grammar: Option<String>,
    pub json_object: Option<bool>,
}

/// What was asked for, if only one thing was.
///
/// # Errors
/// The field that is wrong, or the second of two.
pub fn format(
    response_format: Option<ResponseFormat>,
    structured: Option<StructuredOutputs>,
) -> Result<Format, ApiError> {
    let by_format = response_format.map_or(Ok(Format::Text), of_response_format)?;
    let by_outputs = structured.map_or(Ok(Format::Text), of_structured_outputs)?;
    match (by_format, by_outputs) {
        (Format::Text, other) | (other, Format::Text) => Ok(other),
        _ => Err(ApiError::bad_request(
            Some("structured_outputs"),
            "response_format asks for a form too; send one of them",
        )),
    }
}

fn of_response_format(asked: ResponseFormat) -> Result<Format, ApiError> {
    let missing = |field: &str, text: &str| Err(ApiError::bad_request(Some(field), text));
    match (asked.kind.as_str(), asked.json_schema) {
        ("text", _) => Ok(Format::Text),
        ("json_object", _) => Ok(Format::JsonObject),
        ("json_schema", Some(JsonSchema { name, schema: Some(schema), strict, .. })) => {
            Ok(Format::JsonSchema { schema, name, strict: strict.unwrap_or(false) })
        }
        ("json_schema", Some(_)) => missing("response_format.json_schema.schema", "expected a JSON Schema"),
        ("json_schema", None) => {
            missing("response_format.json_schema", "expected an object with name and schema")
        }
        ("regex", _) => match asked.regex {
            Some(regex) => Ok(Format::Regex(regex)),
            None => missing("response_format.regex", "expected a regular expression"),
        },
        ("lark", _) => match asked.grammar {
            Some(grammar) => Ok(Format::Lark(grammar)),
            None => missing("response_format.grammar", "expected a Lark grammar"),
        },
        (other, _) => missing(
            "response_format.type",
            &format!("expected text, json_object, json_schema, regex or lark, got {other:?}"),
        ),
    }
}

fn of_structured_outputs(asked: StructuredOutputs) -> Result<Format, ApiError> {
    let field = "structured_outputs";
    let mut forms = Vec::new();
    forms.extend(asked.json.map(|schema| Format::JsonSchema { schema, name: None, strict: true }));
    forms.extend(asked.regex.map(Format::Regex));
    forms.extend(asked.grammar.map(Format::Lark));
    forms.extend((asked.json_object == Some(true)).then_some(Format::JsonObject));
    match forms.len() {
        0 => Ok(Format::Text),
        1 => Ok(forms.remove(0)),
        _ => Err(ApiError::bad_request(Some(field), "expected one of json, regex, grammar and json_object")),
    }
}
