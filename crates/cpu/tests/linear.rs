//! `linear`, `logits`, `argmax` against f64, and the rule that a row's bits are its own.

mod common;

use common::*;
use lapidary_cpu::CpuOptions;
use lapidary_formats::{Encoded, encode_rows};
use lapidary_ops::*;

fn weights(format: Format, rows: usize, cols: usize, seed: u64) -> Encoded {
    encode_rows(format, &values(rows * cols, seed), rows, cols).expect("finite values in whole blocks")
}

fn decoded(view: &TensorView<'_>) -> Vec<f32> {
    let mut out = vec![0.0; view.rows * view.cols];
    for (r, row) in out.chunks_exact_mut(view.cols).enumerate() {
        lapidary_formats::decode_row(view, r, row);
    }
    out
}

/// Exact products, and the bound of a float32 sum: at least 8 lanes, so k / 8 additions in each, 4 in the
/// tree, one rounding in each product.
fn exact(x: &[f32], w: &[f32], k: usize) -> Vec<(f64, f64)> {
    let mut out = Vec::new();
    for x in x.chunks_exact(k) {
        for w in w.chunks_exact(k) {
            let terms = x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
            out.push((sum, size * (k as f64 / 8.0 + 5.0) * EPS));
        }
    }
    out
}

#[test]
fn linear_matches_f64_for_every_format_and_level() {
    for level in levels() {
        for format in Format::ALL {
            for (rows, k) in [(33, 96usize), (17, 160), (50, 640), (16, 704), (5, 2112), (19, 256), (3, 768)]
            {
                if !k.is_multiple_of(format.block_len()) {
                    continue;
                }
                let mut rig = Rig::new(CpuOptions { level: Some(level), ..options(2) });
                let encoded = weights(format, rows, k, 3);
                let view = encoded.view("matrix");
                let w = rig.cpu.pack(std::slice::from_ref(&view), rows).expect("a valid matrix");
                let (x, out) = (rig.act(k), rig.act(rows));
                for n in [1, 3, 70] {
                    let soft = values(n * k, 5);
                    rig.rows(n, &soft);
                    rig.run(&|ops| {
                        ops.inject_soft(x);
                        ops.linear(out, x, w);
                    });
                    let found = rig.read(out, n);
                    assert_near(
                        &format!("{level} {format} {rows} x {k}"),
                        &found,
                        exact(&soft, &decoded(&view), k),
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch_and_team() {
    for level in levels() {
        for format in [Format::Bf16, Format::Q4_0, Format::F32] {
            let (rows, k) = (53, 160);
            let encoded = weights(format, rows, k, 3);
            let soft = values(257 * k, 5);
            let mut alone: Vec<f32> = Vec::new();
            for workers in 1..=3 {
                let mut rig = Rig::new(CpuOptions { level: Some(level), ..options(workers) });
                // Two parts whose border falls inside a tile.
                let all = encoded.view("matrix");
                let parts = [all.slice_rows(0, 21), all.slice_rows(21, rows - 21)];
                let w = rig.cpu.pack(&parts, rows).expect("a valid matrix");
                let (x, out) = (rig.act(k), rig.act(rows));
                let mut run = |from: usize, n: usize| {
                    rig.rows(n, &soft[from * k..(from + n) * k]);
                    rig.run(&|ops| {
                        ops.inject_soft(x);
                        ops.linear(out, x, w);
                    });
                    rig.read(out, n)
                };
                if alone.is_empty() {
                    alone = (0..257).flat_map(|r| run(r, 1)).collect();
                }
                for n in (1..=33).chain([64, 65, 129, 257]) {
                    assert_bits(&format!("{level} {format} {n} rows"), &run(0, n), &alone[..n * rows]);
                }
            }
        }
    }
}

#[test]
fn logits_are_capped_and_the_first_of_equals_wins() {
    for workers in 1..=3 {
        let mut rig = Rig::new(options(workers));
        let (vocab, k, n) = (1001, 96, 5);
        let mut e = values(vocab * k, 7);
        // Row 900 repeats row 12: equal logits.
        let copy = e[12 * k..13 * k].to_vec();
        e[900 * k..901 * k].copy_from_slice(&copy);
        let w = rig.matrix(vocab, k, &e);
        let (x, out) = (rig.act(k), rig.act(vocab));
        let mut soft = values(n * k, 9);
        // The last row points where row 12 points; the one before is not finite after the product.
        soft[4 * k..].copy_from_slice(&copy.iter().map(|v| v * 3.0).collect::<Vec<_>>());
        soft[3 * k..4 * k].fill(3e38);
        rig.rows(n, &soft);
        rig.batch.heads = vec![1, 3, 4];
        let cap = 30.0f32;
        let outcome = rig.run(&|ops| {
            ops.inject_soft(x);
            ops.keep_rows(&[x]);
            ops.logits(out, x, w, Some(cap));
            ops.argmax(out);
        });
        let found = rig.read(out, 3);
        let kept = [&soft[k..2 * k], &soft[4 * k..]].concat();
        let c = f64::from(cap);
        let capped = exact(&kept, &e, k).into_iter().map(|(z, b)| (c * (z / c).tanh(), b + 1e-6 * z.abs()));
        assert_near("logits", &[&found[..vocab], &found[2 * vocab..]].concat(), capped);
        let row = &found[..vocab];
        let first = (0..vocab).fold(0, |b, i| if row[i] > row[b] { i } else { b });
        assert_eq!(outcome.argmax[0], first as i32);
        assert_eq!(outcome.argmax[2], 12);
        // Without a cap the overflow stays and the row has no largest logit.
        let outcome = rig.run(&|ops| {
            ops.inject_soft(x);
            ops.keep_rows(&[x]);
            ops.logits(out, x, w, None);
            ops.argmax(out);
        });
        assert_eq!(outcome.argmax[1..], [-1, 12]);
    }
}

#[test]
fn bad_parts_are_refused_by_name() {
    let mut rig = Rig::new(options(1));
    let bytes = vec![0u8; 4 * 96 * 4];
    let (a, mut b) = (view(Format::F32, 2, 96, &bytes[..768]), view(Format::F32, 2, 48, &bytes[..384]));
    b.name = "narrow".into();
    let error = rig.cpu.pack(&[a.clone(), b], 4).expect_err("unequal widths");
    assert!(matches!(&error, Error::Tensor { tensor, .. } if tensor == "narrow"), "{error}");
    let error = rig.cpu.pack(&[], 1).expect_err("no parts");
    assert!(matches!(error, Error::Tensor { .. }));
    let mut short = a;
    short.bytes = &bytes[..700];
    let error = rig.cpu.pack(&[short], 2).expect_err("short bytes");
    assert!(matches!(error, Error::Tensor { .. }), "{error}");
}
