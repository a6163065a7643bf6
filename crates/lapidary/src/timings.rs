//! A profile as people and programs read it: a table, JSON, and a Chrome trace that Perfetto opens.

use std::fmt::Write;
use std::time::Duration;

use lapidary_ops::Phase;
use serde_json::{Value, json};

pub use lapidary_engine::profile::{Profile, StepClass, StepRecord};

/// A duration's spread over the steps of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// All steps together.
    pub total: Duration,
    /// Half of the steps take no longer.
    pub p50: Duration,
    /// Nine in ten.
    pub p90: Duration,
    /// 99 in a hundred.
    pub p99: Duration,
}

/// A phase of a class's passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PhaseRow {
    /// Which.
    pub phase: Phase,
    /// How often it was entered, over all steps.
    pub calls: u64,
    /// Its time a step.
    pub time: Spread,
}

/// All steps of one class.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassRow {
    /// Which.
    pub class: StepClass,
    /// Steps.
    pub steps: usize,
    /// Rows of all steps.
    pub rows: usize,
    /// Whole steps: the four parts below together.
    pub step: Spread,
    /// Host work before a step: sampling, planning, text.
    pub gap: Spread,
    /// Checks and upload.
    pub host: Spread,
    /// The passes, as the device measured them.
    pub device: Spread,
    /// Launching and waiting.
    pub wait: Spread,
    /// The phases of the passes, those that occur.
    pub phases: Vec<PhaseRow>,
}

/// What a profile says.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// By class, those that occur.
    pub classes: Vec<ClassRow>,
    /// The whole profile, measured for itself.
    pub total: Duration,
    /// After the last step.
    pub rest: Duration,
}

impl Report {
    /// Sums a profile up.
    pub fn new(profile: &Profile) -> Report {
        let class = |class: StepClass| {
            let steps: Vec<&StepRecord> = profile.steps.iter().filter(|s| s.class == class).collect();
            let of = |part: &dyn Fn(&StepRecord) -> Duration| spread(steps.iter().map(|s| part(s)).collect());
            let phase = |phase: Phase| {
                let calls = steps.iter().map(|s| u64::from(s.phases[phase.index()].0)).sum();
                (calls > 0).then(|| PhaseRow { phase, calls, time: of(&|s| s.phases[phase.index()].1) })
            };
            (!steps.is_empty()).then(|| ClassRow {
                class,
                steps: steps.len(),
                rows: steps.iter().map(|s| s.rows).sum(),
                step: of(&StepRecord::total),
                gap: of(&|s| s.gap),
                host: of(&|s| s.host),
                device: of(&|s| s.device),
                wait: of(&|s| s.wait),
                phases: Phase::ALL.into_iter().filter_map(phase).collect(),
            })
        };
        let classes = StepClass::ALL.into_iter().filter_map(class).collect();
        Report { classes, total: profile.total, rest: profile.rest }
    }

