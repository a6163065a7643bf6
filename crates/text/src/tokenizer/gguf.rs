//! Takes the vocabulary of a GGUF file.
//!
//! Such a vocabulary may hold scores and merges at once, and either gives ids that decode to the same text, so the
//! algorithm is chosen by the names in the file and never by what happens to be present.

use std::collections::{HashMap, HashSet};

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
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`: one a token, or empty. Needed by the score-based algorithm.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`: one a token (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte).
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`: two pieces with a space between. Needed by the merge-based algorithm.
    pub merges: Vec<String>,
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
    let mut pieces = Vec::with_capacity(count);
    for (id, (text, kind)) in vocab.tokens.into_iter().zip(&vocab.token_types).enumerate() {
        pieces.push(piece(id, text, *kind)?);
    }
    let merges = match algorithm {
        Algorithm::Merges => split_merges(vocab.merges)?,
        Algorithm::Scores => derive_merges(&pieces, &vocab.scores)?,
    };
    if matches!(algorithm, Algorithm::Merges) {
        restore_literals(&mut pieces, &merges);
    }
    let unk = vocab.unk.map(|id| pieces[id as usize].0.clone()).or_else(|| {
        let unk = pieces.iter().find(|(text, _)| text == "<unk>");
        unk.map(|(text, _)| text.clone())
    });
    // Ids that the file declares are control tokens even where a converter typed them otherwise.
    for id in [vocab.bos, vocab.eos, vocab.unk, vocab.pad].into_iter().flatten() {
        pieces[id as usize].1 = Kind::Special;
    }
    Ok(Parts {
        pieces,
        merges,
        unk,
        bos: vocab.bos,
        byte_fallback: true,
        fuse_unk: true,
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

fn piece(id: usize, text: String, kind: i32) -> Result<(String, Kind)> {
    let kind = match kind {
        // A control name decides over the declared type; `is_control_name` says why.
        _ if is_control_name(&text) => Kind::Special,
        1 => Kind::Normal,
        2 | 3 => Kind::Special,
        4 => Kind::Literal,
        5 => Kind::Unused,
        6 => match byte_of(&text) {
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
    let text = if kind == Kind::Literal { text.replace(' ', SPACE) } else { text };
    // Types come from converters that know bytes only by name.
    let kind = if kind == Kind::Normal { byte_of(&text).map_or(kind, Kind::Byte) } else { kind };
    Ok((text, kind))
}

fn split_merges(merges: Vec<String>) -> Result<Vec<(String, String)>> {
    let split = |(rank, merge): (usize, String)| match merge.split_once(' ') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() => {
            Ok((left.to_owned(), right.to_owned()))
        }
        _ => Err(Error::Vocabulary(format!(
            "merge {rank} is {merge:?}; expected two pieces with a space between"
        ))),
    };
    merges.into_iter().enumerate().map(split).collect()
}

/// The merges that a scored vocabulary implies: every cut of a piece into two pieces, the best score first, then the
/// longer left part, the longer right part, and the order of the pieces. User-defined pieces score 0, the best there is
/// (files carry a placeholder for them). For Gemma 3 this is the published `tokenizer.json`'s list, entry for entry.
fn derive_merges(pieces: &[(String, Kind)], scores: &[f32]) -> Result<Vec<(String, String)>> {
    struct Cut {
        score: f32,
        left: (u32, u32),
        right: (u32, u32),
    }
    let mergeable = |kind: Kind| matches!(kind, Kind::Normal | Kind::Literal);
    let ids: HashMap<&str, u32> = pieces
        .iter()
        .enumerate()
        .filter(|(_, (_, kind))| mergeable(*kind))
        .map(|(id, (text, _))| (text.as_str(), id as u32))
        .collect();
    let mut cuts = Vec::new();
    for (id, (text, kind)) in pieces.iter().enumerate() {
        if !mergeable(*kind) {
            continue;
        }
        let score = if *kind == Kind::Literal { 0.0 } else { scores[id] };
        if !score.is_finite() {
            return Err(Error::Vocabulary(format!(
                "token {id} ({text:?}) has score {score}; expected a finite number"
            )));
        }
        let length = text.chars().count() as u32;
        let first = cuts.len();
        for (chars, (at, _)) in text.char_indices().enumerate().skip(1) {
            if let (Some(&left), Some(&right)) = (ids.get(&text[..at]), ids.get(&text[at..])) {
                let chars = chars as u32;
                cuts.push(Cut { score, left: (left, chars), right: (right, length - chars) });
            }
        }
        cuts[first..].sort_by_key(|cut| (cut.left.0, cut.right.0));
    }
    let order = |a: &Cut, b: &Cut| {
        let scores = b.score.partial_cmp(&a.score).expect("scores are finite");
        scores.then(b.left.1.cmp(&a.left.1)).then(b.right.1.cmp(&a.right.1))
    };
    cuts.sort_by(order);
    let text = |id: u32| pieces[id as usize].0.clone();
    Ok(cuts.iter().map(|cut| (text(cut.left.0), text(cut.right.0))).collect())
}

/// Marks the pieces that are matched literally although the file types them as normal.
///
/// Converters do that to every added token whose id lies inside the base vocabulary, so Gemma 4 files lose which pieces
/// those were. The markup ones (`<code>`, `[multimodal]`) show themselves: no merge makes them. Runs of tabs and newlines
/// need no mark, because merging makes them whole. So it does runs of spaces; their mark matters to text that holds
/// U+2581 itself, and Gemma's vocabulary is known by its longest run.
fn restore_literals(pieces: &mut [(String, Kind)], merges: &[(String, String)]) {
    const LONGEST_RUN: usize = 31;
    let made: HashSet<String> = merges.iter().map(|(left, right)| format!("{left}{right}")).collect();
    let markup = |text: &str| {
        (text.starts_with('<') && text.ends_with('>')) || (text.starts_with('[') && text.ends_with(']'))
    };
    let has_runs = made.contains(&SPACE.repeat(LONGEST_RUN));
    let run = |text: &str| has_runs && text.len() > SPACE.len() && text.trim_start_matches(SPACE).is_empty();
    for (text, kind) in pieces {
        if *kind == Kind::Normal && (run(text) || (text.len() > 2 && markup(text) && !made.contains(text))) {
            *kind = Kind::Literal;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_follow_score_then_length_then_the_order_of_pieces() {
        // Expected: the list that the converter of the published tokenizer.json makes of these pieces.
        let scored = [
            ("aba", -1.0),
            ("b", -7.0),
            ("a", -8.0),
            ("ab", -1.0),
            ("ba", -0.0),
            ("abab", -2.0),
            ("bab", -1.0),
        ];
        let mut pieces: Vec<_> = scored.iter().map(|(text, _)| ((*text).to_owned(), Kind::Normal)).collect();
        let mut scores: Vec<f32> = scored.iter().map(|(_, score)| *score).collect();
        for text in ["\u{2581}\u{2581}", "bb"] {
            pieces.push((text.to_owned(), Kind::Literal));
            scores.push(-1000.0);
        }
        pieces.push(("aa".to_owned(), Kind::Special));
        scores.push(9.0);
        let merges = derive_merges(&pieces, &scores).unwrap();
        let expected = [
            ("b", "a"),
            ("b", "b"),
            ("ab", "a"),
            ("ba", "b"),
            ("a", "ba"),
            ("b", "ab"),
            ("a", "b"),
            ("aba", "b"),
            ("ab", "ab"),
            ("a", "bab"),
        ];
        assert_eq!(merges, expected.map(|(left, right)| (left.to_owned(), right.to_owned())));
    }
}
