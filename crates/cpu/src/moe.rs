//! Routing and experts.
//!
//! Rows are grouped by expert, so a chosen expert's weights are read once a pass and an expert that nobody
//! chose is not touched. Every choice's output is kept apart until all are there and summed in router order, so
//! grouping changes no bit. Non-finite router logits give valid experts and non-finite weights.

use std::ops::Range;

use lapidary_ops::{Act, ExpertSpec, RouteSpec};

use crate::ahead::Division;
use crate::buffers::Buffer;
use crate::int8::PAIR;
use crate::int8::activations::{BLOCK, QuantRows, quantise_at, row_bytes};
use crate::level::{Isa, for_level};
use crate::linear::f32::RowsView;
use crate::linear::{Inputs, TILE, X_BLOCK, tile_values};
use crate::math;
use crate::matrix::Matrix;
use crate::memory::Grow;
use crate::ops::{CpuOps, FEW_ROWS, Scope};
use crate::pass::Workspace;

impl CpuOps<'_> {
    /// `out[r] = [ids, weights]`.
    pub(crate) fn choose_experts(&mut self, out: Act, logits: Act, spec: &RouteSpec) {
        self.enter(Scope::Rows);
        let (out, logits) = (self.act(out), self.act(logits));
        let (n, k) = (spec.experts, spec.top_k);
        let scale = self.pass.gain(spec.per_expert_scale);
        assert!(
            logits.width() == n && out.width() == 2 * k && k <= n && scale.len() == n,
            "routes of {}",
            logits.spec.name
        );
        for r in self.own_rows() {
            // SAFETY: the row is this worker's, and the buffers differ in width.
            let (to, z) = unsafe { (out.row_mut(r), logits.row(r)) };
            let p = self.scratch.results.get(n);
            softmax(z, p);
            let (ids, weights) = to.split_at_mut(k);
            let mut sum = 0.0;
            for i in 0..k {
                let taken = |e: usize| ids[..i].iter().any(|&id| id as usize == e);
                let mut best: Option<usize> = None;
                for e in (0..n).filter(|&e| !taken(e)) {
                    if best.is_none_or(|b| p[e] > p[b] || (p[b].is_nan() && !p[e].is_nan())) {
                        best = Some(e);
                    }
                }
                let best = best.expect("there are at least top_k experts");
                ids[i] = best as f32;
                weights[i] = p[best];
                sum += p[best];
            }
            for (w, &id) in weights.iter_mut().zip(&*ids) {
                *w = *w / sum * scale[id as usize];
            }
        }
    }

    /// `out = sum_k weight_k * Down_k(f(Gate_k x) * (Up_k x))`.
    pub(crate) fn run_experts(&mut self, out: Act, x: Act, routes: Act, spec: &ExpertSpec) {
        self.enter(Scope::Shared);
        let (out, x, routes) = (self.act(out), self.act(x), self.act(routes));
        let (gate_up, down) = (self.pass.mat(spec.gate_up), self.pass.mat(spec.down));
        let (hidden, width, k) = (out.width(), spec.width, spec.top_k);
        assert!(
            x.width() == hidden
                && routes.width() == 2 * k
                && (gate_up.rows, gate_up.cols) == (spec.experts * 2 * width, hidden)
                && (down.rows, down.cols) == (spec.experts * hidden, width),
            "experts into {}",
            out.spec.name
        );
        let mut plan = Plan {
            by_expert: std::mem::take(&mut self.scratch.by_expert),
            experts: std::mem::take(&mut self.scratch.experts),
        };
        plan.group(routes, self.rows, spec);
        self.begin_product(spec.gate_up, Division::Chosen);
        if self.worker == 0 {
            // The system reads ahead while workers multiply with what it has already.
            for &(expert, ..) in plan.experts.iter().take(WANTED) {
                gate_up.want(expert * 2 * width, 2 * width);
            }
            for &(expert, ..) in plan.experts.iter().take(WANTED) {
                down.want(expert * hidden, hidden);
            }
        }
        let choices = Choices::new(self.pass.workspace, width, hidden, self.rows * k, x);
        self.need_workspace(choices.floats());
        self.gate_and_up(x, gate_up, spec, &plan, choices);
        self.meet();
        self.down(down, spec, &plan, choices);
        self.end_product(spec.gate_up);
        self.meet();
        for r in self.own_rows() {
            // SAFETY: the row is this worker's; writes to the routes and the workspace have ended.
            let (to, weights) = unsafe { (out.row_mut(r), &routes.row(r)[k..]) };
            to.fill(0.0);
            for (i, &weight) in weights.iter().enumerate() {
                // SAFETY: as above.
                add_weighted(self.isa(), to, weight, unsafe { choices.output(r * k + i, 0, hidden) });
            }
        }
        self.scratch.by_expert = plan.by_expert;
        self.scratch.experts = plan.experts;
    }

    fn gate_and_up(
        &mut self,
        x: &Buffer,
        gate_up: &Matrix,
        spec: &ExpertSpec,
        plan: &Plan,
        choices: Choices<'_>,
    ) {
        let (isa, width, k) = (self.isa(), spec.width, spec.top_k);
        // SAFETY: nobody writes x during this verb.
        let row_of = |choice: usize| unsafe { Inputs::of(x, choice / k, 1) };
        let floats = !(x.has_blocks() && gate_up.is_packed() && width.is_multiple_of(TILE));
        let units = Units::new(plan, width, self.workers());
        while let Some(claim) = self.claim(0, 1, units.count()) {
            for unit in claim {
                let (expert, picked, columns) = units.unit(plan, unit);
                let scratch = &mut *self.scratch;
                let gate = expert * 2 * width;
                for block in picked.chunks(X_BLOCK) {
                    let inputs = scratch.gathered.take(block, floats, row_of);
                    let inputs = inputs.rounded(isa, gate_up, &mut scratch.halves);
                    // Few rows wait for memory, so all the unit's gate rows pass before its up rows, each one stream of memory,
                    // and those before anything is made of them.
                    let n = block.len();
                    let run = if n <= FEW_ROWS { columns.len().max(1) } else { BLOCK };
                    for first in columns.clone().step_by(run) {
                        let cols = first..columns.end.min(first + run);
                        let gates = scratch.results.get(cols.len().div_ceil(BLOCK) * n * PAIR);
                        let ups = scratch.results2.get(gates.len());
                        let decoded = &mut scratch.tile;
                        let rows = |col: usize| BLOCK.min(cols.end - col);
                        for (first, values) in [(gate, &mut *gates), (gate + width, &mut *ups)] {
                            for (col, values) in cols.clone().step_by(BLOCK).zip(values.chunks_mut(n * PAIR))
                            {
                                expert_rows(isa, gate_up, first + col, rows(col), inputs, decoded, values);
                            }
                        }
                        let results = gates.chunks(n * PAIR).zip(ups.chunks(n * PAIR));
                        for (col, (gates, ups)) in cols.clone().step_by(BLOCK).zip(results) {
                            let rows = rows(col);
                            let results = gates.chunks(PAIR).zip(ups.chunks(PAIR));
                            for (&(_, choice), (g, u)) in block.iter().zip(results) {
                                // SAFETY: these values of the choice belong to the claimed unit.
                                let to = unsafe { choices.hidden(choice, col, rows) };
                                math::gate(isa, spec.activation, &g[..rows], &u[..rows], to);
                                // SAFETY: as above.
                                unsafe { choices.quantise(isa, choice, col, rows) }
                            }
                        }
                    }
                }
            }
        }
    }

    fn down(&mut self, down: &Matrix, spec: &ExpertSpec, plan: &Plan, choices: Choices<'_>) {
        let (isa, hidden) = (self.isa(), choices.outputs);
        // SAFETY: the meeting before ended all writes to the hidden values.
        let row_of = |choice: usize| unsafe { choices.inputs(choice) };
        let floats = !(choices.blocks_stride > 0 && down.is_packed() && hidden.is_multiple_of(TILE));
        let units = Units::new(plan, hidden, self.workers());
        debug_assert_eq!(down.rows, spec.experts * hidden);
        while let Some(claim) = self.claim(0, 1, units.count()) {
            for unit in claim {
                let (expert, picked, columns) = units.unit(plan, unit);
                let scratch = &mut *self.scratch;
                for block in picked.chunks(X_BLOCK) {
                    let inputs = scratch.gathered.take(block, floats, row_of);
                    let inputs = inputs.rounded(isa, down, &mut scratch.halves);
                    for first in columns.clone().step_by(PAIR) {
                        let rows = PAIR.min(columns.end - first);
                        let results = scratch.results.get(X_BLOCK * PAIR);
                        let decoded = &mut scratch.tile;
                        expert_rows(isa, down, expert * hidden + first, rows, inputs, decoded, results);
                        for (&(_, choice), y) in block.iter().zip(results.chunks(PAIR)) {
                            // SAFETY: these outputs of the choice belong to the claimed unit.
                            unsafe { choices.output(choice, first, rows) }.copy_from_slice(&y[..rows]);
                        }
                    }
                }
            }
        }
    }
}

