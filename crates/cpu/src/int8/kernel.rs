//! One tile of 16 weight rows times rows of int8 activations.
//!
//! ```text
//! out[m, r] = sum over blocks b, ascending:
//!     scale[r, b] * xscale[m, b] * (sum over 32 inputs (code - offset) * xcode)   an exact integer, once rounded
//!   + minimum[r, b] * (xscale[m, b] * xsum[m, b])                                where the format has minimums
//! ```
//!
//! Lane r of every vector belongs to row r, so nothing is summed across lanes and an output's order of sums is
//! that of its blocks, however many rows of x are taken at once. The offset is taken out by starting the
//! integer sum at `-offset * xsum`. With halves, each half block's integer is first multiplied by its own whole
//! factor; all stay far below 2^31.
//!
//! Ceiling: with one row of x the bytes of the tile; with eight, eight dot instructions and about four others
//! for each block of each row.

use super::activations::{BLOCK, Head, QuantRows};
use super::codes::Codes;
use super::formats::{Kind, with_kind};
use super::lanes::{LANES, Lanes, Plain};
use super::scaling::{Scaling, Unpacked};
use super::tiles::tile_bytes;
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512Vnni};
use crate::level::{Isa, Level};
use lapidary_formats::Format;

/// Bytes between what is multiplied and what is asked for, in each tile: `docs/performance.md` has the figures.
const fn bytes_ahead<K: Kind>() -> usize {
    // Codes of a byte take fewer instructions a byte, so less has to be under way.
    if K::Codes::BYTES >= 8 * 64 { 2048 } else { 4096 }
}

/// Multiplies one tile, or two that follow each other in memory.
///
/// # Safety
/// The features of the level that it was chosen for; at `tile` are `tiles` whole tiles, 1 or 2, of `x.width` inputs of
/// the format that it was chosen for, `x` has `count` whole rows, and `out` has room for `x.count` rows of [`PAIR`] floats,
/// of which the last 16 are used only with two tiles.
pub(crate) type Kernel = unsafe fn(tile: *const u8, tiles: usize, x: QuantRows<'_>, out: *mut f32);

/// Floats from one row's results to the next: two tiles' worth.
pub(crate) const PAIR: usize = 2 * LANES;

/// What multiplies a format at a level.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    pub kernel: Kernel,
    /// Name of the instruction set that it is written for.
    pub name: &'static str,
}

/// The kernel of a packed format.
pub(crate) fn choose(isa: Isa, format: Format) -> Option<Choice> {
    with_kind!(format, K => choose_kind::<K>(isa))
}

