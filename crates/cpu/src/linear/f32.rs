//! Dot products of float32 rows, the kernel under every float path.
//!
//! `out[i, j] = x_i . w_j` for `m` rows of x and `n` rows of w, both `k` long. Each output has one vector of
//! partial sums ([`LANES`] of them; 8 at AVX2 and NEON), element `e` going to lane `e mod lanes` in ascending order by
//! fused multiply-add, and one fixed tree at the end. How many outputs a block computes side by side changes
//! speed only. The error of a sum of k terms is that of k / lanes + log2(lanes) roundings.
//!
//! Ceiling: two 8-lane (AVX2) or one to two 16-lane (AVX-512) fused operations a cycle. Blocks of 4 x 4 load
//! 8 vectors for 16 operations.

use crate::level::Isa;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::level::Level;

/// Partial sums of one output at the scalar level and at AVX-512.
const LANES: usize = 16;

/// A number of rows of equal length, `stride` values apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsView<'a, T = f32> {
    /// The rows.
    pub values: &'a [T],
    /// Values from one row to the next.
    pub stride: usize,
    /// How many.
    pub count: usize,
}

impl<T> RowsView<'_, T> {
    fn check(&self, k: usize) {
        let needed = if self.count == 0 { 0 } else { (self.count - 1) * self.stride + k };
        assert!(self.values.len() >= needed, "rows end before their last value");
    }
}

/// A weight that is made float32 on its way into a register; exact.
pub(crate) trait Weight: Copy + Default {
    /// The weight.
    fn value(self) -> f32;
    /// 16 weights at `p`.
    ///
    /// # Safety
    /// AVX-512 F, and 16 weights at `p`.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load16(p: *const Self) -> std::arch::x86_64::__m512;
    /// 8 weights at `p`.
    ///
    /// # Safety
    /// AVX2 and F16C, and 8 weights at `p`.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load8(p: *const Self) -> std::arch::x86_64::__m256;
    /// 4 weights at `p`.
    ///
    /// # Safety
    /// 4 weights at `p`.
    #[cfg(target_arch = "aarch64")]
    unsafe fn load4(p: *const Self) -> std::arch::aarch64::float32x4_t;
}

/// The bits of a bf16.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bf16(u16);

/// The bits of an f16.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct F16(u16);

impl Bf16 {
    /// The nearest to `value`, halves to even.
    #[cfg(test)]
    pub fn of(value: f32) -> Bf16 {
        Bf16(half::bf16::from_f32(value).to_bits())
    }

    /// The number that a float32 with these bits begins with.
    #[inline(always)]
    pub fn from_high_bits(bits: u32) -> Bf16 {
        Bf16((bits >> 16) as u16)
    }

    /// Little-endian bf16 numbers where they lie, if this machine has them like that.
    pub fn all(bytes: &[u8]) -> Option<&[Bf16]> {
        // SAFETY: every bit pattern is a `Bf16`; the prefix and suffix are checked to be empty.
        let (before, values, after) = unsafe { bytes.align_to::<Bf16>() };
        (cfg!(target_endian = "little") && before.is_empty() && after.is_empty()).then_some(values)
    }

    /// Room for two numbers in each float of a buffer.
    pub fn room(floats: &mut [f32]) -> &mut [Bf16] {
        // SAFETY: every bit pattern is valid for both types, and a float's alignment is enough; so nothing is left over.
        unsafe { floats.align_to_mut::<Bf16>().1 }
    }

    /// The same, to read.
    pub fn in_floats(floats: &[f32]) -> &[Bf16] {
        // SAFETY: as above.
        unsafe { floats.align_to::<Bf16>().1 }
    }
}

impl F16 {
    /// Little-endian f16 numbers where they lie, if this machine has them like that.
    pub fn all(bytes: &[u8]) -> Option<&[F16]> {
        // SAFETY: every bit pattern is an `F16`; the prefix and suffix are checked to be empty.
        let (before, values, after) = unsafe { bytes.align_to::<F16>() };
        (cfg!(target_endian = "little") && before.is_empty() && after.is_empty()).then_some(values)
    }
}

