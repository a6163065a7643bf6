//! `lapidary rm OWNER/NAME[:FILE]`

use lapidary::hub::Spec;

use super::pull::hub;
use crate::model_args::StoreArgs;
use crate::report::bytes;

/// Remove a downloaded model.
///
/// Removes a downloaded model: all of it, one revision (owner/name@revision), or one file or quantisation
/// (owner/name:Q4_K_M). Contents that another revision uses stay.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// owner/name[@revision][:quant-or-file]
    #[arg(value_name = "REPO")]
    pub repo: String,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let removed = hub(StoreArgs { offline: true })?.remove(&Spec::parse(&args.repo)?)?;
    eprintln!("removed {} files, {} free", removed.files, bytes(removed.bytes));
    Ok(())
}
