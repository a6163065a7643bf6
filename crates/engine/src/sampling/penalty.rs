//! The edits of single logits: suppression, bias, penalties. Penalties need to know what was said before;
//! [`TokenCounts`] keeps that as it grows, so that a step costs the number of distinct tokens and not the
//! length of the context.

use std::collections::HashMap;

use super::{SamplingError, SamplingParams};

/// Which tokens a request has seen: the prompt's (for the repetition penalty only) and, with their number,
/// the answer's.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenCounts {
    /// Times in the answer; 0 for a token that only the prompt has.
    seen: HashMap<u32, u32>,
}

impl TokenCounts {
    /// Nothing seen.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts of a prompt and the answer so far.
    pub fn from_history(prompt: &[u32], answer: &[u32]) -> Self {
        let mut counts = Self::new();
        counts.record_prompt(prompt);
        answer.iter().for_each(|t| counts.record(*t));
        counts
    }

    /// Adds tokens of the prompt.
    pub fn record_prompt(&mut self, tokens: &[u32]) {
        for t in tokens {
            self.seen.entry(*t).or_insert(0);
        }
    }

    /// Adds one token of the answer.
    pub fn record(&mut self, token: u32) {
        let n = self.seen.entry(token).or_insert(0);
        *n = n.saturating_add(1);
    }

    /// Whether nothing was seen.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }
}

/// Applies suppression, bias and penalties to a row of finite or -inf logits. With `c` the times that the
/// answer has a token:
///
/// ```text
/// suppress     x = -inf
/// bias         x = x + bias
/// repetition   x = x / r if x > 0, else x * r     for every token seen, prompt included
/// presence     x = x - presence                   if c > 0
/// frequency    x = x - frequency * c
/// ```
///
/// A finite logit stays finite: a result beyond float32 becomes its largest or smallest number.
pub(super) fn edit(
    row: &mut [f32],
    params: &SamplingParams,
    counts: &TokenCounts,
) -> Result<(), SamplingError> {
    for t in &params.suppress {
        row[*t as usize] = f32::NEG_INFINITY;
    }
    for (t, bias) in &params.logit_bias {
        let x = &mut row[*t as usize];
        *x = limited(*x, *x + bias);
    }
    let r = params.repetition_penalty;
    let (presence, frequency) = (params.presence_penalty, params.frequency_penalty);
    if r == 1.0 && presence == 0.0 && frequency == 0.0 {
        return Ok(());
    }
    let vocab = row.len();
    for (token, count) in &counts.seen {
        let Some(x) = row.get_mut(*token as usize) else {
            return Err(SamplingError::TokenOutOfRange { name: "history", token: *token, vocab });
        };
        let mut y = if *x > 0.0 { *x / r } else { *x * r };
        if *count > 0 {
            y -= presence + frequency * *count as f32;
        }
        *x = limited(*x, y);
    }
    Ok(())
}

fn limited(before: f32, after: f32) -> f32 {
    if before == f32::NEG_INFINITY { before } else { after.clamp(f32::MIN, f32::MAX) }
}
