//! Names for what a sequence begins with.
//!
//! ```text
//! key(b) = SHA-256(key(b - 1), content of the block's 32 rows),   key(-1) = the family, zeros for rows as they are
//! ```
//!
//! so that one key stands for everything up to the end of its block, and equal keys mean equal keys and values. The
//! family sets apart sequences whose rows are edited: it is a digest of the edits. A text row's content is its token id; a soft row's is a hash of its embedding. A row of a vision block may see the
//! whole block, rows that come later included, so its content is the hash of the block and its place in it.

use std::fmt;

use lapidary_ops::PAGE_TOKENS;
use sha2::{Digest, Sha256};

/// Names a block and everything before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BlockKey(pub [u8; 32]);

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}{:02x}{:02x}..", self.0[0], self.0[1], self.0[2])
    }
}

/// The keys of a sequence's whole blocks, and the rows behind the last of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chain {
    /// What stands before the first block.
    family: [u8; 32],
    keys: Vec<BlockKey>,
    /// Contents of the rows behind the last whole block.
    rest: Vec<u8>,
    rest_rows: usize,
}

/// What a row brings.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Content<'a> {
    /// A token.
    Text(u32),
    /// An embedding of its own.
    Soft(&'a [f32]),
    /// Row `.1` of a vision block with digest `.0`.
    Block([u8; 32], usize),
}

impl Chain {
    /// A chain of sequences whose rows are edited alike.
    pub fn of(family: [u8; 32]) -> Chain {
        Chain { family, ..Chain::default() }
    }

    /// Adds a row.
    pub fn push(&mut self, content: Content<'_>) {
        match content {
            Content::Text(token) => {
                self.rest.push(0);
                self.rest.extend(token.to_le_bytes());
            }
            Content::Soft(values) => {
                self.rest.push(1);
                self.rest.extend(digest(values));
            }
            Content::Block(digest, place) => {
                self.rest.push(2);
                self.rest.extend(digest);
                self.rest.extend((place as u64).to_le_bytes());
            }
        }
        self.rest_rows += 1;
        if self.rest_rows == PAGE_TOKENS {
            let before = self.keys.last().map_or(self.family, |k| k.0);
            let hash = Sha256::new().chain_update(before).chain_update(&self.rest).finalize();
            self.keys.push(BlockKey(hash.into()));
            self.rest.clear();
            self.rest_rows = 0;
        }
    }

    /// Keys of the whole blocks.
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// Blocks at the beginning that two sequences have in common.
    pub fn common(&self, other: &Chain) -> usize {
        let most = self.keys.len().min(other.keys.len());
        // A key stands for all before it, so equal ones come first.
        let (mut equal, mut differs) = (0, most);
        while equal < differs {
            let middle = equal + (differs - equal) / 2;
            match self.keys[middle] == other.keys[middle] {
                true => equal = middle + 1,
                false => differs = middle,
            }
        }
        equal
    }
}

/// A hash of the bits of some values.
pub(crate) fn digest(values: &[f32]) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut bytes = [0; 1024];
    for values in values.chunks(bytes.len() / 4) {
        for (b, v) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
            *b = v.to_le_bytes();
        }
        hash.update(&bytes[..4 * values.len()]);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(tokens: impl IntoIterator<Item = u32>) -> Chain {
        let mut chain = Chain::default();
        tokens.into_iter().for_each(|t| chain.push(Content::Text(t)));
        chain
    }

    #[test]
    fn a_key_depends_on_every_row_before_its_end_and_on_nothing_behind() {
        let base = chain(0..131);
        assert_eq!(base.keys().len(), 4);
        assert_eq!(base.common(&chain(0..131)), 4);
        for changed in [0, 31, 32, 63, 64, 95, 96, 127, 128, 130] {
            let other = chain((0..131).map(|t| if t == changed { 999 } else { t }));
            assert_eq!(base.common(&other), (changed as usize / 32).min(4), "row {changed}");
            assert_eq!(other.common(&base), (changed as usize / 32).min(4));
        }
        assert_eq!(base.common(&chain(0..70)), 2);
        assert_eq!(base.common(&Chain::default()), 0);
        let mut edited = Chain::of([7; 32]);
        (0..131).for_each(|t| edited.push(Content::Text(t)));
        assert_eq!((edited.keys().len(), base.common(&edited)), (4, 0), "another family shares nothing");
    }

    #[test]
    fn kinds_of_rows_are_never_taken_for_one_another() {
        let with = |content: Content<'_>| {
            let mut chain = chain(0..31);
            chain.push(content);
            chain.keys()[0]
        };
        let (a, b) = ([0.5f32, -0.0], [0.5f32, 0.0]);
        let keys = [
            with(Content::Text(31)),
            with(Content::Soft(&a)),
            with(Content::Soft(&b)),
            with(Content::Block(digest(&a), 0)),
            with(Content::Block(digest(&a), 1)),
            with(Content::Block(digest(&b), 0)),
        ];
        for (i, x) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|y| x != y), "content {i}");
        }
        assert_eq!(digest(&vec![1.5; 1000]), digest(&vec![1.5; 1000]));
        assert_ne!(digest(&vec![1.5; 1000]), digest(&vec![1.5; 999]));
    }
}
