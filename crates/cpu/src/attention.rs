//! `out = softmax(scale * q K^T) V`, streamed over pages of keys.
//!
//! Keys are summed in blocks of `PAGE_TOKENS` aligned to absolute positions, each block joining a running
//! maximum, sum and accumulator (online softmax). A run of aligned positions, a segment, starts afresh, and
//! segments join in ascending order; so the bits of a row are those of its own sequence, however many workers
//! share its segments. A unit of work is a few rows of one sequence and one key/value head with all the query
//! heads that read it: each page is decoded once for all of them. Where the processor multiplies bf16 and the layer's
//! keys and values are stored so, pages are read [as they are](crate::attention_bf16).

use lapidary_ops::{Act, AttnSpec, KvFormat, PAGE_TOKENS};

use crate::attention_bf16::{self, Page};
use crate::int8::activations::BLOCK;
use crate::kv::{Side, decode};
use crate::level::{Isa, for_level};
use crate::linear::bf16::{STEP, round_rows};
use crate::linear::f32::{Bf16, F16, RowsView, dots};
use crate::math;
use crate::memory::{LINE, prefetch};
use crate::ops::{CpuOps, Scope};
use crate::weigh::weigh;

/// Positions whose keys are summed by one worker.
const SEGMENT: usize = 16 * PAGE_TOKENS;
/// The same where bf16 is multiplied: with a window of 512 two workers come out even wherever it starts.
const SEGMENT_BF16: usize = 8 * PAGE_TOKENS;
/// Rows that read a page together.
const ROWS_PER_UNIT: usize = 8;
/// Queries of a unit up to which f16 keys and values are read without being decoded to memory first.
const QUERIES_IN_PLACE: usize = 8;
/// With fewer units than this for each worker, segments are shared out too.
const UNITS_PER_WORKER: usize = 2;

/// Running maximum, running sum, and where the accumulator starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sums {
    pub max: f32,
    pub sum: f32,
}

pub(crate) const NONE: Sums = Sums { max: f32::NEG_INFINITY, sum: 0.0 };

