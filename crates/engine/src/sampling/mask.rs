//! Which tokens a grammar allows, a bit each.

/// A set of tokens of one vocabulary: bit `t % 32` of word `t / 32` says whether token `t` is in it. Tokens beyond
/// the words are not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// No token of a vocabulary of `vocab`.
    pub fn none(vocab: usize) -> TokenMask {
        TokenMask { words: vec![0; vocab.div_ceil(32)] }
    }

    /// Takes over words in the layout that the type describes.
    pub fn from_words(words: Vec<u32>) -> TokenMask {
        TokenMask { words }
    }

    /// The words.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The words, to be filled in place.
    pub fn words_mut(&mut self) -> &mut Vec<u32> {
        &mut self.words
    }

    /// Adds a token; one beyond the words is passed over.
    pub fn allow(&mut self, token: u32) {
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            *word |= 1 << (token % 32);
        }
    }

    /// Whether a token is in the set.
    pub fn allows(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Sets the logits of all other tokens to -inf. Words that allow all or none of their tokens, which most do,
    /// cost no look at single bits.
    pub(super) fn apply(&self, row: &mut [f32]) {
        let beyond = (self.words.len() * 32).min(row.len());
        row[beyond..].fill(f32::NEG_INFINITY);
        for (word, logits) in self.words.iter().zip(row.chunks_mut(32)) {
            match *word {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                word => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_allowed_becomes_minus_infinity_and_nothing_else_changes() {
        for (vocab, allowed) in [(70, vec![0, 31, 32, 63, 69]), (33, vec![]), (64, (0..64).collect())] {
            let mut mask = TokenMask::none(vocab);
            allowed.iter().for_each(|&t| mask.allow(t));
            mask.allow(10_000);
            // A row may be longer than the words: a padded vocabulary.
            let mut row: Vec<f32> = (0..vocab + 40).map(|i| i as f32).collect();
            mask.apply(&mut row);
            for (i, x) in row.iter().enumerate() {
                let expected = if allowed.contains(&(i as u32)) { i as f32 } else { f32::NEG_INFINITY };
                assert_eq!(*x, expected, "token {i} of {vocab}");
                assert_eq!(mask.allows(i as u32), allowed.contains(&(i as u32)));
            }
        }
    }
}
