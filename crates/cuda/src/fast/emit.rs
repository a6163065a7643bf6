//! Queueing steps: which kernel carries out which, and what falls back to the verbs of the float32 mode.

use lapidary_ops::{Act, Activation, Error, Mat, Norm, Ops, Result, TapPoint};

use super::experts::{GatedVerb, RouterVerb, packed_experts};
use super::fuse::{Residual, Step, fuse};
use super::{Recorder, Verb};
use crate::driver::DevPtr;
use crate::kernels::gemm_wide;
use crate::kernels::hooks::Source;
use crate::kernels::producers::{self, Argmax, Branch, NormOut};
use crate::kernels::prologue;
use crate::kernels::skinny_gemm::{self, Gate, Linear, MAX_PLANES, MAX_ROWS, Output, Weights};
use crate::ops::CudaOps;
use crate::pack::{Form, PackedShape};
use crate::workspace::Piece;

/// Runs a program by way of steps.
pub(crate) fn run(ops: &mut CudaOps<'_>, program: &(dyn Fn(&mut dyn Ops) + Sync)) {
    let batch = &ops.on.upload.batch;
    let keeps_all = batch.heads.len() == batch.tokens.len();
    let mut recorder = Recorder::new(&batch.taps, ops.on.hooks.layers(), keeps_all);
    program(&mut recorder);
    let acts = &ops.on.acts;
    let fits = |x: Act| {
        let width = acts[x.0 as usize].width();
        width.is_multiple_of(4) && width <= producers::MAX_WIDTH
    };
    let steps = fuse(recorder.verbs, &fits);
    for (i, step) in steps.iter().enumerate() {
        ops.step(step, &steps[i + 1..]);
    }
}

/// Rows up to which narrow products and experts run sixteen at a time over all weights rather than once through a kernel for
/// many.
pub(super) const SKINNY_ROWS: usize = 64;

/// Whether so many rows of a product go through the kernel for very many at once. It reads the weights once, but its tiles are so
/// large that a narrow matrix leaves most of the chip idle; where both ways cost the same was measured on an H200
/// (2026-11-30, docs/performance.md).
fn goes_wide(shape: PackedShape, rows: usize) -> bool {
    let least = match (rows, shape.form) {
        (..=16, _) => return false,
        (17..=32, Form::Bf16) => 16_384,
        (17..=32, Form::Fp8) => 32_768,
        (17..=32, _) => return false,
        (33..=SKINNY_ROWS, _) => 8_192,
        _ => 0,
    };
    shape.rows >= least
}

/// A product's sums that nobody has added up yet: float32 `[plane][rows][stride]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planes {
    pub(crate) act: Act,
    pub(super) ptr: DevPtr,
    pub(super) count: usize,
    pub(super) plane_stride: usize,
    pub(super) stride: usize,
}

impl Planes {
    /// As copies for the host take it.
    pub fn source(&self) -> Source {
        let (plane_stride, planes, stride) =
            (self.plane_stride as u64, self.count as i32, self.stride as i32);
        Source { p: self.ptr, plane_stride, planes, stride, ..Source::NONE }
    }
}

impl Step {
    /// The buffers that it reads, and those that it writes.
    pub(super) fn uses(&self) -> (Vec<Act>, Vec<Act>) {
        match self {
            Step::Verb(verb) => verb.uses(),
            Step::Residual(r) => {
                let each: Vec<_> = r.plain.iter().map(Verb::uses).collect();
                (
                    each.iter().flat_map(|u| u.0.clone()).collect(),
                    each.into_iter().flat_map(|u| u.1).collect(),
                )
            }
            Step::GateTimes { out, gate, x, inputs, .. } => (vec![*x, *inputs], vec![*gate, *out]),
            Step::Router { routes, logits, x, .. } => (vec![*x], vec![*logits, *routes]),
            Step::Experts { out, x, routes, .. } => (vec![*x, *routes], vec![*out]),
            Step::PerLayer(p) => uses_of(&p.parts()),
            Step::Heads(h) => uses_of(&h.parts()),
            Step::NormedGated(both) => uses_of(&both[..]),
            Step::GatedRouter(both) | Step::LinearExperts(both) => uses_of(&both[..]),
            Step::TapBranches { y, z, .. } => (vec![y.0, z.0], vec![]),
        }
    }
}

