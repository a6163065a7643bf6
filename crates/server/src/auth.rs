//! API keys: kept as digests, compared in constant time, never printed.

use std::fmt;

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::error::ApiError;

/// The keys that a server accepts.
#[derive(Clone, Default)]
pub struct Keys(Vec<[u8; 32]>);

impl Keys {
    /// Keys from text, one a line; empty lines and lines that begin with `#` are passed over.
    pub fn from_lines(text: &str) -> Self {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        Keys(lines.map(digest).collect())
    }

    /// Takes in further keys.
    pub fn extend(&mut self, other: Keys) {
        self.0.extend(other.0);
    }

    /// Whether everybody may ask.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Lets a request pass if it has one of the keys, as OpenAI's or as Anthropic's clients send it.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let bearer = text(header::AUTHORIZATION.as_str()).and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
        });
        let Some(key) = bearer.or_else(|| text("x-api-key")) else {
            return Err(ApiError::unauthorized(false));
        };
        if self.holds(key) { Ok(()) } else { Err(ApiError::unauthorized(true)) }
    }

    /// Compares digests of one length, all bytes of all keys, so that time tells nothing about any of them.
    fn holds(&self, key: &str) -> bool {
        let asked = digest(key);
        let mut found = 0_u8;
        for own in &self.0 {
            let differs = own.iter().zip(&asked).fold(0, |acc, (a, b)| acc | (a ^ b));
            found |= u8::from(std::hint::black_box(differs) == 0);
        }
        found != 0
    }
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn with(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_str(value).expect("a plain value"));
        headers
    }

    #[test]
    fn a_key_opens_in_either_header_and_nothing_else_does() {
        let keys = Keys::from_lines("# ours\n\n first-key \nsecond-key\n");
        assert!(keys.check(&with("authorization", "Bearer first-key")).is_ok());
        assert!(keys.check(&with("authorization", "bearer second-key")).is_ok());
        assert!(keys.check(&with("x-api-key", "second-key")).is_ok());
        for wrong in [
            "Bearer first-ke",
            "Bearer first-key2",
            "Basic first-key",
            "first-key",
            "Bearer ",
            "Bearer # ours",
        ] {
            let error = keys.check(&with("authorization", wrong)).expect_err(wrong);
            assert_eq!(error.status(), 401, "{wrong}");
            assert!(!error.to_string().contains("first"), "{error}");
        }
        assert!(keys.check(&HeaderMap::new()).is_err());
        assert!(Keys::default().check(&HeaderMap::new()).is_ok());
        assert_eq!(format!("{keys:?}"), "2 keys");
    }
}
