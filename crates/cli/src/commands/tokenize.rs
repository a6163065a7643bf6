//! `lapidary tokenize`

use std::ffi::OsString;
use std::io::{Read, Write, stdin, stdout};

use anyhow::Context;
use lapidary::text_source;
use lapidary_text::Specials;
use serde_json::json;

use crate::model_args::ModelArgs;
use crate::report::{Align, Table};
use crate::source;

/// Show the ids and pieces of a text.
///
/// Shows the token ids and pieces of a text, with the one BOS that every prompt gets; or, with --ids, the text of ids.
/// Control markers in the text stay text unless --special is given.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  lapidary tokenize -m MODEL \"Hello there\"\n  \
lapidary tokenize -m MODEL --json < file.txt\n  lapidary tokenize -m MODEL --ids 2,9259")]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The text; stdin when not given
    #[arg(value_name = "TEXT")]
    pub text: Option<OsString>,
    /// Turn ids, separated by commas, back into text
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "text")]
    pub ids: Vec<u32>,
    /// Read control markers in the text as control tokens
    #[arg(long)]
    pub special: bool,
    /// Leave out the BOS
    #[arg(long)]
    pub no_bos: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let checkpoint = source::open(&args.model)?;
    let tokenizer = text_source::tokenizer(&checkpoint)?;
    let mut out = stdout().lock();
    let ids = match args.ids.is_empty() {
        false => args.ids.clone(),
        true => {
            let text = match &args.text {
                Some(text) => text.to_str().context("the text is not UTF-8; give it in UTF-8")?.to_owned(),
                None => {
                    let mut text = String::new();
                    stdin().read_to_string(&mut text).context("cannot read a text in UTF-8 from stdin")?;
                    text
                }
            };
            let specials = if args.special { Specials::Parse } else { Specials::Plain };
            match args.no_bos {
                true => tokenizer.encode(&text, specials),
                false => tokenizer.encode_prompt(&text, specials)?,
            }
        }
    };
    let pieces = ids.iter().map(|&id| tokenizer.piece(id)).collect::<Result<Vec<_>, _>>()?;
    match (args.json, args.ids.is_empty()) {
        (true, _) => {
            let text = tokenizer.decode(&ids)?;
            let pieces: Vec<_> = pieces.iter().map(|p| p.to_string()).collect();
            writeln!(out, "{:#}", json!({"ids": ids, "pieces": pieces, "text": text, "count": ids.len()}))?;
        }
        (false, false) => writeln!(out, "{}", tokenizer.decode(&ids)?)?,
        (false, true) => {
            let mut table = Table::new(&[("id", Align::Right), ("piece", Align::Left)]);
            for (id, piece) in ids.iter().zip(&pieces) {
                table.row(vec![id.to_string(), format!("{piece:?}")]);
            }
            out.write_all(table.render().as_bytes())?;
            writeln!(out, "{} tokens", ids.len())?;
        }
    }
    Ok(())
}
