//! `lapidary convert`

use std::io::{Write, stderr, stdout};
use std::path::PathBuf;

use anyhow::bail;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use lapidary::convert::{
    ConvertOptions, ConvertReport, EncodingError, Layout, MatrixReport, Mix, Types, to_gguf_with,
    to_safetensors,
};
use lapidary::text_source;
use lapidary_formats::Format;
use serde_json::{Value, json};

use crate::failure::Usage;
use crate::model_args::ModelArgs;
use crate::progress::{Bar, Unit};
use crate::report::{Align, Table, bytes};
use crate::source;

/// Write a model in another number format.
///
/// Reads plain safetensors (BF16, F16 or F32) and writes a GGUF file, or a folder of safetensors in FP8, NVFP4 or INT4.
/// Prints for every matrix how far its new values are from the old. One matrix is in memory at a time, and the result
/// takes its name when it is complete.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  lapidary convert -m ./gemma-4-E2B-it q4_k_m -o e2b-q4_k_m.gguf\n  \
lapidary convert -m ./gemma-4-31B-it fp8 -o gemma-4-31B-it-fp8\n\n\
Formats of GGUF files: f16, bf16, q8_0, q4_0 and q4_k_m choose types tensor by tensor as llama-quantize does; q4_0 for \
example stores the embedding in Q6_K. With --pure, and in all other formats, every matrix has the one type. Routers and \
norms are F32.\n\
Formats of safetensors: fp8 (a scale a row, activations per token), fp8_block (128 x 128), fp8_tensor, nvfp4 \
(compressed-tensors), nvfp4_modelopt, int4 (groups of 32). Embedding, head, router and norms stay as they are.")]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The format to write
    #[arg(value_name = "FORMAT", value_parser = formats())]
    pub format: Target,
    /// The file to write, or for safetensors the folder; it must not exist
    #[arg(short = 'o', long, value_name = "PATH")]
    pub output: PathBuf,
    /// Give every matrix of a GGUF file the one type, the embedding too
    #[arg(long)]
    pub pure: bool,
    /// The model's name in the GGUF file; the folder's when not given
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Gguf(Types),
    Safetensors(Layout),
}

const TARGETS: [(&str, Target); 24] = {
    use Target::{Gguf, Safetensors};
    use Types::All;
    [
        ("f32", Gguf(All(Format::F32))),
        ("f16", Gguf(Types::Mix(Mix::F16))),
        ("bf16", Gguf(Types::Mix(Mix::Bf16))),
        ("q8_0", Gguf(Types::Mix(Mix::Q8_0))),
        ("q4_0", Gguf(Types::Mix(Mix::Q4_0))),
        ("q4_k_m", Gguf(Types::Mix(Mix::Q4KM))),
        ("q4_1", Gguf(All(Format::Q4_1))),
        ("q5_0", Gguf(All(Format::Q5_0))),
        ("q5_1", Gguf(All(Format::Q5_1))),
        ("q2_k", Gguf(All(Format::Q2K))),
        ("q3_k", Gguf(All(Format::Q3K))),
        ("q4_k", Gguf(All(Format::Q4K))),
        ("q5_k", Gguf(All(Format::Q5K))),
        ("q6_k", Gguf(All(Format::Q6K))),
        ("iq4_nl", Gguf(All(Format::Iq4Nl))),
        ("iq4_xs", Gguf(All(Format::Iq4Xs))),
        ("mxfp4", Gguf(All(Format::Mxfp4))),
        ("nvfp4_gguf", Gguf(All(Format::GgufNvfp4))),
        ("fp8", Safetensors(Layout::Fp8Row)),
        ("fp8_block", Safetensors(Layout::Fp8Block)),
        ("fp8_tensor", Safetensors(Layout::Fp8Tensor)),
        ("nvfp4", Safetensors(Layout::Nvfp4Divisor)),
        ("nvfp4_modelopt", Safetensors(Layout::Nvfp4Multiplier)),
        ("int4", Safetensors(Layout::Int4)),
    ]
};

