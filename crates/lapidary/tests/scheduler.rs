//! Requests that share batches and pages on real devices give the tokens that each gives alone on a stepper.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use common::drive::{Random, golden_soft, name, tiny_folder, tokens, values};
use common::{On, Setup, runner, stepper};
use lapidary_engine::generate::FinishReason;
use lapidary_engine::scheduler::{
    EndReason, Produced, RequestId, Scheduler, SchedulerEvent, SchedulerOptions, SchedulerStats, Submission,
};
use lapidary_engine::{Prompt, Runner, SoftKind, SoftSpan};
use lapidary_ops::{Batch, GROUPS, Group, KvFormat, TailRows};
use lapidary_reference::Golden;
use lapidary_reference::tiny::Variant;

const CONTEXT: usize = 160;

fn setup() -> Setup {
    Setup { rows: 19, head_rows: 5, context: CONTEXT, ..Setup::default() }
}

/// A sequence of the whole context has 5 full pages and, with a window of 7, 2 sliding ones; page 0 is nobody's.
const PAGES: [usize; GROUPS] = [12, 10];
const FEWER_PAGES: [usize; GROUPS] = [12, 8];

/// What a request gave.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    end: Option<EndReason>,
}

/// The request alone, greedily, on a stepper's single sequence.
fn alone(folder: &Path, on: On, setup: Setup, request: &Submission) -> Answer {
    let mut s = stepper(folder, on, setup);
    let mut answer = Answer::default();
    let mut token = s.prefill_prompt(&request.prompt).unwrap();
    loop {
        answer.tokens.push(token);
        if answer.tokens.len() == request.max_tokens {
            answer.end = Some(EndReason::Done(FinishReason::Length));
            return answer;
        }
        if s.cursor() == s.context() {
            answer.end = Some(EndReason::Done(FinishReason::ContextFull));
            return answer;
        }
        token = s.decode_step(token, s.cursor()).unwrap();
    }
}

/// All requests over one runner: request `i` comes after `joins[i]` steps, and is taken back at its end or when
/// it has `leaves[i]` tokens.
fn together(
    mut runner: Runner,
    pages: [usize; GROUPS],
    options: SchedulerOptions,
    requests: &[Submission],
    joins: &[u64],
    leaves: &[usize],
) -> (Vec<Answer>, SchedulerStats) {
    runner.resize(pages).unwrap();
    let config = runner.model().config.clone();
    let layers = config.layers.len();
    let mut scheduler = Scheduler::new(config, runner.plan(), options).unwrap();
    let mut answers = vec![Answer::default(); requests.len()];
    let mut ids: BTreeMap<RequestId, usize> = BTreeMap::new();
    let mut batch = Batch::default();
    let mut now = Duration::ZERO;
    let mut steps = 0;
    while ids.len() < requests.len() || !scheduler.is_idle() {
        for (i, request) in requests.iter().enumerate().filter(|(i, _)| joins[*i] == steps) {
            ids.insert(scheduler.submit(request.clone(), now).unwrap(), i);
        }
        steps += 1;
        let Some(plan) = scheduler.next(now, &mut batch) else { continue };
        let shape = batch.shape(layers, TailRows::Heads);
        let outcome = runner.run(&batch, &shape).unwrap();
        let produced = outcome.argmax.iter().map(|&t| match u32::try_from(t) {
            Ok(token) => Produced::Token(token),
            Err(_) => Produced::Failed,
        });
        // Time only decides how many rows prompts get; the requests must not notice.
        now += Duration::from_millis(3 + steps % 7);
        for event in scheduler.apply(&plan, &produced.collect::<Vec<_>>(), now).unwrap() {
            match event {
                SchedulerEvent::Token { id, token } => {
                    let i = ids[&id];
                    answers[i].tokens.push(token);
                    if answers[i].tokens.len() == leaves[i] {
                        scheduler.cancel(id).expect("it had not ended");
                        answers[i].end = Some(EndReason::Cancelled);
                    }
                }
                SchedulerEvent::Finished { id, reason } => {
                    assert_eq!(answers[ids[&id]].end.replace(reason), None, "one end each");
                }
            }
        }
        scheduler.check().unwrap();
    }
    for group in Group::ALL {
        assert_eq!(scheduler.pool().available(group), pages[group.index()] - 1, "no page is lost");
    }
    (answers, scheduler.stats())
}

/// Lengths of prompts and answers.
const SIZES: [(usize, usize); 6] = [(3, 120), (97, 60), (40, 90), (1, 150), (129, 70), (33, 110)];
const NEVER: usize = usize::MAX;

fn options() -> SchedulerOptions {
    SchedulerOptions {
        rows: setup().rows,
        head_rows: setup().head_rows,
        context: CONTEXT,
        running: 6,
        max_stall: Duration::from_millis(10),
        min_prompt_rows: 2,
        ..SchedulerOptions::default()
    }
}

