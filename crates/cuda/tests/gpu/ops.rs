//! Verbs against the reference at Gemma's widths and odd ones.

use lapidary_formats::{Format, Scaling, decode_row, encode_rows_scaled};
use lapidary_ops::{
    Activation, AttnSpec, ExpertSpec, Group, KvFormat, KvGroupPlan, KvLayerShape, KvPlan, KvRef, KvSpec,
    Norm, QkvSpec, RouteSpec, ValueSource,
};
use lapidary_reference::{Limits, assert_close, compare};

use crate::pair::{POOL_PAGES, Pair, given, values};

/// Every weight of every format has the bits that the format defines, under every kind of scale, from any row on.
#[test]
fn every_format_decodes_to_the_same_bits() {
    let usual = Format::ALL.map(|format| (format, Scaling::Usual));
    let others = [
        (Format::Fp8E4M3, Scaling::Tensor),
        (Format::Fp8E4M3, Scaling::Block128),
        (Format::GgufNvfp4, Scaling::Tensor),
    ];
    for (format, scaling) in usual.into_iter().chain(others) {
        let Some(mut pair) = Pair::new() else { return };
        let (rows, cols) = (300, 768);
        let w = values(format as u64 + 1, rows * cols);
        let encoded = encode_rows_scaled(format, scaling, &w, rows, cols).unwrap();
        // Parts that begin inside a scale's block, and one that stacks behind its neighbour.
        let view = encoded.view("w");
        let parts = [view.slice_rows(70, 58), view.slice_rows(128, 140), view.slice_rows(3, 9)];
        let table = pair.pack(&parts, 207);
        let rows = 207;
        let x = pair.act(cols, rows);
        let mut batch = given(rows, 0, Vec::new());
        batch.soft_rows.clear();
        batch.tokens = (0..rows as i32).rev().collect();
        let [found, _] = pair.run(&batch, x, rows, &|s| s.embed(x, table, 1.0));
        let mut expected = vec![0.0; cols];
        for (r, found) in found.chunks_exact(cols).enumerate() {
            let row = rows - 1 - r;
            decode_row(&view, if row < 198 { 70 + row } else { row - 198 + 3 }, &mut expected);
            for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
                assert!(a.to_bits() == b.to_bits(), "{format} {scaling:?} row {row} value {i}: {a}, not {b}");
            }
        }
    }
}

/// Each product is within what the order of its float32 sums can lose: chunks of 64, then the chunks.
#[test]
fn products_stay_within_the_bound_of_their_sums() {
    for (format, outs, cols) in [
        (Format::Bf16, 261, 1536),
        (Format::F32, 70, 37),
        (Format::Fp8E4M3, 65, 2816),
        (Format::Nvfp4, 129, 704),
        (Format::Int4G32, 64, 2112),
        (Format::Q4_0, 3, 5376),
        (Format::Q4K, 67, 1536),
        (Format::Q6K, 128, 2304),
        (Format::Q8_0, 200, 96),
    ] {
        for rows in [1, 7, 16, 17, 64, 65, 257] {
            let Some(mut pair) = Pair::new() else { return };
            let w = pair.encoded(format, &values(3, outs * cols), outs, cols);
            let (x, y) = (pair.act(cols, rows), pair.act(outs, rows));
            let input = values(5, rows * cols);
            let batch = given(rows, 0, input.clone());
            let [found, expected] = pair.run(&batch, y, rows, &|s| {
                s.inject_soft(x);
                s.linear(y, x, w);
            });
            let weights = pair.reference.matrix(w);
            let epsilon = f64::from(f32::EPSILON) / 2.0;
            let steps = 64.0 + (cols as f64 / 64.0) + 2.0;
            for (at, (a, b)) in found.iter().zip(&expected).enumerate() {
                let (r, o) = (at / outs, at % outs);
                let pairs = input[r * cols..][..cols].iter().zip(&weights[o * cols..][..cols]);
                let size: f64 = pairs.map(|(x, w)| f64::from(x * w).abs()).sum();
                let off = f64::from(a - b).abs();
                assert!(
                    off <= steps * epsilon * size,
                    "{format} {rows} rows, row {r} output {o}: {a}, not {b}"
                );
            }
        }
    }
}

