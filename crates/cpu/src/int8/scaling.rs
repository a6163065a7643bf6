//! How the scales of a tile lie in memory, by the rule that turns codes into values.
//!
//! Scales are kept in super-blocks of 1 or 8 blocks, plane by plane: the same byte (or f16) of 16 rows side by
//! side, in the order in which [`Scaling::put`] writes them. A rule either scales a block as a whole or each half
//! of it; it may have minimums.

use half::{bf16, f16};
use lapidary_formats::codec::{mxfp4, q3_k};
use lapidary_formats::fp8::e4m3_to_f32;

use super::lanes::{LANES, Lanes};

/// Room for unpacked scales of a super-block.
pub(crate) type Unpacked = [u8; 256];

/// One block's factors for 16 rows. A value is `scale * (code * half's factor) + minimum * (half's minimum)`;
/// what a rule lacks is left out of the kernel.
#[derive(Clone, Copy)]
pub(crate) struct Factors<S: Lanes> {
    pub scale: S::F,
    pub minimum: S::F,
    /// Whole factors of the two halves, where the rule has them.
    pub halves: [S::I; 2],
    /// Scales of the two halves, where the rule has them instead of `scale`.
    pub half_scales: [S::F; 2],
    pub half_minimums: [S::I; 2],
}

/// One half block's factors for one row: a value is `scale * code + minimum`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowFactors {
    pub scale: f32,
    pub minimum: f32,
}

/// What has a factor of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grain {
    /// A block.
    Block,
    /// Each half of a block has a whole factor, the block a scale.
    WholeHalves,
    /// Each half of a block has a scale.
    ScaledHalves,
}

/// A rule.
pub(crate) trait Scaling {
    /// Blocks in a super-block.
    const BLOCKS: usize;
    /// Bytes of a super-block of 16 rows.
    const BYTES: usize;
    /// What has a factor of its own.
    const GRAIN: Grain;
    /// Whether there are minimums.
    const MINIMUM: bool;
    /// Bytes of a row's super-block that the file has beside the codes.
    const BESIDE: usize = 0;
    /// What the kernel's factors have to be multiplied by; a power of two.
    const UNIT: f32 = 1.0;

    /// Stores the scales of a row's super-block as the file has it, in the blocks or beside them.
    fn put(file: &[u8], beside: &[u8], row: usize, out: &mut [u8]);
    /// Factors of half `half` of block `block`.
    fn row(scales: &[u8], row: usize, block: usize, half: usize) -> RowFactors;
    /// Unpacks what all blocks of the super-block at `p` need.
    ///
    /// # Safety
    /// The level's features, and [`BYTES`](Scaling::BYTES) bytes at `p`.
    #[inline(always)]
    unsafe fn prepare<S: Lanes>(_p: *const u8, _unpacked: &mut Unpacked) {}
    /// Factors of block `block` of the super-block at `p`.
    ///
    /// # Safety
    /// As for `prepare`, which filled `unpacked` from the same place.
    unsafe fn factors<S: Lanes>(p: *const u8, unpacked: &Unpacked, block: usize) -> Factors<S>;
}

/// # Safety
/// The level's features.
#[inline(always)]
unsafe fn only<S: Lanes>(scale: S::F) -> Factors<S> {
    // SAFETY: the caller's.
    unsafe {
        let (zero, none) = (S::ints(0), S::floats(0.0));
        Factors { scale, minimum: none, halves: [zero; 2], half_scales: [none; 2], half_minimums: [zero; 2] }
    }
}

#[inline(always)]
fn put_two(file: &[u8], at: usize, row: usize, plane: &mut [u8]) {
    plane[2 * row..2 * row + 2].copy_from_slice(&file[at..at + 2]);
}

fn half_at(plane: &[u8], row: usize) -> f32 {
    f16::from_le_bytes([plane[2 * row], plane[2 * row + 1]]).to_f32()
}

const F16S: usize = 2 * LANES;

/// `d * code`, d an f16 at the head of the block: Q4_0, Q5_0, Q8_0, IQ4_NL.
pub(crate) struct Plain;

impl Scaling for Plain {
    const BLOCKS: usize = 1;
    const BYTES: usize = F16S;
    const GRAIN: Grain = Grain::Block;
    const MINIMUM: bool = false;

    #[inline(always)]
    fn put(file: &[u8], _beside: &[u8], row: usize, out: &mut [u8]) {
        put_two(file, 0, row, out);
    }
    fn row(scales: &[u8], row: usize, _block: usize, _half: usize) -> RowFactors {
        RowFactors { scale: half_at(scales, row), minimum: 0.0 }
    }
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8, _unpacked: &Unpacked, _block: usize) -> Factors<S> {
        // SAFETY: the caller's.
        unsafe { only(S::load_f16(p)) }
    }
}

