//! `lapidary dump`

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::ValueEnum;
use lapidary::Config;
use lapidary::capture::{Captured, Values, Wanted, capture};
use lapidary::verify::{Formats, made_by, metadata};
use lapidary_engine::{Prompt, SoftKind, SoftSpan};
use lapidary_weights::safetensors::{Dtype, File, NewTensor, write};

use crate::failure::Usage;
use crate::load;
use crate::model_args::{ComputeArg, LoadArgs, ModelArgs, ScaleArg};
use crate::source;
use crate::steer_args::SteerArgs;

/// Write logits and activations of a prompt to a file.
///
/// Runs a prompt of token ids and writes the logits of every position, and activations on request, as float32 to a
/// safetensors file: for comparisons with other engines.
#[derive(Debug, clap::Args)]
#[command(after_help = "Contents of the file, T the number of tokens:\n  \
input_ids [T]            the ids\n  \
logits [T, V]            after the softcap\n  \
hidden.N [T, H]          output of layer N after its scalar (--layers)\n  \
embed, final_norm [T, H] scaled embeddings; the residual after the final norm (--also)\n  \
attn.N.q, attn.N.o [T, heads, D]     queries; heads before projection (--also attn)\n  \
router_idx, router_weight [L, T, K]  chosen experts, best first (--also router)\n  \
per_layer_inputs [T, L, P]           combined per-layer inputs (--also per_layer)\n  \
mlp.N [T, H]                         feed-forward block before its post norm (--also mlp)\n  \
lens.ids, lens.probability [L, T, K] likeliest tokens by the head at each layer (--lens)\n\n\
Example:\n  lapidary dump -m MODEL --tokens 2,9259,1902 --layers all --dtype f32 -o out.safetensors")]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true)]
    pub tokens: Vec<u32>,
    /// The file to write
    #[arg(short = 'o', long, value_name = "FILE")]
    pub output: PathBuf,
    /// Layers whose output is written: all, or numbers separated by commas
    #[arg(long, value_name = "LAYERS", value_parser = Layers::parse)]
    pub layers: Option<Layers>,
    /// Arithmetic: f32 is true float32, fast multiplies with quantised activations
    #[arg(long, value_enum, default_value_t = ComputeArg::F32)]
    pub dtype: ComputeArg,
    /// Scale of the embeddings; bf16 for bf16 safetensors and f32 otherwise when not given
    #[arg(long, value_enum)]
    pub embed_scale: Option<ScaleArg>,
    /// A safetensors file with rows in place of embeddings: positions [n] i64, embeds [n, H] f32 and, if not all are
    /// images, types [n] i64 (1 image, 3 audio)
    #[arg(long, value_name = "FILE")]
    pub soft: Option<PathBuf>,
    /// Logit lens: the K likeliest tokens of the output head applied to each layer's output, 5 when not given
    #[arg(long, value_name = "K", num_args = 0..=1, default_missing_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub lens: Option<u32>,
    /// More to write, separated by commas; attn and mlp are of the layers of --layers, or of all
    #[arg(long, value_enum, value_delimiter = ',')]
    pub also: Vec<Also>,
    #[command(flatten)]
    pub steer: SteerArgs,
    #[command(flatten)]
    pub load: LoadArgs,
}

/// What can be written beside logits and layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Also {
    /// Scaled embeddings
    Embed,
    /// The residual after the final norm
    #[value(name = "final_norm")]
    FinalNorm,
    /// Queries and outputs of attention
    Attn,
    /// Chosen experts and weights
    Router,
    /// Combined per-layer inputs
    #[value(name = "per_layer")]
    PerLayer,
    /// Feed-forward blocks before their post norm
    Mlp,
}

/// A choice of layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layers {
    All,
    These(Vec<usize>),
}

impl Layers {
    fn parse(text: &str) -> Result<Layers, String> {
        if text == "all" {
            return Ok(Layers::All);
        }
        let number =
            |t: &str| t.trim().parse().map_err(|_| format!("\"{t}\" is neither a layer's number nor all"));
        let mut layers = text.split(',').map(number).collect::<Result<Vec<usize>, String>>()?;
        layers.sort_unstable();
        layers.dedup();
        Ok(Layers::These(layers))
    }
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let checkpoint = source::open(&args.model)?;
    let config = Config::from_checkpoint(&checkpoint)?;
    let soft = match &args.soft {
        Some(path) => read_soft(path, &config, args.tokens.len())?,
        None => Vec::new(),
    };
    let wanted = wanted(args, &config)?;
    let mut options = args.load.options(args.dtype);
    if let Some(scale) = args.embed_scale {
        options.embed_scale = scale.scale();
    }
    // Every row has logits here, and a block of vision rows must fit one batch.
    let longest = longest_run(&soft, config.hidden);
    let rows = args.tokens.len().min((args.load.chunk as usize).min(MOST_HEAD_ROWS).max(longest));
    (options.chunk, options.head_rows) = (rows, rows);
    options.context = Some(args.load.ctx.map_or(args.tokens.len(), |c| c as usize));
    let mut stepper = load::stepper(&checkpoint, &options, &args.load.device)?;
    load::tell_notes(&stepper);
    if let Some(steering) = args.steer.steering(&config)? {
        stepper.set_steering(Some(&steering.plan(&config)?.set))?;
    }
    let prompt = Prompt { tokens: args.tokens.clone(), soft };
    let captured = capture(&mut stepper, &prompt, &wanted)?;
    if let Some(c) =
        captured.iter().find(|c| matches!(&c.values, Values::F32(v) if v.iter().any(|x| !x.is_finite())))
    {
        eprintln!("warning: {} holds values that are not finite", c.name);
    }
    let tokens = args.tokens.iter().map(|&id| i64::from(id)).collect();
    let shape = vec![args.tokens.len()];
    let tokens = Captured { name: "input_ids".into(), shape, values: Values::I64(tokens) };
    let all: Vec<Captured> = std::iter::once(tokens).chain(captured).collect();
    let formats = Formats::of(&checkpoint, config.layers.len());
    save(&args.output, &all, &metadata(&formats, Some(&made_by(&stepper))))
}

