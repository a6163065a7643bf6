//! What can go wrong between a model's name and its files, each with what the user can do about it.

use std::path::PathBuf;

/// Errors of the model store and of downloads.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The text isn't `owner/name[@revision][:quant-or-file]`.
    #[error("\"{text}\" names no model: {reason}; expected owner/name[@revision][:quant-or-file]")]
    Spec {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A setting such as the endpoint or the token can't be used.
    #[error("{name} can't be used: {reason}")]
    Setting {
        /// Environment variable or builder method.
        name: &'static str,
        /// What is wrong and what is expected.
        reason: String,
    },
    /// The server refused: 401 or 403.
    #[error("{url} answered {status}: {remedy}")]
    AccessDenied {
        /// Address without its query.
        url: String,
        /// HTTP status.
        status: u16,
        /// What to do.
        remedy: String,
    },
    /// Repository, revision or file doesn't exist: 404.
    #[error("{url} answered 404: {remedy}")]
    NotFound {
        /// Address without its query.
        url: String,
        /// What to do.
        remedy: String,
    },
    /// Another status that isn't a success, after retries where these make sense.
    #[error("{url} answered {status}, try again later")]
    Status {
        /// Address without its query.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// The server could not be reached or the connection broke, after retries.
    #[error(
        "no answer from {url} after {attempts} attempts: {reason}; check the network, or use a stored model offline"
    )]
    Unreachable {
        /// Address without its query.
        url: String,
        /// The last failure.
        reason: String,
        /// How many times it was tried.
        attempts: u32,
    },
    /// The server's answer makes no sense.
    #[error("{url} gave an answer that can't be used: {reason}")]
    BadAnswer {
        /// Address without its query.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file has another SHA-256 than the server announced. The download was discarded.
    #[error(
        "{file} has sha256 {got}, the server announced {expected}; the download was discarded, try again"
    )]
    HashMismatch {
        /// File in the repository.
        file: String,
        /// Announced hash.
        expected: String,
        /// Hash of what came.
        got: String,
    },
    /// A file has another length than the server announced.
    #[error("{file} has {got} bytes, the server announced {expected}; try again")]
    SizeMismatch {
        /// File in the repository.
        file: String,
        /// Announced bytes.
        expected: u64,
        /// Bytes that came.
        got: u64,
    },
    /// The disk is too small for a file.
    #[error(
        "{file} needs {needed} more bytes in {path}, where {available} are free; free some, or set HF_HOME to a larger disk"
    )]
    NoSpace {
        /// File in the repository.
        file: String,
        /// The store's folder.
        path: PathBuf,
        /// Bytes still to come.
        needed: u64,
        /// Bytes available to this user.
        available: u64,
    },
    /// Another process holds the lock of a file.
    #[error("another process is downloading {file} (lock {path}); wait until it is done or stop it")]
    Busy {
        /// File in the repository.
        file: String,
        /// The lock file.
        path: PathBuf,
    },
    /// The store can't be read or written.
    #[error("can't {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The model isn't in the store, and the network may not be used.
    #[error(
        "{model} isn't in the store {path} and offline mode is on; unset HF_HUB_OFFLINE or drop --offline to download it"
    )]
    Offline {
        /// Repository and revision.
        model: String,
        /// The store's folder.
        path: PathBuf,
    },
    /// The model isn't in the store.
    #[error("{model} isn't in the store {path}")]
    NotStored {
        /// Repository, revision and file.
        model: String,
        /// The store's folder.
        path: PathBuf,
    },
    /// No file of the repository answers to the selector, or there is no model file at all.
    #[error("{model} has no file for \"{selector}\"; it has: {}", list(available))]
    NoMatch {
        /// Repository.
        model: String,
        /// Quantisation or file that was asked for.
        selector: String,
        /// What can be asked for.
        available: Vec<String>,
    },
    /// Several model files answer; one must be named.
    #[error("{model} has several model files, name one after a colon: {}", list(candidates))]
    Ambiguous {
        /// Repository.
        model: String,
        /// The files (the first of each split set).
        candidates: Vec<String>,
    },
    /// Parts of a split or sharded model are missing.
    #[error("{model} is incomplete, these parts are missing: {}", list(missing))]
    Incomplete {
        /// Repository.
        model: String,
        /// The missing files.
        missing: Vec<String>,
    },
    /// The repository holds no weights in a format that is read.
    #[error("{model} has neither safetensors nor GGUF weights{}", if *pickles { "; its pickle files (.bin, .pt) can run code and aren't loaded, convert them to safetensors" } else { "" })]
    NoWeights {
        /// Repository.
        model: String,
        /// Whether it has pickled weights.
        pickles: bool,
    },
    /// The caller asked to stop. What came so far is kept for a later resume.
    #[error("the download of {file} was cancelled")]
    Cancelled {
        /// File in the repository.
        file: String,
    },
}

/// Names for a message; a repository can have hundreds.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 20;
    let mut text = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => text.push_str("nothing"),
        n if n > SHOWN => text.push_str(&format!(" and {} more", n - SHOWN)),
        _ => {}
    }
    text
}

impl HubError {
    pub(super) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
