//! GGUF files: a header of typed metadata and tensor descriptions, then tensor data.
//!
//! ```text
//! "GGUF"  version u32  tensors u64  keys u64
//! keys     x { key string, type u32, value }
//! tensors  x { name string, n_dims u32, dims u64[n_dims], type u32, offset u64 }
//! padding to the alignment (key general.alignment, else 32)
//! tensor data, each at its offset from here
//! ```
//!
//! A string is a u64 length and UTF-8 bytes; everything is little-endian. The first dimension is the row length,
//! so a matrix `[rows, cols]` has `dims = {cols, rows}`. Versions 2 and 3 share this layout.
//!
//! [`File`] maps a file, or all files of a split one, and reads nothing but the headers; a [`TensorInfo`] says
//! where a tensor lies, and [`File::view`] borrows it from the mapping. [`Header::parse`] is the same on plain
//! bytes. [`Writer`] makes files.
//!
//! Invariants: whatever the bytes, parsing ends in a [`Header`] or a [`GgufError`], allocates no more than a few
//! times [`MAX_HEADER_BYTES`], and every range of a parsed header lies inside the file, aligned and apart from
//! all others.
//!
//! Deliberately absent: what keys and tensors mean (names are the loader's), and any look at the tensors' bytes
//! (`lapidary_formats::validate` does that).

mod cursor;
mod error;
mod file;
mod ggml_type;
mod header;
mod metadata;
mod split;
mod value;
mod writer;

pub use error::GgufError;
pub use file::File;
pub use ggml_type::GgmlType;
pub use header::{Header, MAX_HEADER_BYTES, TensorInfo};
pub use metadata::{FromValue, Metadata};
pub use split::ShardName;
pub use value::{Array, StringArray, Value};
pub use writer::{Body, SplitBody, Version, Writer};

type Result<T> = std::result::Result<T, GgufError>;
