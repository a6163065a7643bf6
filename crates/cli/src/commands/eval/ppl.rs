//! `lapidary eval ppl`

use std::io::{Write, stdout};
use std::path::PathBuf;

use lapidary::Config;
use lapidary::eval::ppl;
use serde_json::json;

use super::input::{self, TextArgs};
use crate::model_args::{ComputeFlag, LoadArgs, ModelArgs};
use crate::source;

/// Perplexity of a text, or of the answers in conversations.
///
/// Cuts a text into windows, each from an empty sequence and with BOS before it, and scores every token once.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  lapidary eval ppl -m MODEL --text book.txt --window 2048 --stride 1024\n  \
lapidary eval ppl -m MODEL --chat answers.jsonl --json\n\n\
nats is the mean of -ln p over the tokens scored, perplexity exp(nats). The error is that of a mean of independent tokens. \
Values of different tokenizers compare by bits per byte alone."
)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    #[command(flatten)]
    compute: ComputeFlag,
    #[command(flatten)]
    load: LoadArgs,
    /// Keep the scores of finished windows in a file, and go on with one that is there
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let checkpoint = source::open(&args.model)?;
    let config = Config::from_checkpoint(&checkpoint)?;
    let (tokenizer, template) = input::text_of(&checkpoint, &config)?;
    let text = args.text.read(&tokenizer, &template, config.bos)?;
    let compute = args.compute.compute;
    let (mut stepper, options) = input::stepper(&checkpoint, &args.load, compute, text.context(), None)?;
    let run = input::run_of(&args.model, &checkpoint, &options)?;
    let mut record = input::record(args.record.as_deref(), "ppl", run, text.of())?;
    let result = ppl(&mut stepper, &text.units, &mut record, &mut input::progress())?;
    let bits_per_byte =
        text.bytes.map(|bytes| result.nats * result.tokens as f64 / std::f64::consts::LN_2 / bytes as f64);
    let mut out = stdout().lock();
    if args.json {
        let report = json!({
            "model": source::name(&args.model),
            "compute": compute.name(),
            "tokens": result.tokens,
            "nats": result.nats,
            "standard_error": result.standard_error,
            "perplexity": result.perplexity(),
            "bits_per_byte": bits_per_byte,
            "units": result.units.iter().map(|u| json!({"tokens": u.tokens, "nats": u.nats})).collect::<Vec<_>>(),
        });
        writeln!(out, "{report:#}")?;
        return Ok(());
    }
    writeln!(out, "tokens scored  {} in {} runs", result.tokens, text.units.len())?;
    writeln!(out, "nats a token   {:.5} +- {:.5}", result.nats, result.standard_error)?;
    writeln!(out, "perplexity     {:.4}", result.perplexity())?;
    if let Some(bits) = bits_per_byte {
        writeln!(out, "bits a byte    {bits:.5}")?;
    }
    Ok(())
}
