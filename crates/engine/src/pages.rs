//! Pages of both groups for many sequences, on demand.
//!
//! A sequence owns a full-group page for every 32 positions it has come to, and sliding-group pages only for
//! what a later row can still see. A page may have several holders, so that a cache of prefixes can keep one
//! that a sequence has left, and several sequences can read it.
//!
//! Invariants, which [`PagePool::check`] proves:
//! - Page 0 belongs to nobody, since rows that only pad a batch write there.
//! - A page is free or held; its count says by how many sequences and pins, a cache's among them.
//! - A page that only a cache holds is **idle**: it counts as available, and its cache gives it up when asked.
//! - A page that a sequence may still write is held by that sequence alone: a full page's keys never change,
//!   and going back into one that others hold is refused.
//!
//! Deliberately absent: which sequence gives way when pages run out (the scheduler's business) and what the
//! pages hold.

use std::collections::VecDeque;

use lapidary_ops::{Batch, GROUPS, Group, KvPlan, PAGE_TOKENS, PageTable};

use crate::error::{Error, Result};

/// Who holds which page of the pools.
#[derive(Debug)]
pub struct PagePool {
    groups: [GroupPool; GROUPS],
    rollback: usize,
}

#[derive(Debug)]
struct GroupPool {
    /// By page: sequences and pins that hold it.
    holders: Vec<u32>,
    /// Pages that nobody holds; the last is taken first.
    free: Vec<u32>,
    /// By page: whether a cache is one of the holders.
    kept: Vec<bool>,
    /// Pages that only a cache holds.
    idle: usize,
    /// Positions that a row sees; `None` for all.
    window: Option<usize>,
    /// A group without layers needs no pages.
    has_layers: bool,
}

/// The pages of one sequence. Goes back through [`PagePool::free`]; one that is dropped leaks its pages.
#[derive(Debug, Default)]
pub struct SequencePages {
    tables: [Table; GROUPS],
}

/// Pages of consecutive blocks.
#[derive(Debug, Default)]
struct Table {
    first_block: usize,
    pages: VecDeque<u32>,
}

impl Table {
    fn end(&self) -> usize {
        self.first_block + self.pages.len()
    }
}

impl SequencePages {
    /// Pages held in `group`.
    pub fn held(&self, group: Group) -> usize {
        self.tables[group.index()].pages.len()
    }

    /// The page that holds block `block` (positions `32 * block ..`), when the sequence has it.
    pub fn page(&self, group: Group, block: usize) -> Option<u32> {
        let table = &self.tables[group.index()];
        table.pages.get(block.checked_sub(table.first_block)?).copied()
    }
}

impl PagePool {
    /// All pages of the plan's pools, free. The last `rollback` positions of a sequence can be taken back.
    pub fn new(plan: &KvPlan, rollback: usize) -> PagePool {
        let groups = [0, 1].map(|g| {
            let group = &plan.groups[g];
            GroupPool {
                holders: vec![0; group.pages],
                free: (1..group.pages as u32).rev().collect(),
                kept: vec![false; group.pages],
                idle: 0,
                window: group.window,
                has_layers: !group.layers.is_empty(),
            }
        });
        PagePool { groups, rollback }
    }

    /// Pages of a group that sequences can have at all.
    pub fn total(&self, group: Group) -> usize {
        self.groups[group.index()].holders.len().saturating_sub(1)
    }

    /// Pages of a group that sequences can have: those that nobody holds, and those that only a cache does.
    pub fn available(&self, group: Group) -> usize {
        let pool = &self.groups[group.index()];
        pool.free.len() + pool.idle
    }

    /// Pages of a group that nobody holds.
    pub fn free_pages(&self, group: Group) -> usize {
        self.groups[group.index()].free.len()
    }

    /// Pages of a group that only a cache holds.
    pub fn idle(&self, group: Group) -> usize {
        self.groups[group.index()].idle
    }

    /// How many sequences and pins hold a page, a cache's among them.
    pub fn holders(&self, group: Group, page: u32) -> u32 {
        self.groups[group.index()].holders.get(page as usize).copied().unwrap_or(0)
    }

    /// Positions that a row of a group sees; `None` for all, or for a group without layers.
    pub fn window(&self, group: Group) -> Option<usize> {
        let pool = &self.groups[group.index()];
        pool.window.filter(|_| pool.has_layers)
    }

