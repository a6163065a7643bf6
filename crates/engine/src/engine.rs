//! The engine as its callers see it: a handle to the thread that owns the device.
//!
//! [`Engine::submit`] checks a request on the caller's thread, so that a refusal comes back at once, and hands it
//! over through a channel. Everything that happens to it then goes to its [`Sink`](crate::Sink), on the engine's
//! thread. The thread itself is in `worker`.
//!
//! Invariants:
//! - A request that was taken ends exactly once, with the last of its events, whatever panics, fails or shuts down.
//! - A request's tokens do not depend on its company, on what ran before, or on pre-emption, provided the device's
//!   rows do not: random numbers are keyed by (seed, position).

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use lapidary_model::Config;
use lapidary_ops::{GROUPS, Group, SteerSet};

use crate::active::Active;
use crate::error::{Error, Result};
use crate::metrics::EngineStats;
use crate::pages::PagePool;
use crate::prefix::PrefixOptions;
use crate::request::{EngineRequest, ScoreRequest};
use crate::runner::Runner;
use crate::scheduler::{Prepared, RequestId, SchedulerOptions, Submission};
use crate::worker::{Command, Worker};

/// How an engine shares its device.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Sizes and bounds of batches and queues. `rows` and `head_rows` must not exceed the model's limits.
    pub scheduler: SchedulerOptions,
    /// What is kept of earlier requests.
    pub prefix: PrefixOptions,
    /// The pools hold that many sequences of the whole context. More requests than that run side by side while
    /// they are shorter.
    pub sequences: usize,
    /// Pages by group, page 0 included, in place of what `sequences` comes to.
    pub pages: Option<[usize; GROUPS]>,
}

impl EngineOptions {
    /// Options for a model on a runner: rows as its buffers allow, `context` positions, room for `sequences`.
    pub fn new(runner: &Runner, context: usize, sequences: usize) -> EngineOptions {
        let limits = runner.model().limits;
        let scheduler = SchedulerOptions {
            rows: limits.rows,
            head_rows: limits.head_rows,
            context,
            ..SchedulerOptions::default()
        };
        EngineOptions { scheduler, prefix: PrefixOptions::default(), sequences, pages: None }
    }
}

/// A cheap handle to an engine. Its thread ends when the last handle is dropped or [`Engine::shutdown`] ran;
/// requests that have not ended by then fail with [`FailureKind::ShuttingDown`](crate::FailureKind).
#[derive(Clone, Debug)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    commands: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_id: ThreadId,
}

/// What callers and the engine's thread both see.
#[derive(Debug)]
pub(crate) struct Shared {
    pub config: Config,
    pub options: SchedulerOptions,
    /// Whether prompts' blocks are named, since prefixes are kept.
    named: bool,
    /// Why the device steers no rows, when it doesn't.
    cannot_steer: Option<String>,
    gate: Mutex<Gate>,
    ended: Condvar,
    stats: Mutex<EngineStats>,
}

/// Who may come in.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    pub closed: bool,
    /// Requests that were taken and have not ended.
    pub active: usize,
    /// Those of them whose first rows have not been planned.
    pub queued: usize,
    last_id: u64,
}

impl Shared {
    pub fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds a request's edits against the model and the device.
    fn check_steering(&self, set: Option<&SteerSet>) -> Result<()> {
        let Some(set) = set.filter(|set| !set.edits.is_empty()) else { return Ok(()) };
        if let Some(reason) = &self.cannot_steer {
            return Err(Error::CannotSteer { reason: reason.clone() });
        }
        Ok(set.check(self.config.layers.len(), self.config.hidden)?)
    }

    /// Puts in the figures that [`Engine::stats`] gives, and lets those who wait for ends look again.
    pub fn publish(&self, stats: &EngineStats, ended: usize) {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner).clone_from(stats);
        if ended > 0 {
            self.gate().active -= ended;
            self.ended.notify_all();
        }
    }
}

impl Engine {
    /// Takes over a runner, sizes its pools and starts the thread.
    ///
    /// # Errors
    /// `TooLarge` for more rows than the model's buffers hold; what the scheduler finds wrong with the sizes; the
    /// device cannot hold the pools.
    pub fn start(mut runner: Runner, options: EngineOptions) -> Result<Engine> {
        let limits = runner.model().limits;
        for (what, found, limit) in [
            ("rows of a batch", options.scheduler.rows, limits.rows),
            ("head rows of a batch", options.scheduler.head_rows, limits.head_rows),
        ] {
            if found > limit {
                return Err(Error::TooLarge { what, found, limit });
            }
        }
        runner.resize(pages(&runner, &options)?)?;
        // A device that cannot steer says so here, so that a request is refused before it is queued.
        let cannot_steer =
            runner.steer_set(0, Some(&SteerSet::default())).err().map(|error| error.to_string());
        runner.steer_set(0, None)?;
        let (commands, inbox) = channel();
        let shared = Arc::new(Shared {
            config: runner.model().config.clone(),
            options: options.scheduler,
            named: options.prefix.enabled,
            cannot_steer,
            gate: Mutex::default(),
            ended: Condvar::new(),
            stats: Mutex::default(),
        });
        let worker = Worker::new(runner, options, shared.clone(), commands.clone(), inbox)?;
        let thread = std::thread::Builder::new().name("lapidary-engine".into());
        let thread = thread.spawn(move || worker.run()).map_err(|e| {
            Error::Backend(lapidary_ops::Error::Device(format!("starting the engine's thread: {e}")))
        })?;
        let thread_id = thread.thread().id();
        Ok(Engine {
            inner: Arc::new(Inner { shared, commands, thread: Mutex::new(Some(thread)), thread_id }),
        })
    }

