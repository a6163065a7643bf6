//! What is asked of an engine, and what it tells while it answers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lapidary_ops::SteerSet;

use crate::guide::{Guide, StopCause};
use crate::look::Observer;
use crate::prompt::Prompt;
use crate::sampling::{Sampled, SamplingParams};

/// What a caller asks of an [`Engine`](crate::Engine).
pub struct EngineRequest {
    /// What comes before the answer.
    pub prompt: Prompt,
    /// How tokens are chosen; [`EngineRequest::logprobs`] stands in for its `logprobs` when given.
    pub sampling: SamplingParams,
    /// Most tokens of the answer; the context's end limits it too. 0 only where the prompt's probabilities are wanted.
    pub max_tokens: usize,
    /// No token that would end the answer is chosen before it has so many, unless a guide allows no other.
    pub min_tokens: usize,
    /// Tokens that end the answer and are not part of it, beside the model's own end tokens.
    pub stop_ids: Vec<u32>,
    /// The model's own end tokens (`Config::eos`) do not end the answer; `stop_ids` still do.
    pub ignore_eos: bool,
    /// `Some(n)` reports the chosen token's logprob and the `n` best tokens', in the model's own softcapped
    /// distribution: before masks, bias, penalties, temperature and filters.
    pub logprobs: Option<usize>,
    /// Whether and how the probabilities of the prompt's own tokens are wanted. The whole prompt runs then.
    pub prompt_scores: Option<PromptScores>,
    /// Higher goes first.
    pub priority: i8,
    /// The request ends this long after it was submitted.
    pub timeout: Option<Duration>,
    /// Edits of the residual stream that every row gets, prompt and answer.
    pub steering: Option<Arc<SteerSet>>,
    /// Takes activations out.
    pub observer: Option<Box<dyn Observer>>,
    /// Says which tokens may come.
    pub guide: Option<Box<dyn Guide>>,
    /// Where events go.
    pub sink: Box<dyn Sink>,
}

impl EngineRequest {
    /// A greedy request of 256 tokens at most, without extras.
    pub fn new(prompt: Prompt, sink: Box<dyn Sink>) -> EngineRequest {
        EngineRequest {
            prompt,
            sampling: SamplingParams::greedy(),
            max_tokens: 256,
            min_tokens: 0,
            stop_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_scores: None,
            priority: 0,
            timeout: None,
            steering: None,
            observer: None,
            guide: None,
            sink,
        }
    }
}

impl fmt::Debug for EngineRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineRequest")
            .field("prompt_tokens", &self.prompt.tokens.len())
            .field("max_tokens", &self.max_tokens)
            .field("guided", &self.guide.is_some())
            .field("steered", &self.steering.is_some())
            .field("observed", &self.observer.is_some())
            .finish_non_exhaustive()
    }
}

/// Which probabilities of a prompt's tokens are wanted beside an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptScores {
    /// The first token, at least 1: nothing says how likely the first of all is.
    pub from: usize,
    /// How many of the most likely tokens to report beside each.
    pub top: usize,
}

/// Where events go. Called on the engine's thread: it must not block. One that panics loses its request.
pub trait Sink: Send {
    /// Takes an event; `false` when nobody listens any more, which cancels the request.
    fn event(&mut self, event: EngineEvent) -> bool;
}

impl<F: FnMut(EngineEvent) -> bool + Send> Sink for F {
    fn event(&mut self, event: EngineEvent) -> bool {
        self(event)
    }
}

/// What happens to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// Its first rows are about to run. A request that ends while it waits has no such event.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// How many of them need not run, since their keys and values were kept from earlier requests.
        cached_tokens: usize,
    },
    /// A batch with rows of its prompt is done.
    Progress {
        /// Rows of the prompt that have keys and values.
        fed: usize,
    },
    /// Probabilities of the next tokens of the prompt, in order of position; each is reported once.
    PromptScores(Vec<Score>),
    /// A token of the answer.
    Token(Sampled),
    /// The end, exactly once, and last.
    Finished {
        /// Why.
        reason: EngineFinish,
        /// Counts and times.
        usage: EngineUsage,
    },
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineFinish {
    /// This stop token was chosen.
    Stop(u32),
    /// The guide ended it.
    Guide(StopCause),
    /// `max_tokens` were given.
    Length,
    /// The context is full.
    ContextFull,
    /// Its ticket was cancelled, or its sink wanted no more.
    Cancelled,
    /// Its time was up.
    TimedOut,
    /// It could not go on.
    Failed(FailureKind),
}

/// What a request failed by.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FailureKind {
    /// Its logits were not finite.
    #[error("logits at position {position} are not finite")]
    NonFinite {
        /// Of the row whose logits they are.
        position: usize,
    },
    /// Its guide could not go on, or allowed nothing.
    #[error("the guide of this request stopped: {0}")]
    Guide(String),
    /// A panic while it was served.
    #[error("a panic ended this request: {0}")]
    Panicked(String),
    /// The device failed on it, alone.
    #[error("the device failed on this request: {0}")]
    Device(String),
    /// The device had no memory for it, alone.
    #[error("out of memory in this request: {0}")]
    OutOfMemory(String),
    /// The engine was shut down.
    #[error("the engine is shutting down")]
    ShuttingDown,
}

/// Counts and times of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// How many of them were not run because their keys and values were kept.
    pub cached_tokens: usize,
    /// Tokens that were generated; a stop token is not counted.
    pub answer_tokens: usize,
    /// From submission until its first rows were planned.
    pub waited: Duration,
    /// From submission to the first token, once there is one.
    pub first_token: Option<Duration>,
    /// From submission to the end.
    pub total: Duration,
}

/// What is asked of [`Engine::score`](crate::Engine::score).
pub struct ScoreRequest {
    /// Tokens whose probabilities are wanted, and what comes before them.
    pub prompt: Prompt,
    /// The first of them, at least 1: nothing says how likely the first token of all is. Soft rows have none.
    pub from: usize,
    /// How many of the most likely tokens to report beside each.
    pub top: usize,
    /// Edits of the residual stream that every row gets.
    pub steering: Option<Arc<SteerSet>>,
    /// Higher goes first.
    pub priority: i8,
    /// The request ends this long after it was submitted.
    pub timeout: Option<Duration>,
    /// Where events go.
    pub sink: Box<dyn ScoreSink>,
}

impl fmt::Debug for ScoreRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScoreRequest")
            .field("prompt_tokens", &self.prompt.tokens.len())
            .field("from", &self.from)
            .finish_non_exhaustive()
    }
}

/// How likely a token is after what comes before it, in the model's own softcapped distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// Where the token stands in the prompt.
    pub position: usize,
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The most likely tokens there with theirs, best first.
    pub top: Vec<(u32, f32)>,
}

/// What happens to a score request.
#[derive(Clone, Debug, PartialEq)]
pub enum ScoreEvent {
    /// The next tokens' probabilities, in order of position; every token is reported once.
    Scores(Vec<Score>),
    /// The end, exactly once, and last; by `Length` when every token was reported.
    Finished {
        /// Why.
        reason: EngineFinish,
        /// Counts and times.
        usage: EngineUsage,
    },
}

/// Where scores go; as [`Sink`].
pub trait ScoreSink: Send {
    /// Takes an event; `false` when nobody listens any more, which cancels the request.
    fn event(&mut self, event: ScoreEvent) -> bool;
}

impl<F: FnMut(ScoreEvent) -> bool + Send> ScoreSink for F {
    fn event(&mut self, event: ScoreEvent) -> bool {
        self(event)
    }
}
