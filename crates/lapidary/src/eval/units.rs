//! What is run, and which tokens of it count.

use std::ops::Range;
use std::path::Path;

use lapidary_engine::{Heads, Prompt, Stepper};
use lapidary_text::{ChatInput, ChatTemplate, Specials, Tokenizer};
use serde_json::Value;

use super::error::{EvalError, Result};

/// Tokens that are run from an empty sequence, and those among them whose probability counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// The tokens, BOS included.
    pub ids: Vec<u32>,
    /// The tokens that are scored, each predicted from all before it; never the first.
    pub scored: Range<usize>,
}

impl Unit {
    /// Runs the unit and hands the logits that predict each scored token to `sink`: `(index of the token, logits)`.
    ///
    /// # Errors
    /// What the engine refuses: a token outside the vocabulary, a context that is too small, logits that aren't finite.
    pub fn run(&self, stepper: &mut Stepper, sink: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        stepper.reset();
        let first = self.scored.start - 1;
        if first > 0 {
            stepper.prefill_each(&Prompt::from(&self.ids[..first]), Heads::None, &mut |_| {})?;
        }
        let predicting = Prompt::from(&self.ids[first..self.scored.end - 1]);
        stepper.score(&predicting, &mut |position, row| sink(position + 1, row), &mut |_, _| {})?;
        Ok(())
    }

    /// Tokens that count in all of `units`.
    pub(super) fn count(units: &[Unit]) -> usize {
        units.iter().map(|u| u.scored.len()).sum()
    }
}

/// A text, as ids without BOS, in windows of `window` tokens, BOS included, each `stride` further than the one before.
/// Every token of the text is scored once, in the first window that holds it: behind at least `window - 1 - stride`
/// others, but for those of the first window.
///
/// # Errors
/// [`EvalError::Windows`], [`EvalError::Nothing`] for an empty text.
pub fn windows(ids: &[u32], bos: u32, window: usize, stride: usize) -> Result<Vec<Unit>> {
    if window < 2 || !(1..window).contains(&stride) {
        return Err(EvalError::Windows { window, stride });
    }
    if ids.is_empty() {
        return Err(EvalError::Nothing { what: "the text has no tokens".to_owned() });
    }
    let (mut units, mut begin, mut scored) = (Vec::new(), 0, 0);
    while scored < ids.len() {
        let end = ids.len().min(begin + window - 1);
        let of_unit = std::iter::once(bos).chain(ids[begin..end].iter().copied()).collect();
        units.push(Unit { ids: of_unit, scored: scored - begin + 1..end - begin + 1 });
        scored = end;
        begin += stride;
    }
    Ok(units)
}

/// The answers of conversations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatUnits {
    /// One for each answer.
    pub units: Vec<Unit>,
    /// Answers that were passed over because they hold calls or other things than text.
    pub skipped: usize,
}

/// Conversations from JSON lines `{"messages": [..], "tools": [..]}`: each text answer of the assistant is a unit, behind
/// the prompt that the template makes of the messages before it. The answer's tokens count and the end of its turn; the
/// prompt's don't.
///
/// # Errors
/// [`EvalError::Line`] for a line that is no such object, what the template refuses, [`EvalError::Nothing`].
pub fn chat(path: &Path, lines: &str, tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<ChatUnits> {
    let mut found = ChatUnits::default();
    for (n, line) in lines.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let wrong = |problem: String| EvalError::Line { path: path.to_owned(), line: n + 1, problem };
        let value: Value = serde_json::from_str(line).map_err(|e| wrong(e.to_string()))?;
        let messages = value.get("messages").and_then(Value::as_array);
        let messages =
            messages.ok_or_else(|| wrong("expected an object with a list of messages".to_owned()))?;
        let tools = value.get("tools").and_then(Value::as_array).cloned().unwrap_or_default();
        for (i, message) in messages.iter().enumerate() {
            if !matches!(message["role"].as_str(), Some("assistant" | "model")) {
                continue;
            }
            let calls = message.get("tool_calls").is_some_and(|c| c.as_array().is_none_or(|c| !c.is_empty()));
            let Some(answer) = message["content"].as_str().filter(|_| !calls) else {
                found.skipped += 1;
                continue;
            };
            let input = ChatInput {
                messages: messages[..i].to_vec(),
                tools: tools.clone(),
                enable_thinking: value.get("enable_thinking").and_then(Value::as_bool),
                ..ChatInput::default()
            };
            let mut ids = template.encode(tokenizer, &input)?.ids;
            let begin = ids.len();
            ids.extend(tokenizer.encode(answer, Specials::Plain));
            ids.extend(tokenizer.specials().turn_close);
            if begin > 0 && ids.len() > begin {
                found.units.push(Unit { scored: begin..ids.len(), ids });
            }
        }
    }
    if found.units.is_empty() {
        return Err(EvalError::Nothing { what: format!("{} has no answer in text", path.display()) });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_scored_once_behind_enough_others() {
        for (len, window, stride) in
            [(1, 2, 1), (7, 4, 3), (50, 11, 10), (50, 11, 4), (23, 64, 5), (100, 17, 1)]
        {
            let ids: Vec<u32> = (100..100 + len).collect();
            let units = windows(&ids, 2, window, stride).unwrap();
            let mut scored = Vec::new();
            for (n, u) in units.iter().enumerate() {
                assert!(
                    u.ids[0] == 2
                        && u.ids.len() <= window
                        && u.scored.end == u.ids.len()
                        && !u.scored.is_empty()
                );
                assert!(n == 0 || u.scored.start > window - 1 - stride, "{u:?}");
                scored.extend_from_slice(&u.ids[u.scored.clone()]);
            }
            assert_eq!(scored, ids, "{len} {window} {stride}");
            assert_eq!(Unit::count(&units), len as usize);
        }
    }

    #[test]
    fn windows_that_cannot_move_on_are_refused() {
        for (window, stride) in [(0, 0), (1, 1), (8, 0), (8, 8), (8, 9)] {
            assert!(
                matches!(windows(&[1], 2, window, stride), Err(EvalError::Windows { .. })),
                "{window} {stride}"
            );
        }
        assert!(matches!(windows(&[], 2, 8, 4), Err(EvalError::Nothing { .. })));
    }
}
