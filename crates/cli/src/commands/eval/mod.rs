//! `lapidary eval`

mod choice;
mod input;
mod kl;
mod ppl;

use clap::Subcommand;

/// Score models: perplexity, distance from a reference, multiple choice.
///
/// Every evaluation can be broken off and gone on with (--record), and prints JSON on request.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  lapidary eval ppl -m MODEL --text book.txt\n  \
lapidary eval kl -m model-q4_k_m.gguf --reference ./model --text book.txt\n  \
lapidary eval choice -m MODEL --questions questions.jsonl")]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Ppl(ppl::Args),
    Kl(kl::Args),
    Choice(choice::Args),
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        What::Ppl(args) => ppl::run(args),
        What::Kl(args) => kl::run(args),
        What::Choice(args) => choice::run(args),
    }
}
