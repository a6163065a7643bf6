//! What all workers see of one pass, and the data of the batch prepared for following.

use std::cell::UnsafeCell;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use lapidary_ops::{
    Act, Batch, Error, GROUPS, Gain, Group, KvPlan, Mat, Outcome, PAGE_TOKENS, Phase, Result, SteerSet,
};

use crate::ahead::Followers;
use crate::attention::Sums;
use crate::buffers::Buffer;
use crate::kv::KvPools;
use crate::level::Isa;
use crate::matrix::Matrix;
use crate::memory::{Aligned, Grow};
use crate::moe::Gathered;
use crate::norm;
use crate::ops::Best;
use crate::team::{Sync as TeamSync, fail};

/// One pass, shared by the workers.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    pub isa: Isa,
    pub sync: &'a TeamSync,
    pub acts: &'a [Buffer],
    pub mats: &'a [Matrix],
    pub gains: &'a [Vec<f32>],
    pub followers: &'a Followers,
    pub kv: &'a KvPools,
    pub upload: &'a Upload,
    pub workspace: &'a Workspace,
    /// Size of the workspace when the pass began.
    pub workspace_floats: usize,
    pub outcome: Mutex<Outcome>,
    /// By worker: the best of its columns for each row of [`argmax`](lapidary_ops::Ops::argmax).
    pub best: Vec<Mutex<Vec<Best>>>,
    /// When the pass began, and the marks of worker 0 since then, where times are wanted.
    pub clock: Option<Clock>,
    /// The steering sets that the device holds.
    pub steer_sets: &'a [Option<SteerSet>],
    /// By worker: row of the batch, edit and projection of what was steered.
    pub projections: Vec<Mutex<Vec<(usize, usize, f32)>>>,
}

/// When a pass began, and its marks by their time since then.
pub(crate) type Clock = (Instant, Mutex<Vec<(Phase, Duration)>>);

impl<'a> Pass<'a> {
    pub fn act(&self, act: Act) -> &'a Buffer {
        &self.acts[act.0 as usize]
    }

    pub fn mat(&self, mat: Mat) -> &'a Matrix {
        &self.mats[mat.0 as usize]
    }

    pub fn gain(&self, gain: Gain) -> &'a [f32] {
        &self.gains[gain.0 as usize]
    }

    /// `x = rms(x; gain)` of one row or head.
    pub fn norm_in_place(&self, x: &mut [f32], gain: &[f32], eps: f32) {
        assert_eq!(x.len(), gain.len(), "a norm's gain is as wide as its row");
        let factor = norm::inv_rms(self.isa, x, 1.0, eps);
        norm::apply_in_place(self.isa, x, factor, gain);
    }
}

/// The uploaded batch.
#[derive(Debug, Default)]
pub(crate) struct Upload {
    /// The batch as given.
    pub batch: Batch,
    /// By row: index of its span.
    pub span_of: Vec<usize>,
    /// By group and row: whether the row writes its keys and values.
    pub writes: [Vec<bool>; GROUPS],
    cells: Vec<(usize, usize)>,
}

impl Upload {
    /// Takes over `batch`.
    ///
    /// # Errors
    /// `Batch` for indices that lead outside the pools, `Device` where two rows would write one cell.
    pub fn take(&mut self, batch: &Batch, plan: &KvPlan) -> Result<()> {
        // The vocabulary is the matrices' business: looking a row up checks its bounds. Pages are checked here
        // because kernels follow them.
        let width = batch.soft_values.len() / batch.soft_rows.len().max(1);
        batch.check(plan, width, i32::MAX as usize, i32::MAX as usize)?;
        let rows = batch.tokens.len();
        self.span_of.clear();
        for (i, span) in batch.spans.iter().enumerate() {
            self.span_of.resize(span.first_row + span.rows, i);
        }
        self.batch.clone_from(batch);
        for group in Group::ALL {
            let writes = &mut self.writes[group.index()];
            writes.clear();
            writes.resize(rows, true);
            if plan.groups[group.index()].layers.is_empty() {
                continue;
            }
            self.cells.clear();
            for row in 0..rows {
                let (page, in_page) = cell(&self.batch, self.span_of[row], group, self.batch.positions[row]);
                self.cells.push((page * PAGE_TOKENS + in_page, row));
            }
            self.cells.sort_unstable();
            for pair in self.cells.windows(2).filter(|p| p[0].0 == p[1].0) {
                let page = pair[0].0 / PAGE_TOKENS;
                if page != 0 {
                    let (a, b) = (pair[0].1, pair[1].1);
                    return Err(Error::Device(format!(
                        "rows {a} and {b} write the same cell of page {page}"
                    )));
                }
                // Page 0 is where padding goes; one of the padding rows may have the cell.
                writes[pair[1].1] = false;
            }
        }
        Ok(())
    }