fn formats() -> impl TypedValueParser<Value = Target> {
    let find = |name: String| TARGETS.into_iter().find(|(n, _)| *n == name).expect("one of the names").1;
    PossibleValuesParser::new(TARGETS.map(|(name, _)| name)).map(find)
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    if args.output.symlink_metadata().is_ok() {
        bail!("{} exists; name another place or take it away first", args.output.display());
    }
    let checkpoint = source::open(&args.model)?;
    let mut bar = Bar::new("writing", Unit::Bytes);
    let mut progress = |w: lapidary::convert::Written| bar.at(w.done, w.total);
    let report = match args.format {
        Target::Gguf(types) => {
            let types = if args.pure { Types::All(types.base()) } else { types };
            let chat_template = text_source::template(&checkpoint)?;
            let options = ConvertOptions { types, name: args.name.clone(), chat_template };
            to_gguf_with(&checkpoint, &args.output, &options, &mut progress)?
        }
        Target::Safetensors(_) if args.pure || args.name.is_some() => {
            return Err(Usage("--pure and --name are of GGUF files; leave them out".into()).into());
        }
        Target::Safetensors(layout) => to_safetensors(&checkpoint, &args.output, layout, &mut progress)?,
    };
    drop(bar);
    match args.json {
        true => writeln!(stdout().lock(), "{:#}", as_json(args, &report))?,
        false => {
            stdout().lock().write_all(table(&report).render().as_bytes())?;
            notes(args, &report)?;
        }
    }
    Ok(())
}

fn table(report: &ConvertReport) -> Table {
    use Align::{Left, Right};
    let mut table = Table::new(&[
        ("matrix", Left),
        ("rows", Right),
        ("columns", Right),
        ("from", Left),
        ("to", Left),
        ("relative RMS error", Right),
        ("largest error", Right),
        ("largest value", Right),
    ]);
    let mut add = |name: &str, [rows, cols, from, to]: [String; 4], e: &EncodingError| {
        let errors =
            [format!("{:.3e}", e.relative_rms()), format!("{:.3e}", e.max), format!("{:.3e}", e.largest)];
        let cells = [name.to_owned(), rows, cols, from, to].into_iter().chain(errors);
        table.row(cells.collect());
    };
    for m in &report.matrices {
        let cells = [m.rows.to_string(), m.cols.to_string(), m.from.to_string(), m.format.to_string()];
        add(&m.tensor, cells, &m.error);
    }
    add("all", Default::default(), &total(&report.matrices));
    table
}

fn total(matrices: &[MatrixReport]) -> EncodingError {
    EncodingError::sum(matrices.iter().map(|m| &m.error))
}

fn notes(args: &Args, report: &ConvertReport) -> anyhow::Result<()> {
    let mut err = stderr().lock();
    for f in &report.fallbacks {
        writeln!(
            err,
            "note: {} is {}: its rows of {} are no whole blocks of the type chosen",
            f.tensor, f.format, f.cols
        )?;
    }
    if let Some(first) = report.dropped.first() {
        let n = report.dropped.len();
        writeln!(err, "note: {n} tensors that nobody reads are left out, {first} the first")?;
    }
    for note in &report.notes {
        writeln!(err, "note: {note}")?;
    }
    writeln!(err, "{}: {} tensors, {}", args.output.display(), report.tensors, bytes(report.bytes))?;
    Ok(())
}

fn as_json(args: &Args, report: &ConvertReport) -> Value {
    let errors = |e: &EncodingError| json!({"relative_rms": e.relative_rms(), "max": e.max, "largest_value": e.largest, "values": e.count});
    let matrix = |m: &MatrixReport| {
        json!({"tensor": m.tensor, "rows": m.rows, "cols": m.cols, "from": m.from.name(), "format": m.format.name(),
               "error": errors(&m.error)})
    };
    let fallbacks = report.fallbacks.iter();
    json!({
        "model": source::name(&args.model),
        "output": args.output.to_string_lossy(),
        "bytes": report.bytes,
        "tensors": report.tensors,
        "error": errors(&total(&report.matrices)),
        "matrices": report.matrices.iter().map(matrix).collect::<Vec<_>>(),
        "fallbacks": fallbacks
            .map(|f| json!({"tensor": f.tensor, "cols": f.cols, "format": f.format.name()}))
            .collect::<Vec<_>>(),
        "dropped": report.dropped,
        "notes": report.notes,
    })
}
