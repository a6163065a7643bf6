//! The scheduler over a million steps of random company: requests of all sizes, priorities and kinds that come,
//! are cancelled, pre-empted, fail and end, on pools that are too small for them.

mod common;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use common::{FakeDevice, Random, STOP, alone, config, follow, kv_plan, soften, text};
use lapidary_engine::scheduler::{
    EndReason, Plan, RequestId, Scheduler, SchedulerEvent, SchedulerOptions, Submission,
};
use lapidary_engine::{Error, PrefixOptions};
use lapidary_model::VisionBlocks;
use lapidary_ops::{Batch, GROUPS, Group};

/// A request under way and what it must come to.
struct Track {
    expected: Vec<u32>,
    end: EndReason,
    got: usize,
    submitted: Duration,
    priority: i8,
    work: u64,
    /// Steps so far, and the most that it may take.
    steps: u64,
    bound: u64,
}

struct Case {
    seed: u64,
    window: usize,
    vision: VisionBlocks,
    pages: [usize; GROUPS],
    options: SchedulerOptions,
    prefix: PrefixOptions,
    steps: u64,
}

struct World {
    case: Case,
    random: Random,
    scheduler: Scheduler,
    device: FakeDevice,
    alive: HashMap<RequestId, Track>,
    now: Duration,
    ended: [u64; 4],
    /// Requests of late with their answers, for others that begin as they do.
    late: Vec<(Submission, Vec<u32>)>,
}

impl World {
    fn new(case: Case) -> World {
        let plan = kv_plan(case.window, case.pages);
        let config = config(case.window, case.vision);
        let scheduler = Scheduler::with_prefix(config, &plan, case.options, case.prefix.clone()).unwrap();
        World {
            random: Random::new(case.seed),
            scheduler,
            device: FakeDevice::new(&plan),
            alive: HashMap::new(),
            now: Duration::from_secs(1000),
            ended: [0; 4],
            late: Vec::new(),
            case,
        }
    }

    fn submit(&mut self) {
        let (r, options) = (&mut self.random, self.case.options);
        let len = match r.below(4) {
            0 => 1 + r.below(3),
            1..3 => 1 + r.below(options.context / 4),
            _ => 1 + r.below(options.context),
        };
        let longest = if r.once_in(8) { options.context } else { 40 };
        let most = 1 + r.below(longest);
        let mut request = text(r, len, most);
        let follows = self.case.prefix.enabled && !self.late.is_empty() && !r.once_in(4);
        if follows {
            let (before, answer) = &self.late[r.below(self.late.len())];
            request = follow(r, before, answer, options.context);
        } else if r.once_in(3) {
            let longest = options.rows;
            soften(r, &mut request, longest);
        }
        if r.once_in(2) {
            request.stop_ids = vec![STOP, 9];
        }
        request.priority = [0, 0, 0, 1, -1, 3][r.below(6)];
        let full = self.scheduler.stats().waiting >= options.waiting;
        match self.scheduler.submit(request.clone(), self.now) {
            Err(Error::QueueFull { limit }) => assert!(full && limit == options.waiting),
            Err(other) => panic!("{other}"),
            Ok(id) => {
                assert!(!full);
                self.track(id, &request);
            }
        }
    }

    fn track(&mut self, id: RequestId, request: &Submission) {
        let (expected, end) = alone(request, self.case.window, self.case.options.context);
        let work = (request.prompt.tokens.len() + expected.len() + 1) as u64;
        // The first in rank has a row in one step of so many at least: others may be served before it in turn,
        // and in every second of these steps prompts go before streams.
        let o = self.case.options;
        let turn = 2 * (1 + o.running.div_ceil(o.head_rows.min(o.rows))) as u64;
        let behind: u64 = self.alive.values().map(|t| t.work).sum();
        for t in self.alive.values_mut() {
            // Only what comes later with a higher priority, and not too much later, goes before.
            let levels = i32::from(request.priority) - i32::from(t.priority);
            if levels > 0 && self.now - t.submitted < o.priority_worth * levels as u32 {
                t.bound += turn * work;
            }
        }
        if self.late.len() >= 12 {
            let i = self.random.below(self.late.len());
            self.late.swap_remove(i);
        }
        self.late.push((request.clone(), expected.clone()));
        let track = Track {
            expected,
            end,
            got: 0,
            submitted: self.now,
            priority: request.priority,
            work,
            steps: 0,
            bound: turn * (behind + work),
        };
        assert!(self.alive.insert(id, track).is_none(), "an id is used once");
    }

