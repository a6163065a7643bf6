//! The verbs, mapped to the files that carry them out, and the rule of when workers must meet.
//!
//! A verb either works row by row ([`Scope::Rows`]: every worker keeps to its own rows, the same ones in every
//! such verb) or shares rows out otherwise ([`Scope::Shared`]). Between two verbs of the first kind nothing
//! crosses workers and nobody waits; at every other border the team meets.

use std::cell::Cell;
use std::ops::Range;

use lapidary_ops::{
    Act, Activation, AttnSpec, ExpertSpec, Mat, Norm, Ops, PerLayerSpec, Phase, QkvSpec, RouteSpec, Tap,
    TapPoint,
};

use crate::buffers::Buffer;
use crate::level::{Isa, for_level};
use crate::math;
use crate::norm;
use crate::pass::{Pass, Scratch};

/// How a verb divides its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// By rows: each worker has [`CpuOps::own_rows`].
    Rows,
    /// In any other way.
    Shared,
}

/// Claims that each worker makes of one matrix, about: few enough to be cheap, many enough to even out.
const CLAIMS_PER_WORKER: usize = 12;
/// Rows of x up to which the time of a product is that of reading the weights.
pub(crate) const FEW_ROWS: usize = 4;

/// One worker's view of a pass.
#[derive(Debug)]
pub(crate) struct CpuOps<'a> {
    pub pass: &'a Pass<'a>,
    pub worker: usize,
    /// Active rows.
    pub rows: usize,
    pub scratch: &'a mut Scratch,
    kept: bool,
    /// What has run since the last meeting.
    since: Option<Scope>,
    /// Size of the workspace, the same number in every worker.
    workspace: usize,
    pub last_product: Option<Mat>,
    /// Weights that this worker reads when it waits.
    pub ahead: Cell<&'a [u8]>,
}

impl<'a> CpuOps<'a> {
    pub fn new(pass: &'a Pass<'a>, worker: usize, rows: usize, scratch: &'a mut Scratch) -> Self {
        CpuOps {
            pass,
            worker,
            rows,
            scratch,
            kept: false,
            since: None,
            workspace: pass.workspace_floats,
            last_product: None,
            ahead: Cell::default(),
        }
    }

    pub fn isa(&self) -> Isa {
        self.pass.isa
    }

    pub fn workers(&self) -> usize {
        self.pass.sync.workers()
    }

    pub fn act(&self, act: Act) -> &'a Buffer {
        self.pass.act(act)
    }

    /// Opens a verb: meets the others where what came before may concern them.
    pub fn enter(&mut self, scope: Scope) {
        if self.since.is_some_and(|before| before == Scope::Shared || scope == Scope::Shared) {
            self.meet();
        }
        self.since = Some(scope);
    }

    /// Meets inside a verb.
    pub fn meet(&self) {
        let mut ahead = self.ahead.take();
        self.pass.sync.meet(&mut ahead);
        self.ahead.set(ahead);
    }

    pub fn claim(&self, counter: usize, chunk: usize, total: usize) -> Option<Range<usize>> {
        self.pass.sync.claim(counter, chunk, total)
    }

    /// Whether so few rows wait for memory that weights should pass in long runs.
    pub fn reads_weights_once(&self) -> bool {
        self.rows <= FEW_ROWS
    }

    /// Claims of `total` items that each read their weights once, until all are taken: where few rows wait for memory this
    /// worker's own share and then shares of what is left, multiples of `least`; else chunks that a core's cache keeps
    /// from one block of rows to the next.
    pub fn claims(&self, least: usize, total: usize) -> impl Iterator<Item = Range<usize>> + use<'a> {
        let (sync, few) = (self.pass.sync, self.reads_weights_once());
        let own = few.then(|| sync.own_share(self.worker, least, total)).filter(|own| !own.is_empty());
        let chunk = (total / (sync.workers() * CLAIMS_PER_WORKER)).max(1).next_multiple_of(least);
        let next = move || if few { sync.claim_share(0, least, total) } else { sync.claim(0, chunk, total) };
        own.into_iter().chain(std::iter::from_fn(next))
    }

    /// The rows that belong to this worker in verbs of scope `Rows`.
    pub fn own_rows(&self) -> Range<usize> {
        let part = |w: usize| self.rows * w / self.workers();
        part(self.worker)..part(self.worker + 1)
    }

    /// Row of the batch that active row `row` is.
    pub fn batch_row(&self, row: usize) -> usize {
        if self.kept { self.pass.upload.batch.heads[row] as usize } else { row }
    }

    /// Whether rows have been dropped.
    pub fn is_kept(&self) -> bool {
        self.kept
    }

    /// Sees to it that the workspace has `floats` values; call right after `enter(Scope::Shared)`.
    pub fn need_workspace(&mut self, floats: usize) {
        if floats > self.workspace {
            if self.worker == 0 {
                // SAFETY: nobody has used the workspace since the meeting that opened the verb (or the pass), and
                // the team meets again below.
                unsafe { self.pass.workspace.grow(floats) }
            }
            self.workspace = floats;
            self.meet();
        }
    }
}

