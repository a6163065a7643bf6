//! Edits and copies: what the requests of a batch want of its rows beside tokens.

use lapidary_ops::{Batch, Outcome};

use super::{Worker, device_failure};
use crate::error::Result;
use crate::request::{EngineFinish, FailureKind};
use crate::scheduler::{Plan, RequestId};

impl Worker {
    /// Says in the batch which rows are edited and what is copied out. A request whose edits the device does not take
    /// ends; its rows run with the others and nobody looks at them.
    pub(super) fn dress(&mut self, plan: &Plan, batch: &mut Batch) {
        let mut failures: Vec<(RequestId, FailureKind)> = Vec::new();
        for entry in &plan.entries {
            let Some(active) = self.active.get_mut(&entry.id) else { continue };
            if let Some(steered) = &active.steered {
                let place = match active.steer_place {
                    Some(place) => Ok(place),
                    None => self.steer_table.take(&mut self.runner, steered),
                };
                match place.and_then(set_number) {
                    Ok(set) => {
                        active.steer_place = Some(set as usize);
                        batch.steer.resize(batch.tokens.len(), -1);
                        batch.steer[entry.rows.clone()].fill(set);
                    }
                    Err(error) => failures.push((entry.id, device_failure(error))),
                }
            }
            if let Some(watch) = &active.watch
                && let Err(kind) = watch.want(&entry.positions, &mut batch.taps.points)
            {
                failures.push((entry.id, kind));
            }
        }
        for (id, kind) in failures {
            self.leave(id, EngineFinish::Failed(kind));
        }
    }

    /// Hands over what was copied out.
    pub(super) fn observe(&mut self, plan: &Plan, batch: &Batch, outcome: &Outcome) {
        for entry in &plan.entries {
            let Some(active) = self.active.get_mut(&entry.id) else { continue };
            let Some(watch) = &mut active.watch else { continue };
            let taken = watch.take(batch, entry.rows.clone(), entry.positions.clone(), outcome);
            if let Err(kind) = taken {
                self.leave(entry.id, EngineFinish::Failed(kind));
            }
        }
    }
}

/// The number of a set as batches name it.
fn set_number(place: usize) -> Result<i32> {
    i32::try_from(place).map_err(|_| crate::error::Error::TooLarge {
        what: "index of a steering set",
        found: place,
        limit: i32::MAX as usize,
    })
}
