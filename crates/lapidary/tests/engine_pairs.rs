//! All pairs of features of an engine and its requests: none changes what another does.

mod common;

use common::client::{Reply, drawn, greedy, run, submit};
use common::dense::{Fixed, ON, dense, drained, options, prompt, scores, setup};
use common::{Setup, runner};
use lapidary_engine::sampling::TokenMask;
use lapidary_engine::{Engine, EngineFinish, EngineRequest, Observer, PromptScores};
use lapidary_ops::{Batch, Outcome, SteerEdit, SteerMode, SteerSet, TapPoint};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
    Steering,
    Observed,
    PromptScores,
}

const FEATURES: [Feature; 15] = [
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
    Feature::Steering,
    Feature::Observed,
    Feature::PromptScores,
];

/// Counts the rows that it is given.
struct Counts(Arc<AtomicUsize>);

impl Observer for Counts {
    fn points(&self, _: Range<usize>) -> Vec<TapPoint> {
        vec![TapPoint::LayerOut(1)]
    }
    fn first(&self) -> usize {
        0
    }
    fn take(&mut self, _: &Batch, rows: Range<usize>, _: Range<usize>, _: &Outcome) {
        self.0.fetch_add(rows.len(), Ordering::SeqCst);
    }
}

/// Four requests with the features `on`.
fn featured(on: &[Feature], vocab: usize, hidden: usize, observed: &Arc<AtomicUsize>) -> Vec<EngineRequest> {
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
            if has(Feature::Steering) && i > 0 {
                // Two that are steered alike, one otherwise, one not at all.
                let direction = common::drive::values(i / 2, hidden);
                let edit = SteerEdit::new(1, SteerMode::Add, 1.5, &direction).unwrap();
                request.steering = Some(Arc::new(SteerSet { edits: vec![edit] }));
            }
            if has(Feature::Observed) {
                request.observer = Some(Box::new(Counts(observed.clone())));
            }
            if has(Feature::PromptScores) {
                request.prompt_scores = Some(PromptScores { from: 1, top: 1 });
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
            let observed = Arc::new(AtomicUsize::new(0));
            let expected: Vec<Reply> = featured(&on, vocab, hidden, &observed)
                .into_iter()
                .map(|request| run(&lonely, request))
                .collect();
            if has(Feature::Warm) {
                // The first comes last, so that what it left is there when it comes again.
                let warming = featured(&on, vocab, hidden, &observed).into_iter().rev();
                warming.for_each(|request| drop(run(&engine, request)));
            }
            let pending: Vec<_> = featured(&on, vocab, hidden, &observed)
                .into_iter()
                .map(|request| submit(&engine, request))
                .collect();
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
                assert_eq!(reply.scores, expected.scores, "{on:?} request {i}");
            }
            drained(&engine);
            assert_eq!(engine.stats().steering_sets, 0, "{on:?}");
            assert_eq!(observed.load(Ordering::SeqCst) > 0, has(Feature::Observed), "{on:?}");
            let stats = engine.stats().scheduler;
            preempted += stats.preemptions;
            // Few pages hold one of the four requests at a time, and rows that are looked at run in any case.
            let run_all = has(Feature::FewPages) || has(Feature::Observed) || has(Feature::PromptScores);
            let warm = has(Feature::Warm) && !run_all;
            assert!(!warm || stats.prefix.hits > 0, "{on:?}: {:?}", stats.prefix);
        }
    }
    assert!(preempted > 5, "{preempted} pre-emptions");
}
