//! Decoding on a GPU: time of a step against the time that reading its bytes would take.

use std::io::{Write, stdout};
use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::{Context as _, bail};
use lapidary::plan::MemoryPlan;
use lapidary::synth::{Mix, Size, SynthOptions, write};
use lapidary::timings::Report;
use lapidary::{Checkpoint, Config, Format, LoadOptions, Prompt, Stepper, TapPoint};
use lapidary_engine::Heads;
use serde_json::{Value, json};

use super::Args;
use crate::load;
use crate::report::{Align, Table, bytes, median};
use crate::source;

/// A model without a checkpoint: a published size, and the format of its matrices.
#[derive(Clone, Debug)]
pub struct Synthetic {
    size: Size,
    format: Format,
}

/// Formats by the names used for models: those of files, and `fp8`, `nvfp4`, `bf16`.
fn format(name: &str) -> Option<Format> {
    let wanted = match name {
        "fp8" => "fp8_e4m3",
        "int4" => "int4_g32",
        other => other,
    };
    Format::ALL.into_iter().find(|f| f.name().eq_ignore_ascii_case(wanted))
}

impl std::str::FromStr for Synthetic {
    type Err = String;

    fn from_str(text: &str) -> Result<Synthetic, String> {
        let sizes = Size::ALL.map(Size::name).join(", ");
        let Some((size, format_name)) = text.split_once(':') else {
            return Err(format!("expected SIZE:FORMAT, such as 31b:fp8; sizes are {sizes}"));
        };
        let size = size.strip_prefix("gemma-4-").unwrap_or(size);
        let size = Size::from_name(size).ok_or_else(|| format!("`{size}` is no size: {sizes}"))?;
        let names = Format::ALL.map(|f| f.name()).join(", ");
        let format = format(format_name).ok_or_else(|| format!("`{format_name}` is no format: {names}"))?;
        Ok(Synthetic { size, format })
    }
}

/// One line of the table.
struct Line {
    batch: usize,
    depth: usize,
    /// Seconds of each step.
    steps: Vec<f64>,
    weight_bytes: u64,
    kv_bytes: u64,
    profile: Option<Report>,
    /// Seconds of a step with a layer captured, and with it steered, each beside that of steps without right before.
    hooks: Option<[(f64, f64); 2]>,
}

/// What is done to every row of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hook {
    None,
    /// One step after the other, to compare with steps that have a hook, which no device goes on from by itself.
    Single,
    Capture(usize),
    Steer(usize),
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let folder = tempfile_dir()?;
    let (name, checkpoint, random) = match &args.synthetic {
        None => (source::name(&args.model), source::open(&args.model)?, None),
        Some(s) => {
            let path = folder.join("header.gguf");
            let options = SynthOptions { sparse: true, ..SynthOptions::default() };
            write(s.size, Mix::Bf16, &path, &options, &mut |_, _| {})?;
            let name = format!("synthetic gemma-4-{} {}", s.size.name(), s.format);
            (name, Checkpoint::open(&path)?, Some(s.format))
        }
    };
    let result = measure(args, &name, &checkpoint, random);
    drop(checkpoint);
    let _ = std::fs::remove_dir_all(&folder);
    result
}

/// A folder of this process's own.
fn tempfile_dir() -> anyhow::Result<std::path::PathBuf> {
    let path = std::env::temp_dir().join(format!("lapidary-bench-{}", std::process::id()));
    std::fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
    Ok(path)
}