macro_rules! weight {
    ($t:ty, |$v:ident| $value:expr, |$p:ident| $load16:expr, $load8:expr, $load4:expr) => {
        impl Weight for $t {
            #[inline(always)]
            fn value(self) -> f32 {
                let $v = self;
                $value
            }
            #[cfg(target_arch = "x86_64")]
            #[inline(always)]
            unsafe fn load16($p: *const Self) -> std::arch::x86_64::__m512 {
                use std::arch::x86_64::*;
                // SAFETY: the caller's.
                unsafe { $load16 }
            }
            #[cfg(target_arch = "x86_64")]
            #[inline(always)]
            unsafe fn load8($p: *const Self) -> std::arch::x86_64::__m256 {
                use std::arch::x86_64::*;
                // SAFETY: the caller's.
                unsafe { $load8 }
            }
            #[cfg(target_arch = "aarch64")]
            #[inline(always)]
            unsafe fn load4($p: *const Self) -> std::arch::aarch64::float32x4_t {
                use std::arch::aarch64::*;
                // SAFETY: the caller's; every aarch64 has NEON.
                unsafe { $load4 }
            }
        }
    };
}

weight!(f32, |v| v, |p| _mm512_loadu_ps(p), _mm256_loadu_ps(p), vld1q_f32(p));
weight!(
    Bf16,
    |v| f32::from_bits(u32::from(v.0) << 16),
    |p| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))),
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))),
    vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.cast())))
);
weight!(
    F16,
    |v| half::f16::from_bits(v.0).to_f32(),
    |p| _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())),
    _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
    super::neon::widen_f16(vld1_u16(p.cast()))
);

