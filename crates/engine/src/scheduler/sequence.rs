//! One request as rows: those of its prompt, then its answer's tokens.

use std::collections::VecDeque;
use std::time::Duration;

use lapidary_model::Config;
use lapidary_ops::{Batch, PAGE_TOKENS};

use super::RequestId;
use crate::generate::FinishReason;
use crate::pages::SequencePages;
use crate::prefix::{Chain, Content};
use crate::prompt::{Checked, push_token};

/// Place in the order of requests; lower goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    /// When it counts as submitted, in nanoseconds.
    since: i128,
    id: RequestId,
}

impl Rank {
    pub fn new(id: RequestId, priority: i8, now: Duration, worth: Duration) -> Rank {
        let since = now.as_nanos() as i128 - i128::from(priority) * worth.as_nanos() as i128;
        Rank { since, id }
    }
}

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct Sequence {
    pub id: RequestId,
    pub pages: SequencePages,
    /// When its last token was given.
    pub last_token_at: Duration,
    /// The last step that had rows of it.
    pub last_step: u64,
    /// Names of its blocks, where prefixes are kept.
    pub chain: Option<Chain>,
    /// Blocks after which a snapshot is wanted, ascending.
    pub places: VecDeque<usize>,
    /// Numbers of blocks after which it left a snapshot.
    pub kept: Vec<usize>,
    prompt: Checked<'static>,
    answer: Vec<u32>,
    /// Rows with keys and values.
    cursor: usize,
    /// Rows that had them before a pre-emption.
    was: usize,
    max_tokens: usize,
    stop_ids: Vec<u32>,
    /// The first token of the prompt whose probability is wanted and not known yet.
    pub score_from: Option<usize>,
    /// Rows from here on run in any case.
    pub run_from: Option<usize>,
}

impl Sequence {
    pub fn new(
        id: RequestId,
        prompt: Checked<'static>,
        chain: Option<Chain>,
        max_tokens: usize,
        stop_ids: Vec<u32>,
        now: Duration,
    ) -> Sequence {
        Sequence {
            id,
            pages: SequencePages::default(),
            last_token_at: now,
            last_step: 0,
            chain,
            places: VecDeque::new(),
            kept: Vec::new(),
            prompt,
            answer: Vec::new(),
            cursor: 0,
            was: 0,
            max_tokens,
            stop_ids,
            score_from: None,
            run_from: None,
        }
    }

    /// The next position.
    pub fn cursor(&self) -> usize {
        self.cursor
    }

    /// Rows known so far.
    pub fn known(&self) -> usize {
        self.prompt.len() + self.answer.len()
    }

    /// Rows that are known and have no keys and values; at least one.
    pub fn pending(&self) -> usize {
        self.known() - self.cursor
    }

    /// Rows that it can come to.
    pub fn most(&self, context: usize) -> usize {
        context.min(self.prompt.len().saturating_add(self.max_tokens))
    }

    /// Whether it has answered, and only waits for its next token.
    pub fn is_stream(&self) -> bool {
        !self.answer.is_empty() && self.pending() == 1
    }

    /// The answer's last token, if it is all that has no keys and values yet.
    pub fn waits_with(&self) -> Option<u32> {
        self.answer.last().copied().filter(|_| self.pending() == 1)
    }

    /// Most rows from `from` on, at most `limit`, that split no vision block.
    pub fn fit(&self, from: usize, limit: usize) -> usize {
        let text = self.known().min(from.saturating_add(limit));
        match self.prompt.chunk_end(from, limit) {
            // The prompt's rest fits, and what comes behind it can be cut anywhere.
            end if end >= self.prompt.len() => text - from,
            end => end - from,
        }
    }

    /// Whether the logits of a row say how likely the prompt's next token is, and that is wanted.
    pub fn scores(&self, row: usize) -> bool {
        let next = row + 1;
        let wanted = self.score_from.is_some_and(|from| from <= next) && next < self.prompt.len();
        wanted && self.prompt.text(next).is_some()
    }

    /// Whether tokens of an answer are wanted.
    pub fn answers(&self) -> bool {
        self.max_tokens > 0
    }

