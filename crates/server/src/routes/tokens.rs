//! `POST /tokenize` and `POST /detokenize`, in vLLM's form.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use lapidary::ChatInput;
use lapidary::service::{Bos, Markers};
use serde::Deserialize;
use serde_json::json;

use crate::app::App;
use crate::body::Wire;
use crate::error::ApiError;
use crate::json::Json;
use crate::wire::message::{self, Message, Tool};
use crate::wire::values::Id;

/// A text or a conversation to tokenise.
#[derive(Debug, Deserialize)]
pub struct TokenizeBody {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    tools: Option<Vec<Tool>>,
    add_generation_prompt: Option<bool>,
    add_special_tokens: Option<bool>,
    enable_thinking: Option<bool>,
}

/// Ids of a text, or of the prompt that a conversation becomes.
pub async fn tokenize(
    State(app): State<App>,
    Wire { value: body, ignored }: Wire<TokenizeBody>,
) -> Result<Response, ApiError> {
    app.model_name(body.model.as_deref())?;
    let bos = if body.add_special_tokens == Some(false) { Bos::AsGiven } else { Bos::One };
    let (text, ids) = match (body.prompt, body.messages) {
        (Some(text), None) => {
            let ids = app.ask(move |model| model.tokenize(&text, bos, Markers::Parse)).await?;
            (None, ids)
        }
        (None, Some(messages)) => {
            let input = ChatInput {
                messages: message::conversation(messages)?,
                tools: message::tools(body.tools.unwrap_or_default())?,
                add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
                enable_thinking: body.enable_thinking,
                ..ChatInput::default()
            };
            let (text, ids) = app.ask(move |model| model.apply_template(&input)).await?;
            (Some(text), ids)
        }
        _ => return Err(ApiError::bad_request(Some("prompt"), "expected either prompt or messages")),
    };
    let context = app.model()?.context();
    let mut reply = json!({ "count": ids.len(), "max_model_len": context, "tokens": ids });
    if let Some(text) = text {
        reply["prompt"] = text.into();
    }
    Ok(ignored.name_in(Json(reply).into_response()))
}

/// Ids to spell.
#[derive(Debug, Deserialize)]
pub struct DetokenizeBody {
    model: Option<String>,
    tokens: Vec<Id>,
}

/// Text of ids.
pub async fn detokenize(
    State(app): State<App>,
    Wire { value: body, ignored }: Wire<DetokenizeBody>,
) -> Result<Response, ApiError> {
    app.model_name(body.model.as_deref())?;
    let ids: Vec<i64> = body.tokens.into_iter().map(|id| id.0).collect();
    let text = app.ask(move |model| model.detokenize(&ids)).await?;
    Ok(ignored.name_in(Json(json!({ "prompt": text })).into_response()))
}
