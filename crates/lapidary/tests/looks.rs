//! Steering and captures of an engine's requests: in company, beside kept prefixes, through pre-emptions. What a
//! stepper gives for a request alone is the judge.

mod common;

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::client::{Reply, drawn, greedy, run, submit};
use common::drive::{Random, every_folder, name, tiny_folder, values};
use common::spy::{Hooks, hooked, hooked_runner};
use common::{On, Setup};
use lapidary_engine::generate::{Event, Generation, Request};
use lapidary_engine::sampling::Sampled;
use lapidary_engine::{
    Engine, EngineFinish, EngineOptions, EngineRequest, Error, FailureKind, Observer, PromptScores,
};
use lapidary_ops::{Batch, Outcome, PAGE_TOKENS, SteerEdit, SteerError, SteerMode, SteerSet, TapPoint};
use lapidary_reference::tiny::Variant;

const ON: On = On::Cpu { threads: 2 };
const CONTEXT: usize = 400;
const ROWS: usize = 37;

fn setup() -> Setup {
    Setup { rows: ROWS, head_rows: 5, context: CONTEXT, ..Setup::default() }
}

/// A window of more than a page, which the tiny models' own is not.
fn wide() -> Hooks {
    Hooks::config(|config| config.window = 45)
}

fn engine(folder: &Path, change: impl FnOnce(&mut EngineOptions)) -> Engine {
    let runner = hooked_runner(folder, ON, setup(), &wide());
    let mut options = EngineOptions::new(&runner, CONTEXT, 3);
    options.scheduler.max_stall = Duration::from_millis(10);
    options.scheduler.min_prompt_rows = 3;
    change(&mut options);
    Engine::start(runner, options).unwrap()
}

fn ids(seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| 3 + (random.next() % 170) as u32).collect()
}

/// Edits that change what is said, different ones for each seed.
fn steering(engine: &Engine, seed: u64) -> Arc<SteerSet> {
    let (layers, width) = (engine.config().layers.len(), engine.config().hidden);
    let edit = |layer: usize, mode, strength: f32, i: u64| {
        SteerEdit::new(layer, mode, strength, &values(100 * seed + i, width)).unwrap()
    };
    let mut edits = vec![edit(0, SteerMode::Add, 2.0, 1), edit(layers - 1, SteerMode::Ablate, 1.0, 2)];
    edits[1].gate = seed.is_multiple_of(2).then_some(0.0);
    Arc::new(SteerSet { edits })
}

fn asked(prompt: &[u32], max_tokens: usize, set: Option<&Arc<SteerSet>>) -> EngineRequest {
    EngineRequest { logprobs: Some(2), steering: set.cloned(), ..greedy(prompt, max_tokens) }
}

/// What the stepper gives for a request alone, and the chosen activations of every row that it ran.
fn alone(folder: &Path, request: &EngineRequest, points: &[TapPoint]) -> (Vec<Sampled>, Seen) {
    let mut s = hooked(folder, ON, setup(), &wide());
    s.set_steering(request.steering.as_deref()).unwrap();
    s.set_capture(points);
    let mut sampling = request.sampling.clone();
    sampling.logprobs = request.logprobs.map(|n| n as u32);
    let (prompt, max_tokens) = (request.prompt.clone(), request.max_tokens);
    let mut g =
        Generation::new(&mut s, Request { prompt, sampling, max_tokens, stop_ids: Vec::new() }).unwrap();
    let (mut sampled, mut seen) = (Vec::new(), Seen::default());
    loop {
        let event = g.step_watched(&mut |_| {}, &mut |chunk| {
            let rows = 0..chunk.positions.len();
            seen.add(points, chunk.batch, rows, chunk.positions.clone(), chunk.outcome);
        });
        match event.unwrap().unwrap() {
            Event::Token(token) => sampled.push(token),
            Event::Finished(_) => {
                // The last token is run only here, so that a sequence can go on.
                seen.0.retain(|(_, position, _)| *position + 1 < request.prompt.tokens.len() + sampled.len());
                return (sampled, seen);
            }
        }
    }
}

