//! A device that runs out of memory in one place or another: it costs the request that it happens to, and nothing
//! afterwards.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::client::{Reply, greedy, run, submit};
use common::drive::{tiny_folder, tokens, values};
use common::spy::{Hooks, hooked_runner};
use common::{On, Setup, stepper};
use lapidary_engine::{Engine, EngineFinish, EngineOptions, EngineRequest, FailureKind};
use lapidary_ops::{Batch, SteerEdit, SteerMode, SteerSet};
use lapidary_reference::tiny::Variant;

const CONTEXT: usize = 160;
const ON: On = On::Cpu { threads: 1 };
/// A prompt with this token finds no memory.
const HUNGRY: u32 = 88;

fn setup() -> Setup {
    Setup { rows: 19, head_rows: 5, context: CONTEXT, ..Setup::default() }
}

fn start(hooks: &Hooks) -> Engine {
    let runner = hooked_runner(&tiny_folder(Variant::Dense), ON, setup(), hooks);
    let options = EngineOptions::new(&runner, CONTEXT, 2);
    Engine::start(runner, options).unwrap()
}

fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let tokens = tokens(&stepper(&tiny_folder(Variant::Dense), ON, setup()), seed, len);
    tokens.into_iter().map(|t| if t == HUNGRY { HUNGRY + 1 } else { t }).collect()
}

/// With logprobs, so that logits are read.
fn asked(seed: u64) -> EngineRequest {
    let request = greedy(&prompt(seed, 30), 12);
    EngineRequest { logprobs: Some(1), ..request }
}

#[track_caller]
fn out_of_memory(reply: &Reply) {
    let EngineFinish::Failed(FailureKind::OutOfMemory(text)) = &reply.reason else { panic!("{reply:?}") };
    assert!(text.contains("needs 7 bytes"), "{text}");
}

#[track_caller]
fn nothing_left(engine: &Engine) {
    assert!(engine.drain(Duration::from_secs(60)));
    let stats = engine.stats();
    assert!(stats.pages.iter().all(|p| p.live == 0), "{:?}", stats.pages);
    assert_eq!(stats.steering_sets, 0);
}

/// The n-th allocation fails, in the prompt's rows (two batches) and in the answer's, and then those that follow once.
#[test]
fn k06_an_allocation_that_fails_costs_one_request_and_the_next_is_served() {
    let expected = run(&start(&Hooks::default()), asked(1)).sampled;
    for (place, twice) in [("upload", false), ("run", false), ("lend", true)] {
        for n in [1, 2, 3, 7] {
            let calls = Arc::new(AtomicUsize::new(0));
            let hooks = Hooks::starved(move |what, _| {
                let call = if what == place { calls.fetch_add(1, Ordering::SeqCst) + 1 } else { 0 };
                call == n || twice && call == n + 1
            });
            let engine = start(&hooks);
            let reply = run(&engine, asked(1));
            out_of_memory(&reply);
            assert!(expected.starts_with(&reply.sampled), "{place} {n}");
            assert_eq!(run(&engine, asked(1)).sampled, expected, "{place} {n}: the next one");
            nothing_left(&engine);
        }
    }
}

/// Logits of all rows at once do not fit, those of each request do: nobody ends.
#[test]
fn logits_that_do_not_fit_at_once_are_read_one_by_one() {
    let starved = |what: &str, batch: &Batch| what == "lend" && batch.spans.len() > 1;
    let alone: Vec<_> = (1..4).map(|seed| run(&start(&Hooks::default()), asked(seed)).sampled).collect();
    let at_once = Arc::new(AtomicUsize::new(0));
    let seen = at_once.clone();
    // Only the first try in a batch.
    let hooks = Hooks::starved(move |what, batch| {
        starved(what, batch) && seen.fetch_add(1, Ordering::SeqCst).is_multiple_of(batch.heads.len() + 1)
    });
    let engine = start(&hooks);
    let pending: Vec<_> = (1..4).map(|seed| submit(&engine, asked(seed))).collect();
    for (pending, expected) in pending.into_iter().zip(alone) {
        assert_eq!(pending.wait().sampled, expected);
    }
    assert!(at_once.load(Ordering::SeqCst) > 0);
    nothing_left(&engine);
}

#[test]
fn k06_neighbours_of_a_request_without_memory_are_what_they_are_alone() {
    let alone: Vec<_> = (1..4).map(|seed| run(&start(&Hooks::default()), asked(seed)).sampled).collect();
    for place in ["upload", "run"] {
        let hooks =
            Hooks::starved(move |what, batch| what == place && batch.tokens.contains(&(HUNGRY as i32)));
        let engine = start(&hooks);
        let neighbours: Vec<_> = (1..4).map(|seed| submit(&engine, asked(seed))).collect();
        for at in [0, 25] {
            let mut request = asked(9);
            request.prompt.tokens[at] = HUNGRY;
            out_of_memory(&run(&engine, request));
        }
        for (neighbour, expected) in neighbours.into_iter().zip(&alone) {
            // Whoever chooses that token itself ends too.
            let reply = neighbour.wait();
            let hungry = reply.sampled.iter().any(|s| s.token == HUNGRY);
            assert!(hungry || reply.sampled == *expected, "{place}");
        }
        nothing_left(&engine);
    }
}

#[test]
fn k06_a_steering_set_without_memory_costs_its_request() {
    let sets = Arc::new(AtomicUsize::new(0));
    let hooks = Hooks::starved(move |what, _| what == "steer" && sets.fetch_add(1, Ordering::SeqCst) == 0);
    let engine = start(&hooks);
    let edit = SteerEdit::new(0, SteerMode::Add, 1.0, &values(3, engine.config().hidden)).unwrap();
    let steered =
        || EngineRequest { steering: Some(Arc::new(SteerSet { edits: vec![edit.clone()] })), ..asked(2) };
    let neighbour = submit(&engine, asked(1));
    let reply = run(&engine, steered());
    out_of_memory(&reply);
    assert!(reply.sampled.is_empty(), "nothing is said unsteered");
    assert_eq!(run(&engine, steered()).reason, EngineFinish::Length);
    assert_eq!(neighbour.wait().sampled, run(&start(&Hooks::default()), asked(1)).sampled);
    nothing_left(&engine);
}
