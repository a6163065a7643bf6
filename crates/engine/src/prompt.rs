//! Tokens and soft tokens of one sequence, checked before anything runs.

use std::borrow::Cow;
use std::ops::Range;

use lapidary_model::{Config, VisionBlocks};
use lapidary_ops::{Batch, GROUPS};

use crate::error::{Error, Result};
use crate::prefix::{Chain, Content, digest};

/// What is fed to a sequence: token ids, some of them stood in for by embeddings.
#[derive(Clone, Debug, Default)]
pub struct Prompt {
    /// Token ids; at soft rows any id, it is not looked up.
    pub tokens: Vec<u32>,
    /// Runs of soft tokens, in order.
    pub soft: Vec<SoftSpan>,
}

/// A run of soft tokens.
#[derive(Clone, Debug)]
pub struct SoftSpan {
    /// First place in [`Prompt::tokens`].
    pub start: usize,
    /// Embeddings, `rows * hidden` values; used as given, without the embedding scale.
    pub values: Vec<f32>,
    /// What they are, which decides the mask.
    pub kind: SoftKind,
}

/// What soft tokens stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoftKind {
    /// Image or video: adjacent rows form a block whose rows see one another where the model says so.
    Vision,
    /// Audio: causal like text.
    Audio,
}

impl From<&[u32]> for Prompt {
    fn from(tokens: &[u32]) -> Prompt {
        Prompt { tokens: tokens.to_vec(), soft: Vec::new() }
    }
}

/// A prompt that was checked against a model, row by row. A stepper borrows the prompt for one call, a
/// scheduler keeps it.
#[derive(Debug)]
pub(crate) struct Checked<'a> {
    /// Holds the embeddings of soft rows.
    prompt: Cow<'a, Prompt>,
    /// Id to look up in both tables.
    lookup: Vec<i32>,
    /// Which span holds the row's own embedding, when soft, and the first of its values there.
    soft: Vec<Option<(usize, usize)>>,
    /// Values of an embedding.
    hidden: usize,
    /// One past the last row of the row's vision block, or past the row itself.
    block_end: Vec<usize>,
    /// Which groups see a vision block whole.
    whole_blocks: [bool; GROUPS],
}

