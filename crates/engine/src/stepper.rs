//! The step API: what a library user drives directly.
//!
//! One sequence of its own and, after [`Stepper::alloc_slots`], any number of slots beside it. Every call is
//! a batch over the one pass. Arguments are checked before anything runs, so that after an error the
//! cursors, keys, values and logits are what they were and the right call then succeeds.

use std::ops::Range;

use lapidary_model::Model;
use lapidary_ops::{Batch, BatchShape, Outcome, RowSpan, TapPoint, TapSet};

use crate::error::{Error, Result};
use crate::lane::Lane;
use crate::prompt::{Checked, Prompt, check_token, push_token};
use crate::runner::Runner;

/// Which of a prompt's rows get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// None: only keys and values are wanted.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
}

/// What one batch of a longer prompt left behind.
#[derive(Debug)]
pub struct Chunk<'a> {
    /// Positions of the batch's rows.
    pub positions: Range<usize>,
    /// Positions whose logits were computed.
    pub heads: Range<usize>,
    /// Argmax of each, and what was captured.
    pub outcome: &'a Outcome,
    /// The batch as it was run; all of its rows are this prompt's.
    pub batch: &'a Batch,
}

/// Which sequence a call works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seq {
    Single,
    Slot(usize),
}

/// Drives a model step by step.
#[derive(Debug)]
pub struct Stepper {
    pub(crate) runner: Runner,
    pub(crate) single: Lane,
    pub(crate) slots: Vec<Lane>,
    pub(crate) batch: Batch,
    pub(crate) capture: TapSet,
    pub(crate) outcome: Outcome,
    /// Head rows that the logits buffer holds.
    pub(crate) logit_rows: usize,
}

impl Stepper {
    /// Takes over a runner; its pools hold one sequence of `context` positions.
    pub fn new(runner: Runner, context: usize) -> Stepper {
        let model = runner.model();
        let single = Lane::new(&model.config, [1, 1], context, model.limits.rows);
        Stepper {
            runner,
            single,
            slots: Vec::new(),
            batch: Batch::default(),
            capture: TapSet::default(),
            outcome: Outcome::default(),
            logit_rows: 0,
        }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        self.runner.model()
    }

    /// The device and its pools.
    pub fn runner(&self) -> &Runner {
        &self.runner
    }

    /// Does what the device has put off until a pass needs it, so that later passes take what they always will.
    ///
    /// # Errors
    /// `Device`.
    pub fn settle(&mut self) -> Result<()> {
        self.runner.settle()
    }

    /// Gives the device back; what the sequences held is forgotten.
    pub fn into_runner(self) -> Runner {
        self.runner
    }

    /// Next position of the single sequence.
    pub fn cursor(&self) -> usize {
        self.single.cursor()
    }

    /// Positions that the single sequence can hold.
    pub fn context(&self) -> usize {
        self.single.context()
    }

    /// Forgets the single sequence.
    pub fn reset(&mut self) {
        self.single.reset();
    }

    /// Moves the single sequence back to `position`, which becomes the next position.
    ///
    /// # Errors
    /// `LeftWindow` when sliding layers no longer hold what a row at `position` would see.
    pub fn rewind(&mut self, position: usize) -> Result<()> {
        self.single.rewind(position)
    }

    /// What later passes copy out beside the logits: [`Stepper::hidden`] and its like read it. A capture of a
    /// layer behind the last KV write makes that tail run for all rows.
    pub fn set_capture(&mut self, points: &[TapPoint]) {
        self.capture = TapSet { points: points.to_vec() };
    }

    /// Feeds one token at `position` and returns the most likely next one.
    ///
    /// # Errors
    /// `Position` when `position` is not the cursor; `Token`, `ContextFull`, `NonFiniteLogits`.
    pub fn decode_step(&mut self, token: u32, position: usize) -> Result<u32> {
        let layers = 0..self.model().layers.len();
        self.decode_step_with(token, position, layers)
    }

