//! The team: a fixed set of workers that run the same function at once, all of them or, on a [crowded](Crowd) machine,
//! the first few.
//!
//! The caller of [`Team::run`] is worker 0. Between parts of a job workers meet at [`Sync::meet`]: they spin
//! for a bounded while, because the next part is microseconds away, and then sleep, because on a shared
//! machine the worker that they wait for may need the very core that they spin on. A worker that slept sees
//! to it that it has a [core](crate::cores) of its own. Behind a job a worker stays [awake](AWAKE) for the next, with its core
//! on offer: threads that hand on the last job's results have it meanwhile and are done when the next begins.
//!
//! A worker that panics poisons the meeting point; the others leave at their next meeting, and `run` reports the panic.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lapidary_ops::{Error, Result};

use crate::ahead::read_until;
use crate::cores::Cores;
use crate::crowd::{Crowd, waited_for_core};

/// Turns of the spin loop before a waiter sleeps, about 20 microseconds.
const SPINS: u32 = 2_000;

/// How long a worker stays awake for the next job, which is what a team burns at most: that much of a core's time for each
/// job and worker but the caller. An engine chooses tokens, plans and hands on in 0.1 to 0.3 ms.
const AWAKE: Duration = Duration::from_micros(300);

/// Turns of the spin loop between two offers of the core, about a microsecond.
const TURNS: u32 = 100;

/// Claims that one part of a job may use side by side.
pub(crate) const COUNTERS: usize = 2;

