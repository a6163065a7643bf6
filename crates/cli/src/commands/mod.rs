//! One file a command.

pub mod batch;
pub mod bench;
pub mod bench_serve;
pub mod chat;
pub mod check;
pub mod completions;
pub mod convert;
pub mod dump;
pub mod eval;
pub mod inspect;
#[cfg(feature = "hub")]
pub mod list;
#[cfg(feature = "hub")]
pub mod pull;
#[cfg(feature = "hub")]
pub mod rm;
pub mod run;
pub mod serve;
pub mod steer;
pub mod synth;
pub mod tokenize;
pub mod verify;

use std::process::ExitCode;

use crate::arguments::Command;

/// Carries out a command. The code is the program's when nothing failed.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    let done = |r: anyhow::Result<()>| r.map(|()| ExitCode::SUCCESS);
    match command {
        Command::Run(args) => done(run::run(&args)),
        Command::Serve(args) => done(serve::run(&args)),
        Command::Batch(args) => done(batch::run(&args)),
        Command::Chat(args) => done(chat::run(&args)),
        Command::Inspect(args) => done(inspect::run(&args)),
        Command::Check(args) => check::run(&args),
        Command::Dump(args) => done(dump::run(&args)),
        Command::Convert(args) => done(convert::run(&args)),
        Command::Eval(args) => done(eval::run(&args)),
        Command::Tokenize(args) => done(tokenize::run(&args)),
        #[cfg(feature = "hub")]
        Command::Pull(args) => done(pull::run(&args)),
        #[cfg(feature = "hub")]
        Command::List(args) => done(list::run(&args)),
        #[cfg(feature = "hub")]
        Command::Rm(args) => done(rm::run(&args)),
        Command::Bench(args) => done(bench::run(&args)),
        Command::Verify(args) => verify::run(&args),
        Command::Steer(args) => done(steer::run(&args)),
        Command::Synth(args) => done(synth::run(&args)),
        Command::Completions(args) => done(completions::run(&args)),
    }
}
