//! `GET /v1/models`, and what is not here by name.

use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::json::Json;

/// The model under all its names.
pub async fn list(State(app): State<App>) -> Json<Value> {
    let data: Vec<Value> = app.options().names.iter().map(|name| model(&app, name)).collect();
    Json(json!({ "object": "list", "data": data }))
}

/// The model under one name. Names may have slashes.
pub async fn one(State(app): State<App>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    let name = app.model_name(Some(&name))?;
    Ok(Json(model(&app, name)))
}

fn model(app: &App, name: &str) -> Value {
    let mut model =
        json!({ "id": name, "object": "model", "created": app.started(), "owned_by": "lapidary" });
    if let Some(loaded) = app.loaded() {
        model["max_model_len"] = loaded.context().into();
    }
    model
}

/// The model gives no embeddings.
pub async fn embeddings() -> ApiError {
    ApiError::unsupported(None, "/v1/embeddings: the model is a generator, and embeddings")
}
