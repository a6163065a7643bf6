//! The verbs, mapped to launches.

use lapidary_ops::{
    Act, Activation, AttnSpec, Error, ExpertSpec, Gain, KvFormat, Mat, Norm, Ops, PerLayerSpec, Phase,
    QkvSpec, Result, RouteSpec, TapPoint, ValueSource,
};

use crate::args::{MatrixArgs, Pool, Rows};
use crate::backend::CudaBackend;
use crate::driver::{DevPtr, Event};
use crate::fast::Planes;
use crate::flight::Pending;
use crate::graphs::Left;
use crate::hooks::TapPlace;
use crate::kernels::attention::{self, AttentionArgs};
use crate::kernels::heads::{self, FinishArgs, MOST_HEAD_DIM};
use crate::kernels::hooks::{self, Source, SteerArgs, TapArgs};
use crate::kernels::product::{self, Grouped};
use crate::kernels::{route, rows};
use crate::workspace::Piece;

/// What becomes of what verbs queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It is done.
    Run,
    /// It is recorded; nothing may be waited for.
    Record,
}

/// One run of a program: queues each verb, and keeps the first failure.
pub(crate) struct CudaOps<'a> {
    pub on: &'a mut CudaBackend,
    mode: Mode,
    /// Active rows.
    pub rows: usize,
    kept: bool,
    pub left: Left,
    failed: Option<Error>,
    /// Products whose sums are still in planes.
    pub planes: Vec<Planes>,
    /// Whether the last router left the list that the experts' kernels read.
    pub routed: bool,
    /// Width of the queries that the last layer left; 0 for none.
    pub query_width: usize,
    /// Where the residual is, when its buffer still holds what it was before.
    pub residual: Option<crate::driver::DevPtr>,
}

impl<'a> CudaOps<'a> {
    pub fn new(on: &'a mut CudaBackend, rows: usize, mode: Mode) -> Self {
        CudaOps {
            on,
            mode,
            rows,
            kept: false,
            left: Left::default(),
            failed: None,
            planes: Vec::new(),
            routed: false,
            query_width: 0,
            residual: None,
        }
    }

    /// What the run leaves, or its first failure.
    pub fn finish(mut self) -> Result<Pending> {
        self.note(None);
        match self.failed {
            Some(e) => Err(e),
            None => Ok(Pending { left: self.left, repeated: None }),
        }
    }

    /// Notes when a phase begins, or the pass ends, where times are asked for.
    fn note(&mut self, phase: Option<Phase>) {
        if !self.on.timings || self.failed.is_some() {
            return;
        }
        let record = || {
            let event = Event::timed(self.on.context())?;
            match self.mode {
                Mode::Run => event.record(&self.on.stream)?,
                Mode::Record => event.record_in_graph(&self.on.stream)?,
            }
            Ok(event)
        };
        match record() {
            Ok(event) => self.left.marks.push((phase, event)),
            Err(e) => self.failed = Some(e),
        }
    }

    /// Carries out a verb unless one before it failed.
    pub fn verb(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) {
        if self.failed.is_none() && self.rows > 0 {
            self.failed = work(self).err();
        }
    }

    pub fn act(&self, act: Act) -> Rows {
        self.on.acts[act.0 as usize].rows
    }

    /// A matrix in the bytes of its file.
    fn mat(&self, mat: Mat) -> Result<MatrixArgs> {
        let args = self.on.mats[mat.0 as usize].file;
        args.ok_or_else(|| Error::Device(format!("matrix {} is not kept in the bytes of its file", mat.0)))
    }

    /// A vector of at least `len` values.
    pub fn gain(&self, gain: Gain, len: usize) -> Result<DevPtr> {
        let (ptr, found) = self.on.gains[gain.0 as usize];
        match found >= len {
            true => Ok(ptr),
            false => Err(Error::Device(format!("vector {} has {found} values, {len} are needed", gain.0))),
        }
    }

    /// Active row to batch row, or null while all rows are active.
    pub fn map(&self) -> DevPtr {
        if self.kept { self.on.upload.columns.heads } else { DevPtr::NULL }
    }

    /// Notes what bounds the keys and values that a layer is about to store.
    pub fn bound_cache(&mut self, spec: &QkvSpec) -> Result<()> {
        let Some(kv) = spec.kv else { return Ok(()) };
        let format = self.on.kv.plan.groups[kv.cache.group.index()].format;
        if format == KvFormat::Fp8 && kv.v_norm_eps.is_none() {
            let what = "keep values in fp8 that are not normed: nothing bounds them; take --kv bf16".into();
            return Err(Error::Unsupported { device: "cuda".into(), what });
        }
        let most = self.on.most_gain[kv.k_norm.gain.0 as usize];
        self.on.kv.bound(kv.cache, most);
        Ok(())
    }

