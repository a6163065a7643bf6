//! [`Lanes`] on aarch64: NEON alone, with the dot products of bytes, and with the products of matrices of bytes.
//!
//! A vector is four registers of four rows. Codes without a sign are below 128, so every dot product is one of signed
//! bytes and nothing is moved up.

use std::arch::aarch64::*;
use std::arch::asm;

use super::lanes::{Lanes, operations};

/// Any aarch64.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon;

/// With `sdot`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeonDot;

/// With `smmla` too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeonI8mm;

type Bytes = [uint8x16_t; 4];
type Ints = [int32x4_t; 4];
type Floats = [float32x4_t; 4];

/// A vector of four registers, each by `$f` of those of the arguments.
macro_rules! four {
    ($f:expr, $a:expr) => {
        [$f($a[0]), $f($a[1]), $f($a[2]), $f($a[3])]
    };
    ($f:expr, $a:expr, $b:expr) => {
        [$f($a[0], $b[0]), $f($a[1], $b[1]), $f($a[2], $b[2]), $f($a[3], $b[3])]
    };
    ($f:expr, $a:expr, $b:expr, $c:expr) => {
        [$f($a[0], $b[0], $c[0]), $f($a[1], $b[1], $c[1]), $f($a[2], $b[2], $c[2]), $f($a[3], $b[3], $c[3])]
    };
}

/// `acc + sum of 4 (w * x)` in each lane: two products of 127 * 128 at most fit 16 bits.
#[inline(always)]
unsafe fn dot_plain(acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe {
        let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
        let high = vmull_high_s8(w, x);
        vpadalq_s16(acc, vpaddq_s16(low, high))
    }
}

/// The same.
///
/// # Safety
/// The dot products of bytes.
#[inline(always)]
unsafe fn dot_bytes(acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    let mut sum = acc;
    // SAFETY: the caller's; only registers are used.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b",
            sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// `acc + a b^T` of matrices `[2, 8]`, both with their rows one after the other.
///
/// # Safety
/// The products of matrices of bytes.
#[inline(always)]
unsafe fn matrix_product(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = acc;
    // SAFETY: the caller's; only registers are used.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Eight f16 numbers as float32.
#[inline(always)]
fn widen_f16(v: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: every aarch64 has these conversions; only registers are used.
    unsafe {
        asm!(
            "fcvtl {low:v}.4s, {v:v}.4h",
            "fcvtl2 {high:v}.4s, {v:v}.8h",
            low = out(vreg) low, high = lateout(vreg) high, v = in(vreg) v,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    [low, high]
}

macro_rules! four_registers {
    ($level:ident, ROWS = $rows:literal, $dot:ident, { $($paired:tt)* }) => {
        impl Lanes for $level {
            type B = Bytes;
            type I = Ints;
            type F = Floats;
            const BIAS: i32 = 0;
            const ROWS: usize = $rows;
            $($paired)*

            operations! {
                fn load(p: *const u8) -> Bytes {
                    [vld1q_u8(p), vld1q_u8(p.add(16)), vld1q_u8(p.add(32)), vld1q_u8(p.add(48))]
                }
                fn save(b: Bytes, p: *mut u8) {
                    for (i, b) in b.into_iter().enumerate() {
                        vst1q_u8(p.add(16 * i), b);
                    }
                }
                fn and(a: Bytes, mask: u8) -> Bytes { let m = vdupq_n_u8(mask); four!(vandq_u8, a, [m; 4]) }
                fn or(a: Bytes, b: Bytes) -> Bytes { four!(vorrq_u8, a, b) }
                fn right<const N: i32>(a: Bytes) -> Bytes { four!(shift, a, [vdupq_n_s16(-(N as i16)); 4]) }
                fn left<const N: i32>(a: Bytes) -> Bytes { four!(shift, a, [vdupq_n_s16(N as i16); 4]) }
                fn lookup(table: &[i8; 16], index: Bytes) -> Bytes {
                    let table = vreinterpretq_u8_s8(vld1q_s8(table.as_ptr()));
                    four!(vqtbl1q_u8, [table; 4], index)
                }
                fn dot_unsigned(acc: Ints, w: Bytes, p: *const i8) -> Ints { Self::dot_signed(acc, w, p) }
                fn lift(a: Bytes) -> Bytes { a }
                fn dot_signed(acc: Ints, w: Bytes, p: *const i8) -> Ints {
                    let x = vreinterpretq_s8_s32(vdupq_n_s32(p.cast::<i32>().read_unaligned()));
                    let w = four!(vreinterpretq_s8_u8, w);
                    four!($dot, acc, w, [x; 4])
                }
                fn ints(v: i32) -> Ints { [vdupq_n_s32(v); 4] }
                fn add_ints(a: Ints, b: Ints) -> Ints { four!(vaddq_s32, a, b) }
                fn mul_ints(a: Ints, b: Ints) -> Ints { four!(vmulq_s32, a, b) }
                fn load_i8(p: *const u8) -> Ints {
                    let v = vld1q_s8(p.cast());
                    let (low, high) = (vmovl_s8(vget_low_s8(v)), vmovl_high_s8(v));
                    [
                        vmovl_s16(vget_low_s16(low)),
                        vmovl_high_s16(low),
                        vmovl_s16(vget_low_s16(high)),
                        vmovl_high_s16(high),
                    ]
                }
                fn load_u8(p: *const u8) -> Ints {
                    let v = vld1q_u8(p);
                    let (low, high) = (vmovl_u8(vget_low_u8(v)), vmovl_high_u8(v));
                    let wide = [
                        vmovl_u16(vget_low_u16(low)),
                        vmovl_high_u16(low),
                        vmovl_u16(vget_low_u16(high)),
                        vmovl_high_u16(high),
                    ];
                    four!(vreinterpretq_s32_u32, wide)
                }
                fn low_nibbles(a: Ints) -> Ints { let m = vdupq_n_s32(15); four!(vandq_s32, a, [m; 4]) }
                fn high_nibbles(a: Ints) -> Ints { four!(vshrq_n_s32::<4>, a) }
                fn load_f16(p: *const u8) -> Floats {
                    let (a, b) = (vld1q_u16(p.cast()), vld1q_u16(p.cast::<u16>().add(8)));
                    let (a, b) = (widen_f16(a), widen_f16(b));
                    [a[0], a[1], b[0], b[1]]
                }
                fn load_bf16(p: *const u8) -> Floats {
                    let (a, b) = (vld1q_u16(p.cast()), vld1q_u16(p.cast::<u16>().add(8)));
                    let wide = [
                        vshll_n_u16::<16>(vget_low_u16(a)),
                        vshll_high_n_u16::<16>(a),
                        vshll_n_u16::<16>(vget_low_u16(b)),
                        vshll_high_n_u16::<16>(b),
                    ];
                    four!(vreinterpretq_f32_u32, wide)
                }
                fn load_e4m3(p: *const u8) -> Floats {
                    // The exponents' fields of f16 and E4M3 differ by eight, those of subnormals too.
                    let v = vld1q_s8(p.cast());
                    let keep = vdupq_n_u16(0xBF80);
                    let as_f16 = |v: int16x8_t| vandq_u16(vreinterpretq_u16_s16(vshlq_n_s16::<7>(v)), keep);
                    let a = widen_f16(as_f16(vmovl_s8(vget_low_s8(v))));
                    let b = widen_f16(as_f16(vmovl_high_s8(v)));
                    [a[0], a[1], b[0], b[1]]
                }
                fn load_half_e8m0(p: *const u8) -> Floats {
                    // Below 2 the number is subnormal.
                    let half = |e: int32x4_t| {
                        let normal = vshlq_n_s32::<23>(vsubq_s32(e, vdupq_n_s32(1)));
                        let small = vshlq_s32(vdupq_n_s32(0x0020_0000), e);
                        let is_small = vcltq_s32(e, vdupq_n_s32(2));
                        vreinterpretq_f32_s32(vbslq_s32(is_small, small, normal))
                    };
                    four!(half, Self::load_u8(p))
                }
                fn floats(v: f32) -> Floats { [vdupq_n_f32(v); 4] }
                fn to_floats(a: Ints) -> Floats { four!(vcvtq_f32_s32, a) }
                fn mul(a: Floats, b: Floats) -> Floats { four!(vmulq_f32, a, b) }
                fn mul_add(a: Floats, b: Floats, c: Floats) -> Floats { four!(vfmaq_f32, c, a, b) }
                fn store(a: Floats, p: *mut f32) {
                    for (i, a) in a.into_iter().enumerate() {
                        vst1q_f32(p.add(4 * i), a);
                    }
                }
            }
        }
    };
}

/// 16-bit words moved left, or right where `by` is negative.
#[inline(always)]
unsafe fn shift(a: uint8x16_t, by: int16x8_t) -> uint8x16_t {
    // SAFETY: every aarch64 has NEON.
    unsafe { vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(a), by)) }
}

#[inline(always)]
unsafe fn low_pair(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe { vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b))) }
}

