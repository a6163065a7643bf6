//! The replies of `POST /v1/chat/completions`: whole, and as a stream of chunks.

use lapidary::service::{FinishKind, ServiceEvent, ServiceUsage, TokenLogprob, WholeReply};
use serde::Serialize;
use serde_json::{Value, json};

use super::looks::{self, PromptTokens};
use crate::error::ApiError;
use crate::ids;
use crate::replies::Whole;
use crate::sse::{Frames, Out};

/// What all parts of a reply have in common.
#[derive(Debug, Clone)]
pub struct Meta {
    /// Its name.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// Most tokens that were asked for, to tell when it was clamped.
    pub asked_tokens: Option<usize>,
}

impl Meta {
    /// A reply that begins now.
    pub fn new(prefix: &str, model: &str, asked_tokens: Option<usize>) -> Meta {
        Meta { id: ids::fresh(prefix), created: ids::now(), model: model.to_owned(), asked_tokens }
    }

    /// The limit, if it is less than what was asked for.
    pub fn clamped(&self, limit: Option<usize>) -> Option<usize> {
        limit.filter(|limit| self.asked_tokens.is_some_and(|asked| asked > *limit))
    }
}

/// The build that answers, as OpenAI's clients know it.
pub const FINGERPRINT: &str = concat!("lapidary-", env!("CARGO_PKG_VERSION"));

/// Token counts, the same whether a reply was streamed or not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct CompletionDetails {
    reasoning_tokens: usize,
}

impl Usage {
    /// Adds a choice. Choices of one prompt share it: `first` says whether it counts.
    pub fn add(&mut self, usage: &ServiceUsage, first: bool) {
        if first {
            self.prompt_tokens += usage.prompt_tokens;
            self.prompt_tokens_details.cached_tokens += usage.cached_tokens;
        }
        self.completion_tokens += usage.completion_tokens;
        self.completion_tokens_details.reasoning_tokens += usage.reasoning_tokens;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}

/// OpenAI's word for a reason.
pub fn finish_reason(reason: &FinishKind) -> &'static str {
    match reason {
        FinishKind::Stop { .. } => "stop",
        FinishKind::Length => "length",
        FinishKind::ToolCalls => "tool_calls",
    }
}

/// What only this server tells about a choice; absent when there is nothing to tell.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Remarks {
    /// The limit that was asked for did not fit the context; this one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<usize>,
    /// Calls that did not parse and stand in the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    unparsed_tool_calls: Option<usize>,
}

impl Remarks {
    /// The remarks, if there are any.
    pub fn new(max_tokens: Option<usize>, unparsed: usize) -> Option<Remarks> {
        let unparsed_tool_calls = (unparsed > 0).then_some(unparsed);
        let any = max_tokens.is_some() || unparsed_tool_calls.is_some();
        any.then_some(Remarks { max_tokens, unparsed_tool_calls })
    }
}

/// Logprobs of some tokens, in the chat format.
pub fn logprobs(tokens: &[TokenLogprob]) -> Value {
    json!({ "content": token_logprobs(tokens), "refusal": null })
}

/// An object a token, as both chat and responses have it.
pub fn token_logprobs(tokens: &[TokenLogprob]) -> Value {
    tokens
        .iter()
        .map(|token| {
            let top: Vec<Value> = token
                .top
                .iter()
                .map(|t| json!({ "token": t.text, "logprob": t.logprob, "bytes": t.bytes }))
                .collect();
            json!({ "token": token.text, "logprob": token.logprob, "bytes": token.bytes, "top_logprobs": top })
        })
        .collect()
}

/// A whole reply.
pub fn whole(meta: &Meta, all: &[Whole], wants_logprobs: bool) -> Value {
    let mut usage = Usage::default();
    let choices: Vec<Value> = all
        .iter()
        .enumerate()
        .map(|(index, whole)| {
            let reply = &whole.reply;
            usage.add(&reply.usage, index == 0);
            let mut message = json!({ "role": "assistant", "content": reply.text, "refusal": null });
            if !reply.thought.is_empty() {
                message["reasoning_content"] = reply.thought.clone().into();
                message["reasoning"] = reply.thought.clone().into();
            }
            if !reply.calls.is_empty() {
                if reply.text.is_empty() {
                    message["content"] = Value::Null;
                }
                let calls = reply.calls.iter().map(|(id, call)| {
                    let function = json!({ "name": call.name, "arguments": call.arguments });
                    json!({ "id": id, "type": "function", "function": function })
                });
                message["tool_calls"] = calls.collect();
            }
            let mut choice = json!({
                "index": index,
                "message": message,
                "logprobs": if wants_logprobs { logprobs(&reply.tokens) } else { Value::Null },
                "finish_reason": finish_reason(whole.reason()),
            });
            if let FinishKind::Stop { matched: Some(matched) } = whole.reason() {
                choice["stop_reason"] = matched.clone().into();
            }
            if let Some(remarks) = Remarks::new(meta.clamped(whole.max_tokens), reply.unparsed_calls) {
                choice["lapidary"] = json!(remarks);
            }
            add_looks(&mut choice, reply);
            choice
        })
        .collect();
    json!({
        "id": meta.id,
        "object": "chat.completion",
        "created": meta.created,
        "model": meta.model,
        "system_fingerprint": FINGERPRINT,
        "choices": choices,
        "usage": usage,
    })
}

