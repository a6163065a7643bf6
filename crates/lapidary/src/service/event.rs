//! What comes back from a request.

use std::time::Duration;

use super::RequestError;
use crate::capture::Captured;

/// What happens while a reply is made. [`Finished`](ServiceEvent::Finished) or [`Failed`](ServiceEvent::Failed) comes
/// exactly once, last.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ServiceEvent {
    /// The first rows of the prompt are about to run.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Those whose keys and values were there already.
        cached_tokens: usize,
        /// Most tokens of the reply: what was asked for, clamped to the context.
        max_tokens: usize,
    },
    /// More of the prompt has run.
    Progress {
        /// Prompt tokens done, cached ones included.
        fed: usize,
    },
    /// More of the prompt's tokens with their probabilities, in order, where they were asked for.
    Prompt {
        /// The tokens; the first of all has no probability.
        tokens: Vec<PromptToken>,
    },
    /// More of the answer.
    Text {
        /// The text to append.
        delta: String,
        /// The tokens whose first byte is in this text, when logprobs were asked for.
        tokens: Vec<TokenLogprob>,
    },
    /// More of the thoughts.
    Thought {
        /// The text to append.
        delta: String,
        /// The tokens whose first byte is in this text, when logprobs were asked for.
        tokens: Vec<TokenLogprob>,
    },
    /// A tool call begins; its arguments follow.
    CallBegin {
        /// Which call of the reply, from 0.
        index: usize,
        /// A name for this call that no other has.
        id: String,
        /// The tool's name.
        name: String,
    },
    /// More of the arguments of a call, as JSON text.
    CallArguments {
        /// Which call of the reply.
        index: usize,
        /// The text to append.
        delta: String,
    },
    /// Activations that were asked for; before the end of a reply that did not fail.
    Captured {
        /// `positions`, then one tensor for each layer and kind.
        tensors: Vec<Captured>,
    },
    /// The end of a reply.
    Finished {
        /// Why.
        reason: FinishKind,
        /// Counts and times.
        usage: ServiceUsage,
        /// Calls that did not parse and were handed out as text.
        unparsed_calls: usize,
    },
    /// The end of a reply that went wrong. What came before stands.
    Failed(RequestError),
}

/// Why a reply ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishKind {
    /// It is complete.
    Stop {
        /// The stop string that was found, if one ended it.
        matched: Option<String>,
    },
    /// A limit was reached: `max_tokens`, or the context's end.
    Length,
    /// The model waits for the results of its calls.
    ToolCalls,
}

/// A token of the answer with its probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Id.
    pub token: u32,
    /// Its text; U+FFFD where it is part of a character.
    pub text: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability in the model's own distribution (softcapped; before bias, penalties,
    /// temperature, filters and grammar).
    pub logprob: f32,
    /// The likeliest tokens, best first.
    pub top: Vec<TopLogprob>,
}

/// A token of the prompt with its probability, in the model's own distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptToken {
    /// Id.
    pub token: u32,
    /// Its text; U+FFFD where it is part of a character. Control tokens are spelled.
    pub text: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability after all that comes before; none for the first.
    pub logprob: Option<f32>,
    /// The likeliest tokens, best first.
    pub top: Vec<TopLogprob>,
}

/// One of the likeliest tokens at a place.
#[derive(Clone, Debug, PartialEq)]
pub struct TopLogprob {
    /// Id.
    pub token: u32,
    /// Its text; U+FFFD where it is part of a character. Control tokens are spelled.
    pub text: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// Counts and times of one reply; the same whether it was streamed or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those whose keys and values were there already.
    pub cached_tokens: usize,
    /// Tokens that were generated, thoughts and markers included, a stop token not.
    pub completion_tokens: usize,
    /// Those inside thoughts; their markers are not counted.
    pub reasoning_tokens: usize,
    /// From the request to the first token.
    pub first_token: Option<Duration>,
    /// From the request to the end.
    pub total: Duration,
}
