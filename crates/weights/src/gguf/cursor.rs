//! Bounds-checked reading of a header's bytes.

use super::value::{Array, StringArray, Value};
use super::{GgufError, Result};

/// Arrays of arrays of arrays exist in no file known; a limit keeps recursion shallow.
const MAX_NESTING: usize = 4;

pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    file_len: u64,
    /// What is being read, for messages.
    pub what: String,
}

impl<'a> Cursor<'a> {
    /// `bytes` are the beginning of a file of `file_len` bytes, or all of it.
    pub fn new(bytes: &'a [u8], file_len: u64) -> Cursor<'a> {
        Cursor { bytes, at: 0, file_len, what: "the file header".into() }
    }

    pub fn position(&self) -> u64 {
        self.at as u64
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    pub fn take(&mut self, needs: u64) -> Result<&'a [u8]> {
        if needs > self.left() {
            let (what, offset) = (self.what.clone(), self.position());
            let has = self.file_len.saturating_sub(offset);
            return Err(match needs > has {
                true => GgufError::Truncated { what, offset, needs, has },
                false => GgufError::HeaderTooLong { what, offset, limit: self.bytes.len() as u64 },
            });
        }
        let start = self.at;
        self.at += needs as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N as u64)?.try_into().expect("take gives as many bytes as asked"))
    }

    pub fn u32(&mut self) -> Result<u32> {
        self.number().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64> {
        self.number().map(u64::from_le_bytes)
    }

    pub fn str(&mut self) -> Result<&'a str> {
        let len = self.u64()?;
        let offset = self.position();
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map_err(|_| GgufError::Utf8 { what: self.what.clone(), offset })
    }

    /// A count of things that take at least `min_bytes` each.
    pub fn count(
        &self,
        count: u64,
        min_bytes: u64,
        most: u64,
        what: impl FnOnce() -> String,
    ) -> Result<usize> {
        let limit = most.min(self.file_len.saturating_sub(self.position()) / min_bytes);
        if count > limit {
            return Err(GgufError::Count { what: what(), count, limit });
        }
        Ok(count as usize)
    }

    pub fn value(&mut self) -> Result<Value> {
        let number = self.u32()?;
        Ok(match number {
            0 => Value::U8(u8::from_le_bytes(self.number()?)),
            1 => Value::I8(i8::from_le_bytes(self.number()?)),
            2 => Value::U16(u16::from_le_bytes(self.number()?)),
            3 => Value::I16(i16::from_le_bytes(self.number()?)),
            4 => Value::U32(u32::from_le_bytes(self.number()?)),
            5 => Value::I32(i32::from_le_bytes(self.number()?)),
            6 => Value::F32(f32::from_le_bytes(self.number()?)),
            7 => {
                let [byte] = self.number()?;
                Value::Bool(self.bool(byte)?)
            }
            8 => Value::String(self.str()?.into()),
            9 => Value::Array(self.array(1)?),
            10 => Value::U64(u64::from_le_bytes(self.number()?)),
            11 => Value::I64(i64::from_le_bytes(self.number()?)),
            12 => Value::F64(f64::from_le_bytes(self.number()?)),
            _ => return Err(GgufError::ValueType { what: self.what.clone(), number }),
        })
    }

    fn array(&mut self, depth: usize) -> Result<Array> {
        if depth > MAX_NESTING {
            return Err(GgufError::Nesting { what: self.what.clone(), limit: MAX_NESTING });
        }
        let number = self.u32()?;
        let count = self.u64()?;
        Ok(match number {
            0 => Array::U8(self.numbers(count, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(count, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(count, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(count, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(count, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(count, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(count, f32::from_le_bytes)?),
            7 => {
                let bytes = self.take(count)?;
                Array::Bool(bytes.iter().map(|&byte| self.bool(byte)).collect::<Result<_>>()?)
            }
            8 => {
                let mut strings = StringArray::default();
                for _ in 0..self.elements(count, 8)? {
                    strings.push(self.str()?);
                }
                Array::String(strings)
            }
            9 => {
                let mut arrays = Vec::new();
                for _ in 0..self.elements(count, 12)? {
                    arrays.push(self.array(depth + 1)?);
                }
                Array::Array(arrays)
            }
            10 => Array::U64(self.numbers(count, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(count, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(count, f64::from_le_bytes)?),
            _ => return Err(GgufError::ValueType { what: self.what.clone(), number }),
        })
    }

    fn numbers<const N: usize, T>(&mut self, count: u64, read: impl Fn([u8; N]) -> T) -> Result<Vec<T>> {
        let count = self.elements(count, N as u64)?;
        let bytes = self.take((count * N) as u64)?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|b| read(*b)).collect())
    }

    fn elements(&self, count: u64, min_bytes: u64) -> Result<usize> {
        self.count(count, min_bytes, u64::MAX, || format!("elements in {}", self.what))
    }

    fn bool(&self, byte: u8) -> Result<bool> {
        match byte {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(GgufError::Bool { what: self.what.clone(), value }),
        }
    }
}
