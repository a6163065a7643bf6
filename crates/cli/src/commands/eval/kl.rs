//! `lapidary eval kl`

use std::ffi::OsString;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use lapidary::eval::{DumpFile, Kl, Record, Rows, StepperRows, kl};
use lapidary::{Checkpoint, Config, LoadOptions, Stepper};
use serde_json::{Value, json};

use super::input::{self, Input, TextArgs};
use crate::model_args::{ComputeArg, ComputeFlag, KvArg, LevelArg, LoadArgs, ModelArgs, ScaleArg};
use crate::report::{Align, Table};
use crate::source;

/// Distance between a model and a reference: KL divergence, agreement, errors of logits.
///
/// Runs both over the same tokens and compares the distributions of the next token, token by token. The reference is
/// another model (the unquantised one), the same model in exact arithmetic, or a file of logits that another program wrote.
/// Beside it stands the noise floor: how far the reference is from itself when only its rounding differs.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  lapidary eval kl -m model-q4_k_m.gguf --reference ./model --text book.txt\n  \
lapidary eval kl -m MODEL --compute fast --text book.txt          what quantised activations cost\n  \
lapidary eval kl -m MODEL --against reference.safetensors         logits written by dump, or scripts/reference/dump.py\n\n\
KL is KL(reference || model) in nats. The floor of a model is its float32 run in another order of summation (the next \
lower instruction set); that of a file is its logits_bf16, if it has them."
)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The model to compare with; the same as the model when not given
    #[arg(long, value_name = "MODEL", conflicts_with = "against")]
    reference: Option<OsString>,
    /// A file of logits to compare with
    #[arg(long, value_name = "DUMP", conflicts_with_all = ["text", "chat"])]
    against: Option<PathBuf>,
    /// Token ids that the file is of, separated by commas, where it has no input_ids
    #[arg(long, value_name = "IDS", value_delimiter = ',', requires = "against")]
    tokens: Vec<u32>,
    #[command(flatten)]
    text: TextArgs,
    #[command(flatten)]
    compute: ComputeFlag,
    /// Arithmetic of the reference
    #[arg(long, value_enum, default_value_t = ComputeArg::F32)]
    reference_compute: ComputeArg,
    /// Element type of the reference's keys and values; by its arithmetic when not given
    #[arg(long, value_enum)]
    reference_kv: Option<KvArg>,
    /// Scale of the embeddings in every run; bf16 for bf16 safetensors and f32 otherwise when not given
    #[arg(long, value_enum)]
    embed_scale: Option<ScaleArg>,
    /// Leave the noise floor out
    #[arg(long)]
    no_floor: bool,
    #[command(flatten)]
    load: LoadArgs,
    /// Keep what finished windows gave in a file, and go on with one that is there
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Where the reference's rows come from, and those of its floor.
struct Compared {
    reference: String,
    /// What the floor is; `None` where there is none.
    floor: Option<String>,
    results: Vec<Kl>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let checkpoint = source::open(&args.model)?;
    let compared = match &args.against {
        Some(path) => with_dump(args, &checkpoint, path)?,
        None => with_model(args, &checkpoint)?,
    };
    let mut out = stdout().lock();
    match args.json {
        true => writeln!(out, "{:#}", as_json(args, &compared))?,
        false => {
            writeln!(out, "{} positions against {}", compared.results[0].positions, compared.reference)?;
            out.write_all(table(&compared).render().as_bytes())?;
            if let Some(floor) = &compared.floor {
                writeln!(out, "floor: {floor}")?;
            }
        }
    }
    Ok(())
}

fn with_dump(args: &Args, checkpoint: &Checkpoint, path: &Path) -> anyhow::Result<Compared> {
    let given = Some(&args.tokens[..]).filter(|t| !t.is_empty());
    let dump = DumpFile::open(path, given)?;
    let input = Input::of_dump(path, dump.unit()?)?;
    let (mut test, options) =
        input::stepper(checkpoint, &args.load, args.compute.compute, input.context(), args.embed_scale)?;
    let mut record = record(args, checkpoint, &options, Value::Null, false, &input)?;
    let mut reference = dump.rows("logits")?;
    let mut test = StepperRows(&mut test);
    let floor = dump.has("logits_bf16") && !args.no_floor;
    let mut bf16 = if floor { Some(dump.rows("logits_bf16")?) } else { None };
    let mut tests: Vec<&mut dyn Rows> = vec![&mut test];
    tests.extend(bf16.as_mut().map(|rows| rows as &mut dyn Rows));
    let results = kl(&mut reference, &mut tests, &input.units, &mut record, &mut input::progress())?;
    let floor = floor.then(|| "the file's run in bfloat16".to_owned());
    Ok(Compared { reference: path.display().to_string(), floor, results })
}

