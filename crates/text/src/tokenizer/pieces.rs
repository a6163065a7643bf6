//! The vocabulary as one piece of memory: a quarter of a million pieces as strings of their own would take five times the
//! room and most of the time of a start.

use std::hash::{BuildHasher, Hasher};

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::Kind;
use crate::error::{Error, Result};

/// Many strings, end to end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Strings {
    text: String,
    ends: Vec<usize>,
}

impl Strings {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string at `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.text[start..end])
    }

    /// Appends a string.
    pub fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(self.text.len());
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + DoubleEndedIterator {
        (0..self.len()).map(|i| self.get(i).expect("the index is below the length"))
    }
}

impl<S: AsRef<str>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Strings {
        let mut all = Strings::default();
        strings.into_iter().for_each(|s| all.push(s.as_ref()));
        all
    }
}

/// Text and kind of every id.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    texts: Strings,
    kinds: Vec<Kind>,
}

impl Pieces {
    pub fn push(&mut self, text: &str, kind: Kind) {
        self.texts.push(text);
        self.kinds.push(kind);
    }

    /// One more than the largest id.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Text of an id; empty for one without a piece.
    pub fn text(&self, id: u32) -> &str {
        self.texts.get(id as usize).unwrap_or_default()
    }

    /// Kind of an id, [`Kind::Missing`] beyond the last.
    pub fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Missing)
    }

    pub fn set_kind(&mut self, id: u32, kind: Kind) {
        self.kinds[id as usize] = kind;
    }

    /// Id, text and kind in order, gaps included.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &str, Kind)> {
        self.texts.iter().zip(&self.kinds).enumerate().map(|(id, (text, kind))| (id as u32, text, *kind))
    }
}

/// Which pieces a look-up is about: no control token may be found as text, and no text as a control token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// What text can become.
    Text,
    /// Control tokens and those that no text becomes.
    Control,
}

/// The pieces, found by id and by text.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    pub pieces: Pieces,
    unk: Option<u32>,
    ids: HashTable<u32>,
    // Seeded at random, so that no file can make all pieces collide.
    hasher: RandomState,
}

impl Vocabulary {
    /// Indexes all pieces. The unknown token counts as text because characters need an id to fall back to.
    pub fn new(pieces: Pieces, unk: Option<u32>) -> Result<Vocabulary> {
        let mut ids = HashTable::with_capacity(pieces.len());
        let hasher = RandomState::default();
        for (id, text, kind) in pieces.iter() {
            if kind == Kind::Missing {
                continue;
            }
            let class = class_of(&pieces, unk, id);
            let same = |&other: &u32| pieces.text(other) == text && class_of(&pieces, unk, other) == class;
            let rehash = |&other: &u32| hash(&hasher, pieces.text(other));
            match ids.entry(hash(&hasher, text), same, rehash) {
                Entry::Vacant(place) => place.insert(id),
                Entry::Occupied(_) => {
                    let problem = format!("piece {text:?} appears twice, the second time as id {id}");
                    return Err(Error::Vocabulary(problem));
                }
            };
        }
        Ok(Vocabulary { pieces, unk, ids, hasher })
    }

    /// The id of a text in a class.
    pub fn find(&self, text: &str, class: Class) -> Option<u32> {
        let same = |&id: &u32| self.pieces.text(id) == text && self.class(id) == class;
        self.ids.find(hash(&self.hasher, text), same).copied()
    }

    /// The class of a piece.
    pub fn class(&self, id: u32) -> Class {
        class_of(&self.pieces, self.unk, id)
    }

    /// The unknown token.
    pub fn unk(&self) -> Option<u32> {
        self.unk
    }
}

fn hash(hasher: &RandomState, text: &str) -> u64 {
    let mut hasher = hasher.build_hasher();
    hasher.write(text.as_bytes());
    hasher.finish()
}

fn class_of(pieces: &Pieces, unk: Option<u32>, id: u32) -> Class {
    match pieces.kind(id) {
        Kind::Special | Kind::Unused if unk != Some(id) => Class::Control,
        _ => Class::Text,
    }
}