/// Rows of activations by point: position and the values' bits.
#[derive(Clone, Debug, Default, PartialEq)]
struct Seen(Vec<(TapPoint, usize, Vec<u32>)>);

impl Seen {
    fn add(
        &mut self,
        points: &[TapPoint],
        batch: &Batch,
        rows: Range<usize>,
        positions: Range<usize>,
        outcome: &Outcome,
    ) {
        for tap in outcome.taps.iter().filter(|tap| points.contains(&tap.point)) {
            for (row, values) in tap.values.chunks_exact(tap.width).enumerate() {
                let at = batch.row_of(tap, row);
                if rows.contains(&at) {
                    let bits = values.iter().map(|v| v.to_bits()).collect();
                    self.0.push((tap.point, positions.start + at - rows.start, bits));
                }
            }
        }
    }

    /// Of positions from `from` on, in order.
    fn sorted(&self, from: usize) -> Vec<(String, usize, Vec<u32>)> {
        let mut all: Vec<_> = self.0.iter().filter(|(_, p, _)| *p >= from).cloned().collect();
        all.sort_by_key(|(point, position, _)| (format!("{point:?}"), *position));
        all.into_iter().map(|(point, position, bits)| (format!("{point:?}"), position, bits)).collect()
    }
}

/// The same rows with the same bits; a failure names the first that differs.
#[track_caller]
fn assert_same(found: &Seen, expected: &Seen, from: usize, what: &str) {
    let (found, expected) = (found.sorted(from), expected.sorted(from));
    let places = |seen: &[(String, usize, Vec<u32>)]| -> Vec<(String, usize)> {
        seen.iter().map(|(point, position, _)| (point.clone(), *position)).collect()
    };
    assert_eq!(places(&found), places(&expected), "{what}");
    let differs = found.iter().zip(&expected).find(|(a, b)| a != b);
    assert!(differs.is_none(), "{what}: {:?}", differs.map(|(a, _)| (&a.0, a.1)));
}

/// Wants some points of every position from `first` on.
struct Looker {
    points: Vec<TapPoint>,
    first: usize,
    seen: Arc<Mutex<Seen>>,
}

impl Observer for Looker {
    fn points(&self, positions: Range<usize>) -> Vec<TapPoint> {
        if positions.end > self.first { self.points.clone() } else { Vec::new() }
    }

    fn first(&self) -> usize {
        self.first
    }

    fn take(&mut self, batch: &Batch, rows: Range<usize>, positions: Range<usize>, outcome: &Outcome) {
        self.seen.lock().unwrap().add(&self.points, batch, rows, positions, outcome);
    }
}

fn looking(request: EngineRequest, points: &[TapPoint], first: usize) -> (EngineRequest, Arc<Mutex<Seen>>) {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let looker = Looker { points: points.to_vec(), first, seen: seen.clone() };
    (EngineRequest { observer: Some(Box::new(looker)), ..request }, seen)
}

#[track_caller]
fn drained(engine: &Engine) {
    assert!(engine.drain(Duration::from_secs(120)), "everybody gets done");
    let stats = engine.stats();
    assert!(stats.pages.iter().all(|p| p.live == 0), "{:?}", stats.pages);
    assert_eq!(stats.steering_sets, 0, "every set was given back");
}

#[test]
fn requests_with_different_steering_in_one_batch_are_what_each_is_alone() {
    for folder in every_folder() {
        let engine = engine(&folder, |_| {});
        let (a, b) = (steering(&engine, 1), steering(&engine, 2));
        let prompt = ids(5, 50);
        let requests = || {
            [None, Some(&a), Some(&b), Some(&a), None].map(|set| asked(&prompt, 25, set)).into_iter().chain([
                EngineRequest { steering: Some(b.clone()), ..drawn(&ids(6, 31), 20, 3) },
                EngineRequest { steering: Some(Arc::default()), ..asked(&prompt, 25, None) },
            ])
        };
        let pending: Vec<_> = requests().map(|request| submit(&engine, request)).collect();
        let replies: Vec<Reply> = pending.into_iter().map(|p| p.wait()).collect();
        for (i, (reply, request)) in replies.iter().zip(requests()).enumerate() {
            assert_eq!(reply.sampled, alone(&folder, &request, &[]).0, "{} request {i}", name(&folder));
        }
        let tokens = |i: usize| &replies[i].tokens;
        assert!(
            tokens(0) != tokens(1) && tokens(1) != tokens(2),
            "{}: steering does something",
            name(&folder)
        );
        assert_eq!(tokens(0), tokens(6), "a set without edits is none");
        drained(&engine);
    }
}

