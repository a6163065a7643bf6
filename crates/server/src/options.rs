//! What an operator chooses about the server itself.

use std::time::Duration;

use crate::auth::Keys;

/// Choices of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Names under which the model answers; the first is the one in replies.
    pub names: Vec<String>,
    /// Whether a request with a field that has no effect is refused.
    pub strict: bool,
    /// The keys that open the API; none leaves it open.
    pub keys: Keys,
    /// Largest body of a request in bytes.
    pub body_limit: usize,
    /// Time without a byte after which a stream gets a comment.
    pub keep_alive: Duration,
    /// Limit of a request that names none.
    pub timeout: Option<Duration>,
    /// Origins whose pages may read replies; none turns it off.
    pub cors: Vec<String>,
    /// Whether the logs may hold what was asked and answered.
    pub log_text: bool,
    /// Most choices of one request.
    pub max_choices: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            names: vec!["lapidary".to_owned()],
            strict: false,
            keys: Keys::default(),
            body_limit: 32 << 20,
            keep_alive: Duration::from_secs(5),
            timeout: None,
            cors: Vec::new(),
            log_text: false,
            max_choices: 64,
        }
    }
}
