//! From the logits of a batch to tokens and scores: each request's rows are a job, and threads share the jobs.

use std::collections::HashMap;
use std::mem;
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use lapidary_ops::Outcome;

use super::{Worker, device_failure};
use crate::active::{Active, ChooseFrom, Chosen, Reads};
use crate::request::{EngineFinish, FailureKind};
use crate::scheduler::{Plan, Produced, RequestId};

/// Logits that one thread reads before another is worth starting.
const READ_ALONE: usize = 300_000;

/// What is to be made of one request's logits.
struct Job<'a> {
    id: RequestId,
    active: &'a mut Active,
    reads: Vec<Read>,
    failure: Option<FailureKind>,
}

/// A row of logits that is to be read.
struct Read {
    /// Among those that are lent.
    row: usize,
    /// Of the token that follows.
    position: usize,
    wants: Wants,
}

enum Wants {
    /// How likely the prompt's own token is.
    Score,
    /// A token of the answer; the one with the largest logit where that is known.
    Token { best: Option<u32> },
}

impl Job<'_> {
    fn run(&mut self, logits: &[&[f32]]) {
        for Read { row, position, wants } in mem::take(&mut self.reads) {
            if self.failure.is_some() {
                return;
            }
            let logits = logits[row];
            match wants {
                Wants::Score => self.failure = self.active.score(logits, position).err(),
                Wants::Token { best } => {
                    self.note(|active| active.choose(ChooseFrom::Logits { logits, best }, position));
                }
            }
        }
    }

    fn note(&mut self, choose: impl FnOnce(&mut Active) -> Result<Chosen, FailureKind>) {
        match choose(self.active) {
            Ok(chosen) => self.active.chosen = Some(chosen),
            Err(kind) => self.failure = Some(kind),
        }
    }
}

/// Runs all jobs; several threads share them when there is more to read than starting threads takes.
fn run_all(jobs: &mut [Job<'_>], logits: &[&[f32]]) {
    let work: usize = logits.iter().map(|row| row.len()).sum();
    let threads = (work / READ_ALONE).min(logits.len()).min(available_parallelism().map_or(1, usize::from));
    if threads < 2 {
        jobs.iter_mut().for_each(|job| job.run(logits));
        return;
    }
    // By number of rows, since one request may have many.
    jobs.sort_by_key(|job| std::cmp::Reverse(job.reads.len()));
    let next = Mutex::new(jobs.iter_mut());
    let work = || {
        while let Some(job) = { next.lock().unwrap_or_else(PoisonError::into_inner).next() } {
            job.run(logits);
        }
    };
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(work)));
        work();
    });
}

impl Worker {
    /// Chooses tokens and reads scores, several requests at once where there is much to read.
    pub(super) fn choose(&mut self, plan: &Plan, outcome: &Outcome) -> Vec<Produced> {
        let (mut rows, mut jobs) = (Vec::new(), Vec::new());
        let mut active: HashMap<RequestId, &mut Box<Active>> =
            self.active.iter_mut().map(|(id, active)| (*id, active)).collect();
        for entry in &plan.entries {
            // Ended since the batch was planned.
            let Some(active) = active.remove(&entry.id) else { continue };
            let mut job = Job { id: entry.id, active, reads: Vec::new(), failure: None };
            for head in entry.scores.clone() {
                let row = self.batch_heads[head] as usize - entry.rows.start;
                job.reads.push(Read {
                    row: rows.len(),
                    position: entry.positions.start + row + 1,
                    wants: Wants::Score,
                });
                rows.push(head);
            }
            if let Some(head) = entry.head {
                let position = entry.positions.end;
                let drawn = self.batch_draws.get(head).is_some_and(Option::is_some);
                match outcome.argmax.get(head).map(|&token| u32::try_from(token)) {
                    Some(Ok(token)) => match job.active.reads(drawn) {
                        Reads::Logits => {
                            let wants = Wants::Token { best: Some(token).filter(|_| !drawn) };
                            job.reads.push(Read { row: rows.len(), position, wants });
                            rows.push(head);
                        }
                        Reads::Nothing => {
                            job.note(|active| active.choose(ChooseFrom::Device(token), position))
                        }
                    },
                    _ => job.failure = Some(FailureKind::NonFinite { position: position - 1 }),
                }
            }
            jobs.push(job);
        }
        let lent = rows.is_empty()
            || self.runner.lend_logits(&rows, &mut |logits| run_all(&mut jobs, logits)).is_ok();
        if !lent {
            // What there is no memory for at once may do one by one. Reads that were lent have been taken.
            for job in jobs.iter_mut().filter(|job| !job.reads.is_empty()) {
                let own: Vec<usize> = job.reads.iter().map(|read| rows[read.row]).collect();
                job.reads.iter_mut().enumerate().for_each(|(i, read)| read.row = i);
                let lent = self.runner.lend_logits(&own, &mut |logits| job.run(logits));
                job.failure = job.failure.take().or(lent.err().map(device_failure));
            }
        }
        let failures: Vec<_> = jobs.into_iter().filter_map(|job| Some((job.id, job.failure?))).collect();
        for (id, kind) in failures {
            self.leave(id, EngineFinish::Failed(kind));
        }
        let token = |(id, _)| {
            let chosen = self.active.get(&id).and_then(|a| a.chosen.as_ref());
            chosen.map_or(Produced::Failed, |c| Produced::Token(c.sampled.token))
        };
        plan.heads().map(token).collect()
    }
}
