//! Reads a request's JSON: where it is wrong by field, and which of its fields nothing here knows.

use std::fmt::Write;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::de::DeserializeOwned;

use crate::app::App;
use crate::error::ApiError;

/// Names the fields of a request that had no effect.
pub const IGNORED: HeaderName = HeaderName::from_static("x-lapidary-ignored");

/// Names listed at most; a hostile request could have any number.
const MAX_NAMES: usize = 32;

/// Time in which a body has to arrive.
const BODY_TIME: Duration = Duration::from_secs(60);

/// A request's JSON and the fields of it that have no effect.
#[derive(Debug)]
pub struct Wire<T> {
    /// What was understood.
    pub value: T,
    /// The rest.
    pub ignored: Ignored,
}

/// Fields without effect, by path.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Ignored(Vec<String>);

impl Ignored {
    /// Adds a field that was understood and cannot be honoured.
    pub fn add(&mut self, name: &str) {
        if self.0.len() < MAX_NAMES {
            self.0.push(name.to_owned());
        }
    }

    /// Names the fields in a header of the response.
    pub fn name_in(&self, mut response: Response) -> Response {
        if let Some(value) = self.header() {
            response.headers_mut().insert(IGNORED, value);
        }
        response
    }

    /// Under `strict` a field without effect is an error.
    pub fn refuse_if(&self, strict: bool) -> Result<(), ApiError> {
        match self.0.first() {
            Some(name) if strict => Err(ApiError::unknown_field(name)),
            _ => Ok(()),
        }
    }

    fn header(&self) -> Option<HeaderValue> {
        if self.0.is_empty() {
            return None;
        }
        // Names come from the client: what a header cannot carry is escaped.
        let mut text = String::new();
        for c in self.0.join(", ").chars().take(1000) {
            match c {
                ' '..='~' => text.push(c),
                _ => write!(text, "\\u{{{:x}}}", u32::from(c)).expect("a string takes all"),
            }
        }
        HeaderValue::from_str(&text).ok()
    }
}

impl<T: DeserializeOwned> FromRequest<App> for Wire<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        require_json(request.headers())?;
        let read = tokio::time::timeout(BODY_TIME, Bytes::from_request(request, app)).await;
        let Ok(read) = read else { return Err(ApiError::slow_body(BODY_TIME)) };
        let bytes = read.map_err(|rejection| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => ApiError::too_large(app.options().body_limit),
            _ => ApiError::bad_request(None, "the body could not be read to its end"),
        })?;
        let wire = parse(&bytes)?;
        wire.ignored.refuse_if(app.options().strict)?;
        Ok(wire)
    }
}

/// A page of another origin can send plain text to a server on loopback without asking; JSON it cannot.
fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::media_type(kind))
}

/// Reads JSON text into a type, with paths in errors.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<Wire<T>, ApiError> {
    let mut ignored = Ignored::default();
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let mut note = |path: serde_ignored::Path<'_>| {
        ignored.add(&spelled(&path));
    };
    let value = serde_path_to_error::deserialize(serde_ignored::Deserializer::new(&mut json, &mut note))
        .map_err(|error| {
            let path = error.path().to_string();
            let param = (path != ".").then_some(path);
            ApiError::bad_request(param.as_deref(), &error.inner().to_string())
        })?;
    json.end().map_err(|error| ApiError::bad_request(None, &error.to_string()))?;
    Ok(Wire { value, ignored })
}

/// A path as errors spell it: `messages[0].mood`.
fn spelled(path: &serde_ignored::Path<'_>) -> String {
    use serde_ignored::Path;
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", spelled(parent)),
        Path::Map { parent, key } => match spelled(parent) {
            parent if parent.is_empty() => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => {
            spelled(parent)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Outer {
        inner: Option<Inner>,
        list: Vec<Inner>,
    }

    #[derive(Debug, Deserialize)]
    struct Inner {
        id: u32,
    }

    #[test]
    fn unknown_fields_are_named_by_path() {
        let text = br#"{"inner": {"id": 1, "x": 2}, "list": [{"id": 3, "y\u0007": {"z": 1}}], "w": null}"#;
        let wire = parse::<Outer>(text).expect("known fields are right");
        assert_eq!(wire.ignored.0, ["inner.x", "list[0].y\u{7}", "w"]);
        assert_eq!(wire.ignored.header().unwrap(), "inner.x, list[0].y\\u{7}, w");
        assert_eq!(wire.value.inner.unwrap().id + wire.value.list[0].id, 4);
    }

    #[test]
    fn a_wrong_value_is_named_by_path() {
        for (text, path) in [
            (r#"{"list": [{"id": 1}, {"id": -1}]}"#, Some("list[1].id")),
            (r#"{"inner": {"id": 4294967296}, "list": []}"#, Some("inner.id")),
            (r#"{"list": []} x"#, None),
            (r#"{"list": ["#, Some("list")),
            ("", None),
        ] {
            let error = parse::<Outer>(text.as_bytes()).expect_err(text);
            assert_eq!(error.param(), path, "{text}: {error}");
            assert_eq!(error.status(), StatusCode::BAD_REQUEST, "{text}");
        }
    }
}
