//! Why a request was refused or failed. The server turns each variant into a status; nothing here knows HTTP.

use std::time::Duration;

/// What can go wrong with one request. Others are not touched by it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A field has a value that cannot be used.
    #[error("{field}: {message}")]
    BadRequest {
        /// Where, such as `messages[2].content` or `format.schema.properties.a`.
        field: String,
        /// What is wrong and what was expected.
        message: String,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {tokens} tokens and the context holds {context}, at least one of them for the answer"
    )]
    PromptTooLong {
        /// Of the prompt.
        tokens: usize,
        /// Positions of a sequence.
        context: usize,
    },
    /// Too many requests wait.
    #[error("too many requests wait already; try again in {} s", retry_after.as_secs().max(1))]
    Overloaded {
        /// When to try again.
        retry_after: Duration,
    },
    /// The service is about to stop and takes no more.
    #[error("the service is shutting down")]
    ShuttingDown,
    /// The request's own limit was reached.
    #[error("the request did not end within its limit of {} ms", limit.as_millis())]
    TimedOut {
        /// The limit.
        limit: Duration,
    },
    /// The caller took it back.
    #[error("the request was cancelled")]
    Cancelled,
    /// This model or build cannot do it.
    #[error("{what}")]
    Unsupported {
        /// What, and what would be needed.
        what: String,
    },
    /// The model computed something that is not a number.
    #[error("the logits at position {position} are not finite")]
    NonFinite {
        /// Of the sequence.
        position: usize,
    },
    /// Memory for the request could not be had.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// A fault of the engine or the device.
    #[error("internal error: {0}")]
    Internal(String),
}

impl RequestError {
    /// A field that cannot be used.
    pub fn bad(field: impl Into<String>, message: impl Into<String>) -> Self {
        RequestError::BadRequest { field: field.into(), message: message.into() }
    }
}
