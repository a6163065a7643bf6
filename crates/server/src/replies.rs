//! The replies to one request as one stream of events, watched for metrics and logs.

use std::task::{Context, Poll};
use std::time::Instant;

use lapidary::service::{FinishKind, Reply, RequestError, ServiceEvent, ServiceUsage, WholeReply};

use crate::app::App;
use crate::error::ApiError;
use crate::layers::RequestId;
use crate::spans::Inference;

/// All replies to a request. Dropping it cancels what still runs.
#[derive(Debug)]
pub struct Replies {
    replies: Vec<Option<Reply>>,
    /// Which reply is asked first: in turn, so that one that is quick starves no other.
    turn: usize,
    watch: Watch,
}

impl Drop for Replies {
    fn drop(&mut self) {
        // What was made for nobody is counted as well.
        for reply in self.replies.iter().flatten() {
            let (tokens, thoughts) = reply.made();
            self.watch.usage.completion_tokens += tokens;
            self.watch.usage.reasoning_tokens += thoughts;
        }
    }
}

impl Replies {
    /// The replies, numbered by their order.
    pub fn new(replies: Vec<Reply>, mut watch: Watch) -> Self {
        watch.replies = replies.len();
        Replies { replies: replies.into_iter().map(Some).collect(), turn: 0, watch }
    }

    /// The next event and the choice that it belongs to; none when all have ended.
    pub async fn next(&mut self) -> Option<(usize, ServiceEvent)> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// An event that is already there.
    pub fn try_next(&mut self) -> Option<(usize, ServiceEvent)> {
        match self.poll_next(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(event) => event,
            Poll::Pending => None,
        }
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, ServiceEvent)>> {
        let count = self.replies.len();
        let mut open = false;
        for step in 0..count {
            let choice = (self.turn + step) % count;
            let Some(reply) = &mut self.replies[choice] else { continue };
            open = true;
            let event = match reply.poll_next(context) {
                Poll::Pending => continue,
                Poll::Ready(Some(event)) => event,
                Poll::Ready(None) => {
                    let text = "the engine ended without ending the reply".to_owned();
                    ServiceEvent::Failed(RequestError::Internal(text))
                }
            };
            if matches!(event, ServiceEvent::Finished { .. } | ServiceEvent::Failed(_)) {
                self.replies[choice] = None;
            }
            self.watch.see(&event);
            self.turn = choice + 1;
            return Poll::Ready(Some((choice, event)));
        }
        if open { Poll::Pending } else { Poll::Ready(None) }
    }

    /// Waits for all of them.
    ///
    /// # Errors
    /// What the first one that failed did so with; the others are cancelled.
    pub async fn collect(mut self) -> Result<Vec<Whole>, ApiError> {
        let mut all: Vec<Whole> = (0..self.replies.len()).map(Whole::new).collect();
        while let Some((choice, event)) = self.next().await {
            if let ServiceEvent::Started { max_tokens, .. } = event {
                all[choice].max_tokens = Some(max_tokens);
            }
            all[choice].reply.add(event)?;
        }
        Ok(all)
    }

    /// Waits for the only one.
    ///
    /// # Errors
    /// What it failed with.
    pub async fn collect_one(self) -> Result<Whole, ApiError> {
        let mut all = self.collect().await?;
        all.pop().ok_or_else(|| ApiError::internal("the engine gave no reply to the request"))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.replies.len()
    }
}

/// A reply that has ended, and its limit.
#[derive(Debug)]
pub struct Whole {
    /// The reply.
    pub reply: WholeReply,
    /// Most tokens that it could have had.
    pub max_tokens: Option<usize>,
}

impl Whole {
    fn new(index: usize) -> Self {
        Whole { reply: WholeReply::new(index), max_tokens: None }
    }

    /// Why it ended.
    pub fn reason(&self) -> &FinishKind {
        self.reply.reason.as_ref().unwrap_or(&FinishKind::Length)
    }
}

/// Follows a request from its arrival to its end, and tells metrics and logs: also when it ends because nobody listens
/// any more.
#[derive(Debug)]
pub struct Watch {
    app: App,
    id: RequestId,
    route: &'static str,
    arrived: Instant,
    spans: Inference,
    first_token: Option<f64>,
    usage: ServiceUsage,
    failed: Option<RequestError>,
    /// How many replies there are, and how many have ended.
    replies: usize,
    ended: usize,
}

impl Watch {
    /// Begins with a request's arrival.
    pub fn new(app: App, id: RequestId, route: &'static str) -> Self {
        Watch {
            spans: Inference::begin(route, app.model_name(None).unwrap_or_default()),
            app,
            id,
            route,
            arrived: Instant::now(),
            first_token: None,
            usage: ServiceUsage::default(),
            failed: None,
            replies: 0,
            ended: 0,
        }
    }

    fn see(&mut self, event: &ServiceEvent) {
        let metrics = self.app.metrics();
        match event {
            // Several choices share one prompt; it counts once.
            ServiceEvent::Started { prompt_tokens, cached_tokens, .. } if self.usage.prompt_tokens == 0 => {
                self.usage.prompt_tokens = *prompt_tokens;
                self.usage.cached_tokens = *cached_tokens;
            }
            ServiceEvent::Text { .. } | ServiceEvent::Thought { .. } | ServiceEvent::CallBegin { .. }
                if self.first_token.is_none() =>
            {
                let first = self.arrived.elapsed().as_secs_f64();
                metrics.first_token.record(first);
                self.spans.first_token();
                self.first_token = Some(first);
            }
            ServiceEvent::Finished { reason, usage, .. } => {
                self.ended += 1;
                self.usage.completion_tokens += usage.completion_tokens;
                self.usage.reasoning_tokens += usage.reasoning_tokens;
                if self.ended == 1 {
                    self.usage.prompt_tokens = usage.prompt_tokens;
                    self.usage.cached_tokens = usage.cached_tokens;
                }
                metrics.finished(finish_name(reason));
            }
            ServiceEvent::Failed(error) => {
                self.ended += 1;
                metrics.finished(match error {
                    RequestError::Cancelled => "abort",
                    RequestError::TimedOut { .. } => "timeout",
                    RequestError::NonFinite { .. } => "non_finite",
                    _ => "error",
                });
                self.failed = Some(error.clone());
            }
            _ => {}
        }
    }
}

/// The word for a reason in metrics and logs.
fn finish_name(reason: &FinishKind) -> &'static str {
    match reason {
        FinishKind::Stop { .. } => "stop",
        FinishKind::Length => "length",
        FinishKind::ToolCalls => "tool_calls",
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A refused request has no replies; its status is in the access log.
        if self.replies == 0 {
            return;
        }
        let total = self.arrived.elapsed().as_secs_f64();
        let metrics = self.app.metrics();
        let usage = &self.usage;
        metrics.request(usage, total);
        let left = self.ended < self.replies;
        for _ in self.ended..self.replies {
            metrics.finished("abort");
        }
        let outcome = match &self.failed {
            Some(error) => error.to_string(),
            None if left => "the client left".to_owned(),
            None => "done".to_owned(),
        };
        self.spans.end(usage, &outcome);
        tracing::info!(
            request_id = self.id.as_str(),
            route = self.route,
            outcome,
            choices = self.replies,
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.cached_tokens,
            completion_tokens = usage.completion_tokens,
            reasoning_tokens = usage.reasoning_tokens,
            first_token_s = self.first_token.unwrap_or(f64::NAN),
            total_s = total,
            "replied"
        );
    }
}
