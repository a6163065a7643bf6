//! Products of many rows and grouped experts, against float64; bounds as in `skinny_gemm`.

use lapidary_cuda::kernels::gemm_prefill::{
    Combine, Grouped, Lists, combine_pairs, grouped_down, grouped_up, linear, sort_pairs,
};
use lapidary_cuda::kernels::gemm_wide;
use lapidary_cuda::kernels::skinny_gemm::{Gate, Linear, Output};
use lapidary_formats::{Format, Scaling};

use crate::lab::{Judge, Lab, Packed, decode, dot, matrix, random, random_bf16};
use crate::skinny_gemm::{allowed, every_kind, gelu, picked};

fn relative(format: Format) -> f64 {
    if matches!(format, Format::Q5_0 | Format::Q6K | Format::Q3K) { 1e-4 } else { 2e-5 }
}

/// A plain product in float32, then the same matrix gated and as a gate; of the forms that have them also by the kernels
/// for very many rows.
fn products(lab: &Lab, format: Format, scaling: Scaling, m: usize, k: usize, rows: usize) {
    for wide in [false, true] {
        products_by(lab, format, scaling, (m, k, rows), wide);
    }
}

fn products_by(lab: &Lab, format: Format, scaling: Scaling, size: (usize, usize, usize), wide: bool) {
    let (m, k, rows) = size;
    let what = format!("{format} {scaling:?} {m} x {k}, {rows} rows, wide {wide}");
    let encoded = matrix(format, scaling, m, k, 7);
    let view = encoded.view("w");
    let packed = Packed::stack(lab, std::slice::from_ref(&view));
    let workspace = lab.poisoned(gemm_wide::workspace_bytes(packed.shape, rows));
    // SAFETY: the buffers are as large as the calls say, here and below.
    let run = |call: &Linear| unsafe {
        match wide {
            true => gemm_wide::linear(lab.queue(), call, workspace.ptr()).unwrap(),
            false => linear(lab.queue(), call).unwrap(),
        }
    };
    let (x_stride, out_stride) = (k.next_multiple_of(8) + 16, m + 3);
    let x: Vec<f32> = random_bf16(rows * x_stride, 3).iter().map(|v| v * 2.0).collect();
    let device_x = lab.bf16(&x);
    let pick = picked(m);
    let reference = decode(&view, &pick);
    let out = lab.poisoned(rows * out_stride * 4);
    let mut call = Linear {
        weights: packed.weights(),
        x: device_x.ptr(),
        x_stride,
        rows,
        out: out.ptr(),
        out_stride,
        output: Output::F32 { softcap: 0.0 },
        most_planes: 1,
    };
    lab.twice(&out, || run(&call));
    let found = lab.read_f32(&out, rows * out_stride);
    let mut judge = Judge::new(&what);
    for n in 0..rows {
        for (&i, (w, sizes)) in pick.iter().zip(&reference) {
            let (expected, size) = dot(w, sizes, &x[n * x_stride..][..k]);
            judge.see((n, i), found[n * out_stride + i], expected, allowed(k, size));
        }
        let beyond = &found[n * out_stride + m..(n + 1) * out_stride];
        assert!(beyond.iter().all(|v| v.to_bits() == u32::MAX), "{what}");
    }
    judge.finish(relative(format));
    if !m.is_multiple_of(32) {
        return;
    }
    let (half, times) = (m / 2, random(rows * m, 9));
    let device_times = lab.f32(&times);
    let reference = decode(&view, &(0..m).collect::<Vec<_>>());
    for gated in [true, false] {
        call.output = match gated {
            true => Output::Gated(Gate::GeluTanh),
            false => Output::GateTimes { gate: Gate::GeluTanh, times: device_times.ptr(), stride: m },
        };
        lab.poison(&out);
        run(&call);
        let found = lab.read_bf16(&out, rows * out_stride);
        let mut judge = Judge::new(&what);
        for n in 0..rows {
            let x = &x[n * x_stride..][..k];
            for i in 0..if gated { half } else { m } {
                let (g, gs) = dot(&reference[i].0, &reference[i].1, x);
                let (u, us) = match gated {
                    true => dot(&reference[half + i].0, &reference[half + i].1, x),
                    false => (f64::from(times[n * m + i]), 0.0),
                };
                let expected = gelu(g) * u;
                let error = 1.2 * allowed(k, gs) * u.abs() + g.abs() * allowed(k, us) + 1e-5 * (g * u).abs();
                let near = 1.1 * error + expected.abs() * 2f64.powi(-8) + 1e-12;
                judge.see((n, i), found[n * out_stride + i], expected, near);
            }
        }
        judge.finish(4e-3);
    }
}

#[test]
fn many_rows_of_every_form() {
    every_kind(|lab, format, scaling| {
        products(lab, format, scaling, 96, 768, 17);
        products(lab, format, scaling, 157, 512, 65);
        products(lab, format, scaling, 160, 256, 257);
        if format.block_len() <= 32 {
            products(lab, format, scaling, 45, 32 * 9, 33);
        }
        if matches!(format, Format::Bf16 | Format::Nvfp4 | Format::Q4K) || scaling == Scaling::Row {
            products(lab, format, scaling, 17029, 1536, 129);
        }
    });
}

