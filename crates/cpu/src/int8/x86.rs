//! [`Lanes`] on x86-64: AVX-512 with VNNI, and in registers of 256 bits AVX-VNNI and AVX2.

use std::arch::x86_64::*;

use super::lanes::{Lanes, operations};

/// AVX-512 F, BW, VL, DQ and VNNI: a vector is one register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Vnni;

/// AVX2, FMA and F16C: a vector is two registers, rows 0 to 7 and 8 to 15.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2;

/// 16 E4M3 bytes as f16 numbers, 2^-8 of them each: the exponents' fields differ by eight, subnormals too.
///
/// # Safety
/// AVX2, and 16 bytes at `p`.
#[inline(always)]
unsafe fn e4m3_as_f16(p: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
        // The sign's copies between sign and exponent go.
        _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(0xBF80u16 as i16))
    }
}

/// AVX2 and AVX-VNNI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AvxVnni;

/// [`AvxVnni`] in the encoding of AVX-512 VL, for tests where only that is there.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512Vnni256;

impl Lanes for Avx512Vnni {
    type B = __m512i;
    type I = __m512i;
    type F = __m512;
    // The instruction multiplies unsigned by signed bytes, so signed weights are moved up by 128.
    const BIAS: i32 = 128;
    const ROWS: usize = 4;

    operations! {
        fn load(p: *const u8) -> __m512i { _mm512_loadu_si512(p.cast()) }
        fn save(b: __m512i, p: *mut u8) { _mm512_storeu_si512(p.cast(), b) }
        fn and(a: __m512i, mask: u8) -> __m512i { _mm512_and_si512(a, _mm512_set1_epi8(mask as i8)) }
        fn or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn right<const N: i32>(a: __m512i) -> __m512i { _mm512_srl_epi16(a, _mm_cvtsi32_si128(N)) }
        fn left<const N: i32>(a: __m512i) -> __m512i { _mm512_sll_epi16(a, _mm_cvtsi32_si128(N)) }
        fn lookup(table: &[i8; 16], index: __m512i) -> __m512i {
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), index)
        }
        fn dot_unsigned(acc: __m512i, w: __m512i, p: *const i8) -> __m512i {
            _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(p.cast::<i32>().read_unaligned()))
        }
        fn lift(a: __m512i) -> __m512i { _mm512_xor_si512(a, _mm512_set1_epi8(-128)) }
        fn dot_signed(acc: __m512i, w: __m512i, p: *const i8) -> __m512i {
            _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(p.cast::<i32>().read_unaligned()))
        }
        fn ints(v: i32) -> __m512i { _mm512_set1_epi32(v) }
        fn add_ints(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn mul_ints(a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi32(a, b) }
        fn load_i8(p: *const u8) -> __m512i { _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())) }
        fn load_u8(p: *const u8) -> __m512i { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
        fn low_nibbles(a: __m512i) -> __m512i { _mm512_and_si512(a, _mm512_set1_epi32(15)) }
        fn high_nibbles(a: __m512i) -> __m512i { _mm512_srli_epi32::<4>(a) }
        fn load_f16(p: *const u8) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
        fn load_bf16(p: *const u8) -> __m512 {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
        fn load_e4m3(p: *const u8) -> __m512 { _mm512_cvtph_ps(e4m3_as_f16(p)) }
        fn load_half_e8m0(p: *const u8) -> __m512 {
            // Below 2 the number is subnormal.
            let e = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
            let small = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
            let is_small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
            _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_small, normal, small))
        }
        fn floats(v: f32) -> __m512 { _mm512_set1_ps(v) }
        fn to_floats(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn store(a: __m512, p: *mut f32) { _mm512_storeu_ps(p, a) }
    }
}

/// A vector of two halves, each by `$f` of the halves of the arguments.
macro_rules! both {
    ($f:expr, $a:expr) => {
        [$f($a[0]), $f($a[1])]
    };
    ($f:expr, $a:expr, $b:expr) => {
        [$f($a[0], $b[0]), $f($a[1], $b[1])]
    };
}

