//! Progress bars on stderr; where stderr is no terminal there are none.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Shorter work than this shows no bar.
const DELAY: Duration = Duration::from_millis(400);

/// A bar that appears once the work has taken a moment and vanishes with it.
#[derive(Debug)]
pub struct Bar {
    bar: Option<ProgressBar>,
    what: String,
    unit: Unit,
    start: std::time::Instant,
}

/// What a bar counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Tokens,
    Requests,
    Prompts,
}

impl Bar {
    /// A bar for `what`, not shown yet.
    pub fn new(what: impl Into<String>, unit: Unit) -> Bar {
        Bar { bar: None, what: what.into(), unit, start: std::time::Instant::now() }
    }

    /// Moves on.
    pub fn at(&mut self, done: u64, total: u64) {
        if self.bar.is_none() {
            if self.start.elapsed() < DELAY || done >= total {
                return;
            }
            let bar = ProgressBar::new(total);
            let template = match self.unit {
                Unit::Bytes => "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
                Unit::Tokens => "{msg} {wide_bar} {pos}/{len} tokens {per_sec} {eta}",
                Unit::Requests => "{msg} {wide_bar} {pos}/{len} requests {per_sec} {eta}",
                Unit::Prompts => "{msg} {wide_bar} {pos}/{len} {per_sec} {eta}",
            };
            bar.set_style(ProgressStyle::with_template(template).expect("the template is well-formed"));
            bar.set_message(self.what.clone());
            self.bar = Some(bar);
        }
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
