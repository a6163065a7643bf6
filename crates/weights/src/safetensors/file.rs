//! One memory-mapped file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::{Entry, Header};
use crate::FileMap;
use crate::map::Mapped;
use crate::{Error, Result};

/// A safetensors file: its header in memory, its data mapped.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    map: Mapped,
    header: Header,
    by_name: HashMap<String, usize>,
}

impl File {
    /// Opens a file and checks its header against its length. The data is not touched.
    ///
    /// # Errors
    /// As [`Header::parse`], or the file cannot be read.
    pub fn open(path: &Path) -> Result<File> {
        let map = map(path)?;
        let header = Header::parse(&map, path)?;
        let by_name = header.entries.iter().enumerate().map(|(i, e)| (e.name.clone(), i)).collect();
        Ok(File { path: path.to_owned(), map, header, by_name })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// The map of the whole file.
    pub fn map(&self) -> FileMap {
        self.map.share()
    }

    /// Lets the system take back the memory of bytes that a view of this file points to; they stay readable. Says whether
    /// they lie in this file.
    pub fn release(&self, bytes: &[u8]) -> bool {
        self.map.release(bytes)
    }

    /// Whether the file holds no tensor.
    pub fn is_empty(&self) -> bool {
        self.header.entries.is_empty()
    }

    /// The tensors in the order of their data.
    pub fn entries(&self) -> &[Entry] {
        &self.header.entries
    }

    /// The free-form strings of the header.
    pub fn metadata(&self) -> &std::collections::BTreeMap<String, String> {
        &self.header.metadata
    }

    /// The entry with this name.
    pub fn find(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|&i| &self.header.entries[i])
    }

    /// The bytes of an entry of this file.
    pub fn bytes(&self, entry: &Entry) -> &[u8] {
        let start = self.header.data_start as usize;
        &self.map[start + entry.begin as usize..start + entry.end as usize]
    }
}

/// Maps a file; one that is empty is reported as truncated.
fn map(path: &Path) -> Result<Mapped> {
    let map = Mapped::open(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    if map.is_empty() {
        let what = "the header length".to_owned();
        return Err(Error::Truncated { path: path.to_owned(), what, needed: 8, found: 0 });
    }
    Ok(map)
}
