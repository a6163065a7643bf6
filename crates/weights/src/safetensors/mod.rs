//! The safetensors container: a JSON header, then the tensors' bytes.
//!
//! ```text
//! u64 little-endian   header length n (at most 100,000,000)
//! n bytes             {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, ..,
//!                      "__metadata__": {"key": "value", ..}}, padded with spaces
//! the rest            data; offsets count from its start, tensors fill it without overlap or hole
//! ```
//!
//! The reader is our own because a file is untrusted input and every refusal has to name the tensor and what
//! was expected of it. Opening touches the header alone, so a 60 GB file opens at once.

mod file;
mod header;
mod shards;
mod write;

pub use file::File;
pub use header::{Dtype, Entry, Header};
pub use shards::{Shards, TensorId};
pub use write::{Body, NewTensor, Writer, write};

/// The name of the file that lists the shards of a checkpoint.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
