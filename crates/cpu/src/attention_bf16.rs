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
//! Keys and values come from memory that nothing has touched since the last token, and rows of a page are too short
//! for the processor to guess what comes next: what the following page has is asked for meanwhile.

#![allow(
    clippy::needless_range_loop,
    reason = "one index runs over several arrays whose lengths are constants"
)]

use std::ops::Range;

use lapidary_ops::{AttnSpec, PAGE_TOKENS};

use crate::attention::Sums;
use crate::level::Isa;
use crate::linear::bf16::{self, dots};
use crate::linear::f32::{Bf16, RowsView};

/// One head's keys and values at the positions of a page, `[PAGE_TOKENS, d]` each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page<'a> {
    pub keys: &'a [Bf16],
    pub values: &'a [Bf16],
}

impl Page<'_> {
    /// Bytes from this page's keys to those of another, and the same for values; 0 for none.
    pub fn ahead(&self, next: Option<Page<'_>>) -> Ahead {
        let bytes = |a: &[Bf16], b: &[Bf16]| b.as_ptr().addr().wrapping_sub(a.as_ptr().addr()) as isize;
        next.map_or(Ahead::default(), |n| Ahead {
            keys: bytes(self.keys, n.keys),
            values: bytes(self.values, n.values),
        })
    }
}

/// How far behind what is read lies what is read next, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ahead {
    keys: isize,
    values: isize,
}

/// Whether heads of `d` values can be attended to like this.
pub(crate) fn fits(isa: Isa, d: usize) -> bool {
    isa.bf16() && d.is_multiple_of(32)
}

/// Adds the keys `cols` of a page to the sums of a row's query heads, which share them.
///
/// `q` has the heads in bf16, `acc` `[heads, d]`; `scores` has room for `[heads, PAGE_TOKENS]` values and `weights` for as
/// many halves.
#[allow(clippy::too_many_arguments, reason = "a page, a row's state and room to work in")]
pub(crate) fn add_page(
    isa: Isa,
    q: RowsView<'_, Bf16>,
    page: Page<'_>,
    ahead: Ahead,
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
    let keys = RowsView { values: &page.keys[cols.start * d..], stride: d, count: cols.len() };
    dots(isa, q, keys, None, d, &mut scores[cols.start..], PAGE_TOKENS, bf16::Ahead::Bytes(ahead.keys));
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the features were detected, and all lengths are asserted above.
    unsafe {
        x86::soften(scores, weights, sums, acc, d, &cols, spec.scale, spec.softcap);
        x86::weigh(acc, d, weights, page.values, &cols, ahead.values);
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
    /// # Safety
    /// The features.
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
        let scores = scores.as_chunks_mut::<PAGE_TOKENS>().0.iter_mut();
        let weights = weights.as_chunks_mut::<PAGE_TOKENS>().0.iter_mut();
        for (((s, p), sums), acc) in scores.zip(weights).zip(sums).zip(acc.chunks_exact_mut(d)) {
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
            let mut lanes = [sums.max; 16];
            for part in s.as_chunks::<16>().0 {
                for l in 0..16 {
                    lanes[l] = if part[l] > lanes[l] { part[l] } else { lanes[l] };
                }
            }
            let max = largest(&lanes);
            let factor = if sums.sum == 0.0 { 0.0 } else { math::exp(sums.max - max) };
            let mut added = [0.0f32; 16];
            for (s, p) in s.as_chunks_mut::<16>().0.iter_mut().zip(p.as_chunks_mut::<16>().0) {
                for l in 0..16 {
                    // To the nearest, halves to even; a NaN stays one.
                    let bits = math::exp(s[l] - max).to_bits();
                    let bits = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000;
                    added[l] += f32::from_bits(bits);
                    p[l] = Bf16::from_high_bits(bits);
                }
            }
            let mut half = 8;
            while half > 0 {
                for l in 0..half {
                    added[l] += added[l + half];
                }
                half /= 2;
            }
            *sums = Sums { max, sum: sums.sum * factor + added[0] };
            if factor != 1.0 {
                for a in acc {
                    *a *= factor;
                }
            }
        }
    }

    #[inline(always)]
    fn largest(lanes: &[f32; 16]) -> f32 {
        let mut most = *lanes;
        let mut half = 8;
        while half > 0 {
            for l in 0..half {
                most[l] = if most[l + half] > most[l] { most[l + half] } else { most[l] };
            }
            half /= 2;
        }
        most[0]
    }

    /// `acc += p v` for all heads.
    ///
    /// # Safety
    /// The features; `acc` is `[heads, d]`, `p` `[heads, PAGE_TOKENS]`, `v` `[PAGE_TOKENS, d]`, `d` a multiple of 32.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub unsafe fn weigh(
        acc: &mut [f32],
        d: usize,
        p: &[Bf16],
        v: &[Bf16],
        keys: &Range<usize>,
        ahead: isize,
    ) {
        let heads = acc.len() / d;
        let (acc, p, v) = (acc.as_mut_ptr(), p.as_ptr(), v.as_ptr());
        let mut h = 0;
        // SAFETY: the groups cover each head once.
        unsafe {
            while h < heads {
                // Only the first heads wait for values.
                let ahead = if h == 0 { ahead } else { 0 };
                let (acc, p) = (acc.add(h * d), p.add(h * PAGE_TOKENS));
                match heads - h {
                    8.. => columns::<8, 1>(acc, d, p, v, keys, ahead),
                    4.. => columns::<4, 2>(acc, d, p, v, keys, ahead),
                    2.. => columns::<2, 4>(acc, d, p, v, keys, ahead),
                    _ => columns::<1, 4>(acc, d, p, v, keys, ahead),
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
        ahead: isize,
    ) {
        let mut e = 0;
        // SAFETY: columns e and on are inside rows of d, a multiple of 32.
        unsafe {
            while d - e >= 32 * G {
                group::<H, G>(acc.add(e), d, p, v, e, keys, ahead);
                e += 32 * G;
            }
            while e < d {
                group::<H, 1>(acc.add(e), d, p, v, e, keys, ahead);
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
        ahead: isize,
    ) {
        // SAFETY: the caller's; a prefetch may name any address.
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
            // What is asked for, in the order in which it lies in memory, since the processor's own prefetch follows that:
            // in all a line of the next page for each that is read here.
            let mut next =
                v.cast::<i8>().wrapping_offset(ahead).wrapping_add(64 * (e / 32 * 2 * pairs.len()));
            for pair in pairs {
                if ahead != 0 {
                    for line in 0..2 * G {
                        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(64 * line));
                    }
                    next = next.wrapping_add(64 * 2 * G);
                }
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
                let ahead = page.ahead(Some(page));
                for _ in 0..2 {
                    add_page(
                        isa,
                        q,
                        page,
                        ahead,
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
