//! [`dots`](super::f32::dots) on aarch64: two registers of partial sums for each output, rows in blocks of 2 x 4.

use std::arch::aarch64::*;
use std::arch::asm;

use super::f32::{RowsView, Weight};

/// Partial sums of one output.
const LANES: usize = 8;

/// Four f16 numbers as float32.
#[inline(always)]
pub(super) fn widen_f16(v: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: every aarch64 has this conversion; only registers are used.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {v:v}.4h",
            wide = lateout(vreg) wide, v = in(vreg) v,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

/// # Safety
/// `super::f32::dots`'s bounds.
pub(super) unsafe fn dots<W: Weight>(
    x: RowsView<'_>,
    w: RowsView<'_, W>,
    k: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    // SAFETY: every block below starts inside the rows that `dots` was checked for.
    unsafe {
        for i in (0..x.count).step_by(2) {
            for j in (0..w.count).step_by(4) {
                match (x.count - i, w.count - j) {
                    (2.., 4..) => block::<W, 2, 4>(x, i, w, j, k, out, out_stride),
                    (1, 4..) => block::<W, 1, 4>(x, i, w, j, k, out, out_stride),
                    (rows, columns) => {
                        for i in i..i + rows.min(2) {
                            for j in j..j + columns.min(4) {
                                block::<W, 1, 1>(x, i, w, j, k, out, out_stride);
                            }
                        }
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn block<W: Weight, const M: usize, const N: usize>(
    x: RowsView<'_>,
    i: usize,
    w: RowsView<'_, W>,
    j: usize,
    k: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    // SAFETY: rows i .. i + M and j .. j + N lie inside the views, k values each; what is left of a row is copied first.
    unsafe {
        let a: [*const f32; M] = std::array::from_fn(|r| x.values.as_ptr().add((i + r) * x.stride));
        let b: [*const W; N] = std::array::from_fn(|c| w.values.as_ptr().add((j + c) * w.stride));
        let mut acc = [[[vdupq_n_f32(0.0); 2]; N]; M];
        let mut step = |a: [*const f32; M], b: [*const W; N]| {
            let b = b.map(|p| [W::load4(p), W::load4(p.add(4))]);
            for r in 0..M {
                let a = [vld1q_f32(a[r]), vld1q_f32(a[r].add(4))];
                for c in 0..N {
                    for h in 0..2 {
                        acc[r][c][h] = vfmaq_f32(acc[r][c][h], a[h], b[c][h]);
                    }
                }
            }
        };
        let whole = k - k % LANES;
        for e in (0..whole).step_by(LANES) {
            step(a.map(|p| p.add(e)), b.map(|p| p.add(e)));
        }
        if whole < k {
            let (mut rest_a, mut rest_b) = ([[0.0f32; LANES]; M], [[W::default(); LANES]; N]);
            for (rest, p) in rest_a.iter_mut().zip(a) {
                std::ptr::copy_nonoverlapping(p.add(whole), rest.as_mut_ptr(), k - whole);
            }
            for (rest, p) in rest_b.iter_mut().zip(b) {
                std::ptr::copy_nonoverlapping(p.add(whole), rest.as_mut_ptr(), k - whole);
            }
            step(rest_a.each_ref().map(|r| r.as_ptr()), rest_b.each_ref().map(|r| r.as_ptr()));
        }
        for (r, sums) in acc.iter().enumerate() {
            for (c, [low, high]) in sums.iter().enumerate() {
                let four = vaddq_f32(*low, *high);
                let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
                out[(i + r) * out_stride + j + c] = vpadds_f32(two);
            }
        }
    }
}
