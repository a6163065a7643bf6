//! `lapidary list`

use std::io::{Write, stdout};

use serde_json::json;

use super::pull::hub;
use crate::model_args::StoreArgs;
use crate::report::{Align, Table, bytes};

/// List downloaded models.
///
/// Lists the downloaded models. The store is shared with other tools, so it may hold more than Gemma.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let hub = hub(StoreArgs { offline: true })?;
    let models = hub.list()?;
    let mut out = stdout().lock();
    if args.json {
        let models: Vec<_> = models
            .iter()
            .map(|m| {
                let files: Vec<_> =
                    m.files.iter().map(|(name, size)| json!({"name": name, "bytes": size})).collect();
                json!({
                    "repo": m.repo.to_string(),
                    "commit": m.commit,
                    "revisions": m.revisions,
                    "bytes": m.bytes(),
                    "path": m.path.to_string_lossy(),
                    "files": files,
                })
            })
            .collect();
        writeln!(out, "{:#}", json!(models))?;
        return Ok(());
    }
    let mut table = Table::new(&[
        ("model", Align::Left),
        ("revision", Align::Left),
        ("files", Align::Right),
        ("size", Align::Right),
    ]);
    for m in &models {
        let revision = if m.revisions.is_empty() { m.commit.clone() } else { m.revisions.join(", ") };
        table.row(vec![m.repo.to_string(), revision, m.files.len().to_string(), bytes(m.bytes())]);
    }
    match table.is_empty() {
        true => {
            eprintln!("no models in {}; download one with lapidary pull OWNER/NAME", hub.cache().display())
        }
        false => out.write_all(table.render().as_bytes())?,
    }
    Ok(())
}
