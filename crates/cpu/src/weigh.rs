//! The second product of attention: `acc = acc + sum_j p_j v_j`.
//!
//! Query heads that share keys and values are taken four at a time, so that a value is loaded once for them.
//! Every element of every head has one chain of fused (at the scalar level, separate) multiplications and
//! additions, ascending in j; how many are taken at once changes speed only.
//!
//! ```text
//! acc [heads, d]    p [heads, PAGE_TOKENS]    v [PAGE_TOKENS, d]
//! ```

use std::ops::Range;

use lapidary_ops::PAGE_TOKENS;

use crate::level::Isa;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::level::Level;
use crate::linear::f32::Weight;

/// Adds the values of keys `keys` of a page, weighted, for all heads.
pub(crate) fn weigh<W: Weight>(isa: Isa, acc: &mut [f32], d: usize, p: &[f32], v: &[W], keys: Range<usize>) {
    let heads = acc.len() / d;
    assert!(acc.len() == heads * d && p.len() >= heads * PAGE_TOKENS && v.len() >= PAGE_TOKENS * d);
    assert!(keys.end <= PAGE_TOKENS);
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level was detected, and lengths are asserted.
        Level::Avx512 => unsafe { avx512::heads(acc, d, p, v, keys) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 | Level::AvxVnni => unsafe { avx2::heads(acc, d, p, v, keys) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Level::Neon | Level::NeonDot | Level::NeonI8mm => unsafe { neon::heads(acc, d, p, v, keys) },
        _ => plain(acc, d, p, v, keys),
    }
}

fn plain<W: Weight>(acc: &mut [f32], d: usize, p: &[f32], v: &[W], keys: Range<usize>) {
    for (acc, p) in acc.chunks_exact_mut(d).zip(p.chunks_exact(PAGE_TOKENS)) {
        for j in keys.clone() {
            for (a, v) in acc.iter_mut().zip(&v[j * d..]) {
                *a += p[j] * v.value();
            }
        }
    }
}

/// The same blocking at every level: four heads by `$vectors` vectors of `$lanes`, then smaller ones.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! level {
    ($arch:ident, $name:ident, $features:literal, $v:ty, $lanes:literal, $vectors:literal,
     $load:ident, $weights:ident, $store:ident, $set:ident, $fma:ident) => {
        mod $name {
            use super::*;
            use std::arch::$arch::*;

            /// # Safety
            /// The level's features, and the lengths that `weigh` asserts.
            #[target_feature(enable = $features)]
            pub unsafe fn heads<W: Weight>(
                acc: &mut [f32],
                d: usize,
                p: &[f32],
                v: &[W],
                keys: Range<usize>,
            ) {
                let heads = acc.len() / d;
                let mut h = 0;
                // SAFETY: the groups cover each head once.
                unsafe {
                    while heads - h >= 4 {
                        columns::<W, 4>(
                            acc.as_mut_ptr().add(h * d),
                            d,
                            p.as_ptr().add(h * PAGE_TOKENS),
                            v,
                            &keys,
                        );
                        h += 4;
                    }
                    while heads - h >= 2 {
                        columns::<W, 2>(
                            acc.as_mut_ptr().add(h * d),
                            d,
                            p.as_ptr().add(h * PAGE_TOKENS),
                            v,
                            &keys,
                        );
                        h += 2;
                    }
                    if heads > h {
                        columns::<W, 1>(
                            acc.as_mut_ptr().add(h * d),
                            d,
                            p.as_ptr().add(h * PAGE_TOKENS),
                            v,
                            &keys,
                        );
                    }
                }
            }

            /// # Safety
            /// As for `heads`; `M` heads at `acc` and `p`.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn columns<W: Weight, const M: usize>(
                acc: *mut f32,
                d: usize,
                p: *const f32,
                v: &[W],
                keys: &Range<usize>,
            ) {
                const WIDE: usize = $lanes * $vectors;
                let mut e = 0;
                // SAFETY: columns e and on are inside rows of d.
                unsafe {
                    while d - e >= WIDE {
                        block::<W, M, $vectors>(acc.add(e), d, p, v.as_ptr().add(e), keys);
                        e += WIDE;
                    }
                    while d - e >= $lanes {
                        block::<W, M, 1>(acc.add(e), d, p, v.as_ptr().add(e), keys);
                        e += $lanes;
                    }
                    for m in 0..M {
                        for e in e..d {
                            let a = acc.add(m * d + e);
                            for j in keys.clone() {
                                *a = (*p.add(m * PAGE_TOKENS + j)).mul_add(v[j * d + e].value(), *a);
                            }
                        }
                    }
                }
            }

            /// # Safety
            /// As for `columns`; `V` vectors of columns at `acc` and `v`.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn block<W: Weight, const M: usize, const V: usize>(
                acc: *mut f32,
                d: usize,
                p: *const f32,
                v: *const W,
                keys: &Range<usize>,
            ) {
                // SAFETY: the caller's.
                unsafe {
                    let mut sums = [[$set(0.0); V]; M];
                    for m in 0..M {
                        for c in 0..V {
                            sums[m][c] = $load(acc.add(m * d + c * $lanes));
                        }
                    }
                    for j in keys.clone() {
                        let mut row = [$set(0.0); V];
                        for c in 0..V {
                            row[c] = W::$weights(v.add(j * d + c * $lanes));
                        }
                        for m in 0..M {
                            let weight: $v = $set(*p.add(m * PAGE_TOKENS + j));
                            for c in 0..V {
                                sums[m][c] = $fma(weight, row[c], sums[m][c]);
                            }
                        }
                    }
                    for m in 0..M {
                        for c in 0..V {
                            $store(acc.add(m * d + c * $lanes), sums[m][c]);
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
level!(
    x86_64,
    avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq",
    __m512,
    16,
    4,
    _mm512_loadu_ps,
    load16,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps
);
#[cfg(target_arch = "x86_64")]
level!(
    x86_64,
    avx2,
    "avx2,fma,f16c",
    __m256,
    8,
    2,
    _mm256_loadu_ps,
    load8,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps
);

/// `a * b + c`.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn fused(
    a: std::arch::aarch64::float32x4_t,
    b: std::arch::aarch64::float32x4_t,
    c: std::arch::aarch64::float32x4_t,
) -> std::arch::aarch64::float32x4_t {
    // SAFETY: every aarch64 has NEON.
    unsafe { std::arch::aarch64::vfmaq_f32(c, a, b) }
}
#[cfg(target_arch = "aarch64")]
level!(aarch64, neon, "neon", float32x4_t, 4, 4, vld1q_f32, load4, vst1q_f32, vdupq_n_f32, fused);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_weighted_as_they_would_be_alone_at_every_level() {
        let value = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 504.0 - 1.0;
        for isa in Isa::here() {
            let level = isa.level();
            for (heads, d) in [(1, 37), (2, 96), (3, 64), (7, 85), (8, 256)] {
                let p: Vec<f32> = (0..heads * PAGE_TOKENS).map(value).collect();
                let v: Vec<f32> = (0..PAGE_TOKENS * d).map(|i| value(i + 5)).collect();
                let start: Vec<f32> = (0..heads * d).map(|i| value(i + 11)).collect();
                let mut acc = start.clone();
                let keys = 3..29;
                weigh(isa, &mut acc, d, &p, &v, keys.clone());
                for h in 0..heads {
                    let mut alone = start[h * d..(h + 1) * d].to_vec();
                    weigh(isa, &mut alone, d, &p[h * PAGE_TOKENS..], &v, keys.clone());
                    for e in 0..d {
                        let terms =
                            keys.clone().map(|j| f64::from(p[h * PAGE_TOKENS + j]) * f64::from(v[j * d + e]));
                        let first = f64::from(start[h * d + e]);
                        let (sum, size) = terms.fold((first, first.abs()), |(s, a), t| (s + t, a + t.abs()));
                        // 26 terms, two roundings each.
                        let bound = 52.0 * size * f64::from(f32::EPSILON) / 2.0;
                        assert!(
                            (f64::from(acc[h * d + e]) - sum).abs() <= bound,
                            "{level} {heads} {d} {h} {e}"
                        );
                        assert_eq!(
                            acc[h * d + e].to_bits(),
                            alone[e].to_bits(),
                            "{level} {heads} {d} {h} {e}"
                        );
                    }
                }
            }
        }
    }
}
