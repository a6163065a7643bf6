//! Text in, text out, for many at once: what stands between a wire format and the token engine.
//!
//! A [`Service`] owns tokenizer, template and engine. A request is rendered and encoded, checked, and handed to the
//! engine with what guides it: a budget for thoughts, a grammar for the answer, stop strings. Tokens come back as
//! [`ServiceEvent`]s: text, thoughts, tool calls, the end.
//!
//! Deliberately absent: wire formats, HTTP, and anything about the device.

mod align;
mod check;
mod engine;
mod error;
mod event;
mod guide;
mod job;
mod looks;
mod origin;
mod pipeline;
mod reply;
mod request;
pub mod scripted;
mod sink;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lapidary_engine::{Engine, EngineOptions};
use lapidary_model::Progress;
use lapidary_text::{ChatInput, ChatTemplate, GrammarCompiler, Tokenizer, parse_call_arguments};
use lapidary_weights::Checkpoint;

use crate::error::{Error, Result};
use crate::gemma::{LoadedText, load_with_text};
use crate::{Defaults, LoadOptions, TemplateSource};
use job::Job;
use looks::Vectors;

pub use engine::{Cancel, TokenEngine};
pub use error::RequestError;
pub use event::{FinishKind, PromptToken, ServiceEvent, ServiceUsage, TokenLogprob, TopLogprob};
pub use lapidary_engine::metrics::{EngineStats, Histogram, PageUse};
pub use lapidary_engine::{PrefixDir, PrefixOptions};
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
    /// When to come back after [`RequestError::Overloaded`].
    pub retry_after: Duration,
    /// The pools hold that many sequences of the whole context. More replies run side by side while they are shorter.
    pub sequences: usize,
    /// Most replies that are made side by side.
    pub running: usize,
    /// Most that wait beside them; one more is [`RequestError::Overloaded`].
    pub waiting: usize,
    /// Running replies get a token at least that often while prompts are fed.
    pub max_stall: Duration,
    /// While prompts are fed, a step of running replies takes at most that many times as long as it would without them, and
    /// never longer than `max_stall`.
    pub max_slowdown: u32,
    /// A folder of control vectors, which requests name by their files without the ending.
    pub vectors: Option<PathBuf>,
    /// Whether requests may bring vectors of their own.
    pub inline_vectors: bool,
    /// Most bytes of activations that one request may have copied out.
    pub max_capture_bytes: usize,
    /// What is kept of earlier requests. A folder without a name for the model gets one from the weights' content.
    pub prefix: PrefixOptions,
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
            sequences: 4,
            running: 64,
            waiting: 256,
            max_stall: Duration::from_millis(200),
            max_slowdown: 3,
            vectors: None,
            inline_vectors: false,
            max_capture_bytes: 8 << 20,
            prefix: PrefixOptions::default(),
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
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ServiceStats {
    /// Replies in the making that have pages.
    pub running: usize,
    /// Replies that wait.
    pub waiting: usize,
    /// All that the engine counts.
    pub engine: EngineStats,
}

