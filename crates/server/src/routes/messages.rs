//! `POST /v1/messages` and `/v1/messages/count_tokens`

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::app::App;
use crate::body::Wire;
use crate::error::ApiError;
use crate::json::Json;
use crate::layers::RequestId;
use crate::sse;
use crate::wire::chunks::Meta;
use crate::wire::message_events::{self, MessageFrames};
use crate::wire::messages::MessagesBody;

/// Answers a conversation.
pub async fn create(
    State(app): State<App>,
    Extension(id): Extension<RequestId>,
    Wire { value: body, ignored }: Wire<MessagesBody>,
) -> Result<Response, ApiError> {
    let model = app.model_name(body.model.as_deref())?.to_owned();
    let stream = body.stream.unwrap_or(false);
    let request = body.request(app.options(), false)?;
    app.log_text(&id, &request.input.messages);
    let meta = Meta::new("msg_", &model, request.generation.max_tokens);
    let replies = app.start(&id, "messages", move |model| model.chat(request)).await?;
    let response = match stream {
        true => {
            let frames = MessageFrames::new(meta, id.as_str());
            sse::respond(replies, frames, app.options().keep_alive)
        }
        false => Json(message_events::whole(&meta, &replies.collect_one().await?)).into_response(),
    };
    Ok(ignored.name_in(response))
}

/// Counts the tokens of the prompt that a conversation becomes.
pub async fn count(
    State(app): State<App>,
    Wire { value: body, ignored }: Wire<MessagesBody>,
) -> Result<Response, ApiError> {
    app.model_name(body.model.as_deref())?;
    let request = body.request(app.options(), true)?;
    let (_, ids) = app.ask(move |model| model.apply_template(&request.input)).await?;
    Ok(ignored.name_in(Json(json!({ "input_tokens": ids.len() })).into_response()))
}