/// Logits of a row may be a megabyte, so that more rows at once would only cost memory.
const MOST_HEAD_ROWS: usize = 64;

fn wanted(args: &Args, config: &Config) -> anyhow::Result<Wanted> {
    let count = config.layers.len();
    let all = || (0..count).collect::<Vec<_>>();
    let layers = match &args.layers {
        None => Vec::new(),
        Some(Layers::All) => all(),
        Some(Layers::These(list)) => list.clone(),
    };
    if let Some(layer) = layers.iter().find(|&&l| l >= count) {
        return Err(Usage(format!("--layers {layer}: the model has layers 0 to {}", count - 1)).into());
    }
    let has = |what| args.also.contains(&what);
    if has(Also::Router) && config.moe.is_none() {
        return Err(Usage("--also router: the model has no experts; leave it out".into()).into());
    }
    if has(Also::PerLayer) && config.per_layer.is_none() {
        return Err(Usage("--also per_layer: the model has no per-layer inputs; leave it out".into()).into());
    }
    let these = || if layers.is_empty() { all() } else { layers.clone() };
    let attention = if has(Also::Attn) { these() } else { Vec::new() };
    Ok(Wanted {
        layers: layers.clone(),
        embed: has(Also::Embed),
        final_norm: has(Also::FinalNorm),
        attention,
        router: has(Also::Router),
        per_layer: has(Also::PerLayer),
        mlp: if has(Also::Mlp) { these() } else { Vec::new() },
        lens: args.lens.unwrap_or(0) as usize,
    })
}

/// Rows of the longest run of adjacent vision rows.
fn longest_run(soft: &[SoftSpan], hidden: usize) -> usize {
    let (mut longest, mut run, mut next) = (0, 0, usize::MAX);
    for span in soft {
        let rows = span.values.len() / hidden;
        run = if span.start == next { run + rows } else { rows };
        next = span.start + rows;
        longest = longest.max(run);
    }
    longest
}

fn read_soft(path: &Path, config: &Config, length: usize) -> anyhow::Result<Vec<SoftSpan>> {
    let file = File::open(path)?;
    let name = path.display();
    let positions = i64s(&file, "positions")?
        .with_context(|| format!("{name} has no tensor positions; expected positions [n] of type I64"))?;
    let n = positions.len();
    let entry = file
        .find("embeds")
        .with_context(|| format!("{name} has no tensor embeds; expected embeds [n, H] of type F32"))?;
    if entry.dtype != Dtype::F32 || entry.shape != [n, config.hidden] {
        bail!(
            "embeds in {name} is {} of shape {:?}; expected F32 of shape [{n}, {}]",
            entry.dtype,
            entry.shape,
            config.hidden
        );
    }
    let embeds: Vec<f32> =
        file.bytes(entry).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let types = i64s(&file, "types")?.unwrap_or_else(|| vec![1; n]);
    if types.len() != n {
        bail!("types in {name} has {} entries; expected {n}, as positions has", types.len());
    }
    let mut spans = Vec::with_capacity(n);
    for (i, values) in embeds.chunks_exact(config.hidden).enumerate() {
        let start = usize::try_from(positions[i]).ok().filter(|&p| p < length);
        let Some(start) = start else {
            bail!(
                "positions in {name}: entry {i} is {}; expected 0 to {}, the places of --tokens",
                positions[i],
                length - 1
            );
        };
        let kind = match types[i] {
            1 => SoftKind::Vision,
            3 => SoftKind::Audio,
            other => bail!("types in {name}: entry {i} is {other}; expected 1 (image) or 3 (audio)"),
        };
        spans.push(SoftSpan { start, values: values.to_vec(), kind });
    }
    spans.sort_by_key(|s| s.start);
    if let Some(pair) = spans.windows(2).find(|p| p[0].start == p[1].start) {
        bail!("positions in {name}: {} is there twice; give each place one row", pair[0].start);
    }
    Ok(spans)
}

fn i64s(file: &File, name: &str) -> anyhow::Result<Option<Vec<i64>>> {
    let Some(entry) = file.find(name) else { return Ok(None) };
    if entry.dtype != Dtype::I64 || entry.shape.len() != 1 {
        bail!(
            "{name} in {} is {} of shape {:?}; expected I64 of shape [n]",
            file.path().display(),
            entry.dtype,
            entry.shape
        );
    }
    Ok(Some(file.bytes(entry).as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()))
}

pub(crate) fn save(
    path: &Path,
    captured: &[Captured],
    metadata: &BTreeMap<String, String>,
) -> anyhow::Result<()> {
    let bytes: Vec<Vec<u8>> = captured
        .iter()
        .map(|c| match &c.values {
            Values::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::I64(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        })
        .collect();
    let tensors: Vec<NewTensor<'_>> = captured
        .iter()
        .zip(&bytes)
        .map(|(c, bytes)| NewTensor {
            name: c.name.clone(),
            dtype: if matches!(c.values, Values::F32(_)) { Dtype::F32 } else { Dtype::I64 },
            shape: c.shape.clone(),
            bytes,
        })
        .collect();
    Ok(write(path, &tensors, metadata)?)
}
