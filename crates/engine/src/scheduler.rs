//! Which rows of which requests the next batch holds.
//!
//! A [`Scheduler`] does no I/O, reads no clock and knows no device: its caller says what time it is, runs the
//! batch and gives back a token for each head row.
//!
//! ```text
//! submit, cancel            at any time
//! plan = next(now, batch)   None: nothing can run
//! run(batch)                forward, then one token for each of plan.heads()
//! apply(plan, tokens, now)  -> events
//! ```
//!
//! A sequence is its prompt and the tokens it was answered, of which the first `cursor` have keys and values.
//! Prefill, decoding and recomputing after a pre-emption are one thing: the rows from the cursor on are fed,
//! and when the last known one was, its logits give the next token. So a request's tokens do not depend on
//! its company, provided the device's do not.
//!
//! # Rules
//!
//! - **Rank.** Requests are ordered by the time of submission, each level of priority counting as having come
//!   [`SchedulerOptions::priority_worth`] earlier. The order of two requests never changes, and low priority
//!   is passed over only so long. Admission goes by rank, and pages are taken by rank: when they run out, the
//!   lowest in rank loses its own and is recomputed later; nobody loses pages to a lower one. The first in
//!   rank can always run, since the pools hold at least one sequence of the whole context.
//! - **Streams first.** Every batch has a row of each sequence that only waits for its next token, as far as
//!   the limits go, those that have waited longest first.
//! - **Stall bound.** Beside streams, prompts get as many rows as fit `max_stall` by the measured pace of
//!   earlier steps, but at least `min_prompt_rows`, so that a device for which the bound is out of reach still
//!   gets prompts done. A vision block runs whole, even beyond the bound.
//! - **Even streams.** Within that bound, a batch takes at most `max_slowdown` times as long as the streams' rows alone
//!   would: prompts get two thirds of the time where it is 3, and no stream halts for the bound's sake. Batches of
//!   up to 40 ms are let be.
//! - **Fair share.** Half of the prompts' rows go to the first in rank; the others share the other half, those
//!   served longest ago first. A short prompt behind a long one is answered before it, and the long one still
//!   gets done.
//! - **Reuse.** Where prefixes are kept (see [`PrefixOptions`]), a request goes on from the longest that is there
//!   when it is let in, and one that shares its beginning with a prompt that is being fed waits for it.
//! - **One end.** Each request ends exactly once, with one reason, and a failing row ends one request.
//!
//! Deliberately absent: sampling, stop strings and timeouts (the caller cancels), and planning a step while
//! another runs: at most one plan is in flight. A caller whose device goes on by itself may fill the batch behind it and
//! take that up once it knows the tokens.

mod ahead;
mod choose;
mod pace;
mod reuse;
mod room;
mod sequence;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::time::Duration;

use lapidary_model::Config;
use lapidary_ops::{Batch, Group, KvPlan, RowSpan};

use crate::error::{Error, Result};
use crate::generate::FinishReason;
use crate::pages::PagePool;
use crate::prefix::{Chain, PrefixOptions, PrefixStats, PrefixTree};
use crate::prompt::{Checked, Prompt, check_token};

pub(crate) use ahead::AheadRow;
use pace::Pace;
pub(crate) use reuse::{Left, Wanted};
use sequence::{Rank, Sequence};

/// Sizes and bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Most rows of a batch; at most what the model's buffers hold.
    pub rows: usize,
    /// Most rows of a batch whose logits are wanted; at most what the model's buffers hold.
    pub head_rows: usize,
    /// Positions of one sequence.
    pub context: usize,
    /// Most sequences that hold pages.
    pub running: usize,
    /// Most requests that wait for pages; one more is refused.
    pub waiting: usize,
    /// Running streams get a token at least that often while prompts are fed.
    pub max_stall: Duration,
    /// A batch of streams and prompts takes at most that many times as long as the streams alone would; below 2
    /// prompts hardly move.
    pub max_slowdown: u32,
    /// Fewest rows that a batch gives to prompts, both bounds notwithstanding.
    pub min_prompt_rows: usize,
    /// By how much earlier a request counts as submitted for each level of priority.
    pub priority_worth: Duration,
    /// Positions of a sequence that can be taken back.
    pub rollback: usize,
}

