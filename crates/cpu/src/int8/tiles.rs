//! A matrix packed for the int8 kernel.
//!
//! 16 rows make a tile. A tile is its super-blocks in order of inputs, each its scales and then its blocks of codes, padded
//! to 64 bytes; so what is read lies in the order in which it is read, from the first tile to the last, and the
//! processor's own prefetch follows. The last tile of a matrix is filled up with zero rows. Codes and scales take the
//! bytes that they take in the file (Q3_K and IQ4_XS a few more for unpacked scales). Packing loses nothing: any row can be
//! decoded again, so an embedding table that is also the head is held once.

use std::marker::PhantomData;

use lapidary_formats::{Format, TensorView};
use lapidary_ops::Result;

use super::activations::{BLOCK, QuantRows};
use super::codes::Codes;
use super::file_rows::half_values;
use super::formats::{Kind, Source, beside, with_kind};
use super::kernel::{Choice, PAIR, choose};
use super::lanes::LANES;
use super::scaling::Scaling;
use crate::level::Isa;
#[cfg(target_arch = "x86_64")]
use crate::level::Level;
use crate::memory::{Aligned, LINE, Slabs, prefetch};

/// How rows of one matrix are packed, and what multiplies them then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packer {
    /// In the file.
    pub format: Format,
    /// Inputs.
    pub cols: usize,
    choice: Choice,
    pack: Pack,
    /// Of the whole matrix.
    multiplier: f32,
    tile_bytes: usize,
}

impl Packer {
    /// For `view`, if its format is packed.
    pub fn new(isa: Isa, view: &TensorView<'_>) -> Option<Packer> {
        let (format, cols) = (view.format, view.cols);
        let tile_bytes = tile_bytes_of(format, cols)?;
        let choice = choose(isa, format).expect("every packed format has kernels");
        let pack = with_kind!(format, K => choose_pack::<K>(isa))?;
        Some(Packer { format, cols, choice, pack, multiplier: beside(&view.scales).1, tile_bytes })
    }

    /// Bytes of a tile.
    pub fn tile_bytes(&self) -> usize {
        self.tile_bytes
    }

    /// Packs the rows of tile `tile` of the matrix that this was made for. What fills up a last tile is left as it is.
    pub fn pack(&self, view: &TensorView<'_>, tile: usize, out: &mut [u8]) {
        assert!(view.format == self.format && view.cols == self.cols && out.len() == self.tile_bytes);
        let rows = LANES.min(view.rows - tile * LANES);
        let row_bytes = view.row_bytes();
        let bytes = &view.bytes[tile * LANES * row_bytes..][..rows * row_bytes];
        let scales = beside(&view.scales).0;
        let scale_bytes = scales.len() / view.rows;
        let scales = &scales[tile * LANES * scale_bytes..][..rows * scale_bytes];
        // SAFETY: chosen for a level that was detected.
        unsafe { (self.pack)(bytes, scales, self.cols, out) }
    }

    /// `out[i, r] = x_i . w_r` of one packed tile or two, [`PAIR`] floats from one row of x to the next.
    pub fn product(&self, packed: &[u8], tiles: usize, x: QuantRows<'_>, out: &mut [f32]) {
        assert!(x.width == self.cols && x.count * x.stride <= x.bytes.len() && (1..=2).contains(&tiles));
        assert!(x.stride >= super::activations::row_bytes(x.width) && out.len() >= x.count * PAIR);
        assert!(packed.len() == tiles * self.tile_bytes);
        // SAFETY: the kernel was chosen for a level that was detected and for this format; lengths are asserted.
        unsafe { (self.choice.kernel)(packed.as_ptr(), tiles, x, self.multiplier, out.as_mut_ptr()) }
    }
}

/// Rows in tiles.
#[derive(Debug)]
pub(crate) struct Tiles {
    packer: Packer,
    /// Rows, without those that fill the last tile.
    pub rows: usize,
    data: Aligned,
}

