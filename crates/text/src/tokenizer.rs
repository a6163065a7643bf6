//! Text to token ids and back, the same ids whether the vocabulary comes from a `tokenizer.json` or from a GGUF file.
//!
//! Both constructors reduce their file to one description: pieces with a kind each, and what decides between merges: an
//! ordered list, or scores. Encoding is then
//! 1. cut the raw text at literal pieces, leftmost and longest first (control tokens only when asked for),
//! 2. replace every space by U+2581,
//! 3. merge over the whole of each remaining run, with bytes for characters that the vocabulary lacks.
//!
//! The published implementation is the `tokenizers` crate; tests hold every id against it. It is not used here: it takes
//! a second to load a vocabulary of 262,144 pieces and three times the memory, and its added-token and normaliser layers
//! cannot leave control tokens out per call.

mod gguf;
mod json;
mod literal;
mod merging;
mod pieces;
mod specials;

use crate::error::{Error, Result};
pub use gguf::GgufVocab;
use literal::Literals;
pub(crate) use literal::Segment;
use merging::{Merges, Merging, Unknown};
pub use pieces::Strings;
use pieces::{Class, Pieces, Vocabulary};
pub use specials::SpecialIds;
pub(crate) use specials::is_control_name;

/// The character that stands for a space inside pieces.
const SPACE: &str = "\u{2581}";

/// What to do with the spelling of a control token in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// It becomes the control token. Only for text that the caller made or trusts.
    Parse,
    /// It stays text. For everything that users, tools and files bring.
    Plain,
}

/// What a piece is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No piece has this id.
    Missing,
    /// Made by merging characters.
    Normal,
    /// One byte of a character that the vocabulary lacks.
    Byte(u8),
    /// Matched in the raw text before anything else.
    Literal,
    /// Matched after spaces were replaced, and before merging.
    NormalizedLiteral,
    /// Steers the model; matched like a literal, and only when asked for.
    Special,
    /// Fills up a converter's list: no text becomes it.
    Unused,
}

/// A tokenizer's content, whatever file it came from.
#[derive(Debug)]
pub(crate) struct Parts {
    /// Text and kind of every id; `Missing` where there is none.
    pub pieces: Pieces,
    pub merges: Merges,
    pub unk: Option<u32>,
    pub bos: Option<u32>,
    pub unknown: Unknown,
    pub ignore_merges: bool,
}

/// Converts between text and token ids.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocabulary,
    merging: Merging,
    literals: Literals,
    normalized_literals: Literals,
    specials: SpecialIds,
}

impl Tokenizer {
    /// Reads a Hugging Face `tokenizer.json`.
    ///
    /// Fails when the file is damaged or asks for anything that Gemma's tokenizers do not have: another model than BPE,
    /// another normaliser, pre-tokeniser or decoder, added tokens that eat neighbouring spaces.
    pub fn from_json(bytes: &[u8]) -> Result<Self> {
        Self::build(json::parse(bytes)?)
    }

    /// Takes the vocabulary of a GGUF file. Fails when the declared algorithm is unknown or the lists contradict it.
    pub fn from_gguf(vocab: GgufVocab) -> Result<Self> {
        Self::build(gguf::parse(vocab)?)
    }

    fn build(parts: Parts) -> Result<Self> {
        let Parts { pieces, merges, unk, bos, unknown, ignore_merges } = parts;
        let (mut literals, mut normalized_literals) = (Literals::default(), Literals::default());
        let mut bytes_known = 0;
        for (id, text, kind) in pieces.iter() {
            match kind {
                Kind::Missing | Kind::Normal | Kind::Unused => {}
                Kind::Byte(_) => bytes_known += 1,
                Kind::Literal | Kind::Special => literals.insert(text, id),
                Kind::NormalizedLiteral => normalized_literals.insert(&text.replace(' ', SPACE), id),
            }
        }
        let vocab = Vocabulary::new(pieces, unk)?;
        if unk.is_none() && !(unknown.byte_fallback && bytes_known == 256) {
            let problem = format!(
                "neither an unknown token nor all 256 byte pieces ({bytes_known} found): characters would vanish"
            );
            return Err(Error::Vocabulary(problem));
        }
        let merging = Merging::new(&vocab, merges, unknown, ignore_merges)?;
        let mut specials = SpecialIds::find(|name| find(&vocab, name));
        specials.bos = bos.or(specials.bos);
        specials.unk = unk.or(specials.unk);
        Ok(Self { vocab, merging, literals, normalized_literals, specials })
    }

