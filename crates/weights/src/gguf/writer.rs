//! Making GGUF files.
//!
//! A [`Writer`] collects keys and tensor descriptions; starting it writes the header and gives a [`Body`] that
//! takes the tensors' bytes in the declared order, in pieces of any size, so that a model needn't be in memory.
//! The bytes of a file depend on nothing but what was declared and written.

use std::collections::HashSet;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use super::header::tensor_bytes;
use super::split::ShardName;
use super::value::{Value, write_string};
use super::{GgmlType, GgufError, Result};

/// The versions that can be written. They share one layout; 3 is what current tools write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// For old readers.
    V2 = 2,
    /// The default.
    #[default]
    V3 = 3,
}

/// A file to be: its keys and tensor descriptions.
#[derive(Clone, Debug, Default)]
pub struct Writer {
    version: Version,
    keys: Vec<(String, Value)>,
    tensors: Vec<Planned>,
    /// Names of `tensors`.
    names: HashSet<String>,
}

#[derive(Clone, Debug)]
struct Planned {
    name: String,
    dims: Vec<u64>,
    kind: GgmlType,
    bytes: u64,
}

impl Writer {
    /// A writer without keys and tensors.
    pub fn new(version: Version) -> Writer {
        Writer { version, ..Writer::default() }
    }

    /// Adds a key. `general.alignment` also sets the file's alignment, else 32.
    ///
    /// # Errors
    /// [`GgufError::EmptyName`], [`GgufError::Duplicate`], and [`GgufError::Alignment`] for one that isn't a `u32`
    /// power of two.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> Result<()> {
        let value = value.into();
        if key.is_empty() {
            return Err(GgufError::EmptyName { what: format!("metadata key {}", self.keys.len()) });
        }
        if self.keys.iter().any(|(name, _)| name == key) {
            return Err(GgufError::Duplicate { what: "key", name: key.into() });
        }
        if key == "general.alignment" {
            match value {
                Value::U32(v) if v.is_power_of_two() => {}
                Value::U32(value) => return Err(GgufError::Alignment { value }),
                other => {
                    let (expected, found) = ("u32".into(), other.describe());
                    return Err(GgufError::WrongType { key: key.into(), expected, found });
                }
            }
        }
        self.keys.push((key.into(), value));
        Ok(())
    }

    /// Declares a tensor, row length first in `dims`.
    ///
    /// # Errors
    /// [`GgufError::EmptyName`], [`GgufError::Duplicate`], a shape that can't be, and [`GgufError::WriteType`] for a
    /// type without a known size.
    pub fn tensor(&mut self, name: &str, dims: &[u64], kind: GgmlType) -> Result<()> {
        if name.is_empty() {
            return Err(GgufError::EmptyName { what: format!("tensor description {}", self.tensors.len()) });
        }
        if self.names.contains(name) {
            return Err(GgufError::Duplicate { what: "tensor", name: name.into() });
        }
        if dims.len() > 4 {
            return Err(GgufError::Dimensions { tensor: name.into(), n_dims: dims.len() as u32 });
        }
        let Some(bytes) = tensor_bytes(name, dims, kind)? else {
            return Err(GgufError::WriteType { tensor: name.into(), kind: kind.to_string() });
        };
        self.names.insert(name.into());
        self.tensors.push(Planned { name: name.into(), dims: dims.into(), kind, bytes });
        Ok(())
    }

    /// Writes the header to `out` and waits for the tensors' bytes.
    ///
    /// # Errors
    /// [`GgufError::Io`].
    pub fn begin<W: Write>(self, mut out: W) -> Result<Body<W>> {
        let alignment = self.alignment();
        let mut head = Vec::new();
        head.extend(b"GGUF");
        head.extend((self.version as u32).to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            write_string(key, &mut head);
            head.extend(value.type_number().to_le_bytes());
            value.write(&mut head);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            write_string(&tensor.name, &mut head);
            head.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| head.extend(dim.to_le_bytes()));
            head.extend(tensor.kind.0.to_le_bytes());
            head.extend(offset.to_le_bytes());
            let end =
                offset.checked_add(tensor.bytes).and_then(|end| end.checked_next_multiple_of(alignment));
            offset = end.ok_or_else(|| GgufError::TooLarge {
                tensor: tensor.name.clone(),
                dims: tensor.dims.clone(),
            })?;
        }
        head.resize(head.len().next_multiple_of(alignment as usize), 0);
        out.write_all(&head)?;
        Ok(Body { out, alignment, tensors: self.tensors, current: 0, written: 0 })
    }

    /// [`Writer::begin`] on a fresh file at `path`, replacing what is there.
    ///
    /// # Errors
    /// [`GgufError::InFile`] with [`GgufError::Io`].
    pub fn create(self, path: impl AsRef<Path>) -> Result<Body<std::io::BufWriter<std::fs::File>>> {
        let path = path.as_ref();
        let file = std::fs::File::create(path).map_err(|e| GgufError::from(e).in_file(path))?;
        self.begin(std::io::BufWriter::new(file)).map_err(|e| e.in_file(path))
    }

    /// Spreads the tensors over files `PREFIX-00001-of-0000N.gguf` of at most `tensors_per_file` each. All keys go
    /// to the first file.
    ///
    /// # Errors
    /// As [`Writer::create`]; [`GgufError::Count`] for more than 65,535 files.
    pub fn create_split(self, prefix: impl AsRef<Path>, tensors_per_file: NonZeroUsize) -> Result<SplitBody> {
        let too_many = |what: &str, count: usize, limit: u64| GgufError::Count {
            what: what.into(),
            count: count as u64,
            limit,
        };
        let files = self.tensors.len().div_ceil(tensors_per_file.get()).max(1);
        let shards =
            u16::try_from(files).map_err(|_| too_many("files of a split model", files, u16::MAX.into()))?;
        let tensors = self.tensors.len();
        let total = i32::try_from(tensors)
            .map_err(|_| too_many("tensors of a split model", tensors, i32::MAX as u64))?;
        let (version, alignment) =
            (self.version, self.keys.iter().find(|(key, _)| key == "general.alignment"));
        let mut plans = Vec::new();
        for number in 0..shards {
            let mut plan = Writer::new(version);
            if number == 0 {
                plan.keys = self.keys.clone();
            } else {
                plan.keys.extend(alignment.cloned());
            }
            plan.set("split.no", number)?;
            plan.set("split.count", shards)?;
            plan.set("split.tensors.count", total)?;
            let first = usize::from(number) * tensors_per_file.get();
            let last = self.tensors.len().min(first + tensors_per_file.get());
            plan.tensors = self.tensors[first..last].to_vec();
            plans.push(plan);
        }
        let name = ShardName { prefix: prefix.as_ref().into(), number: 1, count: shards.into() };
        let mut plans = plans.into_iter();
        let first = name.path(1);
        let body = plans.next().expect("there is at least one file").create(&first)?;
        Ok(SplitBody { name, plans, paths: vec![first], body })
    }

    fn alignment(&self) -> u64 {
        let value = self.keys.iter().find(|(key, _)| key == "general.alignment");
        value.and_then(|(_, value)| value.as_integer()).map_or(32, |v| v as u64)
    }
}

