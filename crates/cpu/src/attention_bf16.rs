//! Attention over one page of bf16 keys and values, on processors that multiply bf16.
//!
//! Queries and the weights of values are rounded to bf16, products are exact, sums are float32:
//!
//! ```text
//! s_j = scale * sum_e bf16(q_e) k_je        p_j = bf16(e^(s_j - max))        acc_e += sum_j p_j v_je       sum += p_j
//! ```
//!
//! The sum of the weights is that of the rounded ones, so what comes out is an exact mean of values under weights that
//! are each off by 2^-8 at most. A score is off by `2^-8 * scale * sum_e |q_e k_je|` at most. Values of two keys, an
//! even position and the next, are multiplied by one instruction, so an element's chain ascends by such pairs; a
//! pair's key that the row does not see counts as zero and is not read, as the page may hold anything there.
//!
//! Keys and values come from memory that nothing has touched since the last token, and in the order in which they are
//! multiplied the processor's own prefetch does not follow. So they are read from end to end first, a page's keys and then
//! its values, which a core's nearest cache holds.

#![allow(
    clippy::needless_range_loop,
    reason = "one index runs over several arrays whose lengths are constants"
)]

use std::ops::Range;

use lapidary_ops::{AttnSpec, PAGE_TOKENS};

use crate::attention::Sums;
use crate::level::Isa;
use crate::linear::bf16::{Ahead, dots};
use crate::linear::f32::{Bf16, RowsView};
use crate::memory::LINE;

/// One head's keys and values at the positions of a page, `[PAGE_TOKENS, d]` each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page<'a> {
    pub keys: &'a [Bf16],
    pub values: &'a [Bf16],
}

/// Whether heads of `d` values can be attended to like this.
pub(crate) fn fits(isa: Isa, d: usize) -> bool {
    isa.bf16() && d.is_multiple_of(32)
}

/// Adds the keys `cols` of a page to the sums of a row's query heads, which share them.
///
/// `is_near` says that the page is in a near cache. `q` has the heads in bf16, `acc` `[heads, d]`; `scores` has room for `[heads, PAGE_TOKENS]` values and `weights` for as
/// many halves.
#[allow(clippy::too_many_arguments, reason = "a page, a row's state and room to work in")]
pub(crate) fn add_page(
    isa: Isa,
    q: RowsView<'_, Bf16>,
    page: Page<'_>,
    is_near: bool,
    cols: Range<usize>,
    spec: &AttnSpec,
    sums: &mut [Sums],
    acc: &mut [f32],
    scores: &mut [f32],
    weights: &mut [Bf16],
) {
    let (heads, d) = (q.count, spec.head_dim);
    assert!(fits(isa, d) && cols.start < cols.end && cols.end <= PAGE_TOKENS);
    assert!(page.keys.len() == PAGE_TOKENS * d && page.values.len() == PAGE_TOKENS * d);
    assert!(sums.len() == heads && acc.len() == heads * d);
    assert!(scores.len() == heads * PAGE_TOKENS && weights.len() == heads * PAGE_TOKENS);
    let keys = RowsView { values: &page.keys[cols.start * d..cols.end * d], stride: d, count: cols.len() };
    if !is_near {
        read(keys.values);
    }
    dots(isa, q, keys, None, d, &mut scores[cols.start..], PAGE_TOKENS, Ahead::Nothing);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the features were detected, and all lengths are asserted above.
    unsafe {
        x86::soften(scores, weights, sums, acc, d, &cols, spec.scale, spec.softcap);
        if !is_near {
            read(&page.values[cols.start * d..cols.end * d]);
        }
        x86::weigh(acc, d, weights, page.values, &cols);
    }
}