    /// Ids of a text, without a BOS unless the text spells one and `specials` says to parse it.
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        let wanted = |id: u32| specials == Specials::Parse || !self.is_special(id);
        let mut ids = Vec::new();
        for segment in self.literals.split(text, wanted) {
            match segment {
                Segment::Piece(id) => ids.push(id),
                Segment::Text(run) => self.merge(&run.replace(' ', SPACE), &mut ids),
            }
        }
        ids
    }

    fn merge(&self, normalized: &str, ids: &mut Vec<u32>) {
        for segment in self.normalized_literals.split(normalized, |_| true) {
            match segment {
                Segment::Piece(id) => ids.push(id),
                Segment::Text(run) => self.merging.run(&self.vocab, run, ids),
            }
        }
    }

    /// Ids of a prompt for raw completion: exactly one BOS in front, whatever the file's flags say, and not doubled when
    /// the text already begins with it. Without BOS Gemma degenerates.
    pub fn encode_prompt(&self, text: &str, specials: Specials) -> Result<Vec<u32>> {
        self.with_bos(self.encode(text, specials))
    }

    /// Puts exactly one BOS in front of ids.
    pub fn with_bos(&self, mut ids: Vec<u32>) -> Result<Vec<u32>> {
        let bos = self.specials.bos.ok_or(Error::MissingToken("<bos>"))?;
        let present = ids.iter().take_while(|&&id| id == bos).count();
        ids.splice(..present, [bos]);
        Ok(ids)
    }

    /// Cuts a text at the control tokens it spells; what lies between them may still hold user-defined pieces.
    pub(crate) fn split_controls<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Segment<'a>> + 'a {
        self.literals.split(text, |id| self.is_special(id))
    }

    /// Text of ids, control tokens spelled out. Bytes that form no character become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut bytes = Vec::new();
        for &id in ids {
            self.append_bytes(id, &mut bytes)?;
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Appends what a token stands for: its text with U+2581 turned back into spaces, or its byte.
    pub fn append_bytes(&self, id: u32, out: &mut Vec<u8>) -> Result<()> {
        let text = self.piece(id)?;
        if let Kind::Byte(byte) = self.vocab.pieces.kind(id) {
            out.push(byte);
            return Ok(());
        }
        let mut words = text.split(SPACE);
        out.extend(words.next().unwrap_or_default().bytes());
        for word in words {
            out.push(b' ');
            out.extend(word.bytes());
        }
        Ok(())
    }

    /// The piece itself, as the vocabulary spells it.
    pub fn piece(&self, id: u32) -> Result<&str> {
        match self.vocab.pieces.kind(id) {
            Kind::Missing => Err(self.no_such_id(id)),
            _ => Ok(self.vocab.pieces.text(id)),
        }
    }

    /// One more than the largest id. The model's embedding may have further, unused rows.
    pub fn vocab_size(&self) -> u32 {
        self.vocab.pieces.len() as u32
    }

    /// The id of a piece spelled as in the vocabulary.
    pub fn token_id(&self, piece: &str) -> Option<u32> {
        find(&self.vocab, piece)
    }

    /// Whether an id is a control token; an id without a piece is none.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocab.pieces.kind(id) == Kind::Special
    }

    /// The ids of Gemma's control tokens in this vocabulary.
    pub fn specials(&self) -> &SpecialIds {
        &self.specials
    }

    /// Fails for an id without a piece. `id` is wide so that values from requests can be checked before they are cut.
    pub fn check_id(&self, id: i64) -> Result<u32> {
        let narrow = u32::try_from(id).unwrap_or(u32::MAX);
        self.piece(narrow).map(|_| narrow)
    }

    /// First characters of all control tokens: text without them cannot spell any.
    pub(crate) fn control_initials(&self) -> Vec<char> {
        let mut initials: Vec<char> = self
            .vocab
            .pieces
            .iter()
            .filter(|(_, _, kind)| *kind == Kind::Special)
            .filter_map(|(_, text, _)| text.chars().next())
            .collect();
        initials.sort_unstable();
        initials.dedup();
        initials
    }

    fn no_such_id(&self, id: u32) -> Error {
        Error::TokenId { id, vocab_size: self.vocab_size() }
    }
}

/// The id of a piece, a control token's first.
fn find(vocab: &Vocabulary, piece: &str) -> Option<u32> {
    vocab.find(piece, Class::Control).or_else(|| vocab.find(piece, Class::Text))
}

/// The byte that a piece such as `<0x0A>` stands for.
fn byte_of(piece: &str) -> Option<u8> {
    let hex = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok()).flatten()
}
