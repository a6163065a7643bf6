//! The scheduler's promises one by one, on a device in fake time.

mod common;

use std::time::Duration;

use common::drive::{Drive, pages_for};
use common::{HIDDEN, Random, config, kv_plan, lasting, text};
use lapidary_engine::scheduler::{
    EndReason, Produced, RequestId, Scheduler, SchedulerEvent, SchedulerOptions, Submission,
};
use lapidary_engine::{Error, Prompt, SoftKind, SoftSpan};
use lapidary_model::VisionBlocks;
use lapidary_ops::{Batch, Group};

fn options() -> SchedulerOptions {
    SchedulerOptions { rows: 61, head_rows: 17, context: 400, running: 16, ..SchedulerOptions::default() }
}

#[test]
fn c01_mixed_lengths_that_join_and_leave_equal_each_alone() {
    let options = SchedulerOptions { rows: 257, context: 3100, ..options() };
    let window = 512;
    // Room for two of the longest: some of the eight lose their pages on the way.
    let mut d = Drive::new(options, window, pages_for(&options, window, 2));
    let mut random = Random::new(1);
    let lengths = [3, 3000, 41, 512, 513, 1100, 32, 2047];
    let mut requests = Vec::new();
    for (i, len) in lengths.into_iter().enumerate() {
        let request = text(&mut random, len, 20 + 13 * i);
        requests.push((d.submit(&request), request));
        (0..3 * i).for_each(|_| drop(d.step()));
    }
    d.drain();
    requests.iter().for_each(|(id, request)| d.assert_alone(*id, request));
}

#[test]
fn c02_an_answer_does_not_depend_on_company_history_or_order() {
    let options = SchedulerOptions { running: 64, ..options() };
    let window = 37;
    let mut random = Random::new(2);
    let request = lasting(&mut random, 71, 45, window, options.context);
    // Sliding pages for all, full ones for two whole contexts.
    let mut d = Drive::new(options, window, [330, 27]);
    for others in [0, 1, 3, 7, 15, 63] {
        for repeat in 0..5 {
            let at = (others * repeat / 4).min(others);
            let mut id = None;
            for i in 0..=others {
                let (len, most) = (1 + random.below(90), 1 + random.below(150));
                match i == at {
                    true => id = Some(d.submit(&request)),
                    false => drop(d.submit(&text(&mut random, len, most))),
                }
            }
            d.drain();
            d.assert_alone(id.unwrap(), &request);
        }
    }
    for _ in 0..50 {
        let other = text(&mut random, 33, 21);
        d.submit(&other);
        d.drain();
    }
    let id = d.submit(&request);
    d.drain();
    d.assert_alone(id, &request);
    assert!(d.scheduler.stats().preemptions > 0, "the pools were meant to be too small");
}

#[test]
fn c03_a_short_row_beside_a_long_one() {
    let options = SchedulerOptions { context: 1600, ..options() };
    let window = 512;
    let mut d = Drive::new(options, window, pages_for(&options, window, 2));
    let mut random = Random::new(3);
    let requests = [5, 1500].map(|len| lasting(&mut random, len, 50, window, options.context));
    let ids = requests.each_ref().map(|r| d.submit(r));
    d.drain();
    for (id, request) in ids.into_iter().zip(&requests) {
        d.assert_alone(id, request);
    }
}

#[test]
fn the_newest_of_the_lowest_priority_loses_its_pages() {
    // Each of these needs 2 pages to begin with and 4 in the end; there are 9.
    let options = SchedulerOptions { context: 250, ..options() };
    let mut d = Drive::new(options, 29, [50, 10]);
    let mut random = Random::new(9);
    let mut request = |priority| Submission { priority, ..lasting(&mut random, 20, 100, 29, 250) };
    let requests = [request(0), request(-1), request(-1), request(1)];
    let ids = requests.each_ref().map(|r| d.submit(r));
    while d.scheduler.stats().preemptions == 0 {
        d.step().unwrap();
    }
    let running: Vec<RequestId> = d.step().unwrap().entries.iter().map(|e| e.id).collect();
    assert!(!running.contains(&ids[2]), "{running:?}");
    assert_eq!(running.len(), 3);
    d.drain();
    ids.iter().zip(&requests).for_each(|(id, request)| d.assert_alone(*id, request));
}

