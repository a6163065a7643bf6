//! A model's GGUF file, or all its files, mapped into memory.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use lapidary_formats::TensorView;

use super::split::{self, ShardName};
use super::{GgufError, Header, Metadata, Result, TensorInfo};
use crate::FileMap;
use crate::map::Mapped;

/// Mapped files with their headers. Opening reads the headers only; tensor data is read when views are used.
#[derive(Debug)]
pub struct File {
    shards: Vec<Shard>,
    /// Tensor name to file and place in its list.
    index: HashMap<String, (usize, usize)>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Mapped,
    header: Header,
}

impl File {
    /// Opens a file. If it is one of a split model, whichever, all its siblings are opened too.
    ///
    /// A mapping stays valid only as long as nobody truncates the file; replace model files by renaming.
    ///
    /// # Errors
    /// [`GgufError::InFile`] with the file and what is wrong with it, [`GgufError::MissingShard`].
    pub fn open(path: impl AsRef<Path>) -> Result<File> {
        let path = path.as_ref();
        let opened = Shard::open(path)?;
        let Some(name) = split::shard_of(path, &opened.header).map_err(|e| e.in_file(path))? else {
            return File::index(vec![opened]);
        };
        let mut opened = Some(opened);
        let mut shards = Vec::new();
        for number in 1..=name.count {
            shards.push(match opened.take_if(|_| number == name.number) {
                Some(shard) => shard,
                None => open_sibling(&name, number)?,
            });
        }
        split::check_total(shards.iter().map(|s| (s.path.as_path(), &s.header)))?;
        File::index(shards)
    }

    /// A file that is part of the program, checked like any other. `name` stands for its path in messages.
    ///
    /// # Errors
    /// As [`File::open`]; [`GgufError::SplitName`] for one file of several.
    pub fn from_static(name: impl AsRef<Path>, bytes: &'static [u8]) -> Result<File> {
        let name = name.as_ref();
        let shard = Shard::parse(name, Mapped::from_static(bytes))?;
        match split::shard_of(name, &shard.header).map_err(|e| e.in_file(name))? {
            None => File::index(vec![shard]),
            Some(ShardName { count, .. }) => Err(GgufError::SplitName { count }.in_file(name)),
        }
    }

    fn index(shards: Vec<Shard>) -> Result<File> {
        let mut index = HashMap::new();
        for (s, shard) in shards.iter().enumerate() {
            for (t, info) in shard.header.tensors.iter().enumerate() {
                if index.insert(info.name.clone(), (s, t)).is_some() {
                    let error = GgufError::Duplicate { what: "tensor", name: info.name.clone() };
                    return Err(error.in_file(&shard.path));
                }
            }
        }
        Ok(File { shards, index })
    }

    /// The first file's keys; of a split model these are all that describe it.
    pub fn metadata(&self) -> &Metadata {
        &self.shards[0].header.metadata
    }

    /// GGUF version of the first file.
    pub fn version(&self) -> u32 {
        self.shards[0].header.version
    }

    /// The files, in order.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.map.len() as u64).sum()
    }

    /// The maps of the files, in order.
    pub fn maps(&self) -> impl ExactSizeIterator<Item = FileMap> {
        self.shards.iter().map(|shard| shard.map.share())
    }

    /// Lets the system take back the memory of bytes that a view of this file points to; they stay readable.
    pub fn release(&self, bytes: &[u8]) {
        self.shards.iter().any(|shard| shard.map.release(bytes));
    }

    /// The file that holds a tensor.
    pub fn path_of(&self, name: &str) -> Option<&Path> {
        self.index.get(name).map(|&(s, _)| self.shards[s].path.as_path())
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.shards.iter().flat_map(|shard| &shard.header.tensors)
    }

    /// Tensors of types that can't be decoded: quantised ones without a codec here, removed and unknown ones.
    /// Plain integers and f64 aren't among them, they are data that is no weight.
    pub fn unsupported_tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors().filter(|info| info.kind.format().is_none() && !info.kind.is_plain())
    }

    /// A tensor's description.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&(s, t)| &self.shards[s].header.tensors[t])
    }

    /// A tensor as one matrix, see [`TensorInfo::view`].
    ///
    /// # Errors
    /// [`GgufError::InFile`] with [`GgufError::MissingTensor`], [`GgufError::UnsupportedType`] or
    /// [`GgufError::Shape`].
    pub fn view(&self, name: &str) -> Result<TensorView<'_>> {
        let (shard, info) = self.find(name)?;
        info.view(&shard.map).map_err(|e| e.in_file(&shard.path))
    }

    /// Matrix `index` of a stack, see [`TensorInfo::view3`].
    ///
    /// # Errors
    /// As [`File::view`], and [`GgufError::Index`].
    pub fn view3(&self, name: &str, index: usize) -> Result<TensorView<'_>> {
        let (shard, info) = self.find(name)?;
        info.view3(&shard.map, index).map_err(|e| e.in_file(&shard.path))
    }

    /// A tensor's bytes as they are, for types that aren't weights.
    ///
    /// # Errors
    /// As [`File::view`]; [`GgufError::UnsupportedType`] only for types whose layout isn't known.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let (shard, info) = self.find(name)?;
        let Some(range) = info.range() else {
            let (tensor, kind) = (name.into(), info.kind.to_string());
            return Err(GgufError::UnsupportedType { tensor, kind }.in_file(&shard.path));
        };
        Ok(&shard.map[range.start as usize..range.end as usize])
    }

    fn find(&self, name: &str) -> Result<(&Shard, &TensorInfo)> {
        let Some(&(s, t)) = self.index.get(name) else {
            return Err(GgufError::MissingTensor { tensor: name.into() }.in_file(&self.shards[0].path));
        };
        Ok((&self.shards[s], &self.shards[s].header.tensors[t]))
    }
}

fn open_sibling(name: &ShardName, number: u32) -> Result<Shard> {
    let path = name.path(number);
    if !path.exists() {
        return Err(GgufError::MissingShard { path, number, count: name.count });
    }
    let shard = Shard::open(&path)?;
    split::shard_of(&path, &shard.header).map_err(|e| e.in_file(&path))?;
    Ok(shard)
}

impl Shard {
    fn open(path: &Path) -> Result<Shard> {
        let map = Mapped::open(path).map_err(|e| GgufError::from(e).in_file(path))?;
        Shard::parse(path, map)
    }

    fn parse(path: &Path, map: Mapped) -> Result<Shard> {
        let in_file = |e: GgufError| e.in_file(path);
        let mut header = Header::parse(&map, map.len() as u64).map_err(in_file)?;
        header.metadata.path = path.into();
        // A vocabulary's megabytes have been copied and are not read again.
        let end = map.len().min(header.data_start as usize);
        map.release(&map[..end]);
        Ok(Shard { path: path.into(), map, header })
    }
}
