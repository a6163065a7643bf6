//! Loading a model, with progress and with a look at the memory first.

use anyhow::bail;
use lapidary::budget::{self, Fit};
use lapidary::plan::{MemoryPlan, PlanOptions};
use lapidary::service::{Service, ServiceOptions};
use lapidary::{Checkpoint, Config, Device, Gemma, LoadOptions, Progress, Stepper};
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
    let free = device.device.available();
    match device.device {
        Device::Cpu => device.max_memory.or(free),
        _ => [free, device.max_vram].into_iter().flatten().min(),
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
            requantise: options.requantise,
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

/// Holds the plan against the memory there is: leaves experts that do not fit in the file and cuts the context where that
/// is allowed, and says so; refuses what still does not fit, since the system would otherwise end the process, without a
/// word, somewhere on the way.
fn prepare(
    checkpoint: &Checkpoint,
    options: LoadOptions,
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
    if device.max_vram.is_some() && options.device == Device::Cpu {
        bail!("--max-vram is about the memory of a GPU: add --device cuda");
    }
    if device.max_memory.is_some() && options.device != Device::Cpu {
        bail!("--max-memory is about the processor's memory: --max-vram is a GPU's");
    }
    if device.ignore_memory {
        return Ok(LoadOptions { stay_in_file: true, ..options });
    }
    let Some(budget) = memory(device) else { return Ok(options) };
    let with = |context| LoadOptions { context: Some(context), ..options.clone() };
    let plan_of = |context| plan_for(checkpoint, &config, &with(context), device, sequences);
    let total = |context| plan_of(context).total();
    let least = device.min_ctx.map_or(context, |n| (n as usize).min(context));
    let context = match budget::fit(context, least, budget, &total) {
        Fit::AsWanted => context,
        Fit::Shorter(n) => {
            let wanted = arithmetic(&plan_of(context), budget);
            eprintln!("note: a context of {n} in place of {context}: {wanted}");
            n
        }
        Fit::TooLarge { longest } => {
            let remedy = match longest {
                Some(n) if device.min_ctx.is_some() => {
                    format!("the longest context that fits is {n}, below --min-ctx")
                }
                Some(n) => format!(
                    "the longest context that fits is {n}: pass --ctx {n}, or --min-ctx to take what fits"
                ),
                None => "no context fits: take a smaller quantisation".to_owned(),
            };
            bail!(
                "the model does not fit on {}: {}; {remedy}, or pass --ignore-memory to try",
                options.device,
                arithmetic(&plan_of(context), budget)
            )
        }
    };
    let plan = plan_of(context);
    if let Some(text) = lapidary::check::elsewhere(&plan) {
        eprintln!("note: {text}");
    }
    let (packed_experts, tables_on_host) = (plan.packed_experts(), plan.host_tables.is_some());
    Ok(LoadOptions { packed_experts, tables_on_host, ..with(context) })
}

/// What a plan adds up to, and what there is.
fn arithmetic(plan: &MemoryPlan, budget: u64) -> String {
    let own = match plan.device_bytes {
        0 => String::new(),
        n => format!(" + between kernels {}", report::bytes(n)),
    };
    format!(
        "weights {} + keys and values {} + activations {}{own} = {} of memory, {} are available",
        report::bytes(plan.weight_bytes()),
        report::bytes(plan.kv_bytes()),
        report::bytes(plan.activation_bytes()),
        report::bytes(plan.total()),
        report::bytes(budget)
    )
}
