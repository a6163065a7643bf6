//! Reads `tokenizer.json`: a subset of the Hugging Face format, the one that Gemma's files use. Everything else is
//! refused by name, because running it as if it were Gemma's would give other ids that still decode to the same text.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::merging::{Merges, Unknown};
use super::pieces::{Pieces, Strings};
use super::specials::is_control_name;
use super::{Kind, Parts, SPACE, byte_of};
use crate::error::{Error, Result};

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u64,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    vocab: Vocab,
    #[serde(default)]
    merges: Vec<Merge>,
    unk_token: Option<String>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    ignore_merges: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    /// The older form, which cannot express pieces with spaces.
    Joined(String),
}

/// The vocabulary as a list, so that a piece that occurs twice is seen. Other models' vocabularies are arrays; they are
/// skipped here and refused by the model's name.
#[derive(Default)]
struct Vocab(Vec<(String, u64)>);

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Vocab;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from pieces to ids")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Vocab(entries))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vocab, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Vocab::default())
            }
        }
        deserializer.deserialize_any(Entries)
    }
}

pub(super) fn parse(bytes: &[u8]) -> Result<Parts> {
    let file: File = serde_json::from_slice(bytes)?;
    check_model(&file.model)?;
    check_pipeline(&file)?;
    let count = file.model.vocab.0.len() + file.added_tokens.len();
    let mut added = HashMap::with_capacity(file.added_tokens.len());
    for token in file.added_tokens {
        let (content, kind) = added_kind(
            token.content,
            token.special,
            token.normalized,
            [token.lstrip, token.rstrip, token.single_word],
        )?;
        if added.insert(content.clone(), (token.id, kind)).is_some() {
            return Err(Error::Vocabulary(format!("added token {content:?} appears twice")));
        }
    }
    let mut pieces = Vec::with_capacity(count);
    for (text, id) in file.model.vocab.0 {
        let kind = match added.remove(&text) {
            Some((other, _)) if other != id => {
                return Err(Error::Vocabulary(format!(
                    "added token {text:?} has id {other}, but the vocabulary says {id}"
                )));
            }
            Some((_, kind)) => kind,
            None if file.model.byte_fallback => byte_of(&text).map_or(Kind::Normal, Kind::Byte),
            None => Kind::Normal,
        };
        place(&mut pieces, id, count, text, kind)?;
    }
    for (text, (id, kind)) in added {
        place(&mut pieces, id, count, text, kind)?;
    }
    let mut merges = Strings::default();
    for (rank, merge) in file.model.merges.iter().enumerate() {
        let (left, right) = match merge {
            Merge::Pair(left, right) => (left.as_str(), right.as_str()),
            Merge::Joined(text) => match text.split_once(' ') {
                Some((left, right)) if !right.contains(' ') => (left, right),
                _ => {
                    return Err(Error::Vocabulary(format!(
                        "merge {rank} is {text:?}; expected two pieces with a space between"
                    )));
                }
            },
        };
        merges.push(left);
        merges.push(right);
    }
    let known = |unk: &String| {
        let id = pieces.iter().position(|(text, kind)| text == unk && *kind != Kind::Missing);
        let lost = || Error::Vocabulary(format!("the unknown token {unk:?} is not among the pieces"));
        id.map(|id| id as u32).ok_or_else(lost)
    };
    let unk = file.model.unk_token.as_ref().map(known).transpose()?;
    let mut packed = Pieces::default();
    pieces.iter().for_each(|(text, kind)| packed.push(text, *kind));
    Ok(Parts {
        pieces: packed,
        merges: Merges::Ranked(merges),
        unk,
        bos: None,
        unknown: Unknown { byte_fallback: file.model.byte_fallback, fuse: file.model.fuse_unk },
        ignore_merges: file.model.ignore_merges,
    })
}

