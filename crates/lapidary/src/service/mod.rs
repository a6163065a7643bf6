//! Text in, text out, for many at once: what stands between a wire format and the token engine.
//!
//! A [`Service`] owns tokenizer, template and engine. A request is rendered and encoded, checked, and handed to the
//! engine with what guides it: a budget for thoughts, a grammar for the answer, stop strings. Tokens come back as
//! [`ServiceEvent`]s: text, thoughts, tool calls, the end.
//!
//! Deliberately absent: wire formats, HTTP, and anything about the device.

mod error;
mod event;
mod reply;
mod request;

use std::sync::Arc;
use std::time::Duration;

use lapidary_model::Progress;
use lapidary_text::{ChatTemplate, Tokenizer};
use lapidary_weights::Checkpoint;

use crate::error::Result;
use crate::{Defaults, LoadOptions, TemplateSource};

pub use error::RequestError;
pub use event::{FinishKind, ServiceEvent, ServiceUsage, TokenLogprob, TopLogprob};
pub use reply::{Reply, WholeReply};
pub use request::{
    Bos, ChatRequest, CompletionPrompt, CompletionRequest, Format, GenerationParams, Markers, ParallelCalls,
    ToolChoice, choice_seed,
};

/// Choices at the start of a service.
#[derive(Clone, Debug)]
pub struct ServiceOptions {
    /// Refuses to start with a template that writes markers which the vocabulary lacks; otherwise a note tells.
    pub strict_template: bool,
    /// Most tokens of a reply when a request does not say; the rest of the context when not given.
    pub default_max_tokens: Option<usize>,
    /// Most tokens of thought when a request does not say; no bound when not given.
    pub default_thinking_budget: Option<usize>,
    /// Most replies to one request.
    pub max_n: usize,
    /// Most of the likeliest tokens that a request may ask for beside each token.
    pub max_logprobs: u32,
    /// Most waiting requests before [`RequestError::Overloaded`], and when to come back.
    pub retry_after: Duration,
}

impl Default for ServiceOptions {
    fn default() -> Self {
        ServiceOptions {
            strict_template: false,
            default_max_tokens: None,
            default_thinking_budget: None,
            max_n: 128,
            max_logprobs: 20,
            retry_after: Duration::from_secs(1),
        }
    }
}

/// What is served.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// File or folder, as it was opened.
    pub path: String,
    /// Positions of one sequence.
    pub context: usize,
    /// Tokens of the model's vocabulary.
    pub vocab: usize,
    /// The checkpoint's own sampling and stop tokens.
    pub defaults: Defaults,
    /// Where the chat template came from.
    pub template_source: TemplateSource,
    /// What the user should know about the checkpoint.
    pub notes: Vec<String>,
}

/// What goes on, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServiceStats {
    /// Replies in the making that have pages.
    pub running: usize,
    /// Replies that wait.
    pub waiting: usize,
}

/// A model that answers many requests at once. Clones share it.
#[derive(Clone, Debug)]
pub struct Service {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    info: ModelInfo,
}

impl Service {
    /// Loads a model and starts its engine.
    ///
    /// # Errors
    /// What loading fails with; with [`ServiceOptions::strict_template`] a template with unknown markers.
    pub fn start(
        checkpoint: &Checkpoint,
        load: &LoadOptions,
        options: ServiceOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Service> {
        let _ = (checkpoint, load, options, progress);
        unimplemented!("Service::start")
    }

    /// Answers a conversation: one [`Reply`] for each of `n`.
    ///
    /// # Errors
    /// Why the request is refused; nothing was queued then.
    pub fn chat(&self, request: ChatRequest) -> Result<Vec<Reply>, RequestError> {
        let _ = request;
        Err(RequestError::Unsupported { what: "Service::chat is not there yet".to_owned() })
    }

    /// Goes on with a raw prompt: one [`Reply`] for each of `n`.
    ///
    /// # Errors
    /// Why the request is refused; nothing was queued then.
    pub fn complete(&self, request: CompletionRequest) -> Result<Vec<Reply>, RequestError> {
        let _ = request;
        Err(RequestError::Unsupported { what: "Service::complete is not there yet".to_owned() })
    }

    /// Ids of a text, as a completion would have them.
    ///
    /// # Errors
    /// A vocabulary without BOS where one is asked for.
    pub fn tokenize(&self, text: &str, bos: Bos, markers: Markers) -> Result<Vec<u32>, RequestError> {
        let _ = (text, bos, markers);
        Err(RequestError::Unsupported { what: "Service::tokenize is not there yet".to_owned() })
    }

    /// Text of ids, control tokens spelled.
    ///
    /// # Errors
    /// `BadRequest` with the id that the vocabulary lacks.
    pub fn detokenize(&self, ids: &[i64]) -> Result<String, RequestError> {
        let _ = ids;
        Err(RequestError::Unsupported { what: "Service::detokenize is not there yet".to_owned() })
    }

    /// The prompt that a conversation becomes: text and ids.
    ///
    /// # Errors
    /// What is wrong with the conversation.
    pub fn apply_template(
        &self,
        input: &lapidary_text::ChatInput,
    ) -> Result<(String, Vec<u32>), RequestError> {
        let _ = input;
        Err(RequestError::Unsupported { what: "Service::apply_template is not there yet".to_owned() })
    }

    /// What is served.
    pub fn model_info(&self) -> &ModelInfo {
        &self.inner.info
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.inner.tokenizer
    }

    /// The chat template.
    pub fn template(&self) -> &ChatTemplate {
        &self.inner.template
    }

    /// What goes on.
    pub fn stats(&self) -> ServiceStats {
        ServiceStats::default()
    }

    /// Takes no more requests and waits for those that run, at most `limit`. What still runs then is cancelled.
    pub fn drain(&self, limit: Duration) {
        let _ = limit;
    }
}
