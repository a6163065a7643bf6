//! `out = x W^T`.
//!
//! Tiles of [`TILE`] weight rows are claimed from a counter; whoever claims a tile computes it for every row of
//! x, so weights are read once a pass however many rows there are. One output is one dot product whose order of
//! sums belongs to the kernel, so it is the same alone and in a batch.
//!
//! In the fast mode inputs are int8 blocks where the weights are packed for them; bf16 and FP8 weights stay as they are
//! and meet inputs rounded to [bf16](bf16) where the processor multiplies that; everything else is float32.

pub(crate) mod bf16;
pub(crate) mod f32;
mod gated;
#[cfg(target_arch = "aarch64")]
mod neon;

use std::ops::Range;

use lapidary_formats::Scales;
use lapidary_ops::{Act, Format, Mat};

use crate::ahead::Division;
use crate::buffers::Buffer;
use crate::int8::PAIR;
use crate::int8::activations::QuantRows;
use crate::level::Isa;
use crate::math;
use crate::matrix::{Matrix, Part, Weights};
use crate::memory::Grow;
use crate::ops::{CpuOps, Scope};
use bf16::{Ahead, BlockScales, Fp8, SCALED, STEP};
use f32::{Bf16, F16, RowsView, dots};

/// Weight rows of a tile; [`PAIR`] of them pass x together.
pub(crate) const TILE: usize = 16;
/// Pairs of tiles that are multiplied before anything is done to their results: a function of few values is one long chain
/// of operations that wait for each other, and loads of the next weights queue up behind it.
pub(crate) const RUN: usize = 32;
/// Rows of x between two writes of a tile's results.
pub(crate) const X_BLOCK: usize = 64;
/// Rows of x up to which half-width weights are multiplied without being decoded to memory first.
const ROWS_IN_PLACE: usize = 16;
/// The same for FP8 weights that are multiplied as bf16.
const FP8_ROWS_IN_PLACE: usize = 16;
/// Bytes of x that stay in a core's cache while a claim's tiles pass by.
const X_BYTES: usize = 256 << 10;
/// The same for up to [`FEW_ROWS`], whose time is that of reading weights: a second pass over them costs more than x from a cache
/// further away.
const FEW_X_BYTES: usize = 2 * X_BYTES;
/// Rows of a batch of sequences that write side by side.
const FEW_ROWS: usize = 16;

/// Some rows of x in the forms that kernels take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs<'a> {
    pub floats: RowsView<'a>,
    pub blocks: Option<QuantRows<'a>>,
    /// Whether products may round them.
    pub rounds: bool,
    /// In bf16, padded as [`bf16::round_rows`] does it.
    pub halves: Option<RowsView<'a, Bf16>>,
}