    /// The share of the whole that steps, phase by phase, and the rest after them do not account for; negative where
    /// they are more than it.
    pub fn unaccounted(&self) -> f64 {
        let phases = |c: &ClassRow| c.phases.iter().map(|p| p.time.total).sum::<Duration>();
        let step = |c: &ClassRow| c.gap.total + c.host.total + c.wait.total + phases(c);
        let sum: Duration = self.classes.iter().map(step).sum::<Duration>() + self.rest;
        1.0 - sum.as_secs_f64() / self.total.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// The report as a table.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |name: &str, calls: String, time: &Spread, whole: &Spread| {
            let share = 100.0 * time.total.as_secs_f64() / whole.total.as_secs_f64().max(f64::MIN_POSITIVE);
            writeln!(
                out,
                "  {name:<18} {calls:>8} {:>11} {share:>6.1} % {:>10} {:>10} {:>10}",
                milliseconds(time.total),
                milliseconds(time.p50),
                milliseconds(time.p90),
                milliseconds(time.p99),
            )
            .expect("a string takes all");
        };
        for c in &self.classes {
            let name = format!(
                "{}: {} steps of {:.1} rows",
                c.class.name(),
                c.steps,
                c.rows as f64 / c.steps as f64
            );
            line(&name, String::new(), &c.step, &c.step);
            for (name, part) in [("gap", &c.gap), ("host", &c.host), ("wait", &c.wait), ("device", &c.device)]
            {
                line(name, c.steps.to_string(), part, &c.step);
            }
            for p in &c.phases {
                line(&format!("  {}", p.phase.name()), p.calls.to_string(), &p.time, &c.step);
            }
        }
        let heading = format!(
            "  {:<18} {:>8} {:>11} {:>8} {:>10} {:>10} {:>10}\n",
            "milliseconds", "calls", "all", "share", "p50", "p90", "p99"
        );
        let end = format!(
            "  whole {} ms, not accounted for {:.2} %\n",
            milliseconds(self.total),
            100.0 * self.unaccounted()
        );
        heading + &out + &end
    }

    /// The report for programs, in seconds.
    pub fn json(&self) -> Value {
        let seconds = |s: &Spread| {
            let [total, p50, p90, p99] = [s.total, s.p50, s.p90, s.p99].map(|d| d.as_secs_f64());
            json!({"total": total, "p50": p50, "p90": p90, "p99": p99})
        };
        let class = |c: &ClassRow| {
            let phases: Vec<Value> = c
                .phases
                .iter()
                .map(|p| json!({"phase": p.phase.name(), "calls": p.calls, "seconds": seconds(&p.time)}))
                .collect();
            json!({
                "class": c.class.name(),
                "steps": c.steps,
                "rows": c.rows,
                "seconds": {
                    "step": seconds(&c.step),
                    "gap": seconds(&c.gap),
                    "host": seconds(&c.host),
                    "device": seconds(&c.device),
                    "wait": seconds(&c.wait),
                },
                "phases": phases,
            })
        };
        json!({
            "seconds": self.total.as_secs_f64(),
            "rest_seconds": self.rest.as_secs_f64(),
            "unaccounted": self.unaccounted(),
            "classes": self.classes.iter().map(class).collect::<Vec<_>>(),
        })
    }
}

/// The steps as a Chrome trace (the JSON object form, complete events, microseconds): one track of whole steps, one of
/// the host's parts, one of the device's phases. Phases are there when the profile kept spans.
pub fn chrome_trace(profile: &Profile) -> Value {
    const STEPS: u32 = 1;
    const HOST: u32 = 2;
    const DEVICE: u32 = 3;
    let micros = |d: Duration| d.as_nanos() as f64 / 1e3;
    let mut events: Vec<Value> = [(STEPS, "steps"), (HOST, "host"), (DEVICE, "device")]
        .into_iter()
        .map(|(tid, name)| {
            json!({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}})
        })
        .collect();
    events.insert(0, json!({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "lapidary"}}));
    let mut event =
        |tid: u32, name: &str, class: StepClass, start: Duration, length: Duration, args: Value| {
            events.push(json!({
                "ph": "X",
                "name": name,
                "cat": class.name(),
                "pid": 1,
                "tid": tid,
                "ts": micros(start),
                "dur": micros(length),
                "args": args,
            }));
        };
    for (i, s) in profile.steps.iter().enumerate() {
        let about = json!({"step": i, "rows": s.rows});
        let uploaded = s.start + s.host;
        // The device's clock tells lengths; its passes are drawn from the end of the upload on.
        let done = uploaded + s.device;
        event(STEPS, s.class.name(), s.class, s.start, s.host + s.device + s.wait, about);
        event(HOST, "gap", s.class, s.start - s.gap, s.gap, json!({}));
        event(HOST, "upload", s.class, s.start, s.host, json!({}));
        event(HOST, "wait", s.class, done, s.wait, json!({}));
        for span in &s.spans {
            event(DEVICE, span.phase.name(), s.class, uploaded + span.start, span.length, json!({}));
        }
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

fn spread(mut times: Vec<Duration>) -> Spread {
    times.sort_unstable();
    // The nearest rank: the smallest time that so many steps do not exceed.
    let at = |percent: usize| match times.len() {
        0 => Duration::ZERO,
        n => times[(n * percent).div_ceil(100).max(1) - 1],
    };
    Spread { total: times.iter().sum(), p50: at(50), p90: at(90), p99: at(99) }
}

fn milliseconds(d: Duration) -> String {
    format!("{:.3}", d.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let ms = Duration::from_millis;
        let s = spread((1..=200).rev().map(ms).collect());
        assert_eq!((s.p50, s.p90, s.p99, s.total), (ms(100), ms(180), ms(198), ms(20_100)));
        let one = spread(vec![ms(7)]);
        assert_eq!((one.p50, one.p99), (ms(7), ms(7)));
        assert_eq!(spread(Vec::new()), Spread::default());
    }
}
