//! The loop of the thread that owns the device: take commands, plan, run, choose tokens, hand them over.
//!
//! ```text
//! commands -> scheduler.next -> runner.start -> guides -> runner.collect -> tokens -> scheduler.apply -> sinks
//!                                                      `-> the step behind, where the device works on its own
//! ```
//!
//! What fails is kept to whom it belongs to. A guide, a sampler or a sink that fails or panics ends its request. A
//! pass that fails takes nobody with it at first: its requests run once more, each alone, and the one that fails
//! then ends. A panic in the loop itself ends every request there is; the scheduler starts afresh.

mod ahead;
mod kept;
mod looks;
mod reading;

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use lapidary_ops::{Batch, Draw, Group, Outcome};

use crate::active::{Active, TokenTime, guarded, message};
use crate::engine::{EngineOptions, Shared};
use crate::error::{Error, Result};
use crate::generate::FinishReason;
use crate::look::SteerTable;
use crate::metrics::{EngineStats, PageUse};
use crate::prefix::{LoadedPages, Store};
use crate::request::{EngineEvent, EngineFinish, FailureKind};
use crate::runner::Runner;
use crate::scheduler::{EndReason, Plan, Prepared, RequestId, Scheduler, SchedulerEvent, Wanted};
use ahead::Ahead;
use kept::open_store;

/// How often an engine looks at the time while all its requests wait for stored pages.
const IDLE_LOOK: Duration = Duration::from_millis(5);

/// What the thread is told.
pub(crate) enum Command {
    Submit {
        id: RequestId,
        prepared: Box<Prepared>,
        active: Box<Active>,
    },
    Cancel(RequestId),
    /// Stored pages for the beginning of a request that waits for them, unless they turned out to be useless.
    Loaded {
        id: RequestId,
        wanted: Wanted,
        pages: Option<LoadedPages>,
    },
    Shutdown,
}

/// The thread's own.
pub(crate) struct Worker {
    runner: Runner,
    scheduler: Scheduler,
    options: EngineOptions,
    shared: Arc<Shared>,
    inbox: Receiver<Command>,
    active: HashMap<RequestId, Box<Active>>,
    steer_table: SteerTable,
    store: Option<Store>,
    /// To hand to whoever reads stored pages.
    commands: Sender<Command>,
    /// Requests whose stored pages are being read.
    loading: HashMap<RequestId, Box<Prepared>>,
    /// Requests of a pass that failed, to be run alone.
    suspects: VecDeque<RequestId>,
    /// The pass that was started before the one in front of it was read.
    ahead: Option<Ahead>,
    batch: Batch,
    /// Rows of the batch at hand whose logits are wanted.
    batch_heads: Vec<i32>,
    /// How the device draws their tokens; empty where it draws none.
    batch_draws: Vec<Option<Draw>>,
    begun: Instant,
    stats: EngineStats,
    /// Requests that have ended since the figures were last put in.
    ended: usize,
}

impl Worker {
    pub fn new(
        runner: Runner,
        options: EngineOptions,
        shared: Arc<Shared>,
        commands: Sender<Command>,
        inbox: Receiver<Command>,
    ) -> Result<Worker> {
        let scheduler = scheduler(&runner, &options)?;
        let mut runner = runner;
        let store = open_store(&mut runner, &options.prefix)?;
        let mut worker = Worker {
            runner,
            scheduler,
            options,
            shared,
            inbox,
            active: HashMap::new(),
            steer_table: SteerTable::default(),
            store,
            commands,
            loading: HashMap::new(),
            suspects: VecDeque::new(),
            ahead: None,
            batch: Batch::default(),
            batch_heads: Vec::new(),
            batch_draws: Vec::new(),
            begun: Instant::now(),
            stats: EngineStats::default(),
            ended: 0,
        };
        worker.publish();
        Ok(worker)
    }