#[test]
fn kept_beginnings_are_shared_among_requests_that_are_steered_alike_and_no_others() {
    for variant in [Variant::Dense, Variant::PerLayerInputs, Variant::Gemma3] {
        let folder = tiny_folder(variant);
        let engine = engine(&folder, |_| {});
        let (a, b) = (steering(&engine, 1), steering(&engine, 2));
        let prompt = ids(7, 200);
        let check = |set: Option<&Arc<SteerSet>>, kept: bool| {
            let reply = run(&engine, asked(&prompt, 30, set));
            let what = format!("{} kept {kept}", name(&folder));
            assert_eq!(reply.sampled, alone(&folder, &asked(&prompt, 30, set), &[]).0, "{what}");
            let cached = reply.usage.cached_tokens;
            assert_eq!(cached, if kept { 200 / PAGE_TOKENS * PAGE_TOKENS } else { 0 }, "{what}");
        };
        check(None, false);
        check(Some(&a), false);
        check(Some(&b), false);
        // The same edits, though not the same object.
        check(Some(&Arc::new((*a).clone())), true);
        check(None, true);
        check(Some(&b), true);
        drained(&engine);
    }
}

#[test]
fn captures_are_those_of_a_request_alone_beside_kept_prefixes_neighbours_and_steering() {
    for variant in [Variant::Moe, Variant::PerLayerInputs, Variant::Gemma3] {
        let folder = tiny_folder(variant);
        let engine = engine(&folder, |_| {});
        let last = engine.config().layers.len() - 1;
        let points =
            [TapPoint::LayerOut(0), TapPoint::Mlp(1), TapPoint::Attn(last), TapPoint::LayerOut(last)];
        let set = steering(&engine, 3);
        let prompt = ids(8, 170);
        for steered in [None, Some(&set)] {
            // So that a beginning is kept, which a capture of all positions must not go on from.
            let plain = run(&engine, asked(&prompt, 20, steered));
            for first in [0, 40, 169, 175] {
                let neighbours = [1, 2].map(|i| submit(&engine, drawn(&ids(i, 60), 40, i)));
                let (request, seen) = looking(asked(&prompt, 20, steered), &points, first);
                let reply = run(&engine, request);
                let (sampled, expected) = alone(&folder, &asked(&prompt, 20, steered), &points);
                let what = format!("{} from {first} steered {}", name(&folder), steered.is_some());
                assert_eq!(reply.sampled, sampled, "{what}");
                assert_eq!(reply.sampled, plain.sampled, "{what}: looking changes no bit");
                assert_same(&seen.lock().unwrap(), &expected, first, &what);
                assert!(reply.usage.cached_tokens <= first, "{what}: {}", reply.usage.cached_tokens);
                // A snapshot stands at the end of the prompt, and none has to stand before.
                let kept = 170 / PAGE_TOKENS * PAGE_TOKENS;
                assert!(first < kept || reply.usage.cached_tokens == kept, "{what}");
                neighbours.into_iter().for_each(|n| drop(n.wait()));
            }
        }
        drained(&engine);
    }
}

#[test]
fn steering_and_captures_outlive_a_pre_emption_and_each_row_is_taken_once() {
    let folder = tiny_folder(Variant::Dense);
    let engine = engine(&folder, |o| {
        o.scheduler.context = 140;
        o.scheduler.running = 12;
        o.pages = Some([12, 12]);
    });
    let last = engine.config().layers.len() - 1;
    let points = [TapPoint::LayerOut(last)];
    let sets = [1, 2].map(|seed| steering(&engine, seed));
    let requests = || (0..12).map(|i| asked(&ids(i, 30 + 2 * i as usize), 60, sets.get(i as usize % 3)));
    let pending: Vec<_> = requests()
        .map(|request| {
            let (request, seen) = looking(request, &points, 0);
            (submit(&engine, request), seen)
        })
        .collect();
    for (i, ((pending, seen), request)) in pending.into_iter().zip(requests()).enumerate() {
        let reply = pending.wait();
        let (sampled, expected) = alone(&folder, &request, &points);
        assert_eq!(reply.sampled, sampled, "request {i}");
        assert_same(&seen.lock().unwrap(), &expected, 0, &format!("request {i}"));
    }
    assert!(engine.stats().scheduler.preemptions > 0, "the pool was meant to be too small");
    drained(&engine);
}

