//! Why a checkpoint can't become a GGUF file.

use std::path::PathBuf;

use lapidary_formats::{Format, FormatError};
use lapidary_weights::gguf::GgufError;

/// Errors of a conversion. The output file is as it was before.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages print")]
pub enum ConvertError {
    /// The checkpoint lacks a tensor, or has one too many or one of another shape.
    #[error(transparent)]
    Weights(#[from] lapidary_weights::Error),
    /// The checkpoint's configuration can't be understood.
    #[error(transparent)]
    Config(#[from] lapidary_model::Error),
    /// The file can't be written.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file can't be read, written or renamed.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// A format that only safetensors files have.
    #[error("GGUF files have no type for {format}; choose one such as Q8_0 or BF16")]
    NoGgufType { format: Format },
    /// A tensor's values don't fit the format.
    #[error("tensor {tensor}: {source}; choose a format with more range, such as BF16")]
    Encode { tensor: String, source: FormatError },
    /// The model has a property that GGUF readers take for granted to be another.
    #[error("{field} is {found}, which a GGUF file of this architecture can't say; it means {expected}")]
    NotExpressible { field: &'static str, found: String, expected: String },
    /// A layer has more or fewer experts than the configuration says.
    #[error("layer {layer} has {found} experts, the configuration says {expected}")]
    Experts { layer: u32, found: usize, expected: usize },
    /// The tokenizer isn't one that a GGUF file can hold.
    #[error("{}: {problem}", path.display())]
    Tokenizer { path: PathBuf, problem: String },
}

/// Result of a conversion.
pub type Result<T, E = ConvertError> = std::result::Result<T, E>;