/// A vector of two registers, rows 0 to 7 and 8 to 15; the levels differ in their dot products.
macro_rules! two_registers {
    ($level:ident, BIAS = $bias:literal, $($dots:tt)*) => {
impl Lanes for $level {
    type B = [__m256i; 2];
    type I = [__m256i; 2];
    type F = [__m256; 2];
    const BIAS: i32 = $bias;
    const ROWS: usize = 4;

    operations! {
        fn load(p: *const u8) -> [__m256i; 2] {
            [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())]
        }
        fn save(b: [__m256i; 2], p: *mut u8) {
            _mm256_storeu_si256(p.cast(), b[0]);
            _mm256_storeu_si256(p.add(32).cast(), b[1]);
        }
        fn and(a: [__m256i; 2], mask: u8) -> [__m256i; 2] {
            let mask = _mm256_set1_epi8(mask as i8);
            [_mm256_and_si256(a[0], mask), _mm256_and_si256(a[1], mask)]
        }
        fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] { both!(_mm256_or_si256, a, b) }
        fn right<const N: i32>(a: [__m256i; 2]) -> [__m256i; 2] { both!(_mm256_srli_epi16::<N>, a) }
        fn left<const N: i32>(a: [__m256i; 2]) -> [__m256i; 2] { both!(_mm256_slli_epi16::<N>, a) }
        fn lookup(table: &[i8; 16], index: [__m256i; 2]) -> [__m256i; 2] {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, index[0]), _mm256_shuffle_epi8(table, index[1])]
        }
        $($dots)*
        fn ints(v: i32) -> [__m256i; 2] { [_mm256_set1_epi32(v); 2] }
        fn add_ints(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] { both!(_mm256_add_epi32, a, b) }
        fn mul_ints(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] { both!(_mm256_mullo_epi32, a, b) }
        fn load_i8(p: *const u8) -> [__m256i; 2] {
            let v = _mm_loadu_si128(p.cast());
            [_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(v, v))]
        }
        fn load_u8(p: *const u8) -> [__m256i; 2] {
            let v = _mm_loadu_si128(p.cast());
            [_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(v, v))]
        }
        fn low_nibbles(a: [__m256i; 2]) -> [__m256i; 2] {
            let mask = _mm256_set1_epi32(15);
            [_mm256_and_si256(a[0], mask), _mm256_and_si256(a[1], mask)]
        }
        fn high_nibbles(a: [__m256i; 2]) -> [__m256i; 2] { both!(_mm256_srli_epi32::<4>, a) }
        fn load_f16(p: *const u8) -> [__m256; 2] {
            [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast()))]
        }
        fn load_bf16(p: *const u8) -> [__m256; 2] {
            let (a, b) = (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(16).cast()));
            let wide = [_mm256_cvtepu16_epi32(a), _mm256_cvtepu16_epi32(b)];
            let moved = both!(_mm256_slli_epi32::<16>, wide);
            both!(_mm256_castsi256_ps, moved)
        }
        fn load_e4m3(p: *const u8) -> [__m256; 2] {
            let f16s = e4m3_as_f16(p);
            [_mm256_cvtph_ps(_mm256_castsi256_si128(f16s)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(f16s))]
        }
        fn load_half_e8m0(p: *const u8) -> [__m256; 2] {
            // Below 2 the number is subnormal.
            let e = Self::load_u8(p);
            let (one, two) = (_mm256_set1_epi32(1), _mm256_set1_epi32(2));
            let mut out = [_mm256_setzero_ps(); 2];
            for h in 0..2 {
                let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e[h], one));
                let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e[h]);
                let is_small = _mm256_cmpgt_epi32(two, e[h]);
                out[h] = _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small));
            }
            out
        }
        fn floats(v: f32) -> [__m256; 2] { [_mm256_set1_ps(v); 2] }
        fn to_floats(a: [__m256i; 2]) -> [__m256; 2] { both!(_mm256_cvtepi32_ps, a) }
        fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] { both!(_mm256_mul_ps, a, b) }
        fn mul_add(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
        }
        fn store(a: [__m256; 2], p: *mut f32) {
            _mm256_storeu_ps(p, a[0]);
            _mm256_storeu_ps(p.add(8), a[1]);
        }
    }
}
    };
}

two_registers! {
    Avx2, BIAS = 0,
        fn dot_unsigned(acc: [__m256i; 2], w: [__m256i; 2], p: *const i8) -> [__m256i; 2] {
            let x = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            let ones = _mm256_set1_epi16(1);
            // Two products of at most 127 * 127 each: no saturation.
            let a = _mm256_madd_epi16(_mm256_maddubs_epi16(w[0], x), ones);
            let b = _mm256_madd_epi16(_mm256_maddubs_epi16(w[1], x), ones);
            [_mm256_add_epi32(acc[0], a), _mm256_add_epi32(acc[1], b)]
        }
        fn lift(a: [__m256i; 2]) -> [__m256i; 2] { a }
        fn dot_signed(acc: [__m256i; 2], w: [__m256i; 2], p: *const i8) -> [__m256i; 2] {
            let x = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            let ones = _mm256_set1_epi16(1);
            // |w| * (x with the sign of w): two products of at most 128 * 127 each.
            let a = _mm256_maddubs_epi16(_mm256_abs_epi8(w[0]), _mm256_sign_epi8(x, w[0]));
            let b = _mm256_maddubs_epi16(_mm256_abs_epi8(w[1]), _mm256_sign_epi8(x, w[1]));
            let (a, b) = (_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones));
            [_mm256_add_epi32(acc[0], a), _mm256_add_epi32(acc[1], b)]
        }
}

two_registers! {
    AvxVnni, BIAS = 128,
        fn dot_unsigned(acc: [__m256i; 2], w: [__m256i; 2], p: *const i8) -> [__m256i; 2] {
            let x = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            [_mm256_dpbusd_avx_epi32(acc[0], w[0], x), _mm256_dpbusd_avx_epi32(acc[1], w[1], x)]
        }
        fn lift(a: [__m256i; 2]) -> [__m256i; 2] {
            let top = _mm256_set1_epi8(-128);
            [_mm256_xor_si256(a[0], top), _mm256_xor_si256(a[1], top)]
        }
        fn dot_signed(acc: [__m256i; 2], w: [__m256i; 2], p: *const i8) -> [__m256i; 2] {
            Self::dot_unsigned(acc, w, p)
        }
}

#[cfg(test)]
two_registers! {
    Avx512Vnni256, BIAS = 128,
        fn dot_unsigned(acc: [__m256i; 2], w: [__m256i; 2], p: *const i8) -> [__m256i; 2] {
            let x = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            [_mm256_dpbusd_epi32(acc[0], w[0], x), _mm256_dpbusd_epi32(acc[1], w[1], x)]
        }
        fn lift(a: [__m256i; 2]) -> [__m256i; 2] {
            let top = _mm256_set1_epi8(-128);
            [_mm256_xor_si256(a[0], top), _mm256_xor_si256(a[1], top)]
        }
        fn dot_signed(acc: [__m256i; 2], w: [__m256i; 2], p: *const i8) -> [__m256i; 2] {
            Self::dot_unsigned(acc, w, p)
        }
}