    /// [`Stepper::decode_step`] through a part of the model: embedding, the layers in `layers` (none at all
    /// is allowed), norm and head. It is a step: the cursor moves on. Layers that were left out have zeros
    /// for keys and values at this position.
    ///
    /// # Errors
    /// As `decode_step`, and `Layer` for a range that leaves the model.
    pub fn decode_step_with(&mut self, token: u32, position: usize, layers: Range<usize>) -> Result<u32> {
        self.at_cursor(position)?;
        let count = self.model().layers.len();
        if layers.start > layers.end || layers.end > count {
            return Err(Error::Layer { layer: layers.end.max(layers.start), layers: count });
        }
        check_token(&self.model().config, token)?;
        self.single.room(1)?;
        if layers != (0..count) {
            self.clear_position(position)?;
        }
        let prompt = Prompt::from(&[token][..]);
        self.feed_layers(Seq::Single, &prompt, Heads::Last, layers, &mut |_| Ok(()))?;
        self.last_token()
    }

    /// Feeds one token at `position` for its keys and values only: no final norm, head or argmax, and no tail
    /// of KV-sharing layers unless a capture asks for it.
    ///
    /// # Errors
    /// As [`Stepper::decode_step`].
    pub fn prefill_step(&mut self, token: u32, position: usize) -> Result<()> {
        self.at_cursor(position)?;
        self.feed(Seq::Single, &Prompt::from(&[token][..]), Heads::None, &mut |_| Ok(()))
    }