impl Default for SchedulerOptions {
    fn default() -> SchedulerOptions {
        SchedulerOptions {
            rows: 512,
            head_rows: 64,
            context: 8192,
            running: 64,
            waiting: 256,
            max_stall: Duration::from_millis(200),
            max_slowdown: 3,
            min_prompt_rows: 16,
            priority_worth: Duration::from_secs(60),
            rollback: 0,
        }
    }
}

/// What is asked of the scheduler; how tokens are chosen is the caller's business.
#[derive(Clone, Debug, Default)]
pub struct Submission {
    /// What comes before the answer.
    pub prompt: Prompt,
    /// Most tokens of the answer; the context's end limits it too.
    pub max_tokens: usize,
    /// Tokens that end the answer and are not part of it.
    pub stop_ids: Vec<u32>,
    /// Higher goes first.
    pub priority: i8,
    /// The first token of the prompt whose probability is wanted, at least 1: the first has none. Then
    /// `max_tokens` may be 0, for no answer at all.
    pub score_from: Option<usize>,
    /// Sequences share kept beginnings within one family only: rows that are edited have other keys and values.
    pub family: [u8; 32],
    /// Rows from here on run even where their keys and values are kept, since more is wanted of them.
    pub run_from: Option<usize>,
}

/// A submission that was checked, apart from the scheduler so that another thread can do it.
#[derive(Debug)]
pub(crate) struct Prepared {
    prompt: Checked<'static>,
    chain: Option<Chain>,
    max_tokens: usize,
    stop_ids: Vec<u32>,
    priority: i8,
    score_from: Option<usize>,
    run_from: Option<usize>,
}

impl Prepared {
    /// Checks a submission against the model and the sizes, and names its blocks where prefixes are kept.
    ///
    /// # Errors
    /// As [`Scheduler::submit`], but for `QueueFull`.
    pub fn new(
        config: &Config,
        options: &SchedulerOptions,
        named: bool,
        submission: Submission,
    ) -> Result<Prepared> {
        let Submission { prompt, max_tokens, stop_ids, priority, score_from, family, run_from } = submission;
        if score_from == Some(0) {
            return Err(Error::Zero { what: "score_from" });
        }
        if max_tokens == 0 && score_from.is_none() {
            return Err(Error::Zero { what: "max_tokens" });
        }
        let (tokens, context) = (prompt.tokens.len(), options.context);
        if tokens > context {
            return Err(Error::PromptTooLong { tokens, context });
        }
        let prompt = Checked::new(config, prompt)?;
        let (rows, limit) = (prompt.longest_unit(), options.rows);
        if rows > limit {
            return Err(Error::VisionBlock { rows, limit });
        }
        let chain = named.then(|| {
            let mut chain = Chain::of(family);
            prompt.name_rows(&mut chain);
            chain
        });
        Ok(Prepared { prompt, chain, max_tokens, stop_ids, priority, score_from, run_from })
    }
}

/// Names a request; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What a batch is made of.
#[derive(Debug)]
pub struct Plan {
    serial: u64,
    planned_at: Duration,
    /// Sequences in the order of their rows.
    pub entries: Vec<PlanEntry>,
}

/// One request's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanEntry {
    /// Whose they are.
    pub id: RequestId,
    /// Rows of the batch.
    pub rows: Range<usize>,
    /// Their positions in the sequence; a token that follows takes position `positions.end`.
    pub positions: Range<usize>,
    /// Which of the batch's head rows is the last of these, when a token is wanted.
    pub head: Option<usize>,
    /// Which of the batch's head rows say how likely the prompt's next token is.
    pub scores: Range<usize>,
}

impl Plan {
    /// Requests that a token is wanted for, with the position that it takes, in the order of their head rows.
    pub fn heads(&self) -> impl Iterator<Item = (RequestId, usize)> {
        self.entries.iter().filter(|e| e.head.is_some()).map(|e| (e.id, e.positions.end))
    }
}

/// What a head row gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Produced {
    /// The chosen token.
    Token(u32),
    /// None: the logits were not finite, or nothing could be chosen from them.
    Failed,
}

/// What happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulerEvent {
    /// A token of the answer.
    Token {
        /// Whose.
        id: RequestId,
        /// Which.
        token: u32,
    },
    /// The end, exactly once.
    Finished {
        /// Whose.
        id: RequestId,
        /// Why.
        reason: EndReason,
    },
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The answer is complete.
    Done(FinishReason),
    /// The caller took it back.
    Cancelled,
    /// Its row gave no token.
    Failed {
        /// Of that row.
        position: usize,
    },
}