impl Ops for CpuOps<'_> {
    fn embed(&mut self, out: Act, table: Mat, scale: f32) {
        self.embed_rows(out, self.pass.mat(table), scale);
    }

    fn inject_soft(&mut self, out: Act) {
        self.soft_rows(out);
    }

    fn rope_table(&mut self, out: Act, inv_freq: lapidary_ops::Gain) {
        self.rope_rows(out, self.pass.gain(inv_freq));
    }

    fn rms_norm(&mut self, out: Act, x: Act, norm: Norm) {
        self.enter(Scope::Rows);
        let (pass, gain) = (self.pass, self.pass.gain(norm.gain));
        let (to, from) = (self.act(out), self.act(x));
        assert!(to.width() == from.width() && gain.len() == from.width(), "norm of {}", from.spec.name);
        for r in self.own_rows() {
            if out == x {
                // SAFETY: the row is this worker's.
                pass.norm_in_place(unsafe { to.row_mut(r) }, gain, norm.eps);
            } else {
                // SAFETY: the row is this worker's, and the buffers differ.
                let (o, v) = unsafe { (to.row_mut(r), from.row(r)) };
                norm::apply(pass.isa, v, norm::inv_rms(pass.isa, v, 1.0, norm.eps), gain, o);
            }
            // SAFETY: as above.
            unsafe { to.quantise_row(pass.isa, r) }
        }
    }

    fn cast(&mut self, out: Act, x: Act) {
        self.enter(Scope::Rows);
        let (to, from) = (self.act(out), self.act(x));
        assert!(out == x || to.width() == from.width(), "cast of {}", from.spec.name);
        for r in self.own_rows().filter(|_| out != x) {
            // SAFETY: the row is this worker's, and the buffers differ.
            unsafe {
                to.row_mut(r).copy_from_slice(from.row(r));
                to.quantise_row(self.isa(), r);
            }
        }
    }

    fn linear(&mut self, out: Act, x: Act, w: Mat) {
        self.product(out, x, w, None);
    }

    fn geglu(&mut self, out: Act, gate_up: Act, f: Activation) {
        self.enter(Scope::Rows);
        let (to, from) = (self.act(out), self.act(gate_up));
        let width = to.width();
        assert!(out != gate_up && from.width() == 2 * width, "gate of {}", from.spec.name);
        for r in self.own_rows() {
            // SAFETY: the row is this worker's, and the buffers differ.
            let (o, v) = unsafe { (to.row_mut(r), from.row(r)) };
            math::gate(self.isa(), f, &v[..width], &v[width..], o);
            // SAFETY: as above.
            unsafe { to.quantise_row(self.isa(), r) }
        }
    }

    fn add(&mut self, x: Act, y: Act) {
        self.enter(Scope::Rows);
        let (to, from) = (self.act(x), self.act(y));
        assert!(x != y && to.width() == from.width(), "sum of {} and {}", to.spec.name, from.spec.name);
        for r in self.own_rows() {
            // SAFETY: the row is this worker's, and the buffers differ.
            let (a, b) = unsafe { (to.row_mut(r), from.row(r)) };
            math::add(self.isa(), a, b);
        }
    }

    fn scale(&mut self, x: Act, by: f32) {
        self.enter(Scope::Rows);
        let to = self.act(x);
        for r in self.own_rows() {
            // SAFETY: the row is this worker's.
            math::scale(self.isa(), unsafe { to.row_mut(r) }, by);
        }
    }

    fn qkv_finish(&mut self, qkv: Act, spec: &QkvSpec) {
        self.finish_heads(qkv, spec);
    }

    fn attention(&mut self, out: Act, qkv: Act, spec: &AttnSpec) {
        self.attend(out, qkv, spec);
    }

    fn route(&mut self, out: Act, logits: Act, spec: &RouteSpec) {
        self.choose_experts(out, logits, spec);
    }

    fn experts(&mut self, out: Act, x: Act, routes: Act, spec: &ExpertSpec) {
        self.run_experts(out, x, routes, spec);
    }

    fn per_layer_inputs(&mut self, out: Act, context: Act, spec: &PerLayerSpec) {
        self.mix_per_layer(out, context, spec);
    }

    fn per_layer_gate(&mut self, out: Act, gate: Act, inputs: Act, layer: usize, f: Activation) {
        self.enter(Scope::Rows);
        let (to, from, inputs) = (self.act(out), self.act(gate), self.act(inputs));
        let width = to.width();
        assert!(out != gate && from.width() == width, "per-layer gate of {}", from.spec.name);
        for r in self.own_rows() {
            // SAFETY: the row is this worker's, and the buffers differ.
            let (o, g, all) = unsafe { (to.row_mut(r), from.row(r), inputs.row(r)) };
            math::gate(self.isa(), f, g, &all[layer * width..][..width], o);
            // SAFETY: as above.
            unsafe { to.quantise_row(self.isa(), r) }
        }
    }

    fn keep_rows(&mut self, acts: &[Act]) {
        assert!(!self.kept, "rows were dropped before");
        self.enter(Scope::Shared);
        let heads = &self.pass.upload.batch.heads;
        for (i, &act) in acts.iter().enumerate() {
            if i % self.workers() != self.worker {
                continue;
            }
            let buffer = self.act(act);
            for (to, &from) in heads.iter().enumerate() {
                // SAFETY: this worker alone handles the buffer in this verb. `heads` ascends, so a row moves
                // down, onto one that has moved or is not wanted.
                unsafe { buffer.move_row(from as usize, to) }
            }
        }
        self.rows = heads.len();
        self.kept = true;
    }

    fn logits(&mut self, out: Act, x: Act, head: Mat, softcap: Option<f32>) {
        self.product(out, x, head, softcap);
    }

    fn gated_linear(&mut self, out: Act, gate_up: Act, x: Act, w: Mat, f: Activation) {
        let matrix = self.pass.mat(w);
        if self.can_gate(out, matrix) {
            self.gated_product(out, x, w, f);
        } else {
            self.linear(gate_up, x, w);
            self.geglu(out, gate_up, f);
        }
    }

    fn argmax(&mut self, logits: Act) {
        self.enter(Scope::Shared);
        let buffer = self.act(logits);
        let part = |w: usize| buffer.width() * w / self.workers();
        let columns = part(self.worker)..part(self.worker + 1);
        let lock = |w: usize| self.pass.best[w].lock().expect("a worker that panics here ends the pass");
        {
            let mut own = lock(self.worker);
            own.clear();
            for r in 0..self.rows {
                // SAFETY: the meeting before this verb ended all writes to the logits.
                let row = unsafe { buffer.row(r) };
                own.push(Best::of(self.isa(), &row[columns.clone()], columns.start));
            }
        }
        self.meet();
        if self.worker == 0 {
            let mut outcome = self.pass.outcome.lock().expect("only worker 0 writes the outcome");
            outcome.argmax.clear();
            for r in 0..self.rows {
                let parts = (0..self.workers()).map(|w| lock(w)[r]);
                outcome.argmax.push(parts.reduce(Best::merge).map_or(-1, Best::id));
            }
        }
    }

    fn steer(&mut self, x: Act, layer: usize) {
        self.steer_rows(x, layer);
    }

    // Worker 0 stands for the team: between two meetings its share of the rows is as long as anybody's.
    fn mark(&mut self, phase: Phase) {
        if self.worker == 0
            && let Some((begun, marks)) = &self.pass.clock
        {
            marks.lock().expect("only worker 0 marks").push((phase, begun.elapsed()));
        }
    }

    fn tap(&mut self, point: TapPoint, x: Act) {
        if !self.pass.upload.batch.taps.wants(point) {
            return;
        }
        self.enter(Scope::Shared);
        if self.worker == 0 {
            let (buffer, rows) = (self.act(x), self.rows);
            let mut values = Vec::with_capacity(rows * buffer.width());
            for r in 0..rows {
                // SAFETY: the meeting before this verb ended all writes, and the next verb meets first.
                values.extend_from_slice(unsafe { buffer.row(r) });
            }
            let tap = Tap { point, rows, width: buffer.width(), values };
            self.pass.outcome.lock().expect("only worker 0 writes the outcome").taps.push(tap);
        }
    }
}