fn requests(folder: &Path, on: On) -> Vec<Submission> {
    let s = stepper(folder, on, setup());
    let mut requests: Vec<Submission> = SIZES
        .iter()
        .enumerate()
        .map(|(i, &(len, max_tokens))| {
            let prompt = Prompt::from(&tokens(&s, 40 + i as u64, len)[..]);
            Submission { prompt, max_tokens, ..Submission::default() }
        })
        .collect();
    // A block of vision rows and one of audio rows, somewhere inside prompts.
    let hidden = s.model().config.hidden;
    let mut soft = |i: usize, start: usize, rows: usize, kind: SoftKind| {
        let values = values(start as u64, rows * hidden);
        requests[i].prompt.soft.push(SoftSpan { start, values, kind });
    };
    soft(1, 29, 17, SoftKind::Vision);
    soft(2, 5, 11, SoftKind::Audio);
    requests
}

fn check(folder: &Path, on: On, setup: Setup) {
    let requests = requests(folder, on);
    let expected: Vec<Answer> = requests.iter().map(|r| alone(folder, on, setup, r)).collect();
    let mut preemptions = 0;
    for pages in [PAGES, FEWER_PAGES] {
        let runner = runner(folder, on, setup);
        let joins = [0, 2, 3, 11, 12, 40];
        let (found, stats) = together(runner, pages, options(), &requests, &joins, &[NEVER; 6]);
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found, expected, "{} {on:?} {:?} request {i}", name(folder), setup.kv);
        }
        preemptions += stats.preemptions;
    }
    assert!(preemptions >= 2, "{}: the pools were meant to be too small", name(folder));
}

#[test]
fn c01_requests_that_join_and_leave_give_the_tokens_of_each_alone() {
    for variant in [Variant::Dense, Variant::Moe, Variant::PerLayerInputs, Variant::Unified, Variant::Gemma3]
    {
        check(&tiny_folder(variant), On::Cpu { threads: 1 }, setup());
    }
    // Workers of a busy machine wait for one another: once is enough.
    check(&tiny_folder(Variant::Dense), On::Cpu { threads: 2 }, setup());
    check(&tiny_folder(Variant::Dense), On::Reference, setup());
}

#[test]
fn b03_a_full_pool_mixes_no_data_in_any_kv_format() {
    // Blocks of 32 values need heads of such a width, which the tiny models lack.
    for kv in [KvFormat::F16, KvFormat::Bf16] {
        check(&tiny_folder(Variant::Dense), On::Cpu { threads: 1 }, Setup { kv, ..setup() });
    }
}

#[test]
fn cancelled_neighbours_and_priorities_change_no_token() {
    let folder = tiny_folder(Variant::PerLayerInputs);
    let on = On::Cpu { threads: 1 };
    let mut requests = requests(&folder, on);
    let mut random = Random::new(3);
    for request in &mut requests {
        request.priority = (random.next() % 3) as i8 - 1;
    }
    let leaves = [NEVER, 7, NEVER, 1, 23, NEVER];
    let (found, _) =
        together(runner(&folder, on, setup()), PAGES, options(), &requests, &[0, 0, 0, 9, 1, 3], &leaves);
    for (i, (found, request)) in found.iter().zip(&requests).enumerate() {
        let expected = alone(&folder, on, setup(), request);
        match leaves[i] {
            NEVER => assert_eq!(*found, expected, "request {i}"),
            most => {
                assert_eq!(found.tokens, expected.tokens[..most], "request {i}");
                assert_eq!(found.end, Some(EndReason::Cancelled));
            }
        }
    }
}

#[test]
fn vision_blocks_of_the_golden_models_are_the_same_in_company() {
    for variant in ["moe26b", "unified12b", "e2b"] {
        let folder = Golden::root().join(variant);
        let golden = Golden::open(&folder).expect("golden opens");
        let on = On::Cpu { threads: 1 };
        let setup = Setup { rows: 33, ..setup() };
        let s = stepper(&folder, on, setup);
        let request = |prompt| Submission { prompt, max_tokens: 12, ..Submission::default() };
        let requests: Vec<Submission> = (0..6)
            .map(|i| match i % 2 {
                0 => request(golden_soft(&golden)),
                _ => request(Prompt::from(&tokens(&s, i, 20 + 7 * i as usize)[..])),
            })
            .collect();
        let options = SchedulerOptions { rows: setup.rows, ..options() };
        let (found, _) =
            together(runner(&folder, on, setup), PAGES, options, &requests, &[0, 1, 2, 3, 4, 5], &[NEVER; 6]);
        for (i, (found, request)) in found.iter().zip(&requests).enumerate() {
            assert_eq!(*found, alone(&folder, on, setup, request), "{variant} request {i}");
        }
    }
}
