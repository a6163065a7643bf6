//! Whose rows the next batch should have, before anybody asks for pages.

use std::time::Duration;

use super::Scheduler;
use super::sequence::{Rank, Sequence};

/// A gap between two tokens that nobody minds: a batch may take as long, whatever that does to the streams' pace.
const UNSEEN: Duration = Duration::from_millis(40);

/// What a batch still has room for.
struct Room {
    rows: usize,
    heads: usize,
}

impl Scheduler {
    /// Streams that have waited longest, then prompts by their shares.
    pub(super) fn choose(&mut self, now: Duration) -> Vec<(Rank, usize)> {
        let mut streams: Vec<(Duration, Rank)> = Vec::new();
        let mut prompts: Vec<(Rank, &Sequence)> = Vec::new();
        for (&rank, sequence) in &self.running {
            match sequence.is_stream() {
                true => streams.push((sequence.last_token_at, rank)),
                false => prompts.push((rank, sequence)),
            }
        }
        streams.sort_unstable();
        let (rows, heads) = (self.options.rows, self.options.head_rows);
        // Rows that the first prompt should have whatever happens, its vision block above all.
        let reserved = prompts
            .first()
            .map_or(0, |(_, p)| p.unit().max(self.options.min_prompt_rows.min(p.pending())).min(rows));
        // A prompt that may end in this batch needs a head too.
        let ending = usize::from(prompts.iter().any(|(_, p)| p.heads(p.cursor(), p.pending().min(rows)) > 0));
        let in_the_way = reserved > 0 && (streams.len() + reserved > rows || streams.len() + ending > heads);
        let all = rows.min(heads);
        let beside = if in_the_way { (rows - reserved).min(heads - ending) } else { all };
        let served = streams.len().min(if self.prompts_turn { beside } else { all });
        // Steps in which each stream is served once: all of them beside a prompt, or every second one.
        let alternating = 2 * streams.len().div_ceil(all);
        let every = if beside == 0 { alternating } else { streams.len().div_ceil(beside).min(alternating) };
        let mut room = Room { rows: rows - served, heads: heads - served };
        let budget = match streams.first() {
            None => room.rows,
            Some(&(last_token_at, _)) => {
                let left = last_token_at.saturating_add(self.options.max_stall).saturating_sub(now);
                let time = left.min(self.options.max_stall / every as u32);
                // The caller has things to do between two steps.
                let bound = self.pace.rows_surely_within(time * 7 / 8);
                let alone = self.pace.streams_alone(served);
                let even = self.pace.rows_within((alone * self.options.max_slowdown).max(UNSEEN));
                let fits = bound.min(even).saturating_sub(served);
                fits.max(self.options.min_prompt_rows).min(room.rows)
            }
        };
        let mut chosen: Vec<(Rank, usize)> = streams[..served].iter().map(|&(_, rank)| (rank, 1)).collect();
        chosen.extend(share(&mut prompts, budget, self.options.min_prompt_rows, &mut room));
        if in_the_way {
            self.prompts_turn = !self.prompts_turn;
        }
        chosen
    }

    /// The first in rank alone.
    pub(super) fn choose_first(&self) -> Vec<(Rank, usize)> {
        let first = self.running.first_key_value();
        first.map(|(&rank, s)| (rank, self.most_rows(s))).into_iter().collect()
    }

    /// Most rows that a batch of one sequence alone has.
    pub(super) fn most_rows(&self, sequence: &Sequence) -> usize {
        let (cursor, options) = (sequence.cursor(), &self.options);
        let rows = options.rows.min(sequence.pending());
        sequence.fit(cursor, sequence.within_heads(cursor, rows, options.head_rows))
    }
}

/// Deals `budget` rows to prompts: half of them to the first in rank, the rest to the others in equal parts of
/// at least `least`, those served longest ago first; then what is left over. A vision block of the first in
/// rank may exceed the budget.
fn share(
    prompts: &mut [(Rank, &Sequence)],
    budget: usize,
    least: usize,
    room: &mut Room,
) -> Vec<(Rank, usize)> {
    let count = prompts.len();
    if let Some((_, others)) = prompts.split_first_mut() {
        others.sort_by_key(|(rank, s)| (s.last_step, *rank));
    }
    let mut dealt = vec![0; count];
    let mut left = budget;
    for (i, (_, sequence)) in prompts.iter().enumerate() {
        let part = match i {
            0 if count == 1 => left.max(sequence.unit()),
            0 => left.div_ceil(2).max(sequence.unit()),
            _ => (left / (count - i)).max(least).min(left),
        };
        deal(sequence, &mut dealt[i], part, room, &mut left);
    }
    for (i, (_, sequence)) in prompts.iter().enumerate() {
        if left > 0 {
            let part = left;
            deal(sequence, &mut dealt[i], part, room, &mut left);
        }
    }
    prompts.iter().zip(dealt).filter(|(_, rows)| *rows > 0).map(|((rank, _), rows)| (*rank, rows)).collect()
}

/// Adds at most `part` rows to those that a sequence was dealt. Rows whose logits are wanted need places
/// among the heads.
fn deal(sequence: &Sequence, dealt: &mut usize, part: usize, room: &mut Room, left: &mut usize) {
    let from = sequence.cursor() + *dealt;
    let limit = part.min(room.rows).min(sequence.pending() - *dealt);
    let rows = sequence.fit(from, sequence.within_heads(from, limit, room.heads));
    *dealt += rows;
    room.rows -= rows;
    *left = left.saturating_sub(rows);
    room.heads -= sequence.heads(from, rows);
}
