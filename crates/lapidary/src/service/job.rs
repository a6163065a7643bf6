//! From a request that was checked to requests of the engine, one for each reply.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use lapidary_engine::sampling::SamplingParams;
use lapidary_engine::{EngineRequest, Error as EngineError, Guide, Observer, Prompt, PromptScores};
use lapidary_ops::SteerSet;
use lapidary_text::{
    CallGrammar, Grammar, Matcher, OutputOptions, OutputParser, Specials, StreamDecoder, Tools,
    parse_call_arguments,
};
use serde_json::{Value, json};
use tokio::sync::mpsc::unbounded_channel;

use super::guide::{AnswerGrammar, ReplyGuide};
use super::looks::{self, SharedRecording};
use super::pipeline::{Pipeline, Reader};
use super::reply::Made;
use super::sink::{PromptReport, ReplySink};
use super::{
    Bos, ChatRequest, CompletionPrompt, CompletionRequest, Format, GenerationParams, Inner, Markers,
    ParallelCalls, Reply, RequestError, ToolChoice, check, choice_seed,
};

/// What all replies to a request have in common.
pub(super) struct Job {
    ids: Vec<u32>,
    kind: Kind,
    generation: GenerationParams,
    sampling: SamplingParams,
    /// Tokens that end a reply.
    ends: Vec<u32>,
    /// The request's own among them, which `ignore_eos` leaves alone.
    own_ends: Vec<u32>,
    budget: Option<usize>,
    answer: Option<Answer>,
    /// The grammar of one call, for tools that ask for it.
    calls: Option<Matcher>,
    steering: Option<Arc<SteerSet>>,
    /// Layer and vector of each of its edits.
    edits: Vec<(usize, usize)>,
}

enum Kind {
    Raw,
    Chat { tools: Tools, parallel: ParallelCalls },
}

/// The grammar of the answer and where it stands.
struct Answer {
    matcher: Matcher,
    thought_first: bool,
    or_calls: bool,
    is_calls: bool,
}

impl Job {
    pub fn chat(inner: &Inner, request: ChatRequest) -> Result<Job, RequestError> {
        check::messages(&request.input.messages)?;
        check::tools(&request)?;
        let ChatRequest { mut input, tool_choice, parallel_tool_calls, format, .. } = request;
        parse_call_arguments(&mut input.messages).map_err(check::conversation_error)?;
        let prompt = inner.template.encode(&inner.tokenizer, &input).map_err(check::conversation_error)?;
        let specials = *inner.tokenizer.specials();
        let mut job = Job::new(inner, prompt.ids, request.generation)?;

        let thinks = input.enable_thinking == Some(true) && specials.channel_open.is_some();
        job.budget = request.thinking_budget.or(inner.options.default_thinking_budget);
        let thought_first = thinks && !prompt.thinking_open;
        let calls = |tools: Vec<Value>, several| {
            let grammar = Grammar::Calls(CallGrammar { tools, several });
            inner.grammars.compile(&grammar).map_err(|e| check::grammar_error("tools", e))
        };
        let forced = |matcher| Answer { matcher, thought_first, or_calls: false, is_calls: true };
        let mut tools = Tools::new(&input.tools);
        match tool_choice {
            ToolChoice::Required => {
                let several = parallel_tool_calls == ParallelCalls::Many;
                job.answer = Some(forced(calls(input.tools, several)?));
            }
            ToolChoice::Named(name) => {
                input.tools.retain(|tool| tool.get("function").unwrap_or(tool)["name"] == name.as_str());
                job.answer = Some(forced(calls(input.tools, false)?));
            }
            ToolChoice::None => {
                job.sampling.suppress.extend(specials.tool_call_open);
                tools = Tools::default();
                let matcher = job.format(inner, &format)?;
                job.answer = matcher.map(|matcher| Answer {
                    matcher,
                    thought_first,
                    or_calls: false,
                    is_calls: false,
                });
            }
            ToolChoice::Auto => {
                let or_calls = !input.tools.is_empty();
                let matcher = job.format(inner, &format)?;
                // Where an answer must be of a form, a garbled call would be text before it.
                if or_calls && (matcher.is_some() || asks_for_strict(&input.tools)) {
                    job.calls = Some(calls(as_far_as_strict(&input.tools), false)?);
                }
                job.answer =
                    matcher.map(|matcher| Answer { matcher, thought_first, or_calls, is_calls: false });
            }
        }
        job.kind = Kind::Chat { tools, parallel: parallel_tool_calls };
        // The opener of another turn ends this one, whatever the files declare.
        if !job.generation.ignore_eos {
            job.ends.extend(specials.turn_open);
        }
        Ok(job)
    }

