//! Checkpoint files to named, typed tensor views.
//!
//! [`Checkpoint::open`] takes a path and maps whatever files it means; [`Role`] says what a tensor is to Gemma, whatever
//! the file calls it; [`Checkpoint::tensor`] gives the [`TensorView`](lapidary_formats::TensorView) of a role with its
//! scales, from the mapped bytes. Files are untrusted: every header is held against the length of its file, every
//! name is accounted for, and each refusal is an [`Error`] that names file and tensor.
//!
//! Deliberately absent: decoding of values beyond small vectors (crate `lapidary-formats`), what shapes a model
//! expects (crate `lapidary-model`, which passes them to [`Checkpoint::expect`]), tokenizers, and packing.

mod checkpoint;
mod error;
pub mod export;
pub mod gguf;
mod map;
pub mod names;
mod quant;
pub mod safetensors;

pub use checkpoint::{Checkpoint, ConfigSource, FormatShare, Ignored, Kind, Stored, TextFiles};
pub use error::{Error, Result};
pub use lapidary_formats::FileMap;
pub use names::{ExpertPart, LayerRole, Role};
