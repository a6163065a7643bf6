//! `lapidary batch`

use std::path::PathBuf;
use std::sync::Arc;

use lapidary_server::{App, ServerOptions, batch};

use crate::commands::serve::ServiceArgs;
use crate::model_args::{ComputeFlag, LoadArgs, ModelArgs};
use crate::progress::{Bar, Unit};
use crate::{load, source};

/// Answer a file of requests.
///
/// Reads requests in OpenAI's batch format (custom_id, method, url, body; one a line) and writes a line for each. An output
/// that is there already is gone on with: every custom_id is answered exactly once.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  lapidary batch -m MODEL requests.jsonl replies.jsonl")]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The requests
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// The replies
    #[arg(value_name = "OUT")]
    pub output: PathBuf,
    #[command(flatten)]
    pub compute: ComputeFlag,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub service: ServiceArgs,
    /// A name under which the model answers beside its own
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// Refuse requests with fields that have no effect
    #[arg(long)]
    pub strict: bool,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let service =
        load::service(&args.model, &args.load, args.compute.compute, args.service.options(args.strict))?;
    let mut names = args.served_model_name.clone();
    names.push(source::short_name(&args.model));
    let app = App::new(ServerOptions { names, strict: args.strict, ..ServerOptions::default() });
    app.serve(Arc::new(service));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut bar = Bar::new("answering", Unit::Requests);
    let parallel = args.service.parallel as usize;
    let work = batch::run(&app, &args.input, &args.output, parallel, |done, total| {
        bar.at(done as u64, total as u64)
    });
    let tally = runtime.block_on(work)?;
    drop(bar);
    eprintln!(
        "{} answered, {} of them refused or failed; {} were answered before",
        tally.answered, tally.failed, tally.skipped
    );
    Ok(())
}