/// The largest of a range of logits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Best {
    value: f32,
    id: i32,
    finite: bool,
}

impl Best {
    fn of(isa: Isa, values: &[f32], first: usize) -> Best {
        let (value, finite) = largest(isa, values);
        let at = values.iter().position(|&v| v == value);
        Best { value, id: at.map_or(-1, |i| (first + i) as i32), finite }
    }

    /// Of neighbours in ascending order.
    fn merge(self, next: Best) -> Best {
        let larger = if next.value > self.value || self.id < 0 { next } else { self };
        Best { finite: self.finite && next.finite, ..larger }
    }

    fn id(self) -> i32 {
        if self.finite { self.id } else { -1 }
    }
}

for_level! {
    /// The largest value, and whether all are finite.
    pub fn largest(values: &[f32]) -> (f32, bool) {
        let mut most = [f32::NEG_INFINITY; 16];
        // 0 * v is 0 for finite values only.
        let mut zero = [0.0f32; 16];
        let (parts, rest) = values.as_chunks::<16>();
        for part in parts {
            for l in 0..16 {
                most[l] = if part[l] > most[l] { part[l] } else { most[l] };
                zero[l] += part[l] * 0.0;
            }
        }
        for (l, &v) in rest.iter().enumerate() {
            most[l] = if v > most[l] { v } else { most[l] };
            zero[l] += v * 0.0;
        }
        (most.into_iter().fold(f32::NEG_INFINITY, f32::max), zero.iter().all(|&z| z == 0.0))
    }
}
