//! The header of one file, parsed from its bytes and checked as a whole.

use std::collections::HashMap;
use std::ops::Range;

use lapidary_formats::{Scales, TensorView};

use super::cursor::Cursor;
use super::{GgmlType, GgufError, Metadata, Result};

/// A header may take this much of a file. Vocabularies of a quarter million tokens take about 20 MB; the limit
/// keeps a damaged or hostile file from asking for gigabytes.
pub const MAX_HEADER_BYTES: usize = 128 << 20;

/// Counts that no model comes near, for the same reason.
const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 20;

const DEFAULT_ALIGNMENT: u32 = 32;

/// What a file says about itself.
#[derive(Clone, Debug)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Tensors start at multiples of this.
    pub alignment: u64,
    /// All keys.
    pub metadata: Metadata,
    /// All tensors in file order.
    pub tensors: Vec<TensorInfo>,
    /// Where tensor data begins in the file.
    pub data_start: u64,
}

/// Where and what a tensor is.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// The name in the file.
    pub name: String,
    /// Dimensions, the row length first; none is zero. A scalar may have none at all.
    pub dims: Vec<u64>,
    /// Its type.
    pub kind: GgmlType,
    /// First byte in the file.
    pub start: u64,
    /// Size in bytes; `None` for types whose layout isn't known (removed from GGUF, or later than this program).
    pub bytes: Option<u64>,
}

impl Header {
    /// Parses and checks a header. `bytes` is the file's beginning, at least [`MAX_HEADER_BYTES`] of it or all of
    /// it; `file_len` is the length of the whole file.
    ///
    /// # Errors
    /// Whatever contradicts the layout: see [`GgufError`].
    pub fn parse(bytes: &[u8], file_len: u64) -> Result<Header> {
        let mut cursor = Cursor::new(&bytes[..bytes.len().min(MAX_HEADER_BYTES)], file_len);
        let version = read_version(&mut cursor)?;
        let tensors = cursor.u64()?;
        let keys = cursor.u64()?;
        // The smallest key is a name of one byte, a type and one byte; the smallest tensor a name of one byte, no
        // dimensions, type and offset.
        let keys = cursor.count(keys, 14, MAX_KEYS, || "metadata keys".into())?;
        let tensors = cursor.count(tensors, 25, MAX_TENSORS, || "tensors".into())?;

        let mut metadata = Metadata::default();
        for i in 0..keys {
            cursor.what = format!("metadata key {i}");
            let key = cursor.str()?.to_owned();
            if key.is_empty() {
                return Err(GgufError::EmptyName { what: std::mem::take(&mut cursor.what) });
            }
            cursor.what = format!("key {key:?}");
            let value = cursor.value()?;
            if !metadata.insert(key.clone(), value) {
                return Err(GgufError::Duplicate { what: "key", name: key });
            }
        }
        let alignment = metadata.get::<u32>("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() {
            return Err(GgufError::Alignment { value: alignment });
        }
        let alignment = u64::from(alignment);

        let mut infos: Vec<TensorInfo> = Vec::new();
        for i in 0..tensors {
            infos.push(read_tensor(&mut cursor, i, alignment)?);
        }
        let data_start = cursor.position().next_multiple_of(alignment);
        for info in &mut infos {
            place(info, data_start, file_len)?;
        }
        check_names(&infos)?;
        check_overlaps(&infos)?;
        Ok(Header { version, alignment, metadata, tensors: infos, data_start })
    }
}

fn read_version(cursor: &mut Cursor) -> Result<u32> {
    let magic: [u8; 4] = cursor.take(4)?.try_into().expect("four bytes");
    if magic == *b"FUGG" {
        return Err(GgufError::BigEndian);
    }
    if magic != *b"GGUF" {
        return Err(GgufError::NotGguf { found: magic });
    }
    match cursor.u32()? {
        version @ 2..=3 => Ok(version),
        // Big-endian writers keep the magic's bytes and turn around all that follows.
        swapped if matches!(swapped.swap_bytes(), 1..=255) => Err(GgufError::BigEndian),
        found => Err(GgufError::Version { found }),
    }
}

/// Reads one description; `start` is still relative to the data.
fn read_tensor(cursor: &mut Cursor, index: usize, alignment: u64) -> Result<TensorInfo> {
    cursor.what = format!("tensor description {index}");
    let name = cursor.str()?.to_owned();
    if name.is_empty() {
        return Err(GgufError::EmptyName { what: std::mem::take(&mut cursor.what) });
    }
    cursor.what = format!("the description of tensor {name:?}");
    let n_dims = cursor.u32()?;
    if n_dims > 4 {
        return Err(GgufError::Dimensions { tensor: name, n_dims });
    }
    let dims = (0..n_dims).map(|_| cursor.u64()).collect::<Result<Vec<u64>>>()?;
    let kind = GgmlType(cursor.u32()?);
    let offset = cursor.u64()?;
    if !offset.is_multiple_of(alignment) {
        return Err(GgufError::Unaligned { tensor: name, offset, alignment });
    }
    let bytes = tensor_bytes(&name, &dims, kind)?;
    Ok(TensorInfo { name, dims, kind, start: offset, bytes })
}

