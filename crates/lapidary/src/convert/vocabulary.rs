//! `tokenizer.json` as the `tokenizer.ggml.*` lists of a GGUF file.

use std::path::Path;

use lapidary_text::{GgufVocab, Tokenizer};
use lapidary_weights::gguf::{StringArray, Writer};
use serde_json::Value;

use super::error::{ConvertError, Result};

/// GGUF's numbers for kinds of tokens.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The markers of thoughts, calls and quotes. Converters type them as user-defined, because engines print those and
/// parse what they printed; readers that know Gemma take them for control tokens by name.
const VISIBLE: [&str; 7] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
];

/// A vocabulary with a token for every row of the embedding.
pub(super) struct Vocabulary {
    tokens: Vec<String>,
    types: Vec<i32>,
    merges: Vec<String>,
    /// The token for what has no other, and for all of a run of such characters.
    pub(super) unknown: Option<u32>,
    /// The token that closes a turn of a conversation.
    pub(super) end_of_turn: Option<u32>,
    /// Special tokens without a row, such as the image marker of text-only Gemma 3 checkpoints. No prompt can hold them.
    pub(super) left_out: Vec<String>,
}

impl Vocabulary {
    /// Reads a `tokenizer.json` and proves that the lists give the same tokenizer.
    pub(super) fn read(path: &Path, rows: usize) -> Result<Vocabulary> {
        let io = |source| ConvertError::Io { path: path.to_owned(), source };
        let wrong = |problem: String| ConvertError::Tokenizer { path: path.to_owned(), problem };
        let bytes = std::fs::read(path).map_err(io)?;
        let original = Tokenizer::from_json(&bytes).map_err(|e| wrong(e.to_string()))?;
        let file: Value = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
        let vocabulary = Vocabulary::of(&original, &file, rows).map_err(wrong)?;
        vocabulary.verify(&original).map_err(wrong)?;
        Ok(vocabulary)
    }

    fn of(original: &Tokenizer, file: &Value, rows: usize) -> Result<Vocabulary, String> {
        let model = &file["model"];
        // GGUF has no keys for these; readers take them as they are in every Gemma.
        for (field, expected) in [("byte_fallback", true), ("fuse_unk", true), ("ignore_merges", false)] {
            if model[field].as_bool().unwrap_or(false) != expected {
                return Err(format!("model.{field} is not {expected}, which a GGUF file can't say"));
            }
        }
        let count = original.vocab_size() as usize;
        let mut left_out = Vec::new();
        for id in rows as u32..count as u32 {
            match original.piece(id) {
                Ok(piece) if original.is_special(id) => left_out.push(piece.to_owned()),
                Ok(_) => return Err(format!("{count} tokens for an embedding of {rows} rows")),
                Err(_) => {}
            }
        }
        let mut tokens = Vec::with_capacity(rows);
        let mut types = Vec::with_capacity(rows);
        for id in 0..rows as u32 {
            match original.piece(id) {
                Ok(piece) if original.is_special(id) => {
                    tokens.push(piece.to_owned());
                    types.push(if VISIBLE.contains(&piece) { USER_DEFINED } else { CONTROL });
                }
                Ok(piece) => {
                    tokens.push(piece.to_owned());
                    types.push(if is_byte(piece) { BYTE } else { NORMAL });
                }
                Err(_) => {
                    tokens.push(format!("[PAD{id}]"));
                    types.push(UNUSED);
                }
            }
        }
        for added in file["added_tokens"].as_array().into_iter().flatten() {
            let id = added["id"].as_u64().unwrap_or(u64::MAX) as usize;
            if types.get(id) == Some(&NORMAL) {
                types[id] = USER_DEFINED;
            }
        }
        let unknown = model["unk_token"].as_str().and_then(|piece| original.token_id(piece));
        if let Some(id) = unknown {
            types[id as usize] = UNKNOWN;
        }
        let end_of_turn = original.specials().turn_close;
        let merges = model["merges"].as_array().into_iter().flatten().map(merge);
        let merges = merges.collect::<Result<_, _>>()?;
        Ok(Vocabulary { tokens, types, merges, unknown, end_of_turn, left_out })
    }

    /// The list form loses some of what the JSON says, so the pieces that come back are held against the original's.
    fn verify(&self, original: &Tokenizer) -> Result<(), String> {
        let vocab = GgufVocab {
            model: "gemma4".to_owned(),
            tokens: self.tokens.iter().collect(),
            token_types: self.types.clone(),
            merges: self.merges.iter().collect(),
            unk: self.unknown,
            ..GgufVocab::default()
        };
        let copy = Tokenizer::from_gguf(vocab).map_err(|e| e.to_string())?;
        for id in 0..original.vocab_size().min(self.tokens.len() as u32) {
            let Ok(piece) = original.piece(id) else { continue };
            if copy.piece(id).ok() != Some(piece) || copy.is_special(id) != original.is_special(id) {
                return Err(format!("token {id} ({piece:?}) means something else in a GGUF file"));
            }
        }
        Ok(())
    }

    pub(super) fn declare(&self, w: &mut Writer) -> Result<()> {
        w.set("tokenizer.ggml.model", "gemma4")?;
        w.set("tokenizer.ggml.tokens", self.tokens.iter().collect::<StringArray>())?;
        // Merges decide; the list is there for readers that want one entry a token.
        w.set("tokenizer.ggml.scores", vec![-1000.0f32; self.tokens.len()])?;
        w.set("tokenizer.ggml.token_type", self.types.clone())?;
        w.set("tokenizer.ggml.merges", self.merges.iter().collect::<StringArray>())?;
        w.set("tokenizer.ggml.add_space_prefix", false)?;
        Ok(())
    }
}

fn is_byte(piece: &str) -> bool {
    let hex = piece.strip_prefix("<0x").and_then(|p| p.strip_suffix('>'));
    hex.is_some_and(|hex| hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
}

fn merge(entry: &Value) -> Result<String, String> {
    if let Some(joined) = entry.as_str() {
        return Ok(joined.to_owned());
    }
    match (entry[0].as_str(), entry[1].as_str()) {
        (Some(left), Some(right)) if !left.contains(' ') && !right.contains(' ') => {
            Ok(format!("{left} {right}"))
        }
        _ => Err(format!("merge {entry} can't be written as two pieces with a space between")),
    }
}
