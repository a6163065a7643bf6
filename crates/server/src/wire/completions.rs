//! `POST /v1/completions`: request, whole reply, chunks.

use lapidary::service::{
    Bos, CompletionPrompt, CompletionRequest, FinishKind, Markers, PromptToken, ServiceEvent, TokenLogprob,
    TopLogprob,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::chat::StreamOptions;
use super::chunks::{FINGERPRINT, Meta, Remarks, Usage, finish_reason};
use super::format::{self, ResponseFormat, StructuredOutputs};
use super::looks::{self, PromptTokens};
use super::sampling::request;
use super::values::Prompts;
use crate::error::ApiError;
use crate::options::ServerOptions;
use crate::replies::Whole;
use crate::sse::{Frames, Out};

/// Most of the likeliest tokens beside each token.
const MAX_LOGPROBS: u32 = 20;
/// Tokens of a completion when the request does not say, as OpenAI documents it.
const DEFAULT_TOKENS: usize = 16;
/// Most prompts of one request.
const MAX_PROMPTS: usize = 256;

request! {
    /// The body.
    pub struct CompletionBody {
        pub model: Option<String>,
        pub prompt: Prompts,
        pub stream: Option<bool>,
        pub stream_options: Option<StreamOptions>,
        pub logprobs: Option<u32>,
        pub echo: Option<bool>,
        pub best_of: Option<usize>,
        pub suffix: Option<String>,
        pub add_special_tokens: Option<bool>,
        pub response_format: Option<ResponseFormat>,
        pub structured_outputs: Option<StructuredOutputs>,
        // Known, and without effect on an answer.
        #[allow(dead_code)]
        pub user: Option<Value>,
    }
}

impl CompletionBody {
    /// One request a prompt.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn requests(self, options: &ServerOptions) -> Result<Vec<CompletionRequest>, ApiError> {
        let refuse = |field: &str, text: &str| Err(ApiError::bad_request(Some(field), text));
        if self.suffix.as_ref().is_some_and(|s| !s.is_empty()) {
            return refuse("suffix", "the model cannot fill in a middle; leave it out");
        }
        if self.best_of.is_some_and(|best| best != self.n.unwrap_or(1)) {
            return refuse("best_of", "expected the value of n: all replies are returned");
        }
        if let Some(top) = self.logprobs.filter(|top| *top > MAX_LOGPROBS) {
            return refuse(
                "logprobs",
                &format!("expected a whole number from 0 to {MAX_LOGPROBS}, got {top}"),
            );
        }
        let echoes_logprobs = self.echo == Some(true) && self.logprobs.is_some();
        let tells_prompt = echoes_logprobs || self.prompt_logprobs.is_some();
        if tells_prompt && self.stream == Some(true) && self.n.is_some_and(|n| n > 1) {
            return refuse("n", "logprobs of a prompt are streamed with one reply; leave out stream or n");
        }
        if self.max_tokens == Some(0) && !tells_prompt {
            return refuse(
                "max_tokens",
                "expected a whole number above 0, got 0; 0 goes with echo and logprobs",
            );
        }
        let mut generation = self.sampling().params(options)?;
        if echoes_logprobs {
            generation.prompt_logprobs = generation.prompt_logprobs.max(self.logprobs);
        }
        generation.max_tokens = generation.max_tokens.or(Some(DEFAULT_TOKENS));
        generation.logprobs = self.logprobs;
        let prompts: Vec<CompletionPrompt> = match self.prompt {
            Prompts::Texts(texts) => texts.into_iter().map(CompletionPrompt::Text).collect(),
            Prompts::Ids(lists) => lists.into_iter().map(CompletionPrompt::Ids).collect(),
        };
        if prompts.len() > MAX_PROMPTS {
            return refuse(
                "prompt",
                &format!("{} prompts, of which at most {MAX_PROMPTS} are taken", prompts.len()),
            );
        }
        let format = format::format(self.response_format, self.structured_outputs)?;
        let bos = if self.add_special_tokens == Some(false) { Bos::AsGiven } else { Bos::One };
        let request = |prompt| CompletionRequest {
            prompt,
            bos,
            markers: Markers::Parse,
            format: format.clone(),
            generation: generation.clone(),
        };
        Ok(prompts.into_iter().map(request).collect())
    }
}