/// `2^(e - 128) * code`: MXFP4.
pub(crate) struct Exponent;

impl Scaling for Exponent {
    const BLOCKS: usize = 1;
    const BYTES: usize = LANES;
    const GRAIN: Grain = Grain::Block;
    const MINIMUM: bool = false;

    #[inline(always)]
    fn put(file: &[u8], _beside: &[u8], row: usize, out: &mut [u8]) {
        out[row] = file[0];
    }
    fn row(scales: &[u8], row: usize, _block: usize, _half: usize) -> RowFactors {
        RowFactors { scale: mxfp4::half_scale(scales[row]), minimum: 0.0 }
    }
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8, _unpacked: &Unpacked, _block: usize) -> Factors<S> {
        // SAFETY: the caller's.
        unsafe { only(S::load_half_e8m0(p)) }
    }
}

/// `d * code + m`: Q4_1, Q5_1.
pub(crate) struct Affine;

impl Scaling for Affine {
    const BLOCKS: usize = 1;
    const BYTES: usize = 2 * F16S;
    const GRAIN: Grain = Grain::Block;
    const MINIMUM: bool = true;

    #[inline(always)]
    fn put(file: &[u8], _beside: &[u8], row: usize, out: &mut [u8]) {
        put_two(file, 0, row, out);
        put_two(file, 2, row, &mut out[F16S..]);
    }
    fn row(scales: &[u8], row: usize, _block: usize, _half: usize) -> RowFactors {
        RowFactors { scale: half_at(scales, row), minimum: half_at(&scales[F16S..], row) }
    }
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8, _unpacked: &Unpacked, _block: usize) -> Factors<S> {
        // SAFETY: the caller's.
        unsafe { Factors { minimum: S::load_f16(p.add(F16S)), ..only(S::load_f16(p)) } }
    }
}

/// `(d * scale) * code - dmin * minimum`, eight six-bit scales and minimums in twelve bytes: Q4_K, Q5_K.
pub(crate) struct Six;

/// Bytes of the twelve planes of scales.
const PLANES: usize = 12 * LANES;

impl Scaling for Six {
    const BLOCKS: usize = 8;
    const BYTES: usize = PLANES + 2 * F16S;
    const GRAIN: Grain = Grain::Block;
    const MINIMUM: bool = true;

    #[inline(always)]
    fn put(file: &[u8], _beside: &[u8], row: usize, out: &mut [u8]) {
        for (b, &byte) in file[4..16].iter().enumerate() {
            out[b * LANES + row] = byte;
        }
        put_two(file, 0, row, &mut out[PLANES..]);
        put_two(file, 2, row, &mut out[PLANES + F16S..]);
    }
    fn row(scales: &[u8], row: usize, block: usize, _half: usize) -> RowFactors {
        // See `k_quant`: the last four take their high bits from the top of the first eight bytes.
        let byte = |b: usize| scales[b * LANES + row];
        let (factor, minimum) = match block.checked_sub(4) {
            None => (byte(block) & 63, byte(4 + block) & 63),
            Some(j) => (byte(8 + j) & 15 | byte(j) >> 6 << 4, byte(8 + j) >> 4 | byte(4 + j) >> 6 << 4),
        };
        RowFactors {
            scale: half_at(&scales[PLANES..], row) * f32::from(factor),
            minimum: -(half_at(&scales[PLANES + F16S..], row) * f32::from(minimum)),
        }
    }
    #[inline(always)]
    unsafe fn prepare<S: Lanes>(p: *const u8, unpacked: &mut Unpacked) {
        // SAFETY: the caller's; the four stores fill the 256 bytes.
        unsafe {
            let (s, m, h) = (S::load(p), S::load(p.add(64)), S::load(p.add(128)));
            let out = unpacked.as_mut_ptr();
            S::save(S::and(s, 63), out);
            S::save(S::or(S::and(h, 15), S::and(S::right::<2>(s), 48)), out.add(64));
            S::save(S::and(m, 63), out.add(128));
            S::save(S::or(S::and(S::right::<4>(h), 15), S::and(S::right::<2>(m), 48)), out.add(192));
        }
    }
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8, unpacked: &Unpacked, block: usize) -> Factors<S> {
        // SAFETY: the caller's; block is below 8.
        unsafe {
            let at = unpacked.as_ptr().add(block * LANES);
            let (factor, minimum) = (S::to_floats(S::load_u8(at)), S::to_floats(S::load_u8(at.add(128))));
            let (d, dmin) = (S::load_f16(p.add(PLANES)), S::load_f16(p.add(PLANES + F16S)));
            let negative = S::mul(dmin, S::floats(-1.0));
            Factors { minimum: S::mul(negative, minimum), ..only(S::mul(d, factor)) }
        }
    }
}