/// Counts for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Requests that hold no pages.
    pub waiting: usize,
    /// Requests that hold pages, or will in the next batch.
    pub running: usize,
    /// Batches planned.
    pub steps: u64,
    /// Rows planned.
    pub rows: u64,
    /// Rows that were fed again after a pre-emption.
    pub recomputed_rows: u64,
    /// Sequences that lost their pages.
    pub preemptions: u64,
    /// What is kept of earlier requests.
    pub prefix: PrefixStats,
}

/// Decides what runs.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    options: SchedulerOptions,
    pool: PagePool,
    prefix: Option<PrefixTree>,
    left: Vec<Left>,
    prefix_options: PrefixOptions,
    pace: Pace,
    running: BTreeMap<Rank, Sequence>,
    waiting: BTreeMap<Rank, Sequence>,
    ranks: HashMap<RequestId, Rank>,
    last_id: u64,
    in_flight: Option<u64>,
    /// Whether the next batch in which streams and prompts are in each other's way is the prompts'.
    prompts_turn: bool,
    stats: SchedulerStats,
}

impl Scheduler {
    /// A scheduler for sequences of the model that `config` describes, over the pools of `plan`.
    ///
    /// # Errors
    /// `Zero`; `TooLarge` for a context beyond 32 bits; `PoolTooSmall` when a sequence of the whole context
    /// could not run even alone.
    pub fn new(config: Config, plan: &KvPlan, options: SchedulerOptions) -> Result<Scheduler> {
        Scheduler::with_prefix(config, plan, options, PrefixOptions::off())
    }

    /// A scheduler that keeps prefixes for later requests.
    ///
    /// # Errors
    /// As [`Scheduler::new`], and `SnapshotBudget`.
    pub fn with_prefix(
        config: Config,
        plan: &KvPlan,
        options: SchedulerOptions,
        prefix: PrefixOptions,
    ) -> Result<Scheduler> {
        for (what, value) in [
            ("rows", options.rows),
            ("head_rows", options.head_rows),
            ("context", options.context),
            ("running", options.running),
            ("waiting", options.waiting),
            ("min_prompt_rows", options.min_prompt_rows),
        ] {
            if value == 0 {
                return Err(Error::Zero { what });
            }
        }
        crate::runner::check_context("context", options.context)?;
        let pool = PagePool::new(plan, prefix.rollback(options.rollback));
        let need = pool.need(options.context, options.rows);
        for group in Group::ALL {
            let (pages, needed) = (pool.total(group), need[group.index()]);
            if pages < needed {
                return Err(Error::PoolTooSmall { group, pages, needed });
            }
        }
        let most = prefix.snapshot_pages(plan)?;
        let tree = prefix.enabled.then(|| PrefixTree::new(&pool, most));
        Ok(Scheduler {
            config,
            options,
            pool,
            prefix: tree,
            left: Vec::new(),
            prefix_options: prefix,
            pace: Pace::default(),
            running: BTreeMap::new(),
            waiting: BTreeMap::new(),
            ranks: HashMap::new(),
            last_id: 0,
            in_flight: None,
            prompts_turn: false,
            stats: SchedulerStats::default(),
        })
    }

    /// Queues a request.
    ///
    /// # Errors
    /// `QueueFull`; `Zero` for an answer of no tokens; `PromptTooLong`; `VisionBlock` for one that no batch
    /// holds; what else is wrong with the prompt. The scheduler is unchanged then.
    pub fn submit(&mut self, submission: Submission, now: Duration) -> Result<RequestId> {
        if self.waiting.len() >= self.options.waiting {
            return Err(Error::QueueFull { limit: self.options.waiting });
        }
        let prepared = Prepared::new(&self.config, &self.options, self.prefix.is_some(), submission)?;
        let id = RequestId(self.last_id + 1);
        self.enqueue(id, prepared, now);
        Ok(id)
    }

    /// Queues a request that was checked elsewhere, under a number that no earlier one had; whether the queue is
    /// full was the caller's to ask.
    pub(crate) fn enqueue(&mut self, id: RequestId, prepared: Prepared, now: Duration) {
        self.last_id = self.last_id.max(id.0);
        let Prepared { prompt, chain, max_tokens, stop_ids, priority, score_from, run_from } = prepared;
        let rank = Rank::new(id, priority, now, self.options.priority_worth);
        self.ranks.insert(id, rank);
        let mut sequence = Sequence::new(id, prompt, chain, max_tokens, stop_ids, now);
        sequence.score_from = score_from;
        sequence.run_from = run_from;
        self.want_snapshots(&mut sequence);
        self.waiting.insert(rank, sequence);
    }

