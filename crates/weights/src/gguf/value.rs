//! Typed metadata values.

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the variants are GGUF's types")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of one type. Arrays may hold arrays.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the variants are GGUF's types")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(StringArray),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// Many strings in one piece of memory: a vocabulary is a quarter of a million of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StringArray {
    text: String,
    ends: Vec<usize>,
}

impl StringArray {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string at `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.text[start..end])
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|i| self.get(i).expect("the index is below the length"))
    }

    /// Appends a string.
    pub fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(self.text.len());
    }
}

impl<S: AsRef<str>> FromIterator<S> for StringArray {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> StringArray {
        let mut array = StringArray::default();
        strings.into_iter().for_each(|s| array.push(s.as_ref()));
        array
    }
}

impl Value {
    /// GGUF's number for the value's type.
    pub fn type_number(&self) -> u32 {
        match self {
            Value::U8(_) => 0,
            Value::I8(_) => 1,
            Value::U16(_) => 2,
            Value::I16(_) => 3,
            Value::U32(_) => 4,
            Value::I32(_) => 5,
            Value::F32(_) => 6,
            Value::Bool(_) => 7,
            Value::String(_) => 8,
            Value::Array(_) => 9,
            Value::U64(_) => 10,
            Value::I64(_) => 11,
            Value::F64(_) => 12,
        }
    }

    /// An integer of any width.
    pub fn as_integer(&self) -> Option<i128> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => Some(v.into()),
            Value::I64(v) => Some(v.into()),
            _ => None,
        }
    }

    /// Type and, where it is short, value; for messages.
    pub fn describe(&self) -> String {
        match self {
            Value::F32(v) => format!("f32 {v}"),
            Value::F64(v) => format!("f64 {v}"),
            Value::Bool(v) => format!("bool {v}"),
            Value::String(_) => "a string".into(),
            Value::Array(array) => format!("an array of {} {}", array.len(), array.element_name()),
            integer => {
                let value = integer.as_integer().expect("the other variants are handled above");
                format!("{} {value}", TYPE_NAMES[integer.type_number() as usize])
            }
        }
    }

    /// Appends the value as a file holds it, without its type.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        match self {
            Value::U8(v) => out.push(*v),
            Value::I8(v) => out.extend(v.to_le_bytes()),
            Value::U16(v) => out.extend(v.to_le_bytes()),
            Value::I16(v) => out.extend(v.to_le_bytes()),
            Value::U32(v) => out.extend(v.to_le_bytes()),
            Value::I32(v) => out.extend(v.to_le_bytes()),
            Value::F32(v) => out.extend(v.to_le_bytes()),
            Value::Bool(v) => out.push(u8::from(*v)),
            Value::String(v) => write_string(v, out),
            Value::Array(v) => v.write(out),
            Value::U64(v) => out.extend(v.to_le_bytes()),
            Value::I64(v) => out.extend(v.to_le_bytes()),
            Value::F64(v) => out.extend(v.to_le_bytes()),
        }
    }
}

const TYPE_NAMES: [&str; 13] =
    ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"];

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements, if they are integers of any width.
    pub fn integers(&self) -> Option<Vec<i128>> {
        fn wide<T: Copy + Into<i128>>(values: &[T]) -> Option<Vec<i128>> {
            Some(values.iter().map(|&v| v.into()).collect())
        }
        match self {
            Array::U8(v) => wide(v),
            Array::I8(v) => wide(v),
            Array::U16(v) => wide(v),
            Array::I16(v) => wide(v),
            Array::U32(v) => wide(v),
            Array::I32(v) => wide(v),
            Array::U64(v) => wide(v),
            Array::I64(v) => wide(v),
            _ => None,
        }
    }

    /// GGUF's number for the elements' type.
    pub fn element_type_number(&self) -> u32 {
        match self {
            Array::U8(_) => 0,
            Array::I8(_) => 1,
            Array::U16(_) => 2,
            Array::I16(_) => 3,
            Array::U32(_) => 4,
            Array::I32(_) => 5,
            Array::F32(_) => 6,
            Array::Bool(_) => 7,
            Array::String(_) => 8,
            Array::Array(_) => 9,
            Array::U64(_) => 10,
            Array::I64(_) => 11,
            Array::F64(_) => 12,
        }
    }

    fn element_name(&self) -> &'static str {
        TYPE_NAMES[self.element_type_number() as usize]
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.element_type_number().to_le_bytes());
        out.extend((self.len() as u64).to_le_bytes());
        match self {
            Array::U8(v) => out.extend(v),
            Array::I8(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
            Array::U16(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
            Array::I16(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
            Array::U32(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
            Array::I32(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
            Array::F32(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
            Array::Bool(v) => out.extend(v.iter().map(|&v| u8::from(v))),
            Array::String(v) => v.iter().for_each(|v| write_string(v, out)),
            Array::Array(v) => v.iter().for_each(|v| v.write(out)),
            Array::U64(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
            Array::I64(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
            Array::F64(v) => v.iter().for_each(|v| out.extend(v.to_le_bytes())),
        }
    }
}

/// Appends a string with its length.
pub(super) fn write_string(string: &str, out: &mut Vec<u8>) {
    out.extend((string.len() as u64).to_le_bytes());
    out.extend(string.as_bytes());
}

macro_rules! from {
    ($($native:ty => $variant:ident),*) => {$(
        impl From<$native> for Value {
            fn from(value: $native) -> Value {
                Value::$variant(value)
            }
        }
        impl From<Vec<$native>> for Value {
            fn from(values: Vec<$native>) -> Value {
                Value::Array(Array::$variant(values))
            }
        }
    )*};
}

from!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, bool => Bool,
      Array => Array, u64 => U64, i64 => I64, f64 => F64);

impl From<&str> for Value {
    fn from(value: &str) -> Value {
        Value::String(value.into())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Value {
        Value::String(value)
    }
}

impl From<StringArray> for Value {
    fn from(values: StringArray) -> Value {
        Value::Array(Array::String(values))
    }
}
