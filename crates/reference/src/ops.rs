//! The verbs of a pass in plain loops.
//!
//! Each verb takes a copy of its input row, computes the row's result by the formulas of
//! [`math`](crate::math) and stores it: no verb cares whether its buffers are one and the same. All fused
//! verbs are left at their defaults, which makes this the judge of every override.

use lapidary_ops::{
    Act, Activation, AttnSpec, ExpertSpec, Gain, KvRef, Mat, Norm, Ops, Outcome, PAGE_TOKENS, PerLayerSpec,
    Projections, QkvSpec, RouteSpec, RowSpan, SteerEdit, SteerMode, Tap, TapPoint, ValueSource,
};

use crate::backend::ReferenceBackend;
use crate::kv::Side;
use crate::math::{activate, argmax, dot, rms_norm, rotate, soft_cap, softmax, top_k};

/// One run of a program.
pub(crate) struct Pass<'a> {
    on: &'a mut ReferenceBackend,
    /// The batch row that each active row is: all of them, or after `keep_rows` those with a head.
    rows: Vec<usize>,
    /// The sequence of each batch row.
    spans: Vec<RowSpan>,
    outcome: Outcome,
}

impl<'a> Pass<'a> {
    /// A pass over the uploaded batch.
    pub fn new(on: &'a mut ReferenceBackend) -> Self {
        let rows = (0..on.batch.tokens.len()).collect();
        let spans = on.batch.spans.iter().flat_map(|s| std::iter::repeat_n(*s, s.rows)).collect();
        let batch_rows = on.batch.steer.len();
        let edits =
            on.batch.steer.iter().filter_map(|&set| on.steer_sets.get(usize::try_from(set).ok()?)?.as_ref());
        let stride = edits.map(|set| set.edits.len()).max().unwrap_or(0);
        let projections = Projections::new(batch_rows, stride);
        Pass { on, rows, spans, outcome: Outcome { projections, ..Outcome::default() } }
    }

    /// What the pass leaves behind.
    pub fn finish(self) -> Outcome {
        self.outcome
    }

    fn width(&self, act: Act) -> usize {
        self.on.acts[act.0 as usize].spec.width
    }

    /// Row `r` of `act`.
    fn row(&self, act: Act, r: usize) -> &[f32] {
        let width = self.width(act);
        &self.on.acts[act.0 as usize].values[r * width..(r + 1) * width]
    }

    fn row_mut(&mut self, act: Act, r: usize) -> &mut [f32] {
        let width = self.width(act);
        &mut self.on.acts[act.0 as usize].values[r * width..(r + 1) * width]
    }

    fn gain(&self, gain: Gain) -> &[f32] {
        &self.on.gains[gain.0 as usize]
    }

    fn position(&self, r: usize) -> i32 {
        self.on.batch.positions[self.rows[r]]
    }

    /// Page and place in it of `position` in the sequence of active row `r`.
    fn cell(&self, cache: KvRef, r: usize, position: usize) -> (usize, usize) {
        let table = self.spans[self.rows[r]].tables[cache.group.index()];
        let entry = table.start + position / PAGE_TOKENS - table.first_block;
        let page = self.on.batch.pages[cache.group.index()][entry];
        (page as usize, position % PAGE_TOKENS)
    }

    /// `out = map(x W^T)`, one weight row at a time over all active rows.
    fn multiply(&mut self, out: Act, x: Act, w: Mat, map: impl Fn(f64) -> f64) {
        let (x_width, out_width) = (self.width(x), self.width(out));
        let input = self.on.acts[x.0 as usize].values[..self.rows.len() * x_width].to_vec();
        let matrix = &self.on.mats[w.0 as usize];
        let result = &mut self.on.acts[out.0 as usize].values;
        for o in 0..matrix.rows {
            let weights = matrix.row(o);
            for (r, x) in input.chunks_exact(x_width).enumerate() {
                result[r * out_width + o] = map(dot(weights, x)) as f32;
            }
        }
    }
}

