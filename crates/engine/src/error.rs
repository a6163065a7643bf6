//! Why a step or a request was refused. After a refusal the state is what it was before the call.
//!
//! `NonFiniteLogits` and a failing `Backend` are found while a pass runs: then the sequence stands where it
//! stood and can go on, but the logits and captures at hand are those of the failed pass.

/// What can go wrong in this crate.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    #[error("position {found} was given, the sequence stands at {expected}")]
    Position { expected: usize, found: usize },
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token { token: u32, vocab: usize },
    #[error("slot {slot} does not exist, {slots} were allocated")]
    Slot { slot: usize, slots: usize },
    #[error("slot {slot} is named twice in one batch")]
    SlotTwice { slot: usize },
    #[error("{what} has {found} entries, {expected} are needed")]
    Length { what: &'static str, expected: usize, found: usize },
    #[error("a prompt must have at least one token")]
    EmptyPrompt,
    #[error("{rows} rows exceed the limit of {limit} for one batch")]
    TooManyRows { rows: usize, limit: usize },
    #[error("the context of {context} is full: position {needed} was asked for")]
    ContextFull { context: usize, needed: usize },
    #[error("position {position} has left the window: the earliest that is still held is {earliest}")]
    LeftWindow { position: usize, earliest: usize },
    #[error("cannot rewind to {position}, the sequence stands at {cursor}")]
    RewindForward { position: usize, cursor: usize },
    #[error("layer {layer} does not exist, the model has {layers}")]
    Layer { layer: usize, layers: usize },
    #[error("soft token {index} holds a value that is not finite")]
    SoftNotFinite { index: usize },
    #[error("soft tokens at {start} overlap others or leave the prompt of {len}")]
    SoftRange { start: usize, len: usize },
    #[error("a vision block of {rows} rows does not fit the largest batch of {limit}; raise the chunk size")]
    VisionBlock { rows: usize, limit: usize },
    #[error("logits at position {position} are not finite")]
    NonFiniteLogits { position: usize },
    #[error("{what} was not captured in the last pass; ask for it with set_capture")]
    NotCaptured { what: String },
    #[error("no logits yet: run a step with a head first")]
    NoLogits,
    #[error("slots hold live sequences; reset them before the smoke test")]
    SlotsBusy,
    #[error("slot smoke test failed in layer {layer}: {problem}")]
    SlotSmoke { layer: usize, problem: String },
    #[error("{what} must be at least 1")]
    Zero { what: &'static str },
    #[error("{what} of {found} exceeds the limit of {limit}")]
    TooLarge { what: &'static str, found: usize, limit: usize },
    #[error("the queue holds {limit} requests already; try again later")]
    QueueFull { limit: usize },
    #[error("the engine takes no more requests: it is shutting down")]
    ShuttingDown,
    #[error("the prompt has {tokens} tokens, the context holds {context}")]
    PromptTooLong { tokens: usize, context: usize },
    #[error("the {group:?} group has no page left: {needed} are needed, {free} are free")]
    OutOfPages { group: lapidary_ops::Group, needed: usize, free: usize },
    #[error("the {group:?} group has {pages} pages, one sequence of the whole context needs {needed}")]
    PoolTooSmall { group: lapidary_ops::Group, pages: usize, needed: usize },
    #[error(
        "{bytes} bytes of snapshots hold no window of sliding pages, which takes {needed}; raise them or keep nothing"
    )]
    SnapshotBudget { bytes: usize, needed: usize },
    #[error("{path}: kept prefixes cannot be stored here: {problem}")]
    PrefixFolder { path: std::path::PathBuf, problem: String },
    #[error("position {position} is on a page that others hold too; go back to the page's start")]
    SharedPage { position: usize },
    #[error("page {page} of the {group:?} group is held by nobody")]
    FreePage { group: lapidary_ops::Group, page: u32 },
    #[error("plan {found} was applied, but {expected} is in flight (0: none)")]
    StalePlan { expected: u64, found: u64 },
    #[error("requests cannot be steered here: {reason}")]
    CannotSteer { reason: String },
    #[error(transparent)]
    Steering(#[from] lapidary_ops::SteerError),
    #[error(transparent)]
    Sampling(#[from] crate::sampling::SamplingError),
    #[error(transparent)]
    Backend(#[from] lapidary_ops::Error),
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
