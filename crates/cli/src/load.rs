//! Opening and loading a model, with progress and with a look at the memory first.

use anyhow::bail;
use lapidary::host;
use lapidary::plan::{MemoryPlan, PlanOptions};
use lapidary_cpu::{Compute, CpuBackend, CpuOptions, Level};
use lapidary_engine::{Runner, Stepper};
use lapidary_model::{BuildOptions, Config, EmbedScale, Limits, Model, Progress};
use lapidary_ops::{Backend, KvFormat};
use lapidary_weights::{Checkpoint, ConfigSource};

use crate::progress::{Bar, Unit};
use crate::report;

/// Choices at load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    pub context: Option<usize>,
    pub chunk: usize,
    pub head_rows: usize,
    pub threads: Option<usize>,
    pub compute: Compute,
    pub kv: Option<KvFormat>,
    pub embed_scale: EmbedScale,
    pub final_softcap: Option<f32>,
    pub level: Option<Level>,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            context: None,
            chunk: 512,
            head_rows: 16,
            threads: None,
            compute: LoadOptions::DEFAULT_COMPUTE,
            kv: None,
            embed_scale: EmbedScale::Auto,
            final_softcap: None,
            level: None,
        }
    }
}

impl LoadOptions {
    pub const DEFAULT_COMPUTE: Compute = Compute::F32;

    pub fn context_for(&self, config: &Config) -> usize {
        self.context.unwrap_or(config.max_positions.min(8192))
    }

    pub fn kv_format(&self) -> KvFormat {
        self.kv.unwrap_or(match self.compute {
            Compute::F32 => KvFormat::F32,
            Compute::Fast => KvFormat::F16,
        })
    }
}

/// The model's description.
pub fn config(checkpoint: &Checkpoint) -> anyhow::Result<Config> {
    match checkpoint.config() {
        ConfigSource::Json { config, .. } => Ok(Config::from_json(config)?),
        _ => bail!("{}: this kind of configuration is not supported", checkpoint.path().display()),
    }
}

fn build(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &mut dyn FnMut(Progress),
) -> anyhow::Result<Stepper> {
    let mut config = config(checkpoint)?;
    if let Some(cap) = options.final_softcap {
        config.final_softcap = Some(cap);
    }
    let cpu = CpuOptions { threads: options.threads, compute: options.compute, level: options.level };
    let mut backend: Box<dyn Backend> = Box::new(CpuBackend::new(cpu)?);
    let context = options.context_for(&config);
    let limits = limits(options, &config);
    let build = BuildOptions { limits, embed_scale: options.embed_scale };
    let model = Model::build(config, checkpoint, backend.as_mut(), &build, progress)?;
    let runner = Runner::new(model, backend, [options.kv_format(); 2], context)?;
    Ok(Stepper::new(runner, context))
}

/// The buffers' rows for these options.
pub fn limits(options: &LoadOptions, config: &Config) -> Limits {
    let context = options.context_for(config).max(1);
    Limits { rows: options.chunk.clamp(1, context), head_rows: options.head_rows.max(1) }
}

/// The memory plan for these options.
pub fn plan(checkpoint: &Checkpoint, config: &Config, options: &LoadOptions) -> MemoryPlan {
    let limits = limits(options, config);
    let context = options.context_for(config);
    MemoryPlan::new(
        checkpoint,
        config,
        &PlanOptions { context, sequences: 1, limits, kv: [options.kv_format(); 2] },
    )
}

/// Loads a model without its text, after a look at the memory.
pub fn stepper(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    ignore_memory: bool,
) -> anyhow::Result<Stepper> {
    let config = config(checkpoint)?;
    if let Some(cap) = options.final_softcap {
        let own = config.final_softcap.map_or("none".to_string(), |c| c.to_string());
        eprintln!("note: final logit softcap {cap} in place of the model's own ({own})");
    }
    if !ignore_memory {
        fits(&plan(checkpoint, &config, options))?;
    }
    let mut bar = Bar::new("loading", Unit::Bytes);
    build(checkpoint, options, &mut |p| bar.at(p.done as u64, p.total as u64))
}

/// Refuses a plan that exceeds the free memory: the system would otherwise end the process, without a word, somewhere
/// on the way.
fn fits(plan: &MemoryPlan) -> anyhow::Result<()> {
    match host::memory().available {
        Some(available) if plan.total() > available => bail!(
            "the model needs {} of memory (weights {}, keys and values {}, activations {}), {} are available; lower --ctx, take a smaller quantisation, or pass --ignore-memory to try",
            report::bytes(plan.total()),
            report::bytes(plan.weight_bytes()),
            report::bytes(plan.kv_bytes()),
            report::bytes(plan.activation_bytes()),
            report::bytes(available)
        ),
        _ => Ok(()),
    }
}

/// The model's tokenizer.
pub fn tokenizer(checkpoint: &Checkpoint) -> anyhow::Result<lapidary_text::Tokenizer> {
    match &checkpoint.text_files().tokenizer {
        Some(path) => Ok(lapidary_text::Tokenizer::from_json(&std::fs::read(path)?)?),
        None => bail!("no tokenizer"),
    }
}