impl CpuOps<'_> {
    /// Attention of one layer.
    pub(crate) fn attend(&mut self, out: Act, qkv: Act, spec: &AttnSpec) {
        self.enter(Scope::Shared);
        let (out, qkv) = (self.act(out), self.act(qkv));
        let (shape, _) = self.pass.kv.layer(spec.cache);
        let fits = shape.kv_heads == spec.kv_heads
            && shape.head_dim == spec.head_dim
            && spec.heads.is_multiple_of(spec.kv_heads)
            && out.width() == spec.heads * spec.head_dim
            && qkv.width() >= out.width();
        assert!(fits, "attention into {} does not fit its KV cache", out.spec.name);

        let mut groups = std::mem::take(&mut self.scratch.groups);
        self.group_rows(&mut groups);
        let units = groups.len() * spec.kv_heads;
        // All segments that any row of the batch sees, counted from the first of each group.
        let segments = groups.iter().map(|&(f, n)| self.segments(f, n, spec).len()).max().unwrap_or(0);
        let few = units < self.workers() * UNITS_PER_WORKER && self.workers() > 1;
        if few && segments > 1 {
            self.attend_split(out, qkv, spec, &groups, segments);
        } else {
            while let Some(claim) = self.claim(0, 1, units) {
                for unit in claim {
                    let (first, rows) = groups[unit / spec.kv_heads];
                    let head = unit % spec.kv_heads;
                    let mut unit = self.unit(qkv, spec, first, rows, head);
                    for segment in self.segments(first, rows, spec) {
                        unit.segment(self, spec, segment);
                        unit.join(self.isa());
                    }
                    unit.finish(self, out);
                    self.put_back(unit);
                }
            }
        }
        if out.has_blocks() && !spec.head_dim.is_multiple_of(BLOCK) {
            // A block of columns spans heads, which different workers wrote.
            self.meet();
            for r in self.own_rows() {
                // SAFETY: the row is this worker's.
                unsafe { out.quantise_row(self.isa(), r) }
            }
        }
        self.scratch.groups = groups;
    }

    /// As above, with every segment of a unit claimed on its own.
    fn attend_split(
        &mut self,
        out: &crate::buffers::Buffer,
        qkv: &crate::buffers::Buffer,
        spec: &AttnSpec,
        groups: &[(usize, usize)],
        segments: usize,
    ) {
        let d = spec.head_dim;
        let per_group = spec.heads / spec.kv_heads;
        let slot = d + 2;
        let at = |row: usize, head: usize, s: usize| ((row * spec.heads + head) * segments + s) * slot;
        self.need_workspace(self.rows * spec.heads * segments * slot);
        let pass = self.pass;
        while let Some(claim) = self.claim(0, 1, groups.len() * spec.kv_heads * segments) {
            for item in claim {
                let (unit, s) = (item / segments, item % segments);
                let (first, rows) = groups[unit / spec.kv_heads];
                let head = unit % spec.kv_heads;
                let range = self.segments(first, rows, spec);
                if s >= range.len() {
                    continue;
                }
                let mut unit = self.unit(qkv, spec, first, rows, head);
                unit.segment(self, spec, range.start + s);
                for i in 0..rows * per_group {
                    let place = at(first + i / per_group, head * per_group + i % per_group, s);
                    // SAFETY: the slot belongs to the row, head and segment that this worker has claimed.
                    let part = unsafe { pass.workspace.part(place, slot) };
                    part[0] = unit.sums[i].max;
                    part[1] = unit.sums[i].sum;
                    part[2..].copy_from_slice(&unit.memory.get(unit.layout.len)[unit.layout.acc(i, d)]);
                }
                self.put_back(unit);
            }
        }
        self.meet();
        // Every head of every row is joined by one worker, in order of segments.
        while let Some(claim) = self.claim(1, 1, self.rows * spec.heads) {
            for item in claim {
                let (row, head) = (item / spec.heads, item % spec.heads);
                let group = groups.partition_point(|&(first, _)| first <= row) - 1;
                let range = self.segments(groups[group].0, groups[group].1, spec);
                // SAFETY: the columns belong to the claimed row and head.
                let to = unsafe { out.part_mut(row, head * d, d) };
                let mut total = NONE;
                for s in 0..range.len() {
                    // SAFETY: the meeting ended all writes to the workspace.
                    let part = unsafe { pass.workspace.part(at(row, head, s), slot) };
                    let sums = Sums { max: part[0], sum: part[1] };
                    total = join(pass.isa, total, to, sums, &part[2..]);
                }
                math::scale(pass.isa, to, 1.0 / total.sum);
                if d.is_multiple_of(BLOCK) {
                    // SAFETY: as above.
                    unsafe { out.quantise_part(pass.isa, row, head * d, d) }
                }
            }
        }
    }

    /// Runs of at most [`ROWS_PER_UNIT`] active rows of one sequence.
    fn group_rows(&self, groups: &mut Vec<(usize, usize)>) {
        groups.clear();
        let span = |row| self.pass.upload.span_of[self.batch_row(row)];
        for row in 0..self.rows {
            match groups.last_mut() {
                Some((first, n)) if *n < ROWS_PER_UNIT && span(*first) == span(row) => *n += 1,
                _ => groups.push((row, 1)),
            }
        }
    }

    /// Keys visible to an active row.
    fn visible(&self, row: usize, spec: &AttnSpec) -> std::ops::Range<usize> {
        let (batch, b) = (&self.pass.upload.batch, self.batch_row(row));
        let position = batch.positions[b] as usize;
        let from = spec.window.map_or(0, |w| (position + 1).saturating_sub(w));
        from..batch.visible_to[spec.cache.group.index()][b] as usize
    }

    /// Segments with a key that one of the rows sees.
    fn segments(&self, first: usize, rows: usize, spec: &AttnSpec) -> std::ops::Range<usize> {
        let ranges = (first..first + rows).map(|r| self.visible(r, spec));
        let all = ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        let segment = if self.multiplies_bf16(spec) { SEGMENT_BF16 } else { SEGMENT };
        all.start / segment..all.end.div_ceil(segment)
    }

    /// Whether the layer's keys and values are multiplied as they are stored, in bf16.
    fn multiplies_bf16(&self, spec: &AttnSpec) -> bool {
        let (_, format) = self.pass.kv.layer(spec.cache);
        format == KvFormat::Bf16 && attention_bf16::fits(self.isa(), spec.head_dim)
    }

    fn unit<'q>(
        &mut self,
        qkv: &'q crate::buffers::Buffer,
        spec: &AttnSpec,
        first: usize,
        rows: usize,
        head: usize,
    ) -> Unit<'q> {
        let (heads, d) = (spec.heads / spec.kv_heads, spec.head_dim);
        let layout = Layout::new(rows * heads, heads, d);
        let mut memory = std::mem::take(&mut self.scratch.attention);
        let rounded = self.multiplies_bf16(spec);
        if rounded {
            let to = Bf16::room(&mut memory.get(layout.len)[layout.rounded..layout.weights]);
            for (i, to) in to.chunks_exact_mut(heads * d.next_multiple_of(STEP)).enumerate() {
                // SAFETY: the meeting before this verb ended all writes to the queries.
                let row = unsafe { qkv.row(first + i) };
                let q = RowsView { values: &row[head * heads * d..], stride: d, count: heads };
                round_rows(self.isa(), q, d, to);
            }
        }
        Unit {
            qkv,
            first,
            rows,
            head,
            heads,
            d,
            rounded,
            sums: none(&mut self.scratch.sums, rows * heads),
            totals: none(&mut self.scratch.totals, rows * heads),
            layout,
            memory,
        }
    }

    /// Keeps a unit's memory for the next.
    fn put_back(&mut self, unit: Unit<'_>) {
        self.scratch.sums = unit.sums;
        self.scratch.totals = unit.totals;
        self.scratch.attention = unit.memory;
    }
}

