//! Counts, sizes and times of an engine, as plain numbers for whoever shows them.

use std::time::Duration;

use lapidary_ops::GROUPS;

use crate::prefix::StoreStats;
use crate::scheduler::SchedulerStats;

/// A histogram over fixed bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    /// Upper bounds in seconds, inclusive and ascending; one more bucket holds what is above the last.
    pub bounds: &'static [f64],
    /// Observations by bucket, not cumulated; one more than bounds.
    pub counts: Vec<u64>,
    /// Sum of all observations in seconds.
    pub sum: f64,
}

/// Bounds for the time to a first token, and for whole requests, in seconds.
pub const LONG_BOUNDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
];

/// Bounds for the time between two tokens, in seconds.
pub const SHORT_BOUNDS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];

impl Histogram {
    /// Nothing observed.
    pub fn new(bounds: &'static [f64]) -> Histogram {
        Histogram { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Adds an observation.
    pub fn observe(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.counts[self.bounds.partition_point(|b| *b < seconds)] += 1;
        self.sum += seconds;
    }

    /// Observations so far.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// How many requests ended in which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct EndCounts {
    pub stop: u64,
    pub guide: u64,
    pub length: u64,
    pub context_full: u64,
    pub cancelled: u64,
    pub timed_out: u64,
    pub failed: u64,
}

/// Pages of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageUse {
    /// All that sequences can have.
    pub total: usize,
    /// Held by requests.
    pub live: usize,
    /// Held only by what was kept for later requests; given up when requests need them.
    pub kept: usize,
}

/// Everything that an engine counts. Counters start with the engine and never go back.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineStats {
    /// Requests that were submitted and have not ended.
    pub active: usize,
    /// Requests, rows and pre-emptions.
    pub scheduler: SchedulerStats,
    /// Pages by group: sliding, full.
    pub pages: [PageUse; GROUPS],
    /// Prompt tokens of requests that have started.
    pub prompt_tokens: u64,
    /// How many of them were not run.
    pub cached_tokens: u64,
    /// Tokens that were generated.
    pub answer_tokens: u64,
    /// Ends by kind.
    pub ends: EndCounts,
    /// Requests that ended because logits were not finite.
    pub non_finite: u64,
    /// Requests that ended because something panicked.
    pub panics: u64,
    /// Passes that the device could not finish.
    pub failed_passes: u64,
    /// Steering sets that the device holds for requests.
    pub steering_sets: usize,
    /// What is stored of earlier requests, where it is.
    pub store: Option<StoreStats>,
    /// Time in which the device ran passes.
    pub device_time: Duration,
    /// Time that the engine's thread spent on everything else while there was work.
    pub host_time: Duration,
    /// From submission to a request's first rows.
    pub queue: Histogram,
    /// From submission to a request's first token.
    pub first_token: Histogram,
    /// Between two tokens of a request.
    pub inter_token: Histogram,
    /// From submission to the end of requests that did not fail.
    pub whole: Histogram,
}

impl Default for EngineStats {
    fn default() -> EngineStats {
        EngineStats {
            active: 0,
            scheduler: SchedulerStats::default(),
            pages: [PageUse::default(); GROUPS],
            prompt_tokens: 0,
            cached_tokens: 0,
            answer_tokens: 0,
            ends: EndCounts::default(),
            non_finite: 0,
            panics: 0,
            failed_passes: 0,
            steering_sets: 0,
            store: None,
            device_time: Duration::ZERO,
            host_time: Duration::ZERO,
            queue: Histogram::new(LONG_BOUNDS),
            first_token: Histogram::new(LONG_BOUNDS),
            inter_token: Histogram::new(SHORT_BOUNDS),
            whole: Histogram::new(LONG_BOUNDS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_observation_on_a_bound_belongs_below_it_and_one_above_all_is_counted() {
        let mut h = Histogram::new(&[0.5, 2.0]);
        for ms in [0, 500, 501, 2000, 2001, 90_000] {
            h.observe(Duration::from_millis(ms));
        }
        assert_eq!(h.counts, [2, 2, 2]);
        assert_eq!(h.count(), 6);
        assert!((h.sum - 95.002).abs() < 1e-9, "{}", h.sum);
    }
}
