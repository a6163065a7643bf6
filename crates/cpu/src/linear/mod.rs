//! `out = x W^T`.
//!
//! Tiles of [`TILE`] weight rows are claimed from a counter; whoever claims a tile computes it for every row of
//! x, so weights are read and decoded once a pass however many rows there are. One output is one dot product
//! whose order of sums belongs to the kernel, so it is the same alone and in a batch.

pub(crate) mod f32;

use lapidary_ops::Act;

use crate::buffers::Buffer;
use crate::math;
use crate::matrix::{FileRows, Matrix};
use crate::ops::{CpuOps, Scope};
use f32::{RowsView, dots};

/// Weight rows that are decoded at once.
pub(crate) const TILE: usize = 16;
/// Rows of x between two writes of a tile's results.
pub(crate) const X_BLOCK: usize = 64;
/// Claims that each worker makes of one matrix, about: few enough to be cheap, many enough to even out.
const CLAIMS_PER_WORKER: usize = 12;

impl CpuOps<'_> {
    /// `linear` and `logits`.
    pub(crate) fn product(&mut self, out: Act, x: Act, w: &Matrix, softcap: Option<f32>) {
        self.enter(Scope::Shared);
        let (out, x) = (self.act(out), self.act(x));
        assert!(x.width() == w.cols && out.width() == w.rows, "{} and {}", x.spec.name, out.spec.name);
        // The counter runs over the tiles of all parts, one part after the other.
        let total: usize = w.parts.iter().map(|p| p.weights.rows().div_ceil(TILE)).sum();
        let chunk = (total / (self.workers() * CLAIMS_PER_WORKER)).max(1);
        while let Some(claim) = self.claim(0, chunk, total) {
            for tile in claim {
                let (mut part, mut t) = (0, tile);
                while t >= w.parts[part].weights.rows().div_ceil(TILE) {
                    t -= w.parts[part].weights.rows().div_ceil(TILE);
                    part += 1;
                }
                let part = &w.parts[part];
                let first = t * TILE;
                let rows = TILE.min(part.weights.rows() - first);
                self.tile_product(x, &part.weights, first, rows, out, part.first_row + first, softcap);
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "a range of a matrix and where its results go")]
    fn tile_product(
        &mut self,
        x: &Buffer,
        weights: &FileRows,
        first: usize,
        rows: usize,
        out: &Buffer,
        out_col: usize,
        softcap: Option<f32>,
    ) {
        let (isa, count, k) = (self.isa(), self.rows, x.width());
        let scratch = &mut *self.scratch;
        let w = weight_tile(weights, first, rows, k, scratch.tile.get(TILE * k.next_multiple_of(16)));
        let results = scratch.results.get(X_BLOCK * TILE);
        for from in (0..count).step_by(X_BLOCK) {
            let n = X_BLOCK.min(count - from);
            // SAFETY: the meeting before this verb ended all writes to x, and nobody writes it during the verb.
            let block = RowsView { values: unsafe { x.rows(from, n) }, stride: x.stride(), count: n };
            dots(isa, block, w, k, results, TILE);
            for (i, values) in results.chunks_mut(TILE).take(n).enumerate() {
                let values = &mut values[..rows];
                if let Some(cap) = softcap {
                    math::softcap(isa, values, cap);
                }
                // SAFETY: these columns belong to the tile that this worker has claimed.
                unsafe { out.part_mut(from + i, out_col, rows) }.copy_from_slice(values);
            }
        }
    }
}

/// Rows `first .. first + rows` of `weights` as float32: in place where they are, else decoded into `tile`.
pub(crate) fn weight_tile<'a>(
    weights: &'a FileRows,
    first: usize,
    rows: usize,
    k: usize,
    tile: &'a mut [f32],
) -> RowsView<'a> {
    if let Some(values) = weights.floats(first, rows) {
        return RowsView { values, stride: k, count: rows };
    }
    let stride = k.next_multiple_of(16);
    for (r, out) in tile.chunks_mut(stride).take(rows).enumerate() {
        weights.decode_row(first + r, &mut out[..k]);
    }
    RowsView { values: tile, stride, count: rows }
}
