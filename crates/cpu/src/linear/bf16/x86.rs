//! The kernels: AVX-512 BF16, with VBMI for FP8.

#![allow(
    clippy::needless_range_loop,
    reason = "one index runs over several arrays whose lengths are constants"
)]

use std::arch::x86_64::*;

use super::{Ahead, Bf16, BlockScales, Fp8, Half, MAGNITUDES, RowsView, SCALED, STEP};

impl Half for Bf16 {
    const ROWS: usize = 4;
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
    const ROWS: usize = 8;
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

/// Rows of x that pass the weights next, of `left`: as many as the others, so that no pass is nearly empty.
fn share(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most))
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
    ahead: Ahead,
) {
    let mut i = 0;
    while i < x.count {
        let m = share(x.count - i, W::ROWS);
        // Only the first rows of x wait for weights.
        let ahead = if i == 0 { ahead } else { Ahead::Nothing };
        let out = out[i * out_stride..].as_mut_ptr();
        // SAFETY: rows i .. i + m are inside x, and `out` has room for them.
        unsafe {
            match m {
                1 => strip::<W, 1, 8>(x, i, w, k, out, out_stride, ahead),
                2 => strip::<W, 2, 4>(x, i, w, k, out, out_stride, ahead),
                3 => strip::<W, 3, 4>(x, i, w, k, out, out_stride, ahead),
                4 => strip::<W, 4, 4>(x, i, w, k, out, out_stride, ahead),
                5 => strip::<W, 5, 2>(x, i, w, k, out, out_stride, ahead),
                6 => strip::<W, 6, 2>(x, i, w, k, out, out_stride, ahead),
                7 => strip::<W, 7, 2>(x, i, w, k, out, out_stride, ahead),
                _ => strip::<W, 8, 2>(x, i, w, k, out, out_stride, ahead),
            }
        }
        i += m;
    }
}

/// M rows of x from `i` on by all weight rows.
///
/// # Safety
/// As for `dots`; `out` is row i's.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
unsafe fn strip<W: Half, const M: usize, const N: usize>(
    x: RowsView<'_, Bf16>,
    i: usize,
    w: RowsView<'_, W>,
    k: usize,
    out: *mut f32,
    stride: usize,
    ahead: Ahead,
) {
    let ahead = bytes_ahead(ahead, w, N);
    let mut j = 0;
    // SAFETY: every block starts inside the rows that `dots` was checked for.
    unsafe {
        while j + N <= w.count {
            block::<W, M, N>(x, i, w, j, k, out.add(j), stride, ahead);
            j += N;
        }
        while j < w.count {
            block::<W, M, 1>(x, i, w, j, k, out.add(j), stride, ahead);
            j += 1;
        }
    }
}

fn bytes_ahead<W>(ahead: Ahead, w: RowsView<'_, W>, rows: usize) -> isize {
    match ahead {
        Ahead::Rows => (rows * w.stride * size_of::<W>()) as isize,
        Ahead::Nothing => 0,
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
    ahead: Ahead,
) {
    let mut i = 0;
    while i < x.count {
        let m = share(x.count - i, 4);
        let ahead = if i == 0 { ahead } else { Ahead::Nothing };
        let out = out[i * out_stride..].as_mut_ptr();
        // SAFETY: as in `dots`.
        unsafe {
            match m {
                1 => scaled_strip::<W, 1, 4>(x, i, w, scales, k, out, out_stride, ahead),
                2 => scaled_strip::<W, 2, 4>(x, i, w, scales, k, out, out_stride, ahead),
                3 => scaled_strip::<W, 3, 2>(x, i, w, scales, k, out, out_stride, ahead),
                _ => scaled_strip::<W, 4, 2>(x, i, w, scales, k, out, out_stride, ahead),
            }
        }
        i += m;
    }
}

/// # Safety
/// As for `strip`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
#[allow(clippy::too_many_arguments, reason = "two views, their scales and where results go")]
unsafe fn scaled_strip<W: Half, const M: usize, const N: usize>(
    x: RowsView<'_, Bf16>,
    i: usize,
    w: RowsView<'_, W>,
    scales: BlockScales<'_>,
    k: usize,
    out: *mut f32,
    stride: usize,
    ahead: Ahead,
) {
    let ahead = bytes_ahead(ahead, w, N);
    let mut j = 0;
    // SAFETY: as in `strip`.
    unsafe {
        while j < w.count {
            // Rows of a block share a row of scales.
            let (s, to) = (scales.row(j), out.add(j));
            if j + N <= w.count && (scales.first_row + j) % SCALED <= SCALED - N {
                scaled_block::<W, M, N>(x, i, w, j, k, s, to, stride, ahead);
                j += N;
            } else {
                scaled_block::<W, M, 1>(x, i, w, j, k, s, to, stride, ahead);
                j += 1;
            }
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
        }
        if ahead != 0 {
            // The block's rows follow each other in memory; asked for line by line in that order, whatever the order in
            // which they are read, they are found by the processor's own prefetch too.
            let bytes = N * STEP * size_of::<W>();
            let first = b[0].cast::<i8>().wrapping_offset(ahead + (e / STEP * bytes) as isize);
            for line in (0..bytes).step_by(64) {
                _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(line));
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