/// A row's bits do not depend on the rows beside it.
#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let Some(mut pair) = Pair::new() else { return };
    let (outs, cols, rows) = (131, 2112, 70);
    let w = pair.encoded(Format::Q5_0, &values(3, outs * cols), outs, cols);
    let (x, y) = (pair.act(cols, rows), pair.act(outs, rows));
    let input = values(5, rows * cols);
    let mut run = |rows: usize| {
        pair.run(&given(rows, 0, input[..rows * cols].to_vec()), y, rows, &|s| {
            s.inject_soft(x);
            s.linear(y, x, w);
        })[0]
            .clone()
    };
    let all = run(rows);
    for few in [1, 2, 15, 16, 17, 63] {
        assert!(run(few)[..] == all[..few * outs], "{few} rows");
    }
}

fn plan(kv_heads: usize, head_dim: usize, format: KvFormat, window: Option<usize>) -> KvPlan {
    let layers = vec![KvLayerShape { kv_heads, head_dim }];
    let sliding = KvGroupPlan { layers: layers.clone(), format, pages: POOL_PAGES + 1, window };
    KvPlan { groups: [sliding, KvGroupPlan { layers, format, pages: POOL_PAGES + 1, window: None }] }
}

/// Head norms, rotation, cache and attention at Gemma's head widths, over several chunks of a sequence.
#[test]
fn attention_over_pages() {
    for (heads, kv_heads, d, group, window, format, keys_are_values) in [
        (8, 2, 256, Group::Sliding, Some(100), KvFormat::F32, false),
        (8, 1, 512, Group::Full, None, KvFormat::F32, true),
        (6, 3, 96, Group::Full, None, KvFormat::Bf16, false),
        (4, 2, 64, Group::Sliding, Some(33), KvFormat::Q8_0, false),
        (4, 4, 64, Group::Full, None, KvFormat::F16, false),
    ] {
        let Some(mut pair) = Pair::with(&plan(kv_heads, d, format, window)) else { return };
        let parts = if keys_are_values { 1 } else { 2 };
        let width = (heads + parts * kv_heads) * d;
        let most = 130;
        let (qkv, rope, out) = (pair.act(width, most), pair.act(d, most), pair.act(heads * d, most));
        let gains = [pair.vector(&values(1, d)), pair.vector(&values(2, d))];
        let freq =
            pair.vector(&(0..d / 2).map(|i| 10000f32.powf(-(2.0 * i as f32) / d as f32)).collect::<Vec<_>>());
        let cache = KvRef { group, index: 0, writes: true };
        let norm = |gain| Norm { gain, eps: 1e-6 };
        let kv = KvSpec {
            k_norm: norm(gains[1]),
            values: if keys_are_values { ValueSource::Keys } else { ValueSource::Projected },
            v_norm_eps: Some(1e-6),
            cache,
        };
        let finish = QkvSpec { heads, kv_heads, head_dim: d, q_norm: norm(gains[0]), kv: Some(kv), rope };
        let spec = AttnSpec { heads, kv_heads, head_dim: d, scale: 0.3, softcap: None, window, cache };
        let mut position = 0;
        for rows in [1, 31, 33, 130, 2, 1, 75] {
            let batch = given(rows, position, values(position as u64 + 9, rows * width));
            let [found, expected] = pair.run(&batch, out, rows, &|s| {
                s.inject_soft(qkv);
                s.rope_table(rope, freq);
                s.qkv_finish(qkv, &finish);
                s.attention(out, qkv, &spec);
            });
            // A stored value that lies between two codes may round to either side on either backend.
            let rel = match format {
                KvFormat::F32 => 5e-6,
                KvFormat::F16 => 1e-4,
                KvFormat::Bf16 => 1e-3,
                KvFormat::Q8_0 => 2e-3,
                KvFormat::Fp8 => unreachable!("the reference keeps none"),
            };
            let what = format!("{heads}/{kv_heads} of {d} {format:?} {rows} rows at {position}");
            assert_close(&what, &compare(&found, &expected), Limits { rel, max: f64::INFINITY });
            position += rows;
        }
    }
}