/// `out[i * out_stride + j] = x_i . w_j`.
pub(crate) fn dots<W: Weight>(
    isa: Isa,
    x: RowsView<'_>,
    w: RowsView<'_, W>,
    k: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    x.check(k);
    w.check(k);
    if x.count == 0 || w.count == 0 {
        return;
    }
    assert!(out.len() >= (x.count - 1) * out_stride + w.count, "output is too short");
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level was detected, and the rows and outputs lie inside their slices by the checks above.
        Level::Avx512 => unsafe { x86::avx512::dots(x, w, k, out, out_stride) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 | Level::AvxVnni => unsafe { x86::avx2::dots(x, w, k, out, out_stride) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Level::Neon | Level::NeonDot | Level::NeonI8mm => unsafe {
            super::neon::dots(x, w, k, out, out_stride)
        },
        _ => scalar(x, w, k, out, out_stride),
    }
}

fn scalar<W: Weight>(x: RowsView<'_>, w: RowsView<'_, W>, k: usize, out: &mut [f32], out_stride: usize) {
    for i in 0..x.count {
        let a = &x.values[i * x.stride..][..k];
        for j in 0..w.count {
            let b = &w.values[j * w.stride..][..k];
            let mut lanes = [0.0f32; LANES];
            let (a_parts, a_rest) = a.as_chunks::<LANES>();
            let (b_parts, b_rest) = b.as_chunks::<LANES>();
            for (a, b) in a_parts.iter().zip(b_parts) {
                for l in 0..LANES {
                    lanes[l] += a[l] * b[l].value();
                }
            }
            for (l, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
                lanes[l] += a * b.value();
            }
            let mut half = LANES / 2;
            while half > 0 {
                for l in 0..half {
                    lanes[l] += lanes[l + half];
                }
                half /= 2;
            }
            out[i * out_stride + j] = lanes[0];
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::avx512::put;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{RowsView, Weight};
    use crate::memory::{LINE, prefetch};

    /// The same blocking at both levels; `$m` rows of x by `$n` rows of w make the largest block. A row of x that is left waits
    /// for memory: it passes `$single` rows of w at a time, and the next ones are asked for in the order of memory, which the
    /// processor's own prefetch does not follow.
    macro_rules! level {
        ($name:ident, $features:literal, $m:literal, $n:literal, $single:literal) => {
            pub mod $name {
                use super::{LINE, RowsView, Weight, prefetch};
                use std::arch::x86_64::*;

                /// # Safety
                /// The level's features, and `super::super::dots`'s bounds.
                #[target_feature(enable = $features)]
                pub unsafe fn dots<W: Weight>(
                    x: RowsView<'_>,
                    w: RowsView<'_, W>,
                    k: usize,
                    out: &mut [f32],
                    out_stride: usize,
                ) {
                    let mut i = 0;
                    // SAFETY: every block below starts inside the rows that `dots` was checked for.
                    unsafe {
                        while i + $m <= x.count {
                            let mut j = 0;
                            while j + $n <= w.count {
                                block::<W, $m, $n, false>(x, i, w, j, k, out, out_stride);
                                j += $n;
                            }
                            while j < w.count {
                                block::<W, $m, 1, false>(x, i, w, j, k, out, out_stride);
                                j += 1;
                            }
                            i += $m;
                        }
                        while i < x.count {
                            let mut j = 0;
                            while j + $single <= w.count {
                                block::<W, 1, $single, true>(x, i, w, j, k, out, out_stride);
                                j += $single;
                            }
                            while j < w.count {
                                block::<W, 1, 1, true>(x, i, w, j, k, out, out_stride);
                                j += 1;
                            }
                            i += 1;
                        }
                    }
                }

                #[inline]
                #[target_feature(enable = $features)]
                unsafe fn block<W: Weight, const M: usize, const N: usize, const ASK: bool>(
                    x: RowsView<'_>,
                    i: usize,
                    w: RowsView<'_, W>,
                    j: usize,
                    k: usize,
                    out: &mut [f32],
                    out_stride: usize,
                ) {
                    // SAFETY: rows i .. i + M and j .. j + N lie inside the views, k values each, and the
                    // partial load of the tail touches only what is left of the row.
                    unsafe {
                        let a: [*const f32; M] =
                            std::array::from_fn(|r| x.values.as_ptr().add((i + r) * x.stride));
                        let b: [*const W; N] =
                            std::array::from_fn(|r| w.values.as_ptr().add((j + r) * w.stride));
                        let mut acc = [[zero(); N]; M];
                        let whole = k - k % LANES;
                        let mut e = 0;
                        while e < whole {
                            if ASK {
                                let next = b[0].wrapping_add(N * (w.stride + e)).cast::<u8>();
                                let bytes = N * LANES * size_of::<W>();
                                (0..bytes).step_by(LINE).for_each(|at| prefetch(next.wrapping_add(at)));
                            }
                            let mut bv = [zero(); N];
                            for c in 0..N {
                                bv[c] = weights(b[c].add(e));
                            }
                            for r in 0..M {
                                let av = load(a[r].add(e));
                                for c in 0..N {
                                    acc[r][c] = fma(av, bv[c], acc[r][c]);
                                }
                            }
                            e += LANES;
                        }
                        if e < k {
                            let mut bv = [zero(); N];
                            for c in 0..N {
                                let mut rest = [W::default(); LANES];
                                std::ptr::copy_nonoverlapping(b[c].add(e), rest.as_mut_ptr(), k - e);
                                bv[c] = weights(rest.as_ptr());
                            }
                            for r in 0..M {
                                let av = load_part(a[r].add(e), k - e);
                                for c in 0..N {
                                    acc[r][c] = fma(av, bv[c], acc[r][c]);
                                }
                            }
                        }
                        put(&acc, out.as_mut_ptr().add(i * out_stride + j), out_stride);
                    }
                }

                #[inline]
                #[target_feature(enable = $features)]
                fn sum8(v: __m256) -> f32 {
                    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
                    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
                    _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
                }

                vector_ops!($name, $features);
            }
        };
    }

    macro_rules! vector_ops {
        (avx512, $features:literal) => {
            /// Stores the sums of all lanes. Sixteen are folded together in a third of the operations that they
            /// take one by one, along the tree of [`sum`].
            #[inline]
            #[target_feature(enable = $features)]
            pub unsafe fn put<const M: usize, const N: usize>(
                acc: &[[__m512; N]; M],
                out: *mut f32,
                stride: usize,
            ) {
                if M != 4 || N != 4 {
                    for r in 0..M {
                        for c in 0..N {
                            // SAFETY: the caller has room for M rows of N outputs.
                            unsafe { *out.add(r * stride + c) = sum(acc[r][c]) }
                        }
                    }
                    return;
                }
                let mut quarters = [zero(); 4];
                for c in 0..4 {
                    let (a, b) = (halves(acc[0][c], acc[1][c]), halves(acc[2][c], acc[3][c]));
                    let even = _mm512_shuffle_f32x4::<0x88>(a, b);
                    quarters[c] = _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xDD>(a, b));
                }
                let (a, b) = (pairs(quarters[0], quarters[1]), pairs(quarters[2], quarters[3]));
                let even = _mm512_shuffle_ps::<0x88>(a, b);
                let all = _mm512_add_ps(even, _mm512_shuffle_ps::<0xDD>(a, b));
                // SAFETY: as above.
                unsafe {
                    _mm_storeu_ps(out, _mm512_castps512_ps128(all));
                    _mm_storeu_ps(out.add(stride), _mm512_extractf32x4_ps::<1>(all));
                    _mm_storeu_ps(out.add(2 * stride), _mm512_extractf32x4_ps::<2>(all));
                    _mm_storeu_ps(out.add(3 * stride), _mm512_extractf32x4_ps::<3>(all));
                }
            }
            /// Lanes l and l + 8 of a, then of b.
            #[inline]
            #[target_feature(enable = $features)]
            fn halves(a: __m512, b: __m512) -> __m512 {
                _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b))
            }
            /// In each quarter lanes l and l + 2 of a, then of b.
            #[inline]
            #[target_feature(enable = $features)]
            fn pairs(a: __m512, b: __m512) -> __m512 {
                _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xEE>(a, b))
            }
            const LANES: usize = 16;
            #[inline]
            #[target_feature(enable = $features)]
            fn zero() -> __m512 {
                _mm512_setzero_ps()
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load(p: *const f32) -> __m512 {
                // SAFETY: the caller has 16 values there.
                unsafe { _mm512_loadu_ps(p) }
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn weights<W: Weight>(p: *const W) -> __m512 {
                // SAFETY: the caller has 16 weights there.
                unsafe { W::load16(p) }
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load_part(p: *const f32, n: usize) -> __m512 {
                // SAFETY: lanes beyond the caller's n values are not touched.
                unsafe { _mm512_maskz_loadu_ps((1u16 << n) - 1, p) }
            }
            #[inline]
            #[target_feature(enable = $features)]
            fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
                _mm512_fmadd_ps(a, b, c)
            }
            // Not the compiler's own reduction: that one may choose another order from place to place.
            #[inline]
            #[target_feature(enable = $features)]
            fn sum(v: __m512) -> f32 {
                sum8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)))
            }
        };
        (avx2, $features:literal) => {
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn put<const M: usize, const N: usize>(
                acc: &[[__m256; N]; M],
                out: *mut f32,
                stride: usize,
            ) {
                for r in 0..M {
                    for c in 0..N {
                        // SAFETY: the caller has room for M rows of N outputs.
                        unsafe { *out.add(r * stride + c) = sum(acc[r][c]) }
                    }
                }
            }
            const LANES: usize = 8;
            #[inline]
            #[target_feature(enable = $features)]
            fn zero() -> __m256 {
                _mm256_setzero_ps()
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load(p: *const f32) -> __m256 {
                // SAFETY: the caller has 8 values there.
                unsafe { _mm256_loadu_ps(p) }
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn weights<W: Weight>(p: *const W) -> __m256 {
                // SAFETY: the caller has 8 weights there.
                unsafe { W::load8(p) }
            }
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn load_part(p: *const f32, n: usize) -> __m256 {
                let mut lanes = [0.0f32; 8];
                // SAFETY: the caller has n < 8 values there.
                unsafe {
                    std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
                    _mm256_loadu_ps(lanes.as_ptr())
                }
            }
            #[inline]
            #[target_feature(enable = $features)]
            fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
                _mm256_fmadd_ps(a, b, c)
            }
            #[inline]
            #[target_feature(enable = $features)]
            fn sum(v: __m256) -> f32 {
                sum8(v)
            }
        };
    }

    level!(avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq", 4, 4, 4);
    level!(avx2, "avx2,fma,f16c", 2, 4, 4);
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

    #[test]
    fn dots_match_f64_at_every_level_and_blocking() {
        for isa in Isa::here() {
            let level = isa.level();
            for k in [1, 7, 8, 15, 16, 96, 160, 333, 640, 2112] {
                let (m, n, stride) = (7, 11, k + 3);
                let x = values(m * stride, 1);
                let w = values(n * stride, 2);
                let rows = |v, count| RowsView { values: v, stride, count };
                let mut out = vec![f32::NAN; m * n];
                dots(isa, rows(&x, m), rows(&w, n), k, &mut out, n);
                for i in 0..m {
                    for j in 0..n {
                        let terms =
                            (0..k).map(|e| f64::from(x[i * stride + e]) * f64::from(w[j * stride + e]));
                        let (exact, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                        // k / 8 + 3 roundings of partial sums that never exceed the sum of magnitudes.
                        let bound = size * (k as f64 / 8.0 + 4.0) * f64::from(f32::EPSILON) / 2.0;
                        let found = f64::from(out[i * n + j]);
                        assert!((found - exact).abs() <= bound, "{level} k {k} [{i}, {j}] {found} {exact}");
                        // The same output alone.
                        let mut one = [f32::NAN];
                        let (a, b) = (&x[i * stride..], &w[j * stride..]);
                        dots(isa, rows(a, 1), rows(b, 1), k, &mut one, 1);
                        assert_eq!(one[0].to_bits(), out[i * n + j].to_bits(), "{level} k {k} [{i}, {j}]");
                    }
                }
            }
        }
    }
}
