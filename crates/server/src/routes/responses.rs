//! `POST /v1/responses`

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::body::Wire;
use crate::error::ApiError;
use crate::json::Json;
use crate::layers::RequestId;
use crate::sse;
use crate::wire::chunks::Meta;
use crate::wire::response_events::{self, ResponseFrames};
use crate::wire::responses::ResponsesBody;

/// Answers an input.
pub async fn create(
    State(app): State<App>,
    Extension(id): Extension<RequestId>,
    Wire { value: body, mut ignored }: Wire<ResponsesBody>,
) -> Result<Response, ApiError> {
    let model = app.model_name(body.model.as_deref())?.to_owned();
    let stream = body.stream.unwrap_or(false);
    let (request, echo) = body.request(app.options(), &mut ignored)?;
    app.log_text(&id, &request.input.messages);
    let meta = Meta::new("resp_", &model, request.generation.max_tokens);
    let replies = app.start(&id, "responses", move |model| model.chat(request)).await?;
    let response = match stream {
        true => sse::respond(replies, ResponseFrames::new(meta, echo), app.options().keep_alive),
        false => Json(response_events::whole(&meta, &echo, &replies.collect_one().await?)).into_response(),
    };
    Ok(ignored.name_in(response))
}

/// Nothing is kept, so there is nothing to find.
pub async fn by_id() -> ApiError {
    ApiError::unsupported(None, "a response by its id: this server keeps none, and looking one up")
}
