//! The loop of the thread that owns the device: take commands, plan, run, choose tokens, hand them over.
//!
//! ```text
//! commands -> scheduler.next -> runner.start -> guides -> runner.collect -> tokens -> scheduler.apply -> sinks
//! ```
//!
//! What fails is kept to whom it belongs to. A guide, a sampler or a sink that fails or panics ends its request. A
//! pass that fails takes nobody with it at first: its requests run once more, each alone, and the one that fails
//! then ends. A panic in the loop itself ends every request there is; the scheduler starts afresh.

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use lapidary_ops::{Batch, Group, Outcome, PAGE_TOKENS, TailRows};
use sha2::{Digest, Sha256};

use crate::active::{Active, Chosen, Reads, TokenTime, guarded, message};
use crate::engine::{EngineOptions, Shared};
use crate::error::{Error, Result};
use crate::generate::FinishReason;
use crate::metrics::{EngineStats, PageUse};
use crate::prefix::{LoadedPages, PrefixOptions, Store};
use crate::request::{EngineEvent, EngineFinish, FailureKind};
use crate::runner::Runner;
use crate::scheduler::{EndReason, Plan, Prepared, Produced, RequestId, Scheduler, SchedulerEvent, Wanted};

/// Logits that one thread reads before another is worth starting.
const READ_ALONE: usize = 300_000;
/// Changes when stored pages of earlier versions must not be read any more.
const LAYOUT: &str = "lapidary pages 1";
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

/// What is to be made of one request's logits.
struct Job<'a> {
    id: RequestId,
    active: &'a mut Active,
    reads: Vec<Read>,
    failure: Option<FailureKind>,
}

/// A row of logits that is to be read.
struct Read {
    /// Among those that are lent.
    row: usize,
    /// Of the token that follows.
    position: usize,
    /// The token with the largest logit, for an answer; `None` where the prompt's own token is scored.
    best: Option<u32>,
}

impl Job<'_> {
    fn run(&mut self, logits: &[&[f32]]) {
        for Read { row, position, best } in mem::take(&mut self.reads) {
            if self.failure.is_some() {
                return;
            }
            match best {
                None => self.failure = self.active.score(logits[row], position).err(),
                Some(best) => self.note(|active| active.choose(Some(logits[row]), best, position)),
            }
        }
    }

    fn note(&mut self, choose: impl FnOnce(&mut Active) -> Result<Chosen, FailureKind>) {
        match choose(self.active) {
            Ok(chosen) => self.active.chosen = Some(chosen),
            Err(kind) => self.failure = Some(kind),
        }
    }
}

/// Runs all jobs; several threads share them when there is more to read than starting threads takes.
fn run_all(jobs: &mut [Job<'_>], logits: &[&[f32]]) {
    let work: usize = logits.iter().map(|row| row.len()).sum();
    let threads = (work / READ_ALONE).min(logits.len()).min(available_parallelism().map_or(1, usize::from));
    if threads < 2 {
        jobs.iter_mut().for_each(|job| job.run(logits));
        return;
    }
    // By number of rows, since one request may have many.
    jobs.sort_by_key(|job| std::cmp::Reverse(job.reads.len()));
    let next = Mutex::new(jobs.iter_mut());
    let work = || {
        while let Some(job) = { next.lock().unwrap_or_else(PoisonError::into_inner).next() } {
            job.run(logits);
        }
    };
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(work)));
        work();
    });
}

/// The thread's own.
pub(crate) struct Worker {
    runner: Runner,
    scheduler: Scheduler,
    options: EngineOptions,
    shared: Arc<Shared>,
    inbox: Receiver<Command>,
    active: HashMap<RequestId, Box<Active>>,
    store: Option<Store>,
    /// To hand to whoever reads stored pages.
    commands: Sender<Command>,
    /// Requests whose stored pages are being read.
    loading: HashMap<RequestId, Box<Prepared>>,
    /// Requests of a pass that failed, to be run alone.
    suspects: VecDeque<RequestId>,
    batch: Batch,
    /// Rows of the batch at hand whose logits are wanted.
    batch_heads: Vec<i32>,
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
            store,
            commands,
            loading: HashMap::new(),
            suspects: VecDeque::new(),
            batch: Batch::default(),
            batch_heads: Vec::new(),
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

