//! Why a capture was refused.

/// What can be wrong with what is to be captured.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum CaptureError {
    #[error("capture {field} is {found}; expected {expected}")]
    Field { field: &'static str, found: String, expected: &'static str },
    #[error("capture is no table of settings: {problem}")]
    Spec { problem: String },
    #[error("capture names layer {layer}, the model has layers 0 to {last}")]
    Layer { layer: usize, last: usize },
    #[error("capture of routes: the model has no experts")]
    NoExperts,
    #[error("capture of projections: no vector steers at layers {layers}")]
    NotSteered { layers: String },
}

/// Result of this module.
pub type Result<T, E = CaptureError> = std::result::Result<T, E>;
