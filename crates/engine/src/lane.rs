//! One sequence's place in the KV pools: a fixed run of pages in each group, used as a ring in the sliding
//! group, and how far the sequence has come.

use std::ops::Range;

use lapidary_model::Config;
use lapidary_model::kv_plan::sequence_pages;
use lapidary_ops::{Batch, GROUPS, Group, PAGE_TOKENS, PageTable};

use crate::error::{Error, Result};

/// A sequence that owns pages `base .. base + pages` of each group.
#[derive(Clone, Debug)]
pub(crate) struct Lane {
    base: [usize; GROUPS],
    pages: [usize; GROUPS],
    window: usize,
    context: usize,
    cursor: usize,
    /// One past the highest position that a pass may have written since the last reset; pages of older blocks
    /// went to it.
    high: usize,
}

impl Lane {
    /// A lane for `context` positions whose pages start at `base`.
    pub fn new(config: &Config, base: [usize; GROUPS], context: usize, chunk: usize) -> Lane {
        let pages = Group::ALL.map(|g| sequence_pages(config, g, context, chunk));
        Lane { base, pages, window: config.window, context, cursor: 0, high: 0 }
    }

    /// First page behind this lane's, by group.
    pub fn end(&self) -> [usize; GROUPS] {
        [self.base[0] + self.pages[0], self.base[1] + self.pages[1]]
    }

    /// The next position.
    pub fn cursor(&self) -> usize {
        self.cursor
    }

    /// Positions that fit.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.cursor = 0;
        self.high = 0;
    }

    /// Checks that `rows` more rows fit.
    pub fn room(&self, rows: usize) -> Result<()> {
        match self.cursor + rows {
            end if end <= self.context => Ok(()),
            end => Err(Error::ContextFull { context: self.context, needed: end - 1 }),
        }
    }

    /// A pass is about to write `rows` rows from the cursor. The pages that they take from the oldest blocks
    /// are gone from here on, even if the pass fails.
    pub fn touch(&mut self, rows: usize) {
        self.high = self.high.max(self.cursor + rows);
    }

    /// The sequence has moved on by `rows`.
    pub fn advance(&mut self, rows: usize) {
        self.touch(rows);
        self.cursor += rows;
    }

    /// The earliest position whose keys the sliding group still holds.
    fn held_from(&self) -> usize {
        self.held_at(self.high)
    }

    /// The same once `high` positions were written.
    fn held_at(&self, high: usize) -> usize {
        let newest_block = high.saturating_sub(1) / PAGE_TOKENS;
        (newest_block + 1).saturating_sub(self.pages[Group::Sliding.index()]) * PAGE_TOKENS
    }

    /// The positions of a full sequence that have cells at the same time.
    pub fn live_when_full(&self, group: Group) -> Range<usize> {
        match group {
            Group::Sliding => self.held_at(self.context)..self.context,
            Group::Full => 0..self.context,
        }
    }

    /// Moves the cursor back.
    pub fn rewind(&mut self, position: usize) -> Result<()> {
        if position > self.cursor {
            return Err(Error::RewindForward { position, cursor: self.cursor });
        }
        // The first position sees no other, so what is held does not matter.
        if position == 0 {
            self.reset();
            return Ok(());
        }
        let held = self.held_from();
        if (position + 1).saturating_sub(self.window) < held {
            return Err(Error::LeftWindow { position, earliest: held + self.window - 1 });
        }
        self.cursor = position;
        Ok(())
    }

    /// The page and the place in it of a position that is held or yet to come.
    pub fn cell(&self, group: Group, position: usize) -> Result<(usize, usize)> {
        if position >= self.context {
            return Err(Error::ContextFull { context: self.context, needed: position });
        }
        if group == Group::Sliding && position < self.held_from() {
            return Err(Error::LeftWindow { position, earliest: self.held_from() });
        }
        Ok((self.page(group, position / PAGE_TOKENS), position % PAGE_TOKENS))
    }

    fn page(&self, group: Group, block: usize) -> usize {
        let g = group.index();
        self.base[g] + block % self.pages[g].max(1)
    }

    /// Appends the page tables that `rows` rows from the cursor need.
    pub fn tables(&self, batch: &mut Batch, rows: usize) -> [PageTable; GROUPS] {
        self.tables_at(batch, self.cursor, rows)
    }

    /// The same for rows from `position` on, which is at the cursor or behind rows that were not counted yet.
    pub fn tables_at(&self, batch: &mut Batch, position: usize, rows: usize) -> [PageTable; GROUPS] {
        Group::ALL.map(|group| {
            let last = (position + rows - 1) / PAGE_TOKENS;
            let first = match group {
                Group::Sliding => (position + 1).saturating_sub(self.window) / PAGE_TOKENS,
                Group::Full => 0,
            };
            let pages = &mut batch.pages[group.index()];
            let start = pages.len();
            pages.extend((first..=last).map(|block| self.page(group, block) as i32));
            PageTable { start, count: last - first + 1, first_block: first }
        })
    }
}