impl Ops for Pass<'_> {
    fn embed(&mut self, out: Act, table: Mat, scale: f32) {
        for r in 0..self.rows.len() {
            let token = self.on.batch.tokens[self.rows[r]] as usize;
            let row: Vec<f32> = self.on.mats[table.0 as usize].row(token).iter().map(|v| v * scale).collect();
            self.row_mut(out, r).copy_from_slice(&row);
        }
    }

    fn inject_soft(&mut self, out: Act) {
        let width = self.width(out);
        for r in 0..self.rows.len() {
            let batch_row = self.rows[r] as i32;
            if let Some(i) = self.on.batch.soft_rows.iter().position(|&s| s == batch_row) {
                let values = self.on.batch.soft_values[i * width..(i + 1) * width].to_vec();
                self.row_mut(out, r).copy_from_slice(&values);
            }
        }
    }

    fn rope_table(&mut self, out: Act, inv_freq: Gain) {
        for r in 0..self.rows.len() {
            let p = self.position(r) as f32;
            // The product is float32 by contract: at position 100,000 its rounding is seen in the cosine.
            let angles: Vec<f32> = self.gain(inv_freq).iter().map(|f| p * f).collect();
            let (cos, sin) = self.row_mut(out, r).split_at_mut(angles.len());
            for (i, &angle) in angles.iter().enumerate() {
                cos[i] = (angle as f64).cos() as f32;
                sin[i] = (angle as f64).sin() as f32;
            }
        }
    }

    fn rms_norm(&mut self, out: Act, x: Act, norm: Norm) {
        for r in 0..self.rows.len() {
            let mut row = self.row(x, r).to_vec();
            rms_norm(&mut row, Some(self.gain(norm.gain)), norm.eps);
            self.row_mut(out, r).copy_from_slice(&row);
        }
    }

    fn cast(&mut self, out: Act, x: Act) {
        for r in 0..self.rows.len() {
            let row = self.row(x, r).to_vec();
            self.row_mut(out, r).copy_from_slice(&row);
        }
    }

    fn linear(&mut self, out: Act, x: Act, w: Mat) {
        self.multiply(out, x, w, |sum| sum);
    }

    fn geglu(&mut self, out: Act, gate_up: Act, f: Activation) {
        for r in 0..self.rows.len() {
            let gate_up = self.row(gate_up, r).to_vec();
            gated(self.row_mut(out, r), &gate_up, f);
        }
    }

    fn add(&mut self, x: Act, y: Act) {
        for r in 0..self.rows.len() {
            let y = self.row(y, r).to_vec();
            self.row_mut(x, r).iter_mut().zip(y).for_each(|(x, y)| *x += y);
        }
    }

    fn scale(&mut self, x: Act, by: f32) {
        for r in 0..self.rows.len() {
            self.row_mut(x, r).iter_mut().for_each(|x| *x *= by);
        }
    }

    fn qkv_finish(&mut self, qkv: Act, spec: &QkvSpec) {
        let d = spec.head_dim;
        let (keys_at, values_at) = (spec.heads * d, (spec.heads + spec.kv_heads) * d);
        for r in 0..self.rows.len() {
            let cos_sin = self.row(spec.rope, r).to_vec();
            let mut row = self.row(qkv, r).to_vec();
            for q in row[..keys_at].chunks_exact_mut(d) {
                rms_norm(q, Some(self.gain(spec.q_norm.gain)), spec.q_norm.eps);
                rotate(q, &cos_sin);
            }
            self.row_mut(qkv, r)[..keys_at].copy_from_slice(&row[..keys_at]);

            let Some(kv) = spec.kv else { continue };
            let cell = self.cell(kv.cache, r, self.position(r) as usize);
            for h in 0..spec.kv_heads {
                let mut k = row[keys_at + h * d..][..d].to_vec();
                // Values from keys are the projection as it came: before the norm, before the rotation.
                let mut v = match kv.values {
                    ValueSource::Keys => k.clone(),
                    ValueSource::Projected => row[values_at + h * d..][..d].to_vec(),
                };
                rms_norm(&mut k, Some(self.gain(kv.k_norm.gain)), kv.k_norm.eps);
                rotate(&mut k, &cos_sin);
                if let Some(eps) = kv.v_norm_eps {
                    rms_norm(&mut v, None, eps);
                }
                self.on.kv.store(kv.cache, Side::Keys, cell, h, &k);
                self.on.kv.store(kv.cache, Side::Values, cell, h, &v);
            }
        }
    }

    fn attention(&mut self, out: Act, qkv: Act, spec: &AttnSpec) {
        let d = spec.head_dim;
        for r in 0..self.rows.len() {
            let position = self.position(r) as usize;
            // A window of W holds position - W + 1 ..= position.
            let from = spec.window.map_or(0, |w| (position + 1).saturating_sub(w));
            let to = self.on.batch.visible_to[spec.cache.group.index()][self.rows[r]] as usize;
            let cells: Vec<_> = (from..to).map(|p| self.cell(spec.cache, r, p)).collect();
            for h in 0..spec.heads {
                let kv_head = h / (spec.heads / spec.kv_heads);
                let q = &self.row(qkv, r)[h * d..(h + 1) * d];
                let score = |&cell| {
                    let k = self.on.kv.head(spec.cache, Side::Keys, cell, kv_head);
                    soft_cap(dot(q, k) * spec.scale as f64, spec.softcap)
                };
                let mut weights: Vec<f64> = cells.iter().map(score).collect();
                softmax(&mut weights);
                let mut sum = vec![0.0f64; d];
                for (&cell, p) in cells.iter().zip(weights) {
                    let v = self.on.kv.head(spec.cache, Side::Values, cell, kv_head);
                    sum.iter_mut().zip(v).for_each(|(s, &v)| *s += p * v as f64);
                }
                let o = &mut self.row_mut(out, r)[h * d..(h + 1) * d];
                o.iter_mut().zip(sum).for_each(|(o, s)| *o = s as f32);
            }
        }
    }

    fn route(&mut self, out: Act, logits: Act, spec: &RouteSpec) {
        for r in 0..self.rows.len() {
            let mut p: Vec<f64> = self.row(logits, r)[..spec.experts].iter().map(|&v| v as f64).collect();
            softmax(&mut p);
            let chosen = top_k(&p, spec.top_k);
            let sum: f64 = chosen.iter().map(|&e| p[e]).sum();
            let scales = self.gain(spec.per_expert_scale);
            let ids = chosen.iter().map(|&e| e as f32);
            let weights = chosen.iter().map(|&e| (p[e] / sum * scales[e] as f64) as f32);
            let row: Vec<f32> = ids.chain(weights).collect();
            self.row_mut(out, r).copy_from_slice(&row);
        }
    }

    fn experts(&mut self, out: Act, x: Act, routes: Act, spec: &ExpertSpec) {
        let hidden = self.width(out);
        let (gate_up, down) = (spec.gate_up.0 as usize, spec.down.0 as usize);
        for r in 0..self.rows.len() {
            let (ids, weights) = self.row(routes, r).split_at(spec.top_k);
            let x = self.row(x, r);
            let mut sum = vec![0.0f64; hidden];
            for (&id, &weight) in ids.iter().zip(weights) {
                let e = id as usize;
                let project = |o| dot(self.on.mats[gate_up].row(e * 2 * spec.width + o), x) as f32;
                let both: Vec<f32> = (0..2 * spec.width).map(project).collect();
                let mut inner = vec![0.0; spec.width];
                gated(&mut inner, &both, spec.activation);
                for (o, s) in sum.iter_mut().enumerate() {
                    *s += weight as f64 * dot(self.on.mats[down].row(e * hidden + o), &inner);
                }
            }
            self.row_mut(out, r).iter_mut().zip(sum).for_each(|(o, s)| *o = s as f32);
        }
    }

    fn per_layer_inputs(&mut self, out: Act, context: Act, spec: &PerLayerSpec) {
        for r in 0..self.rows.len() {
            let token = self.on.batch.per_layer_tokens[self.rows[r]] as usize;
            let mut row = self.row(context, r).to_vec();
            row.iter_mut().for_each(|v| *v *= spec.context_scale);
            let table = self.on.mats[spec.table.0 as usize].row(token);
            for l in 0..spec.layers {
                let part = &mut row[l * spec.width..(l + 1) * spec.width];
                rms_norm(part, Some(self.gain(spec.norm.gain)), spec.norm.eps);
                for (v, &t) in part.iter_mut().zip(&table[l * spec.width..]) {
                    let sum = *v as f64 + t as f64 * spec.token_scale as f64;
                    *v = (sum * spec.mix_scale as f64) as f32;
                }
            }
            self.row_mut(out, r).copy_from_slice(&row);
        }
    }

    fn per_layer_gate(&mut self, out: Act, gate: Act, inputs: Act, layer: usize, f: Activation) {
        let width = self.width(gate);
        for r in 0..self.rows.len() {
            let gate = self.row(gate, r).to_vec();
            let input = self.row(inputs, r)[layer * width..(layer + 1) * width].to_vec();
            for (i, o) in self.row_mut(out, r).iter_mut().enumerate() {
                *o = (activate(f, gate[i] as f64) * input[i] as f64) as f32;
            }
        }
    }

    fn keep_rows(&mut self, acts: &[Act]) {
        let heads: Vec<usize> = self.on.batch.heads.iter().map(|&r| r as usize).collect();
        for &act in acts {
            let width = self.width(act);
            let values = &mut self.on.acts[act.0 as usize].values;
            // Heads ascend, so no row is overwritten before it is moved.
            for (to, from) in heads.iter().enumerate() {
                values.copy_within(from * width..(from + 1) * width, to * width);
            }
        }
        self.rows = heads;
    }

    fn steer(&mut self, x: Act, layer: usize) {
        for r in 0..self.rows.len() {
            let batch_row = self.rows[r];
            let Ok(set) = usize::try_from(self.on.batch.steer[batch_row]) else { continue };
            let set = self.on.steer_sets[set].clone().expect("the batch was checked");
            let (first, edits) = set.at(layer);
            for (i, edit) in (first..).zip(edits) {
                let p = edit_row(self.row_mut(x, r), edit);
                let at = batch_row * self.outcome.projections.stride + i;
                self.outcome.projections.values[at] = p;
            }
        }
    }

    fn logits(&mut self, out: Act, x: Act, head: Mat, softcap: Option<f32>) {
        self.multiply(out, x, head, |z| soft_cap(z, softcap));
    }

    fn argmax(&mut self, logits: Act) {
        let best = |r| argmax(self.row(logits, r)).map_or(-1, |token| token as i32);
        self.outcome.argmax = (0..self.rows.len()).map(best).collect();
    }

    fn tap(&mut self, point: TapPoint, x: Act) {
        if self.on.batch.taps.wants(point) {
            let (rows, width) = (self.rows.len(), self.width(x));
            let values = self.on.acts[x.0 as usize].values[..rows * width].to_vec();
            self.outcome.taps.push(Tap { point, rows, width, values });
        }
    }
}

