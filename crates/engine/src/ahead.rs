//! Greedy decoding without a gap: a step is queued before the host has read the tokens of the step before.
//!
//! The device takes a row's token from what the pass before chose, so the host is one step behind and only hands tokens
//! over, plans pages and decides when to stop. A step that turns out to be one too many costs its time and nothing else:
//! the cursor never moved to it, and the next step writes over its keys and values. Devices that cannot do this
//! ([`Runner::follows`](crate::Runner::follows)) take one step after the other, with the same results.

use std::ops::ControlFlow;

use lapidary_ops::RowSpan;

use crate::error::{Error, Result};
use crate::prompt::{check_token, push_token};
use crate::stepper::{Seq, Stepper};

impl Stepper {
    /// Feeds `token` to the single sequence and goes on greedily for up to `steps` steps. Each step's token is handed to
    /// `sink` in order, which ends the run early with `Break`. Returns how many steps were taken; the last token was not
    /// fed. After an early end there may be no logits to read.
    ///
    /// # Errors
    /// `Token`; `ContextFull` when not all steps fit, and then none was taken; `NonFiniteLogits`. Steps that were handed
    /// over stay.
    pub fn decode_many(
        &mut self,
        token: u32,
        steps: usize,
        sink: &mut dyn FnMut(&[u32]) -> ControlFlow<()>,
    ) -> Result<usize> {
        self.many(&[Seq::Single], &[token], steps, sink)
    }

    /// [`Stepper::decode_many`] for several slots in one batch: `tokens[i]` is fed to `slots[i]`, and `sink` gets a token
    /// for each. Slots stop together.
    ///
    /// # Errors
    /// As `decode_many`, and `Length`, `Slot`, `SlotTwice`, `TooManyRows`.
    pub fn decode_batch_many(
        &mut self,
        tokens: &[u32],
        slots: &[usize],
        steps: usize,
        sink: &mut dyn FnMut(&[u32]) -> ControlFlow<()>,
    ) -> Result<usize> {
        if slots.len() != tokens.len() {
            return Err(Error::Length { what: "slots", expected: tokens.len(), found: slots.len() });
        }
        for (i, &slot) in slots.iter().enumerate() {
            self.slot(slot)?;
            if slots[..i].contains(&slot) {
                return Err(Error::SlotTwice { slot });
            }
        }
        let seqs: Vec<Seq> = slots.iter().map(|&slot| Seq::Slot(slot)).collect();
        self.many(&seqs, tokens, steps, sink)
    }

    fn many(
        &mut self,
        seqs: &[Seq],
        tokens: &[u32],
        steps: usize,
        sink: &mut dyn FnMut(&[u32]) -> ControlFlow<()>,
    ) -> Result<usize> {
        let (rows, limits) = (seqs.len(), self.model().limits);
        if rows == 0 {
            return Err(Error::EmptyPrompt);
        }
        let limit = limits.rows.min(limits.head_rows);
        if rows > limit {
            return Err(Error::TooManyRows { rows, limit });
        }
        for (&seq, &token) in seqs.iter().zip(tokens) {
            self.lane(seq).room(steps)?;
            check_token(&self.model().config, token)?;
        }
        // A sequence's pages hold the window of the first row of a batch of two and both rows, and so does a step with
        // the one behind it.
        let hooked = !self.capture.points.is_empty() || seqs.iter().any(|&seq| self.set_of(seq) >= 0);
        let ahead = self.runner.follows() && !hooked && limits.rows > 1;
        let (mut fed, mut done, mut queued) = (tokens.to_vec(), 0, 0);
        while done < steps {
            if queued == 0 {
                self.queue(seqs, Some(&fed), 0)?;
                queued = 1;
            }
            if ahead && done + 1 < steps {
                if let Err(e) = self.queue(seqs, None, 1) {
                    self.discard(queued);
                    return Err(e);
                }
                queued += 1;
            }
            let collected = self.runner.collect();
            queued -= 1;
            let outcome = match collected {
                Ok(outcome) => outcome,
                Err(e) => {
                    self.discard(queued);
                    return Err(e);
                }
            };
            let bad = (0..rows).find(|&row| outcome.argmax.get(row).is_none_or(|&t| t < 0));
            if let Some(row) = bad {
                self.discard(queued);
                return Err(Error::NonFiniteLogits { position: self.lane(seqs[row]).cursor() });
            }
            seqs.iter().for_each(|&seq| self.lane_mut(seq).advance(1));
            fed.iter_mut().zip(&outcome.argmax).for_each(|(to, &token)| *to = token as u32);
            self.outcome = outcome;
            done += 1;
            if sink(&fed).is_break() {
                self.discard(queued);
                return Ok(done);
            }
            // The device looks up what it chose; the host knows ids that stand for another or for none.
            let config = &self.model().config;
            let known = |&t: &u32| check_token(config, t).is_ok() && config.lookup_id(t) == t;
            if done < steps && !fed.iter().all(known) {
                self.discard(queued);
                queued = 0;
                let config = &self.model().config;
                fed.iter().try_for_each(|&token| check_token(config, token))?;
            }
        }
        Ok(done)
    }

    /// Starts a pass of one row for each sequence, `behind` positions behind its cursor: over given tokens, or over those
    /// that the pass before chooses.
    fn queue(&mut self, seqs: &[Seq], tokens: Option<&[u32]>, behind: usize) -> Result<()> {
        let mut b = std::mem::take(&mut self.batch);
        b.clear();
        let config = &self.runner.model().config;
        for (row, &seq) in seqs.iter().enumerate() {
            let lane = self.lane(seq);
            let position = lane.cursor() + behind;
            push_token(&mut b, config, tokens.map_or(config.pad, |t| t[row]), position);
            let tables = lane.tables_at(&mut b, position, 1);
            b.spans.push(RowSpan { first_row: row, rows: 1, tables });
            b.heads.push(row as i32);
            if tokens.is_none() {
                b.follows.push(row as i32);
            }
        }
        if seqs.iter().any(|&seq| self.set_of(seq) >= 0) {
            b.steer = seqs.iter().map(|&seq| self.set_of(seq)).collect();
        }
        b.taps = self.capture.clone();
        self.batch = b;
        seqs.iter().for_each(|&seq| self.lane_mut(seq).touch(behind + 1));
        let shape = self.shape_of(0..self.model().layers.len());
        self.logit_rows = 0;
        self.runner.start(&self.batch, &shape)?;
        self.logit_rows = seqs.len();
        Ok(())
    }

    /// Waits for passes that nobody wants any more; the logits are theirs, so there are none to read.
    fn discard(&mut self, queued: usize) {
        for _ in 0..queued {
            // Whatever went wrong in it concerns a step that was never taken.
            let _ = self.runner.collect();
            self.logit_rows = 0;
        }
    }
}
