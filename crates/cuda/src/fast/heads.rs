//! Heads in the fast mode: norms, rotation and cache, then attention for few rows or for many.

use lapidary_ops::{Act, AttnSpec, Error, KvFormat, QkvSpec, Result, TapPoint, ValueSource};

use super::fuse::Heads;
use crate::args::{Pool, Rows, kv_code};
use crate::driver::DevPtr;
use crate::kernels::attn_decode::{self, AttnDecode, KvColumns, PageShape};
use crate::kernels::attn_prefill;
use crate::kernels::producers::{self, Finish};
use crate::kernels::rows;
use crate::kernels::skinny_gemm::MAX_ROWS;
use crate::ops::CudaOps;
use crate::workspace::Piece;

fn is_fp8(pool: &Pool) -> bool {
    pool.format == kv_code(KvFormat::Fp8)
}

/// Rows of one call of the attention kernel, which counts its blocks in a table of fixed size.
const ATTENTION_ROWS: usize = 128;

impl CudaOps<'_> {
    /// Whether heads of this width have kernels and pools in their layout.
    pub(super) fn fast_heads(&self, head_dim: usize) -> bool {
        self.on.kv.is_fast(head_dim)
    }

    /// Where normed, rotated queries of a layer are kept as bf16: `rows` of `width` values.
    pub(super) fn queries(&mut self, width: usize) -> Result<DevPtr> {
        let most = self.on.acts.iter().map(|a| a.spec.max_rows).max().unwrap_or(0);
        let bytes = most * width * 2;
        Ok(self.on.workspace.get(Piece::Queries, &self.on.stream, bytes)?)
    }

    /// Whether attention finishes the heads of its rows by itself: every row is its sequence's only one of the pass, which a
    /// recording of several rows would not promise of the passes that repeat it.
    pub(super) fn finishes_in_attention(&self, h: &Heads) -> bool {
        let (own, of) = (h.finish.kv.map(|kv| kv.cache), h.attend);
        self.rows == 1
            && self.on.upload.batch.tokens.len() == 1
            && self.fast_heads(of.head_dim)
            && (h.finish.heads, h.finish.head_dim) == (of.heads, of.head_dim)
            && own.is_none_or(|kv| (kv.group, kv.index) == (of.cache.group, of.cache.index))
    }

    /// The call that finishes heads, queries left in place where `store_q`.
    fn finish_call(&mut self, qkv: Act, spec: &QkvSpec, store_q: bool) -> Result<Finish> {
        self.bound_cache(spec)?;
        let pool = spec.kv.map(|kv| self.on.kv.pool(kv.cache));
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
        Ok(Finish {
            qkv: sums.ptr,
            qkv_stride: sums.stride,
            plane_stride: sums.plane_stride,
            planes: sums.count,
            store_q,
            rows: self.rows,
            heads: spec.heads,
            pages: PageShape { kv_heads: spec.kv_heads, head_dim: d, fp8: pool.is_some_and(|p| is_fp8(&p)) },
            writes: spec.kv.is_some(),
            values_are_keys,
            q_norm,
            k_norm,
            v_eps: spec.kv.and_then(|kv| kv.v_norm_eps),
            rope: rope.ptr,
            rope_stride: rope.stride as usize,
            cell: self.on.upload.columns.cell[group],
            map: self.map(),
            pool: pool.map_or(DevPtr::NULL, |p| p.ptr),
            kv_scales: pool.map_or([1.0; 2], |p| p.scales),
            q,
            q_stride: spec.heads * d,
        })
    }

    pub(super) fn finish_heads(&mut self, qkv: Act, spec: &QkvSpec) -> Result<()> {
        let wanted = |p: &TapPoint| matches!(p, TapPoint::Qkv(_));
        let store_q = self.on.upload.batch.taps.points.iter().any(wanted);
        let call = self.finish_call(qkv, spec, store_q)?;
        let width = spec.heads * spec.head_dim;
        self.query_width = width;
        // SAFETY: widths agree, and the uploaded cells are in the pools.
        unsafe { producers::finish(self.on.queue(), &call)? };
        let v = self.act(qkv);
        if store_q && call.qkv != v.ptr {
            let (stride, width) = (call.qkv_stride as i32, width as i32);
            let made = Rows { ptr: call.qkv, stride, width, bf16: 0, pad: 0 };
            // SAFETY: the first plane holds the queries of every row, and the buffer is at least as wide.
            unsafe { rows::cast(self.on.queue(), v.columns(0, width as usize), made, self.rows)? };
        }
        Ok(())
    }

    /// Both in one kernel, for what [`finishes_in_attention`](Self::finishes_in_attention) says yes to.
    pub(super) fn finish_and_attend(&mut self, h: &Heads) -> Result<()> {
        let call = self.attend_call(h.out, &h.attend)?;
        let mut finish = self.finish_call(h.qkv, &h.finish, false)?;
        finish.pages = call.pages;
        // SAFETY: as of both, and the one row is its sequence's only one.
        unsafe { Ok(attn_decode::finish_and_attend(self.on.queue(), &finish, &call)?) }
    }

    /// Rows are dropped between the queries' making and their use: the kept ones move to the front here too.
    pub(super) fn keep_queries(&mut self) -> Result<()> {
        if self.query_width == 0 {
            return Ok(());
        }
        let ptr = self.queries(self.query_width)?;
        let (heads, count) = (self.on.upload.columns.heads, self.on.upload.batch.heads.len());
        let width = self.query_width as i32;
        let queries = Rows { ptr, stride: width, width, bf16: 1, pad: 0 };
        // SAFETY: heads are rows of the batch, ascending.
        unsafe { Ok(rows::keep_rows(self.on.queue(), queries, heads, count)?) }
    }

    fn attend_call(&mut self, out: Act, spec: &AttnSpec) -> Result<AttnDecode> {
        let (o, d) = (self.act(out), spec.head_dim);
        let pool = self.on.kv.pool(spec.cache);
        crate::ops::same("attention", o.width, (spec.heads * d) as i32)?;
        crate::ops::same("attention", pool.head_dim, d as i32)?;
        crate::ops::same("attention", pool.kv_heads, spec.kv_heads as i32)?;
        if o.bf16 == 0 {
            return Err(Error::Device("attention into a float32 buffer in the fast mode".into()));
        }
        let pages = PageShape { kv_heads: spec.kv_heads, head_dim: d, fp8: is_fp8(&pool) };
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
        Ok(AttnDecode {
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
            scale: spec.scale * pool.scales[0],
            v_scale: pool.scales[1],
            workspace,
        })
    }

    pub(super) fn attend(&mut self, out: Act, spec: &AttnSpec) -> Result<()> {
        let call = self.attend_call(out, spec)?;
        let (q, pages) = (call.q, call.pages);
        // Rows of one sequence share its pages; a batch of single tokens has nothing to share.
        let sequences = self.on.upload.batch.spans.len();
        if !pages.fp8 && self.map() == DevPtr::NULL && self.rows > MAX_ROWS && self.rows >= 2 * sequences {
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
                q: q.at(first * call.q_stride * 2),
                out: call.out.at(first * call.out_stride * 2),
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
}
