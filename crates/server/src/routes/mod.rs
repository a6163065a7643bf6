//! The routes, a file an API.

mod chat;
mod completions;
mod health;
mod messages;
mod models;
mod page;
mod responses;
mod tokens;

#[cfg(test)]
pub use tokens::{DetokenizeBody, TokenizeBody};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::Uri;
use axum::middleware;
use axum::routing::{get, post};

use crate::app::App;
use crate::error::ApiError;
use crate::layers;

/// Everything that is served.
pub fn router(app: App) -> Router {
    let limit = app.options().body_limit;
    Router::new()
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::complete))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::by_id).delete(responses::by_id))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count))
        .route("/v1/embeddings", post(models::embeddings))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/", get(page::page))
        .route("/openapi.json", get(page::document))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(health::ready))
        .route("/health/ready", get(health::ready))
        .route("/health/live", get(health::live))
        .route("/metrics", get(health::metrics))
        .fallback(nothing_here)
        .layer(DefaultBodyLimit::max(limit))
        .layer(middleware::from_fn_with_state(app.clone(), layers::around))
        .with_state(app)
}

async fn nothing_here(uri: Uri) -> ApiError {
    ApiError::no_route(uri.path())
}
