//! What the scheduler keeps of sequences, and how others go on from it.

use std::ops::Range;

use lapidary_ops::{GROUPS, Group, PAGE_TOKENS};

use super::sequence::{self, Rank, Sequence};
use super::{Prepared, Scheduler};
use crate::pages::{PagePool, SequencePages};
use crate::prefix::{BlockKey, Found, PrefixTree, Store};

impl Scheduler {
    /// Notes where a sequence should leave snapshots.
    pub(super) fn want_snapshots(&self, sequence: &mut Sequence) {
        if self.prefix.is_none() {
            return;
        }
        let (prompt, options) = (sequence.prompt(), &self.prefix_options);
        let every = self.config.window.saturating_add(self.options.rows);
        let places = options.places(prompt.len(), every, |row| prompt.is_one_of(row, &options.turn_tokens));
        let mut places: Vec<usize> = places.into_iter().map(|place| sequence.parting(place)).collect();
        places.dedup();
        places.retain(|place| *place > 0);
        sequence.places = places.into();
    }

    /// What is kept of a sequence's beginning; rows whose logits are wanted must run.
    pub(super) fn find(&self, sequence: &Sequence) -> Found {
        match (&self.prefix, &sequence.chain) {
            (Some(tree), Some(chain)) => tree.find(chain.keys(), sequence.reusable()),
            _ => Found::default(),
        }
    }

    /// Pages by group that a sequence would share with requests that run.
    pub(super) fn live(&self, sequence: &Sequence, blocks: usize) -> [usize; GROUPS] {
        match (&self.prefix, &sequence.chain) {
            (Some(tree), Some(chain)) => tree.live(&self.pool, chain.keys(), blocks),
            _ => [0; GROUPS],
        }
    }

    /// Whether a prompt that is being fed is going to leave a snapshot from which this one, behind it in rank, can
    /// go on further than from what there is.
    pub(super) fn comes_behind(&self, rank: Rank, sequence: &Sequence) -> bool {
        let Some(chain) = &sequence.chain else { return false };
        let most = sequence.reusable();
        let mut usable = None;
        self.running.range(..rank).any(|(_, other)| {
            let Some(ahead) = other.chain.as_ref().filter(|_| !other.places.is_empty()) else { return false };
            let common = chain.common(ahead).min(most);
            let place = other.places.iter().rev().find(|place| **place <= common);
            place.is_some_and(|place| *place > *usable.get_or_insert_with(|| self.find(sequence).usable))
        })
    }

    /// Lets a sequence that is let in go on from what was found.
    pub(super) fn go_on(&mut self, sequence: &mut Sequence, found: Found) {
        let (Some(tree), Some(chain)) = (&mut self.prefix, &sequence.chain) else { return };
        tree.stats.queries += 1;
        if found.usable > 0 {
            let cursor = found.usable * PAGE_TOKENS;
            let pages = tree.adopt(&mut self.pool, chain.keys(), found.usable);
            sequence.go_on(pages, cursor);
            tree.stats.hits += 1;
            tree.stats.hit_rows += cursor as u64;
        }
        sequence.places.retain(|place| *place > found.usable);
        // Where it parts from an earlier request, others are likely to part too.
        let parts = sequence.parting(found.known.min((sequence.known() - 1) / PAGE_TOKENS));
        if parts > found.usable {
            let at = sequence.places.partition_point(|place| *place < parts);
            if sequence.places.get(at) != Some(&parts) {
                sequence.places.insert(at, parts);
            }
        }
    }

    /// Keeps what a sequence that stops here has come to.
    pub(super) fn keep_end(&mut self, sequence: &mut Sequence) {
        let (Some(tree), Some(chain)) = (&mut self.prefix, &sequence.chain) else { return };
        let blocks = sequence.parting((sequence.cursor() / PAGE_TOKENS).min(chain.keys().len()));
        if tree.keep(&mut self.pool, chain.keys(), blocks, &mut sequence.pages) {
            sequence.kept.push(blocks);
        }
    }

    /// Notes what a sequence that ends leaves in the tree, where somebody stores it.
    pub(super) fn leave(&mut self, sequence: &Sequence) {
        let Some(chain) = sequence.chain.as_ref().filter(|_| self.prefix_options.dir.is_some()) else {
            return;
        };
        if let Some(most) = sequence.kept.iter().max() {
            let keys = chain.keys()[..*most].to_vec();
            self.left.push(Left { keys, snapshots: sequence.kept.clone() });
        }
    }

    /// What sequences that have ended since the last call left in the tree: the keys of a beginning, and after how
    /// many of its blocks there are snapshots.
    pub(crate) fn take_left(&mut self) -> Vec<Left> {
        std::mem::take(&mut self.left)
    }

