//! Dot products of bf16 rows with rows of bf16 or FP8 weights, on processors that multiply bf16.
//!
//! ```text
//! out[i, j] = sum over e: bf16(x[i, e]) * w[j, e]            both exact in bf16, sums in float32
//! ```
//!
//! One instruction adds two products to each of 16 lanes; the product of two bf16 numbers has 16 bits and is exact, each
//! of the two additions rounds. An output has one vector of partial sums whatever is computed beside it: elements
//! `32 v + 2 l` and `32 v + 2 l + 1` go to lane l in ascending v, and one fixed tree adds the lanes. So k / 16 + 4
//! roundings of the sum, and the rounding of x: 2^-8 of each term at most. Weights with a scale for each 128 inputs
//! have their partial sums multiplied after each 128. Subnormal bf16 numbers (below 1.2e-38) count as zero.
//!
//! Ceiling: one instruction of 32 products a cycle on Zen 4, twice the rate of float32. Blocks of 4 x 4 load 8 vectors
//! for 16 of them.

use crate::level::Isa;
use crate::linear::f32::{Bf16, RowsView};

/// Rows of x are padded with zeros to a multiple of this many values.
pub(crate) const STEP: usize = 64;

/// Inputs that share a block scale.
pub(crate) const SCALED: usize = 128;

/// The bits of an FP8 E4M3 number.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fp8(u8);

/// A weight that is exact in bf16.
pub(crate) trait Half: Copy {
    /// [`STEP`] weights at `p` in two vectors, in order.
    ///
    /// # Safety
    /// The module's features, and the weights at `p`.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load(p: *const Self) -> [std::arch::x86_64::__m512i; 2];
    /// The same of `n < STEP` weights; the others are 0.
    ///
    /// # Safety
    /// The module's features, and `n` weights at `p`.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_part(p: *const Self, n: usize) -> [std::arch::x86_64::__m512i; 2];
}

// Elsewhere nothing has these products, and nobody asks for them.
#[cfg(not(target_arch = "x86_64"))]
impl Half for Bf16 {}
#[cfg(not(target_arch = "x86_64"))]
impl Half for Fp8 {}

/// Scales of 128 x 128 weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockScales<'a> {
    /// A row of `across` for each 128 weight rows.
    pub values: &'a [f32],
    /// Scales of a row.
    pub across: usize,
    /// Row of the scaled matrix that is the first of the view.
    pub first_row: usize,
}

impl BlockScales<'_> {
    /// Scales of row `j` of the view.
    fn row(&self, j: usize) -> &[f32] {
        &self.values[(self.first_row + j) / SCALED * self.across..][..self.across]
    }
}

