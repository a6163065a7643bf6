//! The plan behind a plan: rows whose tokens the device knows before the caller does.

use std::time::Duration;

use lapidary_ops::{Batch, RowSpan};

use super::{Plan, PlanEntry, RequestId, Scheduler};
use crate::prompt::{check_token, push_token};

/// A row that was started before its token was known: whose it is, its position, and the token that the device took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AheadRow {
    pub id: RequestId,
    pub position: usize,
    pub token: u32,
}

impl Scheduler {
    /// Fills a batch with one row for each sequence of the plan in flight, [behind](Batch::follows) the one that it has
    /// there. Returns whose rows they are and at which positions, or `None` where the next batch may be another: somebody
    /// waits or is not in the plan, rows are more than streams, or pages are short. Sequences that end with this plan
    /// whatever their token get no row.
    pub(crate) fn fill_behind(&mut self, plan: &Plan, batch: &mut Batch) -> Option<Vec<(RequestId, usize)>> {
        let streams_alone = self.in_flight == Some(plan.serial)
            && self.waiting.is_empty()
            && plan.entries.len() == self.running.len()
            && plan.entries.iter().all(|e| e.rows.len() == 1 && e.scores.is_empty());
        if !streams_alone {
            return None;
        }
        batch.clear();
        let mut rows = Vec::with_capacity(plan.entries.len());
        for entry in &plan.entries {
            let head = entry.head?;
            let sequence = self.running.get_mut(self.ranks.get(&entry.id)?)?;
            let position = entry.positions.end;
            if position + 1 >= sequence.most(self.options.context) {
                continue;
            }
            self.pool.grow(&mut sequence.pages, position + 1).ok()?;
            push_token(batch, &self.config, self.config.pad, position);
            let tables = self.pool.push_tables(&sequence.pages, batch, position, 1);
            let row = rows.len();
            batch.spans.push(RowSpan { first_row: row, rows: 1, tables });
            batch.heads.push(row as i32);
            batch.follows.push(head as i32);
            rows.push((entry.id, position));
        }
        (!rows.is_empty()).then_some(rows)
    }

    /// The plan of a batch that [`Scheduler::fill_behind`] filled and that runs already, as far as its rows are wanted:
    /// a sequence that has ended since, or that goes on with another token than the device took, has none in it. `None`
    /// when none is left, or a plan is in flight.
    pub(crate) fn take_up(&mut self, rows: &[AheadRow], now: Duration) -> Option<Plan> {
        if self.in_flight.is_some() {
            return None;
        }
        let mut entries = Vec::with_capacity(rows.len());
        for (row, ahead) in rows.iter().enumerate() {
            let AheadRow { id, position, token } = *ahead;
            let Some(sequence) = self.ranks.get(&id).and_then(|rank| self.running.get_mut(rank)) else {
                continue;
            };
            // The device looks a token up as it is; some stand for another, or for none.
            let known = check_token(&self.config, token).is_ok() && self.config.lookup_id(token) == token;
            if !known || sequence.cursor() != position || sequence.waits_with() != Some(token) {
                continue;
            }
            sequence.last_step = self.stats.steps + 1;
            let positions = position..position + 1;
            entries.push(PlanEntry { id, rows: row..row + 1, positions, head: Some(row), scores: row..row });
        }
        if entries.is_empty() {
            return None;
        }
        self.stats.steps += 1;
        self.stats.rows += entries.len() as u64;
        self.in_flight = Some(self.stats.steps);
        Some(Plan { serial: self.stats.steps, planned_at: now, entries })
    }
}
