//! The writer, for dumps, conversions and the files that tests make.
//!
//! A [`Writer`] collects tensor descriptions; creating the file writes the header and gives a [`Body`] that takes the
//! tensors' bytes in the declared order, in pieces of any size, so that a model needn't be in memory. [`write()`] does it
//! in one call for tensors that are.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

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
    let mut writer = Writer::new(path, metadata);
    for t in tensors {
        writer.tensor(&t.name, t.dtype, &t.shape)?;
        let length = t.bytes.len() as u64;
        if t.dtype.bytes_of(&t.shape) != Some(length) {
            return Err(writer.bad(&t.name, format!("{length} bytes for {} of shape {:?}", t.dtype, t.shape)));
        }
    }
    let mut body = writer.create()?;
    for t in tensors {
        body.write(&t.name, t.bytes)?;
    }
    body.finish()
}

/// A file to be: its metadata and tensor descriptions.
#[derive(Clone, Debug)]
pub struct Writer {
    path: PathBuf,
    header: Map<String, Value>,
    names: HashSet<String>,
    /// Each tensor's name and where its bytes end.
    tensors: Vec<(String, u64)>,
}

impl Writer {
    /// A writer without tensors for the file `path`, which isn't touched yet.
    pub fn new(path: &Path, metadata: &BTreeMap<String, String>) -> Writer {
        let mut header = Map::new();
        if !metadata.is_empty() {
            header.insert("__metadata__".to_owned(), json!(metadata));
        }
        Writer { path: path.to_owned(), header, names: HashSet::new(), tensors: Vec::new() }
    }

    /// Declares a tensor, its lengths slowest first.
    ///
    /// # Errors
    /// [`Error::BadWrite`] for a name that occurs twice or is `__metadata__`, and for a shape beyond 64 bits.
    pub fn tensor(&mut self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<()> {
        if name == "__metadata__" || !self.names.insert(name.to_owned()) {
            return Err(self.bad(name, "the name is taken".to_owned()));
        }
        let begin = self.total_bytes();
        let end = dtype.bytes_of(shape).and_then(|length| begin.checked_add(length));
        let end = end.ok_or_else(|| {
            self.bad(name, format!("{dtype} of shape {shape:?} is no whole or addressable number of bytes"))
        })?;
        let entry = json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [begin, end]});
        self.header.insert(name.to_owned(), entry);
        self.tensors.push((name.to_owned(), end));
        Ok(())
    }

    /// Bytes of all tensors declared so far.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.last().map_or(0, |(_, end)| *end)
    }

    /// Writes the header, replacing what is there, and waits for the tensors' bytes.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn create(self) -> Result<Body> {
        let io = |source| Error::Write { path: self.path.clone(), source };
        let mut out = BufWriter::new(File::create(&self.path).map_err(io)?);
        let mut header = Value::Object(self.header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        out.write_all(&(header.len() as u64).to_le_bytes()).map_err(io)?;
        out.write_all(&header).map_err(io)?;
        Ok(Body { path: self.path, out, tensors: self.tensors, current: 0, written: 0 })
    }

    fn bad(&self, tensor: &str, what: String) -> Error {
        Error::BadWrite { path: self.path.clone(), tensor: tensor.to_owned(), what }
    }
}

/// A file whose header is written and whose tensors are being written.
#[derive(Debug)]
pub struct Body {
    path: PathBuf,
    out: BufWriter<File>,
    tensors: Vec<(String, u64)>,
    /// The tensor that is being written.
    current: usize,
    /// Bytes of data that are.
    written: u64,
}

impl Body {
    /// Appends bytes to tensor `name`, which must be the first declared one that isn't complete.
    ///
    /// # Errors
    /// [`Error::BadWrite`] for another tensor's turn or too many bytes (nothing is written then), [`Error::Write`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.pass_empty();
        let Some((_, end)) = self.tensors.get(self.current).filter(|(expected, _)| expected == name) else {
            // An empty tensor was complete before its turn came.
            if bytes.is_empty() && self.tensors.iter().any(|(declared, _)| declared == name) {
                return Ok(());
            }
            let expected = self.tensors.get(self.current).map_or("no more data", |(name, _)| name);
            return Err(self.bad(name, format!("written out of order; expected {expected}")));
        };
        let (end, written) = (*end, self.written + bytes.len() as u64);
        if written > end {
            return Err(self.bad(name, format!("{} bytes more than its shape takes", written - end)));
        }
        self.out.write_all(bytes).map_err(|source| Error::Write { path: self.path.clone(), source })?;
        self.written = written;
        self.pass_empty();
        Ok(())
    }

    /// Ends the file once every tensor is complete, its bytes on the disk.
    ///
    /// # Errors
    /// [`Error::BadWrite`] with the first tensor that isn't complete, [`Error::Write`].
    pub fn finish(mut self) -> Result<()> {
        self.pass_empty();
        if let Some((name, end)) = self.tensors.get(self.current) {
            return Err(self.bad(name, format!("{} bytes are missing", end - self.written)));
        }
        let io = |source| Error::Write { path: self.path.clone(), source };
        self.out.flush().map_err(io)?;
        self.out.get_ref().sync_all().map_err(io)
    }

    /// Moves on over tensors that need no bytes any more.
    fn pass_empty(&mut self) {
        while self.tensors.get(self.current).is_some_and(|(_, end)| *end == self.written) {
            self.current += 1;
        }
    }

    fn bad(&self, tensor: &str, what: String) -> Error {
        Error::BadWrite { path: self.path.clone(), tensor: tensor.to_owned(), what }
    }
}