/// Grows the list so that `id` fits, refusing ids that could only come from a damaged file.
fn place(pieces: &mut Vec<(String, Kind)>, id: u64, count: usize, text: String, kind: Kind) -> Result<()> {
    // Published vocabularies leave small gaps at most; the bound keeps one absurd id from allocating gigabytes.
    const LARGEST_GAP: u64 = 65_536;
    if id >= count as u64 + LARGEST_GAP {
        return Err(Error::Vocabulary(format!(
            "piece {text:?} has id {id} in a vocabulary of {count} pieces"
        )));
    }
    let id = id as usize;
    if pieces.len() <= id {
        pieces.resize_with(id + 1, || (String::new(), Kind::Missing));
    }
    if pieces[id].1 != Kind::Missing {
        return Err(Error::Vocabulary(format!("id {id} belongs to both {:?} and {text:?}", pieces[id].0)));
    }
    pieces[id] = (text, kind);
    Ok(())
}

fn added_kind(
    content: String,
    special: bool,
    normalized: bool,
    spacing: [bool; 3],
) -> Result<(String, Kind)> {
    if content.is_empty() {
        return Err(Error::Vocabulary("an added token is empty".to_owned()));
    }
    if spacing.contains(&true) {
        let found = format!("{content:?} with lstrip, rstrip or single_word");
        return Err(unsupported("added token", found, "added tokens that match exactly"));
    }
    let kind = match normalized {
        _ if special || is_control_name(&content) => Kind::Special,
        true => Kind::NormalizedLiteral,
        false => Kind::Literal,
    };
    Ok((content, kind))
}

fn check_model(model: &Model) -> Result<()> {
    // Files from before the type was written are BPE exactly when they have merges.
    let kind = model.kind.as_deref().unwrap_or(if model.merges.is_empty() {
        "without type and merges"
    } else {
        "BPE"
    });
    if kind != "BPE" {
        return Err(unsupported("model", kind.to_owned(), "BPE"));
    }
    if model.dropout.is_some_and(|p| p != 0.0) {
        return Err(unsupported(
            "model.dropout",
            format!("{:?}", model.dropout),
            "none: it makes ids random",
        ));
    }
    for (field, affix) in [
        ("model.continuing_subword_prefix", &model.continuing_subword_prefix),
        ("model.end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if let Some(affix) = affix.as_ref().filter(|a| !a.is_empty()) {
            return Err(unsupported(field, format!("{affix:?}"), "none"));
        }
    }
    Ok(())
}

/// Accepts the one pipeline that this crate runs: spaces become U+2581, nothing splits the text after that.
fn check_pipeline(file: &File) -> Result<()> {
    let stages = |value: &Value, list: &str| match value.get(list) {
        Some(Value::Array(stages)) if value["type"] == "Sequence" => stages.clone(),
        _ if value.is_null() => Vec::new(),
        _ => vec![value.clone()],
    };
    let replaces = |v: &Value, from: &str, to: &str| {
        v["type"] == "Replace" && v["pattern"]["String"] == from && v["content"] == to
    };

    let normalizers = stages(&file.normalizer, "normalizers");
    if normalizers.len() != 1 || !replaces(&normalizers[0], " ", SPACE) {
        return Err(unsupported("normalizer", brief(&file.normalizer), "Replace of each space by U+2581"));
    }
    // Splitting at spaces never fires, because the normaliser left none.
    let idle = |v: &Value| v["type"] == "Split" && v["pattern"]["String"] == " " && v["invert"] != true;
    if !stages(&file.pre_tokenizer, "pretokenizers").iter().all(idle) {
        return Err(unsupported("pre_tokenizer", brief(&file.pre_tokenizer), "none, or Split at spaces"));
    }
    let decodes = |v: &Value| replaces(v, SPACE, " ") || v["type"] == "ByteFallback" || v["type"] == "Fuse";
    if !stages(&file.decoder, "decoders").iter().all(decodes) {
        return Err(unsupported(
            "decoder",
            brief(&file.decoder),
            "Replace of U+2581 by a space, ByteFallback, Fuse",
        ));
    }
    Ok(())
}

fn unsupported(field: &'static str, found: String, expected: &'static str) -> Error {
    Error::UnsupportedTokenizer { field, found, expected }
}

/// A value short enough for a message.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(160) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}