impl<'a> Checked<'a> {
    pub fn new(config: &Config, prompt: impl Into<Cow<'a, Prompt>>) -> Result<Checked<'a>> {
        let prompt = prompt.into();
        let len = prompt.tokens.len();
        if len == 0 {
            return Err(Error::EmptyPrompt);
        }
        let mut soft: Vec<Option<(usize, usize)>> = vec![None; len];
        let mut vision = vec![false; len];
        for (s, span) in prompt.soft.iter().enumerate() {
            let rows = span.values.len() / config.hidden;
            if !span.values.len().is_multiple_of(config.hidden) || rows == 0 {
                let expected = rows.max(1) * config.hidden;
                return Err(Error::Length { what: "soft values", expected, found: span.values.len() });
            }
            let out = Error::SoftRange { start: span.start, len };
            if span.start > len || rows > len - span.start {
                return Err(out);
            }
            for (i, values) in span.values.chunks_exact(config.hidden).enumerate() {
                let row = span.start + i;
                if values.iter().any(|v| !v.is_finite()) {
                    return Err(Error::SoftNotFinite { index: row });
                }
                if soft[row].replace((s, i * config.hidden)).is_some() {
                    return Err(Error::SoftRange { start: span.start, len });
                }
                vision[row] = span.kind == SoftKind::Vision;
            }
        }
        let mut lookup = Vec::with_capacity(len);
        for (&token, soft) in prompt.tokens.iter().zip(&soft) {
            if soft.is_some() {
                lookup.push(config.pad as i32);
                continue;
            }
            check_token(config, token)?;
            lookup.push(config.lookup_id(token) as i32);
        }
        let mut block_end: Vec<usize> = (1..=len).collect();
        for row in (0..len.saturating_sub(1)).rev() {
            if vision[row] && vision[row + 1] {
                block_end[row] = block_end[row + 1];
            }
        }
        let whole_blocks = match config.vision {
            VisionBlocks::Causal => [false, false],
            VisionBlocks::Sliding => [true, false],
            VisionBlocks::Both => [true, true],
        };
        Ok(Checked { prompt, lookup, soft, hidden: config.hidden, block_end, whole_blocks })
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.lookup.len()
    }

    /// Appends the columns of `rows` to a batch, the first of them at `position`; the caller adds span, pages
    /// and heads.
    pub fn push(&self, batch: &mut Batch, rows: Range<usize>, position: usize) {
        for row in rows.clone() {
            let position = position + row - rows.start;
            for (group, whole) in self.whole_blocks.iter().enumerate() {
                let end = if *whole { self.block_end[row] } else { row + 1 };
                batch.visible_to[group].push((position + end - row) as i32);
            }
            if let Some((span, first)) = self.soft[row] {
                batch.soft_rows.push(batch.tokens.len() as i32);
                batch.soft_values.extend(&self.prompt.soft[span].values[first..first + self.hidden]);
            }
            batch.tokens.push(self.lookup[row]);
            batch.per_layer_tokens.push(self.lookup[row]);
            batch.positions.push(position as i32);
        }
    }

    /// Adds every row to a chain of block names.
    pub fn name_rows(&self, chain: &mut Chain) {
        // Of the vision block at hand, and where it began.
        let mut block = (0, [0; 32]);
        for (row, &token) in self.prompt.tokens.iter().enumerate() {
            let Some((span, first)) = self.soft[row] else {
                chain.push(Content::Text(token));
                continue;
            };
            let span = &self.prompt.soft[span];
            if span.kind == SoftKind::Audio {
                chain.push(Content::Soft(&span.values[first..first + self.hidden]));
                continue;
            }
            if row == 0 || self.block_end[row - 1] != self.block_end[row] {
                block = (row, self.block_digest(row));
            }
            chain.push(Content::Block(block.1, row - block.0));
        }
    }

    /// A hash of the embeddings of the vision block that begins at `row`.
    fn block_digest(&self, row: usize) -> [u8; 32] {
        let rows = (row..self.block_end[row]).filter_map(|row| self.soft[row]);
        let values: Vec<f32> = rows
            .flat_map(|(span, first)| &self.prompt.soft[span].values[first..first + self.hidden])
            .copied()
            .collect();
        digest(&values)
    }

    /// The token of a text row.
    pub fn text(&self, row: usize) -> Option<u32> {
        self.soft[row].is_none().then(|| self.prompt.tokens[row])
    }

    /// Whether a row is a text row with one of these tokens.
    pub fn is_one_of(&self, row: usize, tokens: &[u32]) -> bool {
        self.soft[row].is_none() && tokens.contains(&self.prompt.tokens[row])
    }

    /// Cuts the prompt into runs of at most `limit` rows that split no vision block.
    pub fn chunks(&self, limit: usize) -> Result<Vec<Range<usize>>> {
        let mut chunks = Vec::new();
        let mut start = 0;
        while start < self.len() {
            let end = self.chunk_end(start, limit);
            if end == start {
                return Err(Error::VisionBlock { rows: self.unit_end(start) - start, limit });
            }
            chunks.push(start..end);
            start = end;
        }
        Ok(chunks)
    }

    /// The end of the longest run of at most `limit` rows from `start`, itself the start of a run, that splits
    /// no vision block; `start` when the first block alone is longer.
    pub fn chunk_end(&self, start: usize, limit: usize) -> usize {
        let mut end = self.len().min(start.saturating_add(limit));
        while end > start && self.unit_end(end - 1) > end {
            end -= 1;
        }
        end
    }

    /// Rows of the longest vision block that must not be split, or 1.
    pub fn longest_unit(&self) -> usize {
        let mut longest = 1;
        let mut start = 0;
        while start < self.len() {
            longest = longest.max(self.unit_end(start) - start);
            start = self.unit_end(start);
        }
        longest
    }

    /// One past the last row that must run in one batch with `row`.
    pub fn unit_end(&self, row: usize) -> usize {
        if self.whole_blocks.contains(&true) { self.block_end[row] } else { row + 1 }
    }
}

impl<'a> From<&'a Prompt> for Cow<'a, Prompt> {
    fn from(prompt: &'a Prompt) -> Cow<'a, Prompt> {
        Cow::Borrowed(prompt)
    }
}

impl From<Prompt> for Cow<'_, Prompt> {
    fn from(prompt: Prompt) -> Self {
        Cow::Owned(prompt)
    }
}

/// Appends the columns of one text token to a batch.
pub(crate) fn push_token(batch: &mut Batch, config: &Config, token: u32, position: usize) {
    let id = config.lookup_id(token) as i32;
    batch.tokens.push(id);
    batch.per_layer_tokens.push(id);
    batch.positions.push(position as i32);
    batch.visible_to.iter_mut().for_each(|v| v.push(position as i32 + 1));
}

/// A token that the tables have a row for.
pub(crate) fn check_token(config: &Config, token: u32) -> Result<()> {
    let vocab = config.per_layer.map_or(config.vocab, |p| p.vocab.min(config.vocab));
    match (token as usize) < vocab {
        true => Ok(()),
        false => Err(Error::Token { token, vocab }),
    }
}
