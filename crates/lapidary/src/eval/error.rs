//! Why something can't be evaluated.

use std::path::PathBuf;

/// Errors of an evaluation. What a record holds by then stays.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum EvalError {
    /// What the engine refuses.
    #[error(transparent)]
    Engine(#[from] lapidary_engine::Error),
    /// What the tokenizer or the template refuses.
    #[error(transparent)]
    Text(#[from] lapidary_text::Error),
    /// A file that can't be understood.
    #[error(transparent)]
    Weights(#[from] lapidary_weights::Error),
    /// A file that can't be read or written.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// Windows that can't cover a text.
    #[error("a window of {window} tokens, moved by {stride}: take a window of 2 or more and a stride of 1 to {}", window.saturating_sub(1))]
    Windows { window: usize, stride: usize },
    /// Nothing to score.
    #[error("there is nothing to score: {what}")]
    Nothing { what: String },
    /// A line of a JSONL file.
    #[error("{}, line {line}: {problem}", path.display())]
    Line { path: PathBuf, line: usize, problem: String },
    /// Two models that don't speak of the same tokens.
    #[error("the vocabularies differ: {reference} tokens in the reference, {test} in the model")]
    Vocabulary { reference: usize, test: usize },
    /// A dump without what is needed, or with another shape.
    #[error("{}: {problem}", path.display())]
    Dump { path: PathBuf, problem: String },
    /// A record of another evaluation.
    #[error("{} is the record of another evaluation: {field} was {found} and is {expected}; name another file or remove it", path.display())]
    OtherRecord { path: PathBuf, field: String, found: String, expected: String },
    /// A record that no evaluation wrote.
    #[error("{}, line {line}: not a record of an evaluation: {problem}", path.display())]
    BadRecord { path: PathBuf, line: usize, problem: String },
}

/// Result of an evaluation.
pub type Result<T, E = EvalError> = std::result::Result<T, E>;
