//! A model that says what a test wrote for it, and requests to a server in this process.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use lapidary::ChatInput;
use lapidary::service::{
    Bos, ChatRequest, CompletionRequest, FinishKind, Markers, Reply, RequestError, ServiceEvent,
    ServiceStats, ServiceUsage, TokenLogprob, TopLogprob,
};
use lapidary_server::{App, Model, ServerOptions, router};
use serde_json::Value;
use tower::ServiceExt;

/// What a request gets.
#[derive(Clone)]
pub enum Plan {
    /// These events, a list a choice; one list serves all choices.
    Say(Vec<Vec<ServiceEvent>>),
    /// A refusal.
    Refuse(RequestError),
    /// A token every so often, without an end.
    Endless(Duration),
    /// A prompt that is read for ever, a step every so often.
    Feeding(Duration),
    /// A panic.
    Panic,
}

/// The model.
#[derive(Default)]
pub struct Scripted {
    plans: Mutex<VecDeque<Plan>>,
    /// Requests as they arrived.
    pub chats: Mutex<Vec<ChatRequest>>,
    /// Requests as they arrived.
    pub completions: Mutex<Vec<CompletionRequest>>,
    /// Replies that were dropped before their end, or after it.
    pub dropped: Arc<AtomicUsize>,
    /// Replies in the making.
    pub live: Arc<AtomicUsize>,
}

impl Scripted {
    /// A model with these answers, in order.
    pub fn new(plans: impl IntoIterator<Item = Plan>) -> Arc<Scripted> {
        Arc::new(Scripted { plans: Mutex::new(plans.into_iter().collect()), ..Scripted::default() })
    }

    fn answer(&self, n: usize) -> Result<Vec<Reply>, RequestError> {
        let plan = self.plans.lock().unwrap().pop_front().expect("the test planned this request");
        let lists = match plan {
            Plan::Refuse(error) => return Err(error),
            Plan::Panic => panic!("planned"),
            Plan::Endless(every) => {
                return Ok((0..n).map(|i| self.endless(i, every, |_| text("x"))).collect());
            }
            Plan::Feeding(every) => {
                let progress = |fed| ServiceEvent::Progress { fed };
                return Ok((0..n).map(|i| self.endless(i, every, progress)).collect());
            }
            Plan::Say(lists) => lists,
        };
        let reply = |index: usize| {
            let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
            for event in &lists[index % lists.len()] {
                sender.send(event.clone()).expect("the receiver is here");
            }
            let dropped = self.dropped.clone();
            Reply::scripted(index, receiver, move || {
                dropped.fetch_add(1, Ordering::SeqCst);
            })
        };
        Ok((0..n).map(reply).collect())
    }

    fn endless(&self, index: usize, every: Duration, event: fn(usize) -> ServiceEvent) -> Reply {
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        let (dropped, live) = (self.dropped.clone(), self.live.clone());
        live.fetch_add(1, Ordering::SeqCst);
        std::thread::spawn(move || {
            sender.send(started(7, 0)).ok();
            let mut step = 0;
            while sender.send(event(step)).is_ok() {
                step += 1;
                std::thread::sleep(every);
            }
            live.fetch_sub(1, Ordering::SeqCst);
        });
        Reply::scripted(index, receiver, move || {
            dropped.fetch_add(1, Ordering::SeqCst);
        })
    }
}

impl Model for Scripted {
    fn chat(&self, request: ChatRequest) -> Result<Vec<Reply>, RequestError> {
        let n = request.generation.n;
        self.chats.lock().unwrap().push(request);
        self.answer(n)
    }

    fn complete(&self, request: CompletionRequest) -> Result<Vec<Reply>, RequestError> {
        let n = request.generation.n;
        self.completions.lock().unwrap().push(request);
        self.answer(n)
    }

    fn tokenize(&self, text: &str, _: Bos, _: Markers) -> Result<Vec<u32>, RequestError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn detokenize(&self, ids: &[i64]) -> Result<String, RequestError> {
        let char = |id: &i64| {
            u8::try_from(*id).map(char::from).map_err(|_| RequestError::bad("tokens", "no such id"))
        };
        ids.iter().map(char).collect()
    }

    fn apply_template(&self, input: &ChatInput) -> Result<(String, Vec<u32>), RequestError> {
        let text: String = input.messages.iter().filter_map(|m| m["content"].as_str()).collect();
        let ids = text.bytes().map(u32::from).collect();
        Ok((text, ids))
    }

    fn context(&self) -> usize {
        512
    }

    fn stats(&self) -> ServiceStats {
        let mut stats = ServiceStats::default();
        stats.running = self.live.load(Ordering::SeqCst);
        stats
    }

