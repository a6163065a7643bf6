//! Tokens and soft tokens of one sequence, checked before anything runs.

use std::ops::Range;

use lapidary_model::{Config, VisionBlocks};

use crate::error::{Error, Result};

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

/// A prompt that was checked against a model, row by row.
#[derive(Debug)]
pub(crate) struct Checked<'a> {
    /// Id to look up in both tables.
    pub lookup: Vec<i32>,
    /// The row's own embedding, when soft.
    pub soft: Vec<Option<&'a [f32]>>,
    /// One past the last row of the row's vision block, or past the row itself.
    pub block_end: Vec<usize>,
    /// Which groups see a vision block whole.
    pub whole_blocks: [bool; 2],
}

impl<'a> Checked<'a> {
    pub fn new(config: &Config, prompt: &'a Prompt) -> Result<Checked<'a>> {
        let len = prompt.tokens.len();
        if len == 0 {
            return Err(Error::EmptyPrompt);
        }
        let mut soft: Vec<Option<&[f32]>> = vec![None; len];
        let mut vision = vec![false; len];
        for span in &prompt.soft {
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
                if soft[row].replace(values).is_some() {
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
        Ok(Checked { lookup, soft, block_end, whole_blocks })
    }

    /// Cuts the prompt into runs of at most `limit` rows that split no vision block.
    pub fn chunks(&self, limit: usize) -> Result<Vec<Range<usize>>> {
        let len = self.lookup.len();
        let mut chunks = Vec::new();
        let mut start = 0;
        while start < len {
            let mut end = start;
            while end < len && self.unit_end(end) - start <= limit {
                end = self.unit_end(end);
            }
            if end == start {
                return Err(Error::VisionBlock { rows: self.unit_end(start) - start, limit });
            }
            chunks.push(start..end);
            start = end;
        }
        Ok(chunks)
    }

    fn unit_end(&self, row: usize) -> usize {
        if self.whole_blocks.contains(&true) { self.block_end[row] } else { row + 1 }
    }
}

/// A token that the tables have a row for.
pub(crate) fn check_token(config: &Config, token: u32) -> Result<()> {
    let vocab = config.per_layer.map_or(config.vocab, |p| p.vocab.min(config.vocab));
    match (token as usize) < vocab {
        true => Ok(()),
        false => Err(Error::Token { token, vocab }),
    }
}
