//! `lapidary eval choice`

use std::io::{Write, stdout};
use std::path::PathBuf;

use lapidary::Config;
use lapidary::eval::{ChoiceResult, choice, questions};
use serde_json::{Value, json};

use super::input;
use crate::model_args::{ComputeFlag, LoadArgs, ModelArgs};
use crate::report::{Align, Table};
use crate::source;

/// Multiple choice: how often the right answer is the likeliest.
///
/// Scores each choice's tokens behind the prompt. Three counts are told: by the sum of ln p, by ln p a token, and by ln p a
/// byte, since sums favour short answers.
#[derive(Debug, clap::Args)]
#[command(after_help = "A line of the file is\n  \
{\"prompt\": \"The capital of Peru is\", \"choices\": [\" Lima\", \" Quito\"], \"answer\": 0}\n\
where the answer may be the text of a choice, and \"messages\": [..] in place of the prompt goes through the chat template.\n\n\
Example:\n  lapidary eval choice -m MODEL --questions questions.jsonl")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The questions, a line of JSON each
    #[arg(long, value_name = "JSONL")]
    questions: PathBuf,
    #[command(flatten)]
    compute: ComputeFlag,
    #[command(flatten)]
    load: LoadArgs,
    /// Keep the scores of finished questions in a file, and go on with one that is there
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

type Best = fn(&ChoiceResult) -> usize;

const COUNTS: [(&str, &str, Best); 3] = [
    ("sum", "ln p", ChoiceResult::best),
    ("per_token", "ln p a token", ChoiceResult::best_per_token),
    ("per_byte", "ln p a byte", ChoiceResult::best_per_byte),
];

pub fn run(args: &Args) -> anyhow::Result<()> {
    let lines = input::read_text(&args.questions)?;
    let questions = questions(&args.questions, &lines)?;
    let checkpoint = source::open(&args.model)?;
    let config = Config::from_checkpoint(&checkpoint)?;
    let (tokenizer, template) = input::text_of(&checkpoint, &config)?;
    let context = args.load.options(args.compute.compute).context_for(&config);
    let (mut stepper, options) =
        input::stepper(&checkpoint, &args.load, args.compute.compute, context, None)?;
    let run = input::run_of(&args.model, &checkpoint, &options)?;
    let of = json!({"questions": input::fingerprint(lines.as_bytes())});
    let mut record = input::record(args.record.as_deref(), "choice", run, &of)?;
    let result =
        choice(&mut stepper, &tokenizer, &template, &questions, &mut record, &mut input::progress())?;
    let mut out = stdout().lock();
    if args.json {
        let mut accuracy = serde_json::Map::new();
        for (key, _, best) in COUNTS {
            let (share, error) = result.accuracy(best);
            accuracy.insert(key.into(), json!({"accuracy": share, "standard_error": error}));
        }
        let each: Vec<Value> = result
            .results
            .iter()
            .map(|r| json!({"answer": r.answer, "best": r.best(), "log_p": r.log_p, "tokens": r.tokens, "bytes": r.bytes}))
            .collect();
        let report = json!({
            "model": source::name(&args.model),
            "compute": args.compute.compute.name(),
            "questions": result.results.len(),
            "accuracy": accuracy,
            "results": each,
        });
        writeln!(out, "{report:#}")?;
        return Ok(());
    }
    let mut table = Table::new(&[("by", Align::Left), ("right", Align::Right), ("+-", Align::Right)]);
    for (_, name, best) in COUNTS {
        let (share, error) = result.accuracy(best);
        table.row(vec![name.into(), format!("{:.2} %", 100.0 * share), format!("{:.2}", 100.0 * error)]);
    }
    writeln!(out, "{} questions", result.results.len())?;
    out.write_all(table.render().as_bytes())?;
    Ok(())
}