    /// Whether a group has layers at all.
    pub fn has_layers(&self, group: Group) -> bool {
        self.groups[group.index()].has_layers
    }

    /// Most pages, by group, that a sequence of `positions` positions holds at any time when it is fed at most
    /// `rows` rows at once.
    pub fn need(&self, positions: usize, rows: usize) -> [usize; GROUPS] {
        [0, 1].map(|g| {
            let group = &self.groups[g];
            let all = positions.div_ceil(PAGE_TOKENS);
            match group.window {
                _ if !group.has_layers => 0,
                None => all,
                // Neither end need fall on a page border, hence one more.
                Some(w) => {
                    let kept = w.saturating_add(self.rollback).saturating_add(rows);
                    all.min(kept.div_ceil(PAGE_TOKENS) + 1)
                }
            }
        })
    }

    /// Gives the sequence pages for all positions below `end`, or nothing at all.
    ///
    /// # Errors
    /// `OutOfPages` with the first group that has too few.
    pub fn grow(&mut self, sequence: &mut SequencePages, end: usize) -> Result<()> {
        let missing = self.missing(sequence, end);
        for group in Group::ALL {
            let (needed, free) = (missing[group.index()], self.free_pages(group));
            if needed > free {
                return Err(Error::OutOfPages { group, needed, free });
            }
        }
        self.add_pages(sequence, missing);
        Ok(())
    }

    /// Pages by group that [`PagePool::grow`] would take: as many must be free, idle ones not counted.
    pub fn missing(&self, sequence: &SequencePages, end: usize) -> [usize; GROUPS] {
        let blocks = end.div_ceil(PAGE_TOKENS);
        [0, 1].map(|g| match self.groups[g].has_layers {
            true => blocks.saturating_sub(sequence.tables[g].end()),
            false => 0,
        })
    }

    /// One past the last position that [`PagePool::grow`] could reach for this sequence once idle pages are free.
    pub fn reach(&self, sequence: &SequencePages) -> usize {
        let groups = self.groups.iter().zip(&sequence.tables).filter(|(g, _)| g.has_layers);
        groups.map(|(g, t)| (t.end() + g.free.len() + g.idle) * PAGE_TOKENS).min().unwrap_or(usize::MAX)
    }

    /// Releases pages that no row can see any more once `cursor` is the next position and at most `rollback`
    /// positions are taken back.
    pub fn release_behind(&mut self, sequence: &mut SequencePages, cursor: usize) {
        for g in 0..GROUPS {
            let first = self.first_kept(g, cursor);
            while sequence.tables[g].first_block < first {
                let Some(page) = sequence.tables[g].pages.pop_front() else { break };
                sequence.tables[g].first_block += 1;
                self.drop_holder(g, page);
            }
        }
    }

    fn first_kept(&self, g: usize, cursor: usize) -> usize {
        let window = self.groups[g].window.unwrap_or(usize::MAX);
        (cursor + 1).saturating_sub(window.saturating_add(self.rollback)) / PAGE_TOKENS
    }

    /// Takes positions from `end` on back and releases the pages that hold nothing else.
    ///
    /// # Errors
    /// `SharedPage` when the block that is cut has other holders, so that it must not be written again;
    /// `LeftWindow` when what a row at `end` sees is gone. Nothing has changed then.
    pub fn truncate(&mut self, sequence: &mut SequencePages, end: usize) -> Result<()> {
        for group in Group::ALL {
            let g = group.index();
            let held = sequence.tables[g].first_block * PAGE_TOKENS;
            let window = self.groups[g].window.unwrap_or(usize::MAX);
            if (end + 1).saturating_sub(window) < held {
                return Err(Error::LeftWindow { position: end, earliest: held + window - 1 });
            }
            let cut = sequence.page(group, end / PAGE_TOKENS).filter(|_| !end.is_multiple_of(PAGE_TOKENS));
            if cut.is_some_and(|page| self.groups[g].holders[page as usize] > 1) {
                return Err(Error::SharedPage { position: end });
            }
        }
        let blocks = end.div_ceil(PAGE_TOKENS);
        for g in 0..GROUPS {
            while sequence.tables[g].end() > blocks {
                let Some(page) = sequence.tables[g].pages.pop_back() else { break };
                self.drop_holder(g, page);
            }
        }
        Ok(())
    }