#[test]
fn experts_over_the_rows_that_chose_them() {
    every_kind(|lab, format, scaling| {
        let block = format.block_len();
        let (hidden, width) = (if block == 256 { 512 } else { 448 }, if block == 256 { 256 } else { 192 });
        let (experts, top_k, rows) = (7, 3, 83);
        let what = format!("{format} {scaling:?} experts, {rows} rows");
        let up: Vec<_> =
            (0..experts).map(|e| matrix(format, scaling, 2 * width, hidden, 100 + e as u64)).collect();
        let down: Vec<_> =
            (0..experts).map(|e| matrix(format, scaling, hidden, width, 200 + e as u64)).collect();
        let up: Vec<_> = up.iter().map(|e| e.view("up")).collect();
        let down: Vec<_> = down.iter().map(|e| e.view("down")).collect();
        let (packed_up, packed_down) = (Packed::stack(lab, &up), Packed::stack(lab, &down));
        // Expert 0 takes every row (more than one tile), 6 none, the others some.
        let choice = |n: usize| [0, 1 + n % 5, 1 + (n + 2) % 5];
        let weight = |n: usize, j: usize| 0.2 + 0.1 * j as f32 + 0.01 * n as f32;
        let routes: Vec<f32> = (0..rows)
            .flat_map(|n| {
                choice(n).into_iter().map(|e| e as f32).chain((0..top_k).map(move |j| weight(n, j)))
            })
            .collect();
        let device_routes = lab.f32(&routes);
        let (counts, pairs) = (lab.poisoned(experts * 4), lab.poisoned(experts * rows * 4));
        let lists = Lists { counts: counts.ptr(), pairs: pairs.ptr(), list_stride: rows, experts, top_k };
        // SAFETY: the buffers are as large as the calls say, here and below.
        unsafe { sort_pairs(lab.queue(), device_routes.ptr(), rows, &lists).unwrap() };
        let found = lab.read_i32(&counts, experts);
        let expected: Vec<i32> =
            (0..experts).map(|e| (0..rows).flat_map(choice).filter(|&c| c == e).count() as i32).collect();
        assert_eq!(found, expected);

        let x: Vec<f32> = random_bf16(rows * hidden, 5).iter().map(|v| v * 2.0).collect();
        let device_x = lab.bf16(&x);
        let inner = lab.poisoned(rows * top_k * width * 2);
        let parts = lab.poisoned(rows * top_k * hidden * 4);
        let out = lab.poisoned(rows * hidden * 4);
        let call_up = Grouped {
            weights: packed_up.weights(),
            lists,
            x: device_x.ptr(),
            x_stride: hidden,
            out: inner.ptr(),
            out_stride: width,
        };
        let call_down = Grouped {
            weights: packed_down.weights(),
            x: inner.ptr(),
            x_stride: width,
            out: parts.ptr(),
            out_stride: hidden,
            ..call_up
        };
        let sum = Combine {
            parts: parts.ptr(),
            parts_stride: hidden,
            out: out.ptr(),
            out_stride: hidden,
            rows,
            top_k,
            width: hidden,
        };
        lab.twice(&out, || {
            lab.poison(&inner);
            lab.poison(&parts);
            // SAFETY: as above.
            unsafe {
                grouped_up(lab.queue(), &call_up, Gate::GeluTanh, device_routes.ptr()).unwrap();
                grouped_down(lab.queue(), &call_down).unwrap();
                combine_pairs(lab.queue(), &sum).unwrap();
            }
        });
        let inputs = lab.read_bf16(&inner, rows * top_k * width);
        let found = lab.read_f32(&out, rows * hidden);
        let all: Vec<usize> = (0..2 * width).collect();
        let up: Vec<_> = up.iter().map(|e| decode(e, &all)).collect();
        let all: Vec<usize> = (0..hidden).collect();
        let down: Vec<_> = down.iter().map(|e| decode(e, &all)).collect();
        let mut judges = [Judge::new(format!("up {what}")), Judge::new(format!("down {what}"))];
        for n in 0..rows {
            let x = &x[n * hidden..][..hidden];
            for (j, e) in choice(n).into_iter().enumerate() {
                let w = f64::from(weight(n, j));
                for i in 0..width {
                    let (g, gs) = dot(&up[e][i].0, &up[e][i].1, x);
                    let (u, us) = dot(&up[e][width + i].0, &up[e][width + i].1, x);
                    let expected = w * gelu(g) * u;
                    let error = 1.2 * allowed(hidden, gs) * u.abs() + g.abs() * allowed(hidden, us);
                    let near =
                        1.1 * w * (error + 1e-5 * (g * u).abs()) + expected.abs() * 2f64.powi(-8) + 1e-12;
                    judges[0].see((n, e, i), inputs[(n * top_k + j) * width + i], expected, near);
                }
            }
            for i in 0..hidden {
                let (mut expected, mut size) = (0.0, 0.0);
                for (j, e) in choice(n).into_iter().enumerate() {
                    let (v, s) =
                        dot(&down[e][i].0, &down[e][i].1, &inputs[(n * top_k + j) * width..][..width]);
                    (expected, size) = (expected + v, size + s);
                }
                judges[1].see((n, i), found[n * hidden + i], expected, allowed(width, size));
            }
        }
        let [a, b] = judges;
        a.finish(4e-3);
        b.finish(relative(format));
    });
}
