//! What happens around every request: a name for it, keys, the form of errors, the access log.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use tracing::Instrument;

use crate::app::App;
use crate::error::ApiError;
use crate::ids;
use crate::spans;

/// Longest request id that is taken over from a client.
const MAX_ID: usize = 128;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The name that Anthropic's clients look for.
const ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");

/// The name of a request: the client's own, or one of ours.
#[derive(Debug, Clone)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn of(headers: &HeaderMap) -> RequestId {
        let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
        let sane =
            |id: &&str| !id.is_empty() && id.len() <= MAX_ID && id.bytes().all(|b| b.is_ascii_graphic());
        RequestId(given.filter(sane).map_or_else(|| ids::fresh("req-"), str::to_owned).into())
    }
}

impl Default for RequestId {
    fn default() -> Self {
        RequestId("".into())
    }
}

/// The outermost layer.
pub async fn around(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let arrived = Instant::now();
    let id = RequestId::of(request.headers());
    request.extensions_mut().insert(id.clone());
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let route = request.extensions().get::<MatchedPath>().map_or("none", |m| m.as_str()).to_owned();
    let origin = request.headers().get(header::ORIGIN).cloned();

    let span = spans::exchange(&method, &route, &id, request.headers());
    let preflight = method == Method::OPTIONS && origin.is_some() && !app.options().cors.is_empty();
    let response = match allow(&app, &request) {
        // A browser asks whether it may ask; the headers below answer.
        Ok(()) if preflight => StatusCode::NO_CONTENT.into_response(),
        Ok(()) => AssertUnwindSafe(next.run(request).instrument(span.clone()))
            .catch_unwind()
            .await
            .unwrap_or_else(|_| {
                ApiError::internal("the request caused a panic in the server; this is a bug").into_response()
            }),
        Err(error) => error.into_response(),
    };
    let mut response = in_dialect(response, &method, &path, &id);
    cross_origin(&app, origin.as_ref(), response.headers_mut());
    let value = HeaderValue::from_str(id.as_str()).expect("ids are printable");
    response.headers_mut().insert(REQUEST_ID, value.clone());
    response.headers_mut().insert(ANTHROPIC_ID, value);

    let status = response.status().as_u16();
    app.metrics().http(known_method(&method), &route, status);
    span.record("http.response.status_code", status);
    let took_s = arrived.elapsed().as_secs_f64();
    // Probes and scrapes come every few seconds for ever.
    match route.starts_with("/health") || route == "/metrics" {
        true => tracing::debug!(request_id = id.as_str(), %method, path, status, took_s, "request"),
        false => tracing::info!(request_id = id.as_str(), %method, path, status, took_s, "request"),
    }
    response
}

/// Keys guard the API. Probes, scrapes, the page and the document hold nothing of anybody's.
fn allow(app: &App, request: &Request) -> Result<(), ApiError> {
    let open = ["/", "/health", "/health/live", "/health/ready", "/metrics", "/openapi.json"];
    // Nothing answers OPTIONS but the question of a browser, which comes without the key.
    if open.contains(&request.uri().path()) || request.method() == Method::OPTIONS {
        return Ok(());
    }
    app.options().keys.check(request.headers())
}

/// Methods are the client's to invent; labels are not.
fn known_method(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "POST" => "POST",
        "HEAD" => "HEAD",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

/// Writes the body of an error as the clients of that path expect it.
fn in_dialect(response: Response, method: &Method, path: &str, id: &RequestId) -> Response {
    let error = match response.extensions().get::<ApiError>() {
        Some(error) => error.clone(),
        // The router's own refusals have no body.
        None if response.status() == StatusCode::METHOD_NOT_ALLOWED => {
            ApiError::method(method.as_str(), path)
        }
        None => return response,
    };
    let body = match path.starts_with("/v1/messages") {
        true => error.anthropic(id.as_str()),
        false => error.openai(),
    };
    let (mut parts, _) = response.into_parts();
    parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(body.to_string()))
}

/// Lets pages of the origins that the operator named read replies.
fn cross_origin(app: &App, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
    let allowed = &app.options().cors;
    let Some(origin) = origin.filter(|_| !allowed.is_empty()) else { return };
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if allowed.iter().any(|a| a == "*" || a.as_bytes() == origin.as_bytes()) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        let names = "authorization, content-type, x-api-key, x-request-id, anthropic-version";
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static(names));
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
        let exposed = HeaderValue::from_static("x-request-id, x-lapidary-ignored, retry-after");
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    }
}