    /// Releases everything that a sequence holds.
    pub fn free(&mut self, sequence: SequencePages) {
        for (g, table) in sequence.tables.into_iter().enumerate() {
            table.pages.into_iter().for_each(|page| self.drop_holder(g, page));
        }
    }

    /// Adds a holder to a page that has one, so that it outlives the sequence.
    ///
    /// # Errors
    /// `FreePage`.
    pub fn pin(&mut self, group: Group, page: u32) -> Result<()> {
        self.held(group, page)?;
        self.add_holder(group.index(), page);
        Ok(())
    }

    /// Adds a cache as holder to a page that is held and that no cache holds.
    pub(crate) fn keep(&mut self, group: Group, page: u32) {
        let pool = &mut self.groups[group.index()];
        assert!(
            pool.holders[page as usize] > 0 && !pool.kept[page as usize],
            "page {page} is held, by no cache"
        );
        pool.holders[page as usize] += 1;
        pool.kept[page as usize] = true;
    }

    /// The cache gives a page up.
    pub(crate) fn unkeep(&mut self, group: Group, page: u32) {
        let pool = &mut self.groups[group.index()];
        assert!(pool.kept[page as usize], "a cache holds page {page}");
        pool.kept[page as usize] = false;
        pool.idle -= usize::from(pool.holders[page as usize] == 1);
        self.drop_holder(group.index(), page);
    }

    /// Takes a pin back.
    ///
    /// # Errors
    /// `FreePage`.
    pub fn unpin(&mut self, group: Group, page: u32) -> Result<()> {
        self.held(group, page)?;
        self.drop_holder(group.index(), page);
        Ok(())
    }

    fn held(&self, group: Group, page: u32) -> Result<()> {
        match self.groups[group.index()].holders.get(page as usize) {
            Some(1..) => Ok(()),
            _ => Err(Error::FreePage { group, page }),
        }
    }

    /// A sequence that starts with whole blocks that others computed: by group the first block and the pages.
    /// Its cursor must be at the end of the full group's last block, so that it writes none of them.
    ///
    /// # Errors
    /// `FreePage`; nothing has changed then. `Length` when the two groups do not end at the same block.
    pub fn adopt(&mut self, blocks: [(usize, &[u32]); GROUPS]) -> Result<SequencePages> {
        let ends = [0, 1].map(|g| blocks[g].0 + blocks[g].1.len());
        if self.groups.iter().all(|g| g.has_layers) && ends[0] != ends[1] {
            return Err(Error::Length { what: "sliding blocks", expected: ends[1], found: ends[0] });
        }
        for group in Group::ALL {
            blocks[group.index()].1.iter().try_for_each(|&page| self.held(group, page))?;
        }
        let mut sequence = SequencePages::default();
        for (g, (first_block, pages)) in blocks.into_iter().enumerate() {
            pages.iter().for_each(|&page| self.add_holder(g, page));
            sequence.tables[g] = Table { first_block, pages: pages.iter().copied().collect() };
        }
        Ok(sequence)
    }

    /// Appends the page tables that `rows` rows from `cursor` need; pages for them are there.
    pub fn push_tables(
        &self,
        sequence: &SequencePages,
        batch: &mut Batch,
        cursor: usize,
        rows: usize,
    ) -> [PageTable; GROUPS] {
        let last = (cursor + rows - 1) / PAGE_TOKENS;
        [0, 1].map(|g| {
            if !self.groups[g].has_layers {
                return PageTable::default();
            }
            let window = self.groups[g].window.unwrap_or(usize::MAX);
            let first_block = (cursor + 1).saturating_sub(window) / PAGE_TOKENS;
            let table = &sequence.tables[g];
            let start = batch.pages[g].len();
            let skipped = first_block - table.first_block;
            let pages = table.pages.iter().skip(skipped).take(last + 1 - first_block);
            batch.pages[g].extend(pages.map(|&page| page as i32));
            PageTable { start, count: batch.pages[g].len() - start, first_block }
        })
    }

    /// A sequence that begins with these full pages, which others hold, and has no sliding ones yet.
    pub(crate) fn hold(&mut self, full: &[u32]) -> SequencePages {
        full.iter().for_each(|&page| self.add_holder(Group::Full.index(), page));
        let mut sequence = SequencePages::default();
        sequence.tables[Group::Full.index()].pages = full.iter().copied().collect();
        sequence
    }