fn with_model(args: &Args, checkpoint: &Checkpoint) -> anyhow::Result<Compared> {
    let model = ModelArgs {
        model: args.reference.clone().or_else(|| args.model.model.clone()),
        store: args.model.store,
    };
    let reference_checkpoint = source::open(&model)?;
    let config = Config::from_checkpoint(&reference_checkpoint)?;
    let (tokenizer, template) = input::text_of(&reference_checkpoint, &config)?;
    let input = args.text.read(&tokenizer, &template, config.bos)?;

    let mut load = args.load.clone();
    load.device.kv = args.reference_kv;
    // The reference is what its file holds.
    (load.device.weights, load.device.head) = (None, None);
    let context = input.context();
    let (mut reference, reference_options) =
        input::stepper(&reference_checkpoint, &load, args.reference_compute, context, args.embed_scale)?;
    let (mut test, options) =
        input::stepper(checkpoint, &args.load, args.compute.compute, context, args.embed_scale)?;
    let mut floor = match args.no_floor {
        true => None,
        false => floor(args, &reference, &reference_checkpoint, &mut load, context)?,
    };

    let reference_run = input::run_of(&model, &reference_checkpoint, &reference_options)?;
    let mut record = record(args, checkpoint, &options, reference_run, floor.is_some(), &input)?;
    let mut test = StepperRows(&mut test);
    let mut tests: Vec<&mut dyn Rows> = vec![&mut test];
    let mut floor_rows = floor.as_mut().map(|(stepper, _)| StepperRows(stepper));
    tests.extend(floor_rows.as_mut().map(|rows| rows as &mut dyn Rows));
    let mut reference = StepperRows(&mut reference);
    let results = kl(&mut reference, &mut tests, &input.units, &mut record, &mut input::progress())?;
    let name = format!("{} in {}", source::name(&model), args.reference_compute.name());
    Ok(Compared { reference: name, floor: floor.map(|(_, what)| what), results })
}

/// The reference again, summing in another order.
fn floor(
    args: &Args,
    reference: &Stepper,
    checkpoint: &Checkpoint,
    load: &mut LoadArgs,
    context: usize,
) -> anyhow::Result<Option<(Stepper, String)>> {
    let used = reference.runner().report().level;
    let lower = match used.as_str() {
        level if level.contains("512") => LevelArg::Avx2,
        level if level.contains("avx2") => LevelArg::Scalar,
        _ => {
            eprintln!("note: no floor: level {used} has no lower one that sums in another order");
            return Ok(None);
        }
    };
    load.device.level = Some(lower);
    let (stepper, _) = input::stepper(checkpoint, load, args.reference_compute, context, args.embed_scale)?;
    let what = format!("the reference with level {} in place of {used}", lower.level().name());
    Ok(Some((stepper, what)))
}

fn record(
    args: &Args,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    reference: Value,
    floor: bool,
    input: &Input,
) -> anyhow::Result<Record> {
    let test = input::run_of(&args.model, checkpoint, options)?;
    let runs = json!({"model": test, "reference": reference, "floor": floor});
    input::record(args.record.as_deref(), "kl", runs, input.of())
}

fn table(compared: &Compared) -> Table {
    use Align::{Left, Right};
    let mut table = Table::new(&[
        ("", Left),
        ("mean KL", Right),
        ("+-", Right),
        ("median", Right),
        ("p99", Right),
        ("largest", Right),
        ("same best token", Right),
        ("logit RMS", Right),
        ("relative", Right),
        ("furthest logit", Right),
    ]);
    for (name, k) in ["model", "floor"].into_iter().zip(&compared.results) {
        let figures = [k.mean, k.standard_error, k.median, k.p99, k.max].map(|v| format!("{v:.3e}"));
        let mut cells = vec![name.to_owned()];
        cells.extend(figures);
        cells.push(format!("{:.2} %", 100.0 * k.same_top));
        cells.extend([k.logit_rms, k.logit_relative, k.logit_max].map(|v| format!("{v:.3e}")));
        table.row(cells);
    }
    table
}

fn as_json(args: &Args, compared: &Compared) -> Value {
    let mut report = json!({
        "model": source::name(&args.model),
        "compute": args.compute.compute.name(),
        "reference": compared.reference,
        "floor_is": compared.floor,
    });
    for (key, k) in ["distance", "floor"].into_iter().zip(&compared.results) {
        report[key] = json!({
            "positions": k.positions,
            "mean_kl": k.mean,
            "standard_error": k.standard_error,
            "median_kl": k.median,
            "p99_kl": k.p99,
            "max_kl": k.max,
            "same_top": k.same_top,
            "logit_rms": k.logit_rms,
            "logit_relative": k.logit_relative,
            "logit_max": k.logit_max,
            "nats_reference": k.nats[0],
            "nats_model": k.nats[1],
        });
    }
    report
}
