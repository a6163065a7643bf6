//! `lapidary steer`

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::ValueEnum;
use lapidary::steering::{ControlVector, FitOptions, LayerRange, Positions, fit};
use lapidary::{ChatInput, Gemma, TemplateSource};
use lapidary_text::Specials;
use serde_json::json;

use crate::failure::Usage;
use crate::load;
use crate::model_args::{ComputeArg, LoadArgs, ModelArgs};
use crate::progress::{Bar, Unit};

/// Make control vectors.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Fit(FitArgs),
    Show(ShowArgs),
}

/// Make a control vector from two sets of prompts.
///
/// The direction of a layer is the difference of the mean outputs of the layer over both sets. A set is a text file with
/// a prompt a line; \n in a line stands for a line break.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example, with the built-in model:\n  \
printf 'There was a owl\\nA little owl\\n' > owl.txt; printf 'There was a fox\\nA little fox\\n' > fox.txt\n  \
lapidary steer fit --raw --with owl.txt --without fox.txt --layers 1-3 -o owl.gguf\n  \
lapidary run --raw \"Once upon a time there was a\" --steer file=owl.gguf,strength=0.3")]
pub struct FitArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Prompts that have what the vector is to point to
    #[arg(long, value_name = "FILE")]
    pub with: PathBuf,
    /// Prompts that differ from them in having it not
    #[arg(long, value_name = "FILE")]
    pub without: PathBuf,
    /// The layers, as in 3-9; all but the first and the last when not given
    #[arg(long, value_name = "A-B")]
    pub layers: Option<LayerRange>,
    /// Which positions of a prompt count
    #[arg(long, value_enum, default_value_t = PositionsArg::Last)]
    pub position: PositionsArg,
    /// Take the first principal component in place of the difference of means
    #[arg(long)]
    pub pca: bool,
    /// Read prompts as they stand, without a chat template
    #[arg(long)]
    pub raw: bool,
    /// The file to write, .gguf (without layer 0) or .safetensors; may be given twice
    #[arg(short = 'o', long, value_name = "FILE", required = true)]
    pub output: Vec<PathBuf>,
    /// Arithmetic: f32 is true float32, fast multiplies with quantised activations
    #[arg(long, value_enum, default_value_t = ComputeArg::F32)]
    pub compute: ComputeArg,
    #[command(flatten)]
    pub load: LoadArgs,
    /// Print the figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// Positions that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PositionsArg {
    /// The last one
    Last,
    /// The mean of all but the first
    Mean,
    /// All but the first, each for itself
    All,
}

/// Tell what a control vector's file holds.
#[derive(Debug, clap::Args)]
pub struct ShowArgs {
    /// The file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    match &args.command {
        Command::Fit(args) => run_fit(args),
        Command::Show(args) => show(args),
    }
}

fn run_fit(args: &FitArgs) -> anyhow::Result<()> {
    let (with, without) = (lines(&args.with)?, lines(&args.without)?);
    let mut gemma = load::gemma(&args.model, &args.load, args.compute)?;
    let count = gemma.config().layers.len();
    let layers: Vec<usize> = match args.layers {
        Some(range) if range.last >= count => {
            return Err(Usage(format!("--layers {range}: the model has layers 0 to {}", count - 1)).into());
        }
        Some(range) => (range.first..=range.last).collect(),
        None => (1..count - 1).collect(),
    };
    let raw = args.raw || gemma.template_source() != TemplateSource::Checkpoint;
    let encoded = |prompts: &[String]| {
        prompts.iter().map(|p| encode(&gemma, p, raw)).collect::<anyhow::Result<Vec<_>>>()
    };
    let (with, without) = (encoded(&with)?, encoded(&without)?);
    let positions = match args.position {
        PositionsArg::Last => Positions::Last,
        PositionsArg::Mean => Positions::Mean,
        PositionsArg::All => Positions::All,
    };
    let options = FitOptions { layers, positions, pca: args.pca };
    let mut bar = Bar::new("running prompts", Unit::Prompts);
    let total = (with.len() + without.len()) as u64;
    let (vector, fits) =
        fit(gemma.stepper(), &with, &without, &options, &mut |done| bar.at(done as u64, total))?;
    drop(bar);
    for path in &args.output {
        vector.write(path).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let mut out = stdout().lock();
    if args.json {
        let rows: Vec<_> = fits
            .iter()
            .map(
                |f| json!({"layer": f.layer, "norm": f.norm, "row_norm": f.row_norm, "accuracy": f.accuracy}),
            )
            .collect();
        writeln!(out, "{:#}", json!({"layers": rows}))?;
        return Ok(());
    }
    writeln!(out, "layer      norm  mean row   sides told apart")?;
    for f in &fits {
        writeln!(
            out,
            "{:>5}  {:>8.3}  {:>8.3}  {:>15.1} %",
            f.layer,
            f.norm,
            f.row_norm,
            100.0 * f.accuracy
        )?;
    }
    Ok(())
}

fn encode(gemma: &Gemma, prompt: &str, raw: bool) -> anyhow::Result<Vec<u32>> {
    if raw {
        return Ok(gemma.tokenizer().encode_prompt(prompt, Specials::Parse)?);
    }
    let messages = vec![json!({"role": "user", "content": prompt})];
    let input = ChatInput { messages, ..ChatInput::default() };
    Ok(gemma.template().encode(gemma.tokenizer(), &input)?.ids)
}

/// The prompts of a file, one a line.
fn lines(path: &Path) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let lines: Vec<String> = lines.map(|line| line.replace("\\n", "\n")).collect();
    if lines.is_empty() {
        bail!("{} holds no prompt; expected one a line", path.display());
    }
    Ok(lines)
}

fn show(args: &ShowArgs) -> anyhow::Result<()> {
    let vector = ControlVector::read(&args.file)?;
    let norm = |v: &Vec<f32>| v.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    let mut out = stdout().lock();
    if args.json {
        let rows: Vec<_> =
            vector.directions.iter().map(|(layer, v)| json!({"layer": layer, "norm": norm(v)})).collect();
        let value = json!({
            "width": vector.width(),
            "model_layers": vector.model_layers,
            "model_hint": vector.model_hint,
            "directions": rows,
        });
        writeln!(out, "{value:#}")?;
        return Ok(());
    }
    writeln!(out, "width        {}", vector.width())?;
    if let Some(layers) = vector.model_layers {
        writeln!(out, "made for     {layers} layers")?;
    }
    if let Some(hint) = vector.model_hint.as_deref().filter(|h| !h.is_empty()) {
        writeln!(out, "made on      {hint}")?;
    }
    for (layer, values) in &vector.directions {
        writeln!(out, "direction.{layer:<3} length {:.4}", norm(values))?;
    }
    Ok(())
}
