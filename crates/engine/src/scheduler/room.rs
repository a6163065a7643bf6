//! Who holds pages: admission by rank, and pre-emption from below.

use std::ops::Bound;

use lapidary_ops::{GROUPS, Group, PAGE_TOKENS};

use super::Scheduler;
use super::sequence::{Rank, Sequence};

impl Scheduler {
    /// Lets waiting requests in, first in rank first, as long as pages for all rows that they and those before
    /// them know are there. A request that does not fit keeps those behind it out: otherwise small ones could
    /// pass it for ever.
    pub(super) fn admit(&mut self) {
        let mut from = None;
        loop {
            let after = from.map_or(Bound::Unbounded, Bound::Excluded);
            let Some((&rank, sequence)) = self.waiting.range((after, Bound::Unbounded)).next() else {
                return;
            };
            if self.comes_behind(rank, sequence) {
                // It needs next to nothing once the other is there; whoever is next may go before.
                from = Some(rank);
                continue;
            }
            let found = self.find(sequence);
            let mut need = self.need(sequence);
            for (need, live) in need.iter_mut().zip(self.live(sequence, found.usable)) {
                *need -= live;
            }
            let leaving = match self.running.is_empty() {
                true => Some(0),
                false => self.must_leave(rank, need),
            };
            let Some(leaving) = leaving else { return };
            for _ in 0..leaving {
                let lowest = *self.running.last_key_value().expect("counted among the running").0;
                self.preempt(lowest);
            }
            let mut sequence = self.waiting.remove(&rank).expect("seen above");
            // Those that left may have left snapshots, for which others were given up.
            let found = if leaving > 0 { self.find(&sequence) } else { found };
            self.go_on(&mut sequence, found);
            self.running.insert(rank, sequence);
        }
    }

    /// How many of the lowest in rank, all below `rank`, must leave so that `need` pages are there; `None` when
    /// even all of them would not do. Only higher priority ever makes anybody leave: among equals, whoever
    /// waits came later.
    fn must_leave(&self, rank: Rank, need: [usize; GROUPS]) -> Option<usize> {
        let mut free = Group::ALL.map(|g| self.pool.available(g) as i64);
        for sequence in self.running.values() {
            let promised = self.need(sequence);
            for group in Group::ALL {
                let held = sequence.pages.held(group);
                free[group.index()] -= promised[group.index()].saturating_sub(held) as i64;
            }
        }
        let mut leaving = 0;
        let mut lowest = self.running.iter().rev();
        loop {
            let room = (0..GROUPS).all(|g| need[g] as i64 <= free[g]);
            if room && self.running.len() - leaving < self.options.running {
                return Some(leaving);
            }
            let (_, sequence) = lowest.next().filter(|(r, _)| **r > rank)?;
            let promised = self.need(sequence);
            for group in Group::ALL {
                let held = sequence.pages.held(group);
                let own = self.pool.own(&sequence.pages, group);
                free[group.index()] += (promised[group.index()].saturating_sub(held) + own) as i64;
            }
            leaving += 1;
        }
    }

    /// Pages for the rows that a sequence knows, and some that it doesn't.
    fn need(&self, sequence: &Sequence) -> [usize; GROUPS] {
        let rows = (sequence.known() + PAGE_TOKENS).min(sequence.most(self.options.context));
        self.pool.need(rows, self.options.rows)
    }

    /// Gives those chosen their pages, first in rank first. Who finds none takes them from the lowest in rank;
    /// the lowest itself runs fewer rows, or waits. Returns those that run, streams first.
    pub(super) fn take_pages(&mut self, mut chosen: Vec<(Rank, usize)>) -> Vec<(Rank, usize)> {
        chosen.sort_unstable();
        let mut placed = Vec::with_capacity(chosen.len());
        for (rank, rows) in chosen {
            let rows = self.take(rank, rows);
            if rows > 0 {
                placed.push((rank, rows));
            }
        }
        placed.sort_by_key(|(rank, _)| (!self.running[rank].is_stream(), *rank));
        placed
    }

    fn take(&mut self, rank: Rank, rows: usize) -> usize {
        loop {
            // Pre-empted by somebody higher in this very step.
            let Some(sequence) = self.running.get_mut(&rank) else { return 0 };
            let cursor = sequence.cursor();
            let room = self.pool.reach(&sequence.pages).saturating_sub(cursor);
            let rows = if room < rows { sequence.fit(cursor, room) } else { rows };
            if rows > 0 {
                let missing = self.pool.missing(&sequence.pages, cursor + rows);
                if let Some(tree) = &mut self.prefix {
                    Group::ALL.iter().for_each(|&g| tree.evict(&mut self.pool, g, missing[g.index()]));
                }
                let grown = self.pool.grow(&mut sequence.pages, cursor + rows);
                grown.expect("no further than the pool reaches");
                return rows;
            }
            let lowest = *self.running.last_key_value().expect("this one runs").0;
            if lowest == rank {
                return 0;
            }
            self.preempt(lowest);
        }
    }

    fn preempt(&mut self, rank: Rank) {
        let mut sequence = self.running.remove(&rank).expect("only those that run are pre-empted");
        self.keep_end(&mut sequence);
        self.pool.free(sequence.start_over());
        self.waiting.insert(rank, sequence);
        self.stats.preemptions += 1;
    }
}