/// Where the intermediate values of the choices (`row * top_k + place`) lie in the workspace.
#[derive(Clone, Copy, Debug)]
struct Choices<'a> {
    workspace: &'a Workspace,
    width: usize,
    outputs: usize,
    count: usize,
    /// Floats of a choice's hidden values, rounded up.
    hidden_stride: usize,
    /// Floats that a choice's hidden values in int8 blocks take; 0 where there are none.
    blocks_stride: usize,
    /// Whether products may round hidden values.
    rounds: bool,
}

impl<'a> Choices<'a> {
    fn new(workspace: &'a Workspace, width: usize, outputs: usize, count: usize, x: &Buffer) -> Self {
        let blocks_stride = if x.has_blocks() { row_bytes(width) / size_of::<f32>() } else { 0 };
        let hidden_stride = width.next_multiple_of(16);
        let rounds = x.rounds();
        Choices { workspace, width, outputs, count, hidden_stride, blocks_stride, rounds }
    }

    /// Floats of the workspace that are used: hidden values, their int8 blocks, outputs.
    fn floats(&self) -> usize {
        self.count * (self.hidden_stride + self.blocks_stride + self.outputs)
    }

    /// # Safety
    /// As for [`Workspace::part`].
    unsafe fn hidden(&self, choice: usize, col: usize, len: usize) -> &'a mut [f32] {
        assert!(choice < self.count && col + len <= self.width);
        // SAFETY: the caller's.
        unsafe { self.workspace.part(choice * self.hidden_stride + col, len) }
    }

    /// # Safety
    /// As for [`Workspace::part`].
    unsafe fn output(&self, choice: usize, col: usize, len: usize) -> &'a mut [f32] {
        assert!(choice < self.count && col + len <= self.outputs);
        let before = self.count * (self.hidden_stride + self.blocks_stride);
        // SAFETY: the caller's.
        unsafe { self.workspace.part(before + choice * self.outputs + col, len) }
    }

    fn blocks_at(&self, choice: usize) -> usize {
        assert!(choice < self.count);
        self.count * self.hidden_stride + choice * self.blocks_stride
    }

    /// Quantises hidden values `col .. col + len`, if they are kept so.
    ///
    /// # Safety
    /// Nobody else uses them meanwhile.
    unsafe fn quantise(&self, isa: Isa, choice: usize, col: usize, len: usize) {
        if self.blocks_stride > 0 {
            // SAFETY: the caller's; other workers may use other columns, so no reference to the row is made.
            unsafe {
                let x = &*self.hidden(choice, col, len);
                let row = self.workspace.pointer(self.blocks_at(choice), self.blocks_stride).cast::<u8>();
                quantise_at(isa, row, self.width, col, x);
            }
        }
    }

    /// # Safety
    /// Nobody writes the choice's hidden values while the inputs live.
    unsafe fn inputs(&self, choice: usize) -> Inputs<'a> {
        // SAFETY: the caller's.
        unsafe {
            let values = &*self.hidden(choice, 0, self.width);
            let floats = RowsView { values, stride: self.hidden_stride, count: 1 };
            let blocks = (self.blocks_stride > 0).then(|| {
                let part = &*self.workspace.part(self.blocks_at(choice), self.blocks_stride);
                let (bytes, width) = (bytes_of(part), self.width);
                QuantRows { bytes, stride: bytes.len(), count: 1, width }
            });
            Inputs { floats, blocks, rounds: self.rounds, halves: None }
        }
    }
}

