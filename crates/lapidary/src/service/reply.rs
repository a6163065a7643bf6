//! The receiving end of a reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::sync::mpsc::UnboundedReceiver;

use super::{FinishKind, PromptToken, RequestError, ServiceEvent, ServiceUsage, TokenLogprob};
use crate::capture::Captured;
use lapidary_text::ToolCall;

/// A reply as it is made. Dropping it cancels it.
#[derive(Debug)]
pub struct Reply {
    index: usize,
    events: UnboundedReceiver<ServiceEvent>,
    made: Arc<Made>,
    _cancel: CancelOnDrop,
}

/// Tokens of a reply so far, for whoever leaves before its end.
#[derive(Debug, Default)]
pub(super) struct Made {
    pub tokens: AtomicUsize,
    pub thoughts: AtomicUsize,
}

impl Reply {
    pub(super) fn new(
        index: usize,
        events: UnboundedReceiver<ServiceEvent>,
        made: Arc<Made>,
        cancel: Box<dyn FnOnce() + Send + Sync>,
    ) -> Self {
        Reply { index, events, made, _cancel: CancelOnDrop(Some(cancel)) }
    }

    /// A reply whose events come from elsewhere than an engine: what tests of a face are made of.
    pub fn scripted(
        index: usize,
        events: UnboundedReceiver<ServiceEvent>,
        cancel: impl FnOnce() + Send + Sync + 'static,
    ) -> Self {
        Reply::new(index, events, Arc::default(), Box::new(cancel))
    }

    /// Which of the request's replies this is, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Tokens that were made so far, and those of them inside thoughts.
    pub fn made(&self) -> (usize, usize) {
        let read = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        (read(&self.made.tokens), read(&self.made.thoughts))
    }

    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<ServiceEvent> {
        self.events.recv().await
    }

    /// As [`next`](Self::next), for streams made by hand.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<ServiceEvent>> {
        self.events.poll_recv(context)
    }

    /// As [`next`](Self::next), for threads. Must not be called from within an asynchronous task.
    pub fn next_blocking(&mut self) -> Option<ServiceEvent> {
        self.events.blocking_recv()
    }

    /// The next event if one is there.
    pub fn try_next(&mut self) -> Option<ServiceEvent> {
        self.events.try_recv().ok()
    }

    /// Waits for the end and gives the whole.
    ///
    /// # Errors
    /// What the reply failed with.
    pub async fn collect(mut self) -> Result<WholeReply, RequestError> {
        let mut whole = WholeReply::new(self.index);
        while let Some(event) = self.next().await {
            whole.add(event)?;
        }
        whole.ended()
    }

    /// As [`collect`](Self::collect), for threads.
    ///
    /// # Errors
    /// What the reply failed with.
    pub fn collect_blocking(mut self) -> Result<WholeReply, RequestError> {
        let mut whole = WholeReply::new(self.index);
        while let Some(event) = self.next_blocking() {
            whole.add(event)?;
        }
        whole.ended()
    }
}

struct CancelOnDrop(Option<Box<dyn FnOnce() + Send + Sync>>);

impl std::fmt::Debug for CancelOnDrop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CancelOnDrop")
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel();
        }
    }
}

/// A reply that has ended: its deltas put together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WholeReply {
    /// Which of the request's replies this is.
    pub index: usize,
    /// The prompt's tokens, where their probabilities were asked for.
    pub prompt: Vec<PromptToken>,
    /// The answer.
    pub text: String,
    /// The answer's tokens, when logprobs were asked for.
    pub tokens: Vec<TokenLogprob>,
    /// The thoughts.
    pub thought: String,
    /// The calls with their ids, in order.
    pub calls: Vec<(String, ToolCall)>,
    /// Calls that did not parse and stand in the text.
    pub unparsed_calls: usize,
    /// Activations that were asked for.
    pub captured: Vec<Captured>,
    /// Why it ended; `None` until it has.
    pub reason: Option<FinishKind>,
    /// Counts and times.
    pub usage: ServiceUsage,
}

impl WholeReply {
    /// Nothing yet.
    pub fn new(index: usize) -> Self {
        WholeReply { index, ..WholeReply::default() }
    }

    /// Adds an event.
    ///
    /// # Errors
    /// The error of a `Failed` event.
    pub fn add(&mut self, event: ServiceEvent) -> Result<(), RequestError> {
        match event {
            ServiceEvent::Started { .. } | ServiceEvent::Progress { .. } => {}
            ServiceEvent::Prompt { tokens } => self.prompt.extend(tokens),
            ServiceEvent::Captured { tensors } => self.captured = tensors,
            ServiceEvent::Text { delta, tokens } => {
                self.text += &delta;
                self.tokens.extend(tokens);
            }
            ServiceEvent::Thought { delta, .. } => self.thought += &delta,
            ServiceEvent::CallBegin { id, name, .. } => {
                self.calls.push((id, ToolCall { name, arguments: String::new() }));
            }
            ServiceEvent::CallArguments { index, delta } => {
                if let Some((_, call)) = self.calls.get_mut(index) {
                    call.arguments += &delta;
                }
            }
            ServiceEvent::Finished { reason, usage, unparsed_calls } => {
                self.reason = Some(reason);
                self.usage = usage;
                self.unparsed_calls = unparsed_calls;
            }
            ServiceEvent::Failed(error) => return Err(error),
        }
        Ok(())
    }

    fn ended(self) -> Result<WholeReply, RequestError> {
        match self.reason {
            Some(_) => Ok(self),
            None => Err(RequestError::Internal("the engine ended without ending the reply".to_owned())),
        }
    }
}
