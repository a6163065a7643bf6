//! Whether this machine can run a model, finding by finding: the host, the kernels, the files, the memory, and passes
//! that are really run.

use std::fmt;

use lapidary_engine::{Prompt, Stepper};
use lapidary_formats::{Format, validate};
use lapidary_model::Config;
use lapidary_ops::DeviceReport;
use lapidary_weights::{Checkpoint, ExpertPart, LayerRole, Role};

use crate::host;
use crate::plan::MemoryPlan;

/// How a finding is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Ok,
    /// It works, and something costs speed or deserves a look.
    Warn,
    /// It does not work.
    Fail,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Level::Ok => "OK",
            Level::Warn => "WARN",
            Level::Fail => "FAIL",
        })
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The result.
    pub level: Level,
    /// What was looked at, such as "memory".
    pub what: &'static str,
    /// What was seen, with numbers, and what to do where it is not right.
    pub detail: String,
}

impl Finding {
    /// A finding.
    pub fn new(level: Level, what: &'static str, detail: impl Into<String>) -> Finding {
        Finding { level, what, detail: detail.into() }
    }

    /// A failure with the error's words.
    pub fn failed(what: &'static str, error: &dyn fmt::Display) -> Finding {
        Finding::new(Level::Fail, what, error.to_string())
    }
}

/// System, cores and memory.
pub fn host() -> Vec<Finding> {
    let system = format!("{} on {}", std::env::consts::OS, std::env::consts::ARCH);
    let usable = host::available_cores();
    let cores = match host::machine_cores() {
        Some(all) if all > usable => {
            format!("{usable} of {all} usable: affinity or a CPU quota keeps the others from this process")
        }
        _ => format!("{usable} usable"),
    };
    let memory = host::memory();
    let (level, detail) = match (memory.total, memory.available) {
        (Some(total), Some(free)) => (Level::Ok, format!("{} available of {}", size(free), size(total))),
        _ => (Level::Warn, "the system does not tell how much there is".to_string()),
    };
    vec![
        Finding::new(Level::Ok, "host", system),
        Finding::new(Level::Ok, "cores", cores),
        Finding::new(level, "memory", detail),
    ]
}

/// The device, its level, and the kernel of each of `formats`.
pub fn device(report: &DeviceReport, formats: &[Format]) -> Vec<Finding> {
    let DeviceReport { backend, device, level, units, mode, .. } = report;
    let mut findings = vec![Finding::new(
        Level::Ok,
        "device",
        format!("{backend}: {device}, {units} workers, level {level}, mode {mode}"),
    )];
    for &format in formats {
        findings.push(match report.kernels.iter().find(|k| k.format == format) {
            Some(k) if k.fallback => Finding::new(
                Level::Warn,
                "kernel",
                format!("{format}: {}, a plain fallback: it works, slowly", k.kernel),
            ),
            Some(k) => Finding::new(Level::Ok, "kernel", format!("{format}: {}", k.kernel)),
            None => Finding::new(Level::Fail, "kernel", format!("{format}: this device has none")),
        });
    }
    findings
}

/// Whether the plan fits the memory that it may take.
pub fn fit(plan: &MemoryPlan, context: usize, available: Option<u64>) -> Finding {
    let needed = plan.total();
    let parts = format!(
        "{} for a context of {context} (weights {}, keys and values {}, activations {})",
        size(needed),
        size(plan.weight_bytes()),
        size(plan.kv_bytes()),
        size(plan.activation_bytes())
    );
    let (level, rest) = match available {
        Some(available) if needed > available => (
            Level::Fail,
            format!(", {} are available; lower --ctx or take a smaller quantisation", size(available)),
        ),
        // The system and other programs want some too.
        Some(available) if needed > available / 10 * 9 => {
            (Level::Warn, format!(", nearly all of the {} that are available", size(available)))
        }
        Some(available) => (Level::Ok, format!(", {} are available", size(available))),
        None => (Level::Warn, ", free memory is unknown".to_string()),
    };
    let elsewhere = elsewhere(plan).map_or(String::new(), |text| format!("; {text}"));
    let level = if level == Level::Ok && !elsewhere.is_empty() { Level::Warn } else { level };
    Finding::new(level, "fit", format!("needs {parts}{rest}{elsewhere}"))
}