    /// How many of `rows` rows from `from` on have logits.
    pub fn heads(&self, from: usize, rows: usize) -> usize {
        let scored = match self.score_from {
            None => 0,
            Some(_) => (from..from + rows).filter(|row| self.scores(*row)).count(),
        };
        scored + usize::from(rows > 0 && from + rows == self.known() && self.answers())
    }

    /// Most rows from `from` on, at most `rows`, of which no more than `heads` have logits.
    pub fn within_heads(&self, from: usize, rows: usize, heads: usize) -> usize {
        if self.heads(from, rows) <= heads {
            return rows;
        }
        let mut left = heads;
        for row in from..from + rows {
            let wanted = self.heads(row, 1);
            if wanted > left {
                return row - from;
            }
            left -= wanted;
        }
        rows
    }

    /// Most blocks of an earlier request that it can go on from: rows whose logits are wanted must run.
    pub fn reusable(&self) -> usize {
        reusable(self.known(), self.score_from, self.run_from)
    }

    /// Rows from the cursor that must run together.
    pub fn unit(&self) -> usize {
        match self.cursor < self.prompt.len() {
            true => self.prompt.unit_end(self.cursor) - self.cursor,
            false => 1,
        }
    }

    /// Appends the columns of `rows` rows from the cursor.
    pub fn push_rows(&self, config: &Config, batch: &mut Batch, rows: usize) {
        let (end, len) = (self.cursor + rows, self.prompt.len());
        if self.cursor < len {
            self.prompt.push(batch, self.cursor..end.min(len), self.cursor);
        }
        for position in self.cursor.max(len)..end {
            push_token(batch, config, self.answer[position - len], position);
        }
    }

    /// How many of the next `rows` rows have run before.
    pub fn recomputed(&self, rows: usize) -> usize {
        self.was.saturating_sub(self.cursor).min(rows)
    }

    /// Rows before `cursor` have keys and values, and their logits were looked at.
    pub fn advance(&mut self, cursor: usize) {
        self.cursor = cursor;
        if let Some(from) = &mut self.score_from {
            *from = (*from).max(cursor + 1);
        }
    }

    /// Adds a token to the answer, unless it is one that ends it.
    pub fn answer(&mut self, token: u32, now: Duration, context: usize) -> Option<FinishReason> {
        if self.stop_ids.contains(&token) {
            return Some(FinishReason::Stop(token));
        }
        self.answer.push(token);
        if let Some(chain) = &mut self.chain {
            chain.push(Content::Text(token));
        }
        self.last_token_at = now;
        if self.answer.len() >= self.max_tokens {
            return Some(FinishReason::Length);
        }
        (self.known() > context).then_some(FinishReason::ContextFull)
    }

    /// Most blocks, at most `blocks`, whose end splits no vision block: rows before it see none behind it.
    pub fn parting(&self, blocks: usize) -> usize {
        let splits = |blocks: usize| {
            let border = blocks * PAGE_TOKENS;
            border <= self.prompt.len() && self.prompt.unit_end(border - 1) > border
        };
        (1..=blocks).rev().find(|blocks| !splits(*blocks)).unwrap_or(0)
    }

    /// The prompt.
    pub fn prompt(&self) -> &Checked<'static> {
        &self.prompt
    }

    /// Takes over pages that hold the rows before `cursor`.
    pub fn go_on(&mut self, pages: SequencePages, cursor: usize) {
        self.pages = pages;
        self.cursor = cursor;
    }

    /// Goes back to the start and hands over its pages.
    pub fn start_over(&mut self) -> SequencePages {
        self.was = self.was.max(self.cursor);
        self.cursor = 0;
        std::mem::take(&mut self.pages)
    }
}

/// Most blocks that a sequence of `known` rows, whose logits are wanted from token `score_from` on and more from row
/// `run_from` on, need not run.
pub(super) fn reusable(known: usize, score_from: Option<usize>, run_from: Option<usize>) -> usize {
    let rows = score_from.map_or(known, |from| from.min(known)).saturating_sub(1);
    run_from.map_or(rows, |from| from.min(rows)) / PAGE_TOKENS
}
