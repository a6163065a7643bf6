//! `out = f(gate) * up` with `[gate, up] = x W^T`, without the stacked product in between.
//!
//! Whoever claims a block of columns computes its gate rows, its up rows and their product, and leaves the
//! block quantised; so the verb costs one meeting, and a single row's gate is shared by the team. Every value
//! takes the steps that it takes in the two verbs that this replaces, so the bits are theirs.

use std::ops::Range;

use lapidary_ops::{Act, Activation, Mat};

use super::{Inputs, RUN, TILE, rows_at_once, tile_values};
use crate::ahead::Division;
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
    pub(crate) fn gated_product(&mut self, out: Act, x: Act, mat: Mat, f: Activation) {
        self.enter(Scope::Shared);
        self.begin_product(mat, Division::Gate);
        let w = self.pass.mat(mat);
        assert!(out != x, "a gate into its own input");
        let (out, x) = (self.act(out), self.act(x));
        assert_eq!(x.width(), w.cols, "{} and {}", x.spec.name, out.spec.name);
        let units = out.width() / BLOCK;
        let run = if self.reads_weights_once() { RUN } else { 1 };
        for claim in self.claims(1, units) {
            let block = rows_at_once(&w.part_of(0).weights, x, self.rows);
            for from in (0..self.rows).step_by(block) {
                let n = block.min(self.rows - from);
                let mut halves = std::mem::take(&mut self.scratch.halves);
                // SAFETY: the meeting before this verb ended all writes to x, and nobody writes it during the verb.
                let inputs = unsafe { Inputs::of(x, from, n) }.rounded(self.isa(), w, &mut halves);
                for first in claim.clone().step_by(run) {
                    let units = first..claim.end.min(first + run);
                    self.gated_blocks(out, inputs, w, f, units, from);
                }
                self.scratch.halves = halves;
            }
        }
        self.end_product(mat);
    }

    /// Blocks `units` of the columns of the inputs, which are rows `from` and on: all gate rows, then all up rows, since each
    /// change of place in memory stops the processor's own prefetch, and last what is made of both.
    fn gated_blocks(
        &mut self,
        out: &Buffer,
        inputs: Inputs<'_>,
        w: &Matrix,
        f: Activation,
        units: Range<usize>,
        from: usize,
    ) {
        let (isa, n) = (self.isa(), inputs.floats.count);
        let scratch = &mut *self.scratch;
        let gates = scratch.results.get(units.len() * n * PAIR);
        let ups = scratch.results2.get(units.len() * n * PAIR);
        for (first, values) in [(0, &mut *gates), (out.width(), &mut *ups)] {
            for (unit, values) in units.clone().zip(values.chunks_mut(n * PAIR)) {
                let row = first + unit * BLOCK;
                let part: &Part = w.part_of(row);
                let row = row - part.first_row;
                tile_values(isa, &part.weights, row, BLOCK, inputs, &mut scratch.tile, values);
            }
        }
        for ((unit, gates), ups) in units.zip(gates.chunks(n * PAIR)).zip(ups.chunks(n * PAIR)) {
            let col = unit * BLOCK;
            for (i, (g, u)) in gates.chunks(PAIR).zip(ups.chunks(PAIR)).enumerate() {
                // SAFETY: these columns belong to a block that this worker has claimed.
                unsafe {
                    math::gate(isa, f, g, u, out.part_mut(from + i, col, BLOCK));
                    out.quantise_part(isa, from + i, col, BLOCK);
                }
            }
        }
    }
}
