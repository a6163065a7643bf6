//! The vocabulary as llguidance wants it: the bytes of every token in a tree.
//!
//! A control token is entered as 0xFF and its spelling. No text holds that byte, so a grammar reaches control tokens by
//! name or number only, never by their spelling.

use std::sync::Arc;

use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::tokenizer::{Specials, Tokenizer};

struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        if let Ok(text) = std::str::from_utf8(bytes) {
            let ids = self.tokenizer.encode(text, Specials::Plain);
            // A vocabulary without byte pieces loses what it lacks; the tree says so instead.
            let mut back = Vec::new();
            let whole = ids.iter().all(|&id| self.tokenizer.append_bytes(id, &mut back).is_ok());
            if whole && back == bytes {
                return ids;
            }
        }
        self.trie.greedy_tokenize(bytes)
    }
}

/// Builds the tree.
pub(super) fn environment(tokenizer: Arc<Tokenizer>) -> Result<TokEnv, String> {
    let specials = tokenizer.specials();
    let ends: Vec<u32> = [specials.turn_close, specials.eos].into_iter().flatten().collect();
    let Some(&eos) = ends.first() else {
        return Err("it has neither <turn|> nor <eos>, so that no answer could end".to_owned());
    };
    let words: Vec<Vec<u8>> = (0..tokenizer.vocab_size()).map(|id| word(&tokenizer, id)).collect();
    let trie = TokTrie::from(&TokRxInfo::new(tokenizer.vocab_size(), eos), &words).with_eos_tokens(&ends);
    Ok(Arc::new(Vocabulary { tokenizer, trie }))
}

/// Bytes of a token; none for an id without a piece, which no grammar reaches then.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let Ok(piece) = tokenizer.piece(id) else { return Vec::new() };
    if tokenizer.is_special(id) || Some(id) == tokenizer.specials().unk {
        let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
        word.extend(piece.bytes());
        return word;
    }
    let mut word = Vec::new();
    let _ = tokenizer.append_bytes(id, &mut word);
    word
}
