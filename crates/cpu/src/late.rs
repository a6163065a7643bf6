//! Weights that are packed when a pass needs them.
//!
//! Packing a model fills as much memory as its weights take, and the system clears that memory first, at a tenth of the
//! speed at which a machine reads it where a host has to give it. A start need not wait for that: a first pass of few rows leaves
//! weights in the file and packs each tile into its worker's cache, as for experts that stay there. Passes after it pack tiles
//! into their places on the way, for as long as the first pass took at most, so that no token keeps a reader waiting twice as long;
//! a pass of many rows packs all that it meets. So every tile is packed for good once, where it is needed, and an
//! expert that nobody chooses never is. The bits of a product do not depend on it. The bytes of the file are checked at load.
//!
//! A tile goes from [`IN_FILE`] to [`BUSY`] to [`PACKED`]; whoever meets a busy one packs it into its own cache. Where all
//! tiles are packed the matrix becomes an ordinary one between two passes.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::decode::decode_row;
use crate::file_rows::FileRows;
use crate::int8::activations::QuantRows;
use crate::int8::tiles::{Packer, Tiles};
use crate::level::Isa;
use crate::matrix::{CHUNK_BYTES, CHUNK_OF};
use crate::memory::Grow;

/// What the pass that runs may spend on packing for good, in nanoseconds of all workers.
#[derive(Debug, Default)]
pub(crate) struct Allowance(AtomicI64);

impl Allowance {
    /// No bound.
    pub const ALL: Duration = Duration::MAX;

    /// For a pass that begins.
    pub fn set(&self, time: Duration) {
        self.0.store(i64::try_from(time.as_nanos()).unwrap_or(i64::MAX), Ordering::Relaxed);
    }

    fn is_left(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    fn spend(&self, time: Duration) {
        self.0.fetch_sub(i64::try_from(time.as_nanos()).unwrap_or(i64::MAX), Ordering::Relaxed);
    }
}

const IN_FILE: u8 = 0;
const BUSY: u8 = 1;
const PACKED: u8 = 2;

/// Rows in a file map, and room for their tiles.
#[derive(Debug)]
pub(crate) struct Late {
    pub file: FileRows,
    tiles: Tiles,
    /// By tile.
    states: Box<[AtomicU8]>,
    /// By [group](Late::group) of tiles: how many are packed.
    packed: Box<[AtomicUsize]>,
    /// Tiles whose bytes of the file are given back together.
    group: usize,
    /// Tiles that are not packed.
    left: AtomicUsize,
    allowance: Arc<Allowance>,
}

impl Late {
    /// `tiles` is empty room for the rows of `file`.
    pub fn new(file: FileRows, tiles: Tiles, allowance: &Arc<Allowance>) -> Late {
        let view = file.view();
        let all = view.rows.div_ceil(CHUNK_OF);
        let group = (CHUNK_BYTES / (CHUNK_OF * view.row_bytes()).max(1)).max(1);
        Late {
            tiles,
            states: (0..all).map(|_| AtomicU8::new(IN_FILE)).collect(),
            packed: (0..all.div_ceil(group)).map(|_| AtomicUsize::new(0)).collect(),
            group,
            left: AtomicUsize::new(all),
            allowance: Arc::clone(allowance),
            file,
        }
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.tiles.rows
    }

    /// Bytes of the tiles, packed or not.
    pub fn bytes(&self) -> usize {
        self.tiles.bytes()
    }

