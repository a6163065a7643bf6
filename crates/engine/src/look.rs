//! What a request asks of the passes that run its rows, beside tokens: edits of the rows, and copies of activations.
//!
//! Both are data of a batch, so requests with different wishes share one. Steered rows have keys and values of their
//! own; a steering's digest is therefore part of the names of its sequence's blocks, and kept beginnings are shared only
//! among requests that are steered alike.

use std::ops::Range;
use std::sync::Arc;

use lapidary_ops::{Batch, Outcome, SteerMode, SteerSet, TapPoint};
use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::request::FailureKind;
use crate::runner::Runner;

/// Takes copies of activations of a request's rows, batch by batch and each position once. Called on the engine's thread;
/// one that panics ends its request.
pub trait Observer: Send {
    /// What a batch with these positions of the request must copy out; nothing when none of them is wanted.
    fn points(&self, positions: Range<usize>) -> Vec<TapPoint>;

    /// The first position that is wanted: rows from there on run even where their keys and values are kept.
    fn first(&self) -> usize;

    /// Takes what a batch gave: its rows `rows` hold `positions` of the request. The batch may hold other requests' rows,
    /// and have copied out more.
    fn take(&mut self, batch: &Batch, rows: Range<usize>, positions: Range<usize>, outcome: &Outcome);
}

/// A request's steering, named by its content.
#[derive(Clone, Debug)]
pub(crate) struct Steered {
    set: Arc<SteerSet>,
    pub digest: [u8; 32],
}

impl Steered {
    /// `None` for a set without edits, which is none.
    pub fn new(set: Arc<SteerSet>) -> Option<Steered> {
        if set.edits.is_empty() {
            return None;
        }
        let digest = digest(&set);
        Some(Steered { set, digest })
    }
}

/// A hash of every bit that a set does anything by.
fn digest(set: &SteerSet) -> [u8; 32] {
    let mut hash = Sha256::new();
    for edit in &set.edits {
        let mode = SteerMode::ALL.iter().position(|mode| *mode == edit.mode).unwrap_or(SteerMode::ALL.len());
        hash.update((edit.layer as u64).to_le_bytes());
        hash.update((mode as u64).to_le_bytes());
        hash.update([u8::from(edit.gate.is_some())]);
        for value in [edit.strength, edit.to, edit.gate.unwrap_or_default(), edit.norm] {
            hash.update(value.to_le_bytes());
        }
        hash.update(crate::prefix::digest(&edit.unit));
    }
    hash.finalize().into()
}

/// Which steering sets the device holds, and for how many requests.
#[derive(Debug, Default)]
pub(crate) struct SteerTable {
    places: Vec<Option<([u8; 32], usize)>>,
}

impl SteerTable {
    /// The place of a request's set, given to the device unless another request has brought it.
    pub fn take(&mut self, runner: &mut Runner, steered: &Steered) -> Result<usize> {
        let same = |held: &&mut ([u8; 32], usize)| held.0 == steered.digest;
        let places = &mut self.places;
        if let Some(place) = places.iter_mut().position(|held| held.as_mut().filter(same).is_some()) {
            places[place].as_mut().expect("found above").1 += 1;
            return Ok(place);
        }
        let place = places.iter().position(Option::is_none).unwrap_or(places.len());
        runner.steer_set(place, Some(&steered.set))?;
        if place == places.len() {
            places.push(None);
        }
        places[place] = Some((steered.digest, 1));
        Ok(place)
    }

    /// A request is done with the set at `place`.
    pub fn give_back(&mut self, runner: &mut Runner, place: usize) {
        let Some((_, users)) = self.places[place].as_mut() else { return };
        *users -= 1;
        if *users == 0 {
            self.places[place] = None;
            // No batch names it again, whatever the device says.
            let _ = runner.steer_set(place, None);
        }
    }

    /// Sets that the device holds.
    pub fn held(&self) -> usize {
        self.places.iter().flatten().count()
    }
}

/// A request's observer, and how far it has seen.
pub(crate) struct Watch {
    observer: Box<dyn Observer>,
    /// Positions before this one were taken; rows that run again after a pre-emption are not taken twice.
    seen: usize,
}

impl Watch {
    pub fn new(observer: Box<dyn Observer>) -> Watch {
        Watch { observer, seen: 0 }
    }

    /// Adds what a batch with these positions must copy out.
    pub fn want(&self, positions: &Range<usize>, points: &mut Vec<TapPoint>) -> Result<(), FailureKind> {
        let left = self.seen.max(positions.start)..positions.end;
        if left.is_empty() {
            return Ok(());
        }
        let wanted = crate::active::guarded(|| self.observer.points(left))?;
        points.extend(wanted.into_iter().filter(|point| !points.contains(point)).collect::<Vec<_>>());
        Ok(())
    }

    /// Hands over what a batch gave.
    pub fn take(
        &mut self,
        batch: &Batch,
        rows: Range<usize>,
        positions: Range<usize>,
        outcome: &Outcome,
    ) -> Result<(), FailureKind> {
        let skip = self.seen.saturating_sub(positions.start);
        self.seen = self.seen.max(positions.end);
        if skip >= rows.len() {
            return Ok(());
        }
        let (rows, positions) = (rows.start + skip..rows.end, positions.start + skip..positions.end);
        crate::active::guarded(|| self.observer.take(batch, rows, positions, outcome))
    }
}

#[cfg(test)]
mod tests {
    use lapidary_ops::SteerEdit;

    use super::*;

    #[test]
    fn a_digest_depends_on_every_field_that_does_anything() {
        let edit = SteerEdit::new(3, SteerMode::Add, 2.0, &[3.0, 4.0]).unwrap();
        let with = |change: &dyn Fn(&mut SteerEdit)| {
            let mut edit = edit.clone();
            change(&mut edit);
            digest(&SteerSet { edits: vec![edit] })
        };
        let digests = [
            with(&|_| {}),
            with(&|e| e.layer = 4),
            with(&|e| e.mode = SteerMode::Ablate),
            with(&|e| e.strength = -2.0),
            with(&|e| e.to = 1.0),
            with(&|e| e.gate = Some(0.0)),
            with(&|e| e.gate = Some(1.0)),
            with(&|e| e.norm = 6.0),
            with(&|e| e.unit = Arc::from([0.8f32, 0.6])),
            digest(&SteerSet { edits: vec![edit.clone(), edit.clone()] }),
        ];
        for (i, a) in digests.iter().enumerate() {
            assert!(digests[..i].iter().all(|b| a != b), "{i}");
        }
        assert_eq!(digests[0], with(&|_| {}));
        assert!(Steered::new(Arc::default()).is_none());
    }
}