    /// Serves until told to end.
    pub fn run(mut self) {
        while let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.serve())) {
            self.start_afresh(&message(&*panic));
        }
        // Nobody gets in after this, so what is in the inbox is all there is.
        self.shared.gate().closed = true;
        while let Ok(command) = self.inbox.try_recv() {
            self.obey(command);
        }
        self.end_all(&EngineFinish::Failed(FailureKind::ShuttingDown));
        self.store_left();
        self.publish();
    }

    fn serve(&mut self) {
        while self.take_commands() {
            let start = Instant::now();
            let device = self.stats.device_time;
            self.expire(start);
            self.step();
            self.store_left();
            let spent = start.elapsed();
            self.stats.host_time += spent.saturating_sub(self.stats.device_time - device);
            self.publish();
        }
    }

    /// Takes what has come in, and waits for something when there is nothing to do. False when it is time to end.
    fn take_commands(&mut self) -> bool {
        if self.active.is_empty() && !self.inbox.recv().is_ok_and(|command| self.obey(command)) {
            return false;
        }
        if self.scheduler.is_idle() && !self.active.is_empty() {
            // All there are wait for stored pages, or for the end of their time.
            if let Ok(command) = self.inbox.recv_timeout(IDLE_LOOK)
                && !self.obey(command)
            {
                return false;
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(command) => {
                    if !self.obey(command) {
                        return false;
                    }
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Submit { id, prepared, active } => {
                self.active.insert(id, active);
                self.take_in(id, prepared);
                true
            }
            Command::Loaded { id, wanted, pages } => {
                // Ended in the meantime, unless it is there.
                if let Some(prepared) = self.loading.remove(&id) {
                    match pages {
                        Some(pages) => {
                            self.import(&prepared, &wanted, &pages);
                            self.queue(id, *prepared);
                        }
                        // Less may be stored than it seemed.
                        None => self.take_in(id, prepared),
                    }
                }
                true
            }
            Command::Cancel(id) => {
                self.leave(id, EngineFinish::Cancelled);
                true
            }
            Command::Shutdown => false,
        }
    }

    fn queue(&mut self, id: RequestId, prepared: Prepared) {
        let Some(active) = self.active.get(&id) else { return };
        let submitted = active.submitted.saturating_duration_since(self.begun);
        self.scheduler.enqueue(id, prepared, submitted);
    }

    fn expire(&mut self, now: Instant) {
        let late = self.active.iter().filter(|(_, a)| a.deadline.is_some_and(|d| d <= now));
        let late: Vec<RequestId> = late.map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.leave(id, EngineFinish::TimedOut));
    }

    /// One batch.
    fn step(&mut self) {
        let mut batch = mem::take(&mut self.batch);
        let runs = self.take_up(&mut batch);
        let started = runs.is_some();
        if let Some(plan) = runs.or_else(|| self.plan(&mut batch)) {
            if !started {
                let heads = plan.entries.iter().filter_map(|e| Some((e.head?, e.id, e.positions.end)));
                batch.draws = self.draws(batch.heads.len(), heads);
            }
            self.batch_heads.clone_from(&batch.heads);
            self.batch_draws.clone_from(&batch.draws);
            self.announce(&plan);
            self.dress(&plan, &mut batch);
            match self.forward(&plan, &batch, started) {
                Ok(outcome) => {
                    self.observe(&plan, &batch, &outcome);
                    self.answer(&plan, &outcome);
                }
                Err(kind) => self.broken(&plan, kind),
            }
        }
        self.batch = batch;
    }

    fn plan(&mut self, batch: &mut Batch) -> Option<Plan> {
        while let Some(id) = self.suspects.pop_front() {
            let now = self.now();
            if let Some(plan) = self.scheduler.next_alone(id, now, batch) {
                return Some(plan);
            }
        }
        let now = self.now();
        self.scheduler.next(now, batch)
    }

    /// How the device is to draw the tokens of `count` head rows, of which `heads` says whose they are and which
    /// positions the tokens will have; empty where it draws none.
    fn draws(
        &self,
        count: usize,
        heads: impl Iterator<Item = (usize, RequestId, usize)>,
    ) -> Vec<Option<Draw>> {
        if !self.runner.draws() {
            return Vec::new();
        }
        let mut draws = vec![None; count];
        for (head, id, position) in heads {
            draws[head] = self.active.get(&id).and_then(|active| active.draw(position));
        }
        if draws.iter().all(Option::is_none) {
            draws.clear();
        }
        draws
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Tells those whose first rows are about to run.
    fn announce(&mut self, plan: &Plan) {
        for entry in &plan.entries {
            let Some(active) = self.active.get_mut(&entry.id).filter(|a| !a.started) else { continue };
            active.started = true;
            active.usage.waited = active.submitted.elapsed();
            active.usage.cached_tokens = entry.positions.start;
            active.fed = entry.positions.start;
            let (prompt_tokens, cached_tokens) = (active.usage.prompt_tokens, entry.positions.start);
            self.stats.queue.observe(active.usage.waited);
            self.stats.prompt_tokens += prompt_tokens as u64;
            self.stats.cached_tokens += cached_tokens as u64;
            self.shared.gate().queued -= 1;
            self.tell(entry.id, EngineEvent::Started { prompt_tokens, cached_tokens });
        }
    }

    /// Runs the batch, unless it was started before; guides say meanwhile what comes next, where the device works on its
    /// own, and the step behind may be started too.
    fn forward(&mut self, plan: &Plan, batch: &Batch, started: bool) -> Result<Outcome, FailureKind> {
        let shape = batch.shape(self.runner.model().layers.len(), self.runner.tail(&batch.taps));
        let start = Instant::now();
        let begun = match started {
            true => Ok(()),
            false => guarded(|| self.runner.start(batch, &shape)).and_then(|r| r.map_err(device_failure)),
        };
        let mut device_time = start.elapsed();
        if begun.is_ok() {
            for (id, _) in plan.heads() {
                let asked = self.active.get_mut(&id).map_or(Ok(()), |a| a.ask_guide());
                asked.unwrap_or_else(|kind| self.leave(id, EngineFinish::Failed(kind)));
            }
            self.go_ahead(plan);
        }
        let start = Instant::now();
        let outcome =
            begun.and_then(|()| guarded(|| self.runner.collect()).and_then(|r| r.map_err(device_failure)));
        match &outcome {
            Ok(outcome) => self.tell_ahead(&outcome.argmax),
            Err(_) => self.drop_ahead(),
        }
        device_time += start.elapsed();
        self.stats.device_time += device_time;
        outcome
    }

    /// A pass failed: whoever was in it alone ends, several are tried one by one.
    fn broken(&mut self, plan: &Plan, kind: FailureKind) {
        self.stats.failed_passes += 1;
        self.scheduler.abandon(plan).expect("this plan is in flight");
        match plan.entries.as_slice() {
            [one] => self.leave(one.id, EngineFinish::Failed(kind)),
            several => self.suspects.extend(several.iter().map(|e| e.id)),
        }
    }

    /// Chooses a token for each head row and hands everything over.
    fn answer(&mut self, plan: &Plan, outcome: &Outcome) {
        let produced = self.choose(plan, outcome);
        let now = self.now();
        let events =
            self.scheduler.apply(plan, &produced, now).expect("a token for each head row of this plan");
        self.report_progress(plan);
        let now = Instant::now();
        for event in events {
            match event {
                SchedulerEvent::Token { id, .. } => self.hand_over(id, now),
                SchedulerEvent::Finished { id, reason } => {
                    let reason = match reason {
                        EndReason::Done(FinishReason::Stop(token)) => EngineFinish::Stop(token),
                        EndReason::Done(FinishReason::Length) => EngineFinish::Length,
                        EndReason::Done(FinishReason::ContextFull) => EngineFinish::ContextFull,
                        EndReason::Cancelled => EngineFinish::Cancelled,
                        EndReason::Failed { position } => {
                            EngineFinish::Failed(FailureKind::NonFinite { position })
                        }
                    };
                    self.leave(id, reason);
                }
            }
        }
    }

    fn report_progress(&mut self, plan: &Plan) {
        for entry in &plan.entries {
            let Some(active) = self.active.get_mut(&entry.id) else { continue };
            match active.tell_scores() {
                Ok(true) => {}
                Ok(false) => self.leave(entry.id, EngineFinish::Cancelled),
                Err(kind) => self.leave(entry.id, EngineFinish::Failed(kind)),
            }
            let Some(active) = self.active.get_mut(&entry.id) else { continue };
            let fed = entry.positions.end.min(active.usage.prompt_tokens);
            if fed > active.fed {
                active.fed = fed;
                self.tell(entry.id, EngineEvent::Progress { fed });
            }
        }
    }

    /// Gives the chosen token to the sink, and ends the request where its guide said so.
    fn hand_over(&mut self, id: RequestId, now: Instant) {
        let Some(active) = self.active.get_mut(&id) else { return };
        let chosen = active.chosen.take().expect("the scheduler was given this token");
        match active.token_at(now) {
            TokenTime::First(time) => self.stats.first_token.observe(time),
            TokenTime::After(time) => self.stats.inter_token.observe(time),
        }
        self.stats.answer_tokens += 1;
        if chosen.stop.is_none_or(|cause| cause.keep_token) {
            self.tell(id, EngineEvent::Token(chosen.sampled));
        }
        if let Some(cause) = chosen.stop {
            self.leave(id, EngineFinish::Guide(cause));
        }
    }

    fn tell(&mut self, id: RequestId, event: EngineEvent) {
        let Some(active) = self.active.get_mut(&id) else { return };
        match active.tell(event) {
            Ok(true) => {}
            Ok(false) => self.leave(id, EngineFinish::Cancelled),
            Err(kind) => self.leave(id, EngineFinish::Failed(kind)),
        }
    }

    /// Ends a request, wherever it stands; nothing happens to one that has ended.
    fn leave(&mut self, id: RequestId, reason: EngineFinish) {
        match reason {
            // What it left for others may be what failed.
            EngineFinish::Failed(FailureKind::NonFinite { position }) => self.scheduler.fail(id, position),
            _ => self.scheduler.cancel(id),
        };
        self.loading.remove(&id);
        if let Some(active) = self.active.remove(&id) {
            if let Some(place) = active.steer_place {
                self.steer_table.give_back(&mut self.runner, place);
            }
            self.end(*active, reason);
        }
    }

    fn end(&mut self, mut active: Active, reason: EngineFinish) {
        active.usage.total = active.submitted.elapsed();
        let ends = &mut self.stats.ends;
        let count = match &reason {
            EngineFinish::Stop(_) => &mut ends.stop,
            EngineFinish::Guide(_) => &mut ends.guide,
            EngineFinish::Length => &mut ends.length,
            EngineFinish::ContextFull => &mut ends.context_full,
            EngineFinish::Cancelled => &mut ends.cancelled,
            EngineFinish::TimedOut => &mut ends.timed_out,
            EngineFinish::Failed(_) => &mut ends.failed,
        };
        *count += 1;
        match &reason {
            EngineFinish::Failed(FailureKind::NonFinite { .. }) => self.stats.non_finite += 1,
            EngineFinish::Failed(FailureKind::Panicked(_)) => self.stats.panics += 1,
            EngineFinish::Failed(_) => {}
            _ => self.stats.whole.observe(active.usage.total),
        }
        if !active.started {
            self.shared.gate().queued -= 1;
        }
        let usage = active.usage;
        // A sink that panics on its last event, or that panicked before, can be told nothing more.
        let _ = active.tell(EngineEvent::Finished { reason, usage });
        self.ended += 1;
    }

    fn end_all(&mut self, reason: &EngineFinish) {
        let ids: Vec<RequestId> = self.active.keys().copied().collect();
        ids.into_iter().for_each(|id| self.leave(id, reason.clone()));
    }

    /// After a panic of the loop's own: nothing that it held can be relied on.
    fn start_afresh(&mut self, message: &str) {
        self.suspects.clear();
        self.loading.clear();
        self.drop_ahead();
        self.scheduler = scheduler(&self.runner, &self.options).expect("it was made with these sizes before");
        self.end_all(&EngineFinish::Failed(FailureKind::Panicked(message.to_owned())));
        self.publish();
    }

    fn publish(&mut self) {
        self.stats.scheduler = self.scheduler.stats();
        self.stats.steering_sets = self.steer_table.held();
        self.stats.store = self.store.as_ref().map(Store::stats);
        let pool = self.scheduler.pool();
        self.stats.pages = Group::ALL.map(|group| {
            let (total, available) = (pool.total(group), pool.available(group));
            PageUse { total, live: total - available, kept: pool.idle(group) }
        });
        self.shared.publish(&self.stats, mem::take(&mut self.ended));
    }
}

/// What a request fails by when the device failed on it.
fn device_failure(error: Error) -> FailureKind {
    match error {
        Error::Backend(lapidary_ops::Error::WorkerPanicked { message }) => FailureKind::Panicked(message),
        Error::Backend(error @ lapidary_ops::Error::OutOfMemory { .. }) => {
            FailureKind::OutOfMemory(error.to_string())
        }
        other => FailureKind::Device(other.to_string()),
    }
}

fn scheduler(runner: &Runner, options: &EngineOptions) -> Result<Scheduler> {
    let config = runner.model().config.clone();
    Scheduler::with_prefix(config, runner.plan(), options.scheduler, options.prefix.clone())
}
