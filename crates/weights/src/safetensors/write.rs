//! The writer, for dumps, conversions and the files that tests make.

use std::collections::{BTreeMap, HashSet};
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::Dtype;
use crate::{Error, Result};

/// A tensor to be written.
#[derive(Clone, Debug)]
pub struct NewTensor<'a> {
    /// The name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Lengths, slowest first.
    pub shape: Vec<usize>,
    /// Little-endian elements, row-major.
    pub bytes: &'a [u8],
}

/// Writes a file with the tensors in the order given and the metadata strings. The header is padded so that the
/// data begins at a multiple of eight.
///
/// # Errors
/// A name that occurs twice or is `__metadata__`, bytes that do not fit type and shape, or a file that cannot be
/// written.
pub fn write(path: &Path, tensors: &[NewTensor<'_>], metadata: &BTreeMap<String, String>) -> Result<()> {
    let bad =
        |t: &NewTensor, what: String| Error::BadWrite { path: path.to_owned(), tensor: t.name.clone(), what };
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert("__metadata__".to_owned(), json!(metadata));
    }
    let mut names = HashSet::new();
    let mut begin = 0u64;
    for t in tensors {
        if t.name == "__metadata__" || !names.insert(&t.name) {
            return Err(bad(t, "the name is taken".to_owned()));
        }
        let length = t.bytes.len() as u64;
        if t.dtype.bytes_of(&t.shape) != Some(length) {
            return Err(bad(t, format!("{length} bytes for {} of shape {:?}", t.dtype, t.shape)));
        }
        let entry =
            json!({"dtype": t.dtype.name(), "shape": t.shape, "data_offsets": [begin, begin + length]});
        header.insert(t.name.clone(), entry);
        begin += length;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');

    let io = |source| Error::Write { path: path.to_owned(), source };
    let mut out = BufWriter::new(std::fs::File::create(path).map_err(io)?);
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(io);
    put(&(header.len() as u64).to_le_bytes())?;
    put(&header)?;
    for t in tensors {
        put(t.bytes)?;
    }
    out.flush().map_err(io)
}
