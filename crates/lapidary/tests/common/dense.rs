//! The dense tiny model behind an engine: what the tests of the engine's parts share.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::client::greedy;
use super::drive::{tiny_folder, tokens};
use super::spy::POISON;
use super::{On, Setup, runner, stepper};
use lapidary_engine::generate::{Event, FinishReason, Generation, Request};
use lapidary_engine::sampling::{Sampled, TokenMask};
use lapidary_engine::{
    Allowed, Engine, EngineFinish, EngineOptions, EngineRequest, EngineUsage, Error, Guide, GuideError,
    Prompt, Runner, Score, ScoreEvent, ScoreRequest, StopCause, Verdict,
};
use lapidary_reference::tiny::Variant;

pub const CONTEXT: usize = 160;
pub const ON: On = On::Cpu { threads: 1 };

pub fn setup() -> Setup {
    Setup { rows: 19, head_rows: 5, context: CONTEXT, ..Setup::default() }
}

pub fn options(runner: &Runner) -> EngineOptions {
    let mut options = EngineOptions::new(runner, CONTEXT, 2);
    options.scheduler.max_stall = Duration::from_millis(10);
    options.scheduler.min_prompt_rows = 2;
    options
}

pub fn engine(folder: &Path) -> Engine {
    start(runner(folder, ON, setup()))
}

pub fn start(runner: Runner) -> Engine {
    let options = options(&runner);
    Engine::start(runner, options).unwrap()
}

pub fn dense() -> PathBuf {
    tiny_folder(Variant::Dense)
}

pub fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let tokens = tokens(&stepper(&dense(), ON, setup()), seed, len);
    tokens.into_iter().map(|t| if t == POISON { POISON + 1 } else { t }).collect()
}

/// The request alone on a stepper's single sequence.
pub fn alone(folder: &Path, request: &EngineRequest) -> (Vec<Sampled>, FinishReason) {
    let mut s = stepper(folder, ON, setup());
    let mut sampling = request.sampling.clone();
    sampling.logprobs = request.logprobs.map(|n| n as u32);
    let mut g = Generation::new(
        &mut s,
        Request {
            prompt: request.prompt.clone(),
            sampling,
            max_tokens: request.max_tokens,
            stop_ids: request.stop_ids.clone(),
        },
    )
    .unwrap();
    let mut sampled = Vec::new();
    loop {
        match g.step(&mut |_| {}).unwrap().unwrap() {
            Event::Token(token) => sampled.push(token),
            Event::Finished(reason) => return (sampled, reason),
        }
    }
}

pub fn finish(reason: FinishReason) -> EngineFinish {
    match reason {
        FinishReason::Stop(token) => EngineFinish::Stop(token),
        FinishReason::Length => EngineFinish::Length,
        FinishReason::ContextFull => EngineFinish::ContextFull,
    }
}

/// Nothing is left of any request.
#[track_caller]
pub fn drained(engine: &Engine) {
    assert!(engine.drain(Duration::from_secs(60)), "everybody gets done");
    let stats = engine.stats();
    assert_eq!((stats.active, stats.scheduler.waiting, stats.scheduler.running), (0, 0, 0));
    for pages in stats.pages {
        assert_eq!(pages.live, 0, "{pages:?}");
    }
    assert!(matches!(engine.submit(greedy(&[5], 1)), Err(Error::ShuttingDown)));
}

/// What a score request came to.
pub fn scores(
    engine: &Engine,
    tokens: &[u32],
    from: usize,
    top: usize,
) -> (Vec<Score>, EngineFinish, EngineUsage) {
    let (to, events) = std::sync::mpsc::channel();
    let sink = Box::new(move |event| to.send(event).is_ok());
    let prompt = Prompt::from(tokens);
    engine
        .score(ScoreRequest { prompt, from, top, steering: None, priority: 0, timeout: None, sink })
        .unwrap();
    let mut all = Vec::new();
    loop {
        match events.recv_timeout(Duration::from_secs(60)).expect("an event comes") {
            ScoreEvent::Scores(scores) => all.extend(scores),
            ScoreEvent::Finished { reason, usage } => return (all, reason, usage),
        }
    }
}

/// Says the same of every token, and ends after some.
pub struct Fixed {
    pub mask: Option<TokenMask>,
    pub force: Option<u32>,
    pub left: usize,
    pub cause: StopCause,
    pub seen: Vec<u32>,
}

impl Fixed {
    pub fn free() -> Fixed {
        let cause = StopCause { keep_token: true, code: 3 };
        Fixed { mask: None, force: None, left: usize::MAX, cause, seen: Vec::new() }
    }
    pub fn mask(mask: TokenMask) -> Fixed {
        Fixed { mask: Some(mask), ..Fixed::free() }
    }
}

impl Guide for Fixed {
    fn next(&mut self) -> Result<Allowed<'_>, GuideError> {
        Ok(match (&self.mask, self.force) {
            (_, Some(token)) => Allowed::Force(token),
            (Some(mask), None) => Allowed::Mask(mask),
            (None, None) => Allowed::Free,
        })
    }
    fn accept(&mut self, token: u32) -> Result<Verdict, GuideError> {
        self.seen.push(token);
        self.left -= 1;
        match self.left {
            0 => Ok(Verdict::Stop(self.cause)),
            _ if token == POISON => Err(GuideError(format!("no {token}, after {:?}", self.seen))),
            _ => Ok(Verdict::Continue),
        }
    }
}
