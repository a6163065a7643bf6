//! Strings to token ids and back: tokenizers, chat templates, and the parts of what a model says.
//!
//! - [`Tokenizer`] turns text into ids, identically from `tokenizer.json` and from GGUF vocabularies.
//! - [`ChatTemplate`] turns a conversation into a prompt; control tokens come from the template, never from the messages.
//! - [`OutputParser`] tells thoughts, answer and tool calls apart in what a model emits; [`StopStrings`] watches the answer.
//! - [`GrammarCompiler`] makes a [`Matcher`], which says which tokens an answer may go on with.
//! - [`StreamDecoder`] turns ids back into text as they arrive, never half a character.
//!
//! The crate reads no files and knows no models: constructors take bytes, strings and plain structs.

mod error;
mod grammar;
mod guard;
mod output;
mod stops;
mod stream;
mod template;
mod tokenizer;
mod tools;

pub use error::{Error, Result};
pub use grammar::{CallGrammar, Grammar, GrammarCompiler, MAX_SOURCE, MAX_WHITESPACE, Matcher, TIME_LIMIT};
pub use guard::EncodedPrompt;
pub use output::{Event, Finish, OutputOptions, OutputParser, Reply};
pub use stops::StopStrings;
pub use stream::StreamDecoder;
pub use template::{Builtin, ChatInput, ChatTemplate, fold_tool_messages, parse_call_arguments};
pub use tokenizer::{GgufVocab, SpecialIds, Specials, Strings, Tokenizer};
pub use tools::{CallText, ToolCall, Tools, Written};
