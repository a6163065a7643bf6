//! Chosen experts with a plain product beside them, and the router beside a gated product, against float64. Bounds as in
//! `skinny_gemm.rs`.

use lapidary_cuda::driver::Block;
use lapidary_cuda::kernels::producers::{Router, router};
use lapidary_cuda::kernels::skinny_experts::{
    ExpertsDown, ExpertsUp, experts_down, experts_up, gated_and_router,
};
use lapidary_cuda::kernels::skinny_gemm::{Chosen, Gate, Linear, MAX_PLANES, Output, linear};
use lapidary_formats::{Encoded, Format, Scaling};

use crate::lab::{Judge, Lab, Packed, decode, dot, matrix, random, random_bf16};
use crate::skinny_gemm::{KINDS, allowed, gelu, picked, rounding};

/// The relative error of all sums together. Four bits have one row's inputs as integers: a block's unit is at most 1/16320 of its largest input, rounding errs
/// by a unit / sqrt(12) on average, and the largest of 32 is at most sqrt(32) times their root mean square: 1e-4 where one input of a block outweighs all others, as
/// those of down do, which are made of gate and up. Each sum is held to its own bound beside this.
fn relative(format: Format, rows: usize) -> f64 {
    let four_bits =
        [Format::Nvfp4, Format::GgufNvfp4, Format::Q4_0, Format::Int4G32, Format::Q4_1, Format::Q4K];
    if rows == 1 && four_bits.contains(&format) {
        return 1e-4;
    }
    if matches!(format, Format::Q5_0 | Format::Q6K | Format::Q3K) { 1e-4 } else { 2e-5 }
}

/// Shapes of a routed block's products.
#[derive(Clone, Copy)]
struct Sizes {
    experts: usize,
    top_k: usize,
    hidden: usize,
    width: usize,
    /// Outputs and inputs of the product beside.
    side: (usize, usize),
}

/// Distinct ids, and by row what each weighs.
struct Choice {
    ids: Vec<i32>,
    weights: Vec<f32>,
    list: Block,
    device_weights: Block,
}

impl Choice {
    /// Row n takes experts n, n + 2, n + 5, n + 7 ... (never the last): some alone, some shared.
    fn new(lab: &Lab, sizes: Sizes, rows: usize) -> Choice {
        let of = |n: usize, j: usize| ((n + 2 * j + j / 2) % (sizes.experts - 1)) as i32;
        let mut ids: Vec<i32> = (0..rows).flat_map(|n| (0..sizes.top_k).map(move |j| of(n, j))).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut list = vec![ids.len() as i32];
        list.extend(&ids);
        list.resize(129, -1);
        let mut weights = vec![0.0; 128 * 16];
        for n in 0..rows {
            for j in 0..sizes.top_k {
                let group = ids.iter().position(|&id| id == of(n, j)).unwrap();
                weights[group * 16 + n] = 0.2 + 0.1 * j as f32 + 0.01 * n as f32;
            }
        }
        let (list, device_weights) = (lab.i32(&list), lab.f32(&weights));
        Choice { ids, weights, list, device_weights }
    }

    fn chosen(&self) -> Chosen {
        Chosen { groups: self.list.ptr(), weights: self.device_weights.ptr() }
    }
}

/// A plain product that rides along: what it is made of, and what came out.
struct Side {
    encoded: Encoded,
    packed: Packed,
    x: Vec<f32>,
    device_x: Block,
    out: Block,
}

impl Side {
    fn new(lab: &Lab, format: Format, scaling: Scaling, (m, k): (usize, usize), rows: usize) -> Side {
        let encoded = matrix(format, scaling, m, k, 300);
        let packed = Packed::stack(lab, &[encoded.view("side")]);
        let x = random_bf16(rows * (k + 8), 6);
        let (device_x, out) = (lab.bf16(&x), lab.poisoned(MAX_PLANES * rows * (m + 4) * 4));
        Side { encoded, packed, x, device_x, out }
    }

    fn call(&self, (m, k): (usize, usize), rows: usize, most_planes: usize) -> Linear {
        Linear {
            weights: self.packed.weights(),
            x: self.device_x.ptr(),
            x_stride: k + 8,
            rows,
            out: self.out.ptr(),
            out_stride: m + 4,
            output: Output::F32 { softcap: 0.0 },
            most_planes,
        }
    }

    fn check(&self, lab: &Lab, (m, k): (usize, usize), rows: usize, planes: usize, what: &str) {
        let found = lab.read_f32(&self.out, planes * rows * (m + 4));
        let view = self.encoded.view("side");
        let pick = picked(m);
        let reference = decode(&view, &pick);
        let mut judge = Judge::new(format!("{what}, side in {planes} planes"));
        for n in 0..rows {
            for (&i, (w, sizes)) in pick.iter().zip(&reference) {
                let sum: f32 = (0..planes).map(|p| found[(p * rows + n) * (m + 4) + i]).sum();
                let x = &self.x[n * (k + 8)..][..k];
                let (expected, size) = dot(w, sizes, x);
                judge.see((n, i), sum, expected, allowed(k, size) + rounding(view.format, rows, w, x));
            }
            let beyond = &found[n * (m + 4) + m..(n + 1) * (m + 4)];
            assert!(beyond.iter().all(|v| v.to_bits() == u32::MAX), "{what}");
        }
        judge.finish(relative(view.format, rows));
    }
}