/// Rounds rows of `k` values to bf16, each padded with zeros to a multiple of [`STEP`].
pub(crate) fn round_rows(isa: Isa, x: RowsView<'_>, k: usize, out: &mut [Bf16]) {
    let stride = k.next_multiple_of(STEP);
    assert!(isa.bf16() && out.len() >= x.count * stride);
    for (i, out) in out.chunks_exact_mut(stride).take(x.count).enumerate() {
        let row = &x.values[i * x.stride..][..k];
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the features were detected, and `out` has room for the padded row.
        unsafe {
            x86::round(row, out);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (row, out);
    }
}

/// `out[i * out_stride + j] = x_i . w_j` for rows of x as [`round_rows`] leaves them. What lies `ahead` bytes behind a
/// weight is asked for while the weight is multiplied, unless that is 0.
pub(crate) fn dots<W: Half>(
    isa: Isa,
    x: RowsView<'_, Bf16>,
    w: RowsView<'_, W>,
    scales: Option<BlockScales<'_>>,
    k: usize,
    out: &mut [f32],
    out_stride: usize,
    ahead: isize,
) {
    if x.count == 0 || w.count == 0 {
        return;
    }
    assert!(isa.bf16(), "this processor has no bf16 products");
    assert!(x.values.len() >= (x.count - 1) * x.stride + k.next_multiple_of(STEP));
    assert!(w.values.len() >= (w.count - 1) * w.stride + k);
    assert!(out.len() >= (x.count - 1) * out_stride + w.count, "output is too short");
    assert!(scales.is_none_or(|s| s.across == k.div_ceil(SCALED) && s.row(w.count - 1).len() == s.across));
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the features were detected, and rows and outputs lie inside their slices by the checks above.
    unsafe {
        match scales {
            None => x86::dots(x, w, k, out, out_stride, ahead),
            Some(scales) => x86::scaled_dots(x, w, scales, k, out, out_stride, ahead),
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (out, out_stride, ahead);
}

/// Decodes FP8 codes to bf16; exact.
pub(crate) fn decode_fp8(isa: Isa, codes: &[Fp8], out: &mut [Bf16]) {
    assert!(isa.bf16() && out.len() >= codes.len());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the features were detected, and there is room for every code.
    unsafe {
        x86::decode(codes, out);
    }
}

/// The bf16 bits of the E4M3 magnitudes.
#[cfg(any(target_arch = "x86_64", test))]
const MAGNITUDES: [u16; 128] = {
    let mut all = [0u16; 128];
    let mut code = 1;
    while code < 127 {
        let (e, m) = (code >> 3, code & 7);
        all[code] = if e > 0 {
            ((e + 120) << 7 | m << 4) as u16
        } else {
            // m * 2^-9; the highest bit of m becomes the implicit one.
            let high = if m >= 4 { 2 } else { m / 2 };
            ((high + 118) << 7 | (m << (7 - high)) & 0x7F) as u16
        };
        code += 1;
    }
    all[127] = 0x7FC0;
    all
};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Bf16, BlockScales, Fp8, Half, MAGNITUDES, RowsView, SCALED, STEP};

    impl Half for Bf16 {
        #[inline(always)]
        unsafe fn load(p: *const Bf16) -> [__m512i; 2] {
            // SAFETY: the caller's.
            unsafe { [_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(p.add(32).cast())] }
        }
        #[inline(always)]
        unsafe fn load_part(p: *const Bf16, n: usize) -> [__m512i; 2] {
            let mask = (1u64 << n) - 1;
            // SAFETY: lanes beyond the caller's n values are not touched.
            unsafe {
                [
                    _mm512_maskz_loadu_epi16(mask as u32, p.cast()),
                    _mm512_maskz_loadu_epi16((mask >> 32) as u32, p.wrapping_add(32).cast()),
                ]
            }
        }
    }

    impl Half for Fp8 {
        #[inline(always)]
        unsafe fn load(p: *const Fp8) -> [__m512i; 2] {
            // SAFETY: the caller's.
            unsafe { halves(_mm512_loadu_si512(p.cast())) }
        }
        #[inline(always)]
        unsafe fn load_part(p: *const Fp8, n: usize) -> [__m512i; 2] {
            // SAFETY: lanes beyond the caller's n values are not touched.
            unsafe { halves(_mm512_maskz_loadu_epi8((1u64 << n) - 1, p.cast())) }
        }
    }

    /// Low or high bytes of the magnitudes.
    const fn bytes(shift: u32) -> [u8; 128] {
        let mut all = [0u8; 128];
        let mut i = 0;
        while i < 128 {
            all[i] = (MAGNITUDES[i] >> shift) as u8;
            i += 1;
        }
        all
    }
    static LOW: [u8; 128] = bytes(0);
    static HIGH: [u8; 128] = bytes(8);

    /// 64 E4M3 codes as bf16. A look-up among 128 bytes takes the low seven bits of its index.
    ///
    /// # Safety
    /// The features.
    #[inline(always)]
    unsafe fn halves(codes: __m512i) -> [__m512i; 2] {
        // SAFETY: the tables have 128 bytes.
        unsafe {
            let table = |t: &[u8; 128], half: usize| _mm512_loadu_si512(t.as_ptr().add(64 * half).cast());
            // The unpacking below takes the low half of each quarter first.
            let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
            let codes = _mm512_permutexvar_epi64(order, codes);
            let low = _mm512_permutex2var_epi8(table(&LOW, 0), codes, table(&LOW, 1));
            let high = _mm512_permutex2var_epi8(table(&HIGH, 0), codes, table(&HIGH, 1));
            // high | (codes & sign)
            let high = _mm512_ternarylogic_epi32::<0xF8>(high, codes, _mm512_set1_epi8(-128));
            [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
        }
    }

    #[inline(always)]
    unsafe fn dot(acc: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: both types are 512 bits; the caller has the features.
        unsafe {
            _mm512_dpbf16_ps(
                acc,
                std::mem::transmute::<__m512i, __m512bh>(a),
                std::mem::transmute::<__m512i, __m512bh>(b),
            )
        }
    }

    /// # Safety
    /// The features, and `out` is `x` padded to a multiple of [`STEP`].
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub unsafe fn round(x: &[f32], out: &mut [Bf16]) {
        debug_assert!(out.len() >= x.len().next_multiple_of(32));
        // SAFETY: whole vectors lie inside `x`, the last one is loaded in part; `out` is longer.
        unsafe {
            let mut e = 0;
            while e < out.len() {
                let part = |e: usize| {
                    let left = x.len().saturating_sub(e).min(16);
                    _mm512_maskz_loadu_ps(((1u32 << left) - 1) as u16, x.as_ptr().wrapping_add(e))
                };
                let both = _mm512_cvtne2ps_pbh(part(e + 16), part(e));
                let both = std::mem::transmute::<__m512bh, __m512i>(both);
                _mm512_storeu_si512(out.as_mut_ptr().add(e).cast(), both);
                e += 32;
            }
        }
    }

    /// # Safety
    /// The features, and `out` has room for every code.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub unsafe fn decode(codes: &[Fp8], out: &mut [Bf16]) {
        let (n, to) = (codes.len(), out.as_mut_ptr());
        // SAFETY: whole steps lie inside both slices; the last one touches what is left of them.
        unsafe {
            let mut e = 0;
            while e + STEP <= n {
                let [a, b] = Fp8::load(codes.as_ptr().add(e));
                _mm512_storeu_si512(to.add(e).cast(), a);
                _mm512_storeu_si512(to.add(e + 32).cast(), b);
                e += STEP;
            }
            if e < n {
                let [a, b] = Fp8::load_part(codes.as_ptr().add(e), n - e);
                let mask = (1u64 << (n - e)) - 1;
                _mm512_mask_storeu_epi16(to.add(e).cast(), mask as u32, a);
                _mm512_mask_storeu_epi16(to.wrapping_add(e + 32).cast(), (mask >> 32) as u32, b);
            }
        }
    }

    /// # Safety
    /// The features, and `super::dots`'s bounds.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub unsafe fn dots<W: Half>(
        x: RowsView<'_, Bf16>,
        w: RowsView<'_, W>,
        k: usize,
        out: &mut [f32],
        out_stride: usize,
        ahead: isize,
    ) {
        let to = |i: usize, j: usize| out.as_ptr().wrapping_add(i * out_stride + j).cast_mut();
        let mut i = 0;
        // SAFETY: every block starts inside the rows that `dots` was checked for.
        unsafe {
            while i < x.count {
                // Only the first rows of x wait for weights.
                let ahead = if i == 0 { ahead } else { 0 };
                let (mut j, left) = (0, x.count - i);
                if left >= 4 {
                    while j + 4 <= w.count {
                        block::<W, 4, 4>(x, i, w, j, k, to(i, j), out_stride, ahead);
                        j += 4;
                    }
                    while j < w.count {
                        block::<W, 4, 1>(x, i, w, j, k, to(i, j), out_stride, ahead);
                        j += 1;
                    }
                    i += 4;
                } else if left >= 2 {
                    while j + 4 <= w.count {
                        block::<W, 2, 4>(x, i, w, j, k, to(i, j), out_stride, ahead);
                        j += 4;
                    }
                    while j < w.count {
                        block::<W, 2, 1>(x, i, w, j, k, to(i, j), out_stride, ahead);
                        j += 1;
                    }
                    i += 2;
                } else {
                    while j + 8 <= w.count {
                        block::<W, 1, 8>(x, i, w, j, k, to(i, j), out_stride, ahead);
                        j += 8;
                    }
                    while j < w.count {
                        block::<W, 1, 1>(x, i, w, j, k, to(i, j), out_stride, ahead);
                        j += 1;
                    }
                    i += 1;
                }
            }
        }
    }

    /// # Safety
    /// The features, and `super::dots`'s bounds.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub unsafe fn scaled_dots<W: Half>(
        x: RowsView<'_, Bf16>,
        w: RowsView<'_, W>,
        scales: BlockScales<'_>,
        k: usize,
        out: &mut [f32],
        out_stride: usize,
        ahead: isize,
    ) {
        let to = |i: usize, j: usize| out.as_ptr().wrapping_add(i * out_stride + j).cast_mut();
        let mut i = 0;
        // SAFETY: as in `dots`.
        unsafe {
            while i < x.count {
                let ahead = if i == 0 { ahead } else { 0 };
                let two = x.count - i >= 2;
                let mut j = 0;
                while j < w.count {
                    // Rows of a block share a row of scales.
                    let near = j + 4 <= w.count && (scales.first_row + j) % SCALED <= SCALED - 4;
                    let (s, to) = (scales.row(j), to(i, j));
                    match (two, near) {
                        (true, true) => scaled_block::<W, 2, 4>(x, i, w, j, k, s, to, out_stride, ahead),
                        (true, false) => scaled_block::<W, 2, 1>(x, i, w, j, k, s, to, out_stride, ahead),
                        (false, true) => scaled_block::<W, 1, 4>(x, i, w, j, k, s, to, out_stride, ahead),
                        (false, false) => scaled_block::<W, 1, 1>(x, i, w, j, k, s, to, out_stride, ahead),
                    }
                    j += if near { 4 } else { 1 };
                }
                i += if two { 2 } else { 1 };
            }
        }
    }

    /// M rows of x from `i` on by N weight rows from `j` on.
    ///
    /// # Safety
    /// The features; the rows lie inside the views, and `to` has room for M rows of N outputs.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    #[allow(clippy::too_many_arguments, reason = "two views, a place in each, and where results go")]
    unsafe fn block<W: Half, const M: usize, const N: usize>(
        x: RowsView<'_, Bf16>,
        i: usize,
        w: RowsView<'_, W>,
        j: usize,
        k: usize,
        to: *mut f32,
        stride: usize,
        ahead: isize,
    ) {
        // SAFETY: the caller's; x is padded, so that whole steps of it may be read.
        unsafe {
            let a: [*const Bf16; M] = std::array::from_fn(|r| x.values.as_ptr().add((i + r) * x.stride));
            let b: [*const W; N] = std::array::from_fn(|c| w.values.as_ptr().add((j + c) * w.stride));
            let mut acc = [[_mm512_setzero_ps(); N]; M];
            let whole = k - k % STEP;
            let mut e = 0;
            while e < whole {
                step(&a, &b, e, &mut acc, ahead);
                e += STEP;
            }
            if e < k {
                rest(&a, &b, e, k - e, &mut acc);
            }
            crate::linear::f32::put(&acc, to, stride);
        }
    }

    /// As [`block`], for weight rows that share the scales `scales`, one for each [`SCALED`] inputs.
    ///
    /// # Safety
    /// As for [`block`].
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    #[allow(clippy::too_many_arguments, reason = "two views, a place in each, and where results go")]
    unsafe fn scaled_block<W: Half, const M: usize, const N: usize>(
        x: RowsView<'_, Bf16>,
        i: usize,
        w: RowsView<'_, W>,
        j: usize,
        k: usize,
        scales: &[f32],
        to: *mut f32,
        stride: usize,
        ahead: isize,
    ) {
        // SAFETY: as in `block`.
        unsafe {
            let a: [*const Bf16; M] = std::array::from_fn(|r| x.values.as_ptr().add((i + r) * x.stride));
            let b: [*const W; N] = std::array::from_fn(|c| w.values.as_ptr().add((j + c) * w.stride));
            let mut total = [[_mm512_setzero_ps(); N]; M];
            for (s, &scale) in scales.iter().enumerate() {
                let mut acc = [[_mm512_setzero_ps(); N]; M];
                let mut e = s * SCALED;
                let end = k.min(e + SCALED);
                while e + STEP <= end {
                    step(&a, &b, e, &mut acc, ahead);
                    e += STEP;
                }
                if e < end {
                    rest(&a, &b, e, end - e, &mut acc);
                }
                let scale = _mm512_set1_ps(scale);
                for r in 0..M {
                    for c in 0..N {
                        total[r][c] = _mm512_fmadd_ps(acc[r][c], scale, total[r][c]);
                    }
                }
            }
            crate::linear::f32::put(&total, to, stride);
        }
    }

    /// Adds the products of [`STEP`] inputs from `e` on.
    ///
    /// # Safety
    /// The features, and these inputs in every row.
    #[inline(always)]
    unsafe fn step<W: Half, const M: usize, const N: usize>(
        a: &[*const Bf16; M],
        b: &[*const W; N],
        e: usize,
        acc: &mut [[__m512; N]; M],
        ahead: isize,
    ) {
        // SAFETY: the caller's; a prefetch may name any address.
        unsafe {
            let mut w = [[_mm512_setzero_si512(); 2]; N];
            for c in 0..N {
                w[c] = W::load(b[c].add(e));
                if ahead != 0 {
                    for line in (0..size_of::<W>() * STEP).step_by(64) {
                        let p = b[c].add(e).cast::<i8>().wrapping_offset(ahead + line as isize);
                        _mm_prefetch::<_MM_HINT_T0>(p);
                    }
                }
            }
            products(a, &w, e, acc);
        }
    }

    /// The same for the last `n` inputs of a row.
    ///
    /// # Safety
    /// As for [`step`], n inputs.
    #[inline(always)]
    unsafe fn rest<W: Half, const M: usize, const N: usize>(
        a: &[*const Bf16; M],
        b: &[*const W; N],
        e: usize,
        n: usize,
        acc: &mut [[__m512; N]; M],
    ) {
        // SAFETY: the caller's.
        unsafe {
            let mut w = [[_mm512_setzero_si512(); 2]; N];
            for c in 0..N {
                w[c] = W::load_part(b[c].add(e), n);
            }
            products(a, &w, e, acc);
        }
    }

    #[inline(always)]
    unsafe fn products<const M: usize, const N: usize>(
        a: &[*const Bf16; M],
        w: &[[__m512i; 2]; N],
        e: usize,
        acc: &mut [[__m512; N]; M],
    ) {
        // SAFETY: the caller's.
        unsafe {
            for h in 0..2 {
                for r in 0..M {
                    let x = _mm512_loadu_si512(a[r].add(e + 32 * h).cast());
                    for c in 0..N {
                        acc[r][c] = dot(acc[r][c], x, w[c][h]);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
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

    fn widened(v: Bf16) -> f32 {
        crate::linear::f32::Weight::value(v)
    }

    #[test]
    fn magnitudes_are_those_of_e4m3() {
        for code in 0..127u8 {
            let found = f32::from_bits(u32::from(MAGNITUDES[usize::from(code)]) << 16);
            assert_eq!(found.to_bits(), lapidary_formats::fp8::e4m3_to_f32(code).to_bits(), "{code}");
        }
    }

    #[test]
    fn dots_match_f64_and_rows_alone_in_every_blocking() {
        let isa = Isa::new(None).expect("the best level is there");
        if !isa.bf16() {
            eprintln!("this processor has no bf16 products");
            return;
        }
        for k in [1, 31, 33, 64, 96, 128, 160, 255, 333, 640, 2112] {
            let (m, n, padded) = (7, 11, usize::next_multiple_of(k, STEP));
            let (x, w) = (values(m * k, 1), values(n * (k + 3), 2));
            let mut xs = vec![Bf16::default(); m * padded];
            round_rows(isa, RowsView { values: &x, stride: k, count: m }, k, &mut xs);
            for (i, x) in x.chunks(k).enumerate() {
                for (e, x) in x.iter().enumerate() {
                    assert_eq!(widened(xs[i * padded + e]), half::bf16::from_f32(*x).to_f32(), "{x}");
                }
                assert!(xs[i * padded + k..(i + 1) * padded].iter().all(|&v| widened(v) == 0.0));
            }
            let mut ws = vec![Bf16::default(); n * (k + 3)];
            for (to, w) in ws.iter_mut().zip(&w) {
                *to = Bf16::of(*w);
            }
            // Every code but NaN in turn.
            let codes: Vec<Fp8> = (0..n * (k + 3))
                .map(|i| Fp8((i * 37 % 256) as u8))
                .map(|c| if c.0 & 127 == 127 { Fp8(3) } else { c })
                .collect();
            let fp8 = |c: Fp8| f64::from(lapidary_formats::fp8::e4m3_to_f32(c.0));
            let across = k.div_ceil(SCALED);
            let scales: Vec<f32> = (0..2 * across).map(|i| 0.3 + i as f32 / 7.0).collect();
            let scales = BlockScales { values: &scales, across, first_row: 122 };
            check(isa, &xs, &ws, k, None, |w| f64::from(widened(w)));
            check(isa, &xs, &codes, k, None, fp8);
            check(isa, &xs, &codes, k, Some(scales), fp8);
            let mut decoded = vec![Bf16::default(); codes.len()];
            decode_fp8(isa, &codes, &mut decoded);
            assert!(codes.iter().zip(&decoded).all(|(&c, &v)| fp8(c) == f64::from(widened(v))));
        }
    }

    fn check<W: Half>(
        isa: Isa,
        x: &[Bf16],
        w: &[W],
        k: usize,
        scales: Option<BlockScales<'_>>,
        value: impl Fn(W) -> f64,
    ) {
        let (m, n, padded, stride) = (7, 11, k.next_multiple_of(STEP), k + 3);
        let mut out = vec![f32::NAN; m * n];
        let (xs, ws) =
            (RowsView { values: x, stride: padded, count: m }, RowsView { values: w, stride, count: n });
        dots(isa, xs, ws, scales, k, &mut out, n, 192);
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let terms = (0..k).map(|e| {
                let scale = scales.map_or(1.0, |s| f64::from(s.row(j)[e / SCALED]));
                f64::from(widened(x[i * padded + e])) * value(w[j * stride + e]) * scale
            });
            let (exact, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
            // k / 16 additions in a lane, the tree, and a rounding for each scale.
            let roundings = k as f64 / 16.0 + 6.0 + k.div_ceil(SCALED) as f64;
            let bound = size * roundings * f64::from(f32::EPSILON) / 2.0;
            let found = f64::from(out[i * n + j]);
            assert!((found - exact).abs() <= bound, "k {k} [{i}, {j}] {found} {exact}");
            let mut one = [f32::NAN];
            let (a, b) = (&x[i * padded..], &w[j * stride..]);
            let alone = scales.map(|s| BlockScales { first_row: s.first_row + j, ..s });
            let (a, b) =
                (RowsView { values: a, stride: padded, count: 1 }, RowsView { values: b, stride, count: 1 });
            dots(isa, a, b, alone, k, &mut one, 1, 0);
            assert_eq!(one[0].to_bits(), out[i * n + j].to_bits(), "k {k} [{i}, {j}]");
        }
    }
}