/// A file whose header is written and whose tensors are being written.
#[derive(Debug)]
pub struct Body<W: Write> {
    out: W,
    alignment: u64,
    tensors: Vec<Planned>,
    /// The tensor that is being written.
    current: usize,
    /// Bytes of it that are.
    written: u64,
}

impl<W: Write> Body<W> {
    /// Appends bytes to tensor `name`, which must be the first declared one that isn't complete. Its padding follows
    /// its last byte by itself.
    ///
    /// # Errors
    /// [`GgufError::WriteOrder`], [`GgufError::WriteLength`] (nothing is written then), [`GgufError::Io`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let Some(tensor) = self.tensors.get(self.current).filter(|tensor| tensor.name == name) else {
            let expected =
                self.tensors.get(self.current).map_or("no more data".into(), |t| format!("{:?}", t.name));
            return Err(GgufError::WriteOrder { found: name.into(), expected });
        };
        let written = self.written + bytes.len() as u64;
        if written > tensor.bytes {
            let (tensor, expected) = (name.into(), tensor.bytes);
            return Err(GgufError::WriteLength { tensor, expected, found: written });
        }
        self.out.write_all(bytes)?;
        self.written = written;
        if written == tensor.bytes {
            let padding = written.next_multiple_of(self.alignment) - written;
            std::io::copy(&mut std::io::Read::take(std::io::repeat(0), padding), &mut self.out)?;
            self.current += 1;
            self.written = 0;
        }
        Ok(())
    }

    /// Ends the file once every tensor is complete and gives back what it was written to, flushed.
    ///
    /// # Errors
    /// [`GgufError::WriteLength`] with the first tensor that isn't complete, [`GgufError::Io`].
    pub fn finish(mut self) -> Result<W> {
        if let Some(tensor) = self.tensors.get(self.current) {
            let (name, expected) = (tensor.name.clone(), tensor.bytes);
            return Err(GgufError::WriteLength { tensor: name, expected, found: self.written });
        }
        self.out.flush()?;
        Ok(self.out)
    }

    fn is_complete(&self) -> bool {
        self.current == self.tensors.len()
    }
}

/// A split model that is being written, file after file.
#[derive(Debug)]
pub struct SplitBody {
    name: ShardName,
    plans: std::vec::IntoIter<Writer>,
    paths: Vec<PathBuf>,
    body: Body<std::io::BufWriter<std::fs::File>>,
}

impl SplitBody {
    /// As [`Body::write`]; goes on to the next file by itself.
    ///
    /// # Errors
    /// As [`Body::write`] and [`Writer::create`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if self.body.is_complete()
            && let Some(plan) = self.plans.next()
        {
            let path = self.name.path(self.paths.len() as u32 + 1);
            let finished = std::mem::replace(&mut self.body, plan.create(&path)?);
            finished.finish()?;
            self.paths.push(path);
        }
        self.body.write(name, bytes)
    }

    /// Ends the last file; the paths of all.
    ///
    /// # Errors
    /// As [`Body::finish`], for tensors of files that aren't begun too.
    pub fn finish(mut self) -> Result<Vec<PathBuf>> {
        self.body.finish()?;
        if let Some(tensor) = self.plans.next().and_then(|plan| plan.tensors.into_iter().next()) {
            return Err(GgufError::WriteLength { tensor: tensor.name, expected: tensor.bytes, found: 0 });
        }
        Ok(self.paths)
    }
}
