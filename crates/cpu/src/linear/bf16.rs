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
    /// Rows of x that pass a weight together at most: 4 where loading one is cheap, more where it is decoded.
    #[cfg(target_arch = "x86_64")]
    const ROWS: usize;
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

/// What is asked for while weights are multiplied.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ahead {
    /// The rows that come next.
    Rows,
    /// Nothing: they are near.
    Nothing,
}

/// `out[i * out_stride + j] = x_i . w_j` for rows of x as [`round_rows`] leaves them.
#[allow(clippy::too_many_arguments, reason = "two views, their scales and where results go")]
pub(crate) fn dots<W: Half>(
    isa: Isa,
    x: RowsView<'_, Bf16>,
    w: RowsView<'_, W>,
    scales: Option<BlockScales<'_>>,
    k: usize,
    out: &mut [f32],
    out_stride: usize,
    ahead: Ahead,
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
mod x86;

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
            let (m, n, padded) = (9, 11, usize::next_multiple_of(k, STEP));
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
            for m in 1..=m {
                check(isa, m, &xs, &ws, k, None, |w| f64::from(widened(w)));
                check(isa, m, &xs, &codes, k, None, fp8);
                check(isa, m, &xs, &codes, k, Some(scales), fp8);
            }
            let mut decoded = vec![Bf16::default(); codes.len()];
            decode_fp8(isa, &codes, &mut decoded);
            assert!(codes.iter().zip(&decoded).all(|(&c, &v)| fp8(c) == f64::from(widened(v))));
        }
    }

    fn check<W: Half>(
        isa: Isa,
        m: usize,
        x: &[Bf16],
        w: &[W],
        k: usize,
        scales: Option<BlockScales<'_>>,
        value: impl Fn(W) -> f64,
    ) {
        let (n, padded, stride) = (11, k.next_multiple_of(STEP), k + 3);
        let ahead = if k.is_multiple_of(2) { Ahead::Rows } else { Ahead::Nothing };
        let mut out = vec![f32::NAN; m * n];
        let (xs, ws) =
            (RowsView { values: x, stride: padded, count: m }, RowsView { values: w, stride, count: n });
        dots(isa, xs, ws, scales, k, &mut out, n, ahead);
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
            dots(isa, a, b, alone, k, &mut one, 1, Ahead::Nothing);
            assert_eq!(one[0].to_bits(), out[i * n + j].to_bits(), "k {k} [{i}, {j}]");
        }
    }
}