    /// Feeds a whole prompt from the cursor on and returns the most likely next token. Prompts longer than
    /// the largest batch run as several; the result does not depend on how they were cut.
    ///
    /// # Errors
    /// `EmptyPrompt`, `Token`, `ContextFull`, `NonFiniteLogits`.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<u32> {
        self.prefill_prompt(&Prompt::from(tokens))
    }

    /// [`Stepper::prefill`] with soft tokens.
    ///
    /// # Errors
    /// Also `SoftNotFinite`, `SoftRange`, `Length`, `VisionBlock`.
    pub fn prefill_prompt(&mut self, prompt: &Prompt) -> Result<u32> {
        self.feed(Seq::Single, prompt, Heads::Last, &mut |_| Ok(()))?;
        self.last_token()
    }

    /// Feeds a prompt from the cursor on and hands each batch's outcome to `sink`, with logits for `heads`.
    /// Inside `sink` nothing else of the stepper is at hand; use [`Stepper::score`] to read logits.
    ///
    /// # Errors
    /// As [`Stepper::prefill_prompt`].
    pub fn prefill_each(
        &mut self,
        prompt: &Prompt,
        heads: Heads,
        sink: &mut dyn FnMut(Chunk<'_>),
    ) -> Result<()> {
        self.feed(Seq::Single, prompt, heads, &mut |chunk| {
            sink(chunk);
            Ok(())
        })
    }

    /// Feeds a prompt from the cursor on and hands the logits of every row to `sink`, `(position, logits)` in
    /// order, and each batch's captures with the batch's first position.
    ///
    /// # Errors
    /// As [`Stepper::prefill_prompt`].
    pub fn score(
        &mut self,
        prompt: &Prompt,
        logits: &mut dyn FnMut(usize, &[f32]),
        captures: &mut dyn FnMut(usize, &Outcome),
    ) -> Result<()> {
        let checked = Checked::new(&self.model().config, prompt)?;
        let limits = self.model().limits;
        self.single.room(checked.len())?;
        let chunks = checked.chunks(limits.rows.min(limits.head_rows))?;
        self.or_restore(Seq::Single, |s| {
            let mut values = Vec::new();
            for chunk in chunks {
                let first = s.single.cursor();
                let layers = 0..s.model().layers.len();
                s.run_chunk(Seq::Single, &checked, chunk.clone(), chunk.clone(), layers)?;
                let (act, vocab) = (s.model().acts.logits, s.model().config.vocab);
                s.runner.backend().read(act, chunk.len(), &mut values)?;
                for (i, row) in values.chunks_exact(vocab).enumerate() {
                    logits(first + i, row);
                }
                captures(first, &s.outcome);
            }
            Ok(())
        })
    }

    /// Feeds a whole prompt to a slot; otherwise as [`Stepper::prefill`].
    ///
    /// # Errors
    /// As [`Stepper::prefill`], and `Slot`.
    pub fn prefill_slot(&mut self, slot: usize, tokens: &[u32]) -> Result<u32> {
        self.prefill_slot_prompt(slot, &Prompt::from(tokens))
    }

    /// [`Stepper::prefill_slot`] with soft tokens.
    ///
    /// # Errors
    /// As [`Stepper::prefill_prompt`], and `Slot`.
    pub fn prefill_slot_prompt(&mut self, slot: usize, prompt: &Prompt) -> Result<u32> {
        self.slot(slot)?;
        self.feed(Seq::Slot(slot), prompt, Heads::Last, &mut |_| Ok(()))?;
        self.last_token()
    }

    /// One token for each of several slots in one batch: `tokens[i]` at `positions[i]` of `slots[i]`; the most
    /// likely next tokens go to `out`. Equal to running each slot alone.
    ///
    /// # Errors
    /// `Length` for slices of unequal length, `Slot`, `SlotTwice`, `Position`, `Token`, `ContextFull`,
    /// `TooManyRows`; `NonFiniteLogits` for the first such row, and then no slot has moved.
    pub fn decode_batch(
        &mut self,
        tokens: &[u32],
        positions: &[usize],
        slots: &[usize],
        out: &mut [u32],
    ) -> Result<()> {
        let rows = tokens.len();
        for (what, found) in [("positions", positions.len()), ("slots", slots.len()), ("out", out.len())] {
            if found != rows {
                return Err(Error::Length { what, expected: rows, found });
            }
        }
        if rows == 0 {
            return Err(Error::EmptyPrompt);
        }
        let limits = self.model().limits;
        let limit = limits.rows.min(limits.head_rows);
        if rows > limit {
            return Err(Error::TooManyRows { rows, limit });
        }
        for (i, &slot) in slots.iter().enumerate() {
            let lane = self.slot(slot)?;
            if slots[..i].contains(&slot) {
                return Err(Error::SlotTwice { slot });
            }
            if lane.cursor() != positions[i] {
                return Err(Error::Position { expected: lane.cursor(), found: positions[i] });
            }
            lane.room(1)?;
            check_token(&self.model().config, tokens[i])?;
        }
        self.batch.clear();
        for (row, (&token, &slot)) in tokens.iter().zip(slots).enumerate() {
            let lane = &self.slots[slot];
            let b = &mut self.batch;
            push_token(b, &self.runner.model().config, token, lane.cursor());
            let tables = lane.tables(b, 1);
            b.spans.push(RowSpan { first_row: row, rows: 1, tables });
            b.heads.push(row as i32);
        }
        if slots.iter().any(|&slot| self.set_of(Seq::Slot(slot)) >= 0) {
            self.batch.steer = slots.iter().map(|&slot| self.set_of(Seq::Slot(slot))).collect();
        }
        for &slot in slots {
            self.slots[slot].touch(1);
        }
        self.run_batch(0..self.model().layers.len())?;
        for (row, &position) in positions.iter().enumerate() {
            if self.outcome.argmax.get(row).is_none_or(|&t| t < 0) {
                return Err(Error::NonFiniteLogits { position });
            }
        }
        for (row, &slot) in slots.iter().enumerate() {
            self.slots[slot].advance(1);
            out[row] = self.outcome.argmax[row] as u32;
        }
        Ok(())
    }

    /// The last single step, as a batch of one row.
    pub(crate) fn last_step(&self, head: bool) -> Chunk<'_> {
        let end = self.single.cursor();
        let heads = if head { end - 1..end } else { end..end };
        Chunk { positions: end - 1..end, heads, outcome: &self.outcome, batch: &self.batch }
    }

    fn at_cursor(&self, position: usize) -> Result<()> {
        match self.single.cursor() {
            expected if expected == position => Ok(()),
            expected => Err(Error::Position { expected, found: position }),
        }
    }

    fn last_token(&self) -> Result<u32> {
        let last = self.outcome.argmax.last().ok_or(Error::NoLogits)?;
        Ok(u32::try_from(*last).expect("a row that is not finite was refused before"))
    }

    pub(crate) fn feed(
        &mut self,
        seq: Seq,
        prompt: &Prompt,
        heads: Heads,
        sink: &mut dyn FnMut(Chunk<'_>) -> Result<()>,
    ) -> Result<()> {
        let layers = 0..self.model().layers.len();
        self.feed_layers(seq, prompt, heads, layers, sink)
    }

    fn feed_layers(
        &mut self,
        seq: Seq,
        prompt: &Prompt,
        heads: Heads,
        layers: Range<usize>,
        sink: &mut dyn FnMut(Chunk<'_>) -> Result<()>,
    ) -> Result<()> {
        let checked = Checked::new(&self.model().config, prompt)?;
        let limits = self.model().limits;
        let len = checked.len();
        self.lane(seq).room(len)?;
        let limit = match heads {
            Heads::All => limits.rows.min(limits.head_rows),
            Heads::None | Heads::Last => limits.rows,
        };
        let chunks = checked.chunks(limit)?;
        self.or_restore(seq, |s| {
            for chunk in chunks {
                let head_rows = match heads {
                    Heads::None => chunk.end..chunk.end,
                    Heads::Last if chunk.end == len => len - 1..len,
                    Heads::Last => chunk.end..chunk.end,
                    Heads::All => chunk.clone(),
                };
                let first = s.lane(seq).cursor();
                let at = |row: usize| first + row - chunk.start;
                let heads = at(head_rows.start)..at(head_rows.end);
                let positions = at(chunk.start)..at(chunk.end);
                s.run_chunk(seq, &checked, chunk.clone(), head_rows, layers.clone())?;
                sink(Chunk { positions, heads, outcome: &s.outcome, batch: &s.batch })?;
            }
            Ok(())
        })
    }

    /// Runs the batches of one prompt; when a later one fails, takes the earlier ones back. A prompt that was
    /// so long that its beginning can't be gone back to leaves an empty sequence.
    fn or_restore(&mut self, seq: Seq, run: impl FnOnce(&mut Stepper) -> Result<()>) -> Result<()> {
        let start = self.lane(seq).cursor();
        run(self).inspect_err(|_| {
            let lane = self.lane_mut(seq);
            if lane.rewind(start).is_err() {
                lane.reset();
            }
        })
    }

    /// Runs rows `chunk` of a prompt at the lane's cursor and moves it on.
    fn run_chunk(
        &mut self,
        seq: Seq,
        checked: &Checked<'_>,
        chunk: Range<usize>,
        heads: Range<usize>,
        layers: Range<usize>,
    ) -> Result<()> {
        let first = self.lane(seq).cursor();
        let rows = chunk.len();
        let mut b = std::mem::take(&mut self.batch);
        b.clear();
        checked.push(&mut b, chunk.clone(), first);
        let tables = self.lane(seq).tables(&mut b, rows);
        b.spans.push(RowSpan { first_row: 0, rows, tables });
        b.heads.extend(heads.clone().map(|row| (row - chunk.start) as i32));
        let set = self.set_of(seq);
        if set >= 0 {
            b.steer.resize(rows, set);
        }
        self.batch = b;
        self.lane_mut(seq).touch(rows);
        self.run_batch(layers)?;
        for (i, &token) in self.outcome.argmax.iter().enumerate() {
            if token < 0 {
                return Err(Error::NonFiniteLogits { position: first + heads.start + i - chunk.start });
            }
        }
        self.lane_mut(seq).advance(rows);
        Ok(())
    }

    fn run_batch(&mut self, layers: Range<usize>) -> Result<()> {
        self.batch.taps = self.capture.clone();
        let shape = self.shape_of(layers);
        self.outcome = self.runner.run(&self.batch, &shape)?;
        if shape.head_rows > 0 {
            self.logit_rows = shape.head_rows;
        }
        Ok(())
    }

    /// The shape of the batch at hand; a capture of the tail makes all rows run through it.
    pub(crate) fn shape_of(&self, layers: Range<usize>) -> BatchShape {
        let count = self.model().layers.len();
        let tail = self.runner.tail(&self.batch.taps);
        BatchShape { layers: (layers.start, layers.end), ..self.batch.shape(count, tail) }
    }

    pub(crate) fn lane(&self, seq: Seq) -> &Lane {
        match seq {
            Seq::Single => &self.single,
            Seq::Slot(slot) => &self.slots[slot],
        }
    }

    pub(crate) fn lane_mut(&mut self, seq: Seq) -> &mut Lane {
        match seq {
            Seq::Single => &mut self.single,
            Seq::Slot(slot) => &mut self.slots[slot],
        }
    }

    pub(crate) fn slot(&self, slot: usize) -> Result<&Lane> {
        self.slots.get(slot).ok_or(Error::Slot { slot, slots: self.slots.len() })
    }
}
