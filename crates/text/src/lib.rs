//! Strings to token ids and back: tokenizers, chat templates, and the parts of what a model says.
//!
//! - [`Tokenizer`] turns text into ids, identically from `tokenizer.json` and from GGUF vocabularies.
//! - [`ChatTemplate`] turns a conversation into a prompt; control tokens come from the template, never from the messages.
//! - [`StreamDecoder`] turns ids back into text as they arrive, never half a character.
//!
//! The crate reads no files and knows no models: constructors take bytes, strings and plain structs.

mod error;
mod guard;
mod stream;
mod template;
mod tokenizer;

pub use error::{Error, Result};
pub use guard::EncodedPrompt;
pub use stream::StreamDecoder;
pub use template::{Builtin, ChatInput, ChatTemplate, fold_tool_messages, parse_call_arguments};
pub use tokenizer::{GgufVocab, SpecialIds, Specials, Tokenizer};
