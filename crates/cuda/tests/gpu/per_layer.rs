//! The per-layer branch in one kernel, against float64 with the kernel's two roundings to bf16.

use half::bf16;
use lapidary_cuda::driver::{Block, DevPtr};
use lapidary_cuda::kernels::per_layer::{PerLayer, per_layer};
use lapidary_cuda::kernels::producers::{Branch, NormOut, Residual, residual};
use lapidary_cuda::kernels::skinny_gemm::Gate;
use lapidary_formats::{Format, Scaling};

use crate::lab::{Judge, Lab, Packed, decode, dot, matrix, random};
use crate::skinny_gemm::{allowed, every_kind, gelu};

const EPS: f32 = 1e-6;

fn rms(x: &[f64], gain: &[f32]) -> Vec<f64> {
    let f = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt();
    x.iter().zip(gain).map(|(v, &g)| v * f * f64::from(g)).collect()
}

fn rounded(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&v| bf16::from_f64(v).to_f32()).collect()
}

/// One call at `width`, with an output of `out_kind`: 0 none, 1 bf16 normed, 2 float32 normed with a bf16 copy, 3 float32
/// as it is.
fn branch(lab: &Lab, format: Format, scaling: Scaling, width: usize, planes: usize, out_kind: usize) {
    let rows = 1;
    let what = format!("{format} {scaling:?} width {width}, {planes} planes, out {out_kind}");
    let (gate, projection) =
        (matrix(format, scaling, 256, width, 31), matrix(format, scaling, width, 256, 32));
    let (gate, projection) = (gate.view("gate"), projection.view("projection"));
    let packed = [&gate, &projection].map(|v| Packed::stack(lab, std::slice::from_ref(v)));
    let (stride, times_stride) = (width + 8, 3 * 256 + 12);
    let (x, y) = (random(rows * stride, 1), random(planes * rows * stride, 2));
    let times: Vec<f32> = random(rows * times_stride, 3).iter().map(|v| v * 2.0).collect();
    let gain = |seed| -> Vec<f32> { random(width, seed).iter().map(|v| 1.0 + 0.3 * v).collect() };
    let gains = [gain(4), gain(5), gain(6)];
    let (device_y, device_times) = (lab.f32(&y), lab.f32(&times));
    let device_gains = gains.each_ref().map(|g| lab.f32(g));
    let [out, copy] = [0; 2].map(|_| lab.poisoned(rows * stride * 4));
    let [apart, apart_copy] = [0; 2].map(|_| lab.poisoned(rows * stride * 4));
    // What is made of the residual, into these two buffers.
    let outs = |out: &Block, copy: &Block| {
        let gain = if out_kind == 3 { DevPtr::NULL } else { device_gains[2].ptr() };
        let to = |p: &Block, bf16| NormOut { p: p.ptr(), gain, stride: stride as i32, bf16 };
        match out_kind {
            0 => [NormOut::NONE; 2],
            2 => [to(out, 0), to(copy, 1)],
            kind => [to(out, i32::from(kind == 1)), NormOut::NONE],
        }
    };
    let scalar = 0.7;
    let run = || {
        let device_x = lab.f32(&x);
        lab.poison(&out);
        lab.poison(&copy);
        let call = PerLayer {
            x: device_x.ptr(),
            x_out: device_x.ptr(),
            width,
            y: Branch {
                p: device_y.ptr(),
                gain: DevPtr::NULL,
                plane_stride: (rows * stride) as u64,
                planes: planes as i32,
                stride: stride as i32,
            },
            post: (device_gains[0].ptr(), EPS),
            gate: packed[0].weights(),
            activation: Gate::GeluTanh,
            times: device_times.ptr().at(256 * 4),
            projection: packed[1].weights(),
            close: (device_gains[1].ptr(), EPS),
            scalar,
            outs: outs(&out, &copy),
            out_eps: EPS,
        };
        // SAFETY: the buffers are as large as the call says.
        unsafe { per_layer(lab.queue(), &call).unwrap() };
        let made = [&out, &copy].map(|b| lab.read(b, rows * stride * 4));
        // The residual normed by itself, as one that was steered is, has the same bits.
        let [first, second] = outs(&apart, &apart_copy);
        let alone = Residual {
            x: device_x.ptr(),
            x_out: device_x.ptr(),
            x_stride: stride,
            rows,
            width,
            y: Branch::NONE,
            z: Branch::NONE,
            post: DevPtr::NULL,
            scalar: 1.0,
            eps: EPS,
            outs: [first, second, NormOut::NONE],
        };
        // SAFETY: as above.
        unsafe { residual(lab.queue(), &alone).unwrap() };
        let normed_alone = [&apart, &apart_copy].map(|b| lab.read(b, rows * stride * 4));
        assert!(made == normed_alone, "{what}: normed where it is made and by itself");
        (lab.read_f32(&device_x, rows * stride), made)
    };
    let (found, bytes) = run();
    assert!(run() == (found.clone(), bytes.clone()), "{what}: two runs differ");
    let outs: Vec<f32> = match out_kind {
        1 => lab.read_bf16(&out, rows * stride),
        _ => lab.read_f32(&out, rows * stride),
    };
    let all: Vec<usize> = (0..width).collect();
    let (gate, projection) = (decode(&gate, &all[..256]), decode(&projection, &all));
    let mut judges = [Judge::new(format!("x {what}")), Judge::new(format!("out {what}"))];
    for r in 0..rows {
        let at = r * stride;
        let sum: Vec<f64> =
            (0..width).map(|i| (0..planes).map(|p| f64::from(y[p * rows * stride + at + i])).sum()).collect();
        let x1: Vec<f64> =
            x[at..at + width].iter().zip(rms(&sum, &gains[0])).map(|(&a, b)| f64::from(a) + b).collect();
        let input = rounded(&x1);
        let mut errors = Vec::new();
        let hidden: Vec<f64> = (0..256)
            .map(|i| {
                let (g, size) = dot(&gate[i].0, &gate[i].1, &input);
                let t = f64::from(times[r * times_stride + 256 + i]);
                // A value of x1 that float32 and float64 round to different bf16 moves by 2^-8 of itself: a few of them at most.
                let most =
                    gate[i].0.iter().zip(&input).map(|(w, x)| f64::from((w * x).abs())).fold(0.0, f64::max);
                errors.push(
                    (1.2 * (allowed(width, size) + 3.0 * most * 2f64.powi(-8)) + 1e-5 * g.abs()) * t.abs(),
                );
                gelu(g) * t
            })
            .collect();
        let h = rounded(&hidden);
        let (mut branch, mut off) = (Vec::new(), 0.0f64);
        for (w, sizes) in &projection {
            let (v, size) = dot(w, sizes, &h);
            branch.push(v);
            // h may be rounded to its neighbour wherever its error lets it, 2^-8 of it: taken as independent signs, four of their deviation.
            let wander = w.iter().zip(&h).zip(&errors).map(|((&w, &h), e)| {
                let step = f64::from(h).abs() * 2f64.powi(-8);
                let chance = (e / (step + 1e-30)).min(1.0);
                (f64::from(w) * (e + step * chance.sqrt())).powi(2)
            });
            off = off.max(allowed(256, size) + 4.0 * wander.sum::<f64>().sqrt());
        }
        let size = (branch.iter().map(|v| v * v).sum::<f64>() / width as f64).sqrt();
        let x2: Vec<f64> =
            x1.iter().zip(rms(&branch, &gains[1])).map(|(a, b)| (a + b) * f64::from(scalar)).collect();
        let normed = if out_kind == 3 { x2.clone() } else { rms(&x2, &gains[2]) };
        for i in 0..width {
            let near = |v: f64| 4e-5 * (v.abs() + 1.0) + 2.0 * off / size;
            judges[0].see((r, i), found[at + i], x2[i], near(x2[i]));
            if out_kind > 0 {
                let rounding = if out_kind == 1 { normed[i].abs() * 2f64.powi(-8) } else { 0.0 };
                judges[1].see((r, i), outs[at + i], normed[i], 2.0 * near(normed[i]) + rounding);
            }
        }
        // What lies beyond a row stays as it was.
        assert!(found[at + width..at + stride] == x[at + width..at + stride], "{what}");
        if out_kind > 1 {
            assert!(outs[at + width..at + stride].iter().all(|v| v.to_bits() == u32::MAX), "{what}");
        }
    }
    let [x, out] = judges;
    x.finish(1e-3);
    if out_kind > 0 {
        out.finish(5e-3);
    }
}