/// Logprobs of tokens, in the form of completions: four lists side by side.
#[derive(Debug, Default)]
struct Columns {
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    tops: Vec<Value>,
    offsets: Vec<Value>,
}

impl Columns {
    /// Adds tokens; `offset` is where the first of them begins, in characters.
    fn answer(&mut self, tokens: &[TokenLogprob], offset: &mut usize) {
        for token in tokens {
            self.push(&token.text, Some(token.logprob), &token.top, usize::MAX, *offset);
            *offset += token.text.chars().count();
        }
    }

    /// Adds a prompt's tokens, whose text is `echo`, with `top` of the likeliest each.
    fn prompt(&mut self, tokens: &[PromptToken], echo: &str, top: usize, offset: &mut usize) {
        let mut rest = echo;
        for token in tokens {
            self.push(&token.text, token.logprob, &token.top, top, *offset);
            // A BOS that was put in front is no part of the text.
            if let Some(behind) = rest.strip_prefix(token.text.as_str()) {
                rest = behind;
                *offset += token.text.chars().count();
            }
        }
        // Characters in several tokens spell nothing by themselves; what follows begins where the text ends.
        *offset += rest.chars().count();
    }

    fn push(&mut self, text: &str, logprob: Option<f32>, top: &[TopLogprob], most: usize, offset: usize) {
        self.tokens.push(text.into());
        self.logprobs.push(json!(logprob));
        let best: Map<String, Value> =
            top.iter().take(most).map(|t| (t.text.clone(), json!(t.logprob))).collect();
        self.tops.push(if logprob.is_some() { Value::Object(best) } else { Value::Null });
        self.offsets.push(offset.into());
    }

    fn json(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.tops,
            "text_offset": self.offsets,
        })
    }
}

/// Which probabilities a request asked for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Asked {
    /// Of the answer's tokens, with so many of the likeliest.
    pub logprobs: Option<usize>,
    /// Of the prompt's, beside the answer's: it is echoed.
    pub echo: bool,
    /// Of the prompt's, in a field of their own.
    pub prompt: bool,
}