    /// Gives a sequence that [`PagePool::hold`] made so many more pages by group, the sliding ones from block
    /// `first_sliding` on, or nothing at all.
    ///
    /// # Errors
    /// `OutOfPages`.
    pub(crate) fn extend(
        &mut self,
        sequence: &mut SequencePages,
        first_sliding: usize,
        more: [usize; GROUPS],
    ) -> Result<()> {
        for group in Group::ALL {
            let (needed, free) = (more[group.index()], self.free_pages(group));
            if needed > free {
                return Err(Error::OutOfPages { group, needed, free });
            }
        }
        sequence.tables[Group::Sliding.index()].first_block = first_sliding;
        self.add_pages(sequence, more);
        Ok(())
    }

    fn add_pages(&mut self, sequence: &mut SequencePages, more: [usize; GROUPS]) {
        for (g, more) in more.into_iter().enumerate() {
            for _ in 0..more {
                let page = self.groups[g].free.pop().expect("as many are free");
                self.groups[g].holders[page as usize] = 1;
                sequence.tables[g].pages.push_back(page);
            }
        }
    }

    /// Lets a sequence hold `page`, which is held and has the same contents, in place of its own page for a block.
    pub(crate) fn swap(&mut self, sequence: &mut SequencePages, group: Group, block: usize, page: u32) {
        let table = &mut sequence.tables[group.index()];
        let own = std::mem::replace(&mut table.pages[block - table.first_block], page);
        self.add_holder(group.index(), page);
        self.drop_holder(group.index(), own);
    }

    /// Pages of a group that would become available if this sequence were freed.
    pub fn own(&self, sequence: &SequencePages, group: Group) -> usize {
        let pool = &self.groups[group.index()];
        let own = |page: &&u32| {
            let (count, kept) = (pool.holders[**page as usize], pool.kept[**page as usize]);
            count == 1 + u32::from(kept)
        };
        sequence.tables[group.index()].pages.iter().filter(own).count()
    }

    /// Proves the invariants, given every sequence and every pin there is.
    ///
    /// # Errors
    /// What is wrong, in words; that is a bug here or a sequence that was dropped.
    pub fn check<'a>(
        &self,
        sequences: impl IntoIterator<Item = &'a SequencePages>,
        pins: &[(Group, u32)],
    ) -> Result<(), String> {
        let mut counts = [0, 1].map(|g| vec![0u32; self.groups[g].holders.len()]);
        for sequence in sequences {
            for (counts, table) in counts.iter_mut().zip(&sequence.tables) {
                table.pages.iter().for_each(|&page| counts[page as usize] += 1);
            }
        }
        pins.iter().for_each(|&(group, page)| counts[group.index()][page as usize] += 1);
        for group in Group::ALL {
            let (pool, mut counts) = (&self.groups[group.index()], counts[group.index()].clone());
            if counts != pool.holders {
                let page = counts.iter().zip(&pool.holders).position(|(a, b)| a != b).unwrap_or(0);
                let (found, stored) = (counts[page], pool.holders[page]);
                return Err(format!("{group:?} page {page} has {found} holders, {stored} are noted"));
            }
            if counts.first().is_some_and(|&c| c != 0) {
                return Err(format!("somebody holds page 0 of the {group:?} group"));
            }
            for &page in &pool.free {
                if page == 0 || std::mem::replace(&mut counts[page as usize], 1) != 0 {
                    return Err(format!("{group:?} page {page} is free twice, or free and held"));
                }
            }
            if let Some(page) = counts.iter().skip(1).position(|&c| c == 0) {
                return Err(format!("{group:?} page {} is lost", page + 1));
            }
            let idle =
                pool.kept.iter().zip(&pool.holders).filter(|(kept, count)| **kept && **count == 1).count();
            if idle != pool.idle {
                return Err(format!("{idle} {group:?} pages are idle, {} are noted", pool.idle));
            }
        }
        Ok(())
    }

    fn add_holder(&mut self, g: usize, page: u32) {
        let pool = &mut self.groups[g];
        pool.idle -= usize::from(pool.kept[page as usize] && pool.holders[page as usize] == 1);
        pool.holders[page as usize] += 1;
    }

    fn drop_holder(&mut self, g: usize, page: u32) {
        let pool = &mut self.groups[g];
        pool.holders[page as usize] -= 1;
        match pool.holders[page as usize] {
            0 => pool.free.push(page),
            1 if pool.kept[page as usize] => pool.idle += 1,
            _ => {}
        }
    }
}