    /// What the batch says of rows by their own number is of no use once rows were dropped.
    fn all_rows(&self, verb: &str) -> Result<()> {
        match self.kept {
            false => Ok(()),
            true => Err(Error::Device(format!("{verb} after rows were dropped"))),
        }
    }

    /// Checks ids against the table that they index, and notes that those of later batches must be too.
    fn ids_below(&mut self, column: usize, table: Mat) -> Result<()> {
        let rows = self.on.mats[table.0 as usize].rows as i32;
        self.on.upload.check_ids(column, rows)?;
        let below = &mut self.left.below[column];
        *below = Some(below.map_or(rows, |b| b.min(rows)));
        Ok(())
    }

    /// An activation as it lies: sums that are still in planes are added up on the way.
    pub fn source(&self, act: Act) -> Source {
        match self.planes.iter().find(|p| p.act == act) {
            Some(planes) => planes.source(),
            None => Source::rows(self.act(act)),
        }
    }

    /// Copies rows for the host: `y`, or with a second branch and an epsilon the sum of both, normed.
    pub fn copy_out(
        &mut self,
        point: TapPoint,
        y: Source,
        z: Option<(Source, f32)>,
        width: i32,
    ) -> Result<()> {
        let place = TapPlace { point, rows: self.rows, width: width as usize };
        let (index, floats) = (self.left.taps.len(), place.rows * place.width);
        let context = self.on.context().clone();
        let out = self.on.hooks.tap(&context, index, floats)?;
        let (z, eps) = z.unwrap_or((Source::NONE, 0.0));
        // SAFETY: buffers hold the rows of every uploaded batch, and there is room for as many values.
        unsafe { hooks::tap(self.on.queue(), &TapArgs { y, z, out, width, eps }, self.rows)? };
        self.left.taps.push(place);
        Ok(())
    }

    pub fn product(&mut self, out: Act, x: Act, w: Mat, softcap: Option<f32>) -> Result<()> {
        let (o, v, m) = (self.act(out), self.act(x), self.mat(w)?);
        same("product", v.width, m.cols)?;
        same("product", o.width, m.rows)?;
        // SAFETY: the widths agree, and buffers hold the rows of every uploaded batch.
        unsafe { Ok(product::linear(self.on.queue(), o, v, m, self.rows, softcap)?) }
    }

    fn run_experts(&mut self, out: Act, x: Act, routes: Act, spec: &ExpertSpec) -> Result<()> {
        let (o, v, r) = (self.act(out), self.act(x), self.act(routes));
        let (gate_up, down) = (self.mat(spec.gate_up)?, self.mat(spec.down)?);
        let (hidden, width, pairs) = (o.width as usize, spec.width, self.rows * spec.top_k);
        same("experts", v.width, gate_up.cols)?;
        same("experts", down.cols, width as i32)?;
        same("experts", gate_up.rows, (spec.experts * 2 * width) as i32)?;
        same("experts", down.rows, (spec.experts * hidden) as i32)?;
        same("experts", r.width, 2 * spec.top_k as i32)?;
        let most_pairs = self.on.acts[routes.0 as usize].spec.max_rows * spec.top_k;
        let (stream, workspace) = (&self.on.stream, &mut self.on.workspace);
        let order = workspace.get(Piece::Pairs, stream, (most_pairs + spec.experts + 1) * 4)?;
        let floats = most_pairs * (3 * width + hidden);
        let middle = workspace.get(Piece::Experts, stream, floats * 4)?;
        let both = Rows::floats(middle, 2 * width);
        let inner = Rows::floats(middle.at(most_pairs * 2 * width * 4), width);
        let parts = Rows::floats(middle.at(most_pairs * 3 * width * 4), hidden);
        let starts = order.at(most_pairs * 4);
        let grouped = Grouped { order, starts, experts: spec.experts };
        let (queue, experts, top_k, rows_) = (self.on.queue(), spec.experts, spec.top_k, self.rows);
        // SAFETY: shapes were compared; the workspace holds the pairs of as many rows as the buffers do.
        unsafe {
            route::sort_pairs(queue, r, order, starts, experts, top_k, rows_)?;
            product::experts(queue, both, v, gate_up, grouped, 2 * width, top_k)?;
            let (gate, up) = (both.columns(0, width), both.columns(width, width));
            rows::gate(queue, inner, gate, up, 0, spec.activation, pairs)?;
            product::experts(queue, parts, inner, down, grouped, hidden, 1)?;
            route::combine(queue, o, parts, r, top_k, rows_)?;
        }
        Ok(())
    }
}

