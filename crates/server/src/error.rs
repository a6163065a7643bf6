//! What a client is told when something is wrong: one table from causes to status, type and code.
//!
//! A handler returns an [`ApiError`]; the outermost layer writes it in the dialect of the path that was asked, OpenAI's
//! or Anthropic's ([`crate::layers`]).

use std::fmt;
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use lapidary::service::RequestError;

/// An error as a client sees it.
#[derive(Debug, Clone)]
pub struct ApiError(Box<Parts>);

#[derive(Debug, Clone)]
struct Parts {
    status: StatusCode,
    /// OpenAI's `type`.
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
    retry_after: Option<Duration>,
    /// Further members of the error object.
    figures: Vec<(&'static str, Value)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: String) -> Self {
        let parts =
            Parts { status, kind, code, param: None, message, retry_after: None, figures: Vec::new() };
        ApiError(Box::new(parts))
    }

    fn at(mut self, param: Option<&str>) -> Self {
        self.0.param = param.map(str::to_owned);
        self
    }

    fn retry(mut self, after: Duration) -> Self {
        self.0.retry_after = Some(after);
        self
    }

    /// A field that is missing or has a value that it cannot have.
    pub fn bad_request(param: Option<&str>, message: &str) -> Self {
        // The field leads the text: clients show the message and nothing else.
        let message = match param {
            Some(param) if !message.starts_with(param) => format!("{param}: {message}"),
            _ => message.to_owned(),
        };
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", Some("invalid_value"), message)
            .at(param)
    }

    /// A field that nothing here knows, under `--strict`.
    pub fn unknown_field(name: &str) -> Self {
        let message = format!("unknown field {name}; leave it out, or run the server without --strict");
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", Some("unknown_field"), message)
            .at(Some(name))
    }

    /// Something that this server does not do, by name.
    pub fn unsupported(param: Option<&str>, what: &str) -> Self {
        let message = format!("{what} is not supported by this server");
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", Some("unsupported"), message)
            .at(param)
    }

    /// A model that is not served.
    pub fn no_model(asked: &str, served: &[String]) -> Self {
        let message = format!("the model {asked:?} is not served here; served: {}", served.join(", "));
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", Some("model_not_found"), message)
            .at(Some("model"))
    }

    /// A path that does not exist.
    pub fn no_route(path: &str) -> Self {
        let message = format!("there is no {path} here; /openapi.json lists what there is");
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", Some("not_found"), message)
    }

    /// A method that the path does not take.
    pub fn method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}");
        let code = Some("method_not_allowed");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", code, message)
    }

    /// A body over the limit.
    pub fn too_large(limit: usize) -> Self {
        let message = format!("the body is larger than the {limit} bytes that this server takes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", Some("body_too_large"), message)
    }

    /// A body that does not arrive.
    pub fn slow_body(limit: Duration) -> Self {
        let message = format!("the body did not arrive within {} s", limit.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", Some("timeout"), message)
    }

    /// A body that is not declared to be JSON.
    pub fn media_type(kind: &str) -> Self {
        let found = if kind.is_empty() { "none" } else { kind };
        let message = format!("expected the header content-type: application/json, found {found}");
        let code = Some("unsupported_media_type");
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", code, message)
    }

    /// A missing or wrong key.
    pub fn unauthorized(given: bool) -> Self {
        let message = match given {
            true => "the API key is not one of this server's",
            false => {
                "this server wants an API key: send the header authorization: Bearer KEY, or x-api-key: KEY"
            }
        };
        let code = Some("invalid_api_key");
        ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", code, message.to_owned())
    }

    /// The server does not take requests, for now.
    pub fn unavailable(message: &str) -> Self {
        let code = Some("unavailable");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", code, message.to_owned())
            .retry(Duration::from_secs(5))
    }

    /// A mistake of ours.
    pub fn internal(message: &str) -> Self {
        let code = Some("internal_error");
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", code, message.to_owned())
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.0.status
    }

    /// The field that is at fault.
    pub fn param(&self) -> Option<&str> {
        self.0.param.as_deref()
    }

    /// The short name of the cause.
    pub fn code(&self) -> Option<&'static str> {
        self.0.code
    }

    /// OpenAI's error body.
    pub fn openai(&self) -> Value {
        let Parts { kind, code, param, message, figures, .. } = &*self.0;
        let mut error = json!({ "message": message, "type": kind, "param": param, "code": code });
        for (name, value) in figures {
            error[name] = value.clone();
        }
        json!({ "error": error })
    }

    /// Anthropic's error body.
    pub fn anthropic(&self, request_id: &str) -> Value {
        let kind = match self.0.status.as_u16() {
            400 | 405 | 415 => "invalid_request_error",
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            408 => "timeout_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            _ => "api_error",
        };
        json!({ "type": "error", "error": { "type": kind, "message": self.0.message }, "request_id": request_id })
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> ApiError {
        use StatusCode as S;
        let text = error.to_string();
        let (status, kind, code) = match &error {
            RequestError::BadRequest { field, message } => {
                return ApiError::bad_request(Some(field), message);
            }
            RequestError::Unsupported { .. } => {
                let code = Some("unsupported");
                return ApiError::new(S::BAD_REQUEST, "invalid_request_error", code, text);
            }
            RequestError::PromptTooLong { tokens, context } => {
                let name = "context_length_exceeded";
                let mut error = ApiError::new(S::BAD_REQUEST, name, Some(name), text);
                error.0.figures = vec![("prompt_tokens", json!(tokens)), ("context_tokens", json!(context))];
                return error;
            }
            RequestError::Overloaded { retry_after } => {
                let code = Some("queue_full");
                return ApiError::new(S::TOO_MANY_REQUESTS, "rate_limit_error", code, text)
                    .retry(*retry_after);
            }
            RequestError::ShuttingDown => return ApiError::unavailable("the server is shutting down"),
            RequestError::OutOfMemory(_) => {
                let code = Some("out_of_memory");
                return ApiError::new(S::SERVICE_UNAVAILABLE, "server_error", code, text)
                    .retry(Duration::from_secs(1));
            }
            RequestError::TimedOut { .. } => (S::REQUEST_TIMEOUT, "timeout", "timeout"),
            // Nobody is there to read it, unless the server cancelled on its own.
            RequestError::Cancelled => (S::SERVICE_UNAVAILABLE, "server_error", "cancelled"),
            RequestError::NonFinite { .. } => (S::INTERNAL_SERVER_ERROR, "server_error", "non_finite_logits"),
            _ => (S::INTERNAL_SERVER_ERROR, "server_error", "internal_error"),
        };
        ApiError::new(status, kind, Some(code), text)
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for ApiError {}

impl IntoResponse for ApiError {
    /// The response has no body yet: the layer that knows the dialect writes it from the extension.
    fn into_response(self) -> Response {
        let mut response = self.0.status.into_response();
        let headers = response.headers_mut();
        if let Some(after) = self.0.retry_after {
            // Whole seconds, rounded up: a client that comes back too early is refused again.
            let seconds = after.as_secs_f64().ceil().max(1.0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds as u64));
        }
        if self.0.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}
