//! The chat page and the OpenAPI document: both are part of the program, so that they work offline.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

use crate::openapi;

const PAGE: &str = include_str!("../page.html");

/// The page may run what stands in it and talk to its own server; nothing else.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// `GET /`
pub async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    (headers, PAGE).into_response()
}

/// `GET /openapi.json`
pub async fn document() -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], openapi::DOCUMENT)
        .into_response()
}
