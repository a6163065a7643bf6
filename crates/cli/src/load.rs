//! Loading a model, with progress and with a look at the memory first.

use anyhow::bail;
use lapidary::plan::{MemoryPlan, PlanOptions};
use lapidary::service::{Service, ServiceOptions};
use lapidary::{Checkpoint, Config, Gemma, LoadOptions, Progress, Stepper};
use lapidary_model::Limits;

use crate::model_args::{ComputeArg, DeviceArgs, LoadArgs, ModelArgs};
use crate::progress::{Bar, Unit};
use crate::{report, source};

/// The memory plan for one sequence with these options.
pub fn plan(
    checkpoint: &Checkpoint,
    config: &Config,
    options: &LoadOptions,
    device: &DeviceArgs,
) -> MemoryPlan {
    plan_for(checkpoint, config, options, device, 1)
}

/// Bytes that a model may take, as far as anybody can tell.
pub fn memory(device: &DeviceArgs) -> Option<u64> {
    match device.max_memory {
        Some(mib) => Some(u64::from(mib) << 20),
        None => device.device.available(),
    }
}

fn plan_for(
    checkpoint: &Checkpoint,
    config: &Config,
    options: &LoadOptions,
    device: &DeviceArgs,
    sequences: usize,
) -> MemoryPlan {
    let context = options.context_for(config);
    let limits = Limits { rows: options.chunk.clamp(1, context.max(1)), head_rows: options.head_rows.max(1) };
    let kv = [options.kv_format(); 2];
    MemoryPlan::new(
        checkpoint,
        config,
        &PlanOptions {
            context,
            sequences,
            limits,
            kv,
            compute: options.compute,
            device: options.device,
            memory: if device.ignore_memory { None } else { memory(device) },
        },
    )
}

/// Loads a model without its text.
pub fn stepper(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    device: &DeviceArgs,
) -> anyhow::Result<Stepper> {
    let options = prepare(checkpoint, options.clone(), device, 1)?;
    Ok(lapidary::load_stepper(checkpoint, &options, &mut progress())?)
}

/// Loads a model with its text, and tells what there is to know about it.
pub fn gemma(model: &ModelArgs, load: &LoadArgs, compute: ComputeArg) -> anyhow::Result<Gemma> {
    let checkpoint = source::open(model)?;
    let options = prepare(&checkpoint, load.options(compute), &load.device, 1)?;
    let gemma = Gemma::from_checkpoint(&checkpoint, &options, &mut progress())?;
    gemma.notes().iter().for_each(|note| eprintln!("note: {note}"));
    Ok(gemma)
}

/// Loads a model for many requests at once.
pub fn service(
    model: &ModelArgs,
    load: &LoadArgs,
    compute: ComputeArg,
    options: ServiceOptions,
) -> anyhow::Result<Service> {
    let checkpoint = source::open(model)?;
    let load_options = prepare(&checkpoint, load.options(compute), &load.device, options.sequences)?;
    let service = Service::start(&checkpoint, &load_options, options, &mut progress())?;
    service.model_info().notes.iter().for_each(|note| eprintln!("note: {note}"));
    Ok(service)
}

/// Tells what was assumed or overridden while the configuration was read.
pub fn tell_notes(stepper: &Stepper) {
    stepper.model().config.notes.iter().for_each(|note| eprintln!("note: {note}"));
}

/// A bar that follows a load.
fn progress() -> impl FnMut(Progress) {
    let mut bar = Bar::new("loading", Unit::Bytes);
    move |p| bar.at(p.done as u64, p.total as u64)
}

/// Refuses a plan that exceeds the free memory: the system would otherwise end the process, without a word, somewhere
/// on the way. Experts that do not fit stay in the file, which is said.
fn prepare(
    checkpoint: &Checkpoint,
    mut options: LoadOptions,
    device: &DeviceArgs,
    sequences: usize,
) -> anyhow::Result<LoadOptions> {
    let config = Config::from_checkpoint(checkpoint)?;
    let context = options.context_for(&config);
    if context > config.max_positions {
        let most = config.max_positions;
        eprintln!(
            "note: a context of {context} is longer than the {most} tokens that the model was made for"
        );
    }
    if device.ignore_memory {
        return Ok(options);
    }
    let plan = plan_for(checkpoint, &config, &options, device, sequences);
    options.packed_experts = plan.packed_experts();
    if let Some(paged) = lapidary::check::paged(&plan) {
        eprintln!("note: {paged}");
    }
    match memory(device) {
        Some(available) if plan.total() > available => bail!(
            "the model needs {} of memory (weights {}, keys and values {}, activations {}), {} are available on {}; lower \
             --ctx, take a smaller quantisation, or pass --ignore-memory to try",
            report::bytes(plan.total()),
            report::bytes(plan.weight_bytes()),
            report::bytes(plan.kv_bytes()),
            report::bytes(plan.activation_bytes()),
            report::bytes(available),
            options.device
        ),
        _ => Ok(options),
    }
}
