//! Steering of a stepper's sequences: which edits the rows of each get at the end of each layer. And its profile.
//!
//! Rows that were run before a set was given stay as they were, keys and values included: steering a sequence from
//! its first token means to give the set before the prompt.

use lapidary_ops::{Projections, SteerSet};

use crate::error::Result;
use crate::profile::Profile;
use crate::stepper::{Seq, Stepper};

/// The device's set for a sequence.
fn index(seq: Seq) -> usize {
    match seq {
        Seq::Single => 0,
        Seq::Slot(slot) => slot + 1,
    }
}

impl Stepper {
    /// Steers later rows of the single sequence, or no longer for `None`.
    ///
    /// # Errors
    /// `Steering` for a set that does not fit the model, `Backend` for a device that cannot steer; what was there
    /// before still applies then.
    pub fn set_steering(&mut self, set: Option<&SteerSet>) -> Result<()> {
        self.runner.steer_set(index(Seq::Single), set)
    }

    /// Steers later rows of a slot's sequence, or no longer for `None`. [`Stepper::alloc_slots`] forgets it.
    ///
    /// # Errors
    /// As [`Stepper::set_steering`], and `Slot`.
    pub fn set_slot_steering(&mut self, slot: usize, set: Option<&SteerSet>) -> Result<()> {
        self.slot(slot)?;
        self.runner.steer_set(index(Seq::Slot(slot)), set)
    }

    /// [`Runner::start_profile`](crate::Runner::start_profile) for the steps of this stepper.
    ///
    /// # Errors
    /// As there.
    pub fn start_profile(&mut self, keep_spans: bool) -> Result<()> {
        self.runner.start_profile(keep_spans)
    }

    /// [`Runner::take_profile`](crate::Runner::take_profile).
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.runner.take_profile()
    }

    /// What the rows of the last batch projected onto their directions before each edit, by row and index of the
    /// edit in the sequence's set. Rows without logits end with the last layer that writes keys and values, unless a
    /// capture asks for more; their later edits are NaN.
    pub fn projections(&self) -> &Projections {
        &self.outcome.projections
    }

    /// The set of a sequence as a batch names it.
    pub(crate) fn set_of(&self, seq: Seq) -> i32 {
        let index = index(seq);
        if self.runner.holds_steer_set(index) { index as i32 } else { -1 }
    }
}
