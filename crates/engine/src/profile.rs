//! Where the time of steps goes: what a [`Runner`](crate::Runner) notes of each while a profile is on.
//!
//! A step is everything from the end of the step before to its own end, in four parts that follow each other: the
//! *gap* (whatever the host did in between: sampling, planning, text), *host* (checks and upload), *device* (the
//! pass itself, as the device measured it), and *wait* (launching it and waiting for its end). The parts are measured,
//! the total of all steps is measured for itself, and reports hold the one against the other.

use std::time::{Duration, Instant};

use lapidary_ops::{Batch, PassTiming, Phase, PhaseSpan};

/// What a batch was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StepClass {
    /// Every sequence has several rows.
    Prefill,
    /// Every sequence has one row.
    Decode,
    /// Both.
    Mixed,
}

impl StepClass {
    /// Every class.
    pub const ALL: [StepClass; 3] = [StepClass::Prefill, StepClass::Decode, StepClass::Mixed];

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            StepClass::Prefill => "prefill",
            StepClass::Decode => "decode",
            StepClass::Mixed => "mixed",
        }
    }

    /// The class of a batch.
    pub fn of(batch: &Batch) -> StepClass {
        let single = batch.spans.iter().filter(|s| s.rows == 1).count();
        match single {
            0 => StepClass::Prefill,
            n if n == batch.spans.len() => StepClass::Decode,
            _ => StepClass::Mixed,
        }
    }
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepRecord {
    /// What it was for.
    pub class: StepClass,
    /// Rows of its batch.
    pub rows: usize,
    /// When its gap ended and the runner began, from the start of the profile.
    pub start: Duration,
    /// Time since the step before ended.
    pub gap: Duration,
    /// Checks and upload.
    pub host: Duration,
    /// The pass.
    pub device: Duration,
    /// Launch and wait, the pass itself not counted.
    pub wait: Duration,
    /// By [`Phase::index`]: calls and their time.
    pub phases: [(u32, Duration); Phase::ALL.len()],
    /// The pass in detail, where the profile keeps it.
    pub spans: Vec<PhaseSpan>,
}

impl StepRecord {
    /// All four parts.
    pub fn total(&self) -> Duration {
        self.gap + self.host + self.device + self.wait
    }
}

/// The steps between [`Runner::start_profile`](crate::Runner::start_profile) and
/// [`take_profile`](crate::Runner::take_profile).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// In order.
    pub steps: Vec<StepRecord>,
    /// From the start of the profile to its end, measured for itself.
    pub total: Duration,
    /// From the end of the last step to the end of the profile.
    pub rest: Duration,
}

/// A profile in the making.
#[derive(Debug)]
pub(crate) struct Profiler {
    begun: Instant,
    last_end: Instant,
    keep_spans: bool,
    /// The step under way: class, rows, when the runner began, when its batch was uploaded.
    pending: Option<(StepClass, usize, Instant, Instant)>,
    steps: Vec<StepRecord>,
}

impl Profiler {
    pub fn new(keep_spans: bool) -> Profiler {
        let begun = Instant::now();
        Profiler { begun, last_end: begun, keep_spans, pending: None, steps: Vec::new() }
    }

    /// A step began at `start`, and its batch has just been uploaded.
    pub fn begin(&mut self, batch: &Batch, start: Instant) {
        self.pending = Some((StepClass::of(batch), batch.tokens.len(), start, Instant::now()));
    }

    /// The step has just ended.
    pub fn end(&mut self, timing: Option<&PassTiming>) {
        let Some((class, rows, start, uploaded)) = self.pending.take() else { return };
        let end = Instant::now();
        let timing = timing.cloned().unwrap_or_default();
        let mut phases = [(0, Duration::ZERO); Phase::ALL.len()];
        for span in &timing.spans {
            let (calls, time) = &mut phases[span.phase.index()];
            *calls += 1;
            *time += span.length;
        }
        self.steps.push(StepRecord {
            class,
            rows,
            start: start - self.begun,
            gap: start - self.last_end,
            host: uploaded - start,
            device: timing.device,
            wait: (end - uploaded).saturating_sub(timing.device),
            phases,
            spans: if self.keep_spans { timing.spans } else { Vec::new() },
        });
        self.last_end = end;
    }

    pub fn finish(self) -> Profile {
        let end = Instant::now();
        Profile { steps: self.steps, total: end - self.begun, rest: end - self.last_end }
    }
}
