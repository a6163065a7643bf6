//! `POST /v1/chat/completions`

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::body::Wire;
use crate::error::ApiError;
use crate::json::Json;
use crate::layers::RequestId;
use crate::sse;
use crate::wire::chat::{ChatBody, StreamOptions};
use crate::wire::chunks::{self, ChatFrames, Meta};

/// Answers a conversation.
pub async fn chat(
    State(app): State<App>,
    Extension(id): Extension<RequestId>,
    Wire { value: body, mut ignored }: Wire<ChatBody>,
) -> Result<Response, ApiError> {
    let model = app.model_name(body.model.as_deref())?.to_owned();
    let stream = body.stream.unwrap_or(false);
    let include_usage = StreamOptions::usage(body.stream_options, stream)?;
    let request = body.request(app.options(), &mut ignored)?;
    app.log_text(&id, &request.input.messages);
    let wants_logprobs = request.generation.logprobs.is_some();
    let meta = Meta::new("chatcmpl-", &model, request.generation.max_tokens);
    let replies = app.start(&id, "chat", move |model| model.chat(request)).await?;
    let response = match stream {
        true => {
            let frames = ChatFrames::new(meta, replies.count(), include_usage);
            sse::respond(replies, frames, app.options().keep_alive)
        }
        false => Json(chunks::whole(&meta, &replies.collect().await?, wants_logprobs)).into_response(),
    };
    Ok(ignored.name_in(response))
}