/// A whole reply. `echoes` has a text a prompt to put in front; choices of one prompt are neighbours, `n` of them.
pub fn whole(meta: &Meta, all: &[Whole], n: usize, echoes: &[String], asked: Asked) -> Value {
    let mut usage = Usage::default();
    let choices: Vec<Value> = all
        .iter()
        .enumerate()
        .map(|(index, whole)| {
            let reply = &whole.reply;
            usage.add(&reply.usage, index.is_multiple_of(n));
            let echo = echoes.get(index / n).map_or("", String::as_str);
            // The first reply to a prompt tells its tokens.
            let prompt = &all[index - index % n].reply.prompt;
            let logprobs = asked.logprobs.map(|top| {
                let (mut columns, mut offset) = (Columns::default(), 0);
                if asked.echo {
                    columns.prompt(prompt, echo, top, &mut offset);
                }
                columns.answer(&reply.tokens, &mut offset);
                columns.json()
            });
            let mut choice = json!({
                "index": index,
                "text": format!("{echo}{}", reply.text),
                "logprobs": logprobs,
                "finish_reason": finish_reason(whole.reason()),
            });
            if let FinishKind::Stop { matched: Some(matched) } = whole.reason() {
                choice["stop_reason"] = matched.clone().into();
            }
            if let Some(remarks) = Remarks::new(meta.clamped(whole.max_tokens), reply.unparsed_calls) {
                choice["lapidary"] = json!(remarks);
            }
            if asked.prompt {
                choice["prompt_logprobs"] = looks::prompt_logprobs(prompt);
            }
            if !reply.captured.is_empty() {
                choice["capture"] = looks::captured(&reply.captured);
            }
            choice
        })
        .collect();
    json!({
        "id": meta.id,
        "object": "text_completion",
        "created": meta.created,
        "model": meta.model,
        "system_fingerprint": FINGERPRINT,
        "choices": choices,
        "usage": usage,
    })
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: Vec<ChunkChoice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[derive(Default, Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lapidary: Option<Remarks>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    capture: Option<Value>,
}

/// The frames of a streamed completion.
#[derive(Debug)]
pub struct CompletionFrames {
    meta: Meta,
    n: usize,
    include_usage: bool,
    usage: Usage,
    echoes: Vec<String>,
    asked: Asked,
    /// By choice: characters so far, the limit, and the prompt's tokens.
    offsets: Vec<usize>,
    limits: Vec<Option<usize>>,
    prompts: Vec<PromptTokens>,
    failed: bool,
}

impl CompletionFrames {
    /// Frames for so many choices, `n` a prompt.
    pub fn new(
        meta: Meta,
        choices: usize,
        n: usize,
        echoes: Vec<String>,
        asked: Asked,
        include_usage: bool,
    ) -> Self {
        CompletionFrames {
            meta,
            n,
            include_usage,
            usage: Usage::default(),
            echoes,
            asked,
            offsets: vec![0; choices],
            limits: vec![None; choices],
            prompts: (0..choices).map(|_| PromptTokens::default()).collect(),
            failed: false,
        }
    }

    fn write(&self, choices: Vec<ChunkChoice<'_>>, usage: Option<Usage>, out: &mut Out) {
        out.data(&Chunk {
            id: &self.meta.id,
            object: "text_completion",
            created: self.meta.created,
            model: &self.meta.model,
            system_fingerprint: FINGERPRINT,
            choices,
            usage: self.include_usage.then_some(usage),
        });
    }
}

impl Frames for CompletionFrames {
    fn begin(&mut self, out: &mut Out) {
        // With its tokens' probabilities, a prompt is written when these are known.
        if self.asked.echo && self.asked.logprobs.is_some() {
            return;
        }
        for index in 0..self.offsets.len() {
            if let Some(text) = self.echoes.get(index / self.n) {
                self.write(vec![ChunkChoice { index, text, ..ChunkChoice::default() }], None, out);
            }
        }
    }

    fn event(&mut self, index: usize, event: ServiceEvent, out: &mut Out) {
        match event {
            ServiceEvent::Started { max_tokens, prompt_tokens, .. } => {
                self.limits[index] = Some(max_tokens);
                self.prompts[index].expect(prompt_tokens);
            }
            ServiceEvent::Prompt { tokens } => {
                let Some(tokens) = self.prompts[index].add(tokens) else { return };
                let echo = self.echoes.get(index / self.n).map_or("", String::as_str);
                let mut choice = ChunkChoice { index, ..ChunkChoice::default() };
                if let Some(top) = self.asked.logprobs.filter(|_| self.asked.echo) {
                    let mut columns = Columns::default();
                    columns.prompt(&tokens, echo, top, &mut self.offsets[index]);
                    (choice.text, choice.logprobs) = (echo, Some(columns.json()));
                }
                choice.prompt_logprobs = self.asked.prompt.then(|| looks::prompt_logprobs(&tokens));
                self.write(vec![choice], None, out);
            }
            ServiceEvent::Captured { tensors } => {
                let capture = Some(looks::captured(&tensors));
                self.write(vec![ChunkChoice { index, capture, ..ChunkChoice::default() }], None, out);
            }
            ServiceEvent::Text { delta, tokens } => {
                let logprobs = (!tokens.is_empty()).then(|| {
                    let mut columns = Columns::default();
                    columns.answer(&tokens, &mut self.offsets[index]);
                    columns.json()
                });
                self.write(
                    vec![ChunkChoice { index, text: &delta, logprobs, ..ChunkChoice::default() }],
                    None,
                    out,
                );
            }
            ServiceEvent::Finished { reason, usage, unparsed_calls } => {
                self.usage.add(&usage, index.is_multiple_of(self.n));
                let stop_reason = match &reason {
                    FinishKind::Stop { matched } => matched.as_deref(),
                    _ => None,
                };
                let lapidary = Remarks::new(self.meta.clamped(self.limits[index]), unparsed_calls);
                let finish_reason = Some(finish_reason(&reason));
                let choice =
                    ChunkChoice { index, finish_reason, stop_reason, lapidary, ..ChunkChoice::default() };
                self.write(vec![choice], None, out);
            }
            ServiceEvent::Failed(error) => {
                self.failed = true;
                out.data(&ApiError::from(error).openai());
            }
            _ => {}
        }
    }

    fn ended(&self) -> bool {
        self.failed
    }

    fn end(&mut self, out: &mut Out) {
        if self.include_usage {
            self.write(Vec::new(), Some(self.usage), out);
        }
        out.done();
    }
}
