//! `POST /v1/completions`: request, whole reply, chunks.

use lapidary::service::{
    Bos, CompletionPrompt, CompletionRequest, FinishKind, Markers, ServiceEvent, TokenLogprob,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::chat::StreamOptions;
use super::chunks::{FINGERPRINT, Meta, Remarks, Usage, finish_reason};
use super::format::{self, ResponseFormat, StructuredOutputs};
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
        if self.echo == Some(true) && self.logprobs.is_some() {
            return refuse("echo", "logprobs of the prompt are not told; leave out logprobs or echo");
        }
        if self.max_tokens == Some(0) {
            return refuse("max_tokens", "expected a whole number above 0, got 0");
        }
        let mut generation = self.sampling().params(options)?;
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

/// Logprobs of some tokens, in the form of completions. `offset` is where the first token begins, in characters.
fn logprobs(tokens: &[TokenLogprob], offset: &mut usize) -> Value {
    let mut offsets = Vec::with_capacity(tokens.len());
    let mut tops = Vec::with_capacity(tokens.len());
    for token in tokens {
        offsets.push(*offset);
        *offset += token.text.chars().count();
        let top: Map<String, Value> = token.top.iter().map(|t| (t.text.clone(), json!(t.logprob))).collect();
        tops.push(Value::Object(top));
    }
    json!({
        "tokens": tokens.iter().map(|t| &t.text).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|t| t.logprob).collect::<Vec<_>>(),
        "top_logprobs": tops,
        "text_offset": offsets,
    })
}

/// A whole reply. `echoes` has a text a prompt to put in front; choices of one prompt are neighbours, `n` of them.
pub fn whole(meta: &Meta, all: &[Whole], n: usize, echoes: &[String], wants_logprobs: bool) -> Value {
    let mut usage = Usage::default();
    let choices: Vec<Value> = all
        .iter()
        .enumerate()
        .map(|(index, whole)| {
            let reply = &whole.reply;
            usage.add(&reply.usage, index.is_multiple_of(n));
            let echo = echoes.get(index / n).map_or("", String::as_str);
            let mut choice = json!({
                "index": index,
                "text": format!("{echo}{}", reply.text),
                "logprobs": if wants_logprobs { logprobs(&reply.tokens, &mut 0) } else { Value::Null },
                "finish_reason": finish_reason(whole.reason()),
            });
            if let FinishKind::Stop { matched: Some(matched) } = whole.reason() {
                choice["stop_reason"] = matched.clone().into();
            }
            if let Some(remarks) = Remarks::new(meta.clamped(whole.max_tokens), reply.unparsed_calls) {
                choice["lapidary"] = json!(remarks);
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
}

/// The frames of a streamed completion.
#[derive(Debug)]
pub struct CompletionFrames {
    meta: Meta,
    n: usize,
    include_usage: bool,
    usage: Usage,
    echoes: Vec<String>,
    /// By choice: characters so far, and the limit.
    offsets: Vec<usize>,
    limits: Vec<Option<usize>>,
    failed: bool,
}

impl CompletionFrames {
    /// Frames for so many choices, `n` a prompt.
    pub fn new(meta: Meta, choices: usize, n: usize, echoes: Vec<String>, include_usage: bool) -> Self {
        CompletionFrames {
            meta,
            n,
            include_usage,
            usage: Usage::default(),
            echoes,
            offsets: vec![0; choices],
            limits: vec![None; choices],
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
        let echoes = std::mem::take(&mut self.echoes);
        for (index, offset) in self.offsets.iter().enumerate() {
            debug_assert_eq!(*offset, 0, "nothing has been written");
            if let Some(text) = echoes.get(index / self.n) {
                self.write(vec![ChunkChoice { index, text, ..ChunkChoice::default() }], None, out);
            }
        }
    }

    fn event(&mut self, index: usize, event: ServiceEvent, out: &mut Out) {
        match event {
            ServiceEvent::Started { max_tokens, .. } => self.limits[index] = Some(max_tokens),
            ServiceEvent::Text { delta, tokens } => {
                let logprobs = (!tokens.is_empty()).then(|| logprobs(&tokens, &mut self.offsets[index]));
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
