//! Routing and experts.
//!
//! Rows are grouped by expert, so a chosen expert's weights are read once a pass and an expert that nobody
//! chose is not touched. Every choice's output is kept apart until all are there and summed in router order, so
//! grouping changes no bit. Non-finite router logits give valid experts and non-finite weights.

use lapidary_ops::{Act, ExpertSpec, RouteSpec};

use crate::buffers::Buffer;
use crate::linear::f32::{RowsView, dots};
use crate::linear::{TILE, X_BLOCK, weight_tile};
use crate::math;
use crate::matrix::Matrix;
use crate::memory::Grow;
use crate::ops::{CpuOps, Scope};

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
        // The workspace holds each choice's hidden values, then each choice's outputs.
        let choices = self.rows * k;
        let outputs = choices * width;
        self.need_workspace(outputs + choices * hidden);
        self.gate_and_up(x, gate_up, spec, &plan);
        self.meet();
        self.down(down, spec, &plan, hidden, outputs);
        self.meet();
        for r in self.own_rows() {
            // SAFETY: the row is this worker's; writes to the routes and the workspace have ended.
            let (to, weights) = unsafe { (out.row_mut(r), &routes.row(r)[k..]) };
            to.fill(0.0);
            for (i, &weight) in weights.iter().enumerate() {
                // SAFETY: as above.
                let y = unsafe { self.pass.workspace.part(outputs + (r * k + i) * hidden, hidden) };
                for (o, &v) in to.iter_mut().zip(&*y) {
                    *o += weight * v;
                }
            }
        }
        self.scratch.by_expert = plan.by_expert;
        self.scratch.experts = plan.experts;
    }

    fn gate_and_up(&mut self, x: &Buffer, gate_up: &Matrix, spec: &ExpertSpec, plan: &Plan) {
        let (pass, isa, width, k) = (self.pass, self.isa(), spec.width, x.width());
        let tiles = width.div_ceil(TILE);
        while let Some(claim) = self.claim(0, 1, plan.experts.len() * tiles) {
            for unit in claim {
                let (expert, from, count) = plan.experts[unit / tiles];
                let first = unit % tiles * TILE;
                let rows = TILE.min(width - first);
                let scratch = &mut *self.scratch;
                let base = expert * 2 * width + first;
                let gate = rows_of(gate_up, base, rows, k, &mut scratch.tile);
                let up = rows_of(gate_up, base + width, rows, k, &mut scratch.tile2);
                let gates = scratch.results.get(X_BLOCK * TILE);
                let ups = scratch.results2.get(X_BLOCK * TILE);
                for block in plan.by_expert[from..from + count].chunks(X_BLOCK) {
                    let gathered = gather(&mut scratch.gathered, block, k, |choice| {
                        // SAFETY: nobody writes x during this verb.
                        unsafe { x.row(choice / spec.top_k) }
                    });
                    dots(isa, gathered, gate, k, gates, TILE);
                    dots(isa, gathered, up, k, ups, TILE);
                    let results = gates.chunks(TILE).zip(ups.chunks(TILE));
                    for (&(_, choice), (g, u)) in block.iter().zip(results) {
                        // SAFETY: these values of the choice belong to the claimed tile.
                        let to = unsafe { pass.workspace.part(choice * width + first, rows) };
                        math::gate(isa, spec.activation, &g[..rows], &u[..rows], to);
                    }
                }
            }
        }
    }

    fn down(&mut self, down: &Matrix, spec: &ExpertSpec, plan: &Plan, hidden: usize, outputs: usize) {
        let (pass, isa, width) = (self.pass, self.isa(), spec.width);
        let tiles = hidden.div_ceil(TILE);
        while let Some(claim) = self.claim(0, 1, plan.experts.len() * tiles) {
            for unit in claim {
                let (expert, from, count) = plan.experts[unit / tiles];
                let first = unit % tiles * TILE;
                let rows = TILE.min(hidden - first);
                let scratch = &mut *self.scratch;
                let w = rows_of(down, expert * hidden + first, rows, width, &mut scratch.tile);
                let results = scratch.results.get(X_BLOCK * TILE);
                for block in plan.by_expert[from..from + count].chunks(X_BLOCK) {
                    let gathered = gather(&mut scratch.gathered, block, width, |choice| {
                        // SAFETY: the meeting before ended all writes to the hidden values.
                        unsafe { &*pass.workspace.part(choice * width, width) }
                    });
                    dots(isa, gathered, w, width, results, TILE);
                    for (&(_, choice), y) in block.iter().zip(results.chunks(TILE)) {
                        // SAFETY: these outputs of the choice belong to the claimed tile.
                        unsafe { pass.workspace.part(outputs + choice * hidden + first, rows) }
                            .copy_from_slice(&y[..rows]);
                    }
                }
            }
        }
    }
}

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

/// Rows of a stacked matrix that lie in one part, as float32.
fn rows_of<'a>(matrix: &'a Matrix, first: usize, rows: usize, k: usize, tile: &'a mut Grow) -> RowsView<'a> {
    let part = matrix.part_of(first);
    let first = first - part.first_row;
    assert!(first + rows <= part.weights.rows(), "an expert's gate, up and down each lie in one part");
    weight_tile(&part.weights, first, rows, k, tile.get(TILE * k.next_multiple_of(16)))
}

fn gather<'s, 'x>(
    into: &'s mut Grow,
    block: &[(usize, usize)],
    k: usize,
    row: impl Fn(usize) -> &'x [f32],
) -> RowsView<'s> {
    let stride = k.next_multiple_of(16);
    let values = into.get(block.len() * stride);
    for (&(_, choice), to) in block.iter().zip(values.chunks_mut(stride)) {
        to[..k].copy_from_slice(row(choice));
    }
    RowsView { values, stride, count: block.len() }
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