/// What a waiter waits for: a number that changes. Sleepers are woken only where there are some.
#[derive(Debug, Default)]
struct Signal {
    value: AtomicUsize,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Signal {
    fn advance(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        self.wake_all();
    }

    fn wake_all(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    /// Returns once `done` holds, and says whether it slept; `done` must become true before an `advance` or `wake_all`.
    fn wait_until(&self, done: impl Fn() -> bool) -> bool {
        let spun = spin(SPINS, &done);
        if !spun {
            self.sleep_until(done);
        }
        !spun
    }

    /// The same, awake for [`AWAKE`] before it sleeps. Says whether anybody else may have had the core.
    fn wait_awake_until(&self, done: impl Fn() -> bool) -> bool {
        if spin(SPINS, &done) {
            return false;
        }
        let from = Instant::now();
        while from.elapsed() < AWAKE {
            std::thread::yield_now();
            if spin(TURNS, &done) {
                return true;
            }
        }
        self.sleep_until(done);
        true
    }

    fn sleep_until(&self, done: impl Fn() -> bool) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !done() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Looks whether `done` holds, `turns` times at most.
fn spin(turns: u32, done: impl Fn() -> bool) -> bool {
    for _ in 0..turns {
        if done() {
            return true;
        }
        std::hint::spin_loop();
    }
    false
}

/// Where the workers of a job meet, and the counters that they claim work from.
#[derive(Debug)]
pub(crate) struct Sync {
    /// Of the job that runs.
    workers: AtomicUsize,
    arrived: AtomicUsize,
    meetings: Signal,
    poisoned: AtomicBool,
    claims: [AtomicUsize; COUNTERS],
    cores: Cores,
}

thread_local! {
    /// As which worker a thread runs.
    static WORKER: Cell<usize> = const { Cell::new(0) };
}

/// Payload of the unwinding by which workers leave a job that another worker's panic has ended.
struct Left;

impl Sync {
    fn new(workers: usize) -> Sync {
        Sync {
            workers: AtomicUsize::new(workers),
            arrived: AtomicUsize::new(0),
            meetings: Signal::default(),
            poisoned: AtomicBool::new(false),
            claims: Default::default(),
            cores: Cores::new(workers),
        }
    }

    /// Workers of the job that runs.
    pub fn workers(&self) -> usize {
        self.workers.load(Ordering::Relaxed)
    }

    /// Waits until every worker is here; the counters start from 0 afterwards. Everything that any worker
    /// wrote before is visible to all after. Who waits [reads on](read_until) in `ahead` meanwhile.
    pub fn meet(&self, ahead: &mut &[u8]) {
        let workers = self.workers();
        if workers == 1 {
            self.reset_claims();
            return;
        }
        let worker = WORKER.get();
        self.cores.note(worker);
        let before = self.meetings.value.load(Ordering::SeqCst);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == workers {
            self.arrived.store(0, Ordering::Relaxed);
            self.reset_claims();
            self.meetings.advance();
        } else {
            let met = || {
                self.meetings.value.load(Ordering::SeqCst) != before || self.poisoned.load(Ordering::SeqCst)
            };
            read_until(ahead, met);
            if self.meetings.wait_until(met) {
                self.cores.part(worker, workers);
            }
        }
        if self.poisoned.load(Ordering::SeqCst) {
            resume_unwind(Box::new(Left));
        }
    }

    /// Claims the next `chunk` of `total` items from `counter`, until all are taken.
    pub fn claim(&self, counter: usize, chunk: usize, total: usize) -> Option<Range<usize>> {
        let from = self.claims[counter].fetch_add(chunk, Ordering::Relaxed);
        (from < total).then(|| from..(from + chunk).min(total))
    }

    /// The share of `total` items that is `worker`'s without a claim, a multiple of `least` but for the last; of many items,
    /// all workers' are half.
    pub fn own_share(&self, worker: usize, least: usize, total: usize) -> Range<usize> {
        let share = self.share(least, total);
        (worker * share).min(total)..((worker + 1) * share).min(total)
    }

    /// Claims a share of what is left of `total` items behind everybody's [own](Sync::own_share), a multiple of `least` but for
    /// the last: large shares first, since each new place in memory has to be found, and small ones in the end, so
    /// that all are done together.
    pub fn claim_share(&self, counter: usize, least: usize, total: usize) -> Option<Range<usize>> {
        let owned = self.own_share(self.workers() - 1, least, total).end;
        let end = |from: usize| total.min(from + self.share(least, total - from));
        let next = |claimed: usize| (owned + claimed < total).then(|| end(owned + claimed) - owned);
        let claimed = self.claims[counter].fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        Some(owned + claimed..end(owned + claimed))
    }

    /// What one worker takes of `left` items at once.
    fn share(&self, least: usize, left: usize) -> usize {
        (left / (2 * self.workers())).max(1).next_multiple_of(least)
    }

    fn reset_claims(&self) {
        self.claims.iter().for_each(|c| c.store(0, Ordering::Relaxed));
    }

    fn poison(&self) {
        self.poisoned.store(true, Ordering::SeqCst);
        self.meetings.wake_all();
    }

    fn reset(&self, workers: usize) {
        self.workers.store(workers, Ordering::SeqCst);
        self.arrived.store(0, Ordering::SeqCst);
        self.poisoned.store(false, Ordering::SeqCst);
        self.reset_claims();
    }
}

/// A job, borrowed for the length of one `run`.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(usize) + std::marker::Sync));

// SAFETY: the function behind the pointer is `Sync`, and `run` keeps it alive until every worker is done.
unsafe impl Send for Job {}

struct Shared {
    sync: Sync,
    /// With the time at which it started.
    job: Mutex<Option<(Job, Instant)>>,
    /// By worker, the first left out: jobs that it was called to.
    started: Vec<Signal>,
    finished: Signal,
    /// Nanoseconds that workers waited for their cores.
    waited: AtomicU64,
    stop: AtomicBool,
    error: Mutex<Option<Error>>,
}

/// The workers.
pub(crate) struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Held for the length of a job: one at a time.
    turn: Mutex<Crowd>,
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Team({} workers)", self.workers())
    }
}

impl Team {
    /// Starts `workers - 1` threads beside the caller.
    pub fn new(workers: usize) -> std::io::Result<Team> {
        let shared = Arc::new(Shared {
            sync: Sync::new(workers),
            job: Mutex::new(None),
            started: (1..workers).map(|_| Signal::default()).collect(),
            finished: Signal::default(),
            waited: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            error: Mutex::new(None),
        });
        let mut team = Team { shared, threads: Vec::new(), turn: Mutex::new(Crowd::new(workers)) };
        for id in 1..workers {
            let shared = Arc::clone(&team.shared);
            let thread = std::thread::Builder::new()
                .name(format!("lapidary-cpu-{id}"))
                .spawn(move || serve(&shared, id))?;
            team.threads.push(thread);
        }
        Ok(team)
    }