    /// Ends a request, wherever it stands, and releases its pages at once: a batch in flight may still write
    /// them, but no other batch starts before that one was applied. `None` for one that has ended already.
    pub fn cancel(&mut self, id: RequestId) -> Option<SchedulerEvent> {
        self.end(id, EndReason::Cancelled)
    }

    /// Ends a request whose row at `position` gave no token, as [`Produced::Failed`] does; nothing that it left is
    /// kept for others. `None` for one that has ended already.
    pub fn fail(&mut self, id: RequestId, position: usize) -> Option<SchedulerEvent> {
        self.end(id, EndReason::Failed { position })
    }

    /// Plans a batch and fills its columns. `None` when there is nothing to run, or a plan is in flight.
    pub fn next(&mut self, now: Duration, batch: &mut Batch) -> Option<Plan> {
        if self.in_flight.is_some() {
            return None;
        }
        self.admit();
        let chosen = self.choose(now);
        let mut chosen = self.take_pages(chosen);
        if chosen.is_empty() {
            // Everyone chosen waits for pages of higher ones that were not: the first in rank can have them.
            chosen = self.take_pages(self.choose_first());
        }
        self.start(chosen, now, batch)
    }

    /// [`Scheduler::next`] with rows of one request alone: when a batch of several broke, this finds out whose
    /// fault it was. `None` when the request holds no pages or can have none, or a plan is in flight.
    pub fn next_alone(&mut self, id: RequestId, now: Duration, batch: &mut Batch) -> Option<Plan> {
        let rank = *self.ranks.get(&id).filter(|_| self.in_flight.is_none())?;
        let sequence = self.running.get(&rank)?;
        let rows = self.most_rows(sequence);
        let chosen = self.take_pages(vec![(rank, rows)]);
        self.start(chosen, now, batch)
    }

    fn start(&mut self, chosen: Vec<(Rank, usize)>, now: Duration, batch: &mut Batch) -> Option<Plan> {
        if chosen.is_empty() {
            return None;
        }
        self.stats.steps += 1;
        self.in_flight = Some(self.stats.steps);
        Some(self.fill(&chosen, now, batch))
    }

    fn fill(&mut self, chosen: &[(Rank, usize)], now: Duration, batch: &mut Batch) -> Plan {
        batch.clear();
        let mut entries = Vec::with_capacity(chosen.len());
        for (rank, rows) in chosen {
            let sequence = self.running.get_mut(rank).expect("only those that run are chosen");
            let (first_row, cursor) = (batch.tokens.len(), sequence.cursor());
            sequence.push_rows(&self.config, batch, *rows);
            let tables = self.pool.push_tables(&sequence.pages, batch, cursor, *rows);
            batch.spans.push(RowSpan { first_row, rows: *rows, tables });
            let end = first_row + rows;
            let first_head = batch.heads.len();
            let scored = (cursor..cursor + rows).filter(|row| sequence.scores(*row));
            batch.heads.extend(scored.map(|row| (first_row + row - cursor) as i32));
            let scores = first_head..batch.heads.len();
            let head = (*rows == sequence.pending() && sequence.answers()).then(|| {
                batch.heads.push(end as i32 - 1);
                batch.heads.len() - 1
            });
            sequence.last_step = self.stats.steps;
            self.stats.rows += *rows as u64;
            self.stats.recomputed_rows += sequence.recomputed(*rows) as u64;
            let positions = cursor..cursor + rows;
            entries.push(PlanEntry { id: sequence.id, rows: first_row..end, positions, head, scores });
        }
        Plan { serial: self.stats.steps, planned_at: now, entries }
    }

