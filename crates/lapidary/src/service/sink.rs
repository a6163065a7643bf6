//! The engine's events become the reply's, on the engine's thread.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lapidary_engine::{EngineEvent, EngineFinish, EngineUsage, FailureKind, Sink};
use lapidary_text::Finish;
use tokio::sync::mpsc::UnboundedSender;

use super::error::RequestError;
use super::event::{FinishKind, ServiceEvent, ServiceUsage};
use super::guide::code;
use super::pipeline::Pipeline;

/// See the module's page.
#[derive(Debug)]
pub(super) struct ReplySink {
    pub pipeline: Arc<Mutex<Pipeline>>,
    pub events: UnboundedSender<ServiceEvent>,
    /// What the reply was granted, for its first event.
    pub max_tokens: usize,
    pub timeout: Option<Duration>,
}

impl Sink for ReplySink {
    fn event(&mut self, event: EngineEvent) -> bool {
        let events = match event {
            EngineEvent::Started { prompt_tokens, cached_tokens } => {
                vec![ServiceEvent::Started { prompt_tokens, cached_tokens, max_tokens: self.max_tokens }]
            }
            EngineEvent::Progress { fed } => vec![ServiceEvent::Progress { fed }],
            EngineEvent::Token(sampled) => {
                let mut pipeline = self.pipeline.lock().unwrap_or_else(PoisonError::into_inner);
                match pipeline.deliver(sampled) {
                    Ok(events) => events,
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
        other => RequestError::Internal(other.to_string()),
    }
}
