//! Byte-pair merging: characters become pieces, and pairs of neighbours join, the best pair first, the leftmost of
//! equals, until none is left that may.
//!
//! Which pair is better a vocabulary says in one of two ways, and neither is turned into the other:
//! - **ranks**: a list of pairs, kept sorted by the left piece, so that nothing is hashed to build it;
//! - **scores**: any two pieces join whose text together is a piece, the best score first, then the longer left part,
//!   the longer right part, and the lower id. Nothing is built at all; the text between two neighbours' ends is looked
//!   up when they meet. For Gemma 3 this is the published `tokenizer.json`'s list, entry for entry.
//!
//! A heap of pairs keeps long runs near-linear. A pair in the heap may be out of date; it counts if its place still makes
//! the same piece, as in the published implementation (`tokenizers`), whose ids these are.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Kind;
use super::pieces::{Class, Strings, Vocabulary};
use crate::error::{Error, Result};

/// What decides between pairs, as files give it.
#[derive(Debug)]
pub(crate) enum Merges {
    /// Pairs in order of priority: left, right, left, right.
    Ranked(Strings),
    /// A score for each piece; user-defined pieces have the best there is.
    Scored(Vec<f32>),
}

/// What characters become that are no pieces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unknown {
    /// Each byte of them becomes its own piece, if all of a character's have one.
    pub byte_fallback: bool,
    /// A run of them becomes one unknown token.
    pub fuse: bool,
}

/// Merges runs of text.
#[derive(Debug)]
pub(crate) struct Merging {
    order: Order,
    unknown: Unknown,
    /// The pieces of single bytes.
    bytes: Box<[Option<u32>; 256]>,
    /// A run that is a piece is that piece, whatever merging would make of it.
    whole_first: bool,
}

#[derive(Debug)]
enum Order {
    Ranks(Ranks),
    Scores { scores: Vec<f32>, longest: usize, shadowed: Vec<u32> },
}

/// Smaller is merged earlier: rank, or score, lengths and id so turned that smaller is better.
type Priority = [u32; 4];

/// A part of a run.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    id: u32,
    chars: u32,
    start: usize,
    /// Equal to `start` once it has been merged into its left neighbour.
    end: usize,
    prev: usize,
    next: usize,
}

/// No neighbour.
const NONE: usize = usize::MAX;

impl Merging {
    /// Fails where a merge needs a piece that is not there, or a score is not finite.
    pub fn new(vocab: &Vocabulary, merges: Merges, unknown: Unknown, whole_first: bool) -> Result<Merging> {
        let order = match merges {
            Merges::Ranked(pairs) => Order::Ranks(Ranks::new(vocab, &pairs)?),
            Merges::Scored(scores) => {
                check_scores(vocab, &scores)?;
                let longest = vocab.pieces.iter().map(|(_, text, _)| text.len()).max().unwrap_or(0);
                // Pieces that read like a control token take no part.
                let controls = vocab
                    .pieces
                    .iter()
                    .filter(|&(id, _, kind)| kind != Kind::Missing && vocab.class(id) == Class::Control);
                let mut shadowed: Vec<u32> =
                    controls.filter_map(|(_, text, _)| vocab.find(text, Class::Text)).collect();
                shadowed.sort_unstable();
                Order::Scores { scores, longest, shadowed }
            }
        };
        let byte = |b: usize| vocab.find(&format!("<0x{b:02X}>"), Class::Text);
        Ok(Merging { order, unknown, bytes: Box::new(std::array::from_fn(byte)), whole_first })
    }

    /// Appends the ids of a run.
    pub fn run(&self, vocab: &Vocabulary, text: &str, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        if let Some(id) = self.whole_first.then(|| vocab.find(text, Class::Text)).flatten() {
            return ids.push(id);
        }
        let mut symbols = self.symbols(vocab, text);
        let mut heap = BinaryHeap::with_capacity(symbols.len());
        for at in 1..symbols.len() {
            if let Some((priority, made)) = self.pair(vocab, text, &symbols[at - 1], &symbols[at]) {
                heap.push(Reverse((priority, at - 1, made)));
            }
        }
        while let Some(Reverse((_, at, made))) = heap.pop() {
            let left = symbols[at];
            if left.start == left.end || left.next == NONE {
                continue;
            }
            let right = symbols[left.next];
            if self.pair(vocab, text, &left, &right).is_none_or(|(_, now)| now != made) {
                continue;
            }
            symbols[left.next].end = right.start;
            let joined = Symbol {
                id: made,
                chars: left.chars + right.chars,
                end: right.end,
                next: right.next,
                ..left
            };
            symbols[at] = joined;
            if right.next != NONE {
                symbols[right.next].prev = at;
                if let Some((priority, made)) = self.pair(vocab, text, &joined, &symbols[right.next]) {
                    heap.push(Reverse((priority, at, made)));
                }
            }
            if joined.prev != NONE
                && let Some((priority, made)) = self.pair(vocab, text, &symbols[joined.prev], &joined)
            {
                heap.push(Reverse((priority, joined.prev, made)));
            }
        }
        ids.extend(symbols.iter().filter(|s| s.start < s.end).map(|s| s.id));
    }

