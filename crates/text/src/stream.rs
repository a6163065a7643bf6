//! Decodes ids one by one. A character that the vocabulary lacks arrives as several byte tokens; nothing is handed out
//! before it is whole, so every delta is valid text and the deltas together are the text of the whole.

use std::ops::Deref;

use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// Incremental decoding of one sequence. `T` is a reference to the tokenizer or an `Arc` of it.
#[derive(Debug)]
pub struct StreamDecoder<T> {
    tokenizer: T,
    skip_specials: bool,
    held: HeldBytes,
}

impl<T: Deref<Target = Tokenizer>> StreamDecoder<T> {
    /// A decoder that prints control tokens as their spelling.
    pub fn new(tokenizer: T) -> Self {
        Self { tokenizer, skip_specials: false, held: HeldBytes::default() }
    }

    /// A decoder that leaves control tokens out.
    pub fn without_specials(tokenizer: T) -> Self {
        Self { skip_specials: true, ..Self::new(tokenizer) }
    }

    /// Takes the next id and returns the text that became certain, possibly none. An unknown id changes nothing.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.skip_specials && self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        self.tokenizer.append_bytes(id, &mut self.held.bytes)?;
        Ok(self.held.take_certain())
    }

    /// Ends the sequence: bytes of an unfinished character become one U+FFFD.
    pub fn finish(&mut self) -> String {
        self.held.take_all()
    }
}

/// Bytes on their way to text.
#[derive(Debug, Default)]
pub(crate) struct HeldBytes {
    pub bytes: Vec<u8>,
}

impl HeldBytes {
    /// Removes everything that no later byte can change. Bytes that can start no character become U+FFFD, as in
    /// [`String::from_utf8_lossy`].
    pub fn take_certain(&mut self) -> String {
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.bytes) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.bytes.clear();
                    return text;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.bytes[..valid]));
                    let Some(wrong) = error.error_len() else {
                        self.bytes.drain(..valid);
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.bytes.drain(..valid + wrong);
                }
            }
        }
    }

    /// Removes everything.
    pub fn take_all(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.bytes).into_owned();
        self.bytes.clear();
        text
    }
}
