//! Which tokens a piece of visible text is made of, for logprobs.
//!
//! Text reaches a client later than its tokens arrive: characters wait for their last byte, stop strings and openers for
//! their decision, and markers are never shown. So tokens queue up here, and each piece of text takes its own off the
//! front: a token belongs to the piece that shows its first byte. Of several bytes that became one U+FFFD, the first
//! does.

use std::collections::VecDeque;

use lapidary_text::Tokenizer;

/// A token that has come in.
#[derive(Debug)]
struct Waiting {
    /// Its place in the reply.
    index: usize,
    bytes: Vec<u8>,
    /// Bytes of it that were shown.
    shown: usize,
    special: bool,
}

/// Tokens whose text has not been shown.
#[derive(Debug, Default)]
pub(super) struct Aligner {
    waiting: VecDeque<Waiting>,
    /// Places of tokens that nobody will ask for: they show nothing.
    pub passed: Vec<usize>,
}

const REPLACEMENT: &[u8] = "\u{fffd}".as_bytes();

impl Aligner {
    /// Notes a token.
    pub fn push(&mut self, tokenizer: &Tokenizer, index: usize, token: u32) {
        let mut bytes = Vec::new();
        let _ = tokenizer.append_bytes(token, &mut bytes);
        self.waiting.push_back(Waiting { index, bytes, shown: 0, special: tokenizer.is_special(token) });
    }

    /// Nothing that came so far will be shown any more.
    pub fn pass(&mut self) {
        self.passed.extend(self.waiting.drain(..).filter(|w| w.shown == 0).map(|w| w.index));
    }

    /// Takes the tokens of a text off the queue: where in the text each begins, and its place in the reply. Tokens that
    /// were passed over, such as markers and labels, are dropped.
    pub fn take(&mut self, text: &str) -> Vec<(usize, usize)> {
        let text = text.as_bytes();
        let mut taken = Vec::new();
        let mut at = 0;
        while at < text.len() {
            let Some(front) = self.waiting.front_mut() else { break };
            let rest = &text[at..];
            let own = &front.bytes[front.shown..];
            let first = front.shown == 0;
            let before = taken.len();
            if !own.is_empty() && rest.starts_with(own) {
                if first {
                    taken.push((at, front.index));
                }
                at += own.len();
            } else if !own.is_empty() && own.starts_with(rest) {
                // The text ends inside the token; the rest of it comes later, or never.
                if first {
                    taken.push((at, front.index));
                }
                front.shown += rest.len();
                return taken;
            } else if front.special && own == b"<|\"|>" && rest[0] == b'"' {
                // Outside of calls the quote token is shown as a quote.
                taken.push((at, front.index));
                at += 1;
            } else if !front.special && rest.starts_with(REPLACEMENT) && std::str::from_utf8(own).is_err() {
                // A byte that became no character.
                if first {
                    taken.push((at, front.index));
                }
                at += REPLACEMENT.len();
            }
            if first && taken.len() == before {
                self.passed.push(front.index);
            }
            self.waiting.pop_front();
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(tokens: &[(&[u8], bool)]) -> Aligner {
        let tokens = tokens.iter().enumerate();
        let waiting = tokens.map(|(index, (bytes, special))| Waiting {
            index,
            bytes: bytes.to_vec(),
            shown: 0,
            special: *special,
        });
        Aligner { waiting: waiting.collect(), passed: Vec::new() }
    }

    #[test]
    fn tokens_belong_to_the_text_that_shows_their_first_byte() {
        let mut a = waiting(&[(b"ab", false), (b"<x>", true), (b"cd", false), (b"e", false)]);
        assert_eq!(a.take("abc"), [(0, 0), (2, 2)]);
        assert_eq!(a.take("de"), [(1, 3)]);
        assert_eq!(a.take("z"), []);
        assert_eq!(a.passed, [1]);
    }

    #[test]
    fn bytes_of_one_character_come_with_it_and_lost_ones_do_not_get_lost() {
        let mut a = waiting(&[(b"\xf0", false), (b"\x9f", false), (b"\x98\x80", false), (b"!", false)]);
        assert_eq!(a.take("\u{1f600}!"), [(0, 0), (1, 1), (2, 2), (4, 3)]);
        let mut a = waiting(&[(b"\xf0", false), (b"\x9f", false), (b"ok", false)]);
        assert_eq!(a.take("\u{fffd}ok"), [(0, 0), (3, 2)]);
        assert_eq!(a.passed, [1]);
    }

    #[test]
    fn a_quote_token_is_a_quote() {
        let mut a = waiting(&[(b"<|\"|>", true), (b"a", false)]);
        assert_eq!(a.take("\"a"), [(0, 0), (1, 1)]);
    }
}
