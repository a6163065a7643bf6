//! Several files that together hold one checkpoint, seen as one list of tensors.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Component, Path};

use super::{Entry, File};
use crate::{Error, Result};

/// Which tensor of a [`Shards`]; dealt in the order of files and data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorId(u32);

/// One file, or the files that an index names.
#[derive(Debug)]
pub struct Shards {
    files: Vec<File>,
    tensors: Vec<(u32, u32)>,
    /// Tensors that a shard holds and the index does not list.
    pub unlisted: usize,
}

/// The part of an index that matters. Its `total_size` is often wrong in published files and is not read.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Shards {
    /// A checkpoint of one file.
    ///
    /// # Errors
    /// As [`File::open`].
    pub fn open_file(path: &Path) -> Result<Shards> {
        Self::join(vec![File::open(path)?])
    }

    /// The files that an index names, which lie beside it.
    ///
    /// # Errors
    /// An index that cannot be read, names a file outside its folder, or lists a tensor that its file lacks; a
    /// tensor that two files hold; whatever is wrong with a file.
    pub fn open_index(path: &Path) -> Result<Shards> {
        let bad = |what: String| Error::BadIndex { path: path.to_owned(), what };
        let index = read_index(path)?;
        let folder = path.parent().unwrap_or(Path::new("."));
        let names: BTreeSet<&String> = index.weight_map.values().collect();
        if names.is_empty() {
            return Err(bad("its weight_map is empty".to_owned()));
        }
        let mut files = Vec::with_capacity(names.len());
        let mut position = HashMap::new();
        for name in names {
            let mut parts = Path::new(name).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                return Err(bad(format!("{name:?} is not the name of a file in the same folder")));
            }
            position.insert(name.as_str(), files.len());
            files.push(File::open(&folder.join(name))?);
        }
        for (tensor, name) in &index.weight_map {
            let file = &files[position[name.as_str()]];
            if file.find(tensor).is_none() {
                return Err(bad(format!("it places tensor {tensor} in {name}, which does not hold it")));
            }
        }
        let mut shards = Self::join(files)?;
        shards.unlisted =
            shards.ids().filter(|&id| !index.weight_map.contains_key(&shards.entry(id).name)).count();
        Ok(shards)
    }

    /// Whether an index names this file.
    pub(crate) fn index_lists(index: &Path, file: &Path) -> Result<bool> {
        let Some(name) = file.file_name().and_then(|n| n.to_str()) else {
            return Ok(false);
        };
        Ok(read_index(index)?.weight_map.values().any(|f| f == name))
    }

    fn join(files: Vec<File>) -> Result<Shards> {
        let mut tensors = Vec::new();
        let mut seen: HashMap<&str, usize> = HashMap::new();
        for (f, file) in files.iter().enumerate() {
            for (i, entry) in file.entries().iter().enumerate() {
                if let Some(other) = seen.insert(&entry.name, f) {
                    return Err(Error::Duplicate {
                        path: file.path().to_owned(),
                        tensor: entry.name.clone(),
                        other_path: files[other].path().to_owned(),
                        other: entry.name.clone(),
                    });
                }
                tensors.push((f as u32, i as u32));
            }
        }
        Ok(Shards { files, tensors, unlisted: 0 })
    }

    /// The files, sorted by name.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Every tensor.
    pub fn ids(&self) -> impl Iterator<Item = TensorId> + use<> {
        (0..self.tensors.len() as u32).map(TensorId)
    }

    /// The file that holds a tensor.
    pub fn file(&self, id: TensorId) -> &File {
        &self.files[self.tensors[id.0 as usize].0 as usize]
    }

    /// What the header says of a tensor.
    pub fn entry(&self, id: TensorId) -> &Entry {
        &self.file(id).entries()[self.tensors[id.0 as usize].1 as usize]
    }

    /// The length of a tensor in bytes.
    pub fn bytes_len(&self, id: TensorId) -> u64 {
        let entry = self.entry(id);
        entry.end - entry.begin
    }

    /// The bytes of a tensor.
    pub fn bytes(&self, id: TensorId) -> &[u8] {
        self.file(id).bytes(self.entry(id))
    }
}

fn read_index(path: &Path) -> Result<Index> {
    let text = std::fs::read(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|e| Error::BadIndex { path: path.to_owned(), what: e.to_string() })
}
