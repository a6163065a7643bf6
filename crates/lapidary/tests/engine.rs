//! The engine on real devices: requests in company give the bits of each alone, and what goes wrong with one
//! touches no other.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::client::{Reply, drawn, greedy, run, submit};
use common::drive::{name, tiny_folder, tokens};
use common::spy::{Hooks, POISON, hooked_runner, poisoned};
use common::{On, Setup, runner, stepper};
use lapidary_engine::generate::{Event, FinishReason, Generation, Request};
use lapidary_engine::sampling::{Sampled, SamplingParams, TokenMask};
use lapidary_engine::{
    Allowed, Engine, EngineEvent, EngineFinish, EngineOptions, EngineRequest, EngineUsage, Error,
    FailureKind, Guide, GuideError, Prompt, Runner, Score, ScoreEvent, ScoreRequest, StopCause, Verdict,
};
use lapidary_reference::tiny::Variant;

const CONTEXT: usize = 160;
const ON: On = On::Cpu { threads: 1 };

fn setup() -> Setup {
    Setup { rows: 19, head_rows: 5, context: CONTEXT, ..Setup::default() }
}

fn options(runner: &Runner) -> EngineOptions {
    let mut options = EngineOptions::new(runner, CONTEXT, 2);
    options.scheduler.max_stall = Duration::from_millis(10);
    options.scheduler.min_prompt_rows = 2;
    options
}

fn engine(folder: &Path) -> Engine {
    start(runner(folder, ON, setup()))
}

fn start(runner: Runner) -> Engine {
    let options = options(&runner);
    Engine::start(runner, options).unwrap()
}

fn dense() -> std::path::PathBuf {
    tiny_folder(Variant::Dense)
}

fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let tokens = tokens(&stepper(&dense(), ON, setup()), seed, len);
    tokens.into_iter().map(|t| if t == POISON { POISON + 1 } else { t }).collect()
}

