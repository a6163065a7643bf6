//! `lapidary verify`

use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use lapidary::verify::{Arithmetic, Dump, Formats, Report, Whole, default_tokens, verify};
use lapidary::{Config, Stepper};
use serde_json::{Value, json};

use crate::failure::Usage;
use crate::load;
use crate::model_args::{ComputeArg, LoadArgs, ModelArgs};
use crate::report::{Align, Table};
use crate::source;

/// Hold a model against a dump, layer by layer.
///
/// Gives each layer the residual stream that the dump's layer was given, and holds its output against the dump's. Names
/// the first layer that differs by more than number formats explain. Without a dump the fast arithmetic is held against
/// float32 on the same weights.
#[derive(Debug, clap::Args)]
#[command(after_help = "A dump is written by --write, by lapidary dump --layers all --also embed, or by\n\
scripts/reference/dump.py from the published implementation.\n\n\
Examples:\n  lapidary verify -m FOLDER --write good.safetensors\n  \
lapidary verify -m model-q4_k_m.gguf --against good.safetensors\n\n\
Exit code 1 when a part departs.")]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The dump to hold it against
    #[arg(long, value_name = "DUMP")]
    pub against: Option<PathBuf>,
    /// Write a dump of this model instead
    #[arg(long, value_name = "DUMP", conflicts_with = "against")]
    pub write: Option<PathBuf>,
    /// Token ids of the dump to write or of the comparison without one, separated by commas; 48 from all over the vocabulary
    /// when not given
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "against")]
    pub tokens: Vec<u32>,
    /// Arithmetic: f32 is true float32, fast multiplies with quantised activations
    #[arg(long, value_enum, default_value_t = ComputeArg::F32)]
    pub compute: ComputeArg,
    #[command(flatten)]
    pub load: LoadArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Tokens of a prompt that nobody chose: more than a tiny window, and quick.
const TOKENS: usize = 48;

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let checkpoint = source::open(&args.model)?;
    let config = Config::from_checkpoint(&checkpoint)?;
    let layers = config.layers.len();
    let formats = Formats::of(&checkpoint, layers);
    let dump = match &args.against {
        Some(path) => Some(Dump::read(path, layers, config.hidden, config.vocab)?),
        None => None,
    };
    let rows = match &dump {
        Some(dump) => dump.tokens.len(),
        None if args.tokens.is_empty() => TOKENS,
        None => args.tokens.len(),
    };
    let stepper = |compute: ComputeArg| -> anyhow::Result<Stepper> {
        let mut options = args.load.options(compute);
        (options.chunk, options.head_rows) = (rows, rows.min(64));
        options.context = Some(rows);
        load::stepper(&checkpoint, &options, &args.load.device)
    };
    let tokens = |s: &Stepper| match args.tokens.is_empty() {
        true => default_tokens(s, TOKENS),
        false => args.tokens.clone(),
    };
    let first = match &dump {
        Some(_) => args.compute,
        None => ComputeArg::F32,
    };
    let mut judged = stepper(first)?;
    load::tell_notes(&judged);
    if let Some(path) = &args.write {
        if args.compute != ComputeArg::F32 {
            return Err(Usage("--write takes float32 arithmetic; leave --compute out".into()).into());
        }
        let ids = tokens(&judged);
        Dump::make(&mut judged, &ids, formats)?.write(path)?;
        eprintln!("{} tokens through {layers} layers are in {}", rows, path.display());
        return Ok(ExitCode::SUCCESS);
    }
    let (dump, arithmetic) = match dump {
        Some(dump) => (dump, args.compute),
        None => {
            let ids = tokens(&judged);
            let dump = Dump::make(&mut judged, &ids, formats.clone())?;
            drop(judged);
            judged = stepper(ComputeArg::Fast)?;
            (dump, ComputeArg::Fast)
        }
    };
    let arithmetic = match arithmetic {
        ComputeArg::F32 => Arithmetic::F32,
        ComputeArg::Fast => Arithmetic::Fast,
    };
    let report = verify(&mut judged, &formats, arithmetic, &dump)?;
    let mut out = stdout().lock();
    match args.json {
        true => writeln!(out, "{:#}", as_json(&report))?,
        false => out.write_all(text(&report).as_bytes())?,
    }
    Ok(if report.first_departure().is_some() { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

fn text(r: &Report) -> String {
    let mut table = Table::new(&[
        ("part", Align::Left),
        ("format", Align::Left),
        ("by itself", Align::Right),
        ("worst row", Align::Right),
        ("explained", Align::Right),
        ("as a whole", Align::Right),
        ("", Align::Left),
    ]);
    let mut row = |part: String, format: String, c: &lapidary::verify::Check, whole: Option<f64>| {
        let whole = whole.map_or(String::new(), |w| format!("{w:.2e}"));
        let mark = if c.departs() { "departs" } else { "" };
        let figures = [c.median, c.worst, c.allowed].map(|v| format!("{v:.2e}"));
        let [median, worst, allowed] = figures;
        table.row(vec![part, format, median, worst, allowed, whole, mark.to_owned()]);
    };
    row("embed".into(), r.formats.embed.to_string(), &r.embed, None);
    for (n, c) in r.layers.iter().enumerate() {
        row(format!("layer {n}"), r.formats.layers[n].to_string(), c, r.whole.as_ref().map(|w| w.layers[n]));
    }
    row("head".into(), r.formats.head.to_string(), &r.head, None);
    let verdict = match r.first_departure() {
        None if r.same_program => {
            "every part is as in the dump, as it must be with the same program".to_owned()
        }
        None if r.same_formats => "no part departs by more than arithmetic explains".to_owned(),
        None => "no part departs by more than arithmetic and formats explain".to_owned(),
        Some(part) => format!("{part} is the first that departs by more than is explained"),
    };
    let whole = match &r.whole {
        None => "as a whole the model gives logits that are not finite".to_owned(),
        Some(Whole { logits: d, .. }) => format!(
            "logits of {} positions: KL {:.3e} on average, {:.3e} at most; same likeliest token {:.1} %; rms {:.3e}",
            d.positions,
            d.kl,
            d.kl_max,
            100.0 * d.top1,
            d.rms
        ),
    };
    format!("{}{whole}\n{verdict}\n", table.render())
}

fn as_json(r: &Report) -> Value {
    let check = |part: String, c: &lapidary::verify::Check| json!({"part": part, "median": c.median, "worst": c.worst, "explained": c.allowed, "departs": c.departs()});
    let mut parts = vec![check("embed".into(), &r.embed)];
    parts.extend(r.layers.iter().enumerate().map(|(n, c)| check(format!("layer {n}"), c)));
    parts.push(check("head".into(), &r.head));
    let whole = r.whole.as_ref().map(|Whole { layers, logits: d }| {
        json!({"layers": layers, "positions": d.positions, "kl": d.kl, "kl_max": d.kl_max, "top1": d.top1, "rms": d.rms, "largest": d.largest})
    });
    json!({
        "parts": parts,
        "whole": whole,
        "same_formats": r.same_formats,
        "first_departure": r.first_departure(),
    })
}