fn bytes_of(floats: &[f32]) -> &[u8] {
    // SAFETY: every float is four initialised bytes.
    unsafe { std::slice::from_raw_parts(floats.as_ptr().cast(), size_of_val(floats)) }
}

/// The columns of the experts in use, cut into units that workers claim. A unit has whole blocks, so that its
/// worker can quantise what it made.
#[derive(Clone, Copy, Debug)]
struct Units {
    columns: usize,
    columns_per_unit: usize,
    per_expert: usize,
    experts: usize,
}

impl Units {
    fn new(plan: &Plan, columns: usize, workers: usize) -> Units {
        let experts = plan.experts.len();
        let blocks = columns.div_ceil(BLOCK);
        let blocks_per_unit = (experts * blocks / (workers * UNITS_PER_WORKER)).clamp(1, blocks);
        let columns_per_unit = blocks_per_unit * BLOCK;
        Units { columns, columns_per_unit, per_expert: columns.div_ceil(columns_per_unit), experts }
    }

    fn count(&self) -> usize {
        self.experts * self.per_expert
    }

    /// Expert, its choices and the columns of a unit.
    fn unit<'p>(&self, plan: &'p Plan, unit: usize) -> (usize, &'p [(usize, usize)], Range<usize>) {
        let (expert, from, count) = plan.experts[unit / self.per_expert];
        let first = unit % self.per_expert * self.columns_per_unit;
        let end = self.columns.min(first + self.columns_per_unit);
        (expert, &plan.by_expert[from..from + count], first..end)
    }
}