/// Widths are verified when a model is built; a kernel that would leave its buffers is refused once more here.
pub(crate) fn same(verb: &str, found: i32, expected: i32) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(Error::Device(format!("{verb}: {found} values where {expected} are needed"))),
    }
}

impl Ops for CudaOps<'_> {
    fn embed(&mut self, out: Act, table: Mat, scale: f32) {
        self.verb(|s| {
            s.all_rows("embed")?;
            s.ids_below(0, table)?;
            let (o, tokens) = (s.act(out), s.on.upload.columns.tokens);
            same("embed", o.width, s.on.mats[table.0 as usize].cols as i32)?;
            if s.on.mats[table.0 as usize].file.is_none()
                && let Some(packed) = s.one_run(table)
            {
                // SAFETY: tokens are rows of the table, and widths agree.
                return unsafe { Ok(rows::embed_packed(s.on.queue(), o, &packed, tokens, scale, s.rows)?) };
            }
            let t = s.mat(table)?;
            // SAFETY: tokens are rows of the table, and widths agree.
            unsafe { Ok(rows::embed(s.on.queue(), o, t, tokens, scale, s.rows)?) }
        });
    }

    fn inject_soft(&mut self, out: Act) {
        self.verb(|s| {
            s.all_rows("inject_soft")?;
            let (batch, columns) = (&s.on.upload.batch, s.on.upload.columns);
            let given = batch.soft_values.len();
            same("inject_soft", given as i32, (batch.soft_rows.len() * s.act(out).width as usize) as i32)?;
            if given == 0 {
                return Ok(());
            }
            let (soft, values) = (columns.soft, columns.soft_values);
            // SAFETY: as many values as soft rows and the width ask for.
            unsafe { Ok(rows::inject_soft(s.on.queue(), s.act(out), soft, values, s.rows)?) }
        });
    }

    fn rope_table(&mut self, out: Act, inv_freq: Gain) {
        self.verb(|s| {
            s.all_rows("rope_table")?;
            let o = s.act(out);
            let (freq, positions) = (s.gain(inv_freq, o.width as usize / 2)?, s.on.upload.columns.positions);
            // SAFETY: there are as many frequencies as pairs.
            unsafe { Ok(rows::rope_table(s.on.queue(), o, freq, positions, s.rows)?) }
        });
    }

    fn rms_norm(&mut self, out: Act, x: Act, norm: Norm) {
        self.verb(|s| {
            let (o, v) = (s.act(out), s.act(x));
            same("rms_norm", o.width, v.width)?;
            let gain = s.gain(norm.gain, v.width as usize)?;
            // SAFETY: widths agree.
            unsafe { Ok(rows::rms_norm(s.on.queue(), o, v, gain, norm.eps, s.rows)?) }
        });
    }

    fn cast(&mut self, out: Act, x: Act) {
        self.verb(|s| {
            let (o, v) = (s.act(out), s.act(x));
            same("cast", o.width, v.width)?;
            // SAFETY: widths agree.
            unsafe { Ok(rows::cast(s.on.queue(), o, v, s.rows)?) }
        });
    }

    fn linear(&mut self, out: Act, x: Act, w: Mat) {
        self.verb(|s| s.product(out, x, w, None));
    }

    fn geglu(&mut self, out: Act, gate_up: Act, f: Activation) {
        self.verb(|s| {
            let (o, both) = (s.act(out), s.act(gate_up));
            same("geglu", both.width, 2 * o.width)?;
            let width = o.width as usize;
            let (gate, up) = (both.columns(0, width), both.columns(width, width));
            // SAFETY: widths agree.
            unsafe { Ok(rows::gate(s.on.queue(), o, gate, up, 0, f, s.rows)?) }
        });
    }

    fn add(&mut self, x: Act, y: Act) {
        self.verb(|s| {
            let (o, v) = (s.act(x), s.act(y));
            same("add", o.width, v.width)?;
            // SAFETY: widths agree.
            unsafe { Ok(rows::add(s.on.queue(), o, v, s.rows)?) }
        });
    }

    fn scale(&mut self, x: Act, by: f32) {
        // SAFETY: in place.
        self.verb(|s| unsafe { Ok(rows::scale(s.on.queue(), s.act(x), by, s.rows)?) });
    }

    fn qkv_finish(&mut self, qkv: Act, spec: &QkvSpec) {
        self.verb(|s| {
            s.bound_cache(spec)?;
            let (v, rope, d) = (s.act(qkv), s.act(spec.rope), spec.head_dim);
            let parts = match spec.kv {
                None => 0,
                Some(kv) if kv.values == ValueSource::Keys => 1,
                Some(_) => 2,
            };
            same("qkv_finish", rope.width, d as i32)?;
            same("qkv_finish", v.width, ((spec.heads + parts * spec.kv_heads) * d) as i32)?;
            if d > MOST_HEAD_DIM {
                return Err(Error::Device(format!("heads of {d} values, more than {MOST_HEAD_DIM}")));
            }
            let none = Pool {
                ptr: DevPtr::NULL,
                kv_heads: 0,
                head_dim: 0,
                format: 0,
                row_bytes: 0,
                fast: 0,
                scales: [1.0; 2],
                pad: 0,
            };
            let group = spec.kv.map_or(0, |kv| kv.cache.group.index());
            let args = FinishArgs {
                qkv: v,
                rope,
                kv: spec.kv.map_or(none, |kv| s.on.kv.pool(kv.cache)),
                q_gain: s.gain(spec.q_norm.gain, d)?,
                k_gain: spec.kv.map_or(Ok(DevPtr::NULL), |kv| s.gain(kv.k_norm.gain, d))?,
                cell: s.on.upload.columns.cell[group],
                map: s.map(),
                heads: spec.heads as i32,
                kv_heads: spec.kv.map_or(0, |_| spec.kv_heads as i32),
                values_are_keys: (parts == 1).into(),
                norm_values: spec.kv.is_some_and(|kv| kv.v_norm_eps.is_some()).into(),
                q_eps: spec.q_norm.eps,
                k_eps: spec.kv.map_or(0.0, |kv| kv.k_norm.eps),
                v_eps: spec.kv.and_then(|kv| kv.v_norm_eps).unwrap_or(0.0),
            };
            if let Some(kv) = spec.kv {
                let shape = s.on.kv.plan.groups[group].layers[kv.cache.index];
                same("qkv_finish", shape.kv_heads as i32, spec.kv_heads as i32)?;
                same("qkv_finish", shape.head_dim as i32, d as i32)?;
            }
            // SAFETY: widths agree, and the uploaded cells are in the pools.
            unsafe { Ok(heads::qkv_finish(s.on.queue(), &args, s.rows)?) }
        });
    }

    fn attention(&mut self, out: Act, qkv: Act, spec: &AttnSpec) {
        self.verb(|s| {
            let (o, q, d) = (s.act(out), s.act(qkv), spec.head_dim);
            let (kv, group) = (s.on.kv.pool(spec.cache), spec.cache.group.index());
            same("attention", o.width, (spec.heads * d) as i32)?;
            same("attention", kv.head_dim, d as i32)?;
            same("attention", kv.kv_heads, spec.kv_heads as i32)?;
            let columns = &s.on.upload.columns;
            let args = AttentionArgs {
                out: o,
                q,
                kv,
                positions: columns.positions,
                visible_to: columns.visible_to[group],
                table: columns.table[group],
                pages: columns.pages[group],
                map: s.map(),
                heads: spec.heads as i32,
                window: spec.window.map_or(0, |w| i32::try_from(w).unwrap_or(i32::MAX)),
                scale: spec.scale,
                softcap: spec.softcap.unwrap_or(0.0),
            };
            // SAFETY: widths agree, and the uploaded tables lead to pages of the pools.
            unsafe { Ok(attention::attention(s.on.queue(), &args, s.rows)?) }
        });
    }

    fn route(&mut self, out: Act, logits: Act, spec: &RouteSpec) {
        self.verb(|s| {
            let (o, v) = (s.act(out), s.act(logits));
            same("route", v.width, spec.experts as i32)?;
            same("route", o.width, 2 * spec.top_k as i32)?;
            if spec.top_k > spec.experts {
                return Err(Error::Device(format!("{} of {} experts", spec.top_k, spec.experts)));
            }
            let scale = s.gain(spec.per_expert_scale, spec.experts)?;
            // SAFETY: widths agree.
            unsafe { Ok(route::route(s.on.queue(), o, v, scale, spec.experts, spec.top_k, s.rows)?) }
        });
    }

    fn experts(&mut self, out: Act, x: Act, routes: Act, spec: &ExpertSpec) {
        self.verb(|s| s.run_experts(out, x, routes, spec));
    }

    fn per_layer_inputs(&mut self, out: Act, context: Act, spec: &PerLayerSpec) {
        self.verb(|s| {
            s.all_rows("per_layer_inputs")?;
            s.ids_below(1, spec.table)?;
            let (o, c, table) = (s.act(out), s.act(context), s.mat(spec.table)?);
            let width = (spec.layers * spec.width) as i32;
            same("per_layer_inputs", o.width, width)?;
            same("per_layer_inputs", c.width, width)?;
            same("per_layer_inputs", table.cols, width)?;
            let args = rows::PerLayerArgs {
                out: o,
                context: c,
                table,
                tokens: s.on.upload.columns.per_layer_tokens,
                gain: s.gain(spec.norm.gain, spec.width)?,
                width: spec.width as i32,
                eps: spec.norm.eps,
                context_scale: spec.context_scale,
                token_scale: spec.token_scale,
                mix_scale: spec.mix_scale,
            };
            // SAFETY: widths agree, and tokens are rows of the table.
            unsafe { Ok(rows::per_layer_inputs(s.on.queue(), &args, s.rows, spec.layers)?) }
        });
    }

    fn per_layer_gate(&mut self, out: Act, gate: Act, inputs: Act, layer: usize, f: Activation) {
        self.verb(|s| {
            let (o, g, all) = (s.act(out), s.act(gate), s.act(inputs));
            same("per_layer_gate", g.width, o.width)?;
            let from = layer * o.width as usize;
            if from + o.width as usize > all.width as usize {
                return Err(Error::Device(format!("per_layer_gate: no inputs of layer {layer}")));
            }
            // SAFETY: widths agree.
            unsafe { Ok(rows::gate(s.on.queue(), o, g, all, from, f, s.rows)?) }
        });
    }

    fn keep_rows(&mut self, acts: &[Act]) {
        self.verb(|s| {
            s.all_rows("keep_rows")?;
            let (heads, count) = (s.on.upload.columns.heads, s.on.upload.batch.heads.len());
            for &act in acts {
                // SAFETY: heads are rows of the batch, ascending.
                unsafe { rows::keep_rows(s.on.queue(), s.act(act), heads, count)? }
            }
            s.rows = count;
            s.kept = true;
            Ok(())
        });
    }

    fn logits(&mut self, out: Act, x: Act, head: Mat, softcap: Option<f32>) {
        self.verb(|s| s.product(out, x, head, softcap));
    }

    fn argmax(&mut self, logits: Act) {
        self.verb(|s| {
            let most = s.on.acts[logits.0 as usize].spec.max_rows;
            let (stream, workspace) = (&s.on.stream, &mut s.on.workspace);
            let out = workspace.get(Piece::Tokens, stream, most * 4)?;
            let scratch = workspace.get(Piece::Argmax, stream, most * rows::ARGMAX_PARTS * 8)?;
            // SAFETY: both pieces hold as many rows as the logits do.
            unsafe { rows::argmax(s.on.queue(), out, s.act(logits), scratch, s.rows)? }
            s.left.tokens = s.rows;
            s.draw(logits, out, None)
        });
    }

    fn tap(&mut self, point: TapPoint, x: Act) {
        self.verb(|s| match s.on.upload.batch.taps.wants(point) {
            true => {
                let source = s.source(x);
                s.copy_out(point, source, None, s.act(x).width)
            }
            false => Ok(()),
        });
    }

    fn steer(&mut self, x: Act, layer: usize) {
        self.verb(|s| {
            if !s.on.hooks.layers().contains(&layer) {
                return Ok(());
            }
            let (sets, projections, stride) = s.on.hooks.steering();
            let (set, map, x) = (s.on.upload.columns.steer, s.map(), s.act(x));
            let (stride, layer) = (stride as i32, layer as i32);
            let args = SteerArgs { x, set, map, sets, projections, stride, layer };
            // SAFETY: sets were checked to be as wide as the residual, and the batch's rows to name sets that are held.
            unsafe { Ok(hooks::steer(s.on.queue(), &args, s.rows)?) }
        });
    }

    fn norm_add(&mut self, x: Act, y: Act, norm: Norm) {
        self.verb(|s| {
            let (o, v) = (s.act(x), s.act(y));
            same("norm_add", o.width, v.width)?;
            let gain = s.gain(norm.gain, v.width as usize)?;
            // SAFETY: widths agree.
            unsafe { Ok(rows::norm_add(s.on.queue(), o, v, gain, norm.eps, s.rows)?) }
        });
    }

    fn mark(&mut self, phase: Phase) {
        self.note(Some(phase));
    }
}
