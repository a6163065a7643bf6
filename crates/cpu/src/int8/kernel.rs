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
//! integer sum at `-offset * xsum`. With halves, each half block's integer is first multiplied by its own factor:
//! a whole one, where all stay far below 2^31, or a float32 scale. A multiplier of the whole matrix comes last.
//!
//! Ceiling: with one row of x the bytes of the tile; with eight, eight dot instructions and about four others
//! for each block of each row.

#![allow(
    clippy::needless_range_loop,
    reason = "one index runs over several arrays whose lengths are constants"
)]

use std::mem::MaybeUninit;
use std::ops::RangeInclusive;

use super::activations::{BLOCK, Head, QuantRows};
use super::codes::Codes;
use super::formats::{Kind, with_kind};
use super::lanes::{LANES, Lanes, Plain};
#[cfg(target_arch = "aarch64")]
use super::neon::{Neon, NeonDot, NeonI8mm};
use super::scaling::{Factors, Grain, Scaling, Unpacked};
use super::tiles::tile_bytes;
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512Vnni, AvxVnni};
use crate::level::{Isa, Level};
use crate::memory::{LINE, prefetch};
use lapidary_formats::Format;

/// Multiplies one tile, or two that follow each other in memory.
///
/// # Safety
/// The features of the level that it was chosen for; at `tile` are `tiles` whole tiles, 1 or 2, of `x.width` inputs of
/// the format that it was chosen for, `x` has `count` whole rows, and `out` has room for `x.count` rows of [`PAIR`] floats,
/// of which the last 16 are used only with two tiles.
pub(crate) type Kernel =
    unsafe fn(tile: *const u8, tiles: usize, x: QuantRows<'_>, multiplier: f32, out: *mut f32);

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
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if isa.vnni() => Choice { kernel: avx512vnni::<K>, name: "avx512-vnni" },
        #[cfg(target_arch = "x86_64")]
        Level::AvxVnni => Choice { kernel: avxvnni::<K>, name: "avx-vnni" },
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::Avx512 => Choice { kernel: avx2::<K>, name: "avx2" },
        #[cfg(target_arch = "aarch64")]
        Level::NeonI8mm => Choice { kernel: neon_i8mm::<K>, name: "neon-i8mm" },
        #[cfg(target_arch = "aarch64")]
        Level::NeonDot => Choice { kernel: neon_dot::<K>, name: "neon-dotprod" },
        #[cfg(target_arch = "aarch64")]
        Level::Neon => Choice { kernel: run::<Neon, K>, name: "neon" },
        _ => Choice { kernel: run::<Plain, K>, name: "scalar" },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn avx512vnni<K: Kind>(
    tile: *const u8,
    tiles: usize,
    x: QuantRows<'_>,
    multiplier: f32,
    out: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe { run::<Avx512Vnni, K>(tile, tiles, x, multiplier, out) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<K: Kind>(tile: *const u8, tiles: usize, x: QuantRows<'_>, multiplier: f32, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe { run::<Avx2, K>(tile, tiles, x, multiplier, out) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn avxvnni<K: Kind>(tile: *const u8, tiles: usize, x: QuantRows<'_>, multiplier: f32, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe { run::<AvxVnni, K>(tile, tiles, x, multiplier, out) }
}

#[cfg(all(test, target_arch = "x86_64"))]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl,avx512vnni")]
unsafe fn avx512vnni256<K: Kind>(
    tile: *const u8,
    tiles: usize,
    x: QuantRows<'_>,
    multiplier: f32,
    out: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe { run::<super::x86::Avx512Vnni256, K>(tile, tiles, x, multiplier, out) }
}

/// The kernel of AVX-VNNI in AVX-512's encoding of its instructions.
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) fn choose_vnni256(isa: Isa, format: Format) -> Option<Choice> {
    isa.vnni()
        .then(|| with_kind!(format, K => Choice { kernel: avx512vnni256::<K>, name: "avx512-vnni-256" }))
        .flatten()
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,dotprod")]
unsafe fn neon_dot<K: Kind>(tile: *const u8, tiles: usize, x: QuantRows<'_>, multiplier: f32, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe { run::<NeonDot, K>(tile, tiles, x, multiplier, out) }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn neon_i8mm<K: Kind>(
    tile: *const u8,
    tiles: usize,
    x: QuantRows<'_>,
    multiplier: f32,
    out: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe { run::<NeonI8mm, K>(tile, tiles, x, multiplier, out) }
}

/// One tile after the other, a single stream of memory. With more than three rows sums do not stay in registers, and a block
/// is unpacked once for all of them.
///
/// # Safety
/// As for [`Kernel`].
#[inline(always)]
unsafe fn run<S: Lanes, K: Kind>(
    tile: *const u8,
    tiles: usize,
    x: QuantRows<'_>,
    multiplier: f32,
    out: *mut f32,
) {
    let multiplier = multiplier * K::Scaling::UNIT;
    // SAFETY: the caller's.
    unsafe {
        for t in 0..tiles {
            let (tile, out) = (tile.add(t * tile_bytes::<K>(x.width)), out.add(t * LANES));
            match x.count {
                1 => few::<S, K, 1>(tile, x, multiplier, out),
                2 => few::<S, K, 2>(tile, x, multiplier, out),
                3 => few::<S, K, 3>(tile, x, multiplier, out),
                _ => {
                    let at_once = if CROWDED.contains(&x.count) { 8 } else { AT_ONCE };
                    for first in (0..x.count).step_by(at_once) {
                        many::<S, K>(tile, x, first, at_once, multiplier, out);
                    }
                }
            }
        }
    }
}

/// M rows of x with one tile; their sums stay in registers.
///
/// # Safety
/// As for [`Kernel`]; x has M rows.
#[inline(always)]
unsafe fn few<S: Lanes, K: Kind, const M: usize>(
    tile: *const u8,
    x: QuantRows<'_>,
    multiplier: f32,
    out: *mut f32,
) {
    let blocks = x.width / BLOCK;
    // SAFETY: offsets stay inside the tile's super-blocks, the rows of x and those of out, all of which the caller
    // promises.
    unsafe {
        let mut packed = tile;
        let mut acc = [S::floats(0.0); M];
        let mut unpacked: Unpacked = [0; 256];
        let mut b = 0;
        while b < blocks {
            let scales = packed;
            packed = packed.add(K::Scaling::BYTES);
            K::Scaling::prepare::<S>(scales, &mut unpacked);
            for j in 0..K::Scaling::BLOCKS {
                if b.is_multiple_of(ASKED) {
                    (0..M).for_each(|m| ask_ahead(x, m, b));
                }
                let w = weights::<S, K>(packed);
                let f = K::Scaling::factors::<S>(scales, &unpacked, j);
                block::<S, K, M, false>(&w, &f, x, 0, b, acc.as_mut_ptr());
                packed = packed.add(K::Codes::BYTES);
                b += 1;
            }
        }
        for (m, acc) in acc.into_iter().enumerate() {
            S::store(S::mul(acc, S::floats(multiplier)), out.add(m * PAIR));
        }
    }
}

/// Blocks of x that are asked for at once: as many as have their heads in one line.
const ASKED: usize = LINE / size_of::<Head>();

/// Asks for the blocks of row `m` of x that come [`ASKED`] after block `b`. The stream of weights pushes x out of the nearest
/// cache between two tiles, and to load it again from the next one holds up the stream.
#[inline(always)]
fn ask_ahead(x: QuantRows<'_>, m: usize, b: usize) {
    let row = x.bytes.as_ptr().wrapping_add(m * x.stride);
    let codes = row.wrapping_add((b + ASKED) * BLOCK);
    (0..ASKED * BLOCK).step_by(LINE).for_each(|at| prefetch(codes.wrapping_add(at)));
    prefetch(row.wrapping_add(x.width + (b + ASKED) * size_of::<Head>()));
}

/// Bytes by which weights are asked for ahead where rows of x take longer than memory does: the processor's own prefetch does
/// not run ahead of so slow a reader.
const WEIGHTS_AHEAD: usize = 2048;

/// Asks for what lies [`WEIGHTS_AHEAD`] behind the `bytes` bytes at `at`. Scales are asked for like codes: with the codes' lines
/// alone one line in nine of Q4_0 would be left out.
#[inline(always)]
fn ask_for_weights(at: *const u8, bytes: usize) {
    (0..bytes).step_by(LINE).for_each(|line| prefetch(at.wrapping_add(WEIGHTS_AHEAD + line)));
}

/// Rows of x that pass a tile together at most: their sums stay in the nearest cache.
const AT_ONCE: usize = 64;

/// Numbers of rows that pass eight at a time: their blocks stay in the nearest cache then, which with fewer rows costs more than it
/// wins (whole steps of E2B Q4_0: 16 rows 116 instead of 121 tokens a second, 32 rows 288 instead of 277).
const CROWDED: RangeInclusive<usize> = 17..=32;

/// Rows of x from `first` on, at most `at_once`, with one tile.
///
/// # Safety
/// As for [`Kernel`]; x has row `first`, and `at_once` is [`AT_ONCE`] at most.
#[inline(always)]
unsafe fn many<S: Lanes, K: Kind>(
    tile: *const u8,
    x: QuantRows<'_>,
    first: usize,
    at_once: usize,
    multiplier: f32,
    out: *mut f32,
) {
    let blocks = x.width / BLOCK;
    let count = at_once.min(x.count - first);
    // SAFETY: as for `few`; sums are written before they are read.
    unsafe {
        let mut packed = tile;
        let mut sums = [MaybeUninit::<S::F>::uninit(); AT_ONCE];
        let acc = sums.as_mut_ptr().cast::<S::F>();
        for m in 0..count {
            acc.add(m).write(S::floats(0.0));
        }
        let mut unpacked: Unpacked = [0; 256];
        let mut b = 0;
        while b < blocks {
            let scales = packed;
            packed = packed.add(K::Scaling::BYTES);
            ask_for_weights(scales, K::Scaling::BYTES);
            K::Scaling::prepare::<S>(scales, &mut unpacked);
            for j in 0..K::Scaling::BLOCKS {
                ask_for_weights(packed, K::Codes::BYTES);
                let w = weights::<S, K>(packed);
                let f = K::Scaling::factors::<S>(scales, &unpacked, j);
                let mut m = 0;
                if S::PAIRED {
                    let w = S::pair(w);
                    while count - m >= 2 {
                        block::<S, K, 2, true>(&w, &f, x, first + m, b, acc.add(m));
                        m += 2;
                    }
                }
                while S::ROWS >= 4 && count - m >= 4 {
                    block::<S, K, 4, false>(&w, &f, x, first + m, b, acc.add(m));
                    m += 4;
                }
                while count - m >= 2 {
                    block::<S, K, 2, false>(&w, &f, x, first + m, b, acc.add(m));
                    m += 2;
                }
                if count > m {
                    block::<S, K, 1, false>(&w, &f, x, first + m, b, acc.add(m));
                }
                packed = packed.add(K::Codes::BYTES);
                b += 1;
            }
        }
        for m in 0..count {
            S::store(S::mul(acc.add(m).read(), S::floats(multiplier)), out.add((first + m) * PAIR));
        }
    }
}

/// A block's weights, ready to be multiplied.
///
/// # Safety
/// The level's features, and a block of codes at `codes`.
#[inline(always)]
unsafe fn weights<S: Lanes, K: Kind>(codes: *const u8) -> [S::B; 8] {
    // SAFETY: the caller's.
    unsafe {
        let mut w = K::Codes::unpack::<S>(codes);
        for v in &mut w {
            if let Some(levels) = K::LEVELS {
                *v = S::lookup(levels, *v);
            }
            if K::SIGNED {
                *v = S::lift(*v);
            }
        }
        w
    }
}

/// Adds block `b` of rows `first .. first + M` of x to their sums. The rows' chains of dot products lie side by side,
/// since each alone waits for its last. `PAIRED`: M is 2 and the weights are as [`Lanes::pair`] gives them.
///
/// # Safety
/// The level's features; x has these rows and this block; `acc` has M sums.
#[inline(always)]
unsafe fn block<S: Lanes, K: Kind, const M: usize, const PAIRED: bool>(
    w: &[S::B; 8],
    f: &Factors<S>,
    x: QuantRows<'_>,
    first: usize,
    b: usize,
    acc: *mut S::F,
) {
    // SAFETY: the caller's; heads follow a row's codes.
    unsafe {
        let row = x.bytes.as_ptr().add(first * x.stride);
        let codes = |m: usize| row.add(m * x.stride + b * BLOCK).cast::<i8>();
        let head = |m: usize| &*row.add(m * x.stride + x.width).cast::<Head>().add(b);
        if K::Scaling::GRAIN != Grain::Block {
            let mut sums = [[S::ints(0); M]; 2];
            for m in 0..M {
                let head = head(m);
                sums[0][m] = S::ints(-offset::<S, K>() * head.half);
                sums[1][m] = S::ints(-offset::<S, K>() * (head.sum - head.half));
            }
            if PAIRED {
                let x = [codes(0), codes(1)];
                S::dot_pair(sums[0].as_mut_ptr(), w, 0, 4, x);
                S::dot_pair(sums[1].as_mut_ptr(), w, 4, 8, x);
            } else {
                for v in 0..8 {
                    for m in 0..M {
                        let sum = &mut sums[v / 4][m];
                        *sum = dot::<S, K>(*sum, w[v], codes(m).add(4 * v));
                    }
                }
            }
            for m in 0..M {
                let (head, acc) = (head(m), &mut *acc.add(m));
                let scale = S::floats(head.scale);
                if K::Scaling::GRAIN == Grain::ScaledHalves {
                    // Both products are exact: sums of 15 bits, scales of 4.
                    let first = S::mul(S::to_floats(sums[0][m]), f.half_scales[0]);
                    let both = S::mul_add(S::to_floats(sums[1][m]), f.half_scales[1], first);
                    *acc = S::mul_add(both, scale, *acc);
                    continue;
                }
                let scaled =
                    S::add_ints(S::mul_ints(sums[0][m], f.halves[0]), S::mul_ints(sums[1][m], f.halves[1]));
                *acc = S::mul_add(S::to_floats(scaled), S::mul(f.scale, scale), *acc);
                if K::Scaling::MINIMUM {
                    let a = S::mul_ints(f.half_minimums[0], S::ints(head.half));
                    let b = S::mul_ints(f.half_minimums[1], S::ints(head.sum - head.half));
                    let sum = S::to_floats(S::add_ints(a, b));
                    *acc = S::mul_add(sum, S::mul(f.minimum, scale), *acc);
                }
            }
        } else {
            let mut sums = [S::ints(0); M];
            for m in 0..M {
                sums[m] = S::ints(-offset::<S, K>() * head(m).sum);
            }
            if PAIRED {
                S::dot_pair(sums.as_mut_ptr(), w, 0, 8, [codes(0), codes(1)]);
            } else {
                for v in 0..8 {
                    for m in 0..M {
                        sums[m] = dot::<S, K>(sums[m], w[v], codes(m).add(4 * v));
                    }
                }
            }
            for m in 0..M {
                let (head, acc) = (head(m), &mut *acc.add(m));
                *acc = S::mul_add(S::to_floats(sums[m]), S::mul(f.scale, S::floats(head.scale)), *acc);
                if K::Scaling::MINIMUM {
                    *acc = S::mul_add(f.minimum, S::floats(head.scaled_sum), *acc);
                }
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
