//! Probes and metrics.

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::app::App;
use crate::json::Json;

/// The process answers.
pub async fn live() -> Response {
    Json(json!({ "status": "ok" })).into_response()
}

/// Requests are taken.
pub async fn ready(State(app): State<App>) -> Response {
    let status = match (app.is_draining(), app.loaded()) {
        (true, _) => "draining",
        (false, None) => "loading",
        (false, Some(_)) => "ok",
    };
    let code = if status == "ok" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(json!({ "status": status }))).into_response()
}

/// The page that Prometheus scrapes.
pub async fn metrics(State(app): State<App>) -> Response {
    let stats = app.loaded().map(|model| model.stats());
    let ready = app.model().is_ok();
    let name = app.options().names.first().map_or("", String::as_str);
    let text = app.metrics().render(name, ready, stats.as_ref());
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}
