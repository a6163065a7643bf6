//! What can go wrong between a checkpoint and a model that is ready to run.

use lapidary_ops::program::ProgramError;

/// Why a model cannot be built.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    #[error("config field {field}: {problem}")]
    Config { field: String, problem: String },
    #[error("{what} is not yet supported: {detail}")]
    NotSupported { what: String, detail: String },
    #[error(transparent)]
    Weights(#[from] lapidary_weights::Error),
    #[error(transparent)]
    Backend(#[from] lapidary_ops::Error),
    #[error("the pass does not fit the weights: {0}")]
    Program(#[from] ProgramError),
    #[error("tensor {tensor}: {problem}")]
    Tensor { tensor: String, problem: String },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn config(field: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Config { field: field.into(), problem: problem.into() }
    }
}