    /// Hands a request over.
    ///
    /// # Errors
    /// `QueueFull`, `PromptTooLong`, `EmptyPrompt`, `Token`, `Sampling`, `Steering`, `CannotSteer` and the like; `ShuttingDown` after
    /// [`Engine::drain`] or [`Engine::shutdown`]. Nothing was queued then, and the sink is dropped without an event.
    pub fn submit(&self, mut request: EngineRequest) -> Result<Ticket> {
        let submitted = Instant::now();
        let shared = &self.inner.shared;
        let (max_tokens, priority) = (request.max_tokens, request.priority);
        let prompt = std::mem::take(&mut request.prompt);
        let score_from = request.prompt_scores.map(|scores| scores.from);
        let run_from = request.observer.as_ref().map(|observer| observer.first());
        shared.check_steering(request.steering.as_deref())?;
        let active = Active::new(&shared.config, &prompt, request, submitted)?;
        let (stop_ids, family) = (active.stop_ids().to_vec(), active.family());
        let submission = Submission { prompt, max_tokens, stop_ids, priority, score_from, family, run_from };
        self.hand_over(submission, active)
    }

    /// Has the probabilities of given tokens computed, in batches with whatever else runs; no row's logits outlive
    /// the batch.
    ///
    /// # Errors
    /// As [`Engine::submit`]; `Zero` for a first token of 0.
    pub fn score(&self, request: ScoreRequest) -> Result<Ticket> {
        let (submitted, shared) = (Instant::now(), &self.inner.shared);
        let (prompt, priority) = (request.prompt.clone(), request.priority);
        let score_from = Some(request.from);
        shared.check_steering(request.steering.as_deref())?;
        let active = Active::scoring(&shared.config, request, submitted)?;
        let family = active.family();
        let submission = Submission { prompt, priority, score_from, family, ..Submission::default() };
        self.hand_over(submission, active)
    }

    fn hand_over(&self, submission: Submission, active: Active) -> Result<Ticket> {
        let shared = &self.inner.shared;
        let prepared = Prepared::new(&shared.config, &shared.options, shared.named, submission)?;
        let mut gate = shared.gate();
        if gate.closed {
            return Err(Error::ShuttingDown);
        }
        let limit = shared.options.waiting;
        if gate.queued >= limit {
            return Err(Error::QueueFull { limit });
        }
        let id = RequestId(gate.last_id + 1);
        let command = Command::Submit { id, prepared: Box::new(prepared), active: Box::new(active) };
        // In the order of their numbers, since the gate is held.
        self.inner.commands.send(command).map_err(|_| Error::ShuttingDown)?;
        gate.last_id += 1;
        gate.active += 1;
        gate.queued += 1;
        Ok(Ticket { id, commands: self.inner.commands.clone() })
    }

    /// Figures as of the end of the last step.
    pub fn stats(&self) -> EngineStats {
        let mut stats = self.inner.shared.stats.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let gate = self.inner.shared.gate();
        stats.active = gate.active;
        // Requests that the thread has not looked at yet wait too.
        stats.scheduler.waiting = stats.scheduler.waiting.max(gate.queued);
        stats
    }

    /// Takes no more requests and waits until those that were taken have ended, `limit` long at most. Whether
    /// they all have; those that have not go on until [`Engine::shutdown`].
    pub fn drain(&self, limit: Duration) -> bool {
        let shared = &self.inner.shared;
        let mut gate = shared.gate();
        gate.closed = true;
        let (gate, _) = shared
            .ended
            .wait_timeout_while(gate, limit, |g| g.active > 0)
            .unwrap_or_else(PoisonError::into_inner);
        gate.active == 0
    }

    /// Ends the thread after the step that runs, and every request with it. Returns when it has ended, or at once
    /// when a sink calls this.
    pub fn shutdown(&self) {
        self.inner.shutdown();
    }

    /// What the engine was started with.
    pub fn options(&self) -> &SchedulerOptions {
        &self.inner.shared.options
    }

    /// The model's description.
    pub fn config(&self) -> &Config {
        &self.inner.shared.config
    }
}

impl Inner {
    fn shutdown(&self) {
        self.shared.gate().closed = true;
        // The thread may have ended already.
        let _ = self.commands.send(Command::Shutdown);
        if std::thread::current().id() == self.thread_id {
            return;
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It catches what panics inside, and there is nobody to tell of the rest.
            let _ = thread.join();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// A request that was taken. Dropping it changes nothing; the sink decides how long the request is wanted.
#[derive(Clone, Debug)]
pub struct Ticket {
    id: RequestId,
    commands: Sender<Command>,
}

impl Ticket {
    /// The request's number.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Ends the request after the step that runs, unless it has ended by then.
    pub fn cancel(&self) {
        // A thread that is gone has ended every request.
        let _ = self.commands.send(Command::Cancel(self.id));
    }
}

/// Pages for what the options ask for.
fn pages(runner: &Runner, options: &EngineOptions) -> Result<[usize; GROUPS]> {
    if let Some(pages) = options.pages {
        return Ok(pages);
    }
    if options.sequences == 0 {
        return Err(Error::Zero { what: "sequences" });
    }
    let (s, plan) = (&options.scheduler, runner.plan());
    let need = PagePool::new(plan, options.prefix.rollback(s.rollback)).need(s.context, s.rows);
    let mut pages = Group::ALL.map(|group| 1 + options.sequences.saturating_mul(need[group.index()]));
    // More than a sliding page for each full one is of no use.
    let most = pages[Group::Full.index()];
    let sliding = &mut pages[Group::Sliding.index()];
    *sliding = sliding.saturating_add(options.prefix.snapshot_pages(plan)?).min(most.max(*sliding));
    Ok(pages)
}
