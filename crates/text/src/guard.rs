//! Keeps text from users, tools and files from becoming control tokens.
//!
//! A template mixes its own markers with text that it did not write, and afterwards nobody can tell whose `<turn|>` is
//! whose. So before rendering, the first character of every control token (for Gemma: `<`) is replaced in every string of
//! the conversation by a private-use character that occurs nowhere in it. Whatever the template glues together, only its
//! own markers can then be spelled whole. The rendered text is cut at these, and in what lies between the characters are
//! put back and encoded as plain text. Replacing single characters instead of whole markers also stops a marker that is
//! spread over two messages.

use serde_json::Value;

use crate::error::Result;
use crate::template::{ChatInput, ChatTemplate, Continuation, map_strings, unused_char, without_thoughts};
use crate::tokenizer::{Segment, Specials, Tokenizer};

/// A prompt ready for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// Token ids, exactly one BOS in front.
    pub ids: Vec<u32>,
    /// The same as text.
    pub text: String,
    /// Whether the prompt ends inside a thought, so that the answer begins in it.
    pub thinking_open: bool,
}

impl ChatTemplate {
    /// Renders a conversation to ids. Markers that the template writes become control tokens; the same spelling in a
    /// message, name, schema, argument or result stays text. The text is the one that [`render`](Self::render) gives.
    pub fn encode(&self, tokenizer: &Tokenizer, input: &ChatInput) -> Result<EncodedPrompt> {
        let mut input = self.prepare(input);
        let continuation = Continuation::split_off(&mut input, self.is_gemma4())?;
        if self.is_gemma4() {
            // The template would remove these itself, but it will not see their markers any more.
            input
                .messages
                .iter_mut()
                .filter(|m| m["role"] == "assistant" || m["role"] == "model")
                .for_each(drop_thoughts);
        }
        let stand_ins = StandIns::choose(tokenizer, &input);
        let protect = |text: &str| stand_ins.protect(text);
        for value in input.messages.iter_mut().chain(&mut input.tools).chain(input.extra.values_mut()) {
            *value = map_strings(value, &protect);
        }
        let rendered = continuation.finish(self, input, stand_ins.end, &protect)?;

        let mut ids = Vec::new();
        for segment in tokenizer.split_controls(&rendered) {
            match segment {
                Segment::Piece(id) => ids.push(id),
                Segment::Text(text) => {
                    ids.extend(tokenizer.encode(&stand_ins.restore(text), Specials::Plain))
                }
            }
        }
        let ids = tokenizer.with_bos(ids)?;
        let bos = tokenizer.piece(ids[0])?;
        let mut text = stand_ins.restore(&rendered);
        if !text.starts_with(bos) {
            text.insert_str(0, bos);
        }
        Ok(EncodedPrompt { thinking_open: ends_in_thought(tokenizer, &ids), ids, text })
    }
}

/// Whether ids end inside a thought of the turn that is open.
pub(crate) fn ends_in_thought(tokenizer: &Tokenizer, ids: &[u32]) -> bool {
    let specials = tokenizer.specials();
    let borders = [specials.channel_open, specials.channel_close, specials.turn_open, specials.turn_close];
    let last = ids.iter().rev().find(|&&id| borders.contains(&Some(id)));
    last.is_some_and(|&id| Some(id) == specials.channel_open)
}

fn drop_thoughts(message: &mut Value) {
    match message.get_mut("content") {
        Some(Value::String(text)) => *text = without_thoughts(text),
        Some(Value::Array(parts)) => {
            for part in parts {
                if let Some(Value::String(text)) = part.get_mut("text") {
                    *text = without_thoughts(text);
                }
            }
        }
        _ => {}
    }
}

/// Which character stands in for which.
struct StandIns {
    pairs: Vec<(char, char)>,
    /// One more unused character, for marking a place.
    end: char,
}

impl StandIns {
    fn choose(tokenizer: &Tokenizer, input: &ChatInput) -> Self {
        let mut taken = Vec::new();
        let mut take = || {
            let unused = unused_char(input, &taken);
            taken.push(unused);
            unused
        };
        let pairs = tokenizer.control_initials().into_iter().map(|initial| (initial, take())).collect();
        Self { pairs, end: take() }
    }

    fn protect(&self, text: &str) -> String {
        let stand_in =
            |c| self.pairs.iter().find(|(initial, _)| *initial == c).map_or(c, |(_, stand_in)| *stand_in);
        text.chars().map(stand_in).collect()
    }

    fn restore(&self, text: &str) -> String {
        let initial =
            |c| self.pairs.iter().find(|(_, stand_in)| *stand_in == c).map_or(c, |(initial, _)| *initial);
        text.chars().map(initial).collect()
    }
}