/// Size of a tensor's data, `None` for types whose layout isn't known.
pub(super) fn tensor_bytes(name: &str, dims: &[u64], kind: GgmlType) -> Result<Option<u64>> {
    if dims.contains(&0) {
        return Err(GgufError::ZeroDimension { tensor: name.into(), dims: dims.into() });
    }
    let too_large = || GgufError::TooLarge { tensor: name.into(), dims: dims.into() };
    let elements = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).ok_or_else(too_large)?;
    let Some((block_len, block_bytes)) = kind.block() else { return Ok(None) };
    let cols = dims.first().copied().unwrap_or(1);
    if !cols.is_multiple_of(block_len) {
        return Err(GgufError::PartialBlock { tensor: name.into(), kind: kind.to_string(), cols, block_len });
    }
    (elements / block_len).checked_mul(block_bytes).ok_or_else(too_large).map(Some)
}

/// Turns an offset in the data into one in the file and holds the range against the file's length.
fn place(info: &mut TensorInfo, data_start: u64, file_len: u64) -> Result<()> {
    let start = data_start.checked_add(info.start);
    let bytes = info.bytes.unwrap_or(0);
    match start.and_then(|start| start.checked_add(bytes)) {
        Some(end) if end <= file_len => {
            info.start = end - bytes;
            Ok(())
        }
        _ => Err(GgufError::PastEnd {
            tensor: info.name.clone(),
            start: start.unwrap_or(u64::MAX),
            bytes,
            file_len,
        }),
    }
}

fn check_names(tensors: &[TensorInfo]) -> Result<()> {
    let mut seen = HashMap::with_capacity(tensors.len());
    for info in tensors {
        if seen.insert(info.name.as_str(), ()).is_some() {
            return Err(GgufError::Duplicate { what: "tensor", name: info.name.clone() });
        }
    }
    Ok(())
}

fn check_overlaps(tensors: &[TensorInfo]) -> Result<()> {
    let mut sorted: Vec<&TensorInfo> = tensors.iter().collect();
    sorted.sort_by_key(|info| info.start);
    for pair in sorted.windows(2) {
        // A tensor of unknown size takes at least its first byte.
        if pair[0].start + pair[0].bytes.unwrap_or(1) > pair[1].start {
            return Err(GgufError::Overlap {
                first: pair[0].name.clone(),
                second: pair[1].name.clone(),
                at: pair[1].start,
            });
        }
    }
    Ok(())
}

impl TensorInfo {
    /// The tensor's bytes in the file; `None` for types whose layout isn't known.
    pub fn range(&self) -> Option<Range<u64>> {
        Some(self.start..self.start + self.bytes?)
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// The tensor as one matrix borrowed from the whole file's bytes: `{cols, rows}`, or one row for `{cols}` and
    /// scalars. Further dimensions must be 1.
    ///
    /// # Errors
    /// [`GgufError::UnsupportedType`] and [`GgufError::Shape`].
    pub fn view<'a>(&self, file: &'a [u8]) -> Result<TensorView<'a>> {
        if self.matrices() != 1 {
            return Err(self.shape("one matrix, {columns, rows}"));
        }
        self.matrix(file, 0)
    }

    /// Matrix `index` of a stack `{cols, rows, count}`, such as one expert of a layer.
    ///
    /// # Errors
    /// [`GgufError::UnsupportedType`], [`GgufError::Shape`] for anything but three dimensions, and
    /// [`GgufError::Index`].
    pub fn view3<'a>(&self, file: &'a [u8], index: usize) -> Result<TensorView<'a>> {
        if self.dims.len() != 3 {
            return Err(self.shape("a stack of matrices, {columns, rows, count}"));
        }
        if index as u64 >= self.dims[2] {
            let count = self.dims[2] as usize;
            return Err(GgufError::Index { tensor: self.name.clone(), index, count });
        }
        self.matrix(file, index)
    }

    fn matrices(&self) -> u64 {
        self.dims.iter().skip(2).product()
    }

    fn matrix<'a>(&self, file: &'a [u8], index: usize) -> Result<TensorView<'a>> {
        let (Some(format), Some(range)) = (self.kind.format(), self.range()) else {
            return Err(GgufError::UnsupportedType {
                tensor: self.name.clone(),
                kind: self.kind.to_string(),
            });
        };
        let dim = |i: usize| self.dims.get(i).copied().unwrap_or(1) as usize;
        let bytes = file
            .get(range.start as usize..range.end as usize)
            .ok_or_else(|| self.shape("data inside the bytes given"))?;
        // All matrices are equally long, so the division is exact.
        let each = bytes.len() / self.matrices() as usize;
        Ok(TensorView {
            name: self.name.clone(),
            rows: dim(1),
            cols: dim(0),
            format,
            bytes: &bytes[index * each..(index + 1) * each],
            scales: Scales::None,
        })
    }

    fn shape(&self, expected: &'static str) -> GgufError {
        GgufError::Shape { tensor: self.name.clone(), dims: self.dims.clone(), expected }
    }
}