/// `(d * scale) * code` with a signed byte for each block: IQ4_XS.
pub(crate) struct Signed;

impl Scaling for Signed {
    const BLOCKS: usize = 8;
    const BYTES: usize = 8 * LANES + F16S;
    const GRAIN: Grain = Grain::Block;
    const MINIMUM: bool = false;

    #[inline(always)]
    fn put(file: &[u8], _beside: &[u8], row: usize, out: &mut [u8]) {
        let high = u16::from_le_bytes([file[2], file[3]]);
        for j in 0..8 {
            let low = file[4 + j / 2] >> (4 * (j % 2)) & 15;
            let scale = (low | ((high >> (2 * j) & 3) << 4) as u8) as i8 - 32;
            out[j * LANES + row] = scale as u8;
        }
        put_two(file, 0, row, &mut out[8 * LANES..]);
    }
    fn row(scales: &[u8], row: usize, block: usize, _half: usize) -> RowFactors {
        let factor = f32::from(scales[block * LANES + row] as i8);
        RowFactors { scale: half_at(&scales[8 * LANES..], row) * factor, minimum: 0.0 }
    }
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8, _unpacked: &Unpacked, block: usize) -> Factors<S> {
        // SAFETY: the caller's; block is below 8.
        unsafe {
            let factor = S::to_floats(S::load_i8(p.add(block * LANES)));
            only(S::mul(S::load_f16(p.add(8 * LANES)), factor))
        }
    }
}

/// `(d * scale) * code` with a signed byte for each half block: Q6_K, and Q3_K where `PACKED`.
pub(crate) struct SignedHalves<const PACKED: bool>;

impl<const PACKED: bool> Scaling for SignedHalves<PACKED> {
    const BLOCKS: usize = 8;
    const BYTES: usize = 16 * LANES + F16S;
    const GRAIN: Grain = Grain::WholeHalves;
    const MINIMUM: bool = false;

    #[inline(always)]
    fn put(file: &[u8], _beside: &[u8], row: usize, out: &mut [u8]) {
        let (scales, d) = if PACKED {
            (q3_k::unpack_scales(file[96..108].as_array().expect("twelve bytes")), 108)
        } else {
            (std::array::from_fn(|j| file[192 + j] as i8), 208)
        };
        for (j, scale) in scales.into_iter().enumerate() {
            out[j * LANES + row] = scale as u8;
        }
        put_two(file, d, row, &mut out[16 * LANES..]);
    }
    fn row(scales: &[u8], row: usize, block: usize, half: usize) -> RowFactors {
        let factor = f32::from(scales[(2 * block + half) * LANES + row] as i8);
        RowFactors { scale: half_at(&scales[16 * LANES..], row) * factor, minimum: 0.0 }
    }
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8, _unpacked: &Unpacked, block: usize) -> Factors<S> {
        // SAFETY: the caller's; block is below 8.
        unsafe {
            let at = p.add(2 * block * LANES);
            let halves = [S::load_i8(at), S::load_i8(at.add(LANES))];
            Factors { halves, ..only(S::load_f16(p.add(16 * LANES))) }
        }
    }
}

/// `(d * scale) * code - dmin * minimum` with four-bit scales and minimums for each half block: Q2_K.
pub(crate) struct NibbleHalves;

impl Scaling for NibbleHalves {
    const BLOCKS: usize = 8;
    const BYTES: usize = 16 * LANES + 2 * F16S;
    const GRAIN: Grain = Grain::WholeHalves;
    const MINIMUM: bool = true;

    #[inline(always)]
    fn put(file: &[u8], _beside: &[u8], row: usize, out: &mut [u8]) {
        for (j, &byte) in file[..16].iter().enumerate() {
            out[j * LANES + row] = byte;
        }
        put_two(file, 80, row, &mut out[16 * LANES..]);
        put_two(file, 82, row, &mut out[16 * LANES + F16S..]);
    }
    fn row(scales: &[u8], row: usize, block: usize, half: usize) -> RowFactors {
        let byte = scales[(2 * block + half) * LANES + row];
        RowFactors {
            scale: half_at(&scales[16 * LANES..], row) * f32::from(byte & 15),
            minimum: -(half_at(&scales[16 * LANES + F16S..], row) * f32::from(byte >> 4)),
        }
    }
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8, _unpacked: &Unpacked, block: usize) -> Factors<S> {
        // SAFETY: the caller's; block is below 8.
        unsafe {
            let at = p.add(2 * block * LANES);
            let bytes = [S::load_u8(at), S::load_u8(at.add(LANES))];
            let (d, dmin) = (S::load_f16(p.add(16 * LANES)), S::load_f16(p.add(16 * LANES + F16S)));
            Factors {
                minimum: S::mul(dmin, S::floats(-1.0)),
                halves: [S::low_nibbles(bytes[0]), S::low_nibbles(bytes[1])],
                half_minimums: [S::high_nibbles(bytes[0]), S::high_nibbles(bytes[1])],
                ..only(d)
            }
        }
    }
}

