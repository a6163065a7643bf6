//! Runs requests through a scheduler in fake time and notes who got what when.

use std::collections::BTreeMap;
use std::time::Duration;

use lapidary_engine::scheduler::{
    EndReason, Plan, RequestId, Scheduler, SchedulerEvent, SchedulerOptions, Submission,
};
use lapidary_model::VisionBlocks;
use lapidary_ops::{Batch, GROUPS, PAGE_TOKENS};

use super::{FakeDevice, config, kv_plan};

/// What happened to one request.
#[derive(Clone, Debug)]
pub struct Record {
    pub submitted: Duration,
    pub tokens: Vec<u32>,
    pub times: Vec<Duration>,
    pub end: Option<EndReason>,
}

impl Record {
    /// The longest time between two tokens.
    pub fn gap(&self) -> Duration {
        self.times.windows(2).map(|w| w[1] - w[0]).max().unwrap_or_default()
    }

    /// From submission to the first token.
    pub fn first(&self) -> Duration {
        self.times[0] - self.submitted
    }
}

/// How long the fake device takes for a batch.
pub type Cost = Box<dyn FnMut(&Batch, &Plan) -> Duration>;

pub struct Drive {
    pub window: usize,
    pub options: SchedulerOptions,
    pub scheduler: Scheduler,
    pub device: FakeDevice,
    pub batch: Batch,
    pub now: Duration,
    pub cost: Cost,
    pub records: BTreeMap<RequestId, Record>,
}

/// Milliseconds.
pub fn ms(value: f64) -> Duration {
    Duration::from_secs_f64(value / 1e3)
}

/// Pages by group for `sequences` sequences of the whole context.
pub fn pages_for(options: &SchedulerOptions, window: usize, sequences: usize) -> [usize; GROUPS] {
    let sliding = (window + options.rollback + options.rows).div_ceil(PAGE_TOKENS) + 1;
    let full = options.context.div_ceil(PAGE_TOKENS);
    [1 + sequences * sliding.min(full), 1 + sequences * full]
}

impl Drive {
    pub fn new(options: SchedulerOptions, window: usize, pages: [usize; GROUPS]) -> Drive {
        let plan = kv_plan(window, pages);
        let scheduler = Scheduler::new(config(window, VisionBlocks::Sliding), &plan, options).unwrap();
        Drive {
            window,
            options,
            scheduler,
            device: FakeDevice::new(&plan),
            batch: Batch::default(),
            now: Duration::ZERO,
            cost: Box::new(|batch, _| ms(2.0 + 0.25 * batch.tokens.len() as f64)),
            records: BTreeMap::new(),
        }
    }

    pub fn submit(&mut self, request: &Submission) -> RequestId {
        let id = self.scheduler.submit(request.clone(), self.now).unwrap();
        let record = Record { submitted: self.now, tokens: Vec::new(), times: Vec::new(), end: None };
        assert!(self.records.insert(id, record).is_none());
        id
    }

    /// One step; the plan, if anything ran.
    pub fn step(&mut self) -> Option<Plan> {
        let plan = self.scheduler.next(self.now, &mut self.batch)?;
        let produced = self.device.run(&self.batch, &plan);
        self.now += (self.cost)(&self.batch, &plan);
        for event in self.scheduler.apply(&plan, &produced, self.now).unwrap() {
            self.note(event);
        }
        Some(plan)
    }

    pub fn note(&mut self, event: SchedulerEvent) {
        match event {
            SchedulerEvent::Token { id, token } => {
                let record = self.records.get_mut(&id).unwrap();
                assert_eq!(record.end, None);
                record.tokens.push(token);
                record.times.push(self.now);
            }
            SchedulerEvent::Finished { id, reason } => {
                let record = self.records.get_mut(&id).unwrap();
                assert_eq!(record.end.replace(reason), None);
            }
        }
    }

    /// Steps until nobody is left.
    pub fn drain(&mut self) {
        while self.step().is_some() {}
        assert!(self.scheduler.is_idle());
        self.scheduler.check().unwrap();
    }

    /// Steps until a request has `tokens` tokens.
    pub fn until(&mut self, id: RequestId, tokens: usize) {
        while self.records[&id].tokens.len() < tokens {
            assert_eq!(self.records[&id].end, None, "ended after {}", self.records[&id].tokens.len());
            self.step().expect("it still runs");
        }
    }

    /// Every token and the end are those of the request alone.
    #[track_caller]
    pub fn assert_alone(&self, id: RequestId, request: &Submission) {
        let (tokens, end) = super::alone(request, self.window, self.options.context);
        let record = &self.records[&id];
        assert_eq!(record.tokens, tokens, "{id:?}");
        assert_eq!(record.end, Some(end), "{id:?}");
    }
}
