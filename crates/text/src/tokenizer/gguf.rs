//! Takes the vocabulary of a GGUF file.
//!
//! Such a vocabulary may hold scores and merges at once, and either gives ids that decode to the same text, so the
//! algorithm is chosen by the names in the file and never by what happens to be present.

use std::borrow::Cow;
use std::collections::HashSet;

use super::merging::{Merges, Unknown};
use super::pieces::{Pieces, Strings};
use super::specials::is_control_name;
use super::{Kind, Parts, SPACE, byte_of};
use crate::error::{Error, Result};

/// The `tokenizer.ggml.*` keys of a GGUF file, as they stand there.
#[derive(Debug, Clone, Default)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`.
    pub model: String,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`: the text of every id.
    pub tokens: Strings,
    /// `tokenizer.ggml.scores`: one a token, or empty. Needed by the score-based algorithm.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`: one a token (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte).
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`: two pieces with a space between. Needed by the merge-based algorithm.
    pub merges: Strings,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<u32>,
    /// `tokenizer.ggml.add_space_prefix`; Gemma's files say false.
    pub add_space_prefix: Option<bool>,
}

enum Algorithm {
    Merges,
    Scores,
}

pub(super) fn parse(vocab: GgufVocab) -> Result<Parts> {
    let algorithm = algorithm(&vocab)?;
    if vocab.add_space_prefix == Some(true) {
        return Err(Error::UnsupportedTokenizer {
            field: "tokenizer.ggml.add_space_prefix",
            found: "true".to_owned(),
            expected: "false: Gemma's text has no leading space",
        });
    }
    let count = vocab.tokens.len();
    if vocab.token_types.len() != count {
        let problem = format!("{} token types for {count} tokens", vocab.token_types.len());
        return Err(Error::Vocabulary(problem));
    }
    for (key, id) in [("bos", vocab.bos), ("eos", vocab.eos), ("unknown", vocab.unk), ("padding", vocab.pad)]
    {
        if let Some(id) = id.filter(|&id| id as usize >= count) {
            return Err(Error::Vocabulary(format!("{key} token id {id} in a vocabulary of {count}")));
        }
    }
    let mut pieces = Pieces::default();
    for (id, (text, kind)) in vocab.tokens.iter().zip(&vocab.token_types).enumerate() {
        let (text, kind) = piece(id, text, *kind)?;
        pieces.push(&text, kind);
    }
    let merges = match algorithm {
        Algorithm::Merges => {
            let merges = split_merges(&vocab.merges)?;
            restore_literals(&mut pieces, &merges);
            Merges::Ranked(merges)
        }
        Algorithm::Scores => Merges::Scored(vocab.scores),
    };
    let unk = vocab.unk.or_else(|| {
        let named = pieces.iter().find(|(_, text, _)| *text == "<unk>");
        named.map(|(id, _, _)| id)
    });
    // Ids that the file declares are control tokens even where a converter typed them otherwise.
    for id in [vocab.bos, vocab.eos, vocab.unk, vocab.pad].into_iter().flatten() {
        pieces.set_kind(id, Kind::Special);
    }
    Ok(Parts {
        pieces,
        merges,
        unk,
        bos: vocab.bos,
        unknown: Unknown { byte_fallback: true, fuse: true },
        ignore_merges: false,
    })
}

fn algorithm(vocab: &GgufVocab) -> Result<Algorithm> {
    // "default" is what converters write when a model has no pre-tokeniser of its own.
    let pre = vocab.pre.as_deref().filter(|pre| !pre.is_empty() && *pre != "default");
    let algorithm = match (vocab.model.as_str(), pre) {
        ("gemma4", None | Some("gemma4")) | ("llama", Some("gemma4")) => Algorithm::Merges,
        ("llama", None) => Algorithm::Scores,
        (model, _) => {
            return Err(Error::UnsupportedTokenizer {
                field: "tokenizer.ggml.model",
                found: format!("{model:?} with pre {:?}", vocab.pre),
                expected: "gemma4, llama with pre gemma4, or llama without pre",
            });
        }
    };
    let missing = match algorithm {
        Algorithm::Merges if vocab.merges.is_empty() => "tokenizer.ggml.merges",
        Algorithm::Scores if vocab.scores.len() != vocab.tokens.len() => "tokenizer.ggml.scores",
        _ => return Ok(algorithm),
    };
    Err(Error::Vocabulary(format!(
        "model {:?} needs {missing}, one complete list; convert the file again",
        vocab.model
    )))
}

fn piece(id: usize, text: &str, kind: i32) -> Result<(Cow<'_, str>, Kind)> {
    let kind = match kind {
        // A control name decides over the declared type; `is_control_name` says why.
        _ if is_control_name(text) => Kind::Special,
        1 => Kind::Normal,
        2 | 3 => Kind::Special,
        4 => Kind::Literal,
        5 => Kind::Unused,
        6 => match byte_of(text) {
            Some(byte) => Kind::Byte(byte),
            None => {
                return Err(Error::Vocabulary(format!("token {id} is typed as a byte but reads {text:?}")));
            }
        },
        other => {
            return Err(Error::Vocabulary(format!(
                "token {id} ({text:?}) has type {other}; expected 1 to 6"
            )));
        }
    };
    // Converters write user-defined runs of spaces as spaces; the vocabulary proper has U+2581.
    let text = match kind {
        Kind::Literal if text.contains(' ') => Cow::Owned(text.replace(' ', SPACE)),
        _ => Cow::Borrowed(text),
    };
    // Types come from converters that know bytes only by name.
    let kind = if kind == Kind::Normal { byte_of(&text).map_or(kind, Kind::Byte) } else { kind };
    Ok((text, kind))
}

fn split_merges(merges: &Strings) -> Result<Strings> {
    let mut pairs = Strings::default();
    for (rank, merge) in merges.iter().enumerate() {
        match merge.split_once(' ') {
            Some((left, right)) if !left.is_empty() && !right.is_empty() => {
                pairs.push(left);
                pairs.push(right);
            }
            _ => {
                return Err(Error::Vocabulary(format!(
                    "merge {rank} is {merge:?}; expected two pieces with a space between"
                )));
            }
        }
    }
    Ok(pairs)
}

/// Marks the pieces that are matched literally although the file types them as normal.
///
/// Converters do that to every added token whose id lies inside the base vocabulary, so Gemma 4 files lose which pieces
/// those were. The markup ones (`<code>`, `[multimodal]`) show themselves: no merge makes them. Runs of tabs and newlines
/// need no mark, because merging makes them whole. So it does runs of spaces; their mark matters to text that holds
/// U+2581 itself, and Gemma's vocabulary is known by its longest run.
fn restore_literals(pieces: &mut Pieces, pairs: &Strings) {
    const LONGEST_RUN: usize = 31;
    let enclosed = |first: Option<char>, last: Option<char>| {
        matches!((first, last), (Some('<'), Some('>')) | (Some('['), Some(']')))
    };
    let is_run = |text: &str| text.trim_start_matches(SPACE).is_empty();
    // What merges make, of the texts that are asked for below.
    let mut made = HashSet::new();
    for rank in 0..pairs.len() / 2 {
        let text = |i| pairs.get(2 * rank + i).unwrap_or_default();
        let (left, right) = (text(0), text(1));
        if enclosed(left.chars().next(), right.chars().next_back()) || (is_run(left) && is_run(right)) {
            made.insert(format!("{left}{right}"));
        }
    }
    let has_runs = made.contains(&SPACE.repeat(LONGEST_RUN));
    let literals: Vec<u32> = pieces
        .iter()
        .filter(|&(_, text, kind)| {
            let markup = text.len() > 2 && enclosed(text.chars().next(), text.chars().next_back());
            let run = has_runs && text.len() > SPACE.len() && is_run(text);
            kind == Kind::Normal && (run || (markup && !made.contains(text)))
        })
        .map(|(id, _, _)| id)
        .collect();
    literals.into_iter().for_each(|id| pieces.set_kind(id, Kind::Literal));
}
