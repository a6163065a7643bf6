//! What reading a golden or writing a tiny checkpoint can fail with.

use std::io;
use std::path::PathBuf;

/// Errors of the fixtures; the backend itself fails with `lapidary_ops::Error`.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Safetensors { path: PathBuf, source: safetensors::SafeTensorError },
    #[error("{} holds no value named {name}", path.display())]
    Missing { path: PathBuf, name: String },
    #[error("{name} in {} is {found}, not {expected}", path.display())]
    Type { path: PathBuf, name: String, found: String, expected: &'static str },
}

/// Result of reading or writing a fixture.
pub type Result<T, E = Error> = std::result::Result<T, E>;