/// What a plan leaves in the file or with the host, if it does.
pub fn elsewhere(plan: &MemoryPlan) -> Option<String> {
    if let Some(bytes) = plan.host_tables {
        let bytes = size(bytes);
        return Some(format!(
            "{bytes} of tables stay in the host's memory, where the device fetches a row for each token"
        ));
    }
    let paged = plan.paged?;
    let all = paged.layers + paged.packed_layers;
    Some(format!(
        "the experts of {} of {all} layers, {}, stay in the file and are read from it as they are chosen: slower than \
         memory that holds them all",
        paged.layers,
        size(paged.bytes)
    ))
}

/// Bytes in GiB, or in MiB where that would be nothing.
fn size(bytes: u64) -> String {
    match bytes {
        0..0x4000_0000 => format!("{:.2} MiB", bytes as f64 / (1u64 << 20) as f64),
        _ => format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}

/// Reads every matrix and vector of the checkpoint and checks lengths, scales and codes. `progress` is told bytes done
/// and bytes in all.
pub fn tensors(checkpoint: &Checkpoint, progress: &mut dyn FnMut(u64, u64)) -> Vec<Finding> {
    let roles: Vec<Role> = checkpoint.roles().collect();
    let bytes = |r: &Role| checkpoint.stored(*r).map_or(0, |s| s.bytes);
    let total = roles.iter().map(bytes).sum();
    let (mut done, mut failures) = (0, Vec::new());
    for &role in &roles {
        let problem = match checkpoint.tensor(role) {
            Ok(Some(view)) => validate(&view).err().map(|e| e.to_string()),
            Ok(None) => None,
            Err(e) => Some(e.to_string()),
        };
        failures.extend(problem.map(|p| Finding::new(Level::Fail, "tensor", p)));
        done += bytes(&role);
        progress(done, total);
    }
    if failures.is_empty() {
        let detail = format!("{} read and valid, {total} bytes", roles.len());
        failures.push(Finding::new(Level::Ok, "tensors", detail));
    }
    failures
}

/// Whether every tensor that the configuration asks for is there and no other, without reading any.
pub fn inventory(checkpoint: &Checkpoint, config: &Config) -> Finding {
    if let Err(stranger) = config.check_tensors(checkpoint) {
        return Finding::failed("inventory", &stranger);
    }
    let missing: Vec<String> = required(checkpoint, config)
        .into_iter()
        .filter(|r| checkpoint.stored(*r).is_none())
        .map(|r| r.to_string())
        .collect();
    match &missing[..] {
        [] => {
            let roles = checkpoint.roles().count();
            Finding::new(Level::Ok, "inventory", format!("{roles} text tensors, none missing"))
        }
        [first, ..] => {
            let detail =
                format!("{} tensors are missing, {first} the first; fetch the model again", missing.len());
            Finding::new(Level::Fail, "inventory", detail)
        }
    }
}

/// The tensors that every layer needs whatever layout its experts have.
fn required(checkpoint: &Checkpoint, config: &Config) -> Vec<Role> {
    let mut roles = vec![Role::Embed, Role::FinalNorm];
    for (i, layer) in config.layers.iter().enumerate() {
        use LayerRole::*;
        let mut local =
            vec![InputNorm, PostAttnNorm, PreFfnNorm, PostFfnNorm, QProj, OProj, QNorm, Gate, Up, Down];
        if layer.donor.is_none() {
            local.extend([KProj, KNorm]);
            local.extend((!layer.values_are_keys).then_some(VProj));
        }
        if config.per_layer.is_some() {
            local.extend([PerLayerGate, PerLayerProj, PostPerLayerNorm]);
        }
        if let Some(moe) = config.moe {
            local.extend([Router, RouterScale, PreFfnNorm2, PostFfnNorm1, PostFfnNorm2]);
            let stacked = checkpoint.stored(Role::Layer(i as u32, ExpertsDown)).is_some();
            for index in (0..moe.experts as u32).filter(|_| !stacked) {
                local.extend(ExpertPart::ALL.map(|part| Expert { index, part }));
            }
        }
        roles.extend(local.into_iter().map(|l| Role::Layer(i as u32, l)));
    }
    if config.per_layer.is_some() {
        roles.extend([Role::PerLayerTable, Role::PerLayerModelProj, Role::PerLayerProjNorm]);
    }
    roles
}

/// Proves that live keys and values of slots never overlap and come back as written.
pub fn slots(stepper: &mut Stepper, slots: usize, context: usize) -> Finding {
    stepper.reset();
    match stepper.alloc_slots(slots, context).and_then(|()| stepper.slot_smoke()) {
        Ok(r) => Finding::new(
            Level::Ok,
            "slots",
            format!(
                "{slots} slots of {context}: {} cells in {} layers apart, {} round trips",
                r.cells, r.layers, r.round_trips
            ),
        ),
        Err(e) => Finding::failed("slots", &e),
    }
}

/// What a known model computes for a known prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForwardSums {
    /// The prompt.
    pub tokens: &'static [u32],
    /// The best next token.
    pub next: u32,
    /// Its logit.
    pub best: f32,
    /// Mean of the absolute logits of the last position.
    pub mean_abs: f32,
}