#[test]
fn steering_that_does_not_fit_is_refused_and_an_observer_that_panics_ends_its_request_alone() {
    let folder = tiny_folder(Variant::Dense);
    let engine = engine(&folder, |_| {});
    let (layers, width) = (engine.config().layers.len(), engine.config().hidden);
    let refused = |layer: usize, width: usize| {
        let edit = SteerEdit::new(layer, SteerMode::Add, 1.0, &vec![1.0; width]).unwrap();
        let set = Arc::new(SteerSet { edits: vec![edit] });
        engine.submit(asked(&ids(1, 9), 3, Some(&set))).unwrap_err()
    };
    assert!(matches!(refused(layers, width), Error::Steering(SteerError::Layer { .. })));
    assert!(matches!(refused(0, width - 1), Error::Steering(SteerError::Width { .. })));

    struct Panics;
    impl Observer for Panics {
        fn points(&self, _: Range<usize>) -> Vec<TapPoint> {
            vec![TapPoint::LayerOut(0)]
        }
        fn first(&self) -> usize {
            0
        }
        fn take(&mut self, _: &Batch, _: Range<usize>, _: Range<usize>, _: &Outcome) {
            panic!("meant to be");
        }
    }
    let other = submit(&engine, asked(&ids(2, 40), 30, Some(&steering(&engine, 1))));
    let reply =
        run(&engine, EngineRequest { observer: Some(Box::new(Panics)), ..asked(&ids(3, 9), 9, None) });
    assert_eq!(reply.reason, EngineFinish::Failed(FailureKind::Panicked("meant to be".into())));
    let request = asked(&ids(2, 40), 30, Some(&steering(&engine, 1)));
    assert_eq!(other.wait().sampled, alone(&folder, &request, &[]).0);
    drained(&engine);
}

#[test]
fn a_prompt_is_scored_beside_its_answer() {
    for variant in [Variant::Dense, Variant::PerLayerInputs] {
        let folder = tiny_folder(variant);
        let engine = engine(&folder, |_| {});
        let set = steering(&engine, 1);
        let prompt = ids(9, 120);
        for steered in [None, Some(&set)] {
            let plain = run(&engine, asked(&prompt, 12, steered));
            for (max_tokens, answer) in [(12, &plain.sampled[..]), (0, &[])] {
                let prompt_scores = Some(PromptScores { from: 1, top: 3 });
                let request = EngineRequest { prompt_scores, ..asked(&prompt, max_tokens, steered) };
                let reply = run(&engine, request);
                assert_eq!(reply.sampled, answer, "{} {max_tokens}", name(&folder));
                assert_eq!((reply.scores.len(), reply.usage.cached_tokens), (119, 0));
                let mut s = hooked(&folder, ON, setup(), &wide());
                s.set_steering(steered.map(|set| &**set)).unwrap();
                let mut at = 0;
                let mut compare = |position: usize, row: &[f32]| {
                    let Some(&next) = prompt.get(position + 1) else { return };
                    let score = &reply.scores[at];
                    at += 1;
                    assert_eq!((score.position, score.token, score.top.len()), (position + 1, next, 3));
                    let logprob = lapidary_engine::sampling::logprobs(row, 0, &[next]).unwrap()[0] as f32;
                    assert_eq!(score.logprob.to_bits(), logprob.to_bits());
                };
                s.score(&lapidary_engine::Prompt::from(&prompt[..]), &mut compare, &mut |_, _| {}).unwrap();
                assert_eq!(at, 119);
            }
        }
        drained(&engine);
    }
}