/// A model that answers many requests at once. Clones share it.
#[derive(Clone, Debug)]
pub struct Service {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Box<dyn TokenEngine>,
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    grammars: GrammarCompiler,
    vectors: Vectors,
    options: ServiceOptions,
    info: ModelInfo,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Service {
    /// Loads a model and starts its engine.
    ///
    /// # Errors
    /// What loading fails with; [`Error::Steering`] for a vector of [`ServiceOptions::vectors`] that is none or does not
    /// fit; with [`ServiceOptions::strict_template`], [`Error::UnknownMarkers`] for a template with
    /// markers that the vocabulary lacks.
    pub fn start(
        checkpoint: &Checkpoint,
        load: &LoadOptions,
        options: ServiceOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Service> {
        let running = options.running.max(1);
        let load = LoadOptions { head_rows: load.head_rows.max(running.min(64)), ..load.clone() };
        let (mut runner, text) = load_with_text(checkpoint, &load, progress)?;
        refuse_unknown_markers(&options, &text)?;
        // Who says that it is ready keeps no request waiting for what it put off.
        runner.settle()?;
        let context = load.context_for(&runner.model().config);
        let mut engine = EngineOptions::new(&runner, context, options.sequences);
        engine.scheduler.running = running;
        engine.scheduler.waiting = options.waiting;
        engine.scheduler.max_stall = options.max_stall;
        engine.scheduler.max_slowdown = options.max_slowdown;
        engine.prefix = options.prefix.clone();
        if engine.prefix.turn_tokens.is_empty() {
            // Conversations part where a turn begins.
            engine.prefix.turn_tokens.extend(text.tokenizer.specials().turn_open);
        }
        if let Some(dir) = engine.prefix.dir.as_mut().filter(|dir| dir.model.is_empty()) {
            dir.model = origin::origin(checkpoint, &runner.model().config, &load);
        }
        let vectors = match &options.vectors {
            Some(folder) => Vectors::read(folder, &runner.model().config)?,
            None => Vectors::default(),
        };
        let engine = Engine::start(runner, engine)?;
        Ok(Service::assemble(Box::new(engine), text, options, vectors, checkpoint.path()))
    }

    /// A service over an engine that is there already, with a checkpoint's text.
    ///
    /// # Errors
    /// As for [`Service::start`].
    pub(crate) fn over(
        engine: Box<dyn TokenEngine>,
        text: LoadedText,
        options: ServiceOptions,
        path: &Path,
    ) -> Result<Service> {
        refuse_unknown_markers(&options, &text)?;
        Ok(Service::assemble(engine, text, options, Vectors::default(), path))
    }

    fn assemble(
        engine: Box<dyn TokenEngine>,
        text: LoadedText,
        options: ServiceOptions,
        vectors: Vectors,
        path: &Path,
    ) -> Service {
        let LoadedText { tokenizer, template, template_source, defaults, notes } = text;
        let tokenizer = Arc::new(tokenizer);
        let info = ModelInfo {
            path: path.display().to_string(),
            context: engine.context(),
            vocab: engine.vocab(),
            defaults,
            template_source,
            notes,
        };
        let grammars = GrammarCompiler::new(Arc::clone(&tokenizer));
        Service { inner: Arc::new(Inner { engine, tokenizer, template, grammars, vectors, options, info }) }
    }

    /// Answers a conversation: one [`Reply`] for each of `n`.
    ///
    /// Takes the time that rendering, encoding and compiling a grammar take, a schema's up to two seconds; an
    /// asynchronous caller runs it where it may block.
    ///
    /// # Errors
    /// Why the request is refused; nothing was queued then.
    pub fn chat(&self, request: ChatRequest) -> Result<Vec<Reply>, RequestError> {
        Job::chat(&self.inner, request)?.submit(&self.inner)
    }

    /// Goes on with a raw prompt: one [`Reply`] for each of `n`. As for [`Service::chat`], it may block.
    ///
    /// # Errors
    /// Why the request is refused; nothing was queued then.
    pub fn complete(&self, request: CompletionRequest) -> Result<Vec<Reply>, RequestError> {
        Job::completion(&self.inner, request)?.submit(&self.inner)
    }

    /// Ids of a text, as a completion would have them.
    ///
    /// # Errors
    /// A vocabulary without BOS where one is asked for.
    pub fn tokenize(&self, text: &str, bos: Bos, markers: Markers) -> Result<Vec<u32>, RequestError> {
        job::encode(&self.inner, text, bos, markers)
    }

    /// Text of ids, control tokens spelled.
    ///
    /// # Errors
    /// `BadRequest` with the id that the vocabulary lacks.
    pub fn detokenize(&self, ids: &[i64]) -> Result<String, RequestError> {
        let ids = check::ids("tokens", ids, &self.inner.tokenizer)?;
        self.inner.tokenizer.decode(&ids).map_err(|e| RequestError::Internal(e.to_string()))
    }

    /// The prompt that a conversation becomes: text and ids.
    ///
    /// # Errors
    /// What is wrong with the conversation.
    pub fn apply_template(&self, input: &ChatInput) -> Result<(String, Vec<u32>), RequestError> {
        let mut input = input.clone();
        check::messages(&input.messages)?;
        parse_call_arguments(&mut input.messages).map_err(check::conversation_error)?;
        let prompt = self.inner.template.encode(&self.inner.tokenizer, &input);
        let prompt = prompt.map_err(check::conversation_error)?;
        Ok((prompt.text, prompt.ids))
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

    /// What was chosen at the start.
    pub fn options(&self) -> &ServiceOptions {
        &self.inner.options
    }

    /// Names of the vectors that requests may steer by.
    pub fn vector_names(&self) -> Vec<String> {
        self.inner.vectors.names()
    }

    /// What goes on.
    pub fn stats(&self) -> ServiceStats {
        let engine = self.inner.engine.stats();
        ServiceStats { running: engine.scheduler.running, waiting: engine.scheduler.waiting, engine }
    }

    /// Takes no more requests and waits for those that run, at most `limit`. What still runs then fails.
    pub fn drain(&self, limit: Duration) {
        self.inner.engine.drain(limit);
    }
}

fn refuse_unknown_markers(options: &ServiceOptions, text: &LoadedText) -> Result<()> {
    let markers = text.template.unknown_markers(&text.tokenizer);
    match options.strict_template && !markers.is_empty() {
        true => Err(Error::UnknownMarkers { markers: markers.join(" ") }),
        false => Ok(()),
    }
}