fn measure(args: &Args, name: &str, checkpoint: &Checkpoint, random: Option<Format>) -> anyhow::Result<()> {
    let config = Config::from_checkpoint(checkpoint)?;
    let generate = args.generate.iter().copied().max().unwrap_or(0) as usize;
    if generate == 0 {
        bail!("on a GPU decoding is measured: -n must be above 0");
    }
    let deepest = args.depth.iter().copied().max().unwrap_or(0) as usize;
    let context = deepest + generate + 9;
    let batches: Vec<usize> = args.batch.iter().map(|&b| b as usize).collect();
    let most = batches.iter().copied().max().unwrap_or(1);
    let options = LoadOptions {
        context: Some(context),
        chunk: (args.chunk as usize).max(most),
        head_rows: most.max(16),
        random_weights: random,
        ..args.device.options(args.compute.compute)
    };
    let ceiling = options.device.read_bandwidth()?;
    let start = Instant::now();
    let mut stepper = match random {
        // The plan of the header is not that of the random weights.
        Some(_) => lapidary::load_stepper(checkpoint, &options, &mut |_| {})?,
        None => load::stepper(checkpoint, &options, &args.device)?,
    };
    let loaded = start.elapsed().as_secs_f64();
    let plan = load::plan(checkpoint, &config, &options, &args.device);
    let mut lines = Vec::new();
    for &depth in &args.depth {
        for &batch in &batches {
            let mut line = |hook| decode(&mut stepper, &plan, args, (depth as usize, batch, generate), hook);
            let mut plain = line(Hook::None)?;
            if let Some(layer) = args.hooks.map(usize::from) {
                if layer >= config.layers.len() {
                    bail!("--hooks {layer}: the model has layers 0 to {}", config.layers.len() - 1);
                }
                let mut beside = |hook| -> anyhow::Result<(f64, f64)> {
                    // In turn, so that a clock that drifts is seen by both.
                    let (mut with, mut without) = (Vec::new(), Vec::new());
                    for _ in 0..2 {
                        without.extend(line(Hook::Single)?.steps);
                        with.extend(line(hook)?.steps);
                    }
                    Ok((median(&with), median(&without)))
                };
                plain.hooks = Some([beside(Hook::Capture(layer))?, beside(Hook::Steer(layer))?]);
            }
            lines.push(plain);
        }
    }
    let memory = stepper.runner().memory();
    let report = stepper.runner().report();
    let mut out = stdout().lock();
    if args.json {
        let value = json!({
            "model": name,
            "device": report.device,
            "compute": report.mode,
            "read_bandwidth": ceiling,
            "load_seconds": loaded,
            "weight_bytes": memory.weights,
            "kv_bytes": memory.kv,
            "activation_bytes": memory.activations,
            "tests": lines.iter().map(|l| l.json(ceiling)).collect::<Vec<_>>(),
        });
        writeln!(out, "{value:#}")?;
        return Ok(());
    }
    writeln!(
        out,
        "{name}: {}, {}, compute {}, {} of weights, {} of keys and values, loaded in {loaded:.1} s ({:.1} GB/s); reads {:.0} GB/s",
        report.device,
        report.level,
        report.mode,
        bytes(memory.weights as u64),
        bytes(memory.kv as u64),
        memory.weights as f64 / 1e9 / loaded,
        ceiling / 1e9
    )?;
    out.write_all(table(&lines, ceiling).as_bytes())?;
    for (line, hooks) in lines.iter().filter_map(|l| Some((l, l.hooks?))) {
        for (what, (with, without)) in ["captured", "steered"].iter().zip(hooks) {
            let (cost, batch, depth) = (100.0 * (with / without - 1.0), line.batch, line.depth);
            writeln!(
                out,
                "batch {batch}, depth {depth}: one layer {what} {:.3} ms/step, without {:.3}: {cost:+.2} %",
                with * 1e3,
                without * 1e3
            )?;
        }
    }
    for line in &lines {
        if let Some(profile) = &line.profile {
            writeln!(out, "batch {}, depth {}:\n{}", line.batch, line.depth, profile.text())?;
        }
    }
    Ok(())
}

/// Steps before the measured ones: run as they are, recorded, and repeated once.
const WARM_UP: usize = 3;