/// The request alone on a stepper's single sequence.
fn alone(folder: &Path, request: &EngineRequest) -> (Vec<Sampled>, FinishReason) {
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

fn finish(reason: FinishReason) -> EngineFinish {
    match reason {
        FinishReason::Stop(token) => EngineFinish::Stop(token),
        FinishReason::Length => EngineFinish::Length,
        FinishReason::ContextFull => EngineFinish::ContextFull,
    }
}

/// Every way to choose tokens, each with a prompt of another length.
fn mixed(seed: u64) -> Vec<EngineRequest> {
    let base = SamplingParams::default();
    let samplings = [
        SamplingParams::greedy(),
        SamplingParams { seed: 7, ..base.clone() },
        SamplingParams { seed: 8, top_k: 0, top_p: 1.0, ..base.clone() },
        SamplingParams { seed: 9, repetition_penalty: 1.3, frequency_penalty: 0.5, ..base.clone() },
        SamplingParams { logit_bias: vec![(5, 3.0), (9, -4.0)], ..SamplingParams::greedy() },
        SamplingParams { seed: 11, min_p: 0.2, temperature: 1.7, presence_penalty: -1.0, ..base },
    ];
    let requests = samplings.into_iter().enumerate().map(|(i, sampling)| {
        let i = i as u64;
        let mut request = greedy(&prompt(seed + i, 3 + 23 * i as usize), 30 + 17 * (5 - i as usize));
        request.sampling = sampling;
        request.priority = (i % 3) as i8 - 1;
        request.logprobs = (i % 2 == 1).then_some(i as usize);
        request.stop_ids = if i == 2 { vec![40, 41, 42, 43] } else { Vec::new() };
        request
    });
    requests.collect()
}

#[test]
fn c02_the_same_request_gives_the_same_bits_in_any_company() {
    for variant in [Variant::Dense, Variant::Moe, Variant::PerLayerInputs] {
        let folder = tiny_folder(variant);
        let engine = engine(&folder);
        let expected: Vec<_> = mixed(30).iter().map(|r| alone(&folder, r)).collect();
        for round in 0..3 {
            let mut pending: Vec<_> = mixed(30).into_iter().map(|r| submit(&engine, r)).collect();
            // Others that come, and go in the middle.
            let others: Vec<_> =
                (0..round * 3).map(|i| submit(&engine, greedy(&prompt(90 + i, 20), 50))).collect();
            for (i, other) in others.into_iter().enumerate() {
                if i % 2 == 0 {
                    other.token();
                    other.hang_up();
                }
            }
            for (i, (pending, (sampled, reason))) in pending.drain(..).zip(&expected).enumerate() {
                let reply = pending.wait();
                let what = format!("{} round {round} request {i}", name(&folder));
                assert_eq!(reply.sampled, *sampled, "{what}");
                assert_eq!(reply.reason, finish(*reason), "{what}");
                assert_eq!(reply.usage.answer_tokens, sampled.len());
                assert_eq!(reply.started, Some((reply.usage.prompt_tokens, reply.usage.cached_tokens)));
                assert_eq!(reply.fed.last(), Some(&reply.usage.prompt_tokens), "{what}");
            }
        }
        drained(&engine);
    }
}

/// Nothing is left of any request.
#[track_caller]
fn drained(engine: &Engine) {
    assert!(engine.drain(Duration::from_secs(60)), "everybody gets done");
    let stats = engine.stats();
    assert_eq!((stats.active, stats.scheduler.waiting, stats.scheduler.running), (0, 0, 0));
    for pages in stats.pages {
        assert_eq!(pages.live, 0, "{pages:?}");
    }
    assert!(matches!(engine.submit(greedy(&[5], 1)), Err(Error::ShuttingDown)));
}

#[test]
fn logprobs_are_those_of_the_model_before_masks_and_bias() {
    let engine = engine(&dense());
    let vocab = engine.config().vocab;
    let all = EngineRequest { logprobs: Some(vocab), ..greedy(&prompt(3, 12), 4) };
    let reply = run(&engine, all);
    for sampled in &reply.sampled {
        assert_eq!(sampled.top.len(), vocab);
        let total: f64 = sampled.top.iter().map(|(_, p)| f64::from(*p).exp()).sum();
        assert!((total - 1.0).abs() <= 1e-4, "{total}");
        assert_eq!(sampled.top[0], (sampled.token, sampled.logprob.unwrap()));
    }
    // A bias or a mask that changes the choice leaves the report as it was.
    let first = &reply.sampled[0];
    let second = first.top[1].0;
    let mut mask = TokenMask::none(vocab);
    mask.allow(second);
    let biased = SamplingParams { logit_bias: vec![(second, 50.0)], ..SamplingParams::greedy() };
    for (sampling, guide) in [(biased, None), (SamplingParams::greedy(), Some(Fixed::mask(mask)))] {
        let request = EngineRequest {
            sampling,
            guide: guide.map(|g| Box::new(g) as Box<dyn Guide>),
            logprobs: Some(vocab),
            ..greedy(&prompt(3, 12), 1)
        };
        let found = run(&engine, request).sampled.remove(0);
        assert_eq!((found.token, &found.top), (second, &first.top));
        assert_eq!(found.logprob, Some(first.top[1].1));
    }
}

/// Says the same of every token, and ends after some.
struct Fixed {
    mask: Option<TokenMask>,
    force: Option<u32>,
    left: usize,
    cause: StopCause,
    seen: Vec<u32>,
}

impl Fixed {
    fn free() -> Fixed {
        let cause = StopCause { keep_token: true, code: 3 };
        Fixed { mask: None, force: None, left: usize::MAX, cause, seen: Vec::new() }
    }
    fn mask(mask: TokenMask) -> Fixed {
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

#[test]
fn guides_mask_force_and_end_and_neighbours_do_not_notice() {
    let engine = engine(&dense());
    let vocab = engine.config().vocab;
    let ids = [20u32, 33, 64, 91];
    let mut mask = TokenMask::none(vocab);
    ids.iter().for_each(|&t| mask.allow(t));
    let neighbour = submit(&engine, drawn(&prompt(1, 40), 60, 5));
    let guided =
        |guide: Fixed, max| EngineRequest { guide: Some(Box::new(guide)), ..drawn(&prompt(2, 9), max, 3) };

    let reply = run(&engine, guided(Fixed::mask(mask.clone()), 40));
    assert_eq!((reply.tokens.len(), &reply.reason), (40, &EngineFinish::Length));
    assert!(reply.tokens.iter().all(|t| ids.contains(t)), "{:?}", reply.tokens);
    assert!(ids.iter().filter(|t| reply.tokens.contains(t)).count() > 1, "drawn among them");

    let reply = run(&engine, guided(Fixed { force: Some(17), ..Fixed::free() }, 5));
    assert_eq!(reply.tokens, [17; 5]);
    let forced = Fixed { force: Some(17), ..Fixed::free() };
    let reply = run(&engine, EngineRequest { logprobs: Some(1), ..guided(forced, 2) });
    assert!(reply.sampled[0].logprob.is_some_and(|p| p < 0.0) && reply.sampled[0].top.len() == 1);

    for keep_token in [true, false] {
        let cause = StopCause { keep_token, code: 9 };
        let reply = run(&engine, guided(Fixed { left: 4, cause, ..Fixed::free() }, 40));
        assert_eq!(reply.reason, EngineFinish::Guide(cause));
        assert_eq!(reply.tokens.len(), 3 + usize::from(keep_token));
        assert_eq!(reply.usage.answer_tokens, 4);
        // Also on the very last token.
        let reply = run(&engine, guided(Fixed { left: 4, cause, ..Fixed::free() }, 4));
        assert_eq!(reply.reason, EngineFinish::Guide(cause));
    }

    let reply = run(&engine, guided(Fixed { force: Some(POISON), ..Fixed::free() }, 5));
    assert!(matches!(&reply.reason, EngineFinish::Failed(FailureKind::Guide(m)) if m.contains("no 77")));
    assert!(reply.tokens.is_empty());
    let reply = run(&engine, guided(Fixed::mask(TokenMask::none(vocab)), 5));
    assert!(matches!(&reply.reason, EngineFinish::Failed(FailureKind::Guide(m)) if m.contains("no token")));
    let reply = run(&engine, guided(Fixed { force: Some(vocab as u32), ..Fixed::free() }, 5));
    assert!(matches!(&reply.reason, EngineFinish::Failed(FailureKind::Guide(m)) if m.contains("forced")));

    let reply = neighbour.wait();
    assert_eq!(reply.sampled, alone(&dense(), &drawn(&prompt(1, 40), 60, 5)).0);
    drained(&engine);
}

#[test]
fn an_answer_has_at_least_min_tokens_and_ends_by_its_own_ids() {
    let engine = engine(&dense());
    let plain = run(&engine, greedy(&prompt(4, 11), 30)).tokens;
    let (stop, at) = (plain[6], plain.iter().position(|t| *t == plain[6]).unwrap());
    let request = || EngineRequest { stop_ids: vec![stop], ..greedy(&prompt(4, 11), 30) };
    let reply = run(&engine, request());
    assert_eq!((&reply.tokens[..], &reply.reason), (&plain[..at], &EngineFinish::Stop(stop)));
    assert_eq!(reply.usage.answer_tokens, at);

    let reply = run(&engine, EngineRequest { min_tokens: at + 5, ..request() });
    assert!(reply.tokens.len() >= at + 5, "{:?}", reply.tokens);
    assert_eq!(reply.tokens[..at], plain[..at]);
    assert!(!reply.tokens.contains(&stop));

    // A grammar that allows nothing but the end goes before.
    let mut mask = TokenMask::none(engine.config().vocab);
    mask.allow(stop);
    let guide: Box<dyn Guide> = Box::new(Fixed::mask(mask));
    let reply = run(&engine, EngineRequest { min_tokens: 9, guide: Some(guide), ..request() });
    assert_eq!((reply.tokens.len(), reply.reason), (0, EngineFinish::Stop(stop)));

    // The model's own end tokens end an answer unless they are to be ignored.
    let eos = engine.config().eos[0];
    let towards = SamplingParams { logit_bias: vec![(eos, 1e4)], ..SamplingParams::greedy() };
    let request = EngineRequest { sampling: towards.clone(), ignore_eos: false, ..greedy(&prompt(4, 11), 4) };
    assert_eq!(run(&engine, request).reason, EngineFinish::Stop(eos));
    let request = EngineRequest { sampling: towards, ..greedy(&prompt(4, 11), 4) };
    assert_eq!(run(&engine, request).tokens, [eos; 4]);

    let long = prompt(5, CONTEXT - 3);
    let reply = run(&engine, greedy(&long, 30));
    assert_eq!((reply.tokens.len(), reply.reason), (4, EngineFinish::ContextFull));
    drained(&engine);
}

#[test]
fn what_cannot_be_served_is_refused_at_once() {
    let engine = engine(&dense());
    let vocab = engine.config().vocab;
    let refused = |request: EngineRequest| engine.submit(request).unwrap_err();
    let e = refused(greedy(&prompt(1, CONTEXT + 1), 5));
    assert!(matches!(e, Error::PromptTooLong { tokens: 161, context: CONTEXT }), "{e}");
    assert!(matches!(refused(greedy(&[], 5)), Error::EmptyPrompt));
    assert!(matches!(refused(greedy(&[1], 0)), Error::Zero { what: "max_tokens" }));
    assert!(matches!(refused(greedy(&[vocab as u32], 5)), Error::Token { .. }));
    let e = refused(EngineRequest { stop_ids: vec![vocab as u32], ..greedy(&[1], 5) });
    assert!(e.to_string().contains("stop_ids"), "{e}");
    let e = refused(EngineRequest { logprobs: Some(vocab + 1), ..greedy(&[1], 5) });
    assert!(e.to_string().contains("logprobs"), "{e}");
    let sampling = SamplingParams { logit_bias: vec![(u32::MAX, 1.0)], ..SamplingParams::greedy() };
    assert!(matches!(refused(EngineRequest { sampling, ..greedy(&[1], 5) }), Error::Sampling(_)));
    let penalised = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::greedy() };
    let e = refused(EngineRequest { sampling: penalised, ..greedy(&[u32::MAX], 5) });
    assert!(matches!(e, Error::Token { .. }), "{e}");
    assert_eq!(engine.stats().active, 0);
    assert_eq!(run(&engine, greedy(&[5, 6], 3)).tokens.len(), 3);
}

#[test]
fn a_full_queue_refuses_and_takes_again_when_there_is_room() {
    let runner = runner(&dense(), ON, setup());
    let mut options = options(&runner);
    (options.scheduler.waiting, options.scheduler.running) = (3, 1);
    let engine = Engine::start(runner, options).unwrap();
    let first = submit(&engine, greedy(&prompt(1, 9), 100));
    first.token();
    let queued: Vec<_> = (0..3).map(|i| submit(&engine, greedy(&prompt(2 + i, 9), 100))).collect();
    let e = engine.submit(greedy(&[5], 3)).unwrap_err();
    assert!(matches!(e, Error::QueueFull { limit: 3 }), "{e}");
    assert_eq!(engine.stats().scheduler.waiting, 3);
    first.ticket.cancel();
    assert_eq!(first.wait().reason, EngineFinish::Cancelled);
    queued[0].token();
    let last = submit(&engine, greedy(&[5], 3));
    queued.into_iter().for_each(|q| assert_eq!(q.wait().usage.answer_tokens, 100));
    assert_eq!(last.wait().tokens.len(), 3);
    drained(&engine);
}

#[test]
fn k01_a_request_ends_within_two_steps_of_its_listener_leaving() {
    let engine = engine(&dense());
    for i in 0..100 {
        // Nothing is taken ahead, so that the request cannot be done before its listener leaves.
        let (to, events) = std::sync::mpsc::sync_channel(0);
        let mut request = greedy(&prompt(i, 7 + i as usize), 100);
        request.sink = Box::new(move |event| to.send(event).is_ok());
        engine.submit(request).unwrap();
        let tokens = events.iter().filter(|e| matches!(e, EngineEvent::Token(_)));
        assert_eq!(tokens.take(3).count(), 3);
        drop(events);
        let start = Instant::now();
        while engine.stats().active > 0 {
            assert!(start.elapsed() < Duration::from_millis(500), "the slot is not free");
            std::thread::yield_now();
        }
        assert!(engine.stats().pages.iter().all(|p| p.live == 0));
    }
    drained(&engine);
    assert_eq!(engine.stats().ends.cancelled, 100);
}

#[test]
fn k02_a_ticket_cancels_its_own_request_wherever_it_stands() {
    let runner = runner(&dense(), ON, setup());
    let mut options = options(&runner);
    options.scheduler.running = 1;
    let engine = Engine::start(runner, options).unwrap();
    let a = submit(&engine, greedy(&prompt(1, 9), 90));
    a.token();
    let b = submit(&engine, greedy(&prompt(2, 9), 90));
    b.ticket.cancel();
    let reply = b.wait();
    assert_eq!((reply.reason, reply.started), (EngineFinish::Cancelled, None));
    let c = submit(&engine, greedy(&prompt(3, 9), 2));
    assert_eq!(a.wait().tokens.len(), 89, "all but the one that was seen above");
    assert_eq!(c.wait().reason, EngineFinish::Length);
    drained(&engine);
}

#[test]
fn a_request_ends_when_its_time_is_up_queued_or_running() {
    let runner = runner(&dense(), ON, setup());
    let mut options = options(&runner);
    options.scheduler.running = 1;
    // A whole context is a matter of milliseconds, so the first is held up by its sink.
    let engine = Engine::start(runner, options).unwrap();
    let mut slow = greedy(&prompt(1, 9), 100);
    slow.timeout = Some(Duration::from_millis(60));
    let (to, events) = std::sync::mpsc::channel();
    slow.sink = Box::new(move |event| {
        std::thread::sleep(Duration::from_millis(5));
        to.send(event).is_ok()
    });
    engine.submit(slow).unwrap();
    let queued = EngineRequest { timeout: Some(Duration::from_millis(20)), ..greedy(&prompt(2, 9), 5) };
    let queued = submit(&engine, queued).wait();
    assert_eq!((queued.reason, queued.started), (EngineFinish::TimedOut, None));
    let last = events.iter().last().unwrap();
    assert!(matches!(last, EngineEvent::Finished { reason: EngineFinish::TimedOut, .. }), "{last:?}");
    drained(&engine);
    assert_eq!(engine.stats().ends.timed_out, 2);
}

#[test]
fn a08_a_row_that_is_not_finite_ends_its_request_within_a_step() {
    for variant in [Variant::Dense, Variant::Moe, Variant::PerLayerInputs] {
        let folder = tiny_folder(variant);
        let engine = start(hooked_runner(&folder, ON, setup(), &poisoned()));
        let never = SamplingParams { suppress: vec![POISON], ..SamplingParams::default() };
        let clean = |seed, sampling: &SamplingParams| EngineRequest {
            sampling: sampling.clone(),
            ..greedy(&prompt(seed, 30), 50)
        };
        let neighbours = [1, 2].map(|i| submit(&engine, clean(i, &never)));
        neighbours[0].token();
        // In the prompt's last row, for a greedy request and one that is drawn; and in the midst of an answer.
        let mut bad = prompt(9, 20);
        bad[19] = POISON;
        for request in [greedy(&bad, 9), drawn(&bad, 9, 1)] {
            let reply = run(&engine, request);
            assert_eq!(reply.reason, EngineFinish::Failed(FailureKind::NonFinite { position: 19 }));
            assert!(reply.tokens.is_empty());
        }
        let towards = SamplingParams { logit_bias: vec![(POISON, 1e4)], ..SamplingParams::greedy() };
        let reply = run(&engine, EngineRequest { sampling: towards, ..greedy(&prompt(3, 20), 9) });
        assert_eq!(reply.tokens, [POISON]);
        assert_eq!(reply.reason, EngineFinish::Failed(FailureKind::NonFinite { position: 20 }));
        for (i, neighbour) in neighbours.into_iter().enumerate() {
            let expected = alone(&folder, &clean(1 + i as u64, &never)).0;
            let reply = neighbour.wait();
            let seen = expected.len() - reply.sampled.len();
            assert_eq!(seen, usize::from(i == 0), "{}", name(&folder));
            assert_eq!(reply.sampled, expected[seen..], "{}", name(&folder));
        }
        // Nothing that it left is gone on from.
        let mut long = prompt(10, 150);
        long[149] = POISON;
        for _ in 0..2 {
            let reply = run(&engine, greedy(&long, 9));
            assert_eq!(reply.reason, EngineFinish::Failed(FailureKind::NonFinite { position: 149 }));
            assert_eq!(reply.usage.cached_tokens, 0);
        }
        drained(&engine);
        assert_eq!(engine.stats().non_finite, 5);
    }
}

struct Panics;

impl Guide for Panics {
    fn next(&mut self) -> Result<Allowed<'_>, GuideError> {
        Ok(Allowed::Free)
    }
    fn accept(&mut self, _token: u32) -> Result<Verdict, GuideError> {
        panic!("a guide's bug")
    }
}

fn panicked(reply: &Reply, with: &str) -> bool {
    matches!(&reply.reason, EngineFinish::Failed(FailureKind::Panicked(m)) if m.contains(with))
}

#[test]
fn a_panic_in_a_guide_or_a_sink_ends_that_request_only() {
    let engine = engine(&dense());
    let neighbour = submit(&engine, drawn(&prompt(1, 40), 60, 5));
    for _ in 0..3 {
        let reply = run(&engine, EngineRequest { guide: Some(Box::new(Panics)), ..greedy(&prompt(2, 9), 9) });
        assert!(panicked(&reply, "a guide's bug"), "{reply:?}");
        let sink = Box::new(|event| match event {
            EngineEvent::Token(_) => panic!("a sink's bug"),
            _ => true,
        });
        engine.submit(EngineRequest { sink, ..greedy(&prompt(2, 9), 9) }).unwrap();
    }
    assert_eq!(neighbour.wait().sampled, alone(&dense(), &drawn(&prompt(1, 40), 60, 5)).0);
    drained(&engine);
    assert_eq!(engine.stats().panics, 6);
}

/// A pass with this token in it panics, or fails.
const CURSED: u32 = 79;

#[test]
fn k06_a_pass_that_fails_costs_the_request_that_it_fails_on() {
    for threads in [1, 2] {
        let on = On::Cpu { threads };
        // On the engine's own thread, and on a worker's in the midst of a pass.
        let before = Hooks::batch(|_, batch| {
            assert!(!batch.tokens.contains(&(CURSED as i32)), "cursed");
        });
        let cursed = Arc::new(AtomicUsize::new(0));
        let seen = cursed.clone();
        let mut within = Hooks::batch(move |_, batch| {
            seen.store(usize::from(batch.tokens.contains(&(CURSED as i32))), Ordering::SeqCst);
        });
        within.verb = Hooks::verb(move |_, verb, s| {
            assert!(cursed.load(Ordering::SeqCst) == 0, "cursed");
            verb.run(s);
        })
        .verb;
        for hooks in [before, within] {
            let engine = start(hooked_runner(&dense(), on, setup(), &hooks));
            let never = SamplingParams { suppress: vec![CURSED], seed: 4, ..SamplingParams::default() };
            let clean = |seed| {
                let tokens: Vec<u32> =
                    prompt(seed, 30).iter().map(|&t| if t == CURSED { 80 } else { t }).collect();
                EngineRequest { sampling: never.clone(), ..greedy(&tokens, 50) }
            };
            let neighbours = [1, 2, 3].map(|i| submit(&engine, clean(i)));
            for at in [0, 15, 29] {
                let mut tokens = clean(8).prompt.tokens;
                tokens[at] = CURSED;
                let reply = run(&engine, greedy(&tokens, 9));
                assert!(panicked(&reply, "cursed"), "{reply:?}");
            }
            for (i, neighbour) in neighbours.into_iter().enumerate() {
                let expected = alone(&dense(), &clean(1 + i as u64));
                let reply = neighbour.wait();
                assert_eq!((reply.sampled, reply.reason), (expected.0, EngineFinish::Length));
            }
            drained(&engine);
            let stats = engine.stats();
            assert!(stats.failed_passes >= 3, "{}", stats.failed_passes);
            assert_eq!(stats.ends.failed, 3);
        }
    }
}

#[test]
fn a_pass_that_fails_once_costs_nobody() {
    let count = Arc::new(AtomicUsize::new(0));
    let hooks = Hooks::batch(move |_, _| {
        assert!(count.fetch_add(1, Ordering::SeqCst) % 7 != 6, "this once");
    });
    let engine = start(hooked_runner(&dense(), ON, setup(), &hooks));
    // Alone, a request whose pass fails has nobody to share the blame with.
    let requests = [1, 2, 3, 4].map(|i| submit(&engine, drawn(&prompt(i, 30), 40, i)));
    let replies = requests.map(|r| r.wait());
    let done = replies.iter().filter(|r| r.reason == EngineFinish::Length).count();
    for (i, reply) in replies.iter().enumerate() {
        let expected = alone(&dense(), &drawn(&prompt(1 + i as u64, 30), 40, 1 + i as u64)).0;
        assert_eq!(reply.sampled, expected[..reply.sampled.len()]);
    }
    assert!(done >= 1 && engine.stats().failed_passes > 5, "{done}");
    drained(&engine);
}

#[test]
fn shutting_down_ends_every_request_once() {
    for drop_handle in [false, true] {
        let engine = engine(&dense());
        let pending: Vec<_> = (0..9).map(|i| submit(&engine, greedy(&prompt(i, 40), 100))).collect();
        pending[0].token();
        if drop_handle {
            drop(engine);
        } else {
            assert!(!engine.drain(Duration::ZERO));
            engine.shutdown();
            engine.shutdown();
            assert!(matches!(engine.submit(greedy(&[5], 1)), Err(Error::ShuttingDown)));
            assert_eq!(engine.stats().active, 0);
        }
        let ends: Vec<_> = pending.into_iter().map(|p| p.wait().reason).collect();
        let shut = EngineFinish::Failed(FailureKind::ShuttingDown);
        assert!(ends.iter().all(|e| *e == shut || *e == EngineFinish::Length), "{ends:?}");
        assert!(ends.contains(&shut));
    }
}

#[test]
fn a_sink_may_drop_the_last_handle() {
    let engine = engine(&dense());
    let (to, ended) = std::sync::mpsc::channel();
    let (dropped, other_is_dropped) = std::sync::mpsc::channel::<()>();
    let mut held = Some(engine.clone());
    let mut request = greedy(&prompt(1, 9), 20);
    request.sink = Box::new(move |event| {
        if let EngineEvent::Token(_) = event
            && let Some(last) = held.take()
        {
            other_is_dropped.recv().unwrap();
            drop(last);
        }
        if let EngineEvent::Finished { reason, .. } = event {
            to.send(reason).unwrap();
        }
        true
    });
    engine.submit(request).unwrap();
    drop(engine);
    dropped.send(()).unwrap();
    let reason = ended.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(reason, EngineFinish::Failed(FailureKind::ShuttingDown));
}

#[test]
fn prompts_with_soft_rows_are_checked_by_whoever_submits_them() {
    let engine = engine(&dense());
    let hidden = engine.config().hidden;
    let soft = lapidary_engine::SoftSpan {
        start: 2,
        values: vec![0.5; 3 * hidden - 1],
        kind: lapidary_engine::SoftKind::Audio,
    };
    let mut request = greedy(&prompt(1, 9), 3);
    request.prompt = Prompt { tokens: prompt(1, 9), soft: vec![soft] };
    assert!(matches!(engine.submit(request), Err(Error::Length { what: "soft values", .. })));
}

/// What a score request came to.
fn scores(
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

#[test]
fn scores_are_those_of_a_stepper_in_any_company_and_cost_no_row_twice() {
    for variant in [Variant::Dense, Variant::PerLayerInputs] {
        let folder = tiny_folder(variant);
        let tokens = prompt(6, 120);
        let mut expected = Vec::new();
        let mut s = stepper(&folder, ON, setup());
        let vocab = s.model().config.vocab;
        let mut logits = |position: usize, row: &[f32]| {
            if let Some(&next) = tokens.get(position + 1) {
                let logprob = lapidary_engine::sampling::logprobs(row, 0, &[next]).unwrap()[0] as f32;
                expected.push(((position + 1, next), logprob, row.to_vec()));
            }
        };
        s.score(&Prompt::from(&tokens[..]), &mut logits, &mut |_, _| {}).unwrap();
        let engine = engine(&folder);
        let neighbours = [1, 2, 3].map(|i| submit(&engine, drawn(&prompt(i, 40), 70, i)));
        for from in [1, 2, 50, 97, 119] {
            let (found, reason, usage) = scores(&engine, &tokens, from, 3);
            assert_eq!(reason, EngineFinish::Length);
            assert_eq!((found.len(), usage.answer_tokens), (120 - from, 0));
            for (score, (place, logprob, row)) in found.iter().zip(&expected[from - 1..]) {
                assert_eq!((score.position, score.token), *place);
                assert_eq!(score.logprob.to_bits(), logprob.to_bits());
                let top = lapidary_engine::sampling::top_logprobs(row, 0, 3).unwrap();
                assert_eq!(score.top, top.iter().map(|(t, p)| (*t, *p as f32)).collect::<Vec<_>>());
            }
            // What is not scored need not run again.
            assert!(from < 97 || usage.cached_tokens >= 64, "{}", usage.cached_tokens);
            assert!(usage.cached_tokens < from);
        }
        for (i, neighbour) in neighbours.into_iter().enumerate() {
            let i = i as u64 + 1;
            assert_eq!(neighbour.wait().sampled, alone(&folder, &drawn(&prompt(i, 40), 70, i)).0);
        }
        // Nothing to score is an end, and what cannot be is refused.
        assert_eq!(scores(&engine, &tokens, 120, 0).0, []);
        let refused = |prompt: Prompt, from, top| {
            let sink = Box::new(|_| true);
            engine
                .score(ScoreRequest { prompt, from, top, steering: None, priority: 0, timeout: None, sink })
                .unwrap_err()
        };
        assert!(matches!(refused(Prompt::from(&tokens[..]), 0, 0), Error::Zero { what: "score_from" }));
        assert!(matches!(refused(Prompt::from(&tokens[..]), 1, vocab + 1), Error::Sampling(_)));
        assert!(matches!(refused(Prompt::default(), 1, 0), Error::EmptyPrompt));
        drained(&engine);
    }
}

/// Features of requests and engines, each of which must not change what another does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Feature {
    FewPages,
    Warm,
    HalfKv,
    Mask,
    Penalties,
    Logprobs,
    Choices,
    Leaving,
    MinTokens,
    Priorities,
    Soft,
    Scores,
}

const FEATURES: [Feature; 12] = [
    Feature::FewPages,
    Feature::Warm,
    Feature::HalfKv,
    Feature::Mask,
    Feature::Penalties,
    Feature::Logprobs,
    Feature::Choices,
    Feature::Leaving,
    Feature::MinTokens,
    Feature::Priorities,
    Feature::Soft,
    Feature::Scores,
];

/// Four requests with the features `on`.
fn featured(on: &[Feature], vocab: usize, hidden: usize) -> Vec<EngineRequest> {
    let has = |f| on.contains(&f);
    (0..4u64)
        .map(|i| {
            let seed = if has(Feature::Choices) { 20 } else { 20 + i };
            let mut request = drawn(&prompt(seed, 70 + 9 * (seed as usize - 20)), 60, i);
            if has(Feature::Penalties) {
                request.sampling.repetition_penalty = 1.4;
                request.sampling.frequency_penalty = 0.7;
            }
            if has(Feature::Mask) {
                let mut mask = TokenMask::none(vocab);
                (0..vocab as u32).filter(|t| t % 3 != 0).for_each(|t| mask.allow(t));
                request.guide = Some(Box::new(Fixed::mask(mask)));
            }
            request.logprobs = has(Feature::Logprobs).then_some(3);
            if has(Feature::MinTokens) {
                request.stop_ids = (5..60).collect();
                request.min_tokens = 17;
            }
            if has(Feature::Priorities) {
                request.priority = i as i8 - 2;
            }
            if has(Feature::Soft) {
                let values = common::drive::values(7, 12 * hidden);
                let kind = lapidary_engine::SoftKind::Vision;
                request.prompt.soft.push(lapidary_engine::SoftSpan { start: 25, values, kind });
            }
            request
        })
        .collect()
}

fn featured_engine(on: &[Feature], alone: bool) -> Engine {
    let kv =
        if on.contains(&Feature::HalfKv) { lapidary_ops::KvFormat::F16 } else { lapidary_ops::KvFormat::F32 };
    let runner = runner(&dense(), ON, Setup { kv, ..setup() });
    let mut options = options(&runner);
    if alone {
        options.prefix = lapidary_engine::PrefixOptions::off();
    } else if on.contains(&Feature::FewPages) {
        options.pages = Some([12, 9]);
    }
    Engine::start(runner, options).unwrap()
}

#[test]
fn every_pair_of_features_gives_what_each_request_gives_alone() {
    let mut preempted = 0;
    for (i, a) in FEATURES.into_iter().enumerate() {
        for b in FEATURES.into_iter().skip(i + 1) {
            let on = [a, b];
            let has = |f| on.contains(&f);
            let (lonely, engine) = (featured_engine(&on, true), featured_engine(&on, false));
            let (vocab, hidden) = (engine.config().vocab, engine.config().hidden);
            let expected: Vec<Reply> =
                featured(&on, vocab, hidden).into_iter().map(|request| run(&lonely, request)).collect();
            if has(Feature::Warm) {
                // The first comes last, so that what it left is there when it comes again.
                let warming = featured(&on, vocab, hidden).into_iter().rev();
                warming.for_each(|request| drop(run(&engine, request)));
            }
            let pending: Vec<_> =
                featured(&on, vocab, hidden).into_iter().map(|request| submit(&engine, request)).collect();
            if has(Feature::Leaving) {
                for i in 0..3 {
                    let other = submit(&engine, greedy(&prompt(20 + i, 60), 50));
                    other.token();
                    if i == 1 { other.ticket.cancel() } else { other.hang_up() }
                }
            }
            if has(Feature::Scores) {
                let tokens = prompt(20, 70);
                let (found, reason, _) = scores(&engine, &tokens, 30, 1);
                let (alone, _, _) = scores(&lonely, &tokens, 30, 1);
                assert_eq!((found, reason), (alone, EngineFinish::Length), "{on:?}");
            }
            for (i, (pending, expected)) in pending.into_iter().zip(expected).enumerate() {
                let reply = pending.wait();
                assert_eq!(reply.sampled, expected.sampled, "{on:?} request {i}");
                assert_eq!(reply.reason, expected.reason, "{on:?} request {i}");
            }
            drained(&engine);
            let stats = engine.stats().scheduler;
            preempted += stats.preemptions;
            // Few pages hold one of the four requests at a time.
            let warm = has(Feature::Warm) && !has(Feature::FewPages);
            assert!(!warm || stats.prefix.hits > 0, "{on:?}: {:?}", stats.prefix);
        }
    }
    assert!(preempted > 5, "{preempted} pre-emptions");
}
