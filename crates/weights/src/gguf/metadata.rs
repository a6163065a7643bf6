//! The keys of a file and typed access to them.
//!
//! Writers disagree about integer widths and about scalars where all layers are alike, so [`FromValue`] accepts
//! any integer that fits and a scalar where a list was asked for; anything else is an error that names the key,
//! what was expected and what is there.

use std::collections::HashMap;
use std::path::PathBuf;

use super::value::{Array, StringArray, Value};
use super::{GgufError, Result};

/// All keys of a file in its order.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
    /// Empty when the header was parsed from bytes.
    pub(super) path: PathBuf,
}

impl Metadata {
    /// Adds a key; false if it is there already.
    pub(super) fn insert(&mut self, key: String, value: Value) -> bool {
        if self.index.contains_key(&key) {
            return false;
        }
        self.index.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        true
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of a key as it is in the file.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// The value of a key as `T`, `None` if the file hasn't the key.
    ///
    /// # Errors
    /// [`GgufError::WrongType`] when the value is something else.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match T::from_value(value) {
            Some(value) => Ok(Some(value)),
            None => Err(self.wrong_type(key, T::EXPECTED.into(), value)),
        }
    }

    /// The value of a key that must be there.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`] and [`GgufError::WrongType`].
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T> {
        self.get(key)?.ok_or_else(|| {
            self.named(GgufError::MissingKey { key: key.into(), expected: T::EXPECTED.into() })
        })
    }

    /// A value for each of `count` layers: an array of that length, or a scalar for all. `None` if the file hasn't
    /// the key.
    ///
    /// # Errors
    /// [`GgufError::WrongType`] for another type or length.
    pub fn get_each<'a, T>(&'a self, key: &str, count: usize) -> Result<Option<Vec<T>>>
    where
        T: Copy + FromValue<'a>,
        Vec<T>: FromValue<'a>,
    {
        let Some(value) = self.value(key) else { return Ok(None) };
        if let Some(one) = T::from_value(value) {
            return Ok(Some(vec![one; count]));
        }
        match Vec::from_value(value) {
            Some(values) if values.len() == count => Ok(Some(values)),
            _ => Err(self.wrong_type(key, format!("{} or {count} of them", T::EXPECTED), value)),
        }
    }

    fn wrong_type(&self, key: &str, expected: String, value: &Value) -> GgufError {
        self.named(GgufError::WrongType { key: key.into(), expected, found: value.describe() })
    }

    fn named(&self, error: GgufError) -> GgufError {
        if self.path.as_os_str().is_empty() { error } else { error.in_file(&self.path) }
    }
}

/// What a metadata value can be asked for as.
pub trait FromValue<'a>: Sized {
    /// For messages.
    const EXPECTED: &'static str;

    /// The value in this type, if it is of a kind and size that fit.
    fn from_value(value: &'a Value) -> Option<Self>;
}

macro_rules! integers {
    ($($native:ty, $one:literal, $many:literal;)*) => {$(
        impl FromValue<'_> for $native {
            const EXPECTED: &'static str = $one;
            fn from_value(value: &Value) -> Option<$native> {
                value.as_integer()?.try_into().ok()
            }
        }
        /// A scalar counts as a list of one.
        impl FromValue<'_> for Vec<$native> {
            const EXPECTED: &'static str = $many;
            fn from_value(value: &Value) -> Option<Vec<$native>> {
                match value {
                    Value::Array(array) => array.integers()?.into_iter().map(|v| v.try_into().ok()).collect(),
                    one => Some(vec![<$native>::from_value(one)?]),
                }
            }
        }
    )*};
}

integers! {
    u32, "an unsigned 32-bit integer", "an array of unsigned 32-bit integers";
    i32, "a 32-bit integer", "an array of 32-bit integers";
    u64, "an unsigned 64-bit integer", "an array of unsigned 64-bit integers";
    usize, "an unsigned integer", "an array of unsigned integers";
}

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a float";
    fn from_value(value: &Value) -> Option<f32> {
        match *value {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }
}

/// A scalar counts as a list of one.
impl FromValue<'_> for Vec<f32> {
    const EXPECTED: &'static str = "an array of floats";
    fn from_value(value: &Value) -> Option<Vec<f32>> {
        match value {
            Value::Array(Array::F32(v)) => Some(v.clone()),
            Value::Array(Array::F64(v)) => Some(v.iter().map(|&v| v as f32).collect()),
            one => Some(vec![f32::from_value(one)?]),
        }
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a bool";
    fn from_value(value: &Value) -> Option<bool> {
        if let Value::Bool(v) = value { Some(*v) } else { None }
    }
}

/// A scalar counts as a list of one.
impl FromValue<'_> for Vec<bool> {
    const EXPECTED: &'static str = "an array of bools";
    fn from_value(value: &Value) -> Option<Vec<bool>> {
        match value {
            Value::Array(Array::Bool(v)) => Some(v.clone()),
            one => Some(vec![bool::from_value(one)?]),
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: &'a Value) -> Option<&'a str> {
        if let Value::String(v) = value { Some(v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a StringArray {
    const EXPECTED: &'static str = "an array of strings";
    fn from_value(value: &'a Value) -> Option<&'a StringArray> {
        if let Value::Array(Array::String(v)) = value { Some(v) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a Array {
    const EXPECTED: &'static str = "an array";
    fn from_value(value: &'a Value) -> Option<&'a Array> {
        if let Value::Array(v) = value { Some(v) } else { None }
    }
}
