//! What the scheduler keeps of sequences, and how others go on from it.

use lapidary_ops::{GROUPS, PAGE_TOKENS};

use super::Scheduler;
use super::sequence::{Rank, Sequence};
use crate::pages::PagePool;
use crate::prefix::{Found, PrefixTree};

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

    /// What is kept of a sequence's beginning; at least its last known row must run, to have logits.
    pub(super) fn find(&self, sequence: &Sequence) -> Found {
        match (&self.prefix, &sequence.chain) {
            (Some(tree), Some(chain)) => tree.find(chain.keys(), (sequence.known() - 1) / PAGE_TOKENS),
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
        let most = (sequence.known() - 1) / PAGE_TOKENS;
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
            sequence.kept.push(chain.keys()[blocks - 1]);
        }
    }

    /// Takes back what a sequence that failed has left: its keys and values may be what failed.
    pub(super) fn forget(&mut self, sequence: &Sequence) {
        if let Some(tree) = &mut self.prefix {
            sequence.kept.iter().for_each(|key| tree.forget(&mut self.pool, *key));
        }
    }
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
            sequence.kept.push(chain.keys()[place - 1]);
        }
    }
}