/// What only some requests ask for.
pub fn add_looks(choice: &mut Value, reply: &WholeReply) {
    if !reply.prompt.is_empty() {
        choice["prompt_logprobs"] = looks::prompt_logprobs(&reply.prompt);
    }
    if !reply.captured.is_empty() {
        choice["capture"] = looks::captured(&reply.captured);
    }
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'static str,
    choices: Vec<ChunkChoice<'a>>,
    /// Null in all chunks but the last, when the last has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[derive(Default, Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
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

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
}

#[derive(Serialize)]
struct CallDelta<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

/// The frames of a streamed chat.
#[derive(Debug)]
pub struct ChatFrames {
    meta: Meta,
    include_usage: bool,
    usage: Usage,
    /// By choice: whether its first chunk is out, and its limit.
    begun: Vec<bool>,
    limits: Vec<Option<usize>>,
    prompt: PromptTokens,
    failed: bool,
}

impl ChatFrames {
    /// Frames for so many choices.
    pub fn new(meta: Meta, choices: usize, include_usage: bool) -> Self {
        ChatFrames {
            meta,
            include_usage,
            usage: Usage::default(),
            begun: vec![false; choices],
            limits: vec![None; choices],
            prompt: PromptTokens::default(),
            failed: false,
        }
    }

    fn choice<'a>(index: usize, delta: Delta<'a>) -> ChunkChoice<'a> {
        ChunkChoice { index, delta, ..ChunkChoice::default() }
    }

    fn write(&self, choices: Vec<ChunkChoice<'_>>, usage: Option<Usage>, out: &mut Out) {
        out.data(&Chunk {
            id: &self.meta.id,
            object: "chat.completion.chunk",
            created: self.meta.created,
            model: &self.meta.model,
            system_fingerprint: FINGERPRINT,
            choices,
            usage: self.include_usage.then_some(usage),
        });
    }

    /// The first chunk of a choice says whose message it is.
    fn begin_choice(&mut self, index: usize, out: &mut Out) {
        if !std::mem::replace(&mut self.begun[index], true) {
            let delta = Delta { role: Some("assistant"), content: Some(""), ..Delta::default() };
            self.write(vec![Self::choice(index, delta)], None, out);
        }
    }

    fn delta(&self, index: usize, delta: Delta<'_>, tokens: &[TokenLogprob], out: &mut Out) {
        let mut choice = Self::choice(index, delta);
        choice.logprobs = (!tokens.is_empty()).then(|| logprobs(tokens));
        self.write(vec![choice], None, out);
    }
}

impl Frames for ChatFrames {
    fn event(&mut self, index: usize, event: ServiceEvent, out: &mut Out) {
        match event {
            ServiceEvent::Started { max_tokens, prompt_tokens, .. } => {
                self.limits[index] = Some(max_tokens);
                self.prompt.expect(prompt_tokens);
                self.begin_choice(index, out);
            }
            ServiceEvent::Prompt { tokens } => {
                if let Some(tokens) = self.prompt.add(tokens) {
                    let mut choice = Self::choice(index, Delta::default());
                    choice.prompt_logprobs = Some(looks::prompt_logprobs(&tokens));
                    self.write(vec![choice], None, out);
                }
            }
            ServiceEvent::Captured { tensors } => {
                self.begin_choice(index, out);
                let mut choice = Self::choice(index, Delta::default());
                choice.capture = Some(looks::captured(&tensors));
                self.write(vec![choice], None, out);
            }
            ServiceEvent::Text { delta, tokens } => {
                self.begin_choice(index, out);
                self.delta(index, Delta { content: Some(&delta), ..Delta::default() }, &tokens, out);
            }
            ServiceEvent::Thought { delta, .. } => {
                self.begin_choice(index, out);
                let thought = Some(delta.as_str());
                let delta = Delta { reasoning_content: thought, reasoning: thought, ..Delta::default() };
                self.delta(index, delta, &[], out);
            }
            ServiceEvent::CallBegin { index: call, id, name } => {
                self.begin_choice(index, out);
                let function = FunctionDelta { name: Some(&name), arguments: "" };
                let call = CallDelta { index: call, id: Some(&id), kind: Some("function"), function };
                self.delta(index, Delta { tool_calls: Some([call]), ..Delta::default() }, &[], out);
            }
            ServiceEvent::CallArguments { index: call, delta } => {
                let function = FunctionDelta { name: None, arguments: &delta };
                let call = CallDelta { index: call, id: None, kind: None, function };
                self.delta(index, Delta { tool_calls: Some([call]), ..Delta::default() }, &[], out);
            }
            ServiceEvent::Finished { reason, usage, unparsed_calls } => {
                self.begin_choice(index, out);
                self.usage.add(&usage, index == 0);
                let mut choice = Self::choice(index, Delta::default());
                choice.finish_reason = Some(finish_reason(&reason));
                if let FinishKind::Stop { matched: Some(matched) } = &reason {
                    choice.stop_reason = Some(matched);
                }
                choice.lapidary = Remarks::new(self.meta.clamped(self.limits[index]), unparsed_calls);
                self.write(vec![choice], None, out);
            }
            ServiceEvent::Failed(error) => {
                // The stream ends here, without the marker of a complete one.
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
