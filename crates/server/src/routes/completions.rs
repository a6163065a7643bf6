//! `POST /v1/completions`

use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use lapidary::service::{CompletionPrompt, CompletionRequest, RequestError};

use crate::app::App;
use crate::body::Wire;
use crate::error::ApiError;
use crate::json::Json;
use crate::layers::RequestId;
use crate::model::Model;
use crate::sse;
use crate::wire::chat::StreamOptions;
use crate::wire::chunks::Meta;
use crate::wire::completions::{self, Asked, CompletionBody, CompletionFrames};

/// Goes on with prompts.
pub async fn complete(
    State(app): State<App>,
    Extension(id): Extension<RequestId>,
    Wire { value: body, ignored }: Wire<CompletionBody>,
) -> Result<Response, ApiError> {
    let model = app.model_name(body.model.as_deref())?.to_owned();
    let stream = body.stream.unwrap_or(false);
    let include_usage = StreamOptions::usage(body.stream_options, stream)?;
    let echo = body.echo.unwrap_or(false);
    let asked = Asked {
        logprobs: body.logprobs.map(|top| top as usize),
        echo,
        prompt: body.prompt_logprobs.is_some(),
    };
    let asked_tokens = body.max_tokens;
    let n = body.n.unwrap_or(1);
    let requests = body.requests(app.options())?;
    let most = app.options().max_choices;
    if requests.len() > 1 && requests.len() * n > most {
        let text = format!("{} prompts with n = {n} make more than {most} replies", requests.len());
        return Err(ApiError::bad_request(Some("prompt"), &text));
    }
    let echoes = match echo {
        true => {
            let prompts: Vec<CompletionPrompt> = requests.iter().map(|r| r.prompt.clone()).collect();
            app.ask(move |model| prompts.iter().map(|prompt| spelled(model, prompt)).collect()).await?
        }
        false => Vec::new(),
    };
    let replies = app.start(&id, "completion", move |model| ask_all(model, requests)).await?;
    let meta = Meta::new("cmpl-", &model, asked_tokens);
    let response = match stream {
        true => {
            let frames = CompletionFrames::new(meta, replies.count(), n, echoes, asked, include_usage);
            sse::respond(replies, frames, app.options().keep_alive)
        }
        false => {
            let all = replies.collect().await?;
            Json(completions::whole(&meta, &all, n, &echoes, asked)).into_response()
        }
    };
    Ok(ignored.name_in(response))
}

/// All replies to all prompts, or none: those that were begun are cancelled by being dropped.
fn ask_all(
    model: &dyn Model,
    requests: Vec<CompletionRequest>,
) -> Result<Vec<lapidary::service::Reply>, RequestError> {
    let mut replies = Vec::new();
    for request in requests {
        replies.extend(model.complete(request)?);
    }
    Ok(replies)
}

fn spelled(model: &dyn Model, prompt: &CompletionPrompt) -> Result<String, RequestError> {
    match prompt {
        CompletionPrompt::Text(text) => Ok(text.clone()),
        CompletionPrompt::Ids(ids) => model.detokenize(ids),
    }
}