fn check_experts(lab: &Lab, format: Format, scaling: Scaling, sizes: Sizes, rows: usize) {
    let Sizes { experts, top_k, hidden, width, side: side_shape } = sizes;
    let what = format!("{format} {scaling:?} experts of {hidden} x {width}, {rows} rows");
    let stack = |m: usize, k: usize, seed: u64| -> Vec<Encoded> {
        (0..experts).map(|e| matrix(format, scaling, m, k, seed + e as u64)).collect()
    };
    let (up, down) = (stack(2 * width, hidden, 100), stack(hidden, width, 200));
    let up: Vec<_> = up.iter().map(|e| e.view("up")).collect();
    let down: Vec<_> = down.iter().map(|e| e.view("down")).collect();
    let (packed_up, packed_down) = (Packed::stack(lab, &up), Packed::stack(lab, &down));
    let choice = Choice::new(lab, sizes, rows);
    let (chosen, ids, groups) = (choice.chosen(), &choice.ids, choice.ids.len());
    let x: Vec<f32> = random_bf16(rows * hidden, 5).iter().map(|v| v * 2.0).collect();
    let device_x = lab.bf16(&x);
    let inner = lab.poisoned(groups * rows * width * 2);
    let call_up = ExpertsUp {
        weights: packed_up.weights(),
        chosen,
        top_k,
        x: device_x.ptr(),
        x_stride: hidden,
        rows,
        hidden: inner.ptr(),
        hidden_stride: width,
        gate: Gate::GeluTanh,
    };
    // SAFETY: the buffers are as large as the calls say, here and below.
    let alone = lab.twice(&inner, || unsafe {
        experts_up(lab.queue(), &call_up, None).unwrap();
    });
    // A product of the same form shares the launch, one of another has its own; neither changes the experts.
    let other = if format == Format::Bf16 { Format::Q8_0 } else { Format::Bf16 };
    for (form, scale) in [(format, scaling), (other, Scaling::Usual)] {
        for most_planes in [1, MAX_PLANES] {
            let side = Side::new(lab, form, scale, side_shape, rows);
            let mut planes = 0;
            // SAFETY: the buffers are as large as the calls say.
            let both = lab.twice(&inner, || unsafe {
                lab.poison(&side.out);
                planes = experts_up(lab.queue(), &call_up, Some(&side.call(side_shape, rows, most_planes)))
                    .unwrap();
            });
            assert!(both == alone, "{what}: a product beside changes the experts");
            assert!((1..=most_planes).contains(&planes), "{what}");
            side.check(lab, side_shape, rows, planes, &what);
        }
    }
    let inner_values = lab.read_bf16(&inner, groups * rows * width);
    let mut judge = Judge::new(&what);
    for (g, &id) in ids.iter().enumerate() {
        let all: Vec<usize> = (0..2 * width).collect();
        let reference = decode(&up[id as usize], &all);
        for n in 0..rows {
            let w = f64::from(choice.weights[g * 16 + n]);
            for i in 0..width {
                let at = (g * rows + n) * width + i;
                if w == 0.0 {
                    assert_eq!(inner_values[at], 0.0, "{what}");
                    continue;
                }
                let x = &x[n * hidden..][..hidden];
                let (a, asize) = dot(&reference[i].0, &reference[i].1, x);
                let (b, bsize) = dot(&reference[width + i].0, &reference[width + i].1, x);
                let expected = w * gelu(a) * b;
                let bound =
                    |row: usize, size| allowed(hidden, size) + rounding(format, rows, &reference[row].0, x);
                let error = w * (1.2 * bound(i, asize) * b.abs() + a.abs() * bound(width + i, bsize));
                let error = error + w * 1e-5 * (a * b).abs();
                let bound = 1.1 * error + expected.abs() * 2f64.powi(-8) + 1e-12;
                judge.see((id, n, i), inner_values[at], expected, bound);
            }
        }
    }
    judge.finish(4e-3);

    let out = lab.poisoned(MAX_PLANES * rows * hidden * 4);
    for most_planes in [1, MAX_PLANES] {
        let call_down = ExpertsDown {
            weights: packed_down.weights(),
            chosen,
            top_k,
            hidden: inner.ptr(),
            hidden_stride: width,
            rows,
            out: out.ptr(),
            out_stride: hidden,
            most_planes,
        };
        let mut planes = 0;
        lab.twice(&out, || {
            // SAFETY: as above.
            planes = unsafe { experts_down(lab.queue(), &call_down).unwrap() };
        });
        let found = lab.read_f32(&out, planes * rows * hidden);
        let mut judge = Judge::new(&what);
        let pick = if hidden > 600 { picked(hidden) } else { (0..hidden).collect() };
        let reference: Vec<_> = ids.iter().map(|&id| decode(&down[id as usize], &pick)).collect();
        for n in 0..rows {
            for (p, &i) in pick.iter().enumerate() {
                let (mut expected, mut size, mut lost) = (0.0, 0.0, 0.0);
                for g in 0..groups {
                    let x = &inner_values[(g * rows + n) * width..][..width];
                    let (v, s) = dot(&reference[g][p].0, &reference[g][p].1, x);
                    (expected, size) = (expected + v, size + s);
                    lost += rounding(format, rows, &reference[g][p].0, x);
                }
                let sum: f32 = (0..planes).map(|p| found[(p * rows + n) * hidden + i]).sum();
                judge.see((n, i), sum, expected, allowed(groups * width, size) + lost);
            }
        }
        judge.finish(relative(format, rows));
    }
}

