//! Strings to token ids and back: tokenizers, chat templates, and the parts of what a model says.
//!
//! - [`Tokenizer`] turns text into ids, identically from `tokenizer.json` and from GGUF vocabularies.
//! - [`StreamDecoder`] turns ids back into text as they arrive, never half a character.
//!
//! The crate reads no files and knows no models: constructors take bytes, strings and plain structs.

mod error;
mod stream;
mod tokenizer;

pub use error::{Error, Result};
pub use stream::StreamDecoder;
pub use tokenizer::{GgufVocab, SpecialIds, Specials, Tokenizer};