#[test]
fn when_the_one_that_is_due_finds_no_page_the_first_in_rank_goes_on() {
    // After 34 tokens each, the second needs a third page and the first holds the rest of the five.
    let options = SchedulerOptions { head_rows: 1, running: 2, context: 160, ..options() };
    let mut d = Drive::new(options, 29, [50, 6]);
    let mut random = Random::new(19);
    let requests = [60, 30].map(|len| lasting(&mut random, len, 70, 29, 160));
    let ids = requests.each_ref().map(|r| d.submit(r));
    let mut waits = 0;
    while let Some(plan) = d.step() {
        let cursor = 30 + d.records[&ids[1]].tokens.len();
        waits += usize::from(cursor == 65 && plan.entries.iter().all(|e| e.id == ids[0]));
    }
    assert!(waits > 1, "the case was met");
    d.drain();
    ids.iter().zip(&requests).for_each(|(id, request)| d.assert_alone(*id, request));
}

#[test]
fn nobody_is_let_in_only_to_lose_its_pages_again() {
    let options = options();
    let mut d = Drive::new(options, 29, [99, 16]);
    let mut random = Random::new(20);
    // What a request knows and a page more is promised to it; these need no more.
    let requests: Vec<_> = (0..40).map(|i| text(&mut random, 60 + i, 32)).collect();
    let ids: Vec<_> = requests.iter().map(|r| d.submit(r)).collect();
    d.drain();
    ids.iter().zip(&requests).for_each(|(id, request)| d.assert_alone(*id, request));
    assert_eq!((d.scheduler.stats().preemptions, d.scheduler.stats().recomputed_rows), (0, 0));
}

#[test]
fn k02_cancelling_a_queued_request_leaves_the_running_one_alone() {
    let options = SchedulerOptions { running: 1, ..options() };
    let mut d = Drive::new(options, 29, pages_for(&options, 29, 1));
    let mut random = Random::new(11);
    let requests = [30, 20, 25].map(|len| lasting(&mut random, len, 20, 29, 400));
    let ids = requests.each_ref().map(|r| d.submit(r));
    d.until(ids[0], 3);
    let event = d.scheduler.cancel(ids[1]).unwrap();
    assert_eq!(event, SchedulerEvent::Finished { id: ids[1], reason: EndReason::Cancelled });
    assert_eq!(d.scheduler.cancel(ids[1]), None);
    assert_eq!(d.scheduler.cancel(RequestId(99)), None);
    d.drain();
    d.assert_alone(ids[0], &requests[0]);
    d.assert_alone(ids[2], &requests[2]);
}

#[test]
fn k01_cancelling_a_running_request_frees_its_pages_before_the_next_batch() {
    let options = options();
    let mut d = Drive::new(options, 29, pages_for(&options, 29, 2));
    let free = Group::ALL.map(|g| d.scheduler.pool().available(g));
    let id = d.submit(&lasting(&mut Random::new(12), 90, 20, 29, 400));
    d.until(id, 2);
    let mut batch = Batch::default();
    let plan = d.scheduler.next(d.now, &mut batch).unwrap();
    assert!(d.scheduler.cancel(id).is_some());
    assert_eq!(Group::ALL.map(|g| d.scheduler.pool().available(g)), free);
    assert!(d.scheduler.apply(&plan, &[Produced::Token(3)], d.now).unwrap().is_empty());
    assert!(d.scheduler.next(d.now, &mut batch).is_none());
}