#[test]
fn experts_sum_over_whom_each_row_chose() {
    let Some(lab) = Lab::new() else { return };
    for (format, scaling) in KINDS {
        let blocks = format.block_len() == 256;
        let (hidden, width) = if blocks { (512, 256) } else { (448, 192) };
        let side = (275, if blocks { 768 } else { 576 });
        let sizes = Sizes { experts: 11, top_k: 3, hidden, width, side };
        for rows in [1, 5, 8, 13, 16] {
            check_experts(&lab, format, scaling, sizes, rows);
        }
    }
}

#[test]
fn experts_at_the_published_size() {
    let Some(lab) = Lab::new() else { return };
    let sizes = Sizes { experts: 12, top_k: 8, hidden: 2816, width: 704, side: (2816, 2112) };
    for (format, scaling) in [(Format::Fp8E4M3, Scaling::Row), (Format::Nvfp4, Scaling::Usual)] {
        for rows in [1, 3] {
            check_experts(&lab, format, scaling, sizes, rows);
        }
    }
}

/// Each of the two gives the bits that it gives alone.
#[test]
fn the_router_beside_a_product_changes_neither() {
    let Some(lab) = Lab::new() else { return };
    for (format, scaling) in KINDS {
        for (experts, top_k, inputs, width, k, rows) in
            [(128, 8, 2816, 208, 512, 1), (11, 3, 52, 48, 768, 5), (127, 6, 3588, 112, 1280, 16)]
        {
            let what =
                format!("{format} {scaling:?} 2 x {width} x {k} beside {experts} experts, {rows} rows");
            let encoded = matrix(format, scaling, 2 * width, k, 11);
            let packed = Packed::stack(&lab, &[encoded.view("w")]);
            let x: Vec<f32> = random_bf16(rows * k, 4).iter().map(|v| v * 2.0).collect();
            let (device_x, out) = (lab.bf16(&x), lab.poisoned(rows * width * 2));
            let call = Linear {
                weights: packed.weights(),
                x: device_x.ptr(),
                x_stride: k,
                rows,
                out: out.ptr(),
                out_stride: width,
                output: Output::Gated(Gate::GeluTanh),
                most_planes: 1,
            };
            let (w, own, scale) =
                (random(experts * inputs, 31), random(rows * inputs, 32), random(experts, 33));
            let own: Vec<f32> = own.iter().map(|v| v * 4.0 / (inputs as f32).sqrt()).collect();
            let (device_w, device_own, device_scale) = (lab.f32(&w), lab.f32(&own), lab.f32(&scale));
            let all = lab.poisoned(1 << 20);
            let counter = lab.i32(&[0]);
            let beside = Router {
                weights: device_w.ptr(),
                x: device_own.ptr(),
                x_stride: inputs,
                width: inputs,
                rows,
                experts,
                top_k,
                expert_scale: device_scale.ptr(),
                logits: all.ptr(),
                routes: all.ptr().at(64 << 10),
                groups: all.ptr().at(128 << 10),
                group_weight: all.ptr().at(192 << 10),
                counter: counter.ptr(),
            };
            // SAFETY: the buffers are as large as the calls say.
            let routed = lab.twice(&all, || unsafe { router(lab.queue(), &beside).unwrap() });
            // SAFETY: the buffers are as large as the calls say.
            let alone = lab.twice(&out, || unsafe {
                linear(lab.queue(), &call).unwrap();
            });
            // SAFETY: the buffers are as large as the calls say.
            let together = lab.twice(&all, || unsafe {
                lab.poison(&out);
                gated_and_router(lab.queue(), &call, &beside).unwrap();
            });
            assert!(together == routed, "{what}: the router");
            assert_eq!(lab.read_i32(&counter, 1), [0], "{what}: the counter");
            // The product may take another launch shape, so its sums another order: one bf16 step at most.
            let values = |b: &[u8]| -> Vec<f64> {
                b.as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f64()).collect()
            };
            let found = values(&lab.read(&out, rows * width * 2));
            for (i, (f, e)) in found.iter().zip(values(&alone)).enumerate() {
                let allowed = 2f64.powi(-7) * e.abs() + 1e-4;
                assert!((f - e).abs() <= allowed, "{what}: {i}: {f} for {e}");
            }
        }
    }
}