/// Times steps after `depth` tokens, each from the tokens of the step before to its own.
fn decode(
    stepper: &mut Stepper,
    plan: &MemoryPlan,
    args: &Args,
    (depth, batch, steps): (usize, usize, usize),
    hook: Hook,
) -> anyhow::Result<Line> {
    let start = depth.max(1);
    stepper.reset();
    // Rows that all go the same way would choose the same experts, so each has a text of its own.
    let vocab = stepper.model().config.vocab as u32;
    let tokens: Vec<u32> = (0..batch as u32).map(|i| (1 + 7919 * i) % vocab).collect();
    let slots: Vec<usize> = (0..batch).collect();
    let set = match hook {
        Hook::Steer(layer) => Some(super::hooks::edit(stepper, layer)?),
        _ => None,
    };
    stepper.set_steering(set.as_ref())?;
    if batch == 1 {
        stepper.prefill_each(&Prompt::from(&super::ids(stepper, start)[..]), Heads::None, &mut |_| {})?;
    } else {
        stepper.alloc_slots(batch, start + steps + 8)?;
        for (slot, first) in tokens.iter().enumerate() {
            let mut ids = super::ids(stepper, start);
            ids.iter_mut().for_each(|id| *id = (*id + first) % vocab);
            stepper.set_slot_steering(slot, set.as_ref())?;
            stepper.prefill_slot(slot, &ids)?;
        }
    }
    if let Hook::Capture(layer) = hook {
        stepper.set_capture(&[TapPoint::LayerOut(layer)]);
    }
    let run = |stepper: &mut Stepper, fed: &[u32], steps: usize| {
        let (mut seconds, mut clock, mut last) = (Vec::with_capacity(steps), Instant::now(), fed.to_vec());
        let (runs, length) = if hook == Hook::Single { (steps, 1) } else { (1, steps) };
        for _ in 0..runs {
            let fed = last.clone();
            let sink = &mut |tokens: &[u32]| {
                let now = Instant::now();
                seconds.push((now - clock).as_secs_f64());
                clock = now;
                last.copy_from_slice(tokens);
                ControlFlow::Continue(())
            };
            match batch {
                1 => stepper.decode_many(fed[0], length, sink)?,
                _ => stepper.decode_batch_many(&fed, &slots, length, sink)?,
            };
        }
        Ok::<_, anyhow::Error>((seconds, last))
    };
    let (_, fed) = run(stepper, &tokens, WARM_UP)?;
    if args.profile && hook == Hook::None {
        stepper.start_profile(false)?;
    }
    // The first of a run has nobody before it who launched it.
    let (seconds, _) = run(stepper, &fed, steps + 1)?;
    stepper.set_capture(&[]);
    let profile = stepper.take_profile().map(|p| Report::new(&p));
    Ok(Line {
        batch,
        depth: start,
        steps: seconds[1..].to_vec(),
        weight_bytes: stepper.weight_bytes(),
        kv_bytes: plan.kv_bytes_per_token(start + steps / 2) * batch as u64,
        profile,
        hooks: None,
    })
}

impl Line {
    fn step(&self) -> f64 {
        median(&self.steps)
    }

    fn share(&self, ceiling: f64) -> f64 {
        (self.weight_bytes + self.kv_bytes) as f64 / ceiling / self.step()
    }

    fn json(&self, ceiling: f64) -> Value {
        json!({
            "batch": self.batch,
            "depth": self.depth,
            "tokens_per_second": self.batch as f64 / self.step(),
            "step_seconds": self.step(),
            "weight_bytes_per_step": self.weight_bytes,
            "kv_bytes_per_step": self.kv_bytes,
            "share_of_read_bandwidth": self.share(ceiling),
            "profile": self.profile.as_ref().map(Report::json),
            "capture_cost": self.hooks.map(|h| h[0].0 / h[0].1 - 1.0),
            "steering_cost": self.hooks.map(|h| h[1].0 / h[1].1 - 1.0),
        })
    }
}

fn table(lines: &[Line], ceiling: f64) -> String {
    let mut table = Table::new(&[
        ("batch", Align::Right),
        ("depth", Align::Right),
        ("t/s", Align::Right),
        ("ms/step", Align::Right),
        ("read/step", Align::Right),
        ("share", Align::Right),
    ]);
    for l in lines {
        table.row(vec![
            l.batch.to_string(),
            l.depth.to_string(),
            format!("{:.1}", l.batch as f64 / l.step()),
            format!("{:.3}", l.step() * 1e3),
            bytes(l.weight_bytes + l.kv_bytes),
            format!("{:.1} %", 100.0 * l.share(ceiling)),
        ]);
    }
    table.render()
}
