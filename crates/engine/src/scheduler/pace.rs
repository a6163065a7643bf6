//! How many rows fit a time, learnt from the steps that ran.
//!
//! ```text
//! time = base + slope * rows
//! ```
//!
//! fitted by least squares in which older steps count less and less, so that it follows a context that grows.
//! Steps that took longer than it said raise a margin, which then wears off; a bound is kept with it, a mere wish
//! without, since on a shared machine a few slow steps would halve the others. A batch may be at most twice as long as
//! the longest seen, since the line says nothing about lengths that were never tried.

use std::time::Duration;

/// What a step counts for after each further one.
const MEMORY: f64 = 0.95;
/// The same for the margin.
const MARGIN_MEMORY: f64 = 0.9;
/// What a step of streams alone counts for beside those before it.
const STREAMS_MEMORY: f64 = 0.8;
/// Rows that are tried when no step was seen.
const FIRST_ROWS: usize = 32;

#[derive(Debug)]
pub(super) struct Pace {
    /// Sums over steps: 1, x, y, x * x, x * y, with x in rows and y in seconds.
    sums: [f64; 5],
    margin: f64,
    longest: usize,
    /// Rows and seconds of recent steps of streams alone.
    streams: Option<(f64, f64)>,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { sums: [0.0; 5], margin: 1.0, longest: FIRST_ROWS / 2, streams: None }
    }
}

impl Pace {
    /// A step of `rows` rows took `time`.
    pub fn observe(&mut self, rows: usize, time: Duration) {
        let (x, y) = (rows as f64, time.as_secs_f64());
        self.margin = 1.0 + (self.margin - 1.0) * MARGIN_MEMORY;
        if let Some((base, slope)) = self.line() {
            let said = base + slope * x;
            if said > 0.0 {
                // One step that the machine was taken away from says little about the next.
                self.margin = self.margin.max((y / said).min(4.0));
            }
        }
        for (sum, value) in self.sums.iter_mut().zip([1.0, x, y, x * x, x * y]) {
            *sum = *sum * MEMORY + value;
        }
        self.longest = self.longest.max(rows);
    }

    /// That step had rows of streams alone. Each of these has logits, which other rows have not, so the line through all
    /// steps says little about them.
    pub fn observe_streams(&mut self, rows: usize, time: Duration) {
        let (x, y) = (rows as f64, time.as_secs_f64());
        let mean = |old: f64, new: f64| old * STREAMS_MEMORY + new * (1.0 - STREAMS_MEMORY);
        self.streams = Some(self.streams.map_or((x, y), |(rows, time)| (mean(rows, x), mean(time, y))));
    }

    /// Time that a step of `rows` streams takes alone, as far as is known.
    pub fn streams_alone(&self, rows: usize) -> Duration {
        let Some((seen, time)) = self.streams else { return self.time_of(rows) };
        let slope = self.line().map_or(0.0, |(_, slope)| slope);
        Duration::from_secs_f64((time + slope * (rows as f64 - seen)).max(time / 2.0))
    }

    /// Rows of a batch that is done within `time`, even if it goes slowly.
    pub fn rows_surely_within(&self, time: Duration) -> usize {
        self.rows_within(time.div_f64(self.margin))
    }

    /// Time that a batch of `rows` rows takes, as far as is known.
    pub fn time_of(&self, rows: usize) -> Duration {
        let (base, slope) = self.line().unwrap_or_default();
        Duration::from_secs_f64(base + slope * rows as f64)
    }

    /// Rows of a batch that takes `time`.
    pub fn rows_within(&self, time: Duration) -> usize {
        let cap = 2 * self.longest;
        let Some((base, slope)) = self.line() else { return cap };
        let spare = time.as_secs_f64() - base;
        match spare >= slope * cap as f64 {
            true => cap,
            false => (spare / slope).max(0.0) as usize,
        }
    }

    /// Base and slope, neither negative; all slope while the steps were of one length.
    fn line(&self) -> Option<(f64, f64)> {
        let [n, x, y, xx, xy] = self.sums;
        if x <= 0.0 {
            return None;
        }
        let spread = n * xx - x * x;
        // Weighted mean square deviation below a hundredth of the squared mean: one length, as it were.
        if spread < 0.01 * x * x {
            return Some((0.0, y / x));
        }
        let slope = ((n * xy - x * y) / spread).max(0.0);
        match (y - slope * x) / n {
            base if base >= 0.0 => Some((base, slope)),
            _ => Some((0.0, y / x)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(value: f64) -> Duration {
        Duration::from_secs_f64(value / 1e3)
    }

    #[test]
    fn a_line_is_found_and_followed() {
        let mut pace = Pace::default();
        assert_eq!(pace.rows_within(ms(1.0)), FIRST_ROWS, "nothing was seen");
        for rows in [8, 40, 8, 200, 8, 120] {
            pace.observe(rows, ms(3.0 + 0.5 * rows as f64));
        }
        // Before the third step the line was a guess, which has raised the margin a little.
        let found = pace.rows_surely_within(ms(53.0));
        assert!((60..=100).contains(&found), "{found}");
        for rows in [8, 100].repeat(60) {
            pace.observe(rows, ms(3.0 + 0.5 * rows as f64));
        }
        let found = pace.rows_within(ms(53.0));
        assert!((99..=100).contains(&found), "{found}");
        for rows in [8, 100].repeat(60) {
            pace.observe(rows, ms(6.0 + 1.0 * rows as f64));
        }
        let found = pace.rows_within(ms(53.0));
        assert!((46..=47).contains(&found), "{found}");
    }

    #[test]
    fn one_slow_step_shortens_what_must_be_kept_and_hardly_what_is_wished() {
        let mut pace = Pace::default();
        for rows in [8, 100].repeat(60) {
            pace.observe(rows, ms(3.0 + 0.5 * rows as f64));
        }
        assert!((pace.time_of(40).as_secs_f64() * 1e3 - 23.0).abs() < 0.1);
        pace.observe(8, ms(21.0));
        let (surely, likely) = (pace.rows_surely_within(ms(53.0)), pace.rows_within(ms(53.0)));
        assert!(surely < 35, "{surely}");
        assert!((90..=102).contains(&likely), "{likely}");
    }

    #[test]
    fn a_small_budget_does_not_stay_small_because_it_was() {
        let mut pace = Pace::default();
        let mut rows = 1;
        for _ in 0..200 {
            pace.observe(rows, ms(20.0 + 0.1 * rows as f64));
            rows = pace.rows_within(ms(100.0)).max(1);
        }
        assert!((600..=800).contains(&rows), "{rows} of the 800 that fit");
    }

    #[test]
    fn steps_that_take_no_time_allow_twice_the_longest() {
        let mut pace = Pace::default();
        pace.observe(100, Duration::ZERO);
        pace.observe(7, Duration::ZERO);
        assert_eq!(pace.rows_within(ms(1.0)), 200);
        assert_eq!(Pace::default().rows_within(Duration::ZERO), FIRST_ROWS);
    }
}