    /// Workers of the team, whether they run or sit out.
    pub fn workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Where the workers meet.
    pub fn sync(&self) -> &Sync {
        &self.shared.sync
    }

    /// Runs `job(worker)` on the workers from 0 on, [`Sync::workers`] of them, and returns when all are done; the
    /// error of the first that failed. The team can run the next job after either.
    ///
    /// # Errors
    /// What a worker threw with [`fail`], `WorkerPanicked` for any other panic.
    pub fn run(&self, job: &(dyn Fn(usize) + std::marker::Sync)) -> Result<()> {
        let shared = &*self.shared;
        let mut crowd = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.workers() > 1 {
            // What the caller waited for before is none of the team's time.
            waited_for_core();
        }
        let start = Instant::now();
        let workers = crowd.workers(start);
        shared.sync.reset(workers);
        if workers > 1 {
            // SAFETY: only the lifetime changes; the wait below ends before `job` does, and workers touch the
            // job only before they report that they are done.
            let job: &'static (dyn Fn(usize) + std::marker::Sync) = unsafe { std::mem::transmute(job) };
            *shared.job.lock().unwrap_or_else(PoisonError::into_inner) = Some((Job(job), start));
            let done = shared.finished.value.load(Ordering::SeqCst) + workers - 1;
            // The others go by where the caller is.
            shared.sync.cores.note(0);
            shared.started[..workers - 1].iter().for_each(Signal::advance);
            part(shared, job, 0);
            shared.finished.wait_until(|| shared.finished.value.load(Ordering::SeqCst) == done);
        } else {
            part(shared, job, 0);
        }
        if self.workers() > 1 {
            let waited = Duration::from_nanos(shared.waited.swap(0, Ordering::Relaxed)) + waited_for_core();
            let now = Instant::now();
            crowd.record(now, now - start, waited);
        }
        match shared.error.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.started.iter().for_each(Signal::advance);
        for thread in self.threads.drain(..) {
            // A worker catches every panic of its jobs, so there is nothing to learn from the result.
            let _ = thread.join();
        }
    }
}

/// What a worker's thread does for its whole life.
fn serve(shared: &Shared, id: usize) {
    let started = &shared.started[id - 1];
    let mut seen = 0;
    loop {
        let away = started.wait_awake_until(|| started.value.load(Ordering::SeqCst) != seen);
        seen += 1;
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        let job = *shared.job.lock().unwrap_or_else(PoisonError::into_inner);
        let mut waited = Duration::ZERO;
        if let Some((job, start)) = job {
            if away {
                // What others had of the core before the job started took nothing from it; a worker that is late does.
                waited = waited_for_core().min(start.elapsed());
            }
            // SAFETY: `run` keeps the function alive until this worker has reported below.
            part(shared, unsafe { &*job.0 }, id);
        }
        waited += waited_for_core();
        shared.waited.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
        shared.finished.advance();
    }
}

/// One worker's part of a job.
fn part(shared: &Shared, job: &(dyn Fn(usize) + std::marker::Sync), id: usize) {
    WORKER.set(id);
    if id > 0 {
        shared.sync.cores.part(id, shared.sync.workers());
    }
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(id))) {
        if !payload.is::<Left>() {
            let mut first = shared.error.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert_with(|| error_of(payload));
        }
        shared.sync.poison();
    }
}

/// Ends the job for all workers, from inside it, with an error.
pub(crate) fn fail(error: Error) -> ! {
    // Unwinding like this prints nothing: whoever asked for the job is told.
    resume_unwind(Box::new(error))
}

