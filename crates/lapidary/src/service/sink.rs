//! The engine's events become the reply's, on the engine's thread.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lapidary_engine::{EngineEvent, EngineFinish, EngineUsage, FailureKind, Score, Sink};
use lapidary_text::{Finish, Tokenizer};
use tokio::sync::mpsc::UnboundedSender;

use super::error::RequestError;
use super::event::{FinishKind, PromptToken, ServiceEvent, ServiceUsage};
use super::guide::code;
use super::looks::SharedRecording;
use super::pipeline::{Pipeline, spelled, top_logprobs};
use super::reply::Made;

/// What tells the prompt's tokens.
#[derive(Debug)]
pub(super) struct PromptReport {
    pub tokenizer: Arc<Tokenizer>,
    /// The first token of the prompt, of which nothing says how likely it is.
    pub first: u32,
}

impl PromptReport {
    fn first(&self) -> ServiceEvent {
        let (text, bytes) = spelled(&self.tokenizer, self.first);
        let first = PromptToken { token: self.first, text, bytes, logprob: None, top: Vec::new() };
        ServiceEvent::Prompt { tokens: vec![first] }
    }

    fn more(&self, scores: Vec<Score>) -> ServiceEvent {
        let token = |score: Score| {
            let (text, bytes) = spelled(&self.tokenizer, score.token);
            let top = top_logprobs(&self.tokenizer, score.top);
            PromptToken { token: score.token, text, bytes, logprob: Some(score.logprob), top }
        };
        ServiceEvent::Prompt { tokens: scores.into_iter().map(token).collect() }
    }
}

/// See the module's page.
#[derive(Debug)]
pub(super) struct ReplySink {
    pub pipeline: Arc<Mutex<Pipeline>>,
    pub events: UnboundedSender<ServiceEvent>,
    /// What the reply was granted, for its first event.
    pub max_tokens: usize,
    /// The prompt's tokens are told with their probabilities.
    pub prompt: Option<PromptReport>,
    pub recording: Option<SharedRecording>,
    pub made: Arc<Made>,
    pub timeout: Option<Duration>,
}

impl Sink for ReplySink {
    fn event(&mut self, event: EngineEvent) -> bool {
        let events = match event {
            EngineEvent::Started { prompt_tokens, cached_tokens } => {
                let max_tokens = self.max_tokens;
                let started = ServiceEvent::Started { prompt_tokens, cached_tokens, max_tokens };
                let first = self.prompt.as_ref().map(PromptReport::first);
                [Some(started), first].into_iter().flatten().collect()
            }
            EngineEvent::PromptScores(scores) => match &self.prompt {
                Some(report) => vec![report.more(scores)],
                None => Vec::new(),
            },
            EngineEvent::Progress { fed } => vec![ServiceEvent::Progress { fed }],
            EngineEvent::Token(sampled) => {
                let mut pipeline = self.pipeline.lock().unwrap_or_else(PoisonError::into_inner);
                self.made.tokens.fetch_add(1, Ordering::Relaxed);
                match pipeline.deliver(sampled) {
                    Ok(events) => {
                        self.made.thoughts.store(pipeline.reasoning_tokens(), Ordering::Relaxed);
                        events
                    }
                    Err(error) => {
                        let _ = self.events.send(failed(&error));
                        return false;
                    }
                }
            }
            EngineEvent::Finished { reason, usage } => self.finish(&reason, usage),
        };
        let mut listened = !self.events.is_closed();
        for event in events {
            listened = self.events.send(event).is_ok();
        }
        listened
    }
}

impl ReplySink {
    fn finish(&mut self, reason: &EngineFinish, usage: EngineUsage) -> Vec<ServiceEvent> {
        let mut pipeline = self.pipeline.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut events, kind) = match reason {
            EngineFinish::Stop(token) => match pipeline.end_by(*token) {
                Ok(events) => (events, complete(&pipeline)),
                Err(error) => return vec![failed(&error)],
            },
            EngineFinish::Guide(cause) if cause.code == code::STOP_STRING => {
                (pipeline.complete(), FinishKind::Stop { matched: None })
            }
            EngineFinish::Guide(_) => (pipeline.complete(), complete(&pipeline)),
            EngineFinish::Length | EngineFinish::ContextFull => (pipeline.cut(), FinishKind::Length),
            EngineFinish::Cancelled => return vec![ServiceEvent::Failed(RequestError::Cancelled)],
            EngineFinish::TimedOut => {
                let limit = self.timeout.unwrap_or_default();
                return vec![ServiceEvent::Failed(RequestError::TimedOut { limit })];
            }
            EngineFinish::Failed(kind) => return vec![ServiceEvent::Failed(failure(kind))],
        };
        // A stop string that the last token completed ended the reply, whatever else did.
        let reason = match pipeline.matched() {
            Some(matched) => FinishKind::Stop { matched: Some(matched.to_owned()) },
            None => kind,
        };
        if let Some(recording) = &self.recording {
            events.push(ServiceEvent::Captured { tensors: recording.tensors() });
        }
        events.push(ServiceEvent::Finished {
            reason,
            usage: ServiceUsage {
                prompt_tokens: usage.prompt_tokens,
                cached_tokens: usage.cached_tokens,
                completion_tokens: usage.answer_tokens,
                reasoning_tokens: pipeline.reasoning_tokens(),
                first_token: usage.first_token,
                total: usage.total,
            },
            unparsed_calls: pipeline.unparsed_calls(),
        });
        events
    }
}

fn complete(pipeline: &Pipeline) -> FinishKind {
    match pipeline.finished() {
        Some(Finish::ToolCalls) => FinishKind::ToolCalls,
        _ => FinishKind::Stop { matched: None },
    }
}

fn failed(error: &lapidary_text::Error) -> ServiceEvent {
    ServiceEvent::Failed(RequestError::Internal(error.to_string()))
}

fn failure(kind: &FailureKind) -> RequestError {
    match kind {
        FailureKind::NonFinite { position } => RequestError::NonFinite { position: *position },
        FailureKind::ShuttingDown => RequestError::ShuttingDown,
        FailureKind::OutOfMemory(what) => RequestError::OutOfMemory(what.clone()),
        other => RequestError::Internal(other.to_string()),
    }
}