    /// Whether all tiles are packed.
    pub fn is_packed(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    /// The tiles, once all are packed.
    pub fn into_tiles(self) -> Tiles {
        assert!(self.is_packed(), "a tile is not packed");
        self.tiles
    }

    /// Groups of tiles, for [`pack_group`](Late::pack_group).
    pub fn groups(&self) -> usize {
        self.packed.len()
    }

    /// Packs what is left of a group.
    pub fn pack_group(&self, group: usize) {
        let end = ((group + 1) * self.group).min(self.states.len());
        (group * self.group..end).for_each(|tile| {
            self.pack(tile);
        });
    }

    /// Decodes row `row` exactly.
    pub fn decode_row(&self, isa: Isa, row: usize, out: &mut [f32]) {
        match self.states[row / CHUNK_OF].load(Ordering::Acquire) {
            PACKED => self.tiles.decode_row(row, out),
            _ => decode_row(isa, self.file.view(), row, out),
        }
    }

    /// As [`Tiles::product`]; `room` is for tiles that are packed for this product alone.
    pub fn product(&self, tile: usize, tiles: usize, x: QuantRows<'_>, room: &mut Grow, out: &mut [f32]) {
        let ready = |tile: usize| {
            self.states[tile].load(Ordering::Acquire) == PACKED
                || (self.allowance.is_left() && self.pack(tile))
        };
        // Both are packed, even if the first is not ready.
        let packed = (tile..tile + tiles).filter(|&tile| ready(tile)).count();
        if packed == tiles {
            self.tiles.product(tile, tiles, x, out);
        } else {
            product_from_file(&self.file, self.tiles.packer(), tile, tiles, x, room, out);
        }
    }

    /// Packs a tile, unless somebody else does or did; says whether it is packed.
    fn pack(&self, tile: usize) -> bool {
        let state = &self.states[tile];
        match state.compare_exchange(IN_FILE, BUSY, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => {}
            Err(found) => return found == PACKED,
        }
        let begun = Instant::now();
        // SAFETY: whoever made the tile busy is its only user until it is packed.
        unsafe { self.tiles.pack_tile(self.file.view(), tile) };
        self.allowance.spend(begun.elapsed());
        state.store(PACKED, Ordering::Release);
        let group = tile / self.group;
        let of_group = self.group.min(self.states.len() - group * self.group);
        if self.packed[group].fetch_add(1, Ordering::AcqRel) + 1 == of_group {
            let first = group * self.group * CHUNK_OF;
            let rows = (of_group * CHUNK_OF).min(self.rows() - first);
            self.file.release(first, rows);
        }
        self.left.fetch_sub(1, Ordering::AcqRel);
        true
    }
}

/// The product with one tile or two that are packed into `room` for it.
pub(crate) fn product_from_file(
    file: &FileRows,
    packer: &Packer,
    tile: usize,
    tiles: usize,
    x: QuantRows<'_>,
    room: &mut Grow,
    out: &mut [f32],
) {
    let packed = room.bytes_mut(tiles * packer.tile_bytes());
    for (t, out) in packed.chunks_exact_mut(packer.tile_bytes()).enumerate() {
        packer.pack(file.view(), tile + t, out);
    }
    packer.product(packed, tiles, x, out);
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use lapidary_formats::{Format, TensorView, encode_rows};
    use lapidary_ops::FileMap;

    use super::*;
    use crate::file_rows::Maps;
    use crate::int8::PAIR;
    use crate::int8::activations::{quantise, row_bytes, split_row};
    use crate::memory::{Aligned, Slabs};

    #[test]
    fn workers_that_meet_at_a_tile_have_the_bits_of_a_packed_one() {
        let (rows, cols, n) = (16 * 41 + 3, 512, 3);
        let values = |n: usize| (0..n).map(|i| ((i * 7919 + 13) % 1009) as f32 / 504.0 - 1.0);
        let isa = Isa::new(None).expect("the best level");
        let encoded = encode_rows(Format::Q6K, &values(rows * cols).collect::<Vec<_>>(), rows, cols)
            .expect("finite values");
        let file: FileMap = Arc::new(encoded.bytes.clone());
        let maps = std::slice::from_ref(&file);
        let view = TensorView { bytes: (*file).as_ref(), ..encoded.view("w") };
        let stride = row_bytes(cols);
        let mut x = Aligned::zeroed(n * stride, "x").expect("memory");
        for (i, row) in x.as_mut_slice().chunks_exact_mut(stride).enumerate() {
            let (codes, heads) = split_row(row, cols);
            quantise(isa, &values(cols * (i + 1)).skip(cols * i).collect::<Vec<_>>(), codes, heads);
        }
        let x = QuantRows { bytes: x.as_slice(), stride, count: n, width: cols };
        let tiles = || Tiles::empty(isa, &view, &Slabs::default()).expect("memory").expect("a packed format");
        let packed = tiles();
        let all = rows.div_ceil(CHUNK_OF);
        // SAFETY: nobody else has the tiles.
        (0..all).for_each(|tile| unsafe { packed.pack_tile(&view, tile) });
        let expected = |tile: usize, tiles: usize| {
            let mut out = vec![0.0f32; n * PAIR];
            packed.product(tile, tiles, x, &mut out);
            out
        };
        for time in [Duration::ZERO, Allowance::ALL] {
            let allowance = Arc::new(Allowance::default());
            allowance.set(time);
            let rows_of_file = FileRows::new(&view, Maps(maps)).expect("it is mapped");
            let late = Late::new(rows_of_file, tiles(), &allowance);
            // A worker that panicked left this one as it was.
            late.states[7].store(BUSY, Ordering::Relaxed);
            let together = Barrier::new(4);
            std::thread::scope(|scope| {
                for worker in 0..4 {
                    let (late, together, expected) = (&late, &together, &expected);
                    scope.spawn(move || {
                        let mut room = Grow::default();
                        together.wait();
                        for tile in (0..all).step_by(2) {
                            let tiles = 2.min(all - tile).min(1 + (tile / 2 + worker) % 2);
                            let mut out = vec![0.0f32; n * PAIR];
                            late.product(tile, tiles, x, &mut room, &mut out);
                            let expected = expected(tile, tiles);
                            let there = PAIR.min(rows - tile * CHUNK_OF);
                            let rows = out.chunks(PAIR).zip(expected.chunks(PAIR));
                            for (row, (out, expected)) in rows.enumerate() {
                                assert_eq!(out[..there], expected[..there], "tile {tile}, row {row}");
                            }
                        }
                    });
                }
            });
            let in_file = late.states.iter().filter(|s| s.load(Ordering::Relaxed) == IN_FILE).count();
            assert_eq!(in_file, if time.is_zero() { all - 1 } else { 0 });
            assert!(!late.is_packed(), "one is not packed");
        }
    }
}