fn none(memory: &mut Vec<Sums>, count: usize) -> Vec<Sums> {
    let mut sums = std::mem::take(memory);
    sums.clear();
    sums.resize(count, NONE);
    sums
}

/// Where things stand in a unit's memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    values: usize,
    scores: usize,
    acc: usize,
    total: usize,
    /// Queries in bf16, each padded to a multiple of [`STEP`].
    rounded: usize,
    /// A row's weights of a page's values in bf16.
    weights: usize,
    len: usize,
}

impl Layout {
    fn new(queries: usize, heads: usize, d: usize) -> Layout {
        // Keys come first.
        let values = PAGE_TOKENS * d;
        let scores = values + PAGE_TOKENS * d;
        let acc = scores + heads * PAGE_TOKENS;
        let total = acc + queries * d;
        let rounded = total + queries * d;
        let weights = rounded + queries * d.next_multiple_of(STEP) / 2;
        Layout { values, scores, acc, total, rounded, weights, len: weights + heads * PAGE_TOKENS / 2 }
    }

    fn acc(&self, query: usize, d: usize) -> std::ops::Range<usize> {
        self.acc + query * d..self.acc + (query + 1) * d
    }
}

/// A few rows of one sequence and the query heads of one key/value head.
#[derive(Debug)]
struct Unit<'q> {
    qkv: &'q crate::buffers::Buffer,
    first: usize,
    rows: usize,
    head: usize,
    /// Query heads.
    heads: usize,
    d: usize,
    /// Whether bf16 is multiplied.
    rounded: bool,
    /// Of the segment at hand, by row and query head.
    sums: Vec<Sums>,
    /// Of the segments before.
    totals: Vec<Sums>,
    layout: Layout,
    memory: crate::memory::Grow,
}