    /// Queues a request, once what is stored of its beginning was read.
    fn take_in(&mut self, id: RequestId, prepared: Box<Prepared>) {
        if let Some(store) = &self.store
            && let Some(wanted) = self.scheduler.stored(&prepared, store)
        {
            let (commands, names) = (self.commands.clone(), wanted.pages.clone());
            store.load(names, move |pages| {
                // An engine that is gone has no use for them.
                let _ = commands.send(Command::Loaded { id, wanted, pages });
            });
            self.loading.insert(id, prepared);
            return;
        }
        self.queue(id, *prepared);
    }

    fn queue(&mut self, id: RequestId, prepared: Prepared) {
        let Some(active) = self.active.get(&id) else { return };
        let submitted = active.submitted.saturating_duration_since(self.begun);
        self.scheduler.enqueue(id, prepared, submitted);
    }

    /// Puts pages that were read where the request will find them.
    fn import(&mut self, prepared: &Prepared, wanted: &Wanted, pages: &LoadedPages) {
        let Some(import) = self.scheduler.import(prepared, wanted) else { return };
        let mut filled = true;
        for (group, pages) in [(Group::Sliding, &pages.sliding), (Group::Full, &pages.full)] {
            for (block, bytes) in pages {
                let page = import.pages.page(group, *block).expect("one for each that was wanted");
                filled &= self.runner.page_write(group, page as usize, bytes).is_ok();
            }
        }
        self.scheduler.keep_import(prepared, import, filled);
    }

    /// Stores what requests that have ended left.
    fn store_left(&mut self) {
        let Some(store) = &self.store else { return };
        for left in self.scheduler.take_left() {
            for &blocks in &left.snapshots {
                let full = (0..blocks).map(|block| (Group::Full, block));
                let first = self.scheduler.window_from(blocks).unwrap_or(blocks);
                let sliding = (first..blocks).map(|block| (Group::Sliding, block));
                for (group, block) in full.chain(sliding) {
                    let name = (group, left.keys[block]);
                    if store.has(name) {
                        continue;
                    }
                    // Given up for others already, it may be.
                    let Some(page) = self.scheduler.kept_page(&left, blocks, group, block) else { break };
                    let mut bytes = Vec::new();
                    if self.runner.page_read(group, page as usize, &mut bytes).is_ok() {
                        store.save(name, bytes);
                    }
                }
            }
        }
    }

