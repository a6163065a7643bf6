//! `out = f(gate) * up` with `[gate, up] = x W^T`, without the stacked product in between.
//!
//! Whoever claims a block of columns computes its gate rows, its up rows and their product, and leaves the
//! block quantised; so the verb costs one meeting, and a single row's gate is shared by the team. Every value
//! takes the steps that it takes in the two verbs that this replaces, so the bits are theirs.

use lapidary_ops::{Act, Activation};

use super::{Inputs, TILE, rows_at_once, tile_values};
use crate::buffers::Buffer;
use crate::int8::PAIR;
use crate::int8::activations::BLOCK;
use crate::math;
use crate::matrix::{Matrix, Part};
use crate::ops::{CpuOps, Scope};

// A block of hidden values comes from a pair of tiles.
const _: () = assert!(BLOCK == PAIR);

impl CpuOps<'_> {
    /// Whether `gated_product` can do it: gate and up rows start tiles, and hidden columns are whole blocks.
    pub(crate) fn can_gate(&self, out: Act, w: &Matrix) -> bool {
        let width = self.act(out).width();
        w.rows == 2 * width && width.is_multiple_of(BLOCK) && w.is_aligned(TILE)
    }

    /// `gated_linear`, where `can_gate`.
    pub(crate) fn gated_product(&mut self, out: Act, x: Act, w: &Matrix, f: Activation) {
        self.enter(Scope::Shared);
        assert!(out != x, "a gate into its own input");
        let (out, x) = (self.act(out), self.act(x));
        assert_eq!(x.width(), w.cols, "{} and {}", x.spec.name, out.spec.name);
        let units = out.width() / BLOCK;
        while let Some(claim) = self.claim_weights(1, units) {
            let block = rows_at_once(&w.part_of(0).weights, x, self.rows);
            for from in (0..self.rows).step_by(block) {
                let n = block.min(self.rows - from);
                let mut halves = std::mem::take(&mut self.scratch.halves);
                // SAFETY: the meeting before this verb ended all writes to x, and nobody writes it during the verb.
                let inputs = unsafe { Inputs::of(x, from, n) }.rounded(self.isa(), w, &mut halves);
                for unit in claim.clone() {
                    self.gated_block(out, inputs, w, f, unit * BLOCK, from);
                }
                self.scratch.halves = halves;
            }
        }
    }

    /// Columns `col .. col + BLOCK` of the inputs, which are rows `from` and on.
    fn gated_block(
        &mut self,
        out: &Buffer,
        inputs: Inputs<'_>,
        w: &Matrix,
        f: Activation,
        col: usize,
        from: usize,
    ) {
        let (isa, n) = (self.isa(), inputs.floats.count);
        let scratch = &mut *self.scratch;
        let gates = scratch.results.get(n * PAIR);
        let ups = scratch.results2.get(n * PAIR);
        for (row, values) in [(col, &mut *gates), (out.width() + col, &mut *ups)] {
            let part: &Part = w.part_of(row);
            let first = row - part.first_row;
            tile_values(isa, &part.weights, first, BLOCK, inputs, &mut scratch.tile, values);
        }
        for (i, (g, u)) in gates.chunks(PAIR).zip(ups.chunks(PAIR)).enumerate() {
            // SAFETY: these columns belong to the block that this worker has claimed.
            unsafe {
                math::gate(isa, f, g, u, out.part_mut(from + i, col, BLOCK));
                out.quantise_part(isa, from + i, col, BLOCK);
            }
        }
    }
}
