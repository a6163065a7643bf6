//! Finds vocabulary pieces that are matched literally, before any merging: control tokens and user-defined pieces.
//!
//! The rule is leftmost-longest over the raw text. A byte trie is enough: a walk ends at the first byte that no piece
//! continues with, which for ordinary text is the first.

use std::collections::HashMap;

/// A run of text as the matcher sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Segment<'a> {
    /// Text between literal pieces; never empty.
    Text(&'a str),
    /// A literal piece.
    Piece(u32),
}

/// A set of literal pieces.
#[derive(Debug, Default)]
pub(crate) struct Literals {
    /// Child of a node by byte; node 0 is the root.
    edges: HashMap<(u32, u8), u32>,
    /// First bytes, so that most positions cost one look-up in a small table.
    starts: Vec<bool>,
    /// The piece that ends in each node.
    ends: Vec<Option<u32>>,
}

impl Literals {
    /// Adds a piece; an empty text is ignored because it would match everywhere.
    pub fn insert(&mut self, text: &str, id: u32) {
        let Some(&first) = text.as_bytes().first() else {
            return;
        };
        if self.ends.is_empty() {
            self.ends.push(None);
            self.starts = vec![false; 256];
        }
        self.starts[usize::from(first)] = true;
        let mut node = 0;
        for &byte in text.as_bytes() {
            let fresh = self.ends.len() as u32;
            node = *self.edges.entry((node, byte)).or_insert(fresh);
            if node == fresh {
                self.ends.push(None);
            }
        }
        self.ends[node as usize] = Some(id);
    }

    /// Cuts `text` at the pieces that `wanted` accepts.
    pub fn split<'a, 'b>(
        &'b self,
        text: &'a str,
        wanted: impl Fn(u32) -> bool + 'b,
    ) -> impl Iterator<Item = Segment<'a>> + 'b
    where
        'a: 'b,
    {
        let (mut start, mut pending) = (0, None);
        std::iter::from_fn(move || {
            if let Some(id) = pending.take() {
                return Some(Segment::Piece(id));
            }
            let mut at = start;
            while at < text.len() {
                if let Some((len, id)) = self.longest_at(&text.as_bytes()[at..], &wanted) {
                    let before = &text[start..at];
                    start = at + len;
                    if before.is_empty() {
                        return Some(Segment::Piece(id));
                    }
                    pending = Some(id);
                    return Some(Segment::Text(before));
                }
                at += 1;
            }
            let rest = &text[start..];
            start = text.len();
            (!rest.is_empty()).then_some(Segment::Text(rest))
        })
    }

    /// Length and id of the longest wanted piece at the beginning of `bytes`.
    fn longest_at(&self, bytes: &[u8], wanted: &impl Fn(u32) -> bool) -> Option<(usize, u32)> {
        if !*self.starts.get(usize::from(bytes[0]))? {
            return None;
        }
        let (mut node, mut best) = (0, None);
        for (i, &byte) in bytes.iter().enumerate() {
            match self.edges.get(&(node, byte)) {
                Some(&next) => node = next,
                None => break,
            }
            if let Some(id) = self.ends[node as usize].filter(|&id| wanted(id)) {
                best = Some((i + 1, id));
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn literals(pieces: &[&str]) -> Literals {
        let mut set = Literals::default();
        for (i, piece) in pieces.iter().enumerate() {
            set.insert(piece, i as u32);
        }
        set
    }

    #[test]
    fn the_leftmost_longest_piece_wins() {
        let set = literals(&["\n", "\n\n\n", "<b>", "b>c"]);
        let cut: Vec<_> = set.split("a\n\n\n\n<b>c", |_| true).collect();
        use Segment::{Piece, Text};
        assert_eq!(cut, [Text("a"), Piece(1), Piece(0), Piece(2), Text("c")]);
    }

    #[test]
    fn unwanted_pieces_stay_text() {
        let set = literals(&["<|turn>", "<b>"]);
        let cut: Vec<_> = set.split("<|turn><b>", |id| id != 0).collect();
        assert_eq!(cut, [Segment::Text("<|turn>"), Segment::Piece(1)]);
    }

    #[test]
    fn an_empty_set_leaves_text_whole() {
        let cut: Vec<_> = Literals::default().split("é<", |_| true).collect();
        assert_eq!(cut, [Segment::Text("é<")]);
    }
}