/// The built-in model, asked for the capital of Peru: its answer begins with a token far ahead of every other.
#[cfg(feature = "pebble")]
pub const BUILTIN_SUMS: ForwardSums = ForwardSums {
    tokens: &[2, 15, 387, 280, 460, 435, 369, 905, 553, 4017, 16, 280, 15, 390, 280, 13, 490, 280, 14],
    next: 373,
    best: 19.433_205,
    mean_abs: 7.337_419_5,
};

/// Relative; float32 engines differ from one another by rounding, far below this, and a wrong pass by whole units.
const F32_TOLERANCE: f32 = 1e-3;

/// The same for quantised activations.
const FAST_TOLERANCE: f32 = 5e-2;

/// Runs a prompt and compares with stored sums.
pub fn forward_sums(stepper: &mut Stepper, expected: &ForwardSums) -> Finding {
    stepper.reset();
    let mut logits = vec![0.0; stepper.model().config.vocab];
    let next =
        match stepper.prefill(expected.tokens).and_then(|t| stepper.logits_into(&mut logits).map(|()| t)) {
            Ok(next) => next,
            Err(e) => return Finding::failed("forward", &e),
        };
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mean_abs = logits.iter().map(|v| v.abs()).sum::<f32>() / logits.len() as f32;
    let tolerance = if stepper.runner().report().mode == "f32" { F32_TOLERANCE } else { FAST_TOLERANCE };
    let near = |a: f32, b: f32| (a - b).abs() <= tolerance * b.abs();
    let good = next == expected.next && near(best, expected.best) && near(mean_abs, expected.mean_abs);
    let found = format!("token {next}, logit {best:.4}, mean {mean_abs:.4}");
    match good {
        true => Finding::new(Level::Ok, "forward", format!("{found}: as stored")),
        false => Finding::new(
            Level::Fail,
            "forward",
            format!(
                "{found}; stored are token {}, logit {:.4}, mean {:.4}: the kernels of this level compute something else, try another --level",
                expected.next, expected.best, expected.mean_abs
            ),
        ),
    }
}

/// Runs a short prompt whole and step by step: logits finite, both ways to the same bits.
pub fn forward(stepper: &mut Stepper) -> Finding {
    let config = &stepper.model().config;
    // Ids from all over the vocabulary, so that no part of the tables goes unread.
    let ids = |i: usize| (i * 7919 + 11) % config.vocab.min(config.per_layer.map_or(usize::MAX, |p| p.vocab));
    let length = 9.min(stepper.context());
    let tokens: Vec<u32> = std::iter::once(config.bos).chain((1..length).map(|i| ids(i) as u32)).collect();
    match both_ways(stepper, &tokens) {
        Ok((whole, steps)) if whole == steps => Finding::new(
            Level::Ok,
            "forward",
            format!("{length} tokens, finite; whole and step by step to the same bits"),
        ),
        Ok((whole, steps)) => {
            let worst = whole.iter().zip(&steps).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let detail =
                format!("a prompt run whole and step by step differ by {worst:e} in the logits; report this");
            Finding::new(Level::Fail, "forward", detail)
        }
        Err(e) => Finding::failed("forward", &e),
    }
}

fn both_ways(stepper: &mut Stepper, tokens: &[u32]) -> lapidary_engine::Result<(Vec<f32>, Vec<f32>)> {
    let vocab = stepper.model().config.vocab;
    let (mut whole, mut steps) = (vec![0.0; vocab], vec![0.0; vocab]);
    stepper.reset();
    stepper.prefill_prompt(&Prompt::from(tokens))?;
    stepper.logits_into(&mut whole)?;
    stepper.reset();
    for (position, &token) in tokens.iter().enumerate() {
        stepper.decode_step(token, position)?;
    }
    stepper.logits_into(&mut steps)?;
    stepper.reset();
    Ok((whole, steps))
}
