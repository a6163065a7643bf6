//! One step as plain data: columns of integers that a person can print and check.

use crate::backend::Tap;
use crate::draw::Draw;
use crate::kv::{GROUPS, KvPlan, PAGE_TOKENS};
use crate::ops::TapPoint;

/// Everything that changes from step to step.
///
/// One row is one token (or soft token) of one sequence. Rows of a sequence are consecutive, in order of
/// position. Keys and values of all rows are written before any row attends, layer by layer.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Token id of each row (the pad id at soft rows).
    pub tokens: Vec<i32>,
    /// Id for the per-layer table of each row (the pad id at soft rows).
    pub per_layer_tokens: Vec<i32>,
    /// Absolute position of each row.
    pub positions: Vec<i32>,
    /// The sequences, covering all rows in order.
    pub spans: Vec<RowSpan>,
    /// By group and row: last visible key + 1. `position + 1` when causal, the end of the vision block on
    /// layers where such blocks are bidirectional.
    pub visible_to: [Vec<i32>; GROUPS],
    /// By group: page numbers, the sequences' tables one after the other.
    pub pages: [Vec<i32>; GROUPS],
    /// Rows whose embedding is given rather than looked up.
    pub soft_rows: Vec<i32>,
    /// The given embeddings, one row of the model's width for each of `soft_rows`.
    pub soft_values: Vec<f32>,
    /// Rows whose logits are wanted, ascending.
    pub heads: Vec<i32>,
    /// For each of `heads` how the device draws its token, `None` for one that takes the token of the largest logit;
    /// empty when all do. Only for a backend that [draws](crate::Backend::draws).
    pub draws: Vec<Option<Draw>>,
    /// What the pass copies out beside the logits.
    pub taps: TapSet,
    /// For each row the head row of the pass before whose chosen token is this row's, or -1 for a row whose token stands
    /// in `tokens`; empty when every token does. Rows that follow have any valid id there. Only for a backend that
    /// [follows](crate::Backend::follows).
    pub follows: Vec<i32>,
    /// The steering set of each row, -1 for none; empty when no row is steered. Sets are given to the device with
    /// [`Backend::steer_set`](crate::Backend::steer_set).
    pub steer: Vec<i32>,
}

/// The rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSpan {
    /// First row in the batch.
    pub first_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// By group: where the sequence's pages stand.
    pub tables: [PageTable; GROUPS],
}

/// A sequence's part of [`Batch::pages`]: entry `b` holds positions
/// `(first_block + b) * PAGE_TOKENS ..` of the sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageTable {
    /// First entry in [`Batch::pages`].
    pub start: usize,
    /// Number of entries.
    pub count: usize,
    /// Which block of `PAGE_TOKENS` positions the first entry holds; not 0 once a window has moved on.
    pub first_block: usize,
}

/// Which [`TapPoint`]s the pass copies out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TapSet {
    /// The points, in no particular order; those that a pass never reaches stay empty.
    pub points: Vec<TapPoint>,
}

impl TapSet {
    /// Whether `point` is wanted.
    pub fn wants(&self, point: TapPoint) -> bool {
        self.points.contains(&point)
    }
}

/// For which rows the layers after the last KV write run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TailRows {
    /// Only those whose logits are wanted: exact, and cheaper.
    Heads,
    /// All: for captures of tail layers.
    All,
}

/// The shape of a batch: everything that a pass may branch on, and the key of a recorded pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BatchShape {
    /// Rows.
    pub rows: usize,
    /// Rows whose logits are wanted.
    pub head_rows: usize,
    /// Rows of the tail.
    pub tail: TailRows,
    /// Whether any row is soft.
    pub has_soft: bool,
    /// Layers to run, all of them but for debugging: `first .. end`.
    pub layers: (usize, usize),
    /// Whether the pass copies anything out beside the logits.
    pub has_taps: bool,
    /// Whether any row is steered.
    pub steered: bool,
    /// Whether the device draws any token.
    pub drawn: bool,
}