fn uses_of(steps: &[Step]) -> (Vec<Act>, Vec<Act>) {
    let each: Vec<_> = steps.iter().map(Step::uses).collect();
    (each.iter().flat_map(|u| u.0.clone()).collect(), each.into_iter().flat_map(|u| u.1).collect())
}

impl CudaOps<'_> {
    /// Steps that were joined, one by one.
    fn apart(&mut self, steps: &[Step], later: &[Step]) {
        for (i, step) in steps.iter().enumerate() {
            let rest: Vec<Step> = steps[i + 1..].iter().chain(later).cloned().collect();
            self.step(step, &rest);
        }
    }

    fn step(&mut self, step: &Step, later: &[Step]) {
        match step {
            Step::Verb(verb) => self.single(verb, later),
            Step::Residual(r) => self.verb(|s| s.residual(r)),
            &Step::GateTimes { out, gate, x, w, inputs, layer, f } => {
                if self.gates_in_product(out, x, w) {
                    self.verb(|s| s.gate_times(out, x, w, inputs, layer, f));
                } else {
                    self.verb(|s| s.fast_linear(gate, x, w, 1));
                    self.per_layer_gate(out, gate, inputs, layer, f);
                }
            }
            &Step::Router { routes, logits, x, w, spec } => {
                if self.routes_fast(x, w, &spec) && packed_experts(later, routes, &self.on.mats) {
                    self.verb(|s| s.router(RouterVerb { routes, logits, x, w, spec }));
                } else {
                    self.verb(|s| s.fast_linear(logits, x, w, 1));
                    self.route(routes, logits, &spec);
                    self.routed = false;
                }
            }
            &Step::TapBranches { point, y, z } => self.verb(|s| s.tap_branches(point, y, z)),
            &Step::Experts { out, x, routes, spec } => {
                if self.routed {
                    let planes = [1, self.planes_for(out, later)];
                    self.verb(|s| s.fast_experts((out, x, spec), None, planes));
                } else {
                    self.experts(out, x, routes, &spec);
                }
            }
            Step::PerLayer(p) => match self.fuses_per_layer(p) {
                true => self.verb(|s| s.per_layer(p)),
                false => self.apart(&p.parts(), later),
            },
            Step::Heads(h) => match self.finishes_in_attention(h) {
                true => self.verb(|s| s.finish_and_attend(h)),
                false => self.apart(&h.parts(), later),
            },
            Step::NormedGated(both) => match self.norms_in_product(both) {
                Some((residual, gated)) => self.verb(|s| s.norm_and_gate(&residual, gated)),
                None => self.apart(&both[..], later),
            },
            Step::GatedRouter(both) => match self.gates_beside_router(both, later) {
                Some((gated, router)) => self.verb(|s| s.gated_and_router(gated, router)),
                None => self.apart(&both[..], later),
            },
            Step::LinearExperts(both) => match self.multiplies_beside_experts(both) {
                Some((product, experts)) => {
                    let planes = [self.planes_for(product.0, later), self.planes_for(experts.0, later)];
                    self.verb(|s| s.fast_experts(experts, Some(product), planes));
                }
                None => self.apart(&both[..], later),
            },
        }
    }

    fn single(&mut self, verb: &Verb, later: &[Step]) {
        match *verb {
            Verb::Embed(out, table, scale) => self.embed(out, table, scale),
            Verb::InjectSoft(out) => self.inject_soft(out),
            Verb::RopeTable(out, freq) => self.rope_table(out, freq),
            Verb::RmsNorm(out, x, norm) => self.rms_norm(out, x, norm),
            Verb::Cast(out, x) => self.cast(out, x),
            Verb::Linear(out, x, w) => {
                let planes = self.planes_for(out, later);
                self.verb(|s| s.fast_linear(out, x, w, planes));
            }
            Verb::Gated { out, gate_up, x, w, f } => {
                if self.gates_in_product(out, x, w) {
                    self.verb(|s| s.gated(GatedVerb { out, x, w, f }));
                } else {
                    self.verb(|s| s.fast_linear(gate_up, x, w, 1));
                    self.geglu(out, gate_up, f);
                }
            }
            Verb::Geglu(out, x, f) => self.geglu(out, x, f),
            Verb::Add(x, y) => self.add(x, y),
            Verb::Scale(x, by) => self.scale(x, by),
            Verb::QkvFinish(qkv, ref spec) => match self.fast_heads(spec.head_dim) {
                true => self.verb(|s| s.finish_heads(qkv, spec)),
                false => self.qkv_finish(qkv, spec),
            },
            Verb::Attention(out, qkv, ref spec) => match self.fast_heads(spec.head_dim) {
                true => self.verb(|s| s.attend(out, spec)),
                false => self.attention(out, qkv, spec),
            },
            Verb::Route(out, logits, ref spec) => self.route(out, logits, spec),
            Verb::Experts(out, x, routes, ref spec) => self.experts(out, x, routes, spec),
            Verb::PerLayerInputs(out, context, ref spec) => self.per_layer_inputs(out, context, spec),
            Verb::PerLayerGate(out, gate, inputs, layer, f) => {
                self.per_layer_gate(out, gate, inputs, layer, f)
            }
            Verb::KeepRows(ref acts) => {
                self.verb(|s| s.keep_queries());
                self.keep_rows(acts);
            }
            Verb::Logits(out, x, head, softcap) => self.verb(|s| s.fast_logits(out, x, head, softcap)),
            Verb::Argmax(logits) => self.verb(|s| s.largest(logits)),
            Verb::Tap(point, x) => self.tap(point, x),
            Verb::NormAdd(x, y, norm) => self.norm_add(x, y, norm),
            Verb::Steer(x, layer) => self.steer(x, layer),
            Verb::Mark(phase) => self.mark(phase),
        }
    }

    pub(super) fn multiprocessors(&self) -> usize {
        self.on.context().info.multiprocessors as usize
    }

    /// Planes that a product into `out` may be cut into: what reads it next must be able to add them up.
    pub(super) fn planes_for(&self, out: Act, later: &[Step]) -> usize {
        if self.rows > MAX_ROWS {
            return 1;
        }
        let uses = |s: &&Step| {
            // A tap adds planes up for itself.
            if matches!(s, Step::Verb(Verb::Tap(..)) | Step::TapBranches { .. }) {
                return false;
            }
            let (reads, writes) = s.uses();
            reads.contains(&out) || writes.contains(&out)
        };
        match later.iter().find(uses) {
            Some(Step::Residual(r))
                if r.y.is_some_and(|y| y.0 == out) || r.branches.is_some_and(|b| b.1 == out) =>
            {
                MAX_PLANES
            }
            Some(Step::NormedGated(both)) if matches!(&both[0], Step::Residual(r) if r.y.is_some_and(|y| y.0 == out)) => {
                MAX_PLANES
            }
            Some(Step::PerLayer(p)) if p.first.y.is_some_and(|y| y.0 == out) => MAX_PLANES,
            Some(Step::Verb(Verb::QkvFinish(qkv, spec))) if *qkv == out && self.fast_heads(spec.head_dim) => {
                MAX_PLANES
            }
            Some(Step::Heads(h)) if h.qkv == out && self.fast_heads(h.finish.head_dim) => MAX_PLANES,
            _ => 1,
        }
    }

    /// Where a product of `rows` into `out` that is cut into planes leaves its sums: a place for each buffer that can
    /// be waiting at the same time.
    pub(super) fn plane_room(&mut self, out: Act) -> Result<Planes> {
        let o = self.act(out);
        let stride = o.stride as usize;
        let place = self.planes.iter().position(|p| p.act == out).unwrap_or(self.planes.len());
        let piece = *[Piece::PlanesA, Piece::PlanesB, Piece::PlanesC].get(place).ok_or_else(|| {
            Error::Device("more products are waiting for their sums than there is room".into())
        })?;
        let bytes = MAX_PLANES * MAX_ROWS * stride * 4;
        let (stream, workspace) = (&self.on.stream, &mut self.on.workspace);
        let ptr = workspace.get(piece, stream, bytes)?;
        Ok(Planes { act: out, ptr, count: 1, plane_stride: self.rows * stride, stride })
    }

    /// The sums of `act`: what is waiting, or the buffer itself. Nothing waits afterwards.
    pub(super) fn sums(&mut self, act: Act) -> Planes {
        if let Some(at) = self.planes.iter().position(|p| p.act == act) {
            return self.planes.swap_remove(at);
        }
        let a = self.act(act);
        Planes { act, ptr: a.ptr, count: 1, plane_stride: 0, stride: a.stride as usize }
    }

    pub(super) fn branch(&mut self, act: Act, gain: DevPtr) -> Branch {
        let p = self.sums(act);
        Branch {
            p: p.ptr,
            gain,
            plane_stride: p.plane_stride as u64,
            planes: p.count as i32,
            stride: p.stride as i32,
        }
    }

    /// Copies out the sum of two branches that the step after it norms and adds once more.
    fn tap_branches(&mut self, point: TapPoint, y: (Act, Norm), z: (Act, Norm)) -> Result<()> {
        let width = self.act(y.0).width;
        let [first, second] = [y, z].map(|(act, norm)| -> Result<Source> {
            Ok(Source { gain: self.gain(norm.gain, width as usize)?, ..self.source(act) })
        });
        self.copy_out(point, first?, Some((second?, y.1.eps)), width)
    }

    /// The two parts of a [`Step::NormedGated`] that one kernel carries out.
    fn norms_in_product(&self, both: &[Step; 2]) -> Option<(Residual, GatedVerb)> {
        let [Step::Residual(r), Step::Verb(Verb::Gated { out, x, w, f, .. })] = both else { return None };
        let verb = GatedVerb { out: *out, x: *x, w: *w, f: *f };
        let fits = self.rows == 1
            && self.gates_in_product(*out, *x, *w)
            && prologue::choice(self.one_run(*w)?.shape, self.multiprocessors()).is_some();
        fits.then(|| (r.clone(), verb))
    }

    fn norm_and_gate(&mut self, r: &Residual, verb: GatedVerb) -> Result<()> {
        let mut before = self.residual_call(r)?;
        before.x_out = self.on.workspace.get(Piece::Residual, &self.on.stream, before.width * 4)?;
        let call = self.gated_call(verb)?;
        // SAFETY: widths agree, gains are as wide as the residual, and both of its places hold a row.
        unsafe { prologue::gated(self.on.queue(), &before, &call)? };
        self.residual = Some(before.x_out);
        Ok(())
    }

    fn residual(&mut self, r: &Residual) -> Result<()> {
        let call = self.residual_call(r)?;
        // SAFETY: every buffer holds the rows of every uploaded batch, and gains are as wide as they.
        unsafe { Ok(producers::residual(self.on.queue(), &call)?) }
    }

    /// The call of a step around the residual, which is back in its buffer after it.
    fn residual_call(&mut self, r: &Residual) -> Result<producers::Residual> {
        let x = self.act(r.x);
        let width = x.width as usize;
        let gain = |s: &Self, norm: Norm| s.gain(norm.gain, width);
        let (y, z) = match (r.y, r.branches) {
            (None, _) => (Branch::NONE, Branch::NONE),
            (Some((y, _)), None) => (self.branch(y, DevPtr::NULL), Branch::NONE),
            (Some((y, _)), Some((first, z, second))) => {
                let (first, second) = (gain(self, first)?, gain(self, second)?);
                (self.branch(y, first), self.branch(z, second))
            }
        };
        let mut outs = [NormOut::NONE; 3];
        for (to, &(act, norm)) in outs.iter_mut().zip(&r.outs) {
            let a = self.act(act);
            let gain = norm.map_or(Ok(DevPtr::NULL), |n| gain(self, n))?;
            *to = NormOut { p: a.ptr, gain, stride: a.stride, bf16: a.bf16 };
        }
        let any = r.y.map(|y| y.1).or(r.outs.iter().find_map(|o| o.1));
        Ok(producers::Residual {
            x: self.residual.take().unwrap_or(x.ptr),
            x_out: x.ptr,
            x_stride: x.stride as usize,
            rows: self.rows,
            width,
            y,
            z,
            post: r.y.map_or(Ok(DevPtr::NULL), |(_, norm)| gain(self, norm))?,
            scalar: r.scalar,
            eps: any.map_or(0.0, |n| n.eps),
            outs,
        })
    }

    /// The one run of a matrix that is packed in one form.
    pub(crate) fn one_run(&self, w: Mat) -> Option<Weights> {
        match self.on.mats[w.0 as usize].packed.as_ref().map(|p| &p.runs[..]) {
            Some(&[(0, weights)]) => Some(weights),
            _ => None,
        }
    }

    pub(super) fn gates_in_product(&self, out: Act, x: Act, w: Mat) -> bool {
        self.act(out).bf16 == 1
            && self.act(x).bf16 == 1
            && self.one_run(w).is_some_and(|w| w.shape.rows.is_multiple_of(32))
    }

    /// Queues a product of all rows by the kernel that their number asks for.
    ///
    /// # Safety
    /// As [`skinny_gemm::linear`].
    unsafe fn multiply(&mut self, call: &Linear) -> Result<()> {
        if goes_wide(call.weights.shape, self.rows) {
            let bytes = gemm_wide::workspace_bytes(call.weights.shape, self.rows);
            let arranged = self.on.workspace.get(Piece::Arranged, &self.on.stream, bytes)?;
            // SAFETY: the caller's, and the room is what the call needs.
            return unsafe { Ok(gemm_wide::linear(self.on.queue(), call, arranged)?) };
        }
        let out_bytes = if matches!(call.output, Output::F32 { .. }) { 4 } else { 2 };
        let most = skinny_gemm::most_rows(call.weights.shape);
        for first in (0..self.rows).step_by(most) {
            let rows = most.min(self.rows - first);
            let output = match call.output {
                Output::GateTimes { gate, times, stride } => {
                    Output::GateTimes { gate, times: times.at(first * stride * 4), stride }
                }
                other => other,
            };
            let tile = Linear {
                x: call.x.at(first * call.x_stride * 2),
                out: call.out.at(first * call.out_stride * out_bytes),
                rows,
                output,
                ..*call
            };
            // SAFETY: the caller's, for these rows.
            unsafe { skinny_gemm::linear(self.on.queue(), &tile)? };
        }
        Ok(())
    }

    /// Sixteen rows at a time, as the router takes them: first row and number.
    pub(super) fn tiles(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let rows = self.rows;
        (0..rows).step_by(MAX_ROWS).map(move |r| (r, MAX_ROWS.min(rows - r)))
    }

    /// A product of all rows.
    pub(super) fn call(&self, out: Act, x: Act, weights: Weights) -> Linear {
        let (o, v) = (self.act(out), self.act(x));
        Linear {
            weights,
            x: v.ptr,
            x_stride: v.stride as usize,
            rows: self.rows,
            out: o.ptr,
            out_stride: o.stride as usize,
            output: Output::F32 { softcap: 0.0 },
            most_planes: 1,
        }
    }

    fn fast_linear(&mut self, out: Act, x: Act, w: Mat, most_planes: usize) -> Result<()> {
        self.left.weight_bytes += self.on.mats[w.0 as usize].bytes as u64;
        let bf16 = self.act(x).bf16 == 1;
        if self.on.mats[w.0 as usize].packed.is_none() || !bf16 {
            return self.product(out, x, w, None);
        }
        self.same_widths(out, x, w)?;
        if let Some(weights) =
            self.one_run(w).filter(|w| most_planes > 1 && self.rows <= skinny_gemm::most_rows(w.shape))
        {
            let sms = self.multiprocessors();
            let planes = skinny_gemm::planes(weights.shape, self.rows, most_planes, sms);
            if planes > 1 {
                let room = self.plane_room(out)?;
                let call = Linear {
                    out: room.ptr,
                    out_stride: room.stride,
                    most_planes,
                    ..self.call(out, x, weights)
                };
                // SAFETY: widths agree, and there is room for as many planes.
                let count = unsafe { skinny_gemm::linear(self.on.queue(), &call)? };
                self.planes.retain(|p| p.act != out);
                self.planes.push(Planes { count, ..room });
                return Ok(());
            }
        }
        let runs = self.on.mats[w.0 as usize].packed.as_ref().map_or(Vec::new(), |p| p.runs.clone());
        for (first_out, weights) in runs {
            let call = self.call(out, x, weights);
            let call = Linear { out: call.out.at(first_out * 4), ..call };
            // SAFETY: widths agree, and a run's outputs lie inside the row.
            unsafe { self.multiply(&call)? };
        }
        Ok(())
    }

    /// The call of a gated product, which is counted here.
    pub(super) fn gated_call(&mut self, verb: GatedVerb) -> Result<Linear> {
        let GatedVerb { out, x, w, f } = verb;
        self.left.weight_bytes += self.on.mats[w.0 as usize].bytes as u64;
        let Some(weights) = self.one_run(w) else { return Err(not_packed()) };
        let o = self.act(out);
        crate::ops::same("gated_linear", 2 * o.width, weights.shape.rows as i32)?;
        crate::ops::same("gated_linear", self.act(x).width, weights.shape.cols as i32)?;
        Ok(Linear { output: Output::Gated(gate(f)), ..self.call(out, x, weights) })
    }

    fn gated(&mut self, verb: GatedVerb) -> Result<()> {
        let call = self.gated_call(verb)?;
        // SAFETY: widths agree.
        unsafe { self.multiply(&call) }
    }

    fn gate_times(
        &mut self,
        out: Act,
        x: Act,
        w: Mat,
        inputs: Act,
        layer: usize,
        f: Activation,
    ) -> Result<()> {
        self.left.weight_bytes += self.on.mats[w.0 as usize].bytes as u64;
        let Some(weights) = self.one_run(w) else { return Err(not_packed()) };
        self.same_widths(out, x, w)?;
        let (all, width) = (self.act(inputs), self.act(out).width as usize);
        if (layer + 1) * width > all.width as usize {
            return Err(Error::Device(format!("per_layer_gate: no inputs of layer {layer}")));
        }
        let (times, stride) = (all.ptr.at(layer * width * 4), all.stride as usize);
        let output = Output::GateTimes { gate: gate(f), times, stride };
        let call = Linear { output, ..self.call(out, x, weights) };
        // SAFETY: widths agree.
        unsafe { self.multiply(&call) }
    }

    fn fast_logits(&mut self, out: Act, x: Act, head: Mat, softcap: Option<f32>) -> Result<()> {
        self.left.weight_bytes += self.on.mats[head.0 as usize].bytes as u64;
        if self.on.mats[head.0 as usize].packed.is_none() || self.act(x).bf16 == 0 {
            return self.product(out, x, head, softcap);
        }
        self.same_widths(out, x, head)?;
        let runs = self.on.mats[head.0 as usize].packed.as_ref().map_or(Vec::new(), |p| p.runs.clone());
        for (first_out, weights) in runs {
            let output = Output::F32 { softcap: softcap.unwrap_or(0.0) };
            let call = self.call(out, x, weights);
            let call = Linear { out: call.out.at(first_out * 4), output, ..call };
            // SAFETY: widths agree, and a run's outputs lie inside the row.
            unsafe { self.multiply(&call)? };
        }
        Ok(())
    }

    fn largest(&mut self, logits: Act) -> Result<()> {
        let most = self.on.acts[logits.0 as usize].spec.max_rows;
        let l = self.act(logits);
        let (stream, workspace) = (&self.on.stream, &mut self.on.workspace);
        let out = workspace.get(Piece::Tokens, stream, most * 4)?;
        let bytes = producers::argmax_workspace_bytes(most);
        let workspace = workspace.get(Piece::Argmax, stream, bytes)?;
        let turn = self.on.upload.turn_at;
        let told = self.on.flight.told(&self.on.context, stream, most, turn)?;
        let call = Argmax {
            logits: l.ptr,
            stride: l.stride as usize,
            vocab: l.width as usize,
            rows: self.rows,
            out,
            workspace,
            told: Some(told),
        };
        // SAFETY: both pieces hold as many rows as the logits do.
        unsafe { producers::argmax(self.on.queue(), &call)? }
        (self.left.tokens, self.left.told) = (self.rows, true);
        self.draw(logits, out, Some(told))
    }

    pub(super) fn same_widths(&self, out: Act, x: Act, w: Mat) -> Result<()> {
        let m = &self.on.mats[w.0 as usize];
        crate::ops::same("product", self.act(x).width, m.cols as i32)?;
        crate::ops::same("product", self.act(out).width, m.rows as i32)
    }
}

pub(super) fn gate(f: Activation) -> Gate {
    match f {
        Activation::GeluTanh => Gate::GeluTanh,
        Activation::Silu => Gate::Silu,
    }
}

pub(super) fn not_packed() -> Error {
    Error::Device("a matrix is not in the form that its product was chosen for".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_matrices_stay_with_sixteen_rows_at_a_time() {
        let wide = |form, outputs, rows| goes_wide(PackedShape { form, rows: outputs, cols: 5376 }, rows);
        assert!(!wide(Form::Bf16, 262_144, 16) && wide(Form::Bf16, 16_384, 17));
        assert!(wide(Form::Fp8, 43_008, 32) && !wide(Form::Fp8, 16_384, 32) && wide(Form::Fp8, 16_384, 33));
        assert!(!wide(Form::Q4K, 43_008, 32) && wide(Form::Q4K, 43_008, 33) && !wide(Form::Q4K, 5_376, 64));
        assert!(wide(Form::Q4K, 5_376, 65) && wide(Form::Bf16, 96, 65));
    }
}
