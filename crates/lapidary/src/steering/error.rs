//! Why steering was refused.

use std::path::PathBuf;

/// What can be wrong with a control vector, or with how it is to be used.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum SteeringError {
    #[error(transparent)]
    Weights(#[from] lapidary_weights::Error),
    #[error(transparent)]
    Gguf(#[from] lapidary_weights::gguf::GgufError),
    #[error("{} is no control vector: {problem}", path.display())]
    NotAVector { path: PathBuf, problem: String },
    #[error("tensor {tensor} in {}: {problem}", path.display())]
    Direction { path: PathBuf, tensor: String, problem: String },
    #[error("{vector} was made for a model of {found} layers, this one has {expected}")]
    LayerCount { vector: String, found: usize, expected: usize },
    #[error("{vector} is {found} values wide, the model {expected}")]
    Width { vector: String, found: usize, expected: usize },
    #[error("{vector} steers layer {layer}, the model has layers 0 to {last}")]
    Layer { vector: String, layer: usize, last: usize },
    #[error("layers {range} of {vector}: the model has layers 0 to {last}")]
    Range { vector: String, range: String, last: usize },
    #[error("{vector} has no direction for any of the layers {range}; it has {available}")]
    NoDirection { vector: String, range: String, available: String },
    #[error("steering {field} is {found}; expected {expected}")]
    Field { field: &'static str, found: String, expected: &'static str },
    #[error("steering is no table of settings: {problem}")]
    Spec { problem: String },
    #[error(transparent)]
    Set(#[from] lapidary_ops::SteerError),
    #[error("{set} of a steering vector: {problem}")]
    Prompts { set: String, problem: String },
    #[error(transparent)]
    Engine(#[from] lapidary_engine::Error),
    #[error(transparent)]
    Text(#[from] lapidary_text::Error),
    #[error("the two sets of prompts do not differ at layer {layer}: their means are equal")]
    NoDifference { layer: usize },
    #[error("a GGUF control vector cannot hold layer 0; write a .safetensors file, or leave layer 0 out")]
    LayerZero,
}

/// Result of this module.
pub type Result<T, E = SteeringError> = std::result::Result<T, E>;