#[test]
fn the_per_layer_branch_is_its_four_steps() {
    every_kind(|lab, format, scaling| {
        branch(lab, format, scaling, 1536, 2, 1);
        branch(lab, format, scaling, 2560, 3, 1);
        branch(lab, format, scaling, 3072, 1, 2);
        // Fewer strips than blocks, and blocks without any.
        branch(lab, format, scaling, if format.block_len() == 256 { 768 } else { 448 }, 1, 3);
        branch(lab, format, scaling, 256, 3, 0);
    });
}

#[test]
fn shapes_that_the_branch_does_not_take_are_refused_by_name() {
    let Some(lab) = Lab::new() else { return };
    let (gate, projection) = (
        matrix(Format::Bf16, Scaling::Usual, 128, 512, 1),
        matrix(Format::Bf16, Scaling::Usual, 512, 128, 2),
    );
    let packed = [gate.view("g"), projection.view("p")].map(|v| Packed::stack(&lab, &[v]));
    let nowhere = DevPtr::NULL;
    let call = PerLayer {
        x: nowhere,
        x_out: nowhere,
        width: 512,
        y: Branch::NONE,
        post: (nowhere, EPS),
        gate: packed[0].weights(),
        activation: Gate::Silu,
        times: nowhere,
        projection: packed[1].weights(),
        close: (nowhere, EPS),
        scalar: 1.0,
        outs: [NormOut::NONE; 2],
        out_eps: EPS,
    };
    // SAFETY: nothing is launched.
    let error = unsafe { per_layer(lab.queue(), &call).unwrap_err() };
    assert!(error.to_string().contains("per_layer"), "{error}");
}