    fn expire(&mut self, now: Instant) {
        let late = self.active.iter().filter(|(_, a)| a.deadline.is_some_and(|d| d <= now));
        let late: Vec<RequestId> = late.map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.leave(id, EngineFinish::TimedOut));
    }

    /// One batch.
    fn step(&mut self) {
        let mut batch = mem::take(&mut self.batch);
        if let Some(plan) = self.plan(&mut batch) {
            self.batch_heads.clone_from(&batch.heads);
            self.announce(&plan);
            match self.forward(&plan, &batch) {
                Ok(outcome) => self.answer(&plan, &outcome),
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

    /// Runs the batch; guides say meanwhile what comes next, where the device works on its own.
    fn forward(&mut self, plan: &Plan, batch: &Batch) -> Result<Outcome, FailureKind> {
        let shape = batch.shape(self.runner.model().layers.len(), TailRows::Heads);
        let failed = |error: Error| match error {
            Error::Backend(lapidary_ops::Error::WorkerPanicked { message }) => FailureKind::Panicked(message),
            other => FailureKind::Device(other.to_string()),
        };
        let start = Instant::now();
        let begun = guarded(|| self.runner.start(batch, &shape)).and_then(|r| r.map_err(failed));
        let mut device_time = start.elapsed();
        if begun.is_ok() {
            for (id, _) in plan.heads() {
                let asked = self.active.get_mut(&id).map_or(Ok(()), |a| a.ask_guide());
                asked.unwrap_or_else(|kind| self.leave(id, EngineFinish::Failed(kind)));
            }
        }
        let start = Instant::now();
        let outcome = begun.and_then(|()| guarded(|| self.runner.collect()).and_then(|r| r.map_err(failed)));
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

    /// Chooses tokens and reads scores, several requests at once where there is much to read.
    fn choose(&mut self, plan: &Plan, outcome: &Outcome) -> Vec<Produced> {
        let (mut rows, mut jobs) = (Vec::new(), Vec::new());
        let mut active: HashMap<RequestId, &mut Box<Active>> =
            self.active.iter_mut().map(|(id, active)| (*id, active)).collect();
        for entry in &plan.entries {
            // Ended since the batch was planned.
            let Some(active) = active.remove(&entry.id) else { continue };
            let mut job = Job { id: entry.id, active, reads: Vec::new(), failure: None };
            for head in entry.scores.clone() {
                let row = self.batch_heads[head] as usize - entry.rows.start;
                job.reads.push(Read {
                    row: rows.len(),
                    position: entry.positions.start + row + 1,
                    best: None,
                });
                rows.push(head);
            }
            if let Some(head) = entry.head {
                let position = entry.positions.end;
                match outcome.argmax.get(head).map(|&best| u32::try_from(best)) {
                    Some(Ok(best)) => match job.active.reads() {
                        Reads::Logits => {
                            job.reads.push(Read { row: rows.len(), position, best: Some(best) });
                            rows.push(head);
                        }
                        Reads::Nothing => job.note(|active| active.choose(None, best, position)),
                    },
                    _ => job.failure = Some(FailureKind::NonFinite { position: position - 1 }),
                }
            }
            jobs.push(job);
        }
        let lent = self.runner.lend_logits(&rows, &mut |logits| run_all(&mut jobs, logits));
        let mut failures = Vec::new();
        for job in jobs {
            // Reads that were lent have been taken.
            let lost = lent.as_ref().err().filter(|_| !job.reads.is_empty());
            let lost = lost.map(|error| FailureKind::Device(error.to_string()));
            failures.extend(job.failure.or(lost).map(|kind| (job.id, kind)));
        }
        for (id, kind) in failures {
            self.leave(id, EngineFinish::Failed(kind));
        }
        let token = |(id, _)| {
            let chosen = self.active.get(&id).and_then(|a| a.chosen.as_ref());
            chosen.map_or(Produced::Failed, |c| Produced::Token(c.sampled.token))
        };
        plan.heads().map(token).collect()
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
        self.scheduler = scheduler(&self.runner, &self.options).expect("it was made with these sizes before");
        self.end_all(&EngineFinish::Failed(FailureKind::Panicked(message.to_owned())));
        self.publish();
    }

    fn publish(&mut self) {
        self.stats.scheduler = self.scheduler.stats();
        self.stats.store = self.store.as_ref().map(Store::stats);
        let pool = self.scheduler.pool();
        self.stats.pages = Group::ALL.map(|group| {
            let (total, available) = (pool.total(group), pool.available(group));
            PageUse { total, live: total - available, kept: pool.idle(group) }
        });
        self.shared.publish(&self.stats, mem::take(&mut self.ended));
    }
}

fn scheduler(runner: &Runner, options: &EngineOptions) -> Result<Scheduler> {
    let config = runner.model().config.clone();
    Scheduler::with_prefix(config, runner.plan(), options.scheduler, options.prefix.clone())
}

/// The store that the options ask for.
fn open_store(runner: &mut Runner, options: &PrefixOptions) -> Result<Option<Store>> {
    let Some(dir) = options.dir.as_ref().filter(|_| options.enabled) else { return Ok(None) };
    // A device that cannot hand pages out says so here and not at every page.
    for group in Group::ALL {
        runner.page_read(group, 0, &mut Vec::new())?;
    }
    let (report, plan, config) = (runner.report(), runner.plan(), &runner.model().config);
    let layout = plan.groups.each_ref().map(|g| (g.layers.clone(), g.format, g.window));
    // All that keys and values, bit by bit, follow from beside the prompt.
    let origin = format!(
        "{LAYOUT} {PAGE_TOKENS} {:?} {} {} {} {} {} {layout:?}",
        dir.model, report.backend, report.level, report.mode, config.model_type, config.hidden
    );
    let identity = Sha256::digest(origin.as_bytes()).into();
    let page_bytes =
        plan.groups.each_ref().map(|g| (0..g.layers.len()).map(|layer| g.page_bytes(layer)).sum());
    Ok(Some(Store::open(dir, identity, page_bytes)?))
}
