//! `lapidary inspect MODEL`

use std::ffi::OsString;
use std::io::{Write, stdout};

use lapidary::plan::MemoryPlan;
use lapidary::{Checkpoint, LoadOptions};
use lapidary_model::{Config, Family, LayerConfig, VisionBlocks};
use lapidary_ops::{Group, PAGE_TOKENS};
use lapidary_weights::Kind;
use serde_json::{Value, json};

use crate::load;
use crate::model_args::{ComputeFlag, DeviceArgs, StoreArgs};
use crate::report::{Align, Table, bytes, count};
use crate::source;

/// Show what is in a model and how much memory it takes.
///
/// Shows a model's configuration, layers, number formats and parameters, and plans its memory for a context. Only headers
/// are read, so this is instant whatever the model's size.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  lapidary inspect ./gemma-4-31B-it --ctx 131072 --kv q8_0\n  \
lapidary inspect model.gguf --json | jq .memory.total")]
pub struct Args {
    /// A folder, a .gguf file, or owner/name[:quant] from the hub
    #[arg(value_name = "MODEL")]
    pub model: OsString,
    #[command(flatten)]
    pub store: StoreArgs,
    /// Tokens of context to plan for; the model's own limit, at most 8192, when not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub ctx: Option<u64>,
    #[command(flatten)]
    pub compute: ComputeFlag,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Most prompt tokens in one batch
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub chunk: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let checkpoint = Checkpoint::open(source::path(&args.model, args.store)?)?;
    let config = Config::from_checkpoint(&checkpoint)?;
    let options = LoadOptions {
        context: args.ctx.map(|c| c as usize),
        chunk: args.chunk as usize,
        ..args.device.options(args.compute.compute)
    };
    let plan = load::plan(&checkpoint, &config, &options, &args.device);
    let mut out = stdout().lock();
    match args.json {
        true => writeln!(out, "{:#}", as_json(&checkpoint, &config, &options, &plan))?,
        false => out.write_all(as_text(&checkpoint, &config, &options, &plan).as_bytes())?,
    }
    Ok(())
}

fn as_text(checkpoint: &Checkpoint, config: &Config, options: &LoadOptions, plan: &MemoryPlan) -> String {
    let mut text = format!("{}\n", checkpoint.path().display());
    let mut fact = |name: &str, value: String| text += &format!("  {name:<13}{value}\n");
    let files = checkpoint.files().len();
    let plural = if files == 1 { "file" } else { "files" };
    fact("files", format!("{} {}, {files} {plural}", bytes(checkpoint.total_bytes()), kind(checkpoint)));
    fact("type", format!("{} ({})", config.model_type, family(config)));
    let parameters = checkpoint.parameters();
    fact(
        "parameters",
        match plan.active_parameters < parameters / 10 * 9 {
            true => format!("{}, {} in use for a token", count(parameters), count(plan.active_parameters)),
            false => count(parameters),
        },
    );
    fact(
        "shape",
        format!(
            "{} layers, width {}, {} heads, vocabulary {}",
            config.layers.len(),
            config.hidden,
            config.heads,
            config.vocab
        ),
    );
    fact("context", format!("{} tokens, sliding window {}", config.max_positions, config.window));
    if let Some(m) = config.moe {
        fact("experts", format!("{} of {} chosen, width {}", m.top_k, m.experts, m.width));
    }
    if let Some(p) = config.per_layer {
        fact("per layer", format!("inputs of width {} from a table of {} rows", p.width, p.vocab));
    }
    fact("head", head(checkpoint).to_string());
    fact("softcap", config.final_softcap.map_or("none".into(), |c| format!("{c} on logits")));
    let ids = config.eos.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    fact("tokens", format!("bos {}, eos {ids}, pad {}", config.bos, config.pad));
    fact("vision", vision(config).to_string());

    text += "\nlayers\n";
    text += &layers(config).render();
    for group in Group::ALL.iter().filter(|g| config.layers.iter().any(|l| l.group == **g)) {
        let rope = config.rope[group.index()];
        let factor = if rope.factor == 1.0 { String::new() } else { format!(", divided by {}", rope.factor) };
        let share =
            if rope.rotated == 1.0 { String::new() } else { format!(", {} of each head", rope.rotated) };
        text += &format!("  {} rope: theta {}{share}{factor}\n", group_name(*group), rope.theta);
    }

    text += "\nformats in the file\n";
    let mut table = Table::new(&[("format", Align::Left), ("tensors", Align::Right), ("size", Align::Right)]);
    for f in checkpoint.formats() {
        table.row(vec![f.format.to_string(), f.tensors.to_string(), bytes(f.bytes)]);
    }
    text += &table.render();
    let ignored = checkpoint.ignored();
    if ignored.tensors() > 0 {
        text += &format!(
            "  not read: {} vision, {} audio and {} projector tensors, {}\n",
            ignored.vision,
            ignored.audio,
            ignored.projector,
            bytes(ignored.bytes)
        );
    }

    text += &format!("\nmemory for a context of {} tokens\n", options.context_for(config));
    text += &memory(plan, options).render();
    text += &format!(
        "  a decoded token reads {} of weights and, at the end of the context, {} of keys and values\n",
        bytes(plan.weight_bytes_per_token),
        bytes(plan.kv_bytes_per_token(options.context_for(config) - 1))
    );
    let notes: Vec<String> = checkpoint.notes().into_iter().chain(config.notes.iter().cloned()).collect();
    if !notes.is_empty() {
        text += "\nnotes\n";
        notes.iter().for_each(|n| text += &format!("  {n}\n"));
    }
    text
}

