//! What a worker reads while it waits.
//!
//! With one row, or few, a product is over when its weights have been read, and between two products memory would rest: one
//! worker has the row, the others wait for it. A pass runs the same products in the same order as the pass before, so a
//! worker that waits knows whose weights come next, and its [first share](crate::team::Sync::own_share) of them is
//! nobody else's: it reads the beginning of that into its own cache. Nothing but time depends on it.

use std::sync::atomic::{AtomicU32, Ordering};

use lapidary_ops::Mat;

use crate::int8::PAIR;
use crate::linear::TILE;
use crate::memory::LINE;
use crate::ops::CpuOps;

/// Bytes that a worker reads ahead at most: half of a core's own cache on the processors of today.
const MOST: usize = 512 << 10;

/// How workers divide a matrix in its product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Division {
    /// Pairs of tiles.
    Tiles,
    /// Blocks of gate rows, and up rows with them.
    Gate,
    /// Rows that the pass chooses: nothing is known ahead.
    Chosen,
}

/// By matrix: whose product came next in the last pass, and how it is divided. A hint: passes may differ.
#[derive(Debug, Default)]
pub(crate) struct Followers(Vec<AtomicU32>);

/// Nothing is known.
const NONE: u32 = u32::MAX;

impl Followers {
    /// For one more matrix.
    pub fn push(&mut self) {
        self.0.push(AtomicU32::new(NONE));
    }

    fn note(&self, last: Mat, next: Mat, division: Division) {
        let known = match division {
            Division::Tiles => next.0 << 1,
            Division::Gate => next.0 << 1 | 1,
            Division::Chosen => NONE,
        };
        self.0[last.0 as usize].store(known, Ordering::Relaxed);
    }

    fn of(&self, last: Mat) -> Option<(Mat, Division)> {
        let known = self.0[last.0 as usize].load(Ordering::Relaxed);
        let division = if known & 1 == 1 { Division::Gate } else { Division::Tiles };
        (known != NONE).then_some((Mat(known >> 1), division))
    }
}

impl CpuOps<'_> {
    /// A product with `mat` begins.
    pub(crate) fn begin_product(&mut self, mat: Mat, division: Division) {
        if let Some(last) = self.last_product.replace(mat)
            && self.worker == 0
        {
            self.pass.followers.note(last, mat, division);
        }
        self.ahead.take();
    }

    /// This worker has nothing left to do in the product with `mat`.
    pub(crate) fn end_product(&mut self, mat: Mat) {
        if self.workers() == 1 || !self.reads_weights_once() {
            return;
        }
        let Some((next, division)) = self.pass.followers.of(mat) else { return };
        let matrix = self.pass.mat(next);
        let (least, unit, rows) = match division {
            Division::Gate => (1, PAIR, matrix.rows / 2),
            _ => (PAIR / TILE, TILE, matrix.rows),
        };
        let row = unit * self.pass.sync.own_share(self.worker, least, rows.div_ceil(unit)).start;
        if row < rows {
            let part = matrix.part_of(row);
            let bytes = part.weights.packed_from(row - part.first_row);
            self.ahead.set(&bytes[..bytes.len().min(MOST)]);
        }
    }
}

/// Lines that are read between two looks at what is waited for.
const LINES: usize = 16;

/// Reads on in `bytes` until `done` holds or all are read.
pub(crate) fn read_until(bytes: &mut &[u8], done: impl Fn() -> bool) {
    while let Some((chunk, rest)) = bytes.split_first_chunk::<{ LINES * LINE }>()
        && !done()
    {
        // Loads rather than requests: only those teach the processor's own prefetch.
        let first_bytes = chunk.chunks(LINE).map(|line| line[0]);
        std::hint::black_box(first_bytes.fold(0, |all, byte| all ^ byte));
        *bytes = rest;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn reading_ends_when_the_wait_does_and_at_the_end_of_what_is_known() {
        let memory = vec![7u8; 5 * LINES * LINE + 3];
        let mut left = &memory[..];
        let looks = Cell::new(0);
        read_until(&mut left, || looks.replace(looks.get() + 1) == 2);
        assert_eq!(left.len(), 3 * LINES * LINE + 3);
        read_until(&mut left, || false);
        assert_eq!(left.len(), 3);
        read_until(&mut left, || panic!("nobody looks where nothing is left to read"));
    }

    #[test]
    fn a_follower_is_the_last_that_was_seen_and_chosen_rows_are_none() {
        let mut followers = Followers::default();
        (0..3).for_each(|_| followers.push());
        assert_eq!(followers.of(Mat(1)), None);
        followers.note(Mat(1), Mat(2), Division::Gate);
        assert_eq!(followers.of(Mat(1)), Some((Mat(2), Division::Gate)));
        followers.note(Mat(1), Mat(0), Division::Tiles);
        assert_eq!(followers.of(Mat(1)), Some((Mat(0), Division::Tiles)));
        assert_eq!(followers.of(Mat(0)), None);
        followers.note(Mat(1), Mat(2), Division::Chosen);
        assert_eq!(followers.of(Mat(1)), None);
    }
}