    fn cancel(&mut self) {
        let mut ids: Vec<RequestId> = self.alive.keys().copied().collect();
        ids.sort_unstable();
        if !ids.is_empty() {
            let id = ids[self.random.below(ids.len())];
            let event = self.scheduler.cancel(id);
            assert_eq!(event, Some(SchedulerEvent::Finished { id, reason: EndReason::Cancelled }));
            self.alive.remove(&id).expect("it was alive");
            self.ended[3] += 1;
            assert_eq!(self.scheduler.cancel(id), None, "it ends once");
        }
    }

    fn take(&mut self, event: SchedulerEvent) {
        match event {
            SchedulerEvent::Token { id, token } => {
                let t = self.alive.get_mut(&id).expect("no token after the end");
                assert_eq!(t.expected.get(t.got), Some(&token), "token {} of {id:?}", t.got);
                t.got += 1;
            }
            SchedulerEvent::Finished { id, reason } => {
                let t = self.alive.remove(&id).expect("one end each");
                assert_eq!((reason, t.got), (t.end, t.expected.len()), "{id:?}");
                self.ended[match reason {
                    EndReason::Done(_) => 0,
                    EndReason::Failed { .. } => 1,
                    EndReason::Cancelled => unreachable!("cancellation is answered at once"),
                }] += 1;
            }
        }
    }

    /// One step; whether anything ran.
    fn step(&mut self, batch: &mut Batch) -> bool {
        let plan = self.scheduler.next(self.now, batch);
        assert_eq!(plan.is_none(), self.alive.is_empty(), "whoever is there gets on");
        let Some(plan) = plan else { return false };
        let o = self.case.options;
        assert!(batch.tokens.len() <= o.rows && batch.heads.len() <= o.head_rows);
        assert!(self.scheduler.stats().running <= o.running);
        assert!(self.scheduler.next(self.now, &mut Batch::default()).is_none(), "one plan at a time");
        let produced = self.device.run(batch, &plan);
        self.now += Duration::from_micros(300 + 40 * batch.tokens.len() as u64);
        self.in_flight(&plan);
        if self.random.once_in(200) {
            self.scheduler.abandon(&plan).unwrap();
        } else {
            let short = self.scheduler.apply(&plan, &produced[..produced.len().saturating_sub(1)], self.now);
            if produced.is_empty() {
                short.unwrap();
            } else {
                assert!(matches!(short, Err(Error::Length { .. })));
                for event in self.scheduler.apply(&plan, &produced, self.now).unwrap() {
                    self.take(event);
                }
            }
        }
        assert!(matches!(self.scheduler.abandon(&plan), Err(Error::StalePlan { expected: 0, .. })));
        for (id, t) in &mut self.alive {
            t.steps += 1;
            assert!(t.steps <= t.bound, "{id:?} starves: {} steps", t.steps);
        }
        true
    }

    /// What may happen while a batch runs.
    fn in_flight(&mut self, plan: &Plan) {
        if self.random.once_in(40) {
            self.cancel();
        }
        if self.random.once_in(60) {
            // Somebody in this very batch.
            let id = plan.entries[self.random.below(plan.entries.len())].id;
            if self.alive.remove(&id).is_some() {
                assert!(self.scheduler.cancel(id).is_some());
                self.ended[3] += 1;
            }
        }
        if self.random.once_in(10) {
            self.submit();
        }
    }

    fn run(mut self) {
        let start = Instant::now();
        let mut batch = Batch::default();
        let (mut steps, mut device_free) = (0, 0);
        while steps < self.case.steps {
            // Floods, and then a drain to the last request.
            let flood = 50 + self.random.below(800);
            let per_step = 1 + self.random.below(12);
            for _ in 0..flood {
                if self.random.once_in(per_step) {
                    self.submit();
                }
                if self.random.once_in(50) {
                    self.cancel();
                }
                steps += u64::from(self.step(&mut batch));
                if self.random.once_in(64) {
                    self.scheduler.check().unwrap();
                }
            }
            while self.step(&mut batch) {
                steps += 1;
            }
            assert!(self.alive.is_empty() && self.scheduler.is_idle());
            self.scheduler.check().unwrap();
            for group in Group::ALL {
                assert_eq!(self.scheduler.pool().available(group), self.case.pages[group.index()] - 1);
            }
            device_free += 1;
        }
        let stats = self.scheduler.stats();
        let [done, failed, _, cancelled] = self.ended;
        println!(
            "seed {}: {steps} steps in {:.1?}, {device_free} drains; {done} done, {failed} failed, {cancelled} \
             cancelled; {} rows, {} of them again, {} pre-emptions",
            self.case.seed,
            start.elapsed(),
            stats.rows,
            stats.recomputed_rows,
            stats.preemptions
        );
        assert!(done > steps / 200 && failed > 0 && cancelled > 0);
        assert!(stats.preemptions > steps / 2000, "the pools were meant to be too small");
        if self.case.prefix.enabled {
            println!("{:?}", stats.prefix);
            assert!(
                stats.prefix.hits > steps / 200 && stats.prefix.evicted > steps / 1000,
                "much was reused"
            );
        }
    }
}