#[test]
fn a08_a_row_that_fails_ends_its_request_and_no_other() {
    let options = options();
    for wrong in [Produced::Failed, Produced::Token(u32::MAX)] {
        let mut d = Drive::new(options, 29, pages_for(&options, 29, 2));
        let mut random = Random::new(13);
        let requests = [30, 20].map(|len| lasting(&mut random, len, 20, 29, 400));
        let ids = requests.each_ref().map(|r| d.submit(r));
        d.until(ids[1], 5);
        let plan = d.scheduler.next(d.now, &mut d.batch).unwrap();
        let mut produced = d.device.run(&d.batch, &plan);
        produced[0] = wrong;
        let position = plan.entries[0].positions.end - 1;
        assert_eq!(plan.heads().next().unwrap(), (ids[0], position + 1));
        for event in d.scheduler.apply(&plan, &produced, d.now).unwrap() {
            d.note(event);
        }
        d.drain();
        assert_eq!(d.records[&ids[0]].end, Some(EndReason::Failed { position }));
        d.assert_alone(ids[1], &requests[1]);
    }
}

#[test]
fn an_abandoned_batch_is_fed_again() {
    let options = options();
    let mut d = Drive::new(options, 29, pages_for(&options, 29, 2));
    let request = lasting(&mut Random::new(14), 130, 20, 29, 400);
    let id = d.submit(&request);
    while d.records[&id].end.is_none() {
        let plan = d.scheduler.next(d.now, &mut d.batch).unwrap();
        // What a batch wrote before it broke does no harm.
        d.device.run(&d.batch, &plan);
        d.scheduler.abandon(&plan).unwrap();
        assert!(matches!(d.scheduler.apply(&plan, &[], d.now), Err(Error::StalePlan { expected: 0, .. })));
        let entries = plan.entries;
        assert_eq!(d.step().unwrap().entries, entries);
    }
    d.assert_alone(id, &request);
}

#[test]
fn what_cannot_be_served_is_refused_and_changes_nothing() {
    let options = SchedulerOptions { waiting: 2, ..options() };
    let plan = kv_plan(29, pages_for(&options, 29, 1));
    let mut s = Scheduler::new(config(29, VisionBlocks::Sliding), &plan, options).unwrap();
    let mut random = Random::new(15);
    let mut submit = |request: Submission| s.submit(request, Duration::ZERO);
    let good = text(&mut random, 400, 1);
    let e = submit(text(&mut random, 401, 1)).unwrap_err();
    assert!(matches!(e, Error::PromptTooLong { tokens: 401, context: 400 }), "{e}");
    let e = submit(Submission { max_tokens: 0, ..good.clone() }).unwrap_err();
    assert!(matches!(e, Error::Zero { what: "max_tokens" }), "{e}");
    let e = submit(Submission { prompt: Prompt::default(), ..good.clone() }).unwrap_err();
    assert!(matches!(e, Error::EmptyPrompt), "{e}");
    let e = submit(Submission { prompt: Prompt::from(&[1, 211][..]), ..good.clone() }).unwrap_err();
    assert!(matches!(e, Error::Token { token: 211, .. }), "{e}");
    let mut block = good.clone();
    block.prompt.soft = vec![SoftSpan { start: 9, values: vec![0.5; 62 * HIDDEN], kind: SoftKind::Vision }];
    let e = submit(block).unwrap_err();
    assert!(matches!(e, Error::VisionBlock { rows: 62, limit: 61 }), "{e}");
    assert_eq!(submit(good.clone()).unwrap(), RequestId(1), "no refused request took an id");
    submit(good.clone()).unwrap();
    let e = submit(good).unwrap_err();
    assert!(matches!(e, Error::QueueFull { limit: 2 }), "{e}");
    assert_eq!(s.stats().waiting, 2);
    s.check().unwrap();
}

#[test]
fn pools_that_hold_no_whole_sequence_are_refused() {
    let options = options();
    let [sliding, full] = pages_for(&options, 29, 1);
    for (pages, group) in [([sliding - 1, full], Group::Sliding), ([sliding, full - 1], Group::Full)] {
        let error =
            Scheduler::new(config(29, VisionBlocks::Causal), &kv_plan(29, pages), options).unwrap_err();
        assert!(matches!(error, Error::PoolTooSmall { group: g, .. } if g == group), "{error}");
    }
    let zero = SchedulerOptions { head_rows: 0, ..options };
    let plan = kv_plan(29, [sliding, full]);
    let error = Scheduler::new(config(29, VisionBlocks::Causal), &plan, zero).unwrap_err();
    assert!(matches!(error, Error::Zero { what: "head_rows" }), "{error}");
}
