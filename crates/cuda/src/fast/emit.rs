//! Queueing steps: which kernel carries out which, and what falls back to the verbs of the float32 mode.

use lapidary_ops::{
    Act, Activation, AttnSpec, Error, ExpertSpec, Mat, Norm, Ops, QkvSpec, Result, RouteSpec, ValueSource,
};

use super::fuse::{Residual, Step, fuse};
use super::{Recorder, Verb};
use crate::driver::DevPtr;
use crate::kernels::attn_decode::{self, AttnDecode, KvColumns, PageShape};
use crate::kernels::attn_prefill;
use crate::kernels::gemm_prefill::{self, Combine, Grouped, Lists};
use crate::kernels::producers::{self, Argmax, Branch, Finish, NormOut, Router};
use crate::kernels::skinny_gemm::{
    self, Chosen, ExpertsDown, ExpertsUp, Gate, Linear, MAX_PLANES, MAX_ROWS, Output, Weights,
};
use crate::matrix::Matrix;
use crate::ops::CudaOps;
use crate::workspace::Piece;

/// Runs a program by way of steps.
pub(crate) fn run(ops: &mut CudaOps<'_>, program: &(dyn Fn(&mut dyn Ops) + Sync)) {
    let batch = &ops.on.upload.batch;
    let mut recorder = Recorder::new(&batch.taps, batch.heads.len() == batch.tokens.len());
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

/// A product's sums that nobody has added up yet: float32 `[plane][rows][stride]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planes {
    act: Act,
    ptr: DevPtr,
    count: usize,
    plane_stride: usize,
    stride: usize,
}

/// Bytes of the list of chosen experts of sixteen rows: a count and ids, then weights.
const GROUP_BYTES: usize = 1024 + 128 * 16 * 4;

/// Rows of one call of the attention kernel, which counts its blocks in a table of fixed size.
const ATTENTION_ROWS: usize = 128;

impl Step {
    fn uses(&self) -> (Vec<Act>, Vec<Act>) {
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
        }
    }
}