/// Experts of a pass whose weights are asked for ahead, where they are paged: a prompt's many would push each other out.
const WANTED: usize = 64;

/// Units that each worker claims of one matrix of experts, about.
const UNITS_PER_WORKER: usize = 12;

/// Which choices go to which expert.
#[derive(Debug)]
struct Plan {
    /// Expert and choice (`row * top_k + place`), ordered.
    by_expert: Vec<(usize, usize)>,
    /// Experts in use: expert, first entry above, number of entries.
    experts: Vec<(usize, usize, usize)>,
}

impl Plan {
    fn group(&mut self, routes: &Buffer, rows: usize, spec: &ExpertSpec) {
        self.by_expert.clear();
        self.experts.clear();
        for r in 0..rows {
            // SAFETY: the meeting before this verb ended all writes to the routes.
            for (i, &id) in unsafe { &routes.row(r)[..spec.top_k] }.iter().enumerate() {
                let expert = id as usize;
                assert!(expert < spec.experts, "expert {id} of {}", spec.experts);
                self.by_expert.push((expert, r * spec.top_k + i));
            }
        }
        self.by_expert.sort_unstable();
        for (i, &(expert, _)) in self.by_expert.iter().enumerate() {
            match self.experts.last_mut() {
                Some((last, _, n)) if *last == expert => *n += 1,
                _ => self.experts.push((expert, i, 1)),
            }
        }
    }
}

/// [`tile_values`] of rows of a stacked matrix that lie in one part.
fn expert_rows(
    isa: Isa,
    matrix: &Matrix,
    first: usize,
    rows: usize,
    x: Inputs<'_>,
    decoded: &mut Grow,
    out: &mut [f32],
) {
    let part = matrix.part_of(first);
    let first = first - part.first_row;
    assert!(first + rows <= part.weights.rows(), "an expert's gate, up and down each lie in one part");
    tile_values(isa, &part.weights, first, rows, x, decoded, out);
}

/// Rows gathered to stand side by side.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    floats: Grow,
    blocks: Grow,
}

impl Gathered {
    /// The rows of the choices in `block`, as float32 only where `floats` are read; a single one stays where it
    /// is.
    fn take<'s, 'x: 's>(
        &'s mut self,
        block: &[(usize, usize)],
        floats: bool,
        row: impl Fn(usize) -> Inputs<'x>,
    ) -> Inputs<'s> {
        let first = row(block[0].1);
        if block.len() == 1 {
            return first;
        }
        let count = block.len();
        let (stride, width) = if floats { (first.floats.stride, first.floats.values.len()) } else { (0, 0) };
        let floats = self.floats.get(count * stride);
        let block_floats = first.blocks.map_or(0, |b| b.stride / size_of::<f32>());
        let blocks = self.blocks.get(count * block_floats);
        for (i, &(_, choice)) in block.iter().enumerate() {
            let from = row(choice);
            floats[i * stride..][..width].copy_from_slice(&from.floats.values[..width]);
            if let Some(from) = from.blocks {
                // SAFETY: every four bytes are a float32, and rows of int8 blocks start on 16 bytes.
                let (_, from, _) = unsafe { from.bytes.align_to::<f32>() };
                blocks[i * block_floats..][..block_floats].copy_from_slice(from);
            }
        }
        let blocks = first.blocks.map(|b| QuantRows { bytes: bytes_of(blocks), count, ..b });
        Inputs { floats: RowsView { values: floats, stride, count }, blocks, ..first }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.floats.bytes() + self.blocks.bytes()
    }
}

for_level! {
    /// `to = to + weight * y`.
    pub fn add_weighted(to: &mut [f32], weight: f32, y: &[f32]) {
        for (o, &v) in to.iter_mut().zip(y) {
            *o += weight * v;
        }
    }
}

fn softmax(z: &[f32], p: &mut [f32]) {
    let max = z.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
    let mut sum = 0.0;
    for (p, &z) in p.iter_mut().zip(z) {
        *p = math::exp(z - max);
        sum += *p;
    }
    p.iter_mut().for_each(|p| *p /= sum);
}
