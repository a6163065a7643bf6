//! What a caller can ask for. Plain data: nothing is checked before [`Service::chat`](super::Service::chat) or
//! [`Service::complete`](super::Service::complete) takes it.

use std::sync::Arc;
use std::time::Duration;

use lapidary_text::ChatInput;
use serde_json::Value;

use crate::capture::CaptureSpec;
use crate::steering::{ControlVector, SteerSpec};

/// A conversation to answer.
#[derive(Clone, Debug, Default)]
pub struct ChatRequest {
    /// Messages, tools and whether to think. Arguments of calls may be JSON text or objects.
    pub input: ChatInput,
    /// Whether the reply may, must or must not call tools.
    pub tool_choice: ToolChoice,
    /// Whether the reply may hold several calls; otherwise it ends after the first.
    pub parallel_tool_calls: ParallelCalls,
    /// The form of the answer. A thought before it is free.
    pub format: Format,
    /// Most tokens of thought before it is closed by force; no bound when not given.
    pub thinking_budget: Option<usize>,
    /// How to generate.
    pub generation: GenerationParams,
}

/// Whether one reply may hold several tool calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ParallelCalls {
    /// As many as the model likes.
    #[default]
    Many,
    /// The reply ends with its first call.
    One,
}

/// What the reply does with tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No calls. The declarations stay in the prompt, so that a cached prefix fits both.
    None,
    /// At least one call of a declared tool, its arguments by the tool's schema.
    Required,
    /// A call of this tool.
    Named(String),
}

/// The form of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Format {
    /// Free.
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON by a schema.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// A name for messages about it.
        name: Option<String>,
        /// Ask for the schema to be followed to the letter. The answer follows it in either case, since a schema that
        /// cannot be honoured is refused.
        strict: bool,
    },
    /// A text that the whole regular expression matches.
    Regex(String),
    /// A text of the grammar, in llguidance's dialect of Lark.
    Lark(String),
}

/// A prompt to go on with, without a template.
#[derive(Clone, Debug, Default)]
pub struct CompletionRequest {
    /// What comes before the answer.
    pub prompt: CompletionPrompt,
    /// Whether exactly one BOS is put in front of a text. Ids stand as they are given.
    pub bos: Bos,
    /// Whether the spelling of a control token in a text becomes that token.
    pub markers: Markers,
    /// The form of the answer.
    pub format: Format,
    /// How to generate.
    pub generation: GenerationParams,
}

/// The prompt of a completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompletionPrompt {
    /// Text.
    Text(String),
    /// Token ids, as wide as requests spell them.
    Ids(Vec<i64>),
}

impl Default for CompletionPrompt {
    fn default() -> Self {
        CompletionPrompt::Text(String::new())
    }
}

/// What a text prompt of a completion begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bos {
    /// Exactly one BOS, also when the text spells one. Without it Gemma degenerates.
    #[default]
    One,
    /// What the text says.
    AsGiven,
}

/// What the spelling of a control token in a prompt is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Markers {
    /// Text.
    #[default]
    Plain,
    /// The control token.
    Parse,
}

/// How to generate. Fields that are not given are the model's own choice, or off.
#[derive(Clone, Debug)]
pub struct GenerationParams {
    /// Divides the logits; 0 is greedy.
    pub temperature: Option<f32>,
    /// Keeps the best tokens; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keeps the smallest set of best tokens that reaches this probability.
    pub top_p: Option<f32>,
    /// Drops tokens less likely than this times the likeliest.
    pub min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens seen; 1 is none.
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that the answer has.
    pub presence_penalty: Option<f32>,
    /// Subtracted for each time the answer has a token.
    pub frequency_penalty: Option<f32>,
    /// Added to the logits of tokens, ids as wide as requests spell them.
    pub logit_bias: Vec<(i64, f32)>,
    /// Key of the random numbers; a fresh one when not given. Choice `i` of `n` uses [`choice_seed`].
    pub seed: Option<u64>,
    /// Most tokens of a reply, thoughts included; the rest of the context when not given. Clamped to it, which
    /// [`ServiceEvent::Started`](super::ServiceEvent::Started) reports.
    pub max_tokens: Option<usize>,
    /// Tokens before which nothing that the model says ends the reply.
    pub min_tokens: usize,
    /// Strings that end the answer and are not part of it. They are looked for in the answer only, not in thoughts
    /// nor in calls.
    pub stop: Vec<String>,
    /// Tokens that end the reply beside the model's own.
    pub stop_ids: Vec<i64>,
    /// Goes on after a token that would end the reply.
    pub ignore_eos: bool,
    /// How many replies.
    pub n: usize,
    /// Logprobs of the answer's tokens, each with so many of the best.
    pub logprobs: Option<u32>,
    /// Logprobs of the prompt's tokens, each with so many of the best. The whole prompt runs for it, and only the first of
    /// `n` replies tells them. With it `max_tokens` may be 0: no answer at all.
    pub prompt_logprobs: Option<u32>,
    /// Edits of the residual stream that every token gets, prompt and answer, by the names of vectors.
    pub steering: Vec<SteerSpec>,
    /// Vectors that the request brings itself, for `steering` to name; they go before the service's own.
    pub vectors: Vec<Arc<ControlVector>>,
    /// Activations to copy out.
    pub capture: Option<CaptureSpec>,
    /// Higher goes first.
    pub priority: i8,
    /// Longest time from the request to its end.
    pub timeout: Option<Duration>,
}

impl Default for GenerationParams {
    fn default() -> Self {
        GenerationParams {
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: None,
            presence_penalty: None,
            frequency_penalty: None,
            logit_bias: Vec::new(),
            seed: None,
            max_tokens: None,
            min_tokens: 0,
            stop: Vec::new(),
            stop_ids: Vec::new(),
            ignore_eos: false,
            n: 1,
            logprobs: None,
            prompt_logprobs: None,
            steering: Vec::new(),
            vectors: Vec::new(),
            capture: None,
            priority: 0,
            timeout: None,
        }
    }
}

/// The seed of choice `index` of a request with `seed`: the seed itself for the first, so that a request for one reply
/// gives the first of several; the others are spread by the golden ratio, so that neighbouring seeds share no choice.
pub fn choice_seed(seed: u64, index: usize) -> u64 {
    seed.wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}