impl CudaOps<'_> {
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
                    self.verb(|s| s.router(routes, logits, x, w, &spec));
                } else {
                    self.verb(|s| s.fast_linear(logits, x, w, 1));
                    self.route(routes, logits, &spec);
                    self.routed = false;
                }
            }
            &Step::Experts { out, x, routes, spec } => {
                if self.routed {
                    let planes = self.planes_for(out, later);
                    self.verb(|s| s.fast_experts(out, x, &spec, planes));
                } else {
                    self.experts(out, x, routes, &spec);
                }
            }
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
                    self.verb(|s| s.gated(out, x, w, f));
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

    fn multiprocessors(&self) -> usize {
        self.on.context().info.multiprocessors as usize
    }

    /// Planes that a product into `out` may be cut into: what reads it next must be able to add them up.
    fn planes_for(&self, out: Act, later: &[Step]) -> usize {
        if self.rows > MAX_ROWS {
            return 1;
        }
        let uses = |s: &&Step| {
            let (reads, writes) = s.uses();
            reads.contains(&out) || writes.contains(&out)
        };
        match later.iter().find(uses) {
            Some(Step::Residual(r))
                if r.y.is_some_and(|y| y.0 == out) || r.branches.is_some_and(|b| b.1 == out) =>
            {
                MAX_PLANES
            }
            Some(Step::Verb(Verb::QkvFinish(qkv, spec))) if *qkv == out && self.fast_heads(spec.head_dim) => {
                MAX_PLANES
            }
            _ => 1,
        }
    }

    /// Where a product of `rows` into `out` that is cut into planes leaves its sums: a place for each buffer that can
    /// be waiting at the same time.
    fn plane_room(&mut self, out: Act) -> Result<Planes> {
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
    fn sums(&mut self, act: Act) -> Planes {
        if let Some(at) = self.planes.iter().position(|p| p.act == act) {
            return self.planes.swap_remove(at);
        }
        let a = self.act(act);
        Planes { act, ptr: a.ptr, count: 1, plane_stride: 0, stride: a.stride as usize }
    }

    fn branch(&mut self, act: Act, gain: DevPtr) -> Branch {
        let p = self.sums(act);
        Branch {
            p: p.ptr,
            gain,
            plane_stride: p.plane_stride as u64,
            planes: p.count as i32,
            stride: p.stride as i32,
        }
    }

    fn residual(&mut self, r: &Residual) -> Result<()> {
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
        let call = producers::Residual {
            x: x.ptr,
            x_stride: x.stride as usize,
            rows: self.rows,
            width,
            y,
            z,
            post: r.y.map_or(Ok(DevPtr::NULL), |(_, norm)| gain(self, norm))?,
            scalar: r.scalar,
            eps: any.map_or(0.0, |n| n.eps),
            outs,
        };
        // SAFETY: every buffer holds the rows of every uploaded batch, and gains are as wide as they.
        unsafe { Ok(producers::residual(self.on.queue(), &call)?) }
    }

    /// The one run of a matrix that is packed in one form.
    fn one_run(&self, w: Mat) -> Option<Weights> {
        match self.on.mats[w.0 as usize].packed.as_ref().map(|p| &p.runs[..]) {
            Some(&[(0, weights)]) => Some(weights),
            _ => None,
        }
    }

    fn gates_in_product(&self, out: Act, x: Act, w: Mat) -> bool {
        self.act(out).bf16 == 1
            && self.act(x).bf16 == 1
            && self.one_run(w).is_some_and(|w| w.shape.rows.is_multiple_of(32))
    }

    /// Queues a product of all rows by the kernel that their number asks for.
    ///
    /// # Safety
    /// As [`skinny_gemm::linear`].
    unsafe fn multiply(&self, call: &Linear) -> Result<()> {
        // SAFETY: the caller's.
        unsafe {
            if self.rows <= MAX_ROWS {
                skinny_gemm::linear(self.on.queue(), call)?;
            } else {
                gemm_prefill::linear(self.on.queue(), call)?;
            }
        }
        Ok(())
    }

    /// Sixteen rows at a time, as the router takes them: first row and number.
    fn tiles(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let rows = self.rows;
        (0..rows).step_by(MAX_ROWS).map(move |r| (r, MAX_ROWS.min(rows - r)))
    }

    /// A product of all rows.
    fn call(&self, out: Act, x: Act, weights: Weights) -> Linear {
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
        if let Some(weights) = self.one_run(w).filter(|_| most_planes > 1) {
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

    fn gated(&mut self, out: Act, x: Act, w: Mat, f: Activation) -> Result<()> {
        self.left.weight_bytes += self.on.mats[w.0 as usize].bytes as u64;
        let Some(weights) = self.one_run(w) else { return Err(not_packed()) };
        let o = self.act(out);
        crate::ops::same("gated_linear", 2 * o.width, weights.shape.rows as i32)?;
        crate::ops::same("gated_linear", self.act(x).width, weights.shape.cols as i32)?;
        let call = Linear { output: Output::Gated(gate(f)), ..self.call(out, x, weights) };
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
        let call = Argmax {
            logits: l.ptr,
            stride: l.stride as usize,
            vocab: l.width as usize,
            rows: self.rows,
            out,
            workspace,
        };
        // SAFETY: both pieces hold as many rows as the logits do.
        unsafe { producers::argmax(self.on.queue(), &call)? }
        self.left.tokens = self.rows;
        Ok(())
    }

    /// Whether heads of this width have kernels and pools in their layout.
    fn fast_heads(&self, head_dim: usize) -> bool {
        self.on.kv.is_fast(head_dim)
    }

    /// Where normed, rotated queries of a layer are kept as bf16: `rows` of `width` values.
    fn queries(&mut self, width: usize) -> Result<DevPtr> {
        let most = self.on.acts.iter().map(|a| a.spec.max_rows).max().unwrap_or(0);
        let bytes = most * width * 2;
        Ok(self.on.workspace.get(Piece::Queries, &self.on.stream, bytes)?)
    }

    fn finish_heads(&mut self, qkv: Act, spec: &QkvSpec) -> Result<()> {
        let (v, rope, d) = (self.act(qkv), self.act(spec.rope), spec.head_dim);
        let values_are_keys = spec.kv.is_some_and(|kv| kv.values == ValueSource::Keys);
        let parts = match spec.kv {
            None => 0,
            Some(_) if values_are_keys => 1,
            Some(_) => 2,
        };
        crate::ops::same("qkv_finish", rope.width, d as i32)?;
        crate::ops::same("qkv_finish", v.width, ((spec.heads + parts * spec.kv_heads) * d) as i32)?;
        let group = spec.kv.map_or(0, |kv| kv.cache.group.index());
        let q = self.queries(spec.heads * d)?;
        let sums = self.sums(qkv);
        let q_norm = (self.gain(spec.q_norm.gain, d)?, spec.q_norm.eps);
        let k_norm = match spec.kv {
            Some(kv) => (self.gain(kv.k_norm.gain, d)?, kv.k_norm.eps),
            None => (DevPtr::NULL, 0.0),
        };
        let call = Finish {
            qkv: sums.ptr,
            qkv_stride: sums.stride,
            plane_stride: sums.plane_stride,
            planes: sums.count,
            store_q: !self.on.upload.batch.taps.points.is_empty() && sums.count == 1,
            rows: self.rows,
            heads: spec.heads,
            pages: PageShape { kv_heads: spec.kv_heads, head_dim: d, fp8: false },
            writes: spec.kv.is_some(),
            values_are_keys,
            q_norm,
            k_norm,
            v_eps: spec.kv.and_then(|kv| kv.v_norm_eps),
            rope: rope.ptr,
            rope_stride: rope.stride as usize,
            cell: self.on.upload.columns.cell[group],
            map: self.map(),
            pool: spec.kv.map_or(DevPtr::NULL, |kv| self.on.kv.pool(kv.cache).ptr),
            kv_scales: [1.0; 2],
            q,
            q_stride: spec.heads * d,
        };
        self.query_width = spec.heads * d;
        // SAFETY: widths agree, and the uploaded cells are in the pools.
        unsafe { Ok(producers::finish(self.on.queue(), &call)?) }
    }

    /// Rows are dropped between the queries' making and their use: the kept ones move to the front here too.
    fn keep_queries(&mut self) -> Result<()> {
        if self.query_width == 0 {
            return Ok(());
        }
        let ptr = self.queries(self.query_width)?;
        let (heads, count) = (self.on.upload.columns.heads, self.on.upload.batch.heads.len());
        let width = self.query_width as i32;
        let rows = crate::args::Rows { ptr, stride: width, width, bf16: 1, pad: 0 };
        // SAFETY: heads are rows of the batch, ascending.
        unsafe { Ok(crate::kernels::rows::keep_rows(self.on.queue(), rows, heads, count)?) }
    }

    fn attend(&mut self, out: Act, spec: &AttnSpec) -> Result<()> {
        let (o, d) = (self.act(out), spec.head_dim);
        let pool = self.on.kv.pool(spec.cache);
        crate::ops::same("attention", o.width, (spec.heads * d) as i32)?;
        crate::ops::same("attention", pool.head_dim, d as i32)?;
        crate::ops::same("attention", pool.kv_heads, spec.kv_heads as i32)?;
        if o.bf16 == 0 {
            return Err(Error::Device("attention into a float32 buffer in the fast mode".into()));
        }
        let pages = PageShape { kv_heads: spec.kv_heads, head_dim: d, fp8: false };
        if spec.softcap.is_some() {
            let what = "a cap on attention scores in the fast mode".into();
            return Err(Error::Unsupported { device: "cuda".into(), what });
        }
        let sms = self.multiprocessors();
        let most = self.on.acts[out.0 as usize].spec.max_rows.min(ATTENTION_ROWS);
        let bytes = attn_decode::workspace_bytes(most, spec.heads, pages, sms);
        let workspace = self.on.workspace.get(Piece::Attention, &self.on.stream, bytes)?;
        let q = self.queries(spec.heads * d)?;
        let (columns, group) = (self.on.upload.columns, spec.cache.group.index());
        let call = AttnDecode {
            heads: spec.heads,
            pages,
            pool: pool.ptr,
            q,
            q_stride: spec.heads * d,
            out: o.ptr,
            out_stride: o.stride as usize,
            columns: KvColumns {
                positions: columns.positions,
                visible_to: columns.visible_to[group],
                table: columns.table[group],
                pages: columns.pages[group],
                map: self.map(),
            },
            rows: self.rows,
            batch_rows: self.on.upload.batch.tokens.len(),
            window: spec.window,
            scale: spec.scale,
            v_scale: 1.0,
            workspace,
        };
        // Rows of one sequence share its pages; a batch of single tokens has nothing to share.
        let sequences = self.on.upload.batch.spans.len();
        if self.map() == DevPtr::NULL && self.rows > MAX_ROWS && self.rows >= 2 * sequences {
            // SAFETY: widths agree, and the uploaded tables lead to pages of the pools.
            return unsafe { Ok(attn_prefill::attn_prefill(self.on.queue(), &call)?) };
        }
        for first in (0..self.rows).step_by(ATTENTION_ROWS) {
            // Columns are by batch row, which is what the map leads to once rows were dropped.
            let (skip, map) = match call.columns.map {
                DevPtr::NULL => (first * 4, DevPtr::NULL),
                map => (0, map.at(first * 4)),
            };
            let at = &call.columns;
            let part = AttnDecode {
                q: q.at(first * spec.heads * d * 2),
                out: o.ptr.at(first * o.stride as usize * 2),
                columns: KvColumns {
                    positions: at.positions.at(skip),
                    visible_to: at.visible_to.at(skip),
                    table: at.table.at(skip),
                    pages: at.pages,
                    map,
                },
                rows: ATTENTION_ROWS.min(self.rows - first),
                ..call
            };
            // SAFETY: widths agree, and the uploaded tables lead to pages of the pools.
            unsafe { attn_decode::attn_decode(self.on.queue(), &part)? };
        }
        Ok(())
    }

    fn routes_fast(&self, x: Act, w: Mat, spec: &RouteSpec) -> bool {
        let width = self.act(x).width as usize;
        self.on.mats[w.0 as usize].floats.is_some()
            && self.act(x).bf16 == 0
            && spec.experts <= producers::MAX_EXPERTS
            && spec.top_k <= 32.min(spec.experts)
            && width.is_multiple_of(8)
    }

    /// Where the choice of the tile of sixteen rows that begins at `first` is kept.
    fn chosen(&mut self, first: usize) -> Result<Chosen> {
        let most = self.on.acts.iter().map(|a| a.spec.max_rows).max().unwrap_or(0);
        let bytes = most.div_ceil(MAX_ROWS) * GROUP_BYTES;
        let all = self.on.workspace.get(Piece::Pairs, &self.on.stream, bytes)?;
        let groups = all.at(first / MAX_ROWS * GROUP_BYTES);
        Ok(Chosen { groups, weights: groups.at(1024) })
    }

    fn router(&mut self, routes: Act, logits: Act, x: Act, w: Mat, spec: &RouteSpec) -> Result<()> {
        let (r, l, v) = (self.act(routes), self.act(logits), self.act(x));
        let matrix = &self.on.mats[w.0 as usize];
        self.left.weight_bytes += matrix.bytes as u64;
        let Some(weights) = matrix.floats else { return Err(not_packed()) };
        crate::ops::same("route", v.width, matrix.cols as i32)?;
        crate::ops::same("route", l.width, spec.experts as i32)?;
        crate::ops::same("route", r.width, 2 * spec.top_k as i32)?;
        let expert_scale = self.gain(spec.per_expert_scale, spec.experts)?;
        let (e, k) = (spec.experts, 2 * spec.top_k);
        // The kernel writes logits and routes without gaps; buffers have some, which one row does not see.
        let alone = self.rows == 1;
        let dense = self.dense_routes(spec.experts, spec.top_k)?;
        let (logits_at, routes_at) = if alone { (l.ptr, r.ptr) } else { dense };
        for (first, rows) in self.tiles() {
            let chosen = self.chosen(first)?;
            let call = Router {
                weights,
                weights_bf16: false,
                x: v.ptr.at(first * v.stride as usize * 4),
                x_stride: v.stride as usize,
                width: v.width as usize,
                rows,
                experts: spec.experts,
                top_k: spec.top_k,
                expert_scale,
                logits: logits_at.at(first * e * 4),
                routes: routes_at.at(first * k * 4),
                groups: chosen.groups,
                group_weight: chosen.weights,
            };
            // SAFETY: widths agree.
            unsafe { producers::router(self.on.queue(), &call)? };
        }
        if !alone && !self.on.upload.batch.taps.points.is_empty() {
            for row in 0..self.rows {
                let (to, from) = (r.ptr.at(row * r.stride as usize * 4), routes_at.at(row * k * 4));
                // SAFETY: both hold the row.
                unsafe { self.on.stream.copy(to, from, k * 4)? };
            }
        }
        self.routed = true;
        Ok(())
    }

    /// Where logits and routes of all rows are without gaps.
    fn dense_routes(&mut self, experts: usize, top_k: usize) -> Result<(DevPtr, DevPtr)> {
        let most = self.most_rows();
        let bytes = most * (experts + 2 * top_k) * 4;
        let logits = self.on.workspace.get(Piece::Routes, &self.on.stream, bytes)?;
        Ok((logits, logits.at(most * experts * 4)))
    }

    /// Rows that buffers have.
    fn most_rows(&self) -> usize {
        self.on.acts.iter().map(|a| a.spec.max_rows).max().unwrap_or(0)
    }

    fn fast_experts(&mut self, out: Act, x: Act, spec: &ExpertSpec, most_planes: usize) -> Result<()> {
        let (Some(up), Some(down)) = (self.one_run(spec.gate_up), self.one_run(spec.down)) else {
            return Err(not_packed());
        };
        let (o, v) = (self.act(out), self.act(x));
        crate::ops::same("experts", v.width, up.shape.cols as i32)?;
        crate::ops::same("experts", up.shape.rows as i32, 2 * spec.width as i32)?;
        crate::ops::same("experts", down.shape.cols as i32, spec.width as i32)?;
        crate::ops::same("experts", o.width, down.shape.rows as i32)?;
        let both = self.on.mats[spec.gate_up.0 as usize].bytes + self.on.mats[spec.down.0 as usize].bytes;
        let chosen = (self.rows * spec.top_k).min(spec.experts);
        self.left.weight_bytes += (both as u128 * chosen as u128 / spec.experts as u128) as u64;
        let stride = spec.width.next_multiple_of(8);
        if self.rows > MAX_ROWS {
            return self.grouped_experts(out, x, spec, (up, down), stride);
        }
        let bytes = spec.experts * MAX_ROWS * stride * 2;
        let hidden = self.on.workspace.get(Piece::Experts, &self.on.stream, bytes)?;
        let room = if most_planes > 1 { Some(self.plane_room(out)?) } else { None };
        let chosen = self.chosen(0)?;
        let up = ExpertsUp {
            weights: up,
            chosen,
            top_k: spec.top_k,
            x: v.ptr,
            x_stride: v.stride as usize,
            rows: self.rows,
            hidden,
            hidden_stride: stride,
            gate: gate(spec.activation),
        };
        let down = ExpertsDown {
            weights: down,
            chosen,
            top_k: spec.top_k,
            hidden,
            hidden_stride: stride,
            rows: self.rows,
            out: room.map_or(o.ptr, |p| p.ptr),
            out_stride: o.stride as usize,
            most_planes,
        };
        // SAFETY: widths agree, and the hidden piece holds sixteen rows of every expert.
        let count = unsafe {
            skinny_gemm::experts_up(self.on.queue(), &up)?;
            skinny_gemm::experts_down(self.on.queue(), &down)?
        };
        if let Some(room) = room {
            self.planes.retain(|p| p.act != out);
            self.planes.push(Planes { count, ..room });
        }
        Ok(())
    }

    /// Experts over all rows that chose them.
    fn grouped_experts(
        &mut self,
        out: Act,
        x: Act,
        spec: &ExpertSpec,
        (up, down): (Weights, Weights),
        hidden_stride: usize,
    ) -> Result<()> {
        let (o, v, top_k, most) = (self.act(out), self.act(x), spec.top_k, self.most_rows());
        let (_, routes) = self.dense_routes(spec.experts, top_k)?;
        let (stream, workspace) = (&self.on.stream, &mut self.on.workspace);
        let counts = workspace.get(Piece::Lists, stream, spec.experts * (1 + most) * 4)?;
        let parts_stride = (o.width as usize).next_multiple_of(8);
        let hidden_bytes = (most * top_k * hidden_stride * 2).next_multiple_of(256);
        let bytes = hidden_bytes + most * top_k * parts_stride * 4;
        let hidden = workspace.get(Piece::Experts, stream, bytes)?;
        let parts = hidden.at(hidden_bytes);
        let pairs = counts.at(spec.experts * 4);
        let lists = Lists { counts, pairs, list_stride: most, experts: spec.experts, top_k };
        let x_stride = v.stride as usize;
        let up = Grouped { weights: up, lists, x: v.ptr, x_stride, out: hidden, out_stride: hidden_stride };
        let down = Grouped {
            weights: down,
            lists,
            x: hidden,
            x_stride: hidden_stride,
            out: parts,
            out_stride: parts_stride,
        };
        let combine = Combine {
            parts,
            parts_stride,
            out: o.ptr,
            out_stride: o.stride as usize,
            rows: self.rows,
            top_k,
            width: o.width as usize,
        };
        let queue = self.on.queue();
        // SAFETY: widths agree, and the pieces hold the pairs of as many rows as buffers do.
        unsafe {
            gemm_prefill::sort_pairs(queue, routes, self.rows, &lists)?;
            gemm_prefill::grouped_up(queue, &up, gate(spec.activation), routes)?;
            gemm_prefill::grouped_down(queue, &down)?;
            gemm_prefill::combine_pairs(queue, &combine)?;
        }
        Ok(())
    }

    fn same_widths(&self, out: Act, x: Act, w: Mat) -> Result<()> {
        let m = &self.on.mats[w.0 as usize];
        crate::ops::same("product", self.act(x).width, m.cols as i32)?;
        crate::ops::same("product", self.act(out).width, m.rows as i32)
    }
}

/// Whether the experts that follow by `routes` are packed, so that they read the list that the router's kernel makes.
fn packed_experts(later: &[Step], routes: Act, mats: &[Matrix]) -> bool {
    let packed = |m: Mat| mats[m.0 as usize].packed.is_some();
    let both = |s: &Step| match s {
        Step::Experts { routes: r, spec, .. } if *r == routes => {
            Some(packed(spec.gate_up) && packed(spec.down))
        }
        _ => None,
    };
    later.iter().find_map(both).unwrap_or(false)
}

fn gate(f: Activation) -> Gate {
    match f {
        Activation::GeluTanh => Gate::GeluTanh,
        Activation::Silu => Gate::Silu,
    }
}

fn not_packed() -> Error {
    Error::Device("a matrix is not in the form that its product was chosen for".into())
}
