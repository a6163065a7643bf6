//! `lapidary completions SHELL`

use clap::CommandFactory;
use clap_complete::Shell;

/// Print a completion script for a shell.
///
/// Prints a script that completes commands and flags, e.g. for bash:
/// lapidary completions bash > ~/.local/share/bash-completion/completions/lapidary
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::arguments::Cli::command(), "lapidary", &mut script);
    Ok(std::io::Write::write_all(&mut std::io::stdout(), &script)?)
}