impl Unit<'_> {
    /// Sums over the keys of one segment.
    fn segment(&mut self, ops: &CpuOps<'_>, spec: &AttnSpec, segment: usize) {
        if self.rounded {
            return self.segment_bf16(ops, spec, segment);
        }
        let (pass, isa, d, heads) = (ops.pass, ops.isa(), self.d, self.heads);
        let (_, format) = pass.kv.layer(spec.cache);
        let memory = self.memory.get(self.layout.len);
        let (keys, rest) = memory.split_at_mut(self.layout.values);
        let (values, rest) = rest.split_at_mut(self.layout.scores - self.layout.values);
        let (scores, rest) = rest.split_at_mut(self.layout.acc - self.layout.scores);
        let acc = &mut rest[..self.rows * heads * d];
        self.sums.fill(NONE);
        acc.fill(0.0);
        // With many queries, decoding a page once costs less than loading through a conversion every time.
        let few = self.rows * heads <= QUERIES_IN_PLACE;
        for from in (segment * SEGMENT..(segment + 1) * SEGMENT).step_by(PAGE_TOKENS) {
            let seen = |i: usize| {
                let v = ops.visible(self.first + i, spec);
                v.start.clamp(from, from + PAGE_TOKENS) - from..v.end.clamp(from, from + PAGE_TOKENS) - from
            };
            if (0..self.rows).all(|i| seen(i).is_empty()) {
                continue;
            }
            let (page, _) = pass.upload.cell(ops.batch_row(self.first), spec.cache.group, from as i32);
            // SAFETY: the meeting before this verb ended all writes to the pools.
            let page = |side| unsafe { pass.kv.page(spec.cache, page, side, self.head) };
            let halves = if few && format == KvFormat::F16 {
                F16::all(page(Side::Keys)).zip(F16::all(page(Side::Values)))
            } else {
                None
            };
            if few {
                prefetch_all(page(Side::Values));
            }
            if halves.is_none() {
                decode(format, page(Side::Keys), keys);
                decode(format, page(Side::Values), values);
            }
            for i in 0..self.rows {
                let cols = seen(i);
                if cols.is_empty() {
                    continue;
                }
                // SAFETY: the meeting before this verb ended all writes to the queries.
                let row = unsafe { self.qkv.row(self.first + i) };
                let q = RowsView { values: &row[self.head * heads * d..], stride: d, count: heads };
                scores.fill(f32::NEG_INFINITY);
                let (from, to) = (cols.start * d, &mut scores[cols.start..]);
                match halves {
                    Some((keys, _)) => {
                        let k = RowsView { values: &keys[from..], stride: d, count: cols.len() };
                        dots(isa, q, k, d, to, PAGE_TOKENS);
                    }
                    None => {
                        let k = RowsView { values: &keys[from..], stride: d, count: cols.len() };
                        dots(isa, q, k, d, to, PAGE_TOKENS);
                    }
                }
                for (h, scores) in scores.as_chunks_mut::<PAGE_TOKENS>().0.iter_mut().enumerate() {
                    let visible = &mut scores[cols.clone()];
                    math::scale(isa, visible, spec.scale);
                    if let Some(cap) = spec.softcap {
                        math::softcap(isa, visible, cap);
                    }
                    let query = i * heads + h;
                    let sums = &mut self.sums[query];
                    let acc = &mut acc[query * d..][..d];
                    let max = visible.iter().fold(sums.max, |m, &s| m.max(s));
                    let factor = if sums.sum == 0.0 { 0.0 } else { math::exp(sums.max - max) };
                    let added = math::exp_minus(isa, scores, max);
                    *sums = Sums { max, sum: sums.sum * factor + added };
                    if factor != 1.0 {
                        math::scale(isa, acc, factor);
                    }
                }
                let next = from + PAGE_TOKENS;
                if few && i == 0 && ops.visible(self.first, spec).contains(&next) {
                    let (page, _) =
                        pass.upload.cell(ops.batch_row(self.first), spec.cache.group, next as i32);
                    // SAFETY: as above.
                    prefetch_all(unsafe { pass.kv.page(spec.cache, page, Side::Keys, self.head) });
                }
                let acc = &mut acc[i * heads * d..(i + 1) * heads * d];
                match halves {
                    Some((_, values)) => weigh(isa, acc, d, scores, values, cols),
                    None => weigh(isa, acc, d, scores, values, cols),
                }
            }
        }
    }

    /// The same where bf16 is multiplied.
    fn segment_bf16(&mut self, ops: &CpuOps<'_>, spec: &AttnSpec, segment: usize) {
        let (pass, isa, d, heads) = (ops.pass, ops.isa(), self.d, self.heads);
        let layout = self.layout;
        let (before, behind) = self.memory.get(layout.len).split_at_mut(layout.rounded);
        let (rest, acc) = before.split_at_mut(layout.acc);
        let scores = &mut rest[layout.scores..];
        let acc = &mut acc[..self.rows * heads * d];
        let (q, weights) = behind.split_at_mut(layout.weights - layout.rounded);
        let (q, weights) = (Bf16::in_floats(q), Bf16::room(weights));
        self.sums.fill(NONE);
        acc.fill(0.0);
        let seen = |i: usize, from: usize| {
            let v = ops.visible(self.first + i, spec);
            v.start.clamp(from, from + PAGE_TOKENS) - from..v.end.clamp(from, from + PAGE_TOKENS) - from
        };
        let page = |from: usize| {
            let (page, _) = pass.upload.cell(ops.batch_row(self.first), spec.cache.group, from as i32);
            // SAFETY: the meeting before this verb ended all writes to the pools.
            let side = |side| unsafe { pass.kv.page(spec.cache, page, side, self.head) };
            let halves = |bytes| Bf16::all(bytes).expect("pools start on whole lines and hold whole rows");
            Page { keys: halves(side(Side::Keys)), values: halves(side(Side::Values)) }
        };
        let is_seen = |from: &usize| (0..self.rows).any(|i| !seen(i, *from).is_empty());
        let pages = (segment * SEGMENT_BF16..(segment + 1) * SEGMENT_BF16).step_by(PAGE_TOKENS);
        for (from, page) in pages.filter(is_seen).map(|from| (from, page(from))) {
            for i in 0..self.rows {
                let cols = seen(i, from);
                if cols.is_empty() {
                    continue;
                }
                let stride = d.next_multiple_of(STEP);
                let q = RowsView { values: &q[i * heads * stride..], stride, count: heads };
                let queries = i * heads..(i + 1) * heads;
                let sums = &mut self.sums[queries.clone()];
                let acc = &mut acc[queries.start * d..queries.end * d];
                attention_bf16::add_page(isa, q, page, i > 0, cols, spec, sums, acc, scores, weights);
            }
        }
    }

    /// Joins the segment at hand to those before.
    fn join(&mut self, isa: Isa) {
        let (acc, total) = self.memory.get(self.layout.len)[self.layout.acc..self.layout.rounded]
            .split_at_mut(self.layout.total - self.layout.acc);
        for (i, (acc, total)) in acc.chunks_exact(self.d).zip(total.chunks_exact_mut(self.d)).enumerate() {
            self.totals[i] = join(isa, self.totals[i], total, self.sums[i], acc);
        }
    }

    /// Writes `total / sum`.
    fn finish(&mut self, ops: &CpuOps<'_>, out: &crate::buffers::Buffer) {
        let total = &mut self.memory.get(self.layout.len)[self.layout.total..self.layout.rounded];
        for (i, total) in total.chunks_exact_mut(self.d).enumerate().take(self.rows * self.heads) {
            math::scale(ops.isa(), total, 1.0 / self.totals[i].sum);
            let col = (self.head * self.heads + i % self.heads) * self.d;
            // SAFETY: the columns belong to the rows and heads of the claimed unit.
            unsafe {
                out.part_mut(self.first + i / self.heads, col, self.d).copy_from_slice(total);
                if self.d.is_multiple_of(BLOCK) {
                    out.quantise_part(ops.isa(), self.first + i / self.heads, col, self.d);
                }
            }
        }
    }
}

/// Asks for `bytes`: rows of a page are too short for the processor to guess what is read next.
fn prefetch_all(bytes: &[u8]) {
    bytes.chunks(LINE).for_each(|line| prefetch(line.as_ptr()));
}

/// Joins `next` to what came before it. A segment without a visible key changes nothing.
fn join(isa: Isa, before: Sums, total: &mut [f32], next: Sums, acc: &[f32]) -> Sums {
    if next.sum == 0.0 {
        return before;
    }
    if before.sum == 0.0 {
        total.copy_from_slice(acc);
        return next;
    }
    let max = before.max.max(next.max);
    let (a, b) = (math::exp(before.max - max), math::exp(next.max - max));
    join_values(isa, total, a, acc, b);
    Sums { max, sum: before.sum * a + next.sum * b }
}

for_level! {
    pub fn join_values(total: &mut [f32], a: f32, acc: &[f32], b: f32) {
        for (t, &v) in total.iter_mut().zip(acc) {
            *t = *t * a + v * b;
        }
    }
}
