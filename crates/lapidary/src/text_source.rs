//! Where a checkpoint keeps its tokenizer, template and generation config.

use lapidary_model::Config;
use lapidary_text::{ChatTemplate, GgufVocab, Strings, Tokenizer};
use lapidary_weights::gguf::{Metadata, StringArray};
use lapidary_weights::{Checkpoint, ConfigSource};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::gemma::builtin_template;

/// The tokenizer: `tokenizer.json` beside safetensors, or GGUF metadata.
///
/// # Errors
/// `NoTokenizer`, or what is wrong with the one that is there.
pub fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    let missing = |expected| Error::NoTokenizer { path: checkpoint.path().to_owned(), expected };
    match checkpoint.config() {
        ConfigSource::Gguf(file) => {
            let vocab = gguf_vocab(file.metadata())?.ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
            Ok(Tokenizer::from_gguf(vocab)?)
        }
        _ => {
            let path = checkpoint.text_files().tokenizer.clone().ok_or_else(|| missing("tokenizer.json"))?;
            let bytes = std::fs::read(&path).map_err(|source| Error::Io { path, source })?;
            Ok(Tokenizer::from_json(&bytes)?)
        }
    }
}

fn gguf_vocab(m: &Metadata) -> Result<Option<GgufVocab>> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let strings = |name: &str| -> Result<Strings> {
        let list = m.get::<&StringArray>(&key(name)).map_err(lapidary_weights::Error::from)?;
        Ok(list.map(|l| l.iter().collect()).unwrap_or_default())
    };
    let id = |name: &str| m.get::<u32>(&key(name)).map_err(lapidary_weights::Error::from);
    let tokens = strings("tokens")?;
    if tokens.is_empty() {
        return Ok(None);
    }
    let text = |name: &str| -> Result<Option<String>> {
        let text = m.get::<&str>(&key(name)).map_err(lapidary_weights::Error::from)?;
        Ok(text.map(str::to_owned))
    };
    Ok(Some(GgufVocab {
        model: text("model")?.unwrap_or_default(),
        pre: text("pre")?,
        tokens,
        scores: m.get(&key("scores")).map_err(lapidary_weights::Error::from)?.unwrap_or_default(),
        token_types: m.get(&key("token_type")).map_err(lapidary_weights::Error::from)?.unwrap_or_default(),
        merges: strings("merges")?,
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        unk: id("unknown_token_id")?,
        pad: id("padding_token_id")?,
        add_space_prefix: m.get(&key("add_space_prefix")).map_err(lapidary_weights::Error::from)?,
    }))
}

/// The chat template, if the checkpoint has one.
///
/// # Errors
/// A file that cannot be read.
pub fn template(checkpoint: &Checkpoint) -> Result<Option<String>> {
    match checkpoint.config() {
        ConfigSource::Gguf(file) => {
            let text = file.metadata().get::<&str>("tokenizer.chat_template");
            Ok(text.map_err(lapidary_weights::Error::from)?.map(str::to_owned))
        }
        _ => Ok(checkpoint.text_files().read_chat_template()?),
    }
}

/// The chat template that answers are made with: the checkpoint's, or the built-in one of its family.
///
/// # Errors
/// A file that cannot be read, or a template that does not compile.
pub fn chat_template(checkpoint: &Checkpoint, config: &Config) -> Result<ChatTemplate> {
    Ok(match template(checkpoint)? {
        Some(source) => ChatTemplate::new(&source)?,
        None => ChatTemplate::builtin(builtin_template(config)),
    })
}

/// What the checkpoint says about generating, in the form of `generation_config.json`.
pub fn generation(checkpoint: &Checkpoint) -> Option<Value> {
    match checkpoint.config() {
        ConfigSource::Json { generation, .. } => generation.clone(),
        ConfigSource::Gguf(file) => Some(gguf_generation(file.metadata())),
        _ => None,
    }
}

fn gguf_generation(m: &Metadata) -> Value {
    let mut g = serde_json::Map::new();
    let keys = [("general.sampling.temp", "temperature"), ("general.sampling.top_p", "top_p")];
    for (key, field) in keys {
        if let Ok(Some(value)) = m.get::<f32>(key) {
            g.insert(field.into(), f64::from(value).into());
        }
    }
    if let Ok(Some(k)) = m.get::<u32>("general.sampling.top_k") {
        g.insert("top_k".into(), k.into());
    }
    if let Ok(Some(ids)) = m.get::<Vec<u32>>("tokenizer.ggml.suppress_tokens") {
        g.insert("suppress_tokens".into(), ids.into());
    }
    Value::Object(g)
}
