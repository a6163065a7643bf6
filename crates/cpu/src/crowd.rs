//! How many workers run where other programs want the cores too.
//!
//! Workers meet many times in a pass. Where one of them waits for its core, all others wait with it, so a team that
//! shares a core can be slower than a smaller one that does not. Linux counts for each thread how long it was ready
//! to run and did not; when a team of n has lost more than a share of `0.7 / n` of its time to such waits, twice in a
//! row, one worker sits out. Once is no reason: on a machine that is idle otherwise the system's own threads take a core for
//! some milliseconds now and then, and a worker that sits out for that is missing for much longer. After a while it is
//! tried again, the later the more often that has failed. Elsewhere nothing is known, and all workers always run. How many
//! do makes no difference to any result.

use std::time::{Duration, Instant};

/// Waits are summed over at least this much time before anything is concluded.
const LEAST: Duration = Duration::from_millis(30);
/// How long a worker sits out, first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));
/// A team of n is too large if it loses more than this share of its time, divided by n.
const LOST: f64 = 0.7;

/// Decides how many workers the next job has.
#[derive(Debug)]
pub(crate) struct Crowd {
    most: usize,
    active: usize,
    /// Since the last conclusion: time that jobs took, and time that workers waited for cores meanwhile.
    took: Duration,
    waited: Duration,
    /// Whether the last conclusion was that the team is too large.
    suspected: bool,
    /// When one more worker is tried, and after which pause the next time if it fails.
    retry: Option<Instant>,
    pause: Duration,
}

impl Crowd {
    /// A team of `most` workers, all of them active.
    pub fn new(most: usize) -> Crowd {
        Crowd {
            most,
            active: most,
            took: Duration::ZERO,
            waited: Duration::ZERO,
            suspected: false,
            retry: None,
            pause: PAUSE.0,
        }
    }

    /// Workers of a job that starts now.
    pub fn workers(&mut self, now: Instant) -> usize {
        if self.active < self.most && self.retry.is_some_and(|at| now >= at) {
            self.active += 1;
            self.retry = None;
            self.suspected = false;
            self.forget();
        }
        self.active
    }

    /// Takes note of a job that ended at `now`: how long it took, and how long its workers waited for cores.
    pub fn record(&mut self, now: Instant, took: Duration, waited: Duration) {
        self.took += took;
        self.waited += waited;
        if self.took < LEAST {
            return;
        }
        let lost = self.waited.as_secs_f64() / self.took.as_secs_f64();
        self.forget();
        let suspected_before = self.suspected;
        self.suspected = self.active > 1 && lost * self.active as f64 > LOST;
        if self.suspected && !suspected_before {
            // It may have been a passer-by.
        } else if self.suspected {
            self.suspected = false;
            self.active -= 1;
            self.retry = Some(now + self.pause);
            self.pause = (2 * self.pause).min(PAUSE.1);
        } else if self.retry.is_none() {
            // The last one to join may stay, and the next may try.
            self.pause = PAUSE.0;
            self.retry = (self.active < self.most).then_some(now);
        }
    }

    fn forget(&mut self) {
        (self.took, self.waited) = (Duration::ZERO, Duration::ZERO);
    }
}

/// Time that this thread has been ready to run without running, since the last call from this thread; zero where the
/// system does not tell.
#[cfg(target_os = "linux")]
pub(crate) fn waited_for_core() -> Duration {
    use std::cell::RefCell;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    thread_local! {
        static SEEN: RefCell<(Option<File>, u64)> = RefCell::new((File::open("/proc/thread-self/schedstat").ok(), u64::MAX));
    }
    SEEN.with_borrow_mut(|(file, seen)| {
        let mut text = [0; 96];
        let length = file.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        // Nanoseconds on a core, nanoseconds ready to run, number of times on a core.
        let field =
            std::str::from_utf8(&text[..length]).ok().and_then(|text| text.split(' ').nth(1)?.parse().ok());
        let total: u64 = field.unwrap_or(0);
        let waited = total.saturating_sub(*seen);
        *seen = total;
        Duration::from_nanos(waited)
    })
}

/// As above.
#[cfg(not(target_os = "linux"))]
pub(crate) fn waited_for_core() -> Duration {
    Duration::ZERO
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs jobs of 10 ms for `millis` and returns how many of them each number of workers had.
    fn run(crowd: &mut Crowd, now: &mut Instant, millis: u64, lost: impl Fn(usize) -> f64) -> Vec<usize> {
        let job = Duration::from_millis(10);
        let mut jobs = vec![0; crowd.most + 1];
        for _ in 0..millis / 10 {
            let workers = crowd.workers(*now);
            *now += job;
            crowd.record(*now, job, job.mul_f64(lost(workers)));
            jobs[workers] += 1;
        }
        jobs
    }

    #[test]
    fn workers_sit_out_while_cores_are_busy_and_come_back() {
        let mut now = Instant::now();
        let mut crowd = Crowd::new(2);
        assert_eq!(run(&mut crowd, &mut now, 1_000, |_| 0.1), [0, 0, 100], "all run on a quiet machine");
        let crowded = |workers: usize| if workers == 2 { 0.5 } else { 0.0 };
        let jobs = run(&mut crowd, &mut now, 20_000, crowded);
        assert!(jobs[1] > 1_900 && jobs[2] > 10, "{jobs:?}");
        let jobs = run(&mut crowd, &mut now, 8_000, |_| 0.0);
        assert!(jobs[2] > 390, "{jobs:?}");
        assert_eq!(run(&mut crowd, &mut now, 1_000, |_| 0.0), [0, 0, 100]);
    }

    #[test]
    fn a_core_that_is_taken_for_a_moment_sends_nobody_out() {
        let mut now = Instant::now();
        let mut crowd = Crowd::new(2);
        for _ in 0..50 {
            // Half of the time that is looked at, and all is well in the next.
            run(&mut crowd, &mut now, 30, |_| 0.5);
            assert_eq!(run(&mut crowd, &mut now, 30, |_| 0.0), [0, 0, 3]);
        }
        run(&mut crowd, &mut now, 60, |_| 0.5);
        assert_eq!(run(&mut crowd, &mut now, 30, |_| 0.0), [0, 3, 0]);
    }

    #[test]
    fn as_many_sit_out_as_cores_are_taken() {
        let mut now = Instant::now();
        let mut crowd = Crowd::new(8);
        let three_taken = |workers: usize| 0.4 * workers.saturating_sub(5) as f64;
        let jobs = run(&mut crowd, &mut now, 20_000, three_taken);
        assert!(jobs[5] > 1_900 && jobs[..5].iter().all(|&n| n == 0), "{jobs:?}");
        run(&mut crowd, &mut now, 10_000, |_| 0.0);
        assert_eq!(run(&mut crowd, &mut now, 1_000, |_| 0.0)[8], 100);
    }

    #[test]
    fn the_last_worker_stays() {
        let mut now = Instant::now();
        let mut crowd = Crowd::new(3);
        let jobs = run(&mut crowd, &mut now, 10_000, |workers| workers as f64);
        assert!(jobs[0] == 0 && jobs[1] > 900, "{jobs:?}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn waiting_is_counted_from_the_second_call_on() {
        assert_eq!(waited_for_core(), Duration::ZERO);
        assert!(waited_for_core() < Duration::from_secs(5));
    }
}
