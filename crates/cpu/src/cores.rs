//! Which core each worker is on, and how two that share one part.
//!
//! A system that wakes a worker may put it on the core of another while one is idle, since it looks where threads are and
//! not where they are about to be: a server's threads are awake for a moment just when a pass begins. Both workers then
//! take turns at every meeting, for the whole of a pass and often for several. Nobody but the workers knows that
//! they need a core each. So one that comes to run where another is, by what that one noted last, moves itself to
//! any other core that it may use. What a worker may use stays as it was, and it is not kept anywhere: where another
//! program has the other core, the [crowd](crate::crowd) decides. Only Linux is asked; elsewhere nothing happens.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A worker moves at most that often, so that workers for whom there are too few cores don't do so all the time.
const LEAST: Duration = Duration::from_millis(2);

/// The core of a worker that has not run yet.
const NOWHERE: usize = usize::MAX;

/// The cores that workers were on last.
#[derive(Debug)]
pub(crate) struct Cores(Vec<AtomicUsize>);

impl Cores {
    /// Of so many workers.
    pub fn new(workers: usize) -> Cores {
        Cores((0..workers).map(|_| AtomicUsize::new(NOWHERE)).collect())
    }

    /// Notes on which core this thread runs as `worker`.
    pub fn note(&self, worker: usize) -> usize {
        let core = current().unwrap_or(NOWHERE);
        // Others look at it seldom, and a line that nobody writes is everybody's.
        if self.0[worker].load(Ordering::Relaxed) != core {
            self.0[worker].store(core, Ordering::Relaxed);
        }
        core
    }

    /// Moves this thread, which runs as `worker`, when another of the first `workers` is where it is.
    pub fn part(&self, worker: usize, workers: usize) {
        let core = self.note(worker);
        let others = || self.0[..workers].iter().enumerate().filter(|(other, _)| *other != worker);
        let taken = || others().map(|(_, place)| place.load(Ordering::Relaxed));
        if core != NOWHERE && taken().any(|other| other == core) && may_move() {
            leave(taken());
            self.note(worker);
        }
    }
}

fn may_move() -> bool {
    thread_local! {
        static MOVED: std::cell::Cell<Option<Instant>> = const { std::cell::Cell::new(None) };
    }
    let now = Instant::now();
    let may = MOVED.get().is_none_or(|at| now - at >= LEAST);
    if may {
        MOVED.set(Some(now));
    }
    may
}

#[cfg(target_os = "linux")]
fn current() -> Option<usize> {
    // SAFETY: it takes nothing and gives a number.
    usize::try_from(unsafe { libc::sched_getcpu() }).ok()
}

/// Goes to any core that this thread may use and that is not `taken`, if there is one.
#[cfg(target_os = "linux")]
fn leave(taken: impl Iterator<Item = usize>) {
    const BYTES: usize = size_of::<libc::cpu_set_t>();
    // SAFETY: a set of cores is plain bits, none of them set here.
    let mut all: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours and as large as it is said to be; 0 is this thread.
    if unsafe { libc::sched_getaffinity(0, BYTES, &raw mut all) } != 0 {
        return;
    }
    let mut free = all;
    for core in taken.filter(|core| *core < 8 * BYTES) {
        // SAFETY: the set is ours and has that bit.
        unsafe { libc::CPU_CLR(core, &mut free) };
    }
    // SAFETY: as above. Being kept from the other cores for a moment is what moves a thread; a system that refuses leaves it.
    unsafe {
        if libc::CPU_COUNT(&free) > 0 && libc::sched_setaffinity(0, BYTES, &raw const free) == 0 {
            libc::sched_setaffinity(0, BYTES, &raw const all);
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn current() -> Option<usize> {
    None
}

#[cfg(not(target_os = "linux"))]
fn leave(_taken: impl Iterator<Item = usize>) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_worker_leaves_the_core_of_another_and_may_still_use_all() {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        if available < 2 {
            println!("skipped: one core");
            return;
        }
        std::thread::spawn(move || {
            let cores = Cores::new(2);
            // Between noting and comparing, the system may move the thread itself.
            let moved = (0..50).any(|_| {
                std::thread::sleep(LEAST);
                let here = cores.note(0);
                cores.part(1, 2);
                cores.0[1].load(Ordering::Relaxed) != here
            });
            assert!(moved);
            assert_eq!(std::thread::available_parallelism().map_or(1, usize::from), available);
        })
        .join()
        .expect("no assertion fails");
    }

    #[test]
    fn there_is_nowhere_to_go_where_all_cores_are_taken() {
        std::thread::spawn(|| {
            leave(0..8 * size_of::<libc::cpu_set_t>());
            assert!(current().is_some());
        })
        .join()
        .expect("no assertion fails");
    }
}