impl Tiles {
    /// Room for `view`, if its format is packed; [`pack_tile`](Tiles::pack_tile) fills it.
    pub fn empty(isa: Isa, view: &TensorView<'_>, slabs: &Slabs) -> Result<Option<Tiles>> {
        let Some(packer) = Packer::new(isa, view) else { return Ok(None) };
        let bytes = view.rows.div_ceil(LANES).saturating_mul(packer.tile_bytes);
        let data = slabs.zeroed(bytes, &view.name)?;
        Ok(Some(Tiles { packer, rows: view.rows, data }))
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.packer.cols
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Packs the rows of tile `tile` of the matrix that this was made for.
    ///
    /// # Safety
    /// Nobody else uses the tile meanwhile.
    pub unsafe fn pack_tile(&self, view: &TensorView<'_>, tile: usize) {
        assert!(view.rows == self.rows && tile < self.rows.div_ceil(LANES));
        let tile_bytes = self.packer.tile_bytes;
        // SAFETY: inside the data by the assertion; the caller answers for other users.
        let out =
            unsafe { std::slice::from_raw_parts_mut(self.data.start().add(tile * tile_bytes), tile_bytes) };
        self.packer.pack(view, tile, out);
    }

    /// Decodes row `row` exactly as the format defines it.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols(), "row {row} of {} rows", self.rows);
        let tile = self.tiles(row / LANES, 1);
        with_kind!(self.packer.format, K => decode_row::<K>(tile, row % LANES, out));
        multiply(out, self.packer.multiplier);
    }

    /// `out[i, r] = x_i . w_(16 tile + r)` of one tile or two, [`PAIR`] floats from one row of x to the next; what lies
    /// beyond the last row is 0.
    pub fn product(&self, tile: usize, tiles: usize, x: QuantRows<'_>, out: &mut [f32]) {
        self.packer.product(self.tiles(tile, tiles), tiles, x, out);
    }

    /// All bytes from tile `first` on.
    pub fn bytes_from(&self, first: usize) -> &[u8] {
        &self.data.as_slice()[first * self.packer.tile_bytes..]
    }

    /// How rows are packed, and what multiplies them.
    pub fn packer(&self) -> &Packer {
        &self.packer
    }

    fn tiles(&self, first: usize, tiles: usize) -> &[u8] {
        let tile_bytes = self.packer.tile_bytes;
        assert!((first + tiles) * tile_bytes <= self.data.len());
        // SAFETY: inside the data by the assertion. Only these tiles are lent, since others may be packed meanwhile.
        unsafe { std::slice::from_raw_parts(self.data.start().add(first * tile_bytes), tiles * tile_bytes) }
    }
}

const fn super_len<K: Kind>() -> usize {
    K::Scaling::BLOCKS * BLOCK
}

/// Bytes of a super-block of 16 rows: scales, then codes.
const fn super_bytes<K: Kind>() -> usize {
    K::Scaling::BYTES + K::Scaling::BLOCKS * K::Codes::BYTES
}

/// Bytes of a matrix in tiles, if its format is packed.
pub(crate) fn packed_bytes(format: Format, rows: usize, cols: usize) -> Option<usize> {
    Some(rows.div_ceil(LANES).saturating_mul(tile_bytes_of(format, cols)?))
}

/// `None` also for rows of NVFP4 that end in half a block.
fn tile_bytes_of(format: Format, cols: usize) -> Option<usize> {
    with_kind!(format, K => cols.is_multiple_of(super_len::<K>()).then(|| tile_bytes::<K>(cols))).flatten()
}

/// By a matrix's multiplier, if it has one.
fn multiply(values: &mut [f32], multiplier: f32) {
    if multiplier != 1.0 {
        values.iter_mut().for_each(|v| *v *= multiplier);
    }
}