impl<'a> Inputs<'a> {
    /// Rows `first .. first + count` of `x`.
    ///
    /// # Safety
    /// Nobody writes to these rows while the inputs live.
    pub unsafe fn of(x: &'a Buffer, first: usize, count: usize) -> Inputs<'a> {
        // SAFETY: the caller's.
        unsafe {
            let floats = RowsView { values: x.rows(first, count), stride: x.stride(), count };
            Inputs { floats, blocks: x.block_rows(first, count), rounds: x.rounds(), halves: None }
        }
    }

    /// With the rows in bf16, made in `memory`, where one of the parts of `w` is multiplied so.
    pub fn rounded(self, isa: Isa, w: &Matrix, memory: &'a mut Grow) -> Inputs<'a> {
        if !(isa.bf16() && self.rounds && w.parts.iter().any(|p| p.weights.is_half())) {
            return self;
        }
        let (k, count) = (w.cols, self.floats.count);
        let stride = k.next_multiple_of(STEP);
        let values = Bf16::room(memory.get(count * stride / 2));
        bf16::round_rows(isa, self.floats, k, values);
        Inputs { halves: Some(RowsView { values, stride, count }), ..self }
    }
}

impl CpuOps<'_> {
    /// `linear` and `logits`.
    pub(crate) fn product(&mut self, out: Act, x: Act, mat: Mat, softcap: Option<f32>) {
        self.enter(Scope::Shared);
        self.begin_product(mat, Division::Tiles);
        let w = self.pass.mat(mat);
        let (out, x) = (self.act(out), self.act(x));
        assert!(x.width() == w.cols && out.width() == w.rows, "{} and {}", x.spec.name, out.spec.name);
        // The counter runs over the tiles of all parts, one part after the other.
        let tiles = |p: &Part| p.weights.rows().div_ceil(TILE);
        let total: usize = w.parts.iter().map(tiles).sum();
        for claim in self.claims(PAIR / TILE, total) {
            let mut first = 0;
            for part in &w.parts {
                let own = claim.start.max(first)..claim.end.min(first + tiles(part));
                if !own.is_empty() {
                    self.part_product(x, w, part, own.start - first..own.end - first, out, softcap);
                }
                first += tiles(part);
            }
        }
        self.end_product(mat);
    }

    /// Tiles `tiles` of a part for every row of x.
    fn part_product(
        &mut self,
        x: &Buffer,
        w: &Matrix,
        part: &Part,
        tiles: Range<usize>,
        out: &Buffer,
        softcap: Option<f32>,
    ) {
        let (isa, count) = (self.isa(), self.rows);
        let block = rows_at_once(&part.weights, x, count);
        let scratch = &mut *self.scratch;
        let results = scratch.results.get(block * PAIR);
        for from in (0..count).step_by(block) {
            let n = block.min(count - from);
            // SAFETY: the meeting before this verb ended all writes to x, and nobody writes it during the verb.
            let inputs = unsafe { Inputs::of(x, from, n) }.rounded(isa, w, &mut scratch.halves);
            let rows = tiles.start * TILE..(tiles.end * TILE).min(part.weights.rows());
            for first in rows.clone().step_by(RUN * PAIR) {
                let run = first..rows.end.min(first + RUN * PAIR);
                for first in run.clone().step_by(PAIR) {
                    let rows = PAIR.min(run.end - first);
                    tile_values(isa, &part.weights, first, rows, inputs, &mut scratch.tile, results);
                    for (i, values) in results.chunks(PAIR).take(n).enumerate() {
                        let col = part.first_row + first;
                        // SAFETY: these columns belong to the tiles that this worker has claimed.
                        unsafe { out.part_mut(from + i, col, rows) }.copy_from_slice(&values[..rows]);
                    }
                }
                if let Some(cap) = softcap {
                    for i in 0..n {
                        let col = part.first_row + run.start;
                        // SAFETY: as above.
                        math::softcap(isa, unsafe { out.part_mut(from + i, col, run.len()) }, cap);
                    }
                }
            }
        }
    }
}

/// Rows of x that pass all tiles of a claim together: as many as stay in the cache where the kernel reads the
/// weights as they are, all where they are decoded first.
pub(crate) fn rows_at_once(weights: &Weights, x: &Buffer, count: usize) -> usize {
    match weights {
        // Tiles may have to be packed for each block of rows.
        Weights::Late(_) if x.has_blocks() => X_BLOCK,
        weights if weights.takes_blocks() && x.has_blocks() => {
            let row = crate::int8::activations::row_bytes(x.width()).max(1);
            if count <= FEW_ROWS && count * row <= FEW_X_BYTES {
                return count.max(1);
            }
            (X_BYTES / row / 8 * 8).clamp(8, X_BLOCK)
        }
        _ => count.max(1),
    }
}

/// `out[i, j] = x_i . w_(first + j)` for up to [`PAIR`] rows of a part, as many floats from one row of x to the next.
/// `decoded` is room for weights that are not multiplied as they are.
pub(crate) fn tile_values(
    isa: Isa,
    weights: &Weights,
    first: usize,
    rows: usize,
    x: Inputs<'_>,
    decoded: &mut Grow,
    out: &mut [f32],
) {
    if let Some(blocks) = x.blocks
        && first.is_multiple_of(TILE)
        && weights.product(first / TILE, rows, blocks, decoded, out)
    {
        return;
    }
    if let Some(halves) = x.halves
        && half_values(isa, weights, first, rows, halves, decoded, out)
    {
        return;
    }
    let k = weights.cols();
    // SAFETY: every bit pattern is a number of each type, as the formats define them.
    let (floats, bf16s, f16s) = unsafe {
        (
            weights.in_place::<f32>(Format::F32, first, rows),
            weights.in_place::<Bf16>(Format::Bf16, first, rows),
            weights.in_place::<F16>(Format::F16, first, rows),
        )
    };
    // With many rows of x, decoding once costs less than loading through a conversion every time.
    let few = x.floats.count <= ROWS_IN_PLACE;
    match (floats, bf16s, f16s) {
        (Some(values), _, _) => {
            dots(isa, x.floats, RowsView { values, stride: k, count: rows }, k, out, PAIR)
        }
        (_, Some(values), _) if few => {
            dots(isa, x.floats, RowsView { values, stride: k, count: rows }, k, out, PAIR);
        }
        (_, _, Some(values)) if few => {
            dots(isa, x.floats, RowsView { values, stride: k, count: rows }, k, out, PAIR);
        }
        _ => {
            let stride = k.next_multiple_of(16);
            let values = decoded.get(TILE * stride);
            // A tile at a time, so that what is decoded stays in a core's cache.
            for from in (0..rows).step_by(TILE) {
                let count = TILE.min(rows - from);
                for (r, out) in values.chunks_mut(stride).take(count).enumerate() {
                    weights.decode_row(isa, first + from + r, &mut out[..k]);
                }
                let w = RowsView { values: &*values, stride, count };
                dots(isa, x.floats, w, k, &mut out[from..], PAIR);
            }
        }
    }
}

/// [`tile_values`] of weights that are exact in bf16, if these are.
fn half_values(
    isa: Isa,
    weights: &Weights,
    first: usize,
    rows: usize,
    x: RowsView<'_, Bf16>,
    decoded: &mut Grow,
    out: &mut [f32],
) -> bool {
    let k = weights.cols();
    // SAFETY: every bit pattern is a number of each type, as the formats define them.
    let (bf16s, fp8s) = unsafe {
        (
            weights.in_place::<Bf16>(Format::Bf16, first, rows),
            weights.in_place::<Fp8>(Format::Fp8E4M3, first, rows),
        )
    };
    if let Some(values) = bf16s {
        let w = RowsView { values, stride: k, count: rows };
        bf16::dots(isa, x, w, None, k, out, PAIR, Ahead::Rows);
        return true;
    }
    let (Some(codes), Some(scales)) = (fp8s, weights.scales()) else { return false };
    let block_scales = |from: usize| match scales {
        Scales::Block128 { values, first_row } => {
            let first_row = first_row + first + from;
            Some(BlockScales { values, across: k.div_ceil(SCALED), first_row })
        }
        _ => None,
    };
    if x.count <= FP8_ROWS_IN_PLACE {
        let w = RowsView { values: codes, stride: k, count: rows };
        bf16::dots(isa, x, w, block_scales(0), k, out, PAIR, Ahead::Rows);
    } else {
        // A tile at a time, so that what is decoded stays in a core's cache.
        let values = Bf16::room(decoded.get((TILE * k).div_ceil(2)));
        for from in (0..rows).step_by(TILE) {
            let count = TILE.min(rows - from);
            bf16::decode_fp8(isa, &codes[from * k..(from + count) * k], values);
            let w = RowsView { values: &*values, stride: k, count };
            bf16::dots(isa, x, w, block_scales(from), k, &mut out[from..], PAIR, Ahead::Nothing);
        }
    }
    let scale = |row: usize| match scales {
        Scales::Tensor(scale) => *scale,
        Scales::Row(scales) => scales[row],
        _ => 1.0,
    };
    if matches!(scales, Scales::Tensor(_) | Scales::Row(_)) {
        for values in out.chunks_mut(PAIR).take(x.count) {
            for (j, value) in values.iter_mut().take(rows).enumerate() {
                *value *= scale(first + j);
            }
        }
    }
    true
}