#[inline(always)]
unsafe fn high_pair(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe { vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b))) }
}

four_registers!(Neon, ROWS = 2, dot_plain, {});
four_registers!(NeonDot, ROWS = 4, dot_bytes, {});
four_registers!(NeonI8mm, ROWS = 4, dot_bytes, {
    const PAIRED: bool = true;

    /// Vectors 2i and 2i + 1, four inputs of a row each, become the eight inputs of rows 0 and 1, and of 2 and 3, of each
    /// register.
    #[inline(always)]
    unsafe fn pair(w: [Bytes; 8]) -> [Bytes; 8] {
        let mut out = w;
        for v in (0..8).step_by(2) {
            for q in 0..4 {
                // SAFETY: every aarch64 has NEON.
                unsafe {
                    let (a, b) = (vreinterpretq_u32_u8(w[v][q]), vreinterpretq_u32_u8(w[v + 1][q]));
                    out[v][q] = vreinterpretq_u8_u32(vzip1q_u32(a, b));
                    out[v + 1][q] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
                }
            }
        }
        out
    }

    #[inline(always)]
    unsafe fn dot_pair(acc: *mut Ints, w: &[Bytes; 8], from: usize, to: usize, x: [*const i8; 2]) {
        // SAFETY: the caller's, as `Lanes` states it; `acc` has two sums.
        unsafe {
            let sums = &mut *acc.cast::<[Ints; 2]>();
            // Of each register's rows 0 and 1 and of its rows 2 and 3, for both rows of x.
            let mut low = four!(low_pair, sums[0], sums[1]);
            let mut high = four!(high_pair, sums[0], sums[1]);
            for v in (from..to).step_by(2) {
                let x = vcombine_s8(vld1_s8(x[0].add(4 * v)), vld1_s8(x[1].add(4 * v)));
                for q in 0..4 {
                    low[q] = matrix_product(low[q], x, vreinterpretq_s8_u8(w[v][q]));
                    high[q] = matrix_product(high[q], x, vreinterpretq_s8_u8(w[v + 1][q]));
                }
            }
            sums[0] = four!(low_pair, low, high);
            sums[1] = four!(high_pair, low, high);
        }
    }
});