/// Reads a value of every line, in order: a prefetch instruction for each would not do, as the processor's own prefetch
/// learns from reads only.
fn read(values: &[Bf16]) {
    for line in values.chunks(LINE / size_of::<Bf16>()) {
        // SAFETY: a reference is good for reading.
        unsafe { std::ptr::read_volatile(&line[0]) };
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::ops::Range;

    use lapidary_ops::PAGE_TOKENS;

    use crate::attention::Sums;
    use crate::linear::f32::Bf16;
    use crate::math;

    /// From scores to weights; brings `sums` up to date and `acc` to the new maximum.
    ///
    /// All heads take each of the two steps before the next one: each alone would wait for its own chain of operations.
    ///
    /// # Safety
    /// The features; `scores` and `weights` are `[heads, PAGE_TOKENS]`, `sums` `[heads]`.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    #[allow(clippy::too_many_arguments, reason = "a row's state and how scores are made")]
    pub unsafe fn soften(
        scores: &mut [f32],
        weights: &mut [Bf16],
        sums: &mut [Sums],
        acc: &mut [f32],
        d: usize,
        cols: &Range<usize>,
        scale: f32,
        softcap: Option<f32>,
    ) {
        let scores = scores.as_chunks_mut::<PAGE_TOKENS>().0;
        let weights = weights.as_chunks_mut::<PAGE_TOKENS>().0;
        for ((s, sums), acc) in scores.iter_mut().zip(sums.iter_mut()).zip(acc.chunks_exact_mut(d)) {
            for v in s.iter_mut() {
                *v *= scale;
            }
            if let Some(cap) = softcap {
                for v in s.iter_mut() {
                    *v = cap * math::tanh(*v / cap);
                }
            }
            // What the row does not see was never written.
            s[..cols.start].fill(f32::NEG_INFINITY);
            s[cols.end..].fill(f32::NEG_INFINITY);
            let max = largest(s, sums.max);
            let factor = match sums {
                Sums { sum: 0.0, .. } => 0.0,
                Sums { max: before, .. } if *before == max => 1.0,
                Sums { max: before, .. } => math::exp(*before - max),
            };
            *sums = Sums { max, sum: sums.sum * factor };
            if factor != 1.0 {
                for a in acc {
                    *a *= factor;
                }
            }
        }
        for ((s, p), sums) in scores.iter().zip(weights).zip(sums) {
            let mut added = [0.0f32; 16];
            for (s, p) in s.as_chunks::<16>().0.iter().zip(p.as_chunks_mut::<16>().0) {
                for l in 0..16 {
                    // To the nearest, halves to even; a NaN stays one.
                    let bits = math::exp(s[l] - sums.max).to_bits();
                    let bits = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000;
                    added[l] += f32::from_bits(bits);
                    p[l] = Bf16::from_high_bits(bits);
                }
            }
            sums.sum += total(&added);
        }
    }

    /// The largest of a page's scores and `before`; a score that is no number is passed over.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    fn largest(s: &[f32; PAGE_TOKENS], before: f32) -> f32 {
        // SAFETY: 32 values are two vectors.
        let (a, b) = unsafe { (_mm512_loadu_ps(s.as_ptr()), _mm512_loadu_ps(s.as_ptr().add(16))) };
        // Where one operand is no number the instruction gives the second.
        let lanes = _mm512_max_ps(b, _mm512_max_ps(a, _mm512_set1_ps(before)));
        let half = _mm256_max_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
        let half = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
        let half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)))
    }

    /// The sum of 16 lanes: those eight apart first, then four, two and one.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    fn total(lanes: &[f32; 16]) -> f32 {
        // SAFETY: 16 values are a vector.
        let lanes = unsafe { _mm512_loadu_ps(lanes.as_ptr()) };
        let half = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
        let half = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
        let half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)))
    }

    /// `acc += p v` for all heads.
    ///
    /// # Safety
    /// The features; `acc` is `[heads, d]`, `p` `[heads, PAGE_TOKENS]`, `v` `[PAGE_TOKENS, d]`, `d` a multiple of 32.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub unsafe fn weigh(acc: &mut [f32], d: usize, p: &[Bf16], v: &[Bf16], keys: &Range<usize>) {
        let heads = acc.len() / d;
        let (acc, p, v) = (acc.as_mut_ptr(), p.as_ptr(), v.as_ptr());
        let mut h = 0;
        // SAFETY: the groups cover each head once.
        unsafe {
            while h < heads {
                let (acc, p) = (acc.add(h * d), p.add(h * PAGE_TOKENS));
                match heads - h {
                    8.. => columns::<8, 1>(acc, d, p, v, keys),
                    4.. => columns::<4, 2>(acc, d, p, v, keys),
                    2.. => columns::<2, 4>(acc, d, p, v, keys),
                    _ => columns::<1, 4>(acc, d, p, v, keys),
                }
                h += match heads - h {
                    8.. => 8,
                    4.. => 4,
                    2.. => 2,
                    _ => 1,
                };
            }
        }
    }

    /// # Safety
    /// As for `weigh`; H heads at `acc` and `p`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    unsafe fn columns<const H: usize, const G: usize>(
        acc: *mut f32,
        d: usize,
        p: *const Bf16,
        v: *const Bf16,
        keys: &Range<usize>,
    ) {
        let mut e = 0;
        // SAFETY: columns e and on are inside rows of d, a multiple of 32.
        unsafe {
            while d - e >= 32 * G {
                group::<H, G>(acc.add(e), d, p, v, e, keys);
                e += 32 * G;
            }
            while e < d {
                group::<H, 1>(acc.add(e), d, p, v, e, keys);
                e += 32;
            }
        }
    }

    /// # Safety
    /// As for `columns`; `32 * G` columns at `acc`, and from `e` on in rows of `v`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    unsafe fn group<const H: usize, const G: usize>(
        acc: *mut f32,
        d: usize,
        p: *const Bf16,
        v: *const Bf16,
        e: usize,
        keys: &Range<usize>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let halves = |v: __m512i| std::mem::transmute::<__m512i, __m512bh>(v);
            // Words of two rows in turn, the first and the second 16 columns.
            let first = _mm512_add_epi16(
                _mm512_set1_epi32(0x20_0000),
                _mm512_cvtepu16_epi32(_mm256_setr_epi16(
                    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                )),
            );
            let first = _mm512_or_si512(first, _mm512_slli_epi32::<16>(first));
            let second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
            let mut sums = [[[_mm512_setzero_ps(); 2]; G]; H];
            for h in 0..H {
                for g in 0..G {
                    for i in 0..2 {
                        sums[h][g][i] = _mm512_loadu_ps(acc.add(h * d + 32 * g + 16 * i));
                    }
                }
            }
            let pairs = keys.start / 2..keys.end.div_ceil(2);
            for pair in pairs {
                let mut w = [[_mm512_setzero_si512(); 2]; G];
                for g in 0..G {
                    let row = |j: usize| {
                        let at = v.add(j * d + e + 32 * g);
                        if keys.contains(&j) { _mm512_loadu_si512(at.cast()) } else { _mm512_setzero_si512() }
                    };
                    let (a, b) = (row(2 * pair), row(2 * pair + 1));
                    w[g][0] = _mm512_permutex2var_epi16(a, first, b);
                    w[g][1] = _mm512_permutex2var_epi16(a, second, b);
                }
                for h in 0..H {
                    let weights = p.add(h * PAGE_TOKENS + 2 * pair).cast::<i32>().read_unaligned();
                    let weights = halves(_mm512_set1_epi32(weights));
                    for g in 0..G {
                        for i in 0..2 {
                            sums[h][g][i] = _mm512_dpbf16_ps(sums[h][g][i], weights, halves(w[g][i]));
                        }
                    }
                }
            }
            for h in 0..H {
                for g in 0..G {
                    for i in 0..2 {
                        _mm512_storeu_ps(acc.add(h * d + 32 * g + 16 * i), sums[h][g][i]);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::NONE;
    use crate::linear::bf16::{STEP, round_rows};
    use crate::linear::f32::Weight;

    #[test]
    fn heads_are_attended_to_as_they_would_be_alone_and_unseen_cells_are_not_read() {
        let isa = Isa::new(None).expect("the best level is there");
        if !isa.bf16() {
            eprintln!("this processor has no bf16 products");
            return;
        }
        let value = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 504.0 - 1.0;
        for (heads, d, cols) in [
            (1, 32, 0..32),
            (2, 96, 3..29),
            (3, 64, 5..6),
            (7, 160, 4..31),
            (8, 256, 0..17),
            (15, 512, 31..32),
        ] {
            let cache = lapidary_ops::KvRef { group: lapidary_ops::Group::Full, index: 0, writes: false };
            let spec =
                AttnSpec { heads, kv_heads: 1, head_dim: d, scale: 0.17, softcap: None, window: None, cache };
            let halves =
                |n: usize, from: usize| -> Vec<Bf16> { (0..n).map(|i| Bf16::of(value(i + from))).collect() };
            let (mut keys, mut values) = (halves(PAGE_TOKENS * d, 3), halves(PAGE_TOKENS * d, 5));
            for j in (0..PAGE_TOKENS).filter(|j| !cols.contains(j)) {
                keys[j * d..(j + 1) * d].fill(Bf16::of(f32::NAN));
                values[j * d..(j + 1) * d].fill(Bf16::of(f32::NAN));
            }
            let stride = d.next_multiple_of(STEP);
            let floats: Vec<f32> = (0..heads * d).map(|i| value(i + 7)).collect();
            let mut q = vec![Bf16::default(); heads * stride];
            round_rows(isa, RowsView { values: &floats, stride: d, count: heads }, d, &mut q);
            let run = |first: usize, count: usize| {
                let q = RowsView { values: &q[first * stride..], stride, count };
                let (mut sums, mut acc) = (vec![NONE; count], vec![0.0; count * d]);
                let (mut scores, mut weights) =
                    (vec![f32::NAN; count * PAGE_TOKENS], vec![Bf16::default(); count * PAGE_TOKENS]);
                let page = Page { keys: &keys, values: &values };
                for is_near in [false, true] {
                    add_page(
                        isa,
                        q,
                        page,
                        is_near,
                        cols.clone(),
                        &spec,
                        &mut sums,
                        &mut acc,
                        &mut scores,
                        &mut weights,
                    );
                }
                (sums, acc)
            };
            let (sums, acc) = run(0, heads);
            for h in 0..heads {
                let (alone, alone_acc) = run(h, 1);
                assert_eq!(alone[0].sum.to_bits(), sums[h].sum.to_bits());
                let own = &acc[h * d..(h + 1) * d];
                assert!(
                    own.iter().zip(&alone_acc).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{heads} {d} {h}"
                );
                let number = |v: Bf16| f64::from(v.value());
                let scores: Vec<f64> = cols
                    .clone()
                    .map(|j| {
                        (0..d).map(|e| number(q[h * stride + e]) * number(keys[j * d + e])).sum::<f64>()
                            * 0.17
                    })
                    .collect();
                let max = scores.iter().fold(f64::MIN, |m, &s| m.max(s));
                let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                for e in 0..d {
                    let terms = cols.clone().zip(&scores);
                    let exact: f64 =
                        terms.map(|(j, s)| (s - max).exp() / total * number(values[j * d + e])).sum();
                    let found = f64::from(own[e] / sums[h].sum);
                    // Weights are off by 2^-9 above and below at most half as often as not: 2^-8 of each, in a mean of
                    // values below 1; float32 roundings of scores below 40 are far smaller.
                    assert!((found - exact).abs() <= 1.02 / 256.0, "{heads} {d} {h} {e}: {found} {exact}");
                }
            }
        }
    }
}
