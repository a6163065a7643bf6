//! What can be wrong with a GGUF file, or with a request to read or write one.

use std::path::PathBuf;

/// Names come from files and may hold anything, so messages show them quoted and escaped.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// Any of the others, with the file it concerns.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<GgufError>,
    },
    /// The operating system refused.
    #[error("{0}")]
    Io(#[from] std::io::Error),

    /// The file doesn't start as a GGUF file.
    #[error("not a GGUF file: it starts with {:?}; expected \"GGUF\"", String::from_utf8_lossy(found))]
    NotGguf {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// A big-endian file.
    #[error("a big-endian GGUF file; convert it to little-endian")]
    BigEndian,
    /// A version other than 2 and 3.
    #[error("GGUF version {found}; versions 2 and 3 can be read, convert the file again")]
    Version {
        /// The file's version.
        found: u32,
    },
    /// The file ends inside its header.
    #[error("truncated: {what} at byte {offset} needs {needs} bytes; the file has {has} left")]
    Truncated {
        /// What was being read.
        what: String,
        /// Where.
        offset: u64,
        /// Bytes needed.
        needs: u64,
        /// Bytes left in the file.
        has: u64,
    },
    /// The header goes on beyond any that a model has.
    #[error("{what} at byte {offset} reaches beyond the first {limit} bytes; no model has so long a header")]
    HeaderTooLong {
        /// What was being read.
        what: String,
        /// Where.
        offset: u64,
        /// Largest header read.
        limit: u64,
    },
    /// A count that no model has, or that the rest of the file can't hold.
    #[error("{count} {what}; at most {limit} can be")]
    Count {
        /// What is counted.
        what: String,
        /// The file's count.
        count: u64,
        /// The largest possible.
        limit: u64,
    },
    /// A string isn't UTF-8.
    #[error("{what} at byte {offset} isn't UTF-8")]
    Utf8 {
        /// What was being read.
        what: String,
        /// Where.
        offset: u64,
    },
    /// A key or tensor without a name.
    #[error("{what} has an empty name")]
    EmptyName {
        /// Which.
        what: String,
    },
    /// A key or tensor name occurs twice.
    #[error("{what} {name:?} occurs twice")]
    Duplicate {
        /// "key" or "tensor".
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A metadata type that GGUF doesn't define.
    #[error("{what} has type {number}; GGUF defines 0 to 12")]
    ValueType {
        /// The key.
        what: String,
        /// The type's number.
        number: u32,
    },
    /// A bool other than 0 and 1.
    #[error("{what} holds the bool {value}; expected 0 or 1")]
    Bool {
        /// The key.
        what: String,
        /// What is there.
        value: u8,
    },
    /// Arrays within arrays beyond reason.
    #[error("{what} nests arrays more than {limit} deep")]
    Nesting {
        /// The key.
        what: String,
        /// Deepest nesting read.
        limit: usize,
    },
    /// The alignment isn't a power of two.
    #[error("general.alignment is {value}; expected a power of two")]
    Alignment {
        /// The file's alignment.
        value: u32,
    },

    /// More dimensions than GGUF has.
    #[error("tensor {tensor:?} has {n_dims} dimensions; at most 4 can be")]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// Their number.
        n_dims: u32,
    },
    /// A dimension is zero.
    #[error("tensor {tensor:?} has dimensions {dims:?}; none may be zero")]
    ZeroDimension {
        /// The tensor.
        tensor: String,
        /// The dimensions.
        dims: Vec<u64>,
    },
    /// A size that wraps around.
    #[error("tensor {tensor:?} with dimensions {dims:?} is too large to address")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// The dimensions.
        dims: Vec<u64>,
    },
    /// A row isn't a whole number of blocks.
    #[error("tensor {tensor:?}: rows of {cols} in {kind}, which needs a multiple of {block_len}")]
    PartialBlock {
        /// The tensor.
        tensor: String,
        /// Its type.
        kind: String,
        /// Row length.
        cols: u64,
        /// Block length.
        block_len: u64,
    },
    /// An offset that contradicts the alignment.
    #[error("tensor {tensor:?} has offset {offset}; expected a multiple of {alignment}")]
    Unaligned {
        /// The tensor.
        tensor: String,
        /// Offset in the data.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// Data beyond the end of the file.
    #[error(
        "tensor {tensor:?} takes {bytes} bytes from byte {start}; the file has {file_len}, it is truncated or damaged"
    )]
    PastEnd {
        /// The tensor.
        tensor: String,
        /// First byte, saturated.
        start: u64,
        /// Size.
        bytes: u64,
        /// Length of the file.
        file_len: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors {first:?} and {second:?} overlap at byte {at}")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The other.
        second: String,
        /// First shared byte.
        at: u64,
    },

    /// A key that is needed isn't there.
    #[error("key {key:?} is missing; expected {expected}")]
    MissingKey {
        /// The key.
        key: String,
        /// Its type.
        expected: String,
    },
    /// A key holds something else.
    #[error("key {key:?} holds {found}; expected {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// What was asked for.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A tensor that is needed isn't there.
    #[error("tensor {tensor:?} is missing")]
    MissingTensor {
        /// The tensor.
        tensor: String,
    },
    /// A tensor's type can't be decoded.
    #[error(
        "tensor {tensor:?} has type {kind}, which can't be used as weights; supported are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4 and NVFP4"
    )]
    UnsupportedType {
        /// The tensor.
        tensor: String,
        /// Its type.
        kind: String,
    },
    /// A tensor has other dimensions than were asked for.
    #[error("tensor {tensor:?} has dimensions {dims:?}; expected {expected}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// The dimensions.
        dims: Vec<u64>,
        /// What was asked for.
        expected: &'static str,
    },
    /// A slice beyond a stack of matrices.
    #[error("tensor {tensor:?} has {count} matrices; number {index} was asked for")]
    Index {
        /// The tensor.
        tensor: String,
        /// Asked for, from 0.
        index: usize,
        /// How many there are.
        count: usize,
    },

    /// One file of a split model isn't there.
    #[error("file {number} of {count} of this split model is missing; expected it at {}", path.display())]
    MissingShard {
        /// Where it should be.
        path: PathBuf,
        /// Its number, from 1.
        number: u32,
        /// Files of the model.
        count: u32,
    },
    /// The file is one of several but isn't named so.
    #[error(
        "one of {count} files of a split model, but not named ...-00001-of-{count:05}.gguf; restore its name"
    )]
    SplitName {
        /// Files of the model.
        count: u32,
    },
    /// A split key contradicts the file's name or the other files.
    #[error("key {key:?} is {found}; expected {expected} from the file's name and its siblings")]
    SplitKey {
        /// The key.
        key: &'static str,
        /// What is there, or "missing".
        found: String,
        /// What fits.
        expected: u64,
    },

    /// Writing: data for another tensor than the next declared one.
    #[error("data for tensor {found:?}; expected {expected}")]
    WriteOrder {
        /// What was written.
        found: String,
        /// What was due.
        expected: String,
    },
    /// Writing: too many or too few bytes.
    #[error("tensor {tensor:?} takes {expected} bytes; {found} were written")]
    WriteLength {
        /// The tensor.
        tensor: String,
        /// Bytes of its shape.
        expected: u64,
        /// Bytes given.
        found: u64,
    },
    /// Writing: a type whose size isn't known.
    #[error("tensor {tensor:?} has type {kind}, which can't be written")]
    WriteType {
        /// The tensor.
        tensor: String,
        /// Its type.
        kind: String,
    },
}

impl GgufError {
    pub(crate) fn in_file(self, path: impl Into<PathBuf>) -> GgufError {
        match self {
            GgufError::InFile { .. } => self,
            source => GgufError::InFile { path: path.into(), source: Box::new(source) },
        }
    }
}