/// Makes one edit of one row and returns the projection that it had before.
fn edit_row(x: &mut [f32], edit: &SteerEdit) -> f32 {
    let p = dot(x, &edit.unit) as f32;
    if edit.strength == 0.0 || edit.gate.is_some_and(|gate| p <= gate || p.is_nan()) {
        return p;
    }
    let s = edit.strength;
    let along = match edit.mode {
        SteerMode::Add => s * edit.norm,
        SteerMode::Ablate | SteerMode::Renorm => -(s * p),
        SteerMode::Clamp => s * (edit.to - p),
    };
    let before = dot(x, x);
    x.iter_mut().zip(edit.unit.iter()).for_each(|(x, u)| *x += along * u);
    let after = dot(x, x);
    if edit.mode == SteerMode::Renorm && after > 0.0 {
        let by = (before / after).sqrt() as f32;
        x.iter_mut().for_each(|x| *x *= by);
    }
    p
}

/// `out = f(gate) * up` with `gate_up = [gate, up]`.
fn gated(out: &mut [f32], gate_up: &[f32], f: Activation) {
    let (gate, up) = gate_up.split_at(out.len());
    for (i, o) in out.iter_mut().enumerate() {
        *o = (activate(f, gate[i] as f64) * up[i] as f64) as f32;
    }
}
