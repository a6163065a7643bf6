//! What evaluations share: where tokens come from, how a model is loaded for them, what a record is of.

use std::io::{IsTerminal, Read, stdin};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Context, bail};
use lapidary::eval::{Record, Scored, Unit, chat, windows};
use lapidary::{ChatTemplate, Checkpoint, LoadOptions, Stepper, Tokenizer, text_source};
use lapidary_text::Specials;
use serde_json::{Map, Value, json};

use crate::load;
use crate::model_args::{ComputeArg, LoadArgs, ModelArgs, ScaleArg};
use crate::progress::{Bar, Unit as BarUnit};
use crate::source;

/// What is scored.
#[derive(Clone, Debug, clap::Args)]
pub struct TextArgs {
    /// A text in UTF-8, all of whose tokens are scored; stdin when neither this nor --chat is given
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Conversations, a line of JSON {"messages": [..]} each, whose answers are scored and nothing else
    #[arg(long, value_name = "JSONL", conflicts_with = "text")]
    pub chat: Option<PathBuf>,
    /// Tokens of a window of text, BOS included
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub window: usize,
    /// Tokens from one window to the next; only those are scored that no window before held
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub stride: usize,
    /// Score at most the first N tokens of the text
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
}

/// Tokens to score, and where they come from.
pub struct Input {
    pub units: Vec<Unit>,
    /// Bytes of the text that is scored; of conversations it is not known.
    pub bytes: Option<usize>,
    /// What a record says of it.
    of: Value,
}

impl TextArgs {
    /// Reads and cuts. `bos` begins every window.
    pub fn read(&self, tokenizer: &Tokenizer, template: &ChatTemplate, bos: u32) -> anyhow::Result<Input> {
        if let Some(path) = &self.chat {
            let lines = read_text(path)?;
            let mut found = chat(path, &lines, tokenizer, template)?;
            if found.skipped > 0 {
                eprintln!("note: {} answers with calls or without text are not scored", found.skipped);
            }
            found.units.truncate(self.limit.unwrap_or(usize::MAX).max(1));
            let of = json!({"chat": fingerprint(lines.as_bytes()), "limit": self.limit});
            return Ok(Input { units: found.units, bytes: None, of });
        }
        let text = match &self.text {
            Some(path) => read_text(path)?,
            None if stdin().is_terminal() => bail!("name a text with --text or --chat, or give one on stdin"),
            None => {
                let mut text = String::new();
                stdin().read_to_string(&mut text).context("cannot read a text in UTF-8 from stdin")?;
                text
            }
        };
        let mut ids = tokenizer.encode(&text, Specials::Plain);
        let mut bytes = Some(text.len());
        if let Some(limit) = self.limit.filter(|&l| l < ids.len()) {
            ids.truncate(limit);
            bytes = Some(tokenizer.decode(&ids)?.len());
        }
        let of = json!({"text": fingerprint(text.as_bytes()), "tokens": ids.len(), "window": self.window, "stride": self.stride});
        Ok(Input { units: windows(&ids, bos, self.window, self.stride)?, bytes, of })
    }
}

impl Input {
    /// The input of a dump's tokens.
    pub fn of_dump(path: &Path, unit: Unit) -> anyhow::Result<Input> {
        let of = json!({"dump": path.to_string_lossy(), "file": file_of(path)?});
        Ok(Input { units: vec![unit], bytes: None, of })
    }

    /// Positions that the longest unit needs.
    pub fn context(&self) -> usize {
        self.units.iter().map(|u| u.ids.len()).max().unwrap_or(1)
    }
}

/// Opens the record, or keeps none.
pub fn record(path: Option<&Path>, what: &str, runs: Value, input: &Value) -> anyhow::Result<Record> {
    let Some(path) = path else { return Ok(Record::none()) };
    let mut of = Map::new();
    of.insert("what".into(), what.into());
    of.insert("runs".into(), runs);
    of.insert("input".into(), input.clone());
    let record = Record::open(path, &of)?;
    if record.found() > 0 {
        eprintln!("note: going on after {} that {} holds", record.found(), path.display());
    }
    Ok(record)
}

impl Input {
    /// What a record says of it.
    pub fn of(&self) -> &Value {
        &self.of
    }
}

/// A model's text files.
pub fn text_of(
    checkpoint: &Checkpoint,
    config: &lapidary::Config,
) -> anyhow::Result<(Tokenizer, ChatTemplate)> {
    let tokenizer = text_source::tokenizer(checkpoint)?;
    Ok((tokenizer, text_source::chat_template(checkpoint, config)?))
}

/// A model for evaluations: all rows of a batch may have logits.
pub fn stepper(
    checkpoint: &Checkpoint,
    load: &LoadArgs,
    compute: ComputeArg,
    context: usize,
    scale: Option<ScaleArg>,
) -> anyhow::Result<(Stepper, LoadOptions)> {
    let mut options = load.options(compute);
    if let Some(scale) = scale {
        options.embed_scale = scale.scale();
    }
    options.context = Some(load.ctx.map_or(context, |c| c as usize));
    options.head_rows = 64.min(options.chunk);
    let stepper = load::stepper(checkpoint, &options, &load.device)?;
    Ok((stepper, options))
}

/// What a record says of a run of a model.
pub fn run_of(model: &ModelArgs, checkpoint: &Checkpoint, options: &LoadOptions) -> anyhow::Result<Value> {
    let files = checkpoint.files().into_iter().map(file_of).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(json!({
        "model": source::name(model),
        "files": files,
        "compute": format!("{:?}", options.compute),
        "kv": options.kv_format().name(),
        "level": options.level.map(|l| l.name()),
        "embed_scale": format!("{:?}", options.embed_scale),
        "softcap": options.final_softcap,
        "context": options.context,
    }))
}

/// Length and age of a file: another file under the same name must not pass for it.
fn file_of(path: &Path) -> anyhow::Result<Value> {
    // The built-in model has no file and doesn't change.
    let Ok(data) = path.metadata() else { return Ok(Value::Null) };
    let age = data.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
    Ok(json!({"bytes": data.len(), "modified": age.map(|a| a.as_secs_f64())}))
}

/// Tells texts apart; FNV-1a of 64 bits.
pub fn fingerprint(bytes: &[u8]) -> String {
    let hash = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    format!("{} bytes, {hash:016x}", bytes.len())
}

pub fn read_text(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path)
        .with_context(|| format!("cannot read a text in UTF-8 from {}", path.display()))
}

/// A bar that follows an evaluation.
pub fn progress() -> impl FnMut(Scored) {
    let mut bar = Bar::new("scoring", BarUnit::Tokens);
    move |s| bar.at(s.done as u64, s.total as u64)
}
