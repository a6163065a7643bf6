//! Everything that can be wrong with a checkpoint, one variant a cause.
//!
//! A message names the file, the tensor or field, what was found and what was expected, because the reader of
//! it holds a file that somebody else wrote.

use std::path::PathBuf;

/// Why a checkpoint, or a tensor of it, was refused.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what the messages print")]
pub enum Error {
    /// The operating system refused a file.
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },

    /// A file could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },

    /// What was asked to be written contradicts itself.
    #[error("cannot write {} to {}: {what}", tensor, path.display())]
    BadWrite { path: PathBuf, tensor: String, what: String },

    /// The path holds nothing that can be opened as a checkpoint.
    #[error("no checkpoint in {}: {what}", path.display())]
    NoCheckpoint { path: PathBuf, what: String },

    /// The file ends before what its header promises.
    #[error("{} is truncated: {what} needs {needed} bytes, the file has {found}; fetch it again", path.display())]
    Truncated { path: PathBuf, what: String, needed: u64, found: u64 },

    /// The header of a file cannot be understood.
    #[error("bad header in {}: {what}", path.display())]
    BadHeader { path: PathBuf, what: String },

    /// One tensor's entry in a header contradicts itself or its file.
    #[error("bad entry for tensor {tensor} in {}: {what}", path.display())]
    BadTensor { path: PathBuf, tensor: String, what: String },

    /// Two tensors claim the same bytes.
    #[error("tensors {tensor} and {other} overlap in {}: data up to {end} is taken, {tensor} begins at {begin}", path.display())]
    Overlap { path: PathBuf, tensor: String, other: String, begin: u64, end: u64 },

    /// Bytes that no tensor claims.
    #[error("{} has a hole: data bytes {begin}..{end} belong to no tensor", path.display())]
    Hole { path: PathBuf, begin: u64, end: u64 },

    /// A name, or two spellings of one name, occurs twice.
    #[error("tensor {tensor} of {} is there twice (also as {other} in {}); keep one", path.display(), other_path.display())]
    Duplicate { path: PathBuf, tensor: String, other_path: PathBuf, other: String },

    /// `model.safetensors.index.json` cannot be understood or contradicts the shards.
    #[error("bad index {}: {what}", path.display())]
    BadIndex { path: PathBuf, what: String },

    /// `config.json` or a file like it cannot be understood.
    #[error("bad configuration {}: {what}", path.display())]
    BadConfig { path: PathBuf, what: String },

    /// A tensor that the configuration asks for is not in the file.
    #[error("tensor {tensor} is missing from {}", path.display())]
    MissingTensor { path: PathBuf, tensor: String },

    /// A tensor's shape contradicts the configuration or the tensors beside it.
    #[error("tensor {tensor} in {} has shape {found}, expected {expected}", path.display())]
    WrongShape { path: PathBuf, tensor: String, expected: String, found: String },

    /// A tensor's element type is not one that this tensor may have.
    #[error("tensor {tensor} in {} has type {found}, expected {expected}", path.display())]
    WrongDtype { path: PathBuf, tensor: String, expected: String, found: String },

    /// A tensor inside the text model that no Gemma variant has.
    #[error("unknown tensor {tensor} in {}: {what}", path.display())]
    UnknownTensor { path: PathBuf, tensor: String, what: String },

    /// A scale that would make weights infinite, not a number, or all zero.
    #[error("bad scale {tensor} in {}: element {index} is {found}, expected {expected}", path.display())]
    BadScale { path: PathBuf, tensor: String, index: usize, found: f32, expected: &'static str },

    /// A value of a small vector is infinite or not a number.
    #[error("tensor {tensor} in {} is not finite: element {index} is {found}", path.display())]
    NotFinite { path: PathBuf, tensor: String, index: usize, found: f32 },

    /// What is wrong with a GGUF file.
    #[error(transparent)]
    Gguf(#[from] crate::gguf::GgufError),

    /// Recognised, and not something that this version runs.
    #[error("{}: {what} not yet supported; {remedy}", path.display())]
    NotSupported { path: PathBuf, what: String, remedy: String },
}

/// The result of anything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
