//! Where a checkpoint keeps what belongs to its text: the tokenizer and the chat template.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::open::read_json;
use crate::{Error, Result};

/// The files beside a safetensors checkpoint that are there.
#[derive(Clone, Debug, Default)]
pub struct TextFiles {
    /// `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<PathBuf>,
    /// `chat_template.jinja`.
    pub chat_template: Option<PathBuf>,
    /// `chat_template.json`, which older files have instead.
    pub chat_template_json: Option<PathBuf>,
    /// `generation_config.json`.
    pub generation_config: Option<PathBuf>,
}

impl TextFiles {
    pub(super) fn find(folder: &Path) -> TextFiles {
        let there = |name: &str| Some(folder.join(name)).filter(|p| p.is_file());
        TextFiles {
            tokenizer: there("tokenizer.json"),
            tokenizer_config: there("tokenizer_config.json"),
            chat_template: there("chat_template.jinja"),
            chat_template_json: there("chat_template.json"),
            generation_config: there("generation_config.json"),
        }
    }

    /// The chat template's text, from the first place that has one: `chat_template.jinja`, `chat_template.json`, or
    /// the `chat_template` of `tokenizer_config.json` (of several named ones the one called `default`).
    ///
    /// # Errors
    /// A file that cannot be read or is no JSON, or a template that is no text.
    pub fn read_chat_template(&self) -> Result<Option<String>> {
        if let Some(path) = &self.chat_template {
            let text =
                std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.clone(), source })?;
            return Ok(Some(text));
        }
        for path in self.chat_template_json.iter().chain(&self.tokenizer_config) {
            if let Some(template) = template_in(&read_json(path)?, path)? {
                return Ok(Some(template));
            }
        }
        Ok(None)
    }
}

/// `"chat_template": "text"` or `"chat_template": [{"name": "default", "template": "text"}, ..]`.
fn template_in(config: &Value, path: &Path) -> Result<Option<String>> {
    let named = match config.get("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text.clone())),
        Some(Value::Array(list)) => {
            list.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"))
        }
        Some(_) => None,
    };
    match named.and_then(|t| t.get("template")).and_then(Value::as_str) {
        Some(text) => Ok(Some(text.to_owned())),
        None => Err(Error::BadConfig {
            path: path.to_owned(),
            what: "chat_template is neither text nor a list with one called default".to_owned(),
        }),
    }
}