    /// A run's characters, or what stands for them.
    fn symbols(&self, vocab: &Vocabulary, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        let mut add = |id, start, end, chars| {
            let at = symbols.len();
            if let Some(last) = symbols.last_mut() {
                last.next = at;
            }
            symbols.push(Symbol {
                id,
                chars,
                start,
                end,
                prev: at.checked_sub(1).unwrap_or(NONE),
                next: NONE,
            });
        };
        // Unknown characters that have not been added yet.
        let mut unknown: Option<std::ops::Range<usize>> = None;
        let unk = vocab.unk();
        for (start, c) in text.char_indices() {
            let end = start + c.len_utf8();
            if let Some(id) = vocab.find(&text[start..end], Class::Text) {
                if let (Some(range), Some(unk)) = (unknown.take(), unk) {
                    add(unk, range.start, range.end, 0);
                }
                add(id, start, end, 1);
                continue;
            }
            let mut buffer = [0; 4];
            let bytes = c.encode_utf8(&mut buffer).as_bytes();
            let piece = |&byte: &u8| self.bytes[usize::from(byte)];
            if self.unknown.byte_fallback && bytes.iter().all(|b| piece(b).is_some()) {
                for (i, id) in bytes.iter().filter_map(piece).enumerate() {
                    add(id, start + i, start + i + 1, 0);
                }
                continue;
            }
            unknown = match (unknown.take(), unk) {
                (Some(range), _) if self.unknown.fuse => Some(range.start..end),
                (Some(range), Some(unk)) => {
                    add(unk, range.start, range.end, 0);
                    Some(start..end)
                }
                _ => Some(start..end),
            };
        }
        if let (Some(range), Some(unk)) = (unknown, unk) {
            add(unk, range.start, range.end, 0);
        }
        symbols
    }

    /// What two neighbours make, if they may join.
    fn pair(&self, vocab: &Vocabulary, text: &str, left: &Symbol, right: &Symbol) -> Option<(Priority, u32)> {
        match &self.order {
            Order::Ranks(ranks) => ranks.find(left.id, right.id),
            Order::Scores { scores, longest, shadowed } => {
                let takes_part = |id: u32| {
                    matches!(vocab.pieces.kind(id), Kind::Normal | Kind::Literal)
                        && (shadowed.is_empty() || shadowed.binary_search(&id).is_err())
                };
                if right.end - left.start > *longest || !takes_part(left.id) || !takes_part(right.id) {
                    return None;
                }
                let made = vocab.find(&text[left.start..right.end], Class::Text)?;
                if !takes_part(made) {
                    return None;
                }
                let score = score_of(vocab, scores, made);
                Some(([descending(score), !left.chars, !right.chars, made], made))
            }
        }
    }
}

/// The order of floats turned around, as integers; the two zeros are one.
fn descending(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 { bits } else { !bits & 0x7FFF_FFFF }
}

/// User-defined pieces have the best score there is; files carry a placeholder for them.
fn score_of(vocab: &Vocabulary, scores: &[f32], id: u32) -> f32 {
    if vocab.pieces.kind(id) == Kind::Literal { 0.0 } else { scores[id as usize] }
}

fn check_scores(vocab: &Vocabulary, scores: &[f32]) -> Result<()> {
    for (id, text, kind) in vocab.pieces.iter() {
        if kind == Kind::Normal && !scores[id as usize].is_finite() {
            let score = scores[id as usize];
            return Err(Error::Vocabulary(format!(
                "token {id} ({text:?}) has score {score}; expected a finite number"
            )));
        }
    }
    Ok(())
}

/// Pairs by their left piece, then by their right one.
#[derive(Debug)]
struct Ranks {
    /// By left piece: where its pairs begin; one more entry for the end.
    first: Vec<u32>,
    pairs: Vec<Pair>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    right: u32,
    rank: u32,
    made: u32,
}

