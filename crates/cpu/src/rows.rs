//! Verbs that look things up for a row: embeddings, soft rows, rope angles, per-layer inputs, and the step
//! between the stacked projection and attention.

use lapidary_ops::{Act, PerLayerSpec, QkvSpec, ValueSource};

use crate::kv::{Side, encode};
use crate::math;
use crate::matrix::Matrix;
use crate::norm;
use crate::ops::{CpuOps, Scope};

impl CpuOps<'_> {
    /// `out[r] = table[token[r]] * scale`.
    pub(crate) fn embed_rows(&mut self, out: Act, table: &Matrix, scale: f32) {
        self.enter(Scope::Rows);
        let out = self.act(out);
        assert_eq!(out.width(), table.cols, "embedding into {}", out.spec.name);
        for r in self.own_rows() {
            let token = self.pass.upload.batch.tokens[self.batch_row(r)];
            // SAFETY: the row is this worker's.
            let row = unsafe { out.row_mut(r) };
            table.decode_row(self.isa(), token as usize, row);
            math::scale(self.isa(), row, scale);
        }
    }

    /// `out[r] = soft_values` at soft rows.
    pub(crate) fn soft_rows(&mut self, out: Act) {
        self.enter(Scope::Rows);
        let (out, own) = (self.act(out), self.own_rows());
        let batch = &self.pass.upload.batch;
        assert!(
            batch.soft_rows.is_empty() || !self.is_kept(),
            "soft rows are injected before rows are dropped"
        );
        for (values, &row) in batch.soft_values.chunks_exact(out.width()).zip(&batch.soft_rows) {
            if own.contains(&(row as usize)) {
                // SAFETY: the row is this worker's.
                unsafe { out.row_mut(row as usize) }.copy_from_slice(values);
            }
        }
    }

    /// `out[r] = [cos(p f).., sin(p f)..]`.
    pub(crate) fn rope_rows(&mut self, out: Act, inv_freq: &[f32]) {
        self.enter(Scope::Rows);
        let out = self.act(out);
        assert_eq!(out.width(), 2 * inv_freq.len(), "rope table {}", out.spec.name);
        for r in self.own_rows() {
            let position = self.pass.upload.batch.positions[self.batch_row(r)] as f32;
            // SAFETY: the row is this worker's.
            let (cos, sin) = unsafe { out.row_mut(r) }.split_at_mut(inv_freq.len());
            for ((c, s), f) in cos.iter_mut().zip(sin).zip(inv_freq) {
                let angle = position * f;
                (*s, *c) = angle.sin_cos();
            }
        }
    }

    /// Norms, rotations and KV writes on the stacked projection.
    pub(crate) fn finish_heads(&mut self, qkv: Act, spec: &QkvSpec) {
        self.enter(Scope::Rows);
        let (pass, isa, d) = (self.pass, self.isa(), spec.head_dim);
        let (qkv, rope) = (self.act(qkv), self.act(spec.rope));
        assert_eq!(rope.width(), d, "rope table for heads of {d}");
        let q_gain = pass.gain(spec.q_norm.gain);
        for r in self.own_rows() {
            // SAFETY: the row is this worker's, and the buffers differ (the widths of a stacked projection and
            // of a rope table cannot agree where there is a key).
            let (row, table) = unsafe { (qkv.row_mut(r), rope.row(r)) };
            let (q, rest) = row.split_at_mut(spec.heads * d);
            for head in q.chunks_exact_mut(d) {
                pass.norm_in_place(head, q_gain, spec.q_norm.eps);
                norm::rotate(isa, head, table);
            }
            let Some(kv) = &spec.kv else { continue };
            let (keys, rest) = rest.split_at_mut(spec.kv_heads * d);
            let b = self.batch_row(r);
            let writes = pass.upload.writes[kv.cache.group.index()][b];
            let (page, in_page) = pass.upload.cell(b, kv.cache.group, pass.upload.batch.positions[b]);
            let (shape, format) = pass.kv.layer(kv.cache);
            assert!(shape.kv_heads == spec.kv_heads && shape.head_dim == d, "heads of the KV cache");
            let store = |side, head: usize, values: &[f32]| {
                if writes {
                    // SAFETY: no two rows of the batch write one cell (checked on upload), the row is this
                    // worker's, and reads come after the next meeting.
                    let cell = unsafe { pass.kv.cell_mut(kv.cache, page, side, head, in_page) };
                    encode(format, values, cell);
                }
            };
            // Values first: they may come from the keys as projected.
            for head in 0..spec.kv_heads {
                let values = match kv.values {
                    ValueSource::Projected => &mut rest[head * d..][..d],
                    ValueSource::Keys => self.scratch.results.get(d),
                };
                if kv.values == ValueSource::Keys {
                    values.copy_from_slice(&keys[head * d..][..d]);
                }
                if let Some(eps) = kv.v_norm_eps {
                    let factor = norm::inv_rms(isa, values, 1.0, eps);
                    math::scale(isa, values, factor);
                }
                store(Side::Values, head, values);
            }
            let k_gain = pass.gain(kv.k_norm.gain);
            for (i, head) in keys.chunks_exact_mut(d).enumerate() {
                pass.norm_in_place(head, k_gain, kv.k_norm.eps);
                norm::rotate(isa, head, table);
                store(Side::Keys, i, head);
            }
        }
    }

    /// `out[r, l] = (rms(context[r, l] * context_scale) + table[token[r], l] * token_scale) * mix_scale`.
    pub(crate) fn mix_per_layer(&mut self, out: Act, context: Act, spec: &PerLayerSpec) {
        self.enter(Scope::Rows);
        let (pass, isa) = (self.pass, self.isa());
        let (to, from, table) = (self.act(out), self.act(context), pass.mat(spec.table));
        let gain = pass.gain(spec.norm.gain);
        let width = spec.layers * spec.width;
        assert!(
            to.width() == width && from.width() == width && table.cols == width && gain.len() == spec.width,
            "per-layer inputs of {}",
            from.spec.name
        );
        for r in self.own_rows() {
            let token = pass.upload.batch.per_layer_tokens[self.batch_row(r)];
            let looked_up = self.scratch.results.get(width);
            table.decode_row(isa, token as usize, looked_up);
            // SAFETY: the row is this worker's.
            let row = unsafe { to.row_mut(r) };
            if out != context {
                // SAFETY: the row is this worker's, and the buffers differ.
                row.copy_from_slice(unsafe { from.row(r) });
            }
            for (part, token) in row.chunks_exact_mut(spec.width).zip(looked_up.chunks_exact(spec.width)) {
                let factor = norm::inv_rms(isa, part, spec.context_scale, spec.norm.eps);
                mix(part, token, gain, factor, spec);
            }
        }
    }
}

fn mix(part: &mut [f32], token: &[f32], gain: &[f32], factor: f32, spec: &PerLayerSpec) {
    for ((x, &t), &g) in part.iter_mut().zip(token).zip(gain) {
        *x = (*x * spec.context_scale * factor * g + t * spec.token_scale) * spec.mix_scale;
    }
}