/// Bytes of a tile.
pub(super) fn tile_bytes<K: Kind>(cols: usize) -> usize {
    (cols / super_len::<K>() * super_bytes::<K>()).next_multiple_of(64)
}

/// Packs up to 16 rows; `beside` are their scales beside the codes.
///
/// # Safety
/// The features of the level that it was chosen for.
type Pack = unsafe fn(bytes: &[u8], beside: &[u8], cols: usize, out: &mut [u8]);

fn choose_pack<K: Kind>(isa: Isa) -> Pack {
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => pack_avx512::<K>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::AvxVnni => pack_avx2::<K>,
        _ => pack_rows::<K>,
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn pack_avx512<K: Kind>(bytes: &[u8], beside: &[u8], cols: usize, out: &mut [u8]) {
    pack_rows::<K>(bytes, beside, cols, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn pack_avx2<K: Kind>(bytes: &[u8], beside: &[u8], cols: usize, out: &mut [u8]) {
    pack_rows::<K>(bytes, beside, cols, out);
}

#[inline(always)]
fn pack_rows<K: Kind>(bytes: &[u8], beside: &[u8], cols: usize, out: &mut [u8]) {
    let supers = cols / super_len::<K>();
    let row_bytes = supers * K::FILE_BYTES;
    let words = K::CODES.len() / 4;
    // Many lines are asked for a few at a time, since a core keeps track of two dozen.
    let spread = K::Scaling::BLOCKS > 1;
    let mut turned = Turned([[0; LANES]; MOST_WORDS]);
    // All rows of a super-block before the next, so that what is written lies in few cache lines.
    for (i, packed) in out.chunks_exact_mut(super_bytes::<K>()).take(supers).enumerate() {
        let (scales, codes) = packed.split_at_mut(K::Scaling::BYTES);
        let mut next = bytes.as_ptr().wrapping_add(bytes.len() + i * LANES * K::FILE_BYTES);
        if !spread {
            ask_for(next, LANES * K::FILE_BYTES);
        }
        for (r, row) in bytes.chunks_exact(row_bytes).take(LANES).enumerate() {
            let file = &row[i * K::FILE_BYTES..][..K::FILE_BYTES];
            let beside = &beside[(r * supers + i) * K::Scaling::BESIDE..][..K::Scaling::BESIDE];
            K::Scaling::put(file, beside, r, scales);
            if spread {
                next = ask_for(next, K::FILE_BYTES / 2);
            }
            for (word, lanes) in file[K::CODES].as_chunks::<4>().0.iter().zip(&mut turned.0[..words]) {
                lanes[r] = u32::from_le_bytes(*word);
            }
        }
        for (j, block) in codes.chunks_exact_mut(K::Codes::BYTES).enumerate() {
            if spread {
                next = ask_for(next, LANES * K::FILE_BYTES / 2 / K::Scaling::BLOCKS);
            }
            for r in 0..LANES {
                let row = Lane::<K>(&turned, r, PhantomData);
                K::Codes::put(&K::words(&row, j), r, block);
            }
        }
    }
}

/// Asks for the `len` bytes at `at` or a little more, and says where to go on: what follows a tile are the rows of the next one, and
/// in memory's order they come faster than sixteen rows side by side, which the processor's own prefetch does not follow.
#[inline(always)]
fn ask_for(at: *const u8, len: usize) -> *const u8 {
    (0..len).step_by(LINE).for_each(|line| prefetch(at.wrapping_add(line)));
    at.wrapping_add(len)
}

/// Words of a super-block's codes at most.
const MOST_WORDS: usize = 48;

/// The codes of a super-block of 16 rows, word by word: what is done to a word is done to those of all rows at once.
#[repr(align(64))]
struct Turned([[u32; LANES]; MOST_WORDS]);

/// One row of them.
struct Lane<'a, K>(&'a Turned, usize, PhantomData<K>);

impl<K: Kind> Source for Lane<'_, K> {
    #[inline(always)]
    fn word(&self, at: usize) -> u32 {
        self.0.0[(at - K::CODES.start) / 4][self.1]
    }
}

fn decode_row<K: Kind>(tile: &[u8], row: usize, out: &mut [f32]) {
    let supers = out.chunks_exact_mut(super_len::<K>()).zip(tile.chunks_exact(super_bytes::<K>()));
    for (out, packed) in supers {
        let (scales, codes) = packed.split_at(K::Scaling::BYTES);
        let blocks = out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(codes.chunks_exact(K::Codes::BYTES));
        for (j, (out, codes)) in blocks.enumerate() {
            let words = K::Codes::get(codes, row);
            for (half, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let f = K::Scaling::row(scales, row, j, half);
                half_values::<K>(&words, half, f, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use lapidary_formats::{Encoded, EncodedScales, Format, decode_row, encode_rows};

    use super::super::activations::{Head, quantise, row_bytes, split_row};
    use super::super::is_packed;
    use super::*;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut s = seed;
        (0..n)
            .map(|_| {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (s >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// Bytes with every code and scale byte possible that is a number.
    fn random_rows(format: Format, rows: usize, cols: usize) -> Encoded {
        let mut encoded = encode_rows(format, &values(rows * cols, 3), rows, cols).expect("finite values");
        let f16s: &[usize] = match format {
            Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
            Format::Q2K => &[80, 82],
            Format::Q3K => &[108],
            Format::Q6K => &[208],
            Format::Mxfp4 | Format::Nvfp4 | Format::GgufNvfp4 | Format::Int4G32 => &[],
            _ => &[0],
        };
        let mut s = 7u32;
        for block in encoded.bytes.chunks_exact_mut(format.block_bytes()) {
            let keep = block.to_vec();
            for byte in block.iter_mut() {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *byte = (s >> 24) as u8;
            }
            for &at in f16s {
                block[at..at + 2].copy_from_slice(&keep[at..at + 2]);
                block[at + 1] ^= (s >> 3) as u8 & 0x80;
            }
            if format == Format::Mxfp4 {
                block[0] = keep[0];
            }
            if format == Format::GgufNvfp4 {
                block[..4].iter_mut().for_each(|b| *b = (*b & 0x7F).min(0x7E));
            }
        }
        match &mut encoded.scales {
            EncodedScales::Nvfp4 { blocks, tensor } => {
                *tensor = 0.37;
                let numbers = (0..=255u8).filter(|b| b & 0x7F != 0x7F).cycle();
                blocks.iter_mut().zip(numbers).for_each(|(b, number)| *b = number);
            }
            EncodedScales::Group32Bf16(bytes) => {
                bytes.chunks_exact_mut(6).for_each(|three| three[1] ^= 0x80);
            }
            none if format == Format::GgufNvfp4 => *none = EncodedScales::Tensor(-2.3),
            _ => {}
        }
        encoded
    }

    fn each_case(mut f: impl FnMut(Isa, &TensorView<'_>, &Tiles)) {
        for format in Format::ALL.into_iter().filter(|&f| is_packed(f)) {
            for (rows, cols) in [(19usize, 96usize), (16, 160), (37, 704), (5, 2112), (17, 256), (33, 768)] {
                if !cols.is_multiple_of(format.block_len()) {
                    continue;
                }
                let rows_of_format = random_rows(format, rows, cols);
                let view = rows_of_format.view("w");
                for isa in Isa::here() {
                    let tiles = Tiles::empty(isa, &view, &Slabs::default())
                        .expect("memory")
                        .expect("a packed format");
                    for tile in 0..rows.div_ceil(LANES) {
                        // SAFETY: nobody else has the tiles.
                        unsafe { tiles.pack_tile(&view, tile) }
                    }
                    f(isa, &view, &tiles);
                    // The kernel of AVX-VNNI, in the encoding that processors with AVX-512 VNNI have.
                    #[cfg(target_arch = "x86_64")]
                    if let Some(choice) = super::super::kernel::choose_vnni256(isa, format) {
                        let packer = Packer { choice, ..tiles.packer };
                        f(isa, &view, &Tiles { packer, ..tiles });
                    }
                }
            }
        }
    }

    #[test]
    fn packed_rows_decode_as_the_format_does() {
        each_case(|_, view, tiles| {
            let (mut exact, mut found) = (vec![0.0; view.cols], vec![0.0; view.cols]);
            for row in 0..view.rows {
                decode_row(view, row, &mut exact);
                tiles.decode_row(row, &mut found);
                for (i, (a, b)) in exact.iter().zip(&found).enumerate() {
                    assert_eq!(a.to_bits(), b.to_bits(), "{} row {row} [{i}]: {a} and {b}", view.format);
                }
            }
        });
    }

    #[test]
    fn products_are_those_of_the_quantised_rows_alone_and_in_groups() {
        each_case(|isa, view, tiles| {
            let (n, cols, stride) = (15, view.cols, row_bytes(view.cols));
            let x = values(n * cols, 5);
            let mut bytes = Aligned::zeroed(n * stride, "x").expect("memory");
            let mut rounded = vec![0.0f64; n * cols];
            for (i, row) in bytes.as_mut_slice().chunks_exact_mut(stride).enumerate() {
                let (codes, heads): (&mut [i8], &mut [Head]) = split_row(row, cols);
                quantise(isa, &x[i * cols..(i + 1) * cols], codes, heads);
                for (j, c) in codes.iter().enumerate() {
                    rounded[i * cols + j] = f64::from(*c) * f64::from(heads[j / BLOCK].scale);
                }
            }
            let rows = QuantRows { bytes: bytes.as_slice(), stride, count: n, width: cols };
            let mut w = vec![0.0f32; cols];
            let mut out = vec![f32::NAN; n * PAIR];
            let all = view.rows.div_ceil(LANES);
            for tile in 0..all {
                tiles.product(tile, 1, rows, &mut out);
                for r in 0..LANES.min(view.rows - tile * LANES) {
                    decode_row(view, tile * LANES + r, &mut w);
                    for i in 0..n {
                        let terms = w.iter().zip(&rounded[i * cols..]).map(|(a, b)| f64::from(*a) * b);
                        let (exact, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                        // Each block adds at most five roundings of its part and one of the sum so far. Formats
                        // with a minimum or an offset sum parts larger than their terms, at most 64 times for
                        // the random scales here.
                        let bound = 64.0 * size * (cols as f64 / 32.0 + 6.0) * f64::from(f32::EPSILON) / 2.0;
                        let found = f64::from(out[i * PAIR + r]);
                        assert!(
                            (found - exact).abs() <= bound,
                            "{} {} {cols} tile {tile} [{i}, {r}]: {found}, exact {exact} +- {bound}",
                            view.format,
                            isa.level()
                        );
                    }
                }
                for i in 0..n {
                    for count in 1..=(n - i).min(9) {
                        let mut some = vec![f32::NAN; count * PAIR];
                        // Beside a neighbour or alone, a tile's bits are the same.
                        for (first, tiles_at_once) in [(tile, 1), (tile, 2), (tile.wrapping_sub(1), 2)] {
                            if first > tile || first + tiles_at_once > all {
                                continue;
                            }
                            tiles.product(first, tiles_at_once, rows.slice(i, count), &mut some);
                            let at = (tile - first) * LANES;
                            let same = (0..count * LANES).all(|e| {
                                let (row, lane) = (e / LANES, e % LANES);
                                let alone = out[(i + row) * PAIR + lane];
                                some[row * PAIR + at + lane].to_bits() == alone.to_bits()
                            });
                            let what = format!("{} {}", view.format, isa.level());
                            assert!(same, "{what} rows {i} + {count}, tile {tile} of {tiles_at_once}");
                        }
                    }
                }
            }
        });
    }
}
