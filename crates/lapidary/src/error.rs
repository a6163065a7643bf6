//! Why a model could not be loaded or asked.

use std::path::PathBuf;

/// What can go wrong at the front door.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    #[error(transparent)]
    Weights(#[from] lapidary_weights::Error),
    #[error(transparent)]
    Model(#[from] lapidary_model::Error),
    #[error(transparent)]
    Backend(#[from] lapidary_ops::Error),
    #[error(transparent)]
    Engine(#[from] lapidary_engine::Error),
    #[error(transparent)]
    Text(#[from] lapidary_text::Error),
    #[error(transparent)]
    Capture(#[from] crate::capture::CaptureError),
    #[error(transparent)]
    Verify(#[from] crate::verify::VerifyError),
    #[error(transparent)]
    Steering(#[from] crate::steering::SteeringError),
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path} has no tokenizer: {expected} is needed for text (ids can be fed without)")]
    NoTokenizer { path: PathBuf, expected: &'static str },
    #[error(
        "message {message} has a part of type {kind:?}; a model without vision and audio takes parts of type \"text\""
    )]
    UnreadablePart { message: usize, kind: String },
    #[error("generation_config.json field {field}: {problem}")]
    GenerationConfig { field: &'static str, problem: String },
    #[error("the tokenizer has {tokenizer} ids, the model's vocabulary only {model}")]
    VocabularyMismatch { tokenizer: usize, model: usize },
    #[error(
        "the chat template writes markers that the vocabulary does not have: {markers}; bring a template made for this model, or start without strict checks"
    )]
    UnknownMarkers { markers: String },
    #[error("cannot make such a model: {problem}")]
    Synth { problem: String },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
