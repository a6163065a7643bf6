//! The scheduler's promises one by one, on a device in fake time.

mod common;

use std::time::Duration;

use common::drive::{Drive, ms, pages_for};
use common::{HIDDEN, Random, alone, config, kv_plan, text};
use lapidary_engine::scheduler::{
    EndReason, Produced, RequestId, Scheduler, SchedulerEvent, SchedulerOptions, Submission,
};
use lapidary_engine::{Error, Prompt, SoftKind, SoftSpan};
use lapidary_model::VisionBlocks;
use lapidary_ops::{Batch, Group};

fn options() -> SchedulerOptions {
    SchedulerOptions { rows: 61, head_rows: 17, context: 400, running: 16, ..SchedulerOptions::default() }
}

/// A request of `len` tokens whose answer alone is `answer` tokens long and ends by its length.
fn lasting(random: &mut Random, len: usize, answer: usize, window: usize, context: usize) -> Submission {
    loop {
        let request = text(random, len, answer);
        if alone(&request, window, context).0.len() == answer {
            return request;
        }
    }
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

/// A step costs something, each row costs something, and a row costs more the more it sees.
fn growing(base: f64, row: f64, key: f64) -> impl Fn(&Batch) -> f64 {
    move |batch| {
        let keys: f64 = batch.positions.iter().map(|&p| f64::from(p)).sum();
        base + row * batch.tokens.len() as f64 + key * keys
    }
}

#[test]
fn c04_a_long_prompt_keeps_the_gap_of_running_streams_bounded() {
    let options = SchedulerOptions { rows: 512, context: 32_768 + 64, ..options() };
    let window = 512;
    let prompt = lasting(&mut Random::new(4), 32_768, 3, window, options.context);
    let cost = || growing(12.0, 0.3, 0.000_02);
    let mut d = Drive::new(options, window, pages_for(&options, window, 3));
    let of = cost();
    d.cost = Box::new(move |batch, _| ms(of(batch)));
    let id = d.submit(&prompt);
    d.until(id, 1);
    let alone_takes = d.records[&id].first();
    d.drain();

    // Noise that nobody can foresee: a twentieth of the steps takes half as long again.
    for (noisy, bound) in [(false, ms(200.0)), (true, ms(300.0))] {
        let mut d = Drive::new(options, window, pages_for(&options, window, 3));
        let (of, mut random) = (cost(), Random::new(5));
        d.cost = Box::new(move |batch, _| {
            let slow = noisy && random.once_in(20);
            ms(of(batch) * if slow { 1.5 } else { 1.0 })
        });
        let streams: Vec<_> = (0..4)
            .map(|i| {
                let request =
                    lasting(&mut Random::new(60 + i), 10 + i as usize, 700, window, options.context);
                d.submit(&request)
            })
            .collect();
        streams.iter().for_each(|&s| d.until(s, 5));
        let id = d.submit(&prompt);
        d.until(id, 1);
        let steps = d.records[&streams[0]].tokens.len();
        let first = d.records[&id].first();
        println!("noisy {noisy}: alone {alone_takes:.1?}, beside streams {first:.1?}, {steps} steps");
        for &s in &streams {
            let gap = d.records[&s].gap();
            println!("  gap {gap:.1?}");
            assert!(gap <= bound, "a stream waited {gap:?}");
        }
        assert!(
            first.as_secs_f64() <= 1.3 * alone_takes.as_secs_f64(),
            "{first:?} after {alone_takes:?} alone"
        );
    }
}

#[test]
fn a_bound_out_of_reach_still_gets_prompts_done() {
    let options = SchedulerOptions { max_stall: ms(1.0), min_prompt_rows: 8, ..options() };
    let mut d = Drive::new(options, 29, pages_for(&options, 29, 4));
    d.cost = Box::new(|batch, _| ms(50.0 + batch.tokens.len() as f64));
    let mut random = Random::new(6);
    let stream = lasting(&mut random, 3, 200, 29, options.context);
    let stream = d.submit(&stream);
    d.until(stream, 2);
    let before = d.records[&stream].tokens.len();
    let id = d.submit(&lasting(&mut random, 300, 2, 29, options.context));
    d.until(id, 1);
    let steps = d.records[&stream].tokens.len() - before;
    assert_eq!(steps, 300usize.div_ceil(8), "the fewest rows a step that were asked for");
}

#[test]
fn a_short_prompt_is_answered_before_the_long_one_in_front_of_it_is_fed() {
    let options = SchedulerOptions { context: 6000, running: 9, ..options() };
    let mut d = Drive::new(options, 29, pages_for(&options, 29, 8));
    let mut random = Random::new(7);
    let long = d.submit(&text(&mut random, 5900, 5));
    d.step();
    let short: Vec<_> = (0..6)
        .map(|_| {
            let request = lasting(&mut random, 40, 3, 29, options.context);
            d.submit(&request)
        })
        .collect();
    let mut steps = 0;
    while short.iter().any(|s| d.records[s].end.is_none()) {
        d.step();
        steps += 1;
    }
    // Half of 61 rows for 240 of theirs takes 8 steps and its heads another 2; streams have their own rows.
    assert!(steps <= 14, "{steps} steps");
    assert!(d.records[&long].tokens.is_empty());
    let fed = steps * 61 / 2;
    d.until(long, 1);
    assert!(fed > 0);
    // The long one lost no more than half of each step.
    assert!(d.scheduler.stats().steps <= (5900 - fed as u64) / 60 + steps as u64 + 10);
}

#[test]
fn higher_priority_is_answered_first_and_lower_is_not_starved() {
    let worth = ms(900.0);
    let options = SchedulerOptions { running: 2, priority_worth: worth, waiting: 99, ..options() };
    let mut d = Drive::new(options, 29, pages_for(&options, 29, 2));
    let mut random = Random::new(8);
    let mut request = |priority| Submission { priority, ..lasting(&mut random, 25, 30, 29, 400) };
    let low = request(0);
    let high: Vec<_> = (0..60).map(|_| request(1)).collect();
    let running: Vec<_> = (0..2).map(|_| d.submit(&request(0))).collect();
    d.step();
    let low = d.submit(&low);
    // More of high priority than the device can do, for ever; two at once take about 75 ms.
    for high in &high {
        d.submit(high);
        (0..16).for_each(|_| drop(d.step()));
    }
    let took = d.records[&low].times[0] - d.records[&low].submitted;
    assert!(took >= worth, "priority means something: {took:?}");
    assert!(took <= worth * 2, "and not everything: {took:?}");
    d.drain();
    assert!(d.scheduler.stats().preemptions >= 2, "the first two had to leave");
    running.iter().for_each(|r| assert_eq!(d.records[r].tokens.len(), 30));
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
fn a_vision_block_runs_whole_even_when_streams_fill_the_batch() {
    let options = SchedulerOptions { rows: 20, head_rows: 20, running: 25, ..options() };
    let mut d = Drive::new(options, 29, pages_for(&options, 29, 25));
    let mut random = Random::new(10);
    let streams: Vec<_> = (0..20)
        .map(|_| {
            let request = lasting(&mut random, 2, 150, 29, options.context);
            d.submit(&request)
        })
        .collect();
    streams.iter().for_each(|&s| d.until(s, 1));
    let mut request = text(&mut random, 50, 4);
    let values = (0..20 * HIDDEN).map(|i| i as f32).collect();
    request.prompt.soft.push(SoftSpan { start: 11, values, kind: SoftKind::Vision });
    let id = d.submit(&request);
    let before: Vec<usize> = streams.iter().map(|s| d.records[s].tokens.len()).collect();
    let mut whole = false;
    let mut steps = 0;
    while d.records[&id].end.is_none() {
        let plan = d.step().unwrap();
        whole |= plan.entries.iter().any(|e| e.id == id && e.positions == (11..31));
        steps += 1;
        assert!(steps < 40);
    }
    assert!(whole, "the block ran in one batch");
    d.assert_alone(id, &request);
    // Streams had every second step at least.
    for (s, before) in streams.iter().zip(before) {
        assert!(d.records[s].tokens.len() - before >= steps / 2, "{steps} steps");
    }
}

#[test]
fn streams_take_turns_when_there_are_more_than_heads() {
    let options = SchedulerOptions { head_rows: 7, running: 30, ..options() };
    let mut d = Drive::new(options, 29, pages_for(&options, 29, 30));
    let mut random = Random::new(17);
    let request = lasting(&mut random, 3, 60, 29, options.context);
    let ids: Vec<_> = (0..30).map(|_| d.submit(&request)).collect();
    while ids.iter().any(|id| d.records[id].tokens.is_empty()) {
        d.step();
    }
    let got = |d: &Drive| -> Vec<usize> { ids.iter().map(|id| d.records[id].tokens.len()).collect() };
    // The first ones have had several while the last ones had none: let them get in step.
    (0..5).for_each(|_| drop(d.step()));
    for _ in 0..6 {
        let before = got(&d);
        (0..30usize.div_ceil(7)).for_each(|_| drop(d.step()));
        for (id, (after, before)) in ids.iter().zip(got(&d).iter().zip(&before)) {
            assert!(after > before, "{id:?} had no token in 5 steps");
        }
    }
    d.drain();
    ids.iter().for_each(|id| d.assert_alone(*id, &request));
}

#[test]
fn the_stall_bound_holds_for_streams_that_take_turns() {
    for (rows, head_rows) in [(256, 7), (256, 1), (24, 30)] {
        let options =
            SchedulerOptions { rows, head_rows, running: 40, context: 4100, min_prompt_rows: 1, ..options() };
        let mut d = Drive::new(options, 29, pages_for(&options, 29, 40));
        d.cost = Box::new(|batch, _| ms(2.0 + 0.25 * batch.tokens.len() as f64));
        let mut random = Random::new(21);
        let request = lasting(&mut random, 3, 250, 29, options.context);
        let streams: Vec<_> = (0..30).map(|_| d.submit(&request)).collect();
        while streams.iter().any(|id| d.records[id].tokens.len() < 3) {
            d.step();
        }
        let arrived = d.now;
        let long = d.submit(&text(&mut random, 4000, 2));
        d.until(long, 1);
        let alive = streams.iter().filter(|id| d.records[id].end.is_none()).count();
        println!("{rows} rows, {head_rows} heads: {:.1?}, {alive} streams left", d.records[&long].first());
        for id in &streams {
            let times: Vec<_> = d.records[id].times.iter().filter(|t| **t >= arrived).collect();
            let gap = times.windows(2).map(|w| *w[1] - *w[0]).max().unwrap();
            assert!(gap <= options.max_stall, "{rows} rows, {head_rows} heads: {gap:?}");
        }
    }
}

#[test]
fn prompts_take_turns_when_a_step_has_few_rows_for_them() {
    let options = SchedulerOptions { max_stall: ms(1.0), min_prompt_rows: 8, ..options() };
    let mut d = Drive::new(options, 29, pages_for(&options, 29, 8));
    d.cost = Box::new(|batch, _| ms(50.0 + batch.tokens.len() as f64));
    let mut random = Random::new(18);
    let stream = d.submit(&lasting(&mut random, 3, 300, 29, options.context));
    d.until(stream, 2);
    let ids: Vec<_> = (0..7).map(|_| d.submit(&text(&mut random, 300, 3))).collect();
    // Half of the 8 rows are the first one's, the other 4 go round among 6.
    let mut rows = [0; 7];
    for _ in 0..60 {
        for entry in d.step().unwrap().entries {
            if let Some(i) = ids.iter().position(|id| *id == entry.id) {
                rows[i] += entry.rows.len();
            }
        }
    }
    assert_eq!(rows, [240, 40, 40, 40, 40, 40, 40]);
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

/// Not a bound: a machine that is busy may take ten times as long.
#[test]
fn a_step_of_64_streams_costs_microseconds() {
    let options = SchedulerOptions { rows: 512, head_rows: 64, running: 64, context: 8192, ..options() };
    let mut d = Drive::new(options, 512, pages_for(&options, 512, 64));
    let mut random = Random::new(16);
    for _ in 0..64 {
        let request = text(&mut random, 700, 100_000);
        d.submit(&request);
    }
    while d.scheduler.stats().rows < 64 * 700 {
        d.step();
    }
    let start = std::time::Instant::now();
    let steps = 2000;
    for _ in 0..steps {
        let plan = d.scheduler.next(d.now, &mut d.batch).unwrap();
        let produced: Vec<_> =
            plan.heads().map(|(_, position)| Produced::Token(position as u32 % 200)).collect();
        d.now += ms(10.0);
        d.scheduler.apply(&plan, &produced, d.now).unwrap();
    }
    let each = start.elapsed().as_secs_f64() * 1e6 / f64::from(steps);
    println!("{} streams: {each:.1} us a step, {:.0} steps/s", d.scheduler.stats().running, 1e6 / each);
    assert!(each < 5000.0);
}