fn options() -> SchedulerOptions {
    SchedulerOptions {
        rows: 24,
        head_rows: 9,
        context: 150,
        running: 13,
        waiting: 17,
        max_stall: Duration::from_millis(3),
        max_slowdown: 3,
        min_prompt_rows: 3,
        priority_worth: Duration::from_millis(40),
        rollback: 0,
    }
}

/// A million steps in all, in four worlds that run side by side.
const STEPS: u64 = 280_000;

#[test]
fn random_company_on_pools_barely_larger_than_one_sequence() {
    let case = Case {
        seed: 1,
        window: 21,
        vision: VisionBlocks::Sliding,
        pages: [8, 9],
        options: options(),
        prefix: PrefixOptions::off(),
        steps: STEPS,
    };
    World::new(case).run();
}

#[test]
fn random_company_with_a_window_that_is_no_multiple_of_anything() {
    let options = SchedulerOptions { rows: 37, head_rows: 4, rollback: 16, ..options() };
    let case = Case {
        seed: 2,
        window: 43,
        vision: VisionBlocks::Both,
        pages: [17, 15],
        options,
        prefix: PrefixOptions::off(),
        steps: STEPS,
    };
    World::new(case).run();
}

#[test]
fn random_company_with_one_head_row() {
    let options = SchedulerOptions { rows: 11, head_rows: 1, context: 97, running: 5, ..options() };
    let case = Case {
        seed: 3,
        window: 33,
        vision: VisionBlocks::Causal,
        pages: [9, 7],
        options,
        prefix: PrefixOptions::off(),
        steps: STEPS,
    };
    World::new(case).run();
}

#[test]
fn random_company_with_more_streams_than_rows() {
    let options = SchedulerOptions { rows: 5, head_rows: 5, context: 70, running: 30, ..options() };
    let case = Case {
        seed: 4,
        window: 9,
        vision: VisionBlocks::Sliding,
        pages: [60, 40],
        options,
        prefix: PrefixOptions::off(),
        steps: STEPS,
    };
    World::new(case).run();
}

/// A million steps with prefixes: a page that was kept too long, given up too early or written while it was shared
/// changes an answer.
fn with_prefix(case: Case) -> Case {
    // A sliding page of the fake model takes 512 bytes.
    let prefix = PrefixOptions {
        enabled: true,
        snapshot_bytes: Some(case.pages[0] / 2 * 512),
        turn_tokens: vec![3, 4],
        ..case.prefix
    };
    Case { prefix, ..case }
}

#[test]
fn random_company_with_prefixes_on_pools_barely_larger_than_one_sequence() {
    let case = Case {
        seed: 5,
        window: 21,
        vision: VisionBlocks::Sliding,
        pages: [9, 9],
        options: options(),
        prefix: PrefixOptions::off(),
        steps: STEPS,
    };
    World::new(with_prefix(case)).run();
}

#[test]
fn random_company_with_prefixes_and_a_window_that_is_no_multiple_of_anything() {
    let options = SchedulerOptions { rows: 37, head_rows: 4, rollback: 16, ..options() };
    let case = Case {
        seed: 6,
        window: 43,
        vision: VisionBlocks::Both,
        pages: [20, 15],
        options,
        prefix: PrefixOptions { spacing: Some(32), ..PrefixOptions::off() },
        steps: STEPS,
    };
    World::new(with_prefix(case)).run();
}

#[test]
fn random_company_with_prefixes_and_one_head_row() {
    let options = SchedulerOptions { rows: 11, head_rows: 1, context: 97, running: 5, ..options() };
    let case = Case {
        seed: 7,
        window: 33,
        vision: VisionBlocks::Causal,
        pages: [9, 7],
        options,
        prefix: PrefixOptions::off(),
        steps: STEPS,
    };
    World::new(with_prefix(case)).run();
}

#[test]
fn random_company_with_prefixes_and_more_streams_than_rows() {
    let options = SchedulerOptions { rows: 5, head_rows: 5, context: 70, running: 30, ..options() };
    let case = Case {
        seed: 8,
        window: 9,
        vision: VisionBlocks::Sliding,
        pages: [60, 40],
        options,
        prefix: PrefixOptions::off(),
        steps: STEPS,
    };
    World::new(with_prefix(case)).run();
}