    /// Takes what the batch of `plan` gave, one for each of [`Plan::heads`]. The time since it was planned tells
    /// how fast the device is.
    ///
    /// # Errors
    /// `StalePlan` for a plan that is not in flight, `Length`; nothing has changed then.
    pub fn apply(
        &mut self,
        plan: &Plan,
        produced: &[Produced],
        now: Duration,
    ) -> Result<Vec<SchedulerEvent>> {
        self.must_fly(plan)?;
        let heads = plan.heads().count();
        if produced.len() != heads {
            return Err(Error::Length { what: "produced tokens", expected: heads, found: produced.len() });
        }
        self.in_flight = None;
        let rows = plan.entries.iter().map(|e| e.rows.len()).sum();
        let took = now.saturating_sub(plan.planned_at);
        self.pace.observe(rows, took);
        if heads == rows {
            self.pace.observe_streams(rows, took);
        }
        let mut events = Vec::new();
        let mut produced = produced.iter();
        for entry in &plan.entries {
            let produced = entry.head.and_then(|_| produced.next());
            // Cancelled in the meantime.
            let Some(rank) = self.ranks.get(&entry.id) else { continue };
            let sequence =
                self.running.get_mut(rank).expect("nobody is pre-empted while a plan is in flight");
            sequence.advance(entry.positions.end);
            if let Some(tree) = &mut self.prefix {
                reuse::keep_wanted(tree, &mut self.pool, sequence);
            }
            self.pool.release_behind(&mut sequence.pages, entry.positions.end);
            let ended = match produced {
                None if sequence.answers() || sequence.cursor() < sequence.known() => None,
                None => Some(EndReason::Done(FinishReason::Length)),
                Some(&Produced::Token(token)) if check_token(&self.config, token).is_ok() => {
                    let ended = sequence.answer(token, now, self.options.context);
                    if !matches!(ended, Some(FinishReason::Stop(_))) {
                        events.push(SchedulerEvent::Token { id: entry.id, token });
                    }
                    ended.map(EndReason::Done)
                }
                Some(Produced::Token(_) | Produced::Failed) => {
                    Some(EndReason::Failed { position: entry.positions.end - 1 })
                }
            };
            events.extend(ended.and_then(|reason| self.end(entry.id, reason)));
        }
        Ok(events)
    }

    /// Says that the batch of `plan` did not run to its end. No sequence has moved: the next plan feeds the
    /// same rows again. A caller that knows whose fault it was cancels that request first.
    ///
    /// # Errors
    /// `StalePlan`.
    pub fn abandon(&mut self, plan: &Plan) -> Result<()> {
        self.must_fly(plan)?;
        self.in_flight = None;
        Ok(())
    }

    fn must_fly(&self, plan: &Plan) -> Result<()> {
        match self.in_flight {
            Some(serial) if serial == plan.serial => Ok(()),
            other => Err(Error::StalePlan { expected: other.unwrap_or(0), found: plan.serial }),
        }
    }

    /// Whether no request is left.
    pub fn is_idle(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Counts so far.
    pub fn stats(&self) -> SchedulerStats {
        let prefix = self.prefix.as_ref().map(PrefixTree::stats).unwrap_or_default();
        SchedulerStats { waiting: self.waiting.len(), running: self.running.len(), prefix, ..self.stats }
    }

    /// The pages.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Proves that every page is free or held by a running request, and that every request is in one place.
    ///
    /// # Errors
    /// What is wrong, in words; that is a bug here.
    pub fn check(&self) -> Result<(), String> {
        let pins = self.prefix.as_ref().map(PrefixTree::pins).unwrap_or_default();
        self.pool.check(self.running.values().map(|s| &s.pages), &pins)?;
        self.prefix.as_ref().map_or(Ok(()), |tree| tree.check(&self.pool))?;
        let places = self.running.iter().chain(&self.waiting);
        let placed = places.filter(|(rank, s)| self.ranks.get(&s.id) == Some(rank)).count();
        let (all, noted) = (self.running.len() + self.waiting.len(), self.ranks.len());
        if placed != all || all != noted {
            return Err(format!("{all} sequences, {placed} of them where they are noted, {noted} noted"));
        }
        match self
            .waiting
            .values()
            .find(|s| s.cursor() != 0 || Group::ALL.iter().any(|&g| s.pages.held(g) > 0))
        {
            Some(s) => Err(format!("request {} waits and holds pages", s.id.0)),
            None => Ok(()),
        }
    }

    fn end(&mut self, id: RequestId, reason: EndReason) -> Option<SchedulerEvent> {
        let rank = self.ranks.remove(&id)?;
        let sequence = self.running.remove(&rank).or_else(|| self.waiting.remove(&rank));
        let mut sequence = sequence.expect("a rank that is noted is in one of the two");
        match reason {
            EndReason::Done(_) | EndReason::Cancelled => {
                self.keep_end(&mut sequence);
                self.leave(&sequence);
            }
            EndReason::Failed { .. } => self.forget(&sequence),
        }
        self.pool.free(sequence.pages);
        Some(SchedulerEvent::Finished { id, reason })
    }
}
