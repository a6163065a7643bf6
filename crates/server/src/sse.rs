//! Replies as server-sent events.
//!
//! Each API has its own [`Frames`]; what they share is here: events that are there already go out in one write, a silent
//! stream gets a comment so that proxies do not close it, and a client that leaves drops the replies and with them the
//! work.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use lapidary::service::ServiceEvent;
use serde::Serialize;
use tokio::time::Instant;

use crate::replies::Replies;

/// Turns the events of all replies into frames.
pub trait Frames: Send + 'static {
    /// What comes before any event.
    fn begin(&mut self, _out: &mut Out) {}

    /// An event of a choice. `Finished` and `Failed` come once a choice, last.
    fn event(&mut self, choice: usize, event: ServiceEvent, out: &mut Out);

    /// Whether an event was the last of the whole stream: the other choices are cancelled then.
    fn ended(&self) -> bool {
        false
    }

    /// All choices have ended.
    fn end(&mut self, out: &mut Out);

    /// Nothing happened for a while; `fed` of `prompt` tokens have run.
    fn keep_alive(&mut self, fed: usize, prompt: usize, out: &mut Out) {
        out.comment(&format!("prefill {fed} of {prompt} tokens"));
    }
}

/// Bytes of frames.
#[derive(Debug, Default)]
pub struct Out(Vec<u8>);

impl Out {
    /// A frame with data only.
    pub fn data(&mut self, value: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        serde_json::to_writer(&mut self.0, value).expect("plain data serialises");
        self.0.extend_from_slice(b"\n\n");
    }

    /// A frame with a name.
    pub fn named(&mut self, name: &str, value: &impl Serialize) {
        self.0.extend_from_slice(b"event: ");
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.data(value);
    }

    /// The end marker of OpenAI's streams.
    pub fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// A comment, which clients pass over.
    pub fn comment(&mut self, text: &str) {
        self.0.extend_from_slice(format!(": {text}\n\n").as_bytes());
    }
}

/// Answers with a stream.
pub fn respond(replies: Replies, frames: impl Frames, keep_alive: Duration) -> Response {
    let state = Stream { replies, frames, keep_alive, fed: 0, prompt: 0, phase: Phase::Begin };
    let body = Body::from_stream(futures_util::stream::unfold(state, |mut state| async move {
        let bytes = state.step().await?;
        Some((Ok::<_, Infallible>(bytes), state))
    }));
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would otherwise collect a stream before it passes it on.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

#[derive(PartialEq)]
enum Phase {
    Begin,
    Running,
    Ended,
}

struct Stream<F> {
    replies: Replies,
    frames: F,
    keep_alive: Duration,
    fed: usize,
    prompt: usize,
    phase: Phase,
}

impl<F: Frames> Stream<F> {
    /// The next write; none at the end.
    async fn step(&mut self) -> Option<Bytes> {
        let mut out = Out::default();
        if self.phase == Phase::Begin {
            self.phase = Phase::Running;
            self.frames.begin(&mut out);
        }
        // Events that write nothing, such as progress, do not put the comment off.
        let deadline = Instant::now() + self.keep_alive;
        while out.0.is_empty() {
            if self.phase == Phase::Ended {
                return None;
            }
            match tokio::time::timeout_at(deadline, self.replies.next()).await {
                Ok(Some((choice, event))) => self.take(choice, event, &mut out),
                Ok(None) => {
                    self.phase = Phase::Ended;
                    self.frames.end(&mut out);
                }
                Err(_) => self.frames.keep_alive(self.fed, self.prompt, &mut out),
            }
        }
        while self.phase == Phase::Running
            && let Some((choice, event)) = self.replies.try_next()
        {
            self.take(choice, event, &mut out);
        }
        Some(Bytes::from(out.0))
    }

    fn take(&mut self, choice: usize, event: ServiceEvent, out: &mut Out) {
        match &event {
            ServiceEvent::Started { prompt_tokens, .. } => self.prompt = *prompt_tokens,
            ServiceEvent::Progress { fed } => self.fed = *fed,
            _ => {}
        }
        self.frames.event(choice, event, out);
        if self.frames.ended() {
            self.phase = Phase::Ended;
        }
    }
}