/// `(E4M3 / 2) * doubled code` with an E4M3 byte for each half block: NVFP4. The matrix has a multiplier beside.
struct E4m3;

impl E4m3 {
    const BYTES: usize = 2 * LANES;
    /// The kernel's bytes are 2^-8 of their numbers and its codes doubled ones.
    const UNIT: f32 = 128.0;

    #[inline(always)]
    fn put(bytes: [u8; 2], row: usize, out: &mut [u8]) {
        for (half, byte) in bytes.into_iter().enumerate() {
            out[half * LANES + row] = byte;
        }
    }
    fn row(scales: &[u8], row: usize, half: usize) -> RowFactors {
        RowFactors { scale: e4m3_to_f32(scales[half * LANES + row]) * 0.5, minimum: 0.0 }
    }
    /// # Safety
    /// As for [`Scaling::factors`].
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8) -> Factors<S> {
        // SAFETY: the caller's.
        unsafe {
            let half_scales = [S::load_e4m3(p), S::load_e4m3(p.add(LANES))];
            Factors { half_scales, ..only(S::floats(0.0)) }
        }
    }
}

/// [`E4m3`] with the bytes beside the codes: the form of safetensors.
pub(crate) struct E4m3Beside;

impl Scaling for E4m3Beside {
    const BLOCKS: usize = 1;
    const BYTES: usize = E4m3::BYTES;
    const GRAIN: Grain = Grain::ScaledHalves;
    const MINIMUM: bool = false;
    const BESIDE: usize = 2;
    const UNIT: f32 = E4m3::UNIT;

    #[inline(always)]
    fn put(_file: &[u8], beside: &[u8], row: usize, out: &mut [u8]) {
        E4m3::put([beside[0], beside[1]], row, out);
    }
    fn row(scales: &[u8], row: usize, _block: usize, half: usize) -> RowFactors {
        E4m3::row(scales, row, half)
    }
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8, _unpacked: &Unpacked, _block: usize) -> Factors<S> {
        // SAFETY: the caller's.
        unsafe { E4m3::factors(p) }
    }
}

/// [`E4m3`] with the bytes at the head of a block of 64 codes: the form of GGUF.
pub(crate) struct E4m3Inside;

impl Scaling for E4m3Inside {
    const BLOCKS: usize = 2;
    const BYTES: usize = 2 * E4m3::BYTES;
    const GRAIN: Grain = Grain::ScaledHalves;
    const MINIMUM: bool = false;
    const UNIT: f32 = E4m3::UNIT;

    #[inline(always)]
    fn put(file: &[u8], _beside: &[u8], row: usize, out: &mut [u8]) {
        E4m3::put([file[0], file[1]], row, out);
        E4m3::put([file[2], file[3]], row, &mut out[E4m3::BYTES..]);
    }
    fn row(scales: &[u8], row: usize, block: usize, half: usize) -> RowFactors {
        E4m3::row(&scales[block * E4m3::BYTES..], row, half)
    }
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8, _unpacked: &Unpacked, block: usize) -> Factors<S> {
        // SAFETY: the caller's; block is below 2.
        unsafe { E4m3::factors(p.add(block * E4m3::BYTES)) }
    }
}

/// `d * code`, d a bf16 beside the codes: INT4.
pub(crate) struct Bf16Beside;

impl Scaling for Bf16Beside {
    const BLOCKS: usize = 1;
    const BYTES: usize = F16S;
    const GRAIN: Grain = Grain::Block;
    const MINIMUM: bool = false;
    const BESIDE: usize = 2;

    #[inline(always)]
    fn put(_file: &[u8], beside: &[u8], row: usize, out: &mut [u8]) {
        put_two(beside, 0, row, out);
    }
    fn row(scales: &[u8], row: usize, _block: usize, _half: usize) -> RowFactors {
        let scale = bf16::from_le_bytes([scales[2 * row], scales[2 * row + 1]]).to_f32();
        RowFactors { scale, minimum: 0.0 }
    }
    #[inline(always)]
    unsafe fn factors<S: Lanes>(p: *const u8, _unpacked: &Unpacked, _block: usize) -> Factors<S> {
        // SAFETY: the caller's.
        unsafe { only(S::load_bf16(p)) }
    }
}
