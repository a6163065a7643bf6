//! Requests to an engine and what came of them.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use lapidary_engine::sampling::{Sampled, SamplingParams};
use lapidary_engine::{Engine, EngineEvent, EngineFinish, EngineRequest, EngineUsage, Prompt, Score, Ticket};

/// How long a test waits for an event before it calls the engine stuck.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a request gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    pub tokens: Vec<u32>,
    pub sampled: Vec<Sampled>,
    pub started: Option<(usize, usize)>,
    pub fed: Vec<usize>,
    pub scores: Vec<Score>,
    pub reason: EngineFinish,
    pub usage: EngineUsage,
}

/// A request under way.
#[derive(Debug)]
pub struct Pending {
    pub ticket: Ticket,
    events: Receiver<EngineEvent>,
}

/// A greedy request for `max_tokens` tokens that no token ends.
pub fn greedy(prompt: &[u32], max_tokens: usize) -> EngineRequest {
    let mut request = EngineRequest::new(Prompt::from(prompt), Box::new(|_| true));
    request.max_tokens = max_tokens;
    request.ignore_eos = true;
    request
}

/// The same, drawn with `seed`.
pub fn drawn(prompt: &[u32], max_tokens: usize, seed: u64) -> EngineRequest {
    EngineRequest {
        sampling: SamplingParams { seed, ..SamplingParams::default() },
        ..greedy(prompt, max_tokens)
    }
}

/// Submits a request with a sink of its own.
#[track_caller]
pub fn submit(engine: &Engine, mut request: EngineRequest) -> Pending {
    let (to, events) = channel();
    request.sink = Box::new(move |event| to.send(event).is_ok());
    Pending { ticket: engine.submit(request).expect("the request is taken"), events }
}

/// Submits a request and waits for its end.
#[track_caller]
pub fn run(engine: &Engine, request: EngineRequest) -> Reply {
    submit(engine, request).wait()
}

impl Pending {
    /// The next event.
    #[track_caller]
    pub fn event(&self) -> EngineEvent {
        self.events.recv_timeout(PATIENCE).expect("an event comes")
    }

    /// Waits until a token came, and gives it.
    #[track_caller]
    pub fn token(&self) -> u32 {
        loop {
            match self.event() {
                EngineEvent::Token(sampled) => return sampled.token,
                EngineEvent::Finished { reason, .. } => panic!("ended by {reason:?}"),
                _ => {}
            }
        }
    }

    /// Nobody listens from here on.
    pub fn hang_up(self) {}

    /// Everything up to the end; checks the order of events.
    #[track_caller]
    pub fn wait(self) -> Reply {
        let mut sampled = Vec::new();
        let (mut started, mut fed, mut scores) = (None, Vec::new(), Vec::new());
        loop {
            match self.event() {
                EngineEvent::Started { prompt_tokens, cached_tokens } => {
                    assert!(started.replace((prompt_tokens, cached_tokens)).is_none(), "one start");
                    assert!(fed.is_empty() && sampled.is_empty(), "the start comes first");
                }
                EngineEvent::Progress { fed: rows } => {
                    assert!(fed.last().is_none_or(|last| *last < rows), "progress grows");
                    fed.push(rows);
                }
                EngineEvent::PromptScores(more) => {
                    assert!(sampled.is_empty(), "the prompt's come before the answer's");
                    scores.extend(more);
                }
                EngineEvent::Token(token) => sampled.push(token),
                EngineEvent::Finished { reason, usage } => {
                    assert!(self.events.recv_timeout(PATIENCE).is_err(), "nothing comes after the end");
                    let tokens = sampled.iter().map(|s| s.token).collect();
                    return Reply { tokens, sampled, started, fed, scores, reason, usage };
                }
            }
        }
    }
}
