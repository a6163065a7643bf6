//! The `lapidary` command: run, look into and measure Gemma models from a terminal.
//!
//! `arguments` is the one definition of commands and flags; each command is a file in `commands`. Nothing here
//! computes: what a model does is in the library, and what a library user could want of a command's work
//! (`lapidary::plan`, `lapidary::check`, `lapidary::capture`) is there too.
//!
//! Answers and tables go to stdout, everything else to stderr. Exit codes: 0 done, 1 it failed, 2 wrong usage.

mod arguments;
mod commands;
mod failure;
mod interrupt;
mod load;
mod look_args;
mod model_args;
mod progress;
mod report;
mod sampling_args;
mod source;
#[cfg(feature = "otel")]
mod spans;
mod speak;
mod steer_args;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    failure::one_line_panics();
    let cli = arguments::Cli::parse();
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| commands::run(cli.command)));
    match done {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => failure::report(&error),
        // The hook has said what happened.
        Err(_) => ExitCode::from(1),
    }
}
