//! `lapidary synth`

use std::io::{Write, stderr};
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser;
use lapidary::synth::{Mix, Size, SynthOptions, write};

use crate::progress::{Bar, Unit};
use crate::report::{bytes, count};

/// Write a model with real shapes and random weights.
///
/// Writes a GGUF file with the shapes and types of a real Gemma 4 model and random weights: for measuring speed, load and
/// memory without the model. It writes noise for text.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  lapidary synth e2b q4_0 -o e2b-q4_0.gguf\n  \
lapidary synth 26b-a4b q4_k_m --layers 6 -o cut.gguf     a part that fits a small machine\n  \
lapidary synth 31b bf16 --sparse -o header.gguf          the header alone, zeros that take no room\n\n\
Speed depends on shapes and types, so it is that of the real model; experts get an even load, which real text gives \
only roughly.")]
pub struct Args {
    /// The model whose shapes it has
    #[arg(value_name = "MODEL", value_parser = PossibleValuesParser::new(Size::ALL.map(Size::name)).map(|name| Size::from_name(&name).expect("one of the names")))]
    pub size: Size,
    /// The types of its tensors, chosen tensor by tensor as quantisers do
    #[arg(value_name = "FORMAT", value_parser = PossibleValuesParser::new(Mix::ALL.map(Mix::name)).map(|name| Mix::from_name(&name).expect("one of the names")))]
    pub mix: Mix,
    /// The file to write
    #[arg(short = 'o', long, value_name = "FILE")]
    pub output: PathBuf,
    /// Layers; as many as the model has when not given
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Seed of the random weights
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u64,
    /// Write the header only, and leave the weights as a hole in the file
    #[arg(long)]
    pub sparse: bool,
    /// A GGUF file of a Gemma 3 or 4 model to take the vocabulary from; a stand-in of made-up words when not given
    #[arg(long, value_name = "GGUF")]
    pub tokenizer: Option<PathBuf>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let options = SynthOptions {
        layers: args.layers,
        seed: args.seed,
        sparse: args.sparse,
        tokenizer: args.tokenizer.clone(),
    };
    let mut bar = Bar::new("writing", Unit::Bytes);
    let report = write(args.size, args.mix, &args.output, &options, &mut |done, total| bar.at(done, total))?;
    drop(bar);
    let formats: Vec<String> = report.bytes.iter().map(|(name, n)| format!("{name} {}", bytes(*n))).collect();
    writeln!(
        stderr(),
        "{}: {} tensors, {} parameters, {}",
        args.output.display(),
        report.tensors,
        count(report.parameters),
        formats.join(", ")
    )?;
    Ok(())
}