    pub fn completion(inner: &Inner, request: CompletionRequest) -> Result<Job, RequestError> {
        let ids = match &request.prompt {
            CompletionPrompt::Text(text) => encode(inner, text, request.bos, request.markers)?,
            CompletionPrompt::Ids(ids) => check::ids("prompt", ids, &inner.tokenizer)?,
        };
        if ids.is_empty() {
            return Err(RequestError::bad("prompt", "expected at least one token"));
        }
        let mut job = Job::new(inner, ids, request.generation)?;
        let matcher = job.format(inner, &request.format)?;
        job.answer =
            matcher.map(|matcher| Answer { matcher, thought_first: false, or_calls: false, is_calls: false });
        Ok(job)
    }

    fn new(inner: &Inner, ids: Vec<u32>, generation: GenerationParams) -> Result<Job, RequestError> {
        let own_ends = check::generation(&generation, &inner.tokenizer, inner.options.max_n)?;
        let defaults = &inner.info.defaults;
        let (vocab, most) = (inner.engine.vocab(), inner.options.max_logprobs);
        let sampling = check::sampling(&generation, defaults, &inner.tokenizer, vocab, most)?;
        let context = inner.engine.context();
        if ids.len() >= context {
            return Err(RequestError::PromptTooLong { tokens: ids.len(), context });
        }
        let (steering, edits) = match looks::steering(inner, &generation)? {
            Some(plan) => (Some(Arc::new(plan.set)), plan.edits),
            None => (None, Vec::new()),
        };
        let mut ends = own_ends.clone();
        if !generation.ignore_eos {
            ends.extend(&defaults.stop_ids);
        }
        Ok(Job {
            ids,
            kind: Kind::Raw,
            generation,
            sampling,
            ends,
            own_ends,
            budget: None,
            answer: None,
            calls: None,
            steering,
            edits,
        })
    }

    fn format(&self, inner: &Inner, format: &Format) -> Result<Option<Matcher>, RequestError> {
        let grammar = match format {
            Format::Text => return Ok(None),
            Format::JsonObject => Grammar::JsonObject,
            Format::JsonSchema { schema, .. } => Grammar::JsonSchema(schema.clone()),
            Format::Regex(regex) => Grammar::Regex(regex.clone()),
            Format::Lark(lark) => Grammar::Lark(lark.clone()),
        };
        inner.grammars.compile(&grammar).map(Some).map_err(|e| check::grammar_error("format", e))
    }

    /// Hands everything over: one reply for each of `n`. When one is refused, those before it are taken back.
    pub fn submit(self, inner: &Inner) -> Result<Vec<Reply>, RequestError> {
        let room = inner.engine.context() - self.ids.len();
        let wanted = self.generation.max_tokens.or(inner.options.default_max_tokens);
        let max_tokens = wanted.unwrap_or(room).min(room);
        let seed = self.generation.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish());
        let key = request_key();
        let recording = looks::recording(inner, &self.generation, &self.edits, self.ids.len(), max_tokens)?;
        (0..self.generation.n)
            .map(|index| {
                let recording = recording.clone().map(SharedRecording::new);
                self.reply(inner, index, max_tokens, choice_seed(seed, index), key, recording)
            })
            .collect()
    }

    fn reply(
        &self,
        inner: &Inner,
        index: usize,
        max_tokens: usize,
        seed: u64,
        key: u64,
        recording: Option<SharedRecording>,
    ) -> Result<Reply, RequestError> {
        let tokenizer = &inner.tokenizer;
        let reader = match &self.kind {
            Kind::Raw => Reader::Raw(StreamDecoder::without_specials(Arc::clone(tokenizer))),
            Kind::Chat { tools, parallel } => {
                let options = OutputOptions {
                    tools: tools.clone(),
                    parallel_calls: *parallel == ParallelCalls::Many,
                    held_calls: self.calls.is_some() || self.answer.as_ref().is_some_and(|a| a.is_calls),
                    stop_ids: self.ends.clone(),
                };
                Reader::Chat(Box::new(OutputParser::new(Arc::clone(tokenizer), &self.ids, options)))
            }
        };
        let ignored = match self.generation.ignore_eos {
            true => {
                let mut ignored = inner.info.defaults.stop_ids.clone();
                ignored.extend(tokenizer.specials().turn_open);
                ignored.retain(|id| !self.own_ends.contains(id));
                ignored
            }
            false => Vec::new(),
        };
        let stops = self.generation.stop.clone();
        let pipeline = Arc::new(Mutex::new(Pipeline::new(
            Arc::clone(tokenizer),
            reader,
            stops,
            ignored,
            format!("{key:016x}{index:04x}"),
            self.generation.logprobs.is_some(),
        )));
        let (send, events) = unbounded_channel();
        // The other replies share the prompt's rows, and would have to run them again.
        let scored = self.generation.prompt_logprobs.filter(|_| index == 0);
        let made = Arc::<Made>::default();
        let sink = ReplySink {
            prompt: scored.map(|_| PromptReport { tokenizer: Arc::clone(tokenizer), first: self.ids[0] }),
            recording: recording.clone(),
            made: Arc::clone(&made),
            pipeline: Arc::clone(&pipeline),
            events: send,
            max_tokens,
            timeout: self.generation.timeout,
        };
        let request = EngineRequest {
            prompt: Prompt::from(self.ids.as_slice()),
            sampling: SamplingParams { seed, ..self.sampling.clone() },
            max_tokens,
            min_tokens: self.generation.min_tokens,
            stop_ids: self.ends.clone(),
            ignore_eos: self.generation.ignore_eos,
            logprobs: self.generation.logprobs.map(|n| n as usize),
            prompt_scores: scored.map(|top| PromptScores { from: 1, top: top as usize }),
            steering: self.steering.clone(),
            observer: recording.map(|recording| Box::new(recording) as Box<dyn Observer>),
            priority: self.generation.priority,
            timeout: self.generation.timeout,
            guide: self.guide(inner, pipeline),
            sink: Box::new(sink),
        };
        let cancel = inner.engine.submit(request).map_err(|e| refusal(inner, e))?;
        Ok(Reply::new(index, events, made, cancel))
    }

    /// None when nothing but the engine's own rules says what comes and when it ends.
    fn guide(&self, inner: &Inner, pipeline: Arc<Mutex<Pipeline>>) -> Option<Box<dyn Guide>> {
        let one_call = matches!(self.kind, Kind::Chat { parallel: ParallelCalls::One, .. });
        let needed = self.budget.is_some()
            || self.answer.is_some()
            || self.calls.is_some()
            || one_call
            || !self.generation.stop.is_empty();
        if !needed {
            return None;
        }
        let answer = self.answer.as_ref().map(|a| AnswerGrammar {
            matcher: a.matcher.clone(),
            thought_first: a.thought_first,
            or_calls: a.or_calls,
            is_calls: a.is_calls,
        });
        Some(Box::new(ReplyGuide::new(
            pipeline,
            *inner.tokenizer.specials(),
            self.budget,
            answer,
            self.calls.clone(),
            self.ends.clone(),
            inner.engine.vocab(),
        )))
    }
}