/// What is wrong with a batch. A caller that plans batches itself has a bug when it sees one.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum BatchError {
    #[error("batch column {column} has {found} entries for {rows} rows")]
    Length { column: &'static str, found: usize, rows: usize },
    #[error("batch has no rows")]
    Empty,
    #[error("row {row} of the batch is outside every sequence or in two")]
    Spans { row: usize },
    #[error("row {row} holds token {token}, the vocabulary has {vocab}")]
    Token { row: usize, token: i32, vocab: usize },
    #[error("row {row} at position {position} has no page for position {missing} in the {group} group")]
    Page { row: usize, position: i32, missing: i32, group: &'static str },
    #[error("page {page} is outside the {group} group's pool of {pages}")]
    PageRange { page: i32, pages: usize, group: &'static str },
    #[error("head row {row} is outside the batch or out of order")]
    Head { row: i32 },
    #[error("what head row {head} is to be drawn by is out of range")]
    Draw { head: usize },
    #[error("soft row {row} is outside the batch or its values are missing or not finite")]
    Soft { row: i32 },
    #[error("row {row} follows head row {follows} of the pass before, which chose {chosen} tokens")]
    Follows { row: usize, follows: i32, chosen: usize },
    #[error("row {row} asks for steering set {set}, which the device does not hold")]
    Steer { row: usize, set: i32 },
}

impl Batch {
    /// Clears every column and keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.per_layer_tokens.clear();
        self.positions.clear();
        self.spans.clear();
        self.visible_to.iter_mut().for_each(Vec::clear);
        self.pages.iter_mut().for_each(Vec::clear);
        self.soft_rows.clear();
        self.soft_values.clear();
        self.heads.clear();
        self.draws.clear();
        self.taps.points.clear();
        self.follows.clear();
        self.steer.clear();
    }

    /// The shape for a pass over all `layers` layers of a model.
    pub fn shape(&self, layers: usize, tail: TailRows) -> BatchShape {
        BatchShape {
            rows: self.tokens.len(),
            head_rows: self.heads.len(),
            tail,
            has_soft: !self.soft_rows.is_empty(),
            layers: (0, layers),
            has_taps: !self.taps.points.is_empty(),
            steered: self.steer.iter().any(|&set| set >= 0),
            drawn: self.draws.iter().any(Option::is_some),
        }
    }

    /// Checks that every index in the batch is one that a kernel may follow: the safety condition of
    /// [`Backend::upload`](crate::Backend::upload).
    ///
    /// `width` is that of an embedding; `vocab` and `per_layer_vocab` bound the ids.
    pub fn check(
        &self,
        plan: &KvPlan,
        width: usize,
        vocab: usize,
        per_layer_vocab: usize,
    ) -> Result<(), BatchError> {
        let rows = self.tokens.len();
        if rows == 0 {
            return Err(BatchError::Empty);
        }
        for (column, found) in [
            ("per_layer_tokens", self.per_layer_tokens.len()),
            ("positions", self.positions.len()),
            ("visible_to sliding", self.visible_to[0].len()),
            ("visible_to full", self.visible_to[1].len()),
        ] {
            if found != rows {
                return Err(BatchError::Length { column, found, rows });
            }
        }
        for (ids, vocab) in [(&self.tokens, vocab), (&self.per_layer_tokens, per_layer_vocab)] {
            for (row, &token) in ids.iter().enumerate() {
                if token < 0 || token as usize >= vocab {
                    return Err(BatchError::Token { row, token, vocab });
                }
            }
        }
        for (g, group) in plan.groups.iter().enumerate() {
            for &page in &self.pages[g] {
                if page < 0 || page as usize >= group.pages {
                    return Err(BatchError::PageRange { page, pages: group.pages, group: GROUP_NAMES[g] });
                }
            }
        }
        if !self.steer.is_empty() && self.steer.len() != rows {
            return Err(BatchError::Length { column: "steer", found: self.steer.len(), rows });
        }
        if !self.follows.is_empty() && self.follows.len() != rows {
            return Err(BatchError::Length { column: "follows", found: self.follows.len(), rows });
        }
        let mut next = 0;
        for span in &self.spans {
            if span.first_row != next || span.rows == 0 || span.rows > rows - next {
                return Err(BatchError::Spans { row: next });
            }
            next += span.rows;
            for row in span.first_row..next {
                self.check_row(plan, span, row)?;
            }
        }
        if next != rows {
            return Err(BatchError::Spans { row: next });
        }
        let mut last = -1;
        for &row in &self.heads {
            if row <= last || row as usize >= rows {
                return Err(BatchError::Head { row });
            }
            last = row;
        }
        if !self.draws.is_empty() && self.draws.len() != self.heads.len() {
            let (found, rows) = (self.draws.len(), self.heads.len());
            return Err(BatchError::Length { column: "draws", found, rows });
        }
        if let Some(head) = self.draws.iter().position(|d| d.is_some_and(|d| !d.is_valid())) {
            return Err(BatchError::Draw { head });
        }
        for (i, &row) in self.soft_rows.iter().enumerate() {
            let values = self.soft_values.get(i * width..(i + 1) * width);
            let finite = values.is_some_and(|v| v.iter().all(|x| x.is_finite()));
            if row < 0 || row as usize >= rows || !finite {
                return Err(BatchError::Soft { row });
            }
        }
        Ok(())
    }

    /// Checks that every steering set that a row asks for is one of `held`, by index.
    ///
    /// # Errors
    /// `Steer` for the first row that asks for another.
    pub fn check_steer(&self, held: &dyn Fn(usize) -> bool) -> Result<(), BatchError> {
        for (row, &set) in self.steer.iter().enumerate() {
            if set < -1 || (set >= 0 && !held(set as usize)) {
                return Err(BatchError::Steer { row, set });
            }
        }
        Ok(())
    }

    /// Checks that rows follow head rows of a pass that chose `chosen` tokens.
    ///
    /// # Errors
    /// `Follows` for the first row that follows another.
    pub fn check_follows(&self, chosen: usize) -> Result<(), BatchError> {
        match self.follows.iter().position(|&f| f < -1 || f >= chosen as i32) {
            None => Ok(()),
            Some(row) => Err(BatchError::Follows { row, follows: self.follows[row], chosen }),
        }
    }

    /// The row of the batch that row `row` of a capture is: a capture taken after the tail was cut holds head rows
    /// only.
    pub fn row_of(&self, tap: &Tap, row: usize) -> usize {
        if tap.rows == self.tokens.len() { row } else { self.heads[row] as usize }
    }

    fn check_row(&self, plan: &KvPlan, span: &RowSpan, row: usize) -> Result<(), BatchError> {
        let position = self.positions[row];
        for (g, group) in plan.groups.iter().enumerate() {
            if group.layers.is_empty() {
                continue;
            }
            let table = span.tables[g];
            let window = group.window.map_or(i32::MAX, |w| i32::try_from(w).unwrap_or(i32::MAX));
            let from = position.saturating_sub(window - 1).max(0);
            let to = self.visible_to[g][row];
            let missing = |p: i32| BatchError::Page { row, position, missing: p, group: GROUP_NAMES[g] };
            if table.start + table.count > self.pages[g].len() || position < 0 || to <= position {
                return Err(missing(position));
            }
            // The first and last visible key and the row's own cell; tables have no holes in between.
            for p in [from, position, to - 1] {
                let block = p as usize / PAGE_TOKENS;
                if block < table.first_block || block - table.first_block >= table.count {
                    return Err(missing(p));
                }
            }
        }
        Ok(())
    }
}

const GROUP_NAMES: [&str; GROUPS] = ["sliding", "full"];