    fn drain(&self, limit: Duration) {
        let end = std::time::Instant::now() + limit;
        while self.live.load(Ordering::SeqCst) > 0 && std::time::Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub fn started(prompt_tokens: usize, cached_tokens: usize) -> ServiceEvent {
    ServiceEvent::Started { prompt_tokens, cached_tokens, max_tokens: 100 }
}

pub fn text(delta: &str) -> ServiceEvent {
    ServiceEvent::Text { delta: delta.to_owned(), tokens: Vec::new() }
}

pub fn thought(delta: &str) -> ServiceEvent {
    ServiceEvent::Thought { delta: delta.to_owned(), tokens: Vec::new() }
}

/// A piece of text that is one token, with the likeliest two.
pub fn token(delta: &str, id: u32, logprob: f32) -> ServiceEvent {
    let top = |text: &str, token, logprob| TopLogprob {
        token,
        text: text.to_owned(),
        bytes: text.as_bytes().to_vec(),
        logprob,
    };
    let token = TokenLogprob {
        token: id,
        text: delta.to_owned(),
        bytes: delta.as_bytes().to_vec(),
        logprob,
        top: vec![top(delta, id, logprob), top("~", 9, -8.5)],
    };
    ServiceEvent::Text { delta: delta.to_owned(), tokens: vec![token] }
}

pub fn call_begin(index: usize, name: &str) -> ServiceEvent {
    ServiceEvent::CallBegin { index, id: format!("call_{index}"), name: name.to_owned() }
}

pub fn call_arguments(index: usize, delta: &str) -> ServiceEvent {
    ServiceEvent::CallArguments { index, delta: delta.to_owned() }
}

pub fn finished(reason: FinishKind, completion_tokens: usize, reasoning_tokens: usize) -> ServiceEvent {
    let usage = ServiceUsage {
        prompt_tokens: 7,
        cached_tokens: 3,
        completion_tokens,
        reasoning_tokens,
        first_token: None,
        total: Duration::ZERO,
    };
    ServiceEvent::Finished { reason, usage, unparsed_calls: 0 }
}

pub fn stop() -> FinishKind {
    FinishKind::Stop { matched: None }
}

/// A response with its body.
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("headers are text"))
    }
}

/// A server in this process.
pub struct Server {
    pub model: Arc<Scripted>,
    pub app: App,
}

impl Server {
    pub fn new(plans: impl IntoIterator<Item = Plan>) -> Server {
        Server::with(
            ServerOptions { names: vec!["m".into(), "org/m".into()], ..ServerOptions::default() },
            plans,
        )
    }

    pub fn with(options: ServerOptions, plans: impl IntoIterator<Item = Plan>) -> Server {
        let model = Scripted::new(plans);
        let app = App::new(options);
        app.serve(model.clone());
        Server { model, app }
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = router(self.app.clone()).oneshot(request).await.expect("a router answers always");
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.expect("a body in memory").to_bytes();
        let body = String::from_utf8(bytes.to_vec()).expect("replies are text");
        Answer { status: parts.status, headers: parts.headers, body }
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, &body.to_string()).await
    }

    pub async fn post_text(&self, path: &str, body: &str) -> Answer {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(request.body(Body::from(body.to_owned())).expect("a plain request")).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).expect("a plain request")).await
    }
}

/// Runs a test's asynchronous part.
pub fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("threads can be had").block_on(test)
}

/// The data of each frame of a stream.
pub fn frames(body: &str) -> Vec<String> {
    body.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
}

/// The data of each frame but the end marker, parsed.
pub fn chunks(body: &str) -> Vec<Value> {
    let parse = |frame: &String| serde_json::from_str(frame).unwrap_or_else(|e| panic!("{e}: {frame}"));
    frames(body).iter().filter(|frame| *frame != "[DONE]").map(parse).collect()
}

/// Holds a text against the stored one, after replacing what differs from run to run. With
/// `LAPIDARY_UPDATE_SNAPSHOTS` set it stores the text instead.
#[track_caller]
pub fn snapshot(name: &str, text: &str) {
    let text = steady(text);
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(name);
    if std::env::var_os("LAPIDARY_UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, &text).expect("the folder is there");
        return;
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, stored, "{} differs; look at it, then set LAPIDARY_UPDATE_SNAPSHOTS=1", path.display());
}

/// Replaces ids and times.
fn steady(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    // `"id":"chatcmpl-...24 digits"` and `"created":1234`
    while let Some(at) = rest.find(|c: char| c.is_ascii_hexdigit()) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let run = rest.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(rest.len());
        let (digits, after) = rest.split_at(run);
        let time = out.ends_with("\"created\":")
            || out.ends_with("\"created_at\":")
            || out.ends_with("\"completed_at\":");
        out.push_str(match digits.len() {
            24 => "ID",
            _ if time => "TIME",
            _ => digits,
        });
        rest = after;
    }
    out.push_str(rest);
    out
}