/// Ids of a raw prompt.
pub(super) fn encode(
    inner: &Inner,
    text: &str,
    bos: Bos,
    markers: Markers,
) -> Result<Vec<u32>, RequestError> {
    let specials = match markers {
        Markers::Plain => Specials::Plain,
        Markers::Parse => Specials::Parse,
    };
    let tokenizer = &inner.tokenizer;
    match bos {
        Bos::AsGiven => Ok(tokenizer.encode(text, specials)),
        Bos::One => {
            // The spelling of BOS at the beginning is the one marker that is always meant.
            let bos = tokenizer.specials().bos.and_then(|id| tokenizer.piece(id).ok());
            let text = bos.and_then(|bos| text.strip_prefix(bos)).unwrap_or(text);
            let ids = tokenizer.encode_prompt(text, specials);
            ids.map_err(|e| RequestError::Internal(e.to_string()))
        }
    }
}

/// Whether a tool asks for its schema to be kept to.
fn asks_for_strict(tools: &[Value]) -> bool {
    tools.iter().any(|tool| tool.get("function").unwrap_or(tool)["strict"] == true)
}

/// Declarations for the grammar of calls that nobody forces: tools that do not ask for strictness may have any arguments.
fn as_far_as_strict(tools: &[Value]) -> Vec<Value> {
    let each = tools.iter().map(|tool| {
        let function = tool.get("function").unwrap_or(tool);
        match function["strict"] == true {
            true => json!({ "function": function }),
            false => json!({ "function": { "name": function["name"], "parameters": {} } }),
        }
    });
    each.collect()
}

/// A number that no other request of this process has, and hardly one of another.
fn request_key() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u64(COUNT.fetch_add(1, Ordering::Relaxed));
    hasher.finish()
}

/// Why the engine takes no request.
fn refusal(inner: &Inner, error: EngineError) -> RequestError {
    match error {
        EngineError::QueueFull { .. } => RequestError::Overloaded { retry_after: inner.options.retry_after },
        EngineError::ShuttingDown => RequestError::ShuttingDown,
        EngineError::PromptTooLong { tokens, context } => RequestError::PromptTooLong { tokens, context },
        EngineError::Sampling(error) => check::sampling_error(error),
        EngineError::Steering(error) => RequestError::bad("steering", error.to_string()),
        error @ EngineError::CannotSteer { .. } => {
            RequestError::Unsupported { what: format!("steering: {error}") }
        }
        error @ (EngineError::Token { .. } | EngineError::EmptyPrompt) => {
            RequestError::bad("prompt", error.to_string())
        }
        error => RequestError::Internal(error.to_string()),
    }
}
