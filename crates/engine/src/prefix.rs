//! What is kept of earlier requests, so that later ones with the same beginning need not run it again.
//!
//! Full-attention layers need every earlier key; sliding layers need those of the last window, and these exist only
//! while they are fresh. So a later request can go on at a position only if the full pages before it **and** the
//! sliding pages of the window before it were kept. The tree (`tree`) holds full pages by block of 32 rows under a
//! key that names everything before (`chain`), and **snapshots**: at the end of some blocks, the sliding pages of
//! the window. Rows between the deepest snapshot and the place where two requests part are run again.
//!
//! Snapshots are taken where later requests are likely to part or go on: at the end of a prompt and of an answer,
//! where the last turns begin, where an earlier request has parted from another, and every so often in between,
//! so that whatever is edited, at most one such distance is run beside what is new. They cost the window's
//! bytes, shared where windows overlap, and live under a budget; the least recently used go first.
//!
//! Invariants:
//! - A page that is kept is complete and is never written again; whoever goes on from it writes other pages.
//! - Requests that go on from kept pages give the bits of a cold run, provided the device's rows do not depend on
//!   how they are batched.
//! - Kept pages that no request reads are given up before any request loses its own.

mod chain;
mod store;
mod tree;

use lapidary_ops::{Group, KvPlan, PAGE_TOKENS};

use crate::error::{Error, Result};

pub(crate) use chain::{BlockKey, Chain, Content, digest};
pub(crate) use store::{LoadedPages, Store};
pub use store::{PrefixDir, StoreStats};
pub use tree::PrefixStats;
pub(crate) use tree::{Found, PrefixTree};

/// What may be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixOptions {
    /// Whether anything is.
    pub enabled: bool,
    /// Bytes of sliding pages that snapshots may hold; `None` for the larger of 256 MiB and four windows. The
    /// engine's pools are larger by as much.
    pub snapshot_bytes: Option<usize>,
    /// Positions from one of the snapshots inside a long prompt to the next; `None` for a window and a batch.
    pub spacing: Option<usize>,
    /// Tokens that begin a turn: the last few of them in a prompt are where a later request may part.
    pub turn_tokens: Vec<u32>,
    /// Where pages are stored too, so that they outlive the process.
    pub dir: Option<PrefixDir>,
}

impl Default for PrefixOptions {
    fn default() -> PrefixOptions {
        PrefixOptions {
            enabled: true,
            snapshot_bytes: None,
            spacing: None,
            turn_tokens: Vec::new(),
            dir: None,
        }
    }
}

/// Turns from the end of a prompt that get a snapshot where they begin.
const TURNS: usize = 3;
/// What snapshots may hold unless told otherwise.
const DEFAULT_BYTES: usize = 256 << 20;
const DEFAULT_WINDOWS: usize = 4;

impl PrefixOptions {
    /// Nothing is kept.
    pub fn off() -> PrefixOptions {
        PrefixOptions { enabled: false, ..PrefixOptions::default() }
    }

    /// Most sliding pages that snapshots may hold at a time.
    ///
    /// # Errors
    /// `SnapshotBudget` for bytes that hold not even one window.
    pub fn snapshot_pages(&self, plan: &KvPlan) -> Result<usize> {
        let group = &plan.groups[Group::Sliding.index()];
        let page: usize = (0..group.layers.len()).map(|l| group.page_bytes(l)).sum();
        let Some(window) = group.window.filter(|_| self.enabled && page > 0) else { return Ok(0) };
        let least = window_blocks(window);
        match self.snapshot_bytes {
            Some(bytes) if bytes / page < least => {
                Err(Error::SnapshotBudget { bytes, needed: least.saturating_mul(page) })
            }
            Some(bytes) => Ok(bytes / page),
            None => Ok((DEFAULT_BYTES / page).max(DEFAULT_WINDOWS * least)),
        }
    }

    /// Positions of a running sequence that must be kept behind its window, so that at any time the last whole
    /// block has a window of its own.
    pub(crate) fn rollback(&self, asked: usize) -> usize {
        if self.enabled { asked.max(PAGE_TOKENS - 1) } else { asked }
    }

    /// Where a prompt should get snapshots: numbers of blocks, ascending. `turn` says whether a row is one of
    /// [`PrefixOptions::turn_tokens`].
    pub(crate) fn places(&self, rows: usize, every: usize, turn: impl Fn(usize) -> bool) -> Vec<usize> {
        // Rounded down, so that no place is further than that behind the snapshot before it.
        let every = (self.spacing.unwrap_or(every) / PAGE_TOKENS).max(1);
        let turns = (0..rows).rev().filter(|row| turn(*row)).take(TURNS).map(|row| row / PAGE_TOKENS);
        // At least one row must run to have logits.
        let end = rows.saturating_sub(1) / PAGE_TOKENS;
        let mut places: Vec<usize> = turns.chain([end]).chain((every..end).step_by(every)).collect();
        places.sort_unstable();
        places.dedup();
        places.retain(|place| *place > 0);
        places
    }
}

/// Blocks that hold the window before a position at the end of a block.
pub(crate) fn window_blocks(window: usize) -> usize {
    // A row at the border sees `window - 1` keys before it.
    (window - 1).div_ceil(PAGE_TOKENS)
}