    /// What the tree and a store together know of a prompt's beginning.
    pub(crate) fn stored(&self, prepared: &Prepared, store: &Store) -> Option<Wanted> {
        let (tree, chain) = (self.prefix.as_ref()?, prepared.chain.as_ref()?);
        let keys = chain.keys();
        let most = sequence::reusable(prepared.prompt.len(), prepared.score_from, prepared.run_from);
        let found = tree.find(keys, most);
        let first = |blocks| tree.window_from(blocks);
        let blocks = store.depth(keys, found.known, found.usable, most, first)?;
        let named = |range: Range<usize>| range.map(|b| (b, keys[b])).collect();
        let full = if tree.has_full() { named(found.known.min(blocks)..blocks) } else { Vec::new() };
        let sliding = first(blocks).map_or(Vec::new(), |first| named(first..blocks));
        Some(Wanted { blocks, pages: [sliding, full] })
    }

    /// Pages for a beginning of `blocks` blocks that comes from elsewhere; `None` when there are none to spare, or
    /// what the tree knew of it has gone. The caller fills those named in [`Import::fresh`] and hands them to
    /// [`Scheduler::keep_import`].
    pub(crate) fn import(&mut self, prepared: &Prepared, wanted: &Wanted) -> Option<Import> {
        let (tree, chain) = (self.prefix.as_mut()?, prepared.chain.as_ref()?);
        let blocks = wanted.blocks;
        let known = wanted.pages[Group::Full.index()].first().map_or(blocks, |(block, _)| *block);
        let full = tree.full_pages(&chain.keys()[..known])?;
        let mut pages = self.pool.hold(&full);
        let fresh = Group::ALL.map(|g| wanted.pages[g.index()].len());
        let enough = Group::ALL.iter().all(|&g| self.pool.available(g) >= fresh[g.index()]);
        if enough {
            Group::ALL.iter().for_each(|&g| tree.evict(&mut self.pool, g, fresh[g.index()]));
        }
        let first = tree.window_from(blocks).unwrap_or(0);
        if !enough || self.pool.extend(&mut pages, first, fresh).is_err() {
            self.pool.free(pages);
            return None;
        }
        Some(Import { pages, blocks })
    }

    /// Puts a beginning whose pages were filled into the tree, or gives the pages back when they were not.
    pub(crate) fn keep_import(&mut self, prepared: &Prepared, mut import: Import, filled: bool) {
        if let (true, Some(tree), Some(chain)) = (filled, &mut self.prefix, &prepared.chain) {
            tree.keep(&mut self.pool, chain.keys(), import.blocks, &mut import.pages);
        }
        self.pool.free(import.pages);
    }

    /// The tree's pages for a block, `None` where it has none (any more): the sliding one when a snapshot after
    /// `blocks` blocks of `keys` holds it.
    pub(crate) fn kept_page(&self, left: &Left, blocks: usize, group: Group, block: usize) -> Option<u32> {
        let tree = self.prefix.as_ref()?;
        match group {
            Group::Full => tree.full_pages(&left.keys[block..=block])?.first().copied(),
            Group::Sliding => {
                tree.sliding_page(left.keys[blocks - 1], block.checked_sub(tree.window_from(blocks)?)?)
            }
        }
    }

    /// The first block of the window before the end of block `blocks - 1`, where there are sliding layers.
    pub(crate) fn window_from(&self, blocks: usize) -> Option<usize> {
        self.prefix.as_ref()?.window_from(blocks)
    }

    /// Takes back what a sequence that failed has left: its keys and values may be what failed.
    pub(super) fn forget(&mut self, sequence: &Sequence) {
        let (Some(tree), Some(chain)) = (&mut self.prefix, &sequence.chain) else { return };
        sequence.kept.iter().for_each(|blocks| tree.forget(&mut self.pool, chain.keys()[blocks - 1]));
    }
}

/// The beginning of a sequence that has ended.
#[derive(Debug)]
pub(crate) struct Left {
    /// Names of its blocks.
    pub keys: Vec<BlockKey>,
    /// Numbers of blocks after which there are snapshots.
    pub snapshots: Vec<usize>,
}

/// Pages that a store has and the tree has not.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// Blocks of the beginning.
    pub blocks: usize,
    /// By group the blocks whose pages are wanted.
    pub pages: [Vec<(usize, BlockKey)>; GROUPS],
}

/// Pages for a beginning that comes from elsewhere.
#[derive(Debug)]
pub(crate) struct Import {
    pub pages: SequencePages,
    blocks: usize,
}

/// Takes the snapshots whose places a sequence has come to. Its pages still hold the windows of all rows of the
/// batch that just ran.
pub(super) fn keep_wanted(tree: &mut PrefixTree, pool: &mut PagePool, sequence: &mut Sequence) {
    let Some(chain) = &sequence.chain else { return };
    while let Some(&place) =
        sequence.places.front().filter(|place| **place * PAGE_TOKENS <= sequence.cursor())
    {
        sequence.places.pop_front();
        if tree.keep(pool, chain.keys(), place, &mut sequence.pages) {
            sequence.kept.push(place);
        }
    }
}