fn choose_kind<K: Kind>(isa: Isa) -> Choice {
    #[cfg(target_arch = "x86_64")]
    {
        if isa.vnni() {
            return Choice { kernel: avx512vnni::<K>, name: "avx512-vnni" };
        }
        if isa.level() >= Level::Avx2 {
            return Choice { kernel: avx2::<K>, name: "avx2" };
        }
    }
    debug_assert!(isa.level() >= Level::Scalar);
    Choice { kernel: run::<Plain, K>, name: "scalar" }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn avx512vnni<K: Kind>(tile: *const u8, tiles: usize, x: QuantRows<'_>, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe { run::<Avx512Vnni, K>(tile, tiles, x, out) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<K: Kind>(tile: *const u8, tiles: usize, x: QuantRows<'_>, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe { run::<Avx2, K>(tile, tiles, x, out) }
}

/// Takes the rows of x in groups of 8, 4, 2 and 1. Few rows wait for memory, and two places at once give more of it
/// than one.
///
/// # Safety
/// As for [`Kernel`].
#[inline(always)]
unsafe fn run<S: Lanes, K: Kind>(tile: *const u8, tiles: usize, x: QuantRows<'_>, out: *mut f32) {
    let bytes = tile_bytes::<K>(x.width);
    let mut m = 0;
    // SAFETY: the groups below cover rows 0 .. count of each tile once.
    unsafe {
        while S::ROWS >= 8 && x.count - m >= 8 {
            for t in 0..tiles {
                rows::<S, K, 8, 1>(tile.add(t * bytes), x, m, out.add(t * LANES));
            }
            m += 8;
        }
        while S::ROWS >= 4 && x.count - m >= 4 {
            for t in 0..tiles {
                rows::<S, K, 4, 1>(tile.add(t * bytes), x, m, out.add(t * LANES));
            }
            m += 4;
        }
        while x.count - m >= 2 {
            if tiles == 2 {
                rows::<S, K, 2, 2>(tile, x, m, out)
            } else {
                rows::<S, K, 2, 1>(tile, x, m, out)
            }
            m += 2;
        }
        if x.count > m {
            if tiles == 2 { rows::<S, K, 1, 2>(tile, x, m, out) } else { rows::<S, K, 1, 1>(tile, x, m, out) }
        }
    }
}

/// Rows `first .. first + M` of x with T tiles, one after the other in memory.
///
/// # Safety
/// As for [`Kernel`]; x has these rows, and the tiles are there.
#[inline(always)]
unsafe fn rows<S: Lanes, K: Kind, const M: usize, const T: usize>(
    tile: *const u8,
    x: QuantRows<'_>,
    first: usize,
    out: *mut f32,
) {
    let blocks = x.width / BLOCK;
    let ahead = bytes_ahead::<K>() / K::Codes::BYTES;
    // SAFETY: offsets stay inside the tiles (codes, then scales), inside rows first .. first + M of x
    // (codes, then heads), and inside the M rows of out, all of which the caller promises.
    unsafe {
        let x_codes = x.bytes.as_ptr().add(first * x.stride).cast::<i8>();
        let x_heads = x_codes.add(x.width).cast::<Head>();
        let tile_bytes = tile_bytes::<K>(x.width);
        let mut codes = tile;
        let mut scales = tile.add(blocks * K::Codes::BYTES);
        let mut acc = [[S::floats(0.0); M]; T];
        let mut unpacked: [Unpacked; T] = [[0; 256]; T];
        let mut b = 0;
        while b < blocks {
            for t in 0..T {
                K::Scaling::prepare::<S>(scales.add(t * tile_bytes), &mut unpacked[t]);
                if first == 0 {
                    // The scales of the next tile: those of this one lie beyond its codes, too far to be asked for
                    // by the codes' turn.
                    for line in (0..K::Scaling::BYTES).step_by(64) {
                        S::prefetch(scales.wrapping_add((t + T) * tile_bytes + line));
                    }
                }
            }
            for j in 0..K::Scaling::BLOCKS {
                for t in 0..T {
                    let codes = codes.add(t * tile_bytes);
                    if first == 0 {
                        // Only the first rows of x find the tile far away.
                        // Behind a tile's last codes comes the tile that this stream has next.
                        let skip =
                            if b + ahead < blocks { 0 } else { T * tile_bytes - blocks * K::Codes::BYTES };
                        for line in (0..K::Codes::BYTES).step_by(64) {
                            S::prefetch(codes.wrapping_add(ahead * K::Codes::BYTES + skip + line));
                        }
                    }
                    let mut w = K::Codes::unpack::<S>(codes);
                    if let Some(levels) = K::LEVELS {
                        for v in &mut w {
                            *v = S::lookup(levels, *v);
                        }
                    }
                    let f = K::Scaling::factors::<S>(scales.add(t * tile_bytes), &unpacked[t], j);
                    for (m, acc) in acc[t].iter_mut().enumerate() {
                        let head = &*x_heads.byte_add(m * x.stride).add(b);
                        let x = x_codes.add(m * x.stride + b * BLOCK);
                        let scale = S::floats(head.scale);
                        if K::Scaling::HALVES {
                            let rest = head.sum - head.half;
                            let first = half::<S, K>([w[0], w[1], w[2], w[3]], x, head.half);
                            let second = half::<S, K>([w[4], w[5], w[6], w[7]], x.add(16), rest);
                            let scaled = S::add_ints(
                                S::mul_ints(first, f.halves[0]),
                                S::mul_ints(second, f.halves[1]),
                            );
                            *acc = S::mul_add(S::to_floats(scaled), S::mul(f.scale, scale), *acc);
                            if K::Scaling::MINIMUM {
                                let a = S::mul_ints(f.half_minimums[0], S::ints(head.half));
                                let b = S::mul_ints(f.half_minimums[1], S::ints(rest));
                                let sum = S::to_floats(S::add_ints(a, b));
                                *acc = S::mul_add(sum, S::mul(f.minimum, scale), *acc);
                            }
                        } else {
                            let mut sum = S::ints(-offset::<S, K>() * head.sum);
                            for (v, &w) in w.iter().enumerate() {
                                sum = dot::<S, K>(sum, w, x.add(4 * v));
                            }
                            *acc = S::mul_add(S::to_floats(sum), S::mul(f.scale, scale), *acc);
                            if K::Scaling::MINIMUM {
                                *acc = S::mul_add(f.minimum, S::floats(head.scaled_sum), *acc);
                            }
                        }
                    }
                }
                codes = codes.add(K::Codes::BYTES);
                b += 1;
            }
            scales = scales.add(K::Scaling::BYTES);
        }
        for (t, acc) in acc.into_iter().enumerate() {
            for (m, acc) in acc.into_iter().enumerate() {
                S::store(acc, out.add((first + m) * PAIR + t * LANES));
            }
        }
    }
}

/// What the integers of the kernel are above the format's.
const fn offset<S: Lanes, K: Kind>() -> i32 {
    K::OFFSET + if K::SIGNED { S::BIAS } else { 0 }
}

/// # Safety
/// The level's features, and four codes at `x`.
#[inline(always)]
unsafe fn dot<S: Lanes, K: Kind>(acc: S::I, w: S::B, x: *const i8) -> S::I {
    // SAFETY: the caller's.
    unsafe { if K::SIGNED { S::dot_signed(acc, w, x) } else { S::dot_unsigned(acc, w, x) } }
}

/// The integer sum of a half block whose codes of x sum to `x_sum`.
///
/// # Safety
/// The level's features, and 16 codes at `x`.
#[inline(always)]
unsafe fn half<S: Lanes, K: Kind>(w: [S::B; 4], x: *const i8, x_sum: i32) -> S::I {
    // SAFETY: the caller's.
    unsafe {
        let mut sum = S::ints(-offset::<S, K>() * x_sum);
        for (v, w) in w.into_iter().enumerate() {
            sum = dot::<S, K>(sum, w, x.add(4 * v));
        }
        sum
    }
}
