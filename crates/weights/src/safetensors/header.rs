//! The header: parsed into a list, then held against the length of the file.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::{Error, Result};

/// The longest header that readers of this container accept.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The element types that the container defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are those of the file format")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F4,
    F6E2M3,
    F6E3M2,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    I16,
    U16,
    F16,
    Bf16,
    I32,
    U32,
    F32,
    I64,
    U64,
    F64,
    C64,
}

impl Dtype {
    const TABLE: [(Dtype, &'static str, u64); 20] = [
        (Dtype::Bool, "BOOL", 8),
        (Dtype::U8, "U8", 8),
        (Dtype::I8, "I8", 8),
        (Dtype::F4, "F4", 4),
        (Dtype::F6E2M3, "F6_E2M3", 6),
        (Dtype::F6E3M2, "F6_E3M2", 6),
        (Dtype::F8E4M3, "F8_E4M3", 8),
        (Dtype::F8E5M2, "F8_E5M2", 8),
        (Dtype::F8E8M0, "F8_E8M0", 8),
        (Dtype::I16, "I16", 16),
        (Dtype::U16, "U16", 16),
        (Dtype::F16, "F16", 16),
        (Dtype::Bf16, "BF16", 16),
        (Dtype::I32, "I32", 32),
        (Dtype::U32, "U32", 32),
        (Dtype::F32, "F32", 32),
        (Dtype::I64, "I64", 64),
        (Dtype::U64, "U64", 64),
        (Dtype::F64, "F64", 64),
        (Dtype::C64, "C64", 64),
    ];

    /// The type with this name in a header.
    pub fn from_name(name: &str) -> Option<Dtype> {
        Self::TABLE.iter().find(|(_, n, _)| *n == name).map(|(d, ..)| *d)
    }

    /// The name in a header.
    pub fn name(self) -> &'static str {
        Self::TABLE[self as usize].1
    }

    /// Bits of one element.
    pub fn bits(self) -> u64 {
        Self::TABLE[self as usize].2
    }

    /// Bytes of a tensor of this type and shape; `None` when that overflows or is no whole number of bytes.
    pub fn bytes_of(self, shape: &[usize]) -> Option<u64> {
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64))?;
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One tensor of a header.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Lengths, slowest first; empty for a scalar.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the data.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
}

/// A header that agrees with the length of its file: names are unique, and the tensors fill the data in the
/// order of the list without overlap or hole.
#[derive(Clone, Debug)]
pub struct Header {
    /// The tensors in the order of their data.
    pub entries: Vec<Entry>,
    /// The free-form strings under `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// Where the data begins in the file.
    pub data_start: u64,
}

impl Header {
    /// Reads a header from the start of a file; `bytes` is the whole file, of which only the header is touched.
    /// `path` is for messages.
    ///
    /// # Errors
    /// Any contradiction inside the header, or between it and the length of `bytes`.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Header> {
        let bad = |what: String| Error::BadHeader { path: path.to_owned(), what };
        let found = bytes.len() as u64;
        let truncated = |what: &str, needed: u64| Error::Truncated {
            path: path.to_owned(),
            what: what.to_owned(),
            needed,
            found,
        };
        let Some(length) = bytes.first_chunk::<8>() else {
            return Err(truncated("the header length", 8));
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER_BYTES {
            return Err(bad(format!(
                "a header of {length} bytes, expected at most {MAX_HEADER_BYTES}; this is no safetensors file"
            )));
        }
        let data_start = 8 + length;
        let Some(json) = bytes.get(8..data_start as usize) else {
            return Err(truncated("the header", data_start));
        };
        if json.first() != Some(&b'{') {
            return Err(bad("expected a JSON object; this is no safetensors file".to_owned()));
        }
        let raw: RawHeader = serde_json::from_slice(json).map_err(|e| bad(e.to_string()))?;

        let mut entries = Vec::with_capacity(raw.tensors.len());
        let mut names = HashSet::with_capacity(raw.tensors.len());
        for (name, tensor) in raw.tensors {
            if !names.insert(name.clone()) {
                return Err(Error::Duplicate {
                    path: path.to_owned(),
                    tensor: name.clone(),
                    other_path: path.to_owned(),
                    other: name,
                });
            }
            let entry = tensor.check(&name).map_err(|what| Error::BadTensor {
                path: path.to_owned(),
                tensor: name,
                what,
            })?;
            entries.push(entry);
        }
        entries.sort_by_key(|e| (e.begin, e.end));
        let data_len = found - data_start;
        check_layout(&entries, data_start, data_len, path)?;
        Ok(Header { entries, metadata: raw.metadata, data_start })
    }
}

/// The tensors lie back to back and end where the file ends.
fn check_layout(entries: &[Entry], data_start: u64, data_len: u64, path: &Path) -> Result<()> {
    let mut taken = 0;
    let mut owner = "";
    for e in entries {
        if e.begin < taken {
            return Err(Error::Overlap {
                path: path.to_owned(),
                tensor: e.name.clone(),
                other: owner.to_owned(),
                begin: e.begin,
                end: taken,
            });
        }
        if e.begin > taken {
            return Err(Error::Hole { path: path.to_owned(), begin: taken, end: e.begin });
        }
        if e.end > data_len {
            return Err(Error::Truncated {
                path: path.to_owned(),
                what: format!("tensor {}", e.name),
                needed: data_start.saturating_add(e.end),
                found: data_start + data_len,
            });
        }
        taken = e.end;
        owner = &e.name;
    }
    if taken < data_len {
        return Err(Error::Hole { path: path.to_owned(), begin: taken, end: data_len });
    }
    Ok(())
}

/// A header as it stands in the file. The tensors are a list, because a map would hide a name that occurs twice.
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: BTreeMap<String, String>,
}

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl RawTensor {
    /// The entry, once type, shape and offsets agree with each other.
    fn check(self, name: &str) -> Result<Entry, String> {
        let dtype = Dtype::from_name(&self.dtype).ok_or_else(|| format!("unknown type {:?}", self.dtype))?;
        let [begin, end] = self.data_offsets;
        let shape: Vec<usize> = self
            .shape
            .iter()
            .map(|&d| usize::try_from(d).map_err(|_| format!("a length of {d}")))
            .collect::<Result<_, _>>()?;
        let expected = dtype
            .bytes_of(&shape)
            .ok_or_else(|| format!("{dtype} of shape {shape:?} is no whole or sensible number of bytes"))?;
        if begin.checked_add(expected) != Some(end) {
            return Err(format!(
                "{dtype} of shape {shape:?} needs {expected} bytes, its offsets are {begin}..{end}"
            ));
        }
        Ok(Entry { name: name.to_owned(), dtype, shape, begin, end })
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader { tensors: Vec::new(), metadata: BTreeMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        header.metadata = map.next_value()?;
                    } else {
                        let tensor =
                            map.next_value().map_err(|e| A::Error::custom(format!("tensor {name}: {e}")))?;
                        header.tensors.push((name, tensor));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
