//! A step queued before the tokens of the one before it are read, where the device works on its own: streams that go on
//! with the token of the largest logit, or with one that the device draws, need the host for nothing between two steps.
//!
//! ```text
//! start n   guides   start n + 1   collect n   tokens   take up n + 1   guides   start n + 2   collect n + 1 ...
//! ```
//!
//! The step ahead is a guess that no bit of an answer depends on: its rows count only where the sequence still runs and
//! goes on with the very token that the device took. What it wrote for others lies behind all that they know, and the next
//! pass that runs their rows writes over it. So a request that ends, leaves or comes is noticed one step later at most.

use lapidary_ops::Batch;

use super::{Worker, guarded};
use crate::scheduler::{AheadRow, Plan, RequestId};

/// A pass that is under way ahead of its plan.
#[derive(Debug)]
pub(super) struct Ahead {
    batch: Batch,
    /// By row: whose, and at which position.
    rows: Vec<(RequestId, usize)>,
    /// By row: the token that the pass before chose; empty until that is known.
    tokens: Vec<i32>,
}

impl Worker {
    /// Starts the step behind `plan`'s, which runs, if nothing but streams whose tokens the device chooses can be in it.
    pub(super) fn go_ahead(&mut self, plan: &Plan) {
        let draws = self.runner.draws();
        let free = |id| self.active.get(&id).is_some_and(|a| a.goes_on_alone(draws));
        let may = self.runner.follows() && self.suspects.is_empty() && self.loading.is_empty();
        if !may || !plan.entries.iter().all(|e| free(e.id)) {
            return;
        }
        let mut batch = Batch::default();
        let Some(rows) = self.scheduler.fill_behind(plan, &mut batch) else { return };
        let heads = rows.iter().enumerate().map(|(head, &(id, position))| (head, id, position + 1));
        batch.draws = self.draws(rows.len(), heads);
        let shape = batch.shape(self.runner.model().layers.len(), self.runner.tail(&batch.taps));
        // What goes wrong here shows when the pass before is collected, or never mattered.
        if guarded(|| self.runner.start(&batch, &shape)).is_ok_and(|started| started.is_ok()) {
            self.ahead = Some(Ahead { batch, rows, tokens: Vec::new() });
        }
    }

    /// Notes what the pass before the one ahead chose.
    pub(super) fn tell_ahead(&mut self, argmax: &[i32]) {
        if let Some(ahead) = &mut self.ahead {
            let of = |&head: &i32| argmax.get(head as usize).copied().unwrap_or(-1);
            ahead.tokens = ahead.batch.follows.iter().map(of).collect();
        }
    }

    /// The plan and the batch of the pass ahead, if it is worth anything; then it is the one to collect next.
    pub(super) fn take_up(&mut self, batch: &mut Batch) -> Option<Plan> {
        let ahead = self.ahead.take()?;
        let rows = ahead.rows.iter().zip(&ahead.tokens).map(|(&(id, position), &token)| {
            // A row that chose none has ended its request.
            AheadRow { id, position, token: u32::try_from(token).unwrap_or(u32::MAX) }
        });
        let rows: Vec<AheadRow> = rows.collect();
        let plan = match self.suspects.is_empty() {
            true => self.scheduler.take_up(&rows, self.now()),
            false => None,
        };
        match &plan {
            Some(_) => *batch = ahead.batch,
            None => self.wait_for_nothing(),
        }
        plan
    }

    /// Waits for the pass ahead and forgets it.
    pub(super) fn drop_ahead(&mut self) {
        if self.ahead.take().is_some() {
            self.wait_for_nothing();
        }
    }

    fn wait_for_nothing(&mut self) {
        // Whatever went wrong in it concerns a step that is not taken.
        let _ = guarded(|| self.runner.collect());
    }
}