/// A line for each run of equal layers.
fn layers(config: &Config) -> Table {
    let mut table = Table::new(&[
        ("layers", Align::Left),
        ("attention", Align::Left),
        ("heads", Align::Right),
        ("kv heads", Align::Right),
        ("head dim", Align::Right),
        ("mlp width", Align::Right),
        ("keys and values", Align::Left),
    ]);
    let mut first = 0;
    while first < config.layers.len() {
        let l = config.layers[first];
        let run = config.layers[first..].iter().take_while(|other| **other == l).count();
        let name = if run == 1 { first.to_string() } else { format!("{first}-{}", first + run - 1) };
        table.row(vec![
            name,
            group_name(l.group).into(),
            config.heads.to_string(),
            l.kv_heads.to_string(),
            l.head_dim.to_string(),
            l.intermediate.to_string(),
            values(&l),
        ]);
        first += run;
    }
    table
}

fn values(l: &LayerConfig) -> String {
    match (l.donor, l.values_are_keys) {
        (Some(donor), _) => format!("of layer {donor}"),
        (None, true) => "own, one projection for both".into(),
        (None, false) => "own".into(),
    }
}

fn memory(plan: &MemoryPlan, options: &LoadOptions) -> Table {
    let mut table = Table::new(&[("what", Align::Left), ("size", Align::Right), ("", Align::Left)]);
    for w in &plan.weights {
        table.row(vec![format!("weights {}", w.format), bytes(w.bytes), format!("{} matrices", w.matrices)]);
    }
    table.row(vec!["vectors".into(), bytes(plan.vector_bytes), "float32".into()]);
    for group in Group::ALL {
        let g = &plan.kv.groups[group.index()];
        if g.layers.is_empty() {
            continue;
        }
        // Page 0 takes the rows that only pad a batch.
        let detail = format!(
            "{} layers x {} tokens in {}, {} pages of {PAGE_TOKENS}",
            g.layers.len(),
            (g.pages - 1) * PAGE_TOKENS,
            g.format.name(),
            g.pages
        );
        table.row(vec![
            format!("keys and values, {}", group_name(group)),
            bytes(plan.kv_group_bytes(group)),
            detail,
        ]);
    }
    let detail = format!(
        "{} buffers for {} rows",
        plan.activations.len(),
        options.chunk.min(plan.activations[0].max_rows)
    );
    table.row(vec!["activations".into(), bytes(plan.activation_bytes()), detail]);
    if plan.device_bytes > 0 {
        table.row(vec!["between kernels".into(), bytes(plan.device_bytes), String::new()]);
    }
    if let Some(paged) = plan.paged {
        let detail = format!("experts of {} layers, read from it as they are chosen", paged.layers);
        table.row(vec!["of these in the file".into(), bytes(paged.bytes), detail]);
    }
    if let Some(tables) = plan.host_tables {
        let detail = "tables that the device fetches rows of".to_owned();
        table.row(vec!["of these with the host".into(), bytes(tables), detail]);
    }
    table.row(vec!["total".into(), bytes(plan.total()), String::new()]);
    table
}

