//! `lapidary convert`

use std::io::{Write, stderr, stdout};
use std::path::PathBuf;

use clap::ValueEnum;
use lapidary::convert::{
    ConvertOptions, ConvertReport, TensorLoss, chat_template, to_folder, to_gguf_watched,
};
use lapidary::text_source;
use lapidary_model::{Config, Family};
use lapidary_text::Builtin;
use lapidary_weights::Checkpoint;
use lapidary_weights::export::Layout;
use serde_json::{Value, json};

use crate::progress::{Bar, Unit};
use crate::report::{Align, Table, bytes};

/// Write a model in another format.
///
/// Writes a safetensors checkpoint as a GGUF file or as quantised safetensors, and tells what each matrix lost.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  lapidary convert FOLDER q8_0 -o model-q8_0.gguf\n  \
lapidary convert FOLDER nvfp4 -o FOLDER-nvfp4\n\n\
The relative error is the root mean square of what a matrix lost over that of its values. Router, norms and other small \
tensors are kept; GGUF files have them in float32.")]
pub struct Args {
    /// The model: a folder with config.json and .safetensors files in bf16, f16 or f32
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// The format of its matrices
    #[arg(value_name = "FORMAT", value_enum)]
    pub format: Target,
    /// The file to write, or the folder for safetensors
    #[arg(short = 'o', long, value_name = "PATH")]
    pub output: PathBuf,
    /// Write over a file that is there
    #[arg(long)]
    pub force: bool,
    /// Tell the figures of every matrix, not of the worst ones only
    #[arg(long)]
    pub all: bool,
    /// Print the figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// Formats that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// GGUF, unquantised
    Bf16,
    /// GGUF, unquantised
    F16,
    /// GGUF, 8 bits, blocks of 32
    #[value(name = "q8_0")]
    Q8_0,
    /// GGUF, 4 bits, blocks of 32
    #[value(name = "q4_0")]
    Q4_0,
    /// GGUF, 4 bits, blocks of 256; more bits where it hurts most
    #[value(name = "q4_k_m")]
    Q4KM,
    /// Safetensors, FP8 with a scale a row
    Fp8,
    /// Safetensors, FP8 with a scale for each 128 x 128 block
    #[value(name = "fp8-block")]
    Fp8Block,
    /// Safetensors, NVFP4 as compressed-tensors writes it
    Nvfp4,
    /// Safetensors, NVFP4 as ModelOpt writes it
    #[value(name = "nvfp4-modelopt")]
    Nvfp4Modelopt,
}

enum Way {
    Gguf(lapidary_ops::Format, bool),
    Folder(Layout),
}

impl Target {
    fn way(self) -> Way {
        use lapidary_ops::Format;
        match self {
            Target::Bf16 => Way::Gguf(Format::Bf16, false),
            Target::F16 => Way::Gguf(Format::F16, false),
            Target::Q8_0 => Way::Gguf(Format::Q8_0, false),
            Target::Q4_0 => Way::Gguf(Format::Q4_0, false),
            Target::Q4KM => Way::Gguf(Format::Q4K, true),
            Target::Fp8 => Way::Folder(Layout::Fp8Row),
            Target::Fp8Block => Way::Folder(Layout::Fp8Block),
            Target::Nvfp4 => Way::Folder(Layout::Nvfp4Divisor),
            Target::Nvfp4Modelopt => Way::Folder(Layout::Nvfp4Multiplier),
        }
    }
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let checkpoint = Checkpoint::open(&args.model)?;
    if args.output.is_file() && !args.force {
        anyhow::bail!("{} is there already; name another, or pass --force", args.output.display());
    }
    let report = match args.format.way() {
        Way::Folder(layout) => to_folder(&checkpoint, &args.output, layout)?,
        Way::Gguf(format, medium) => {
            let options = ConvertOptions {
                medium,
                chat_template: Some(template(&checkpoint)?),
                ..ConvertOptions::new(format)
            };
            let mut bar = Bar::new("converting", Unit::Tensors);
            to_gguf_watched(&checkpoint, &args.output, &options, &mut |done, all| {
                bar.at(done as u64, all as u64)
            })?
        }
    };
    report.notes.iter().for_each(|note| eprintln!("note: {note}"));
    for f in &report.fallbacks {
        eprintln!("note: {} has rows of {} values and is in {}", f.tensor, f.cols, f.format);
    }
    if args.json {
        writeln!(stdout().lock(), "{:#}", as_json(&report))?;
        return Ok(());
    }
    stdout().lock().write_all(table(&report, args.all).as_bytes())?;
    writeln!(stderr(), "{}: {} tensors, {}", args.output.display(), report.tensors, bytes(report.bytes))?;
    Ok(())
}

/// The checkpoint's own template, or the project's for its family.
fn template(checkpoint: &Checkpoint) -> anyhow::Result<String> {
    if let Some(own) = text_source::template(checkpoint)? {
        return Ok(own);
    }
    let config = Config::from_checkpoint(checkpoint)?;
    Ok(chat_template(match config.family {
        Family::Gemma3 => Builtin::Gemma3,
        Family::Gemma4 if config.per_layer.is_some() => Builtin::Gemma4Small,
        Family::Gemma4 => Builtin::Gemma4,
    }))
}

/// Matrices that a table shows unless all are asked for.
const WORST: usize = 12;

fn table(report: &ConvertReport, all: bool) -> String {
    let mut losses: Vec<&TensorLoss> = report.losses.iter().collect();
    let mut table = Table::new(&[
        ("tensor", Align::Left),
        ("format", Align::Left),
        ("size", Align::Right),
        ("relative error", Align::Right),
        ("largest error", Align::Right),
    ]);
    if !all {
        losses.sort_by(|a, b| b.loss.relative().total_cmp(&a.loss.relative()));
        losses.truncate(WORST);
    }
    for l in &losses {
        table.row(vec![
            l.tensor.clone(),
            l.format.to_string(),
            bytes(l.bytes),
            format!("{:.6}", l.loss.relative()),
            format!("{:.6}", l.loss.largest),
        ]);
    }
    let left_out = report.losses.len() - losses.len();
    let more = if left_out == 0 {
        String::new()
    } else {
        format!("and {left_out} with smaller errors; --all shows them\n")
    };
    table.render() + &more
}

fn as_json(report: &ConvertReport) -> Value {
    let loss = |l: &TensorLoss| {
        json!({"tensor": l.tensor, "format": l.format.to_string(), "bytes": l.bytes,
               "relative_error": l.loss.relative(), "largest_error": l.loss.largest})
    };
    json!({
        "bytes": report.bytes,
        "tensors": report.tensors,
        "losses": report.losses.iter().map(loss).collect::<Vec<_>>(),
        "dropped": report.dropped,
        "notes": report.notes,
    })
}