fn error_of(payload: Box<dyn Any + Send>) -> Error {
    match payload.downcast::<Error>() {
        Ok(error) => *error,
        Err(payload) => Error::WorkerPanicked { message: message_of(&*payload) },
    }
}

fn message_of(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_string()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "no message".to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_claimed_once_and_meetings_order_the_parts() {
        for workers in 1..=4 {
            let team = Team::new(workers).expect("threads start");
            for _ in 0..200 {
                let taken: Vec<AtomicUsize> = (0..37).map(|_| AtomicUsize::new(0)).collect();
                let sync = Arc::clone(&team.shared);
                team.run(&|id| {
                    for _ in 0..3 {
                        while let Some(range) = sync.sync.claim(0, 5, taken.len()) {
                            for i in range {
                                taken[i].fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        // Of few items, the last workers own none.
                        for total in [taken.len(), 9, 1] {
                            let own = Some(sync.sync.own_share(id, 4, total));
                            let shares = std::iter::from_fn(|| sync.sync.claim_share(1, 4, total));
                            for range in own.into_iter().chain(shares) {
                                assert!(range.start % 4 == 0 || range.is_empty());
                                for i in range {
                                    taken[i].fetch_add(1, Ordering::Relaxed);
                                }
                            }
                            sync.sync.meet(&mut vec![0; id << 12].as_slice());
                        }
                    }
                    for (i, taken) in taken.iter().enumerate() {
                        let times = 6 + 3 * (usize::from(i < 9) + usize::from(i < 1));
                        assert_eq!(taken.load(Ordering::Relaxed), times, "item {i}");
                    }
                })
                .expect("no worker panics");
            }
        }
    }

    #[test]
    fn a_worker_stays_awake_for_a_job_that_follows_and_sleeps_when_none_does() {
        let team = Team::new(2).expect("threads start");
        let asleep = || team.shared.started[0].sleepers.load(Ordering::SeqCst) > 0;
        // A worker that another program keeps from its core is late, and sleeps.
        let awake = (0..50).any(|_| {
            let followed = (0..20).filter(|_| {
                team.run(&|_| {}).expect("nothing fails");
                let from = Instant::now();
                while from.elapsed() < AWAKE / 2 {
                    std::hint::spin_loop();
                }
                !asleep()
            });
            followed.count() >= 15
        });
        assert!(awake, "it slept between jobs that followed each other");
        let from = Instant::now();
        while !asleep() {
            assert!(from.elapsed() < Duration::from_secs(20), "it never slept");
            std::thread::sleep(Duration::from_millis(1));
        }
        team.run(&|_| {}).expect("it wakes");
    }

    #[test]
    fn a_panic_ends_the_job_for_all_and_the_team_goes_on() {
        // On a busy machine a worker may sit a job out, and cannot fail then.
        let failure = |team: &Team, job: &(dyn Fn(usize) + std::marker::Sync)| {
            let from = Instant::now();
            loop {
                match team.run(job) {
                    Err(error) => return error,
                    Ok(()) => assert!(from.elapsed() < Duration::from_secs(20), "nobody reported a failure"),
                }
            }
        };
        for workers in 1..=3 {
            let team = Team::new(workers).expect("threads start");
            for victim in 0..workers {
                let shared = Arc::clone(&team.shared);
                let error = failure(&team, &|id| {
                    shared.sync.meet(&mut [].as_slice());
                    assert!(id != victim, "worker {victim} fails");
                    shared.sync.meet(&mut [].as_slice());
                });
                assert!(error.to_string().contains(&format!("worker {victim} fails")), "{error}");
                let shared = Arc::clone(&team.shared);
                let error = failure(&team, &|id| {
                    if id == victim {
                        fail(Error::OutOfMemory { what: "a block".into(), needed: 3, available: 0 });
                    }
                    shared.sync.meet(&mut [].as_slice());
                });
                assert!(matches!(error, Error::OutOfMemory { needed: 3, .. }), "{error}");
                let shared = Arc::clone(&team.shared);
                team.run(&|_| shared.sync.meet(&mut [].as_slice())).expect("the next job runs");
            }
        }
    }
}
