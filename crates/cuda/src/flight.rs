//! Passes that are under way, and the tokens that they send home.
//!
//! At most two: one that the device works on, and one behind it whose rows may follow it
//! ([`lapidary_ops::Batch::follows`]). They take turns with two places in pinned memory, and an event says when each is
//! done, so that the host can read one pass's tokens while the next runs.

use std::collections::VecDeque;
use std::sync::Arc;

use lapidary_ops::{BatchShape, Error, Result};

use crate::driver::{Context, DevPtr, Event, Pinned, Stream};
use crate::graphs::Left;
use crate::kernels::producers::Told;

/// A run that was queued and not yet collected.
#[derive(Debug)]
pub(crate) struct Pending {
    /// What the pass leaves besides values; where it was recorded, its marks are the recording's.
    pub left: Left,
    /// The shape, where the pass is a repeated recording.
    pub repeated: Option<BatchShape>,
}

/// Most passes under way.
const MOST: usize = 2;

/// The passes.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    /// Each with its turn.
    passes: VecDeque<(usize, Pending)>,
    /// By turn: reached when the pass is done.
    ends: [Option<Event>; MOST],
    turn: usize,
    told: Option<Pinned>,
    told_rows: usize,
    /// What the last pass that was queued chose, and the ids that its tables have rows for.
    last: (usize, i32),
    /// Counts the times that the pinned memory has moved; what was recorded before the last of them is stale.
    pub moves: usize,
}

impl Flight {
    /// The turn of the next pass.
    pub fn turn(&self) -> usize {
        self.turn
    }

    /// Tokens that the last pass chose, which rows of the next may take, and a bound of the ids that they may be.
    pub fn chosen(&self) -> (usize, i32) {
        self.last
    }

    /// Whether another pass may be queued behind those under way.
    pub fn has_room(&self) -> bool {
        self.passes.len() < MOST
    }

    /// Forgets passes that nobody collected. They are done.
    pub fn clear(&mut self) {
        self.passes.clear();
    }

    /// Where a pass of up to `rows` head rows leaves its tokens for the host; `turn` is where the device finds whose turn
    /// it is. Waits for queued work if there was less room.
    pub fn told(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        rows: usize,
        turn: DevPtr,
    ) -> Result<Told> {
        if self.told.is_none() || self.told_rows < rows {
            stream.wait()?;
            // The host may still have to read what came in before.
            if !self.passes.is_empty() {
                return Err(Error::Device("more rows in a pass behind another than in any before".into()));
            }
            self.told = Some(Pinned::new(context, MOST * rows * 4)?);
            self.told_rows = rows;
            self.moves += 1;
        }
        let at = self.told.as_ref().expect("made above").device();
        Ok(Told { at, rows: self.told_rows, turn })
    }

    /// A pass was queued; `tokens` is where it leaves its tokens on the device, in case it tells nobody else.
    pub fn begun(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        pending: Pending,
        tokens: DevPtr,
    ) -> Result<()> {
        let (turn, count) = (self.turn, pending.left.tokens);
        if count > 0 && !pending.left.told {
            self.told(context, stream, count.next_power_of_two().max(1024), DevPtr::NULL)?;
            let first = turn * self.told_rows * 4;
            let memory = self.told.as_mut().expect("made above");
            // SAFETY: the workspace has room for the tokens of this pass, and nobody reads this turn's part of the pinned
            // memory until the event below is reached.
            unsafe { stream.download(&mut memory.bytes_mut()[first..first + count * 4], tokens)? };
        }
        if self.ends[turn].is_none() {
            self.ends[turn] = Some(Event::new(context)?);
        }
        self.ends[turn].as_ref().expect("made above").record(stream)?;
        let below = pending.left.below.into_iter().flatten().min().unwrap_or(0);
        self.last = (count, below);
        self.passes.push_back((turn, pending));
        self.turn = (turn + 1) % MOST;
        Ok(())
    }

    /// The next pass failed, or nothing is known of the last: nobody can follow it.
    pub fn lost(&mut self) {
        self.last = (0, 0);
    }

    /// Waits for the oldest pass: what it left, and its tokens.
    pub fn land(&mut self) -> Result<(Pending, Vec<i32>)> {
        let oldest = self.passes.pop_front();
        let (turn, pending) =
            oldest.ok_or_else(|| Error::Device("there is no finished pass to collect".into()))?;
        if let Some(end) = &self.ends[turn] {
            end.wait()?;
        }
        let all = self.told.as_ref().map_or(&[][..], Pinned::bytes).as_chunks::<4>().0;
        let own = all.iter().skip(turn * self.told_rows).take(pending.left.tokens);
        let tokens = own.map(|&b| i32::from_le_bytes(b)).collect();
        Ok((pending, tokens))
    }
}
