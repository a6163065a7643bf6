//! `lapidary pull OWNER/NAME[:FILE]`

use std::collections::HashMap;
use std::io::{Write, stdout};

use lapidary::hub::{Hub, HubBuilder, Progress, Snapshot, Spec, Watch};
use serde_json::json;

use crate::model_args::StoreArgs;
use crate::progress::{Bar, Unit};

/// Download a model from the hub.
///
/// Downloads a model into the store that it shares with other tools (HF_HOME, else ~/.cache/huggingface). An interrupted
/// download goes on where it stopped; sizes and hashes are checked. HF_TOKEN opens gated models, HF_ENDPOINT names another
/// server.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  lapidary pull google/gemma-4-E2B-it            the safetensors model with its tokenizer\n  \
lapidary pull owner/name-GGUF:Q4_K_M           the GGUF file of that quantisation\n  lapidary pull owner/name@v1.0:model.gguf       a file of a revision"
)]
pub struct Args {
    /// owner/name[@revision][:quant-or-file]
    #[arg(value_name = "REPO")]
    pub repo: String,
    #[command(flatten)]
    pub store: StoreArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let snapshot = fetch(&args.repo, args.store)?;
    let mut out = stdout().lock();
    match args.json {
        true => {
            let files: Vec<_> = snapshot.files.iter().map(|f| f.to_string_lossy()).collect();
            let result = json!({
                "repo": args.repo,
                "commit": snapshot.commit,
                "path": snapshot.path().to_string_lossy(),
                "files": files,
            });
            writeln!(out, "{result:#}")?;
        }
        false => writeln!(out, "{}", snapshot.path().display())?,
    }
    Ok(())
}

/// The hub as the environment and the flags have it.
pub fn hub(store: StoreArgs) -> anyhow::Result<Hub> {
    let builder = HubBuilder::from_env()?;
    Ok(match store.offline {
        true => builder.offline(true).build()?,
        false => builder.build()?,
    })
}

/// The files of a model, downloaded as far as they are not in the store, with a bar for each.
pub fn fetch(name: &str, store: StoreArgs) -> anyhow::Result<Snapshot> {
    let spec = Spec::parse(name)?;
    let mut bars: HashMap<String, Bar> = HashMap::new();
    let mut progress = |p: &Progress<'_>| {
        if p.done >= p.total {
            bars.remove(p.file);
            return;
        }
        let bar = bars.entry(p.file.to_owned()).or_insert_with(|| Bar::new(p.file, Unit::Bytes));
        bar.at(p.done, p.total);
    };
    let mut watch = Watch { progress: Some(&mut progress), cancel: None };
    let snapshot = hub(store)?.get(&spec, &mut watch)?;
    if let Some(reason) = &snapshot.unreachable {
        eprintln!("note: using the downloaded copy, the server does not answer ({reason})");
    }
    Ok(snapshot)
}
