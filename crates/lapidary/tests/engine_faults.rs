//! What goes wrong with one request of an engine touches no other: logits that are not finite, panics, passes that fail.

mod common;

use common::On;
use common::client::{Reply, drawn, greedy, run, submit};
use common::dense::{ON, alone, dense, drained, engine, prompt, setup, start};
use common::drive::{name, tiny_folder};
use common::spy::{Hooks, POISON, hooked_runner, poisoned};
use lapidary_engine::sampling::SamplingParams;
use lapidary_engine::{
    Allowed, EngineEvent, EngineFinish, EngineRequest, FailureKind, Guide, GuideError, Verdict,
};
use lapidary_reference::tiny::Variant;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
