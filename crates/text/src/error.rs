//! One error for the crate: a variant exists where a caller can act on the difference.

use thiserror::Error;

/// What can go wrong between strings and token ids.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// `tokenizer.json` is no valid JSON of the expected form.
    #[error("tokenizer.json cannot be read: {0}; expected the Hugging Face tokenizers format")]
    TokenizerJson(#[from] serde_json::Error),
    /// The tokenizer uses a feature that Gemma's tokenizers do not have; guessing would give other ids.
    #[error("tokenizer has {field} {found}, which is not supported; expected {expected}")]
    UnsupportedTokenizer {
        /// The part of the file, such as `normalizer`.
        field: &'static str,
        /// What the file says.
        found: String,
        /// What this crate can run.
        expected: &'static str,
    },
    /// The vocabulary contradicts itself.
    #[error("tokenizer vocabulary is inconsistent: {0}")]
    Vocabulary(String),
    /// A token id that no piece of the vocabulary has.
    #[error("token id {id} is outside the vocabulary; expected an id below {vocab_size} that has a piece")]
    TokenId {
        /// The offending id.
        id: u32,
        /// One more than the largest id.
        vocab_size: u32,
    },
    /// The vocabulary lacks a control token that the operation needs.
    #[error("the vocabulary has no {0} token, which this operation needs")]
    MissingToken(&'static str),
    /// The chat template does not compile or fails while rendering.
    #[error("chat template: {0}")]
    Template(String),
    /// The chat template itself refused the conversation (`raise_exception`).
    #[error("chat template refused the conversation: {0}")]
    Refused(String),
    /// The chat template ran longer than any honest one does.
    #[error("chat template ran out of its budget of {0} steps; it probably loops")]
    Fuel(u64),
    /// A field of the conversation has the wrong shape.
    #[error("{field}: {problem}")]
    Conversation {
        /// Where, such as `messages[2].tool_calls[0].function.arguments`.
        field: String,
        /// What is wrong and what was expected.
        problem: String,
    },
    /// A tool call of the model does not parse; its text is an answer, not a call.
    #[error("tool call does not parse at character {at}: {problem}")]
    ToolCall {
        /// Position in characters, where a quote token counts as one.
        at: usize,
        /// What was expected there.
        problem: &'static str,
    },
    /// A grammar, schema or expression cannot be honoured.
    #[error("{place}: {problem}")]
    Grammar {
        /// Where, such as `schema.properties.a.type`.
        place: String,
        /// What is wrong and what was expected.
        problem: String,
    },
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