fn as_json(checkpoint: &Checkpoint, config: &Config, options: &LoadOptions, plan: &MemoryPlan) -> Value {
    let layers: Vec<Value> = config
        .layers
        .iter()
        .map(|l| {
            json!({
                "attention": group_name(l.group),
                "heads": config.heads,
                "kv_heads": l.kv_heads,
                "head_dim": l.head_dim,
                "mlp_width": l.intermediate,
                "kv_of_layer": l.donor,
                "values_are_keys": l.values_are_keys,
            })
        })
        .collect();
    let formats: Vec<Value> = checkpoint
        .formats()
        .iter()
        .map(|f| json!({"format": f.format.name(), "tensors": f.tensors, "bytes": f.bytes}))
        .collect();
    let weights: Vec<Value> = plan
        .weights
        .iter()
        .map(|w| json!({"format": w.format.name(), "matrices": w.matrices, "bytes": w.bytes}))
        .collect();
    let ignored = checkpoint.ignored();
    let context = options.context_for(config);
    json!({
        "path": checkpoint.path().to_string_lossy(),
        "kind": kind(checkpoint),
        "files": checkpoint.files().iter().map(|f| f.to_string_lossy()).collect::<Vec<_>>(),
        "bytes": checkpoint.total_bytes(),
        "model_type": config.model_type,
        "family": family(config),
        "parameters": checkpoint.parameters(),
        "active_parameters": plan.active_parameters,
        "config": {
            "layers": config.layers.len(),
            "hidden": config.hidden,
            "heads": config.heads,
            "vocab": config.vocab,
            "max_positions": config.max_positions,
            "window": config.window,
            "final_softcap": config.final_softcap,
            "attention_softcap": config.attn_softcap,
            "experts": config.moe.map(|m| json!({"count": m.experts, "chosen": m.top_k, "width": m.width})),
            "per_layer": config.per_layer.map(|p| json!({"width": p.width, "vocab": p.vocab})),
            "head": head(checkpoint),
            "vision_blocks": vision(config),
            "rope": Group::ALL.map(|g| {
                let r = config.rope[g.index()];
                json!({"attention": group_name(g), "theta": r.theta, "rotated": r.rotated, "factor": r.factor})
            }),
            "bos": config.bos,
            "eos": config.eos,
            "pad": config.pad,
        },
        "layers": layers,
        "formats": formats,
        "ignored": {"vision": ignored.vision, "audio": ignored.audio, "projector": ignored.projector, "bytes": ignored.bytes},
        "memory": {
            "context": context,
            "chunk": plan.activations[0].max_rows,
            "kv_format": options.kv_format().name(),
            "weights": weights,
            "weight_bytes": plan.weight_bytes(),
            "kv_sliding": plan.kv_group_bytes(Group::Sliding),
            "kv_full": plan.kv_group_bytes(Group::Full),
            "kv_bytes": plan.kv_bytes(),
            "activation_bytes": plan.activation_bytes(),
            "paged_experts": plan.paged.map(|p| json!({"layers": p.layers, "bytes": p.bytes})),
            "host_tables": plan.host_tables,
            "device_bytes": plan.device_bytes,
            "total": plan.total(),
            "weight_bytes_per_token": plan.weight_bytes_per_token,
            "kv_bytes_per_token": plan.kv_bytes_per_token(context - 1),
        },
        "notes": checkpoint.notes().into_iter().chain(config.notes.iter().cloned()).collect::<Vec<_>>(),
    })
}

fn kind(checkpoint: &Checkpoint) -> &'static str {
    match checkpoint.kind() {
        Kind::Safetensors => "safetensors",
        Kind::Gguf => "gguf",
    }
}

fn family(config: &Config) -> &'static str {
    match config.family {
        Family::Gemma4 => "Gemma 4",
        Family::Gemma3 => "Gemma 3",
    }
}

/// The words for a group in tables and JSON.
fn group_name(group: Group) -> &'static str {
    match group {
        Group::Sliding => "sliding",
        Group::Full => "full",
    }
}

fn head(checkpoint: &Checkpoint) -> &'static str {
    match checkpoint.stored(lapidary_weights::Role::Head) {
        Some(_) => "a matrix of its own",
        None => "the embedding",
    }
}

fn vision(config: &Config) -> &'static str {
    match config.vision {
        VisionBlocks::Causal => "blocks causal",
        VisionBlocks::Sliding => "blocks see themselves whole on sliding layers",
        VisionBlocks::Both => "blocks see themselves whole on all layers",
    }
}