    /// Page and place in it that hold `position` of row `row`'s sequence.
    pub fn cell(&self, row: usize, group: Group, position: i32) -> (usize, usize) {
        cell(&self.batch, self.span_of[row], group, position)
    }
}

fn cell(batch: &Batch, span: usize, group: Group, position: i32) -> (usize, usize) {
    let table = batch.spans[span].tables[group.index()];
    let block = position as usize / PAGE_TOKENS;
    assert!(
        block >= table.first_block && block - table.first_block < table.count,
        "no page for position {position}"
    );
    let page = batch.pages[group.index()][table.start + block - table.first_block];
    (page as usize, position as usize % PAGE_TOKENS)
}

/// Float32 memory that workers hand each other intermediate values in, grown on demand.
#[derive(Debug)]
pub(crate) struct Workspace(UnsafeCell<Aligned>);

// SAFETY: the allocation is replaced by worker 0 alone, between two meetings; in between, workers use the
// disjoint parts that their claims give them.
unsafe impl Sync for Workspace {}

impl Workspace {
    pub fn empty() -> Result<Workspace> {
        Ok(Workspace(UnsafeCell::new(Aligned::empty())))
    }

    /// Bytes held.
    ///
    /// # Safety
    /// No `grow` at the same time.
    pub unsafe fn bytes(&self) -> usize {
        // SAFETY: the caller's.
        unsafe { (*self.0.get()).len() }
    }

    /// Makes room for `floats` values; contents are lost. Fails the job where there is no memory.
    ///
    /// # Safety
    /// No other worker uses the workspace until the next meeting.
    pub unsafe fn grow(&self, floats: usize) {
        let grown = Aligned::zeroed(floats.saturating_mul(size_of::<f32>()), "intermediate values of a pass");
        // SAFETY: the caller's.
        unsafe { *self.0.get() = grown.unwrap_or_else(|error| fail(error)) }
    }

    /// Where values `from .. from + len` are.
    ///
    /// # Safety
    /// No `grow` at the same time.
    pub unsafe fn pointer(&self, from: usize, len: usize) -> *mut f32 {
        // SAFETY: bounds are asserted; the caller answers for `grow`.
        unsafe {
            let all = &*self.0.get();
            assert!((from + len) * size_of::<f32>() <= all.len(), "workspace is too small");
            all.start().cast::<f32>().add(from)
        }
    }

    /// Values `from .. from + len`.
    ///
    /// # Safety
    /// Nobody else writes them, or reads them if the caller writes, while the reference lives.
    #[allow(clippy::mut_from_ref, reason = "workers write disjoint parts")]
    pub unsafe fn part(&self, from: usize, len: usize) -> &mut [f32] {
        // SAFETY: `pointer` checks the bounds; the caller answers for other users.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(from, len), len) }
    }
}

/// A worker's own memory, kept from pass to pass.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Decoded weight rows.
    pub tile: Grow,
    /// A tile's outputs.
    pub results: Grow,
    /// Outputs of the second half.
    pub results2: Grow,
    /// Rows of x in bf16.
    pub halves: Grow,
    /// Gathered rows of x.
    pub gathered: Gathered,
    /// Everything of one unit of attention.
    pub attention: Grow,
    /// Running maximums and sums of one unit's segment, and of its segments before.
    pub sums: Vec<Sums>,
    pub totals: Vec<Sums>,
    /// Groups of rows that attend together: first row and number.
    pub groups: Vec<(usize, usize)>,
    /// Row and expert choices, ordered by expert.
    pub by_expert: Vec<(usize, usize)>,
    /// Experts in use: expert, first entry of `by_expert`, number.
    pub experts: Vec<(usize, usize, usize)>,
}

impl Scratch {
    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let floats = [&self.tile, &self.results, &self.results2, &self.halves, &self.attention];
        floats.iter().map(|g| g.bytes()).sum::<usize>()
            + self.gathered.bytes()
            + (self.sums.capacity() + self.totals.capacity()) * size_of::<Sums>()
            + self.groups.capacity() * size_of::<(usize, usize)>()
            + self.by_expert.capacity() * size_of::<(usize, usize)>()
            + self.experts.capacity() * size_of::<(usize, usize, usize)>()
    }
}
