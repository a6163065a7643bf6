//! Where the time of a pass goes, as a device saw it.

use std::time::Duration;

use crate::ops::Phase;

/// A stretch of a pass between two [marks](crate::Ops::mark).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseSpan {
    /// What it belongs to.
    pub phase: Phase,
    /// Time from the start of the pass.
    pub start: Duration,
    /// Its length.
    pub length: Duration,
}

/// The times of one pass, handed over in [`Outcome::timing`](crate::Outcome::timing) once
/// [`Backend::timings`](crate::Backend::timings) asked for them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassTiming {
    /// In order of their start. On one lane they follow each other without holes, so that their lengths add up to
    /// `device`.
    pub spans: Vec<PhaseSpan>,
    /// From the first verb to the end of the last.
    pub device: Duration,
}

impl PassTiming {
    /// The spans between marks, each given with its time from the start of a pass that took `device`. What comes
    /// before the first mark counts to it.
    pub fn from_marks(marks: &[(Phase, Duration)], device: Duration) -> PassTiming {
        let mut spans = Vec::with_capacity(marks.len());
        for (i, &(phase, at)) in marks.iter().enumerate() {
            let start = if i == 0 { Duration::ZERO } else { at };
            let end = marks.get(i + 1).map_or(device, |next| next.1);
            spans.push(PhaseSpan { phase, start, length: end.saturating_sub(start) });
        }
        PassTiming { spans, device }
    }
}

impl Phase {
    /// Every phase, in the order of a pass.
    pub const ALL: [Phase; 10] = [
        Phase::Embed,
        Phase::PerLayerInputs,
        Phase::Qkv,
        Phase::Attention,
        Phase::AttnOut,
        Phase::Mlp,
        Phase::Router,
        Phase::Experts,
        Phase::PerLayer,
        Phase::Head,
    ];

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Embed => "embed",
            Phase::PerLayerInputs => "per-layer inputs",
            Phase::Qkv => "qkv",
            Phase::Attention => "attention",
            Phase::AttnOut => "attention out",
            Phase::Mlp => "mlp",
            Phase::Router => "router",
            Phase::Experts => "experts",
            Phase::PerLayer => "per-layer branch",
            Phase::Head => "head",
        }
    }

    /// Index into arrays by phase, the place in [`Phase::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }
}