/// Router and experts at 26B-A4B's counts, in a format whose scales lie beside the codes.
#[test]
fn experts_by_the_routes_that_the_router_chose() {
    for (format, experts, top_k, width, hidden) in
        [(Format::Nvfp4, 128, 8, 96, 176), (Format::Q8_0, 16, 3, 64, 96), (Format::Bf16, 5, 5, 37, 69)]
    {
        for rows in [1, 3, 40] {
            let Some(mut pair) = Pair::new() else { return };
            let (g, d) = (values(1, experts * 2 * width * hidden), values(2, experts * hidden * width));
            let gate_up = pair.encoded(format, &g, experts * 2 * width, hidden);
            let down = pair.encoded(format, &d, experts * hidden, width);
            let per_expert_scale = pair.vector(&values(3, experts));
            let router = pair.encoded(Format::F32, &values(4, experts * hidden), experts, hidden);
            let (x, logits) = (pair.act(hidden, rows), pair.act(experts, rows));
            let (routes, out) = (pair.act(2 * top_k, rows), pair.act(hidden, rows));
            let route = RouteSpec { experts, top_k, per_expert_scale };
            let spec = ExpertSpec { experts, top_k, width, gate_up, down, activation: Activation::GeluTanh };
            let batch = given(rows, 0, values(6, rows * hidden));
            let program = move |s: &mut dyn lapidary_ops::Ops| {
                s.inject_soft(x);
                s.linear(logits, x, router);
                s.route(routes, logits, &route);
                s.experts(out, x, routes, &spec);
            };
            let what = format!("{format} {experts} experts, {rows} rows");
            let [found, expected] = pair.run(&batch, routes, rows, &program);
            for (f, e) in found.chunks_exact(2 * top_k).zip(expected.chunks_exact(2 * top_k)) {
                assert_eq!(f[..top_k], e[..top_k], "{what}: the same experts");
            }
            let close = Limits { rel: 1e-5, max: f64::INFINITY };
            assert_close(&what, &compare(&found, &expected), close);
            let [found, expected] = pair.run(&batch, out, rows, &program);
            assert_close(&what, &compare(&found, &expected), close);
        }
    }
}

/// The largest logit, the lower of equals, and -1 for a row with one that is not finite; other rows are not touched.
#[test]
fn argmax_finds_ties_and_what_is_not_finite() {
    use lapidary_ops::Backend;
    let Some(mut pair) = Pair::new() else { return };
    let (vocab, rows) = (1003, 5);
    let x = pair.act(vocab, rows);
    let mut input = values(3, rows * vocab);
    input[700] = 9.0;
    input[12] = 9.0;
    input[vocab + 1002] = 9.0;
    input[2 * vocab] = 9.0;
    // An infinity from a finite input: 3e38 * 3e38.
    input[3 * vocab + 501] = 3e38;
    let mut batch = given(rows, 0, input);
    batch.heads = (0..rows as i32).collect();
    let shape = batch.shape(0, lapidary_ops::TailRows::All);
    let run = |backend: &mut dyn Backend| {
        backend.upload(&batch).unwrap();
        backend
            .run(&shape, &|s| {
                s.inject_soft(x);
                s.scale(x, 3e38 / 9.0);
                s.keep_rows(&[x]);
                s.argmax(x);
            })
            .unwrap();
        backend.collect().unwrap().argmax
    };
    let found = run(&mut pair.gpu);
    assert_eq!(found[..4], [12, 1002, 0, -1]);
    assert_eq!(found, run(&mut pair.reference));
}

/// A verb that fails in the middle is reported once the work before it is done; the next pass is right, and a backend
/// that goes away with a pass under way waits for it.
#[test]
fn a_pass_that_fails_or_is_dropped_under_way_leaves_nothing_behind() {
    use lapidary_ops::{Backend, Error};
    let Some(mut pair) = Pair::new() else { return };
    let (outs, cols, rows) = (5000, 2048, 257);
    let w = pair.encoded(Format::Q4_0, &values(3, outs * cols), outs, cols);
    let (x, y, odd) = (pair.act(cols, rows), pair.act(outs, rows), pair.act(3, rows));
    let batch = given(rows, 0, values(5, rows * cols));
    let shape = batch.shape(0, lapidary_ops::TailRows::All);
    pair.gpu.upload(&batch).unwrap();
    let failed = pair.gpu.run(&shape, &|s| {
        s.inject_soft(x);
        s.linear(y, x, w);
        s.cast(odd, x);
        s.linear(y, x, w);
    });
    assert!(matches!(failed, Err(Error::Device(ref what)) if what.contains("cast")), "{failed:?}");
    assert!(pair.gpu.collect().is_err(), "there is nothing to collect");
    let [found, expected] = pair.run(&batch, y, 3, &|s| {
        s.inject_soft(x);
        s.linear(y, x, w);
    });
    assert_close("after a failure", &compare(&found, &expected), Limits { rel: 1e-5, max: f64::INFINITY });
    pair.gpu.upload(&batch).unwrap();
    pair.gpu.run(&shape, &|s| (0..50).for_each(|_| s.linear(y, x, w))).unwrap();
    drop(pair);
    // The device still computes.
    assert!(Pair::new().is_some());
}