impl Ranks {
    fn new(vocab: &Vocabulary, pairs: &Strings) -> Result<Ranks> {
        let mut all: Vec<(u32, Pair)> = Vec::with_capacity(pairs.len() / 2);
        let mut joined = String::new();
        for rank in 0..pairs.len() / 2 {
            let text = |i: usize| pairs.get(2 * rank + i).expect("a pair has two pieces");
            let (left, right) = (text(0), text(1));
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let texts = [left, right, &joined];
            let ids = texts.map(|text| vocab.find(text, Class::Text));
            // Merging never makes or takes a control token, nor the unknown one.
            let is_control = |(text, id): (&str, Option<u32>)| {
                (id.is_some() && id == vocab.unk()) || vocab.find(text, Class::Control).is_some()
            };
            if texts.into_iter().zip(ids).any(is_control) {
                continue;
            }
            let [Some(left), Some(right), Some(made)] = ids else {
                let lost = texts.into_iter().zip(ids).find(|(_, id)| id.is_none()).map(|(text, _)| text);
                return Err(Error::Vocabulary(format!(
                    "merge {rank} needs the piece {:?}, which does not exist",
                    lost.unwrap_or_default()
                )));
            };
            all.push((left, Pair { right, rank: rank as u32, made }));
        }
        let mut first = vec![0u32; vocab.pieces.len() + 1];
        all.iter().for_each(|(left, _)| first[*left as usize + 1] += 1);
        for left in 1..first.len() {
            first[left] += first[left - 1];
        }
        let mut next = first.clone();
        let mut pairs = vec![Pair { right: 0, rank: 0, made: 0 }; all.len()];
        for (left, pair) in all {
            let place = &mut next[left as usize];
            pairs[*place as usize] = pair;
            *place += 1;
        }
        for left in 0..vocab.pieces.len() {
            pairs[first[left] as usize..first[left + 1] as usize].sort_unstable();
        }
        Ok(Ranks { first, pairs })
    }

    /// The last of a pair's ranks, if it is listed more than once.
    fn find(&self, left: u32, right: u32) -> Option<(Priority, u32)> {
        let of_left = &self.pairs[self.first[left as usize] as usize..self.first[left as usize + 1] as usize];
        let after = of_left.partition_point(|pair| pair.right <= right);
        let pair = of_left[..after].last().filter(|pair| pair.right == right)?;
        Some(([pair.rank, 0, 0, 0], pair.made))
    }
}

#[cfg(test)]
mod tests {
    use super::super::pieces::Pieces;
    use super::*;

    #[test]
    fn scores_come_first_then_lengths_then_the_order_of_pieces() {
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
        let mut pieces = Pieces::default();
        scored.iter().for_each(|(text, _)| pieces.push(text, Kind::Normal));
        let mut scores: Vec<f32> = scored.iter().map(|(_, score)| *score).collect();
        for text in ["\u{2581}\u{2581}", "bb"] {
            pieces.push(text, Kind::Literal);
            scores.push(-1000.0);
        }
        pieces.push("aa", Kind::Special);
        scores.push(9.0);
        let vocab = Vocabulary::new(pieces, None).unwrap();
        let unknown = Unknown { byte_fallback: true, fuse: true };
        let merging = Merging::new(&vocab, Merges::Scored(scores), unknown, false).unwrap();
        let symbol = |id: u32, start: usize| {
            let text = vocab.pieces.text(id);
            let (chars, end) = (text.chars().count() as u32, start + text.len());
            Symbol { id, chars, start, end, prev: NONE, next: NONE }
        };
        let mut found = Vec::new();
        for (left, a, _) in vocab.pieces.iter() {
            for (right, b, _) in vocab.pieces.iter() {
                let text = format!("{a}{b}");
                let pair = merging.pair(&vocab, &text, &symbol(left, 0), &symbol(right, a.len()));
                found.extend(pair.map(|(priority, _)| (priority, a, b)));
            }
        }
        found.sort();
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
        assert_eq!(found.iter().map(|&(_, a, b)| (a, b)).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn of_a_pair_listed_twice_the_last_rank_counts() {
        let mut pieces = Pieces::default();
        ["a", "b", "ab", "c", "bc"].iter().for_each(|text| pieces.push(text, Kind::Normal));
        let vocab = Vocabulary::new(pieces, None).unwrap();
        let unknown = Unknown { byte_fallback: false, fuse: false };
        let ids = |pairs: &[&str]| {
            let merges = Merges::Ranked(pairs.iter().collect());
            let merging = Merging::new(&vocab, merges, unknown, false).unwrap();
            let mut ids = Vec::new();
            merging.run(&vocab, "abc", &mut ids);
            ids
        };
        assert_eq!(ids(&["a", "b", "b", "c"]), [2, 3]);
        assert_eq!(ids(&["a", "b", "b", "c", "a", "b"]), [0, 4]);
    }

    #[test]
    fn floats_turn_around_in_order() {
        let falling = [f32::MAX, 3.5, 1e-40, 0.0, -1e-40, -2.0, f32::MIN];
        assert!(falling.windows(2).all(|w| descending(w[0]) < descending(w[1])));
        assert_eq!(descending(0.0), descending(-0.0));
    }
}
