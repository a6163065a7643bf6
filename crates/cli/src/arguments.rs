//! Commands and flags: parsing, help and completions all come from these types.

use clap::{Parser, Subcommand};

use crate::commands::{
    batch, bench, chat, check, completions, convert, dump, eval, inspect, run, serve, steer, synth, tokenize,
    verify,
};
#[cfg(feature = "hub")]
use crate::commands::{list, pull, rm};

/// Run Google's Gemma models on this machine.
#[derive(Debug, Parser)]
#[command(
    name = "lapidary",
    version = version(),
    arg_required_else_help = true,
    disable_help_subcommand = true,
    after_help = "MODEL is a folder with config.json and .safetensors files, a .gguf file, or owner/name[:quant] from the \
hub.\n\nFirst steps:\n  lapidary check                     is this machine ready?\n  lapidary run -m MODEL \"Hello\"       \
ask once\n  lapidary chat -m MODEL             a conversation\n  \
lapidary serve -m MODEL            the same over HTTP, for many\n  lapidary inspect MODEL --ctx 8192  what is in it, and how \
much memory it takes\n\nExit codes: 0 done, 1 it failed (one line on stderr says why), 2 wrong usage."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Run(run::Args),
    Chat(chat::Args),
    Serve(serve::Args),
    Batch(batch::Args),
    Inspect(inspect::Args),
    Check(check::Args),
    Dump(dump::Args),
    Convert(convert::Args),
    Eval(eval::Args),
    Tokenize(tokenize::Args),
    #[cfg(feature = "hub")]
    Pull(pull::Args),
    #[cfg(feature = "hub")]
    List(list::Args),
    #[cfg(feature = "hub")]
    Rm(rm::Args),
    Bench(bench::Args),
    Steer(steer::Args),
    Verify(verify::Args),
    Synth(synth::Args),
    Completions(completions::Args),
}

/// Version, features and what kernels were chosen for, as bug reports need it.
fn version() -> &'static str {
    let features = [("hub", cfg!(feature = "hub")), ("pebble", cfg!(feature = "pebble"))];
    let on: Vec<&str> = features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    let features = if on.is_empty() { "none".to_string() } else { on.join(", ") };
    let level = lapidary_cpu::Level::detect();
    let text = format!(
        "{} (features: {features}; {} {}, cpu level {level})",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        std::env::consts::ARCH
    );
    // clap keeps the text for as long as the program runs.
    text.leak()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_and_argument_explains_itself() {
        for command in Cli::command().get_subcommands() {
            assert!(command.get_about().is_some(), "{}", command.get_name());
            for arg in command.get_arguments() {
                let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                assert!(!help.is_empty(), "{} {}", command.get_name(), arg.get_id());
            }
        }
    }
}
