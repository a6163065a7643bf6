//! A reply of JSON.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// Anything that serialises, as a response.
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        let bytes = serde_json::to_vec(&self.0).expect("plain data serialises");
        ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], bytes).into_response()
    }
}
