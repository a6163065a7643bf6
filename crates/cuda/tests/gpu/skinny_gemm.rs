//! Products with packed weights, against float64.
//!
//! Allowed error of one sum. Products are exact (8 bits of x by at most 8 of a weight or code). A tensor core adds
//! 16 products and the sum so far with at most 2^-23 of the largest of them lost; a warp has at most k / 16 such steps (and 32
//! more roundings: block scales, the warps' sums, the row's scale). Every intermediate is at most the sum of the
//! magnitudes, so `(k / 16 + 32) 2^-23 sum |w x|` holds always. Errors that size never add up in one direction; taken
//! together they stay below 2e-5, or for codes stored with an offset that much of the larger sums.
//!
//! One row of x goes to forms of four bits as integers and to FP8 as f16 ([`rounding`]), which adds its own error.

use half::bf16;
use lapidary_cuda::kernels::skinny_gemm::{Gate, Linear, MAX_PLANES, Output, linear};
use lapidary_formats::{Format, Scaling};

use crate::lab::{Judge, Lab, Packed, decode, dot, matrix, random, random_bf16};

pub const KINDS: [(Format, Scaling); 18] = [
    (Format::Bf16, Scaling::Usual),
    (Format::Fp8E4M3, Scaling::Tensor),
    (Format::Fp8E4M3, Scaling::Row),
    (Format::Fp8E4M3, Scaling::Block128),
    (Format::Nvfp4, Scaling::Usual),
    (Format::GgufNvfp4, Scaling::Tensor),
    (Format::Q4_0, Scaling::Usual),
    (Format::Int4G32, Scaling::Usual),
    (Format::Q4_1, Scaling::Usual),
    (Format::Q8_0, Scaling::Usual),
    (Format::Q5_0, Scaling::Usual),
    (Format::Iq4Nl, Scaling::Usual),
    (Format::Q5_1, Scaling::Usual),
    (Format::Q4K, Scaling::Usual),
    (Format::Q5K, Scaling::Usual),
    (Format::Q6K, Scaling::Usual),
    (Format::Q3K, Scaling::Usual),
    (Format::Iq4Xs, Scaling::Usual),
];

/// `check` for every kind, each in its own thread and stream: the time goes into the float64 sums.
pub fn every_kind(check: impl Fn(&Lab, Format, Scaling) + Sync) {
    if Lab::new().is_none() {
        return;
    }
    std::thread::scope(|s| {
        for (format, scaling) in KINDS {
            let check = &check;
            s.spawn(move || check(&Lab::new().expect("there was one"), format, scaling));
        }
    });
}

pub fn allowed(k: usize, size: f64) -> f64 {
    (k / 16 + 32) as f64 * 2f64.powi(-23) * size + 1e-30
}

/// What one row of x loses on its way to a form of four bits or to FP8: `sum |w| |x - x'|` at most. A block's inputs become integers
/// under a power of two `u`, the largest of them at least 127.5 x 2^7 u: rounding loses u / 2 of an input, and nothing of one with eight significant
/// bits above u, which all have that are 2^-6 of the largest. For FP8 the largest input of all becomes an f16 of at least 1/2, and of small ones those
/// below 2^-17 lose up to 2^-25.
pub fn rounding(format: Format, rows: usize, w: &[f32], x: &[f32]) -> f64 {
    if format == Format::Fp8E4M3 && rows == 1 {
        let most = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let small = w.iter().zip(x).filter(|(_, x)| x.abs() < most * 2f32.powi(-16));
        return small.map(|(w, _)| f64::from(w.abs() * most) * 2f64.powi(-24)).sum();
    }
    let block = match format {
        Format::Nvfp4 | Format::GgufNvfp4 => 16,
        Format::Q4_0 | Format::Int4G32 | Format::Q4_1 | Format::Q4K => 32,
        _ => return 0.0,
    };
    if rows > 1 {
        return 0.0;
    }
    let of_block = |(w, x): (&[f32], &[f32])| {
        let most = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let lost = f64::from(most) / (127.5 * 256.0);
        let small = w.iter().zip(x).filter(|(_, x)| x.abs() < most / 64.0);
        small.map(|(w, _)| f64::from(w.abs()) * lost).sum::<f64>()
    };
    w.chunks(block).zip(x.chunks(block)).map(of_block).sum()
}

pub fn gelu(u: f64) -> f64 {
    0.5 * u * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (u + 0.044715 * u * u * u)).tanh())
}

/// Some rows of a tall matrix: the first and last strip, and every 97th.
pub fn picked(m: usize) -> Vec<usize> {
    (0..m).filter(|&i| m <= 200 || i < 16 || i + 20 > m || i % 97 == 0).collect()
}

/// Plain products at `rows` rows of `m x k`, in planes and not, in float32 and bf16, with softcap.
fn plain(lab: &Lab, format: Format, scaling: Scaling, m: usize, k: usize, rows: usize) {
    let what = format!("{format} {scaling:?} {m} x {k}, {rows} rows");
    let encoded = matrix(format, scaling, m, k, 7);
    let view = encoded.view("w");
    let packed = Packed::stack(lab, std::slice::from_ref(&view));
    let (x_stride, out_stride) = (k.next_multiple_of(8) + 24, m + 5);
    let x = random_bf16(rows * x_stride, 3);
    let device_x = lab.bf16(&x);
    let pick = picked(m);
    let reference = decode(&view, &pick);
    let call = |out: &lapidary_cuda::driver::Block, output, most_planes| Linear {
        weights: packed.weights(),
        x: device_x.ptr(),
        x_stride,
        rows,
        out: out.ptr(),
        out_stride,
        output,
        most_planes,
    };
    for most_planes in [1, MAX_PLANES] {
        let out = lab.poisoned(MAX_PLANES * rows * out_stride * 4);
        let mut planes = 0;
        let bytes = lab.twice(&out, || {
            // SAFETY: the buffers are as large as the call says.
            planes = unsafe {
                linear(lab.queue(), &call(&out, Output::F32 { softcap: 0.0 }, most_planes)).unwrap()
            };
        });
        let out: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        let mut judge = Judge::new(&what);
        let mut wide = 0.0f64;
        for n in 0..rows {
            for (&i, (w, sizes)) in pick.iter().zip(&reference) {
                let sum: f32 = (0..planes).map(|p| out[(p * rows + n) * out_stride + i]).sum();
                let x = &x[n * x_stride..][..k];
                let (expected, size) = dot(w, sizes, x);
                wide = wide.max(size / expected.abs().max(size * 1e-2));
                judge.see((n, i), sum, expected, allowed(k, size) + rounding(format, rows, w, x));
            }
            // Nothing beyond the matrix's outputs is touched.
            let beyond = &out[n * out_stride + m..(n + 1) * out_stride];
            assert!(beyond.iter().all(|v| v.to_bits() == u32::MAX), "{what}");
        }
        judge.finish(if matches!(format, Format::Q5_0 | Format::Q6K | Format::Q3K) { 1e-4 } else { 2e-5 });
    }
    let out = lab.poisoned(rows * out_stride * 4);
    for softcap in [false, true] {
        let output = if softcap { Output::F32 { softcap: 0.3 } } else { Output::Bf16 };
        // SAFETY: as above.
        unsafe { linear(lab.queue(), &call(&out, output, 1)).unwrap() };
        let values = if softcap {
            lab.read_f32(&out, rows * out_stride)
        } else {
            lab.read_bf16(&out, rows * out_stride)
        };
        let mut judge = Judge::new(&what);
        for n in 0..rows {
            for (&i, (w, sizes)) in pick.iter().zip(&reference) {
                let x = &x[n * x_stride..][..k];
                let (sum, size) = dot(w, sizes, x);
                let lost = rounding(format, rows, w, x);
                // tanhf errs by 2 ulp at most; a bf16 is within 2^-8 of its value.
                let (expected, rounding) = match softcap {
                    true => (0.3 * (sum / 0.3).tanh(), 1e-6),
                    false => (sum, sum.abs() * 2f64.powi(-8)),
                };
                judge.see((n, i), values[n * out_stride + i], expected, allowed(k, size) + lost + rounding);
            }
        }
        judge.finish(4e-3);
    }
}

#[test]
fn every_form_at_odd_sizes() {
    every_kind(|lab, format, scaling| {
        for rows in [1, 2, 3, 5, 8] {
            plain(lab, format, scaling, 157, 3 * 256, rows);
        }
        for rows in [9, 13, 16] {
            plain(lab, format, scaling, 336, 5 * 256, rows);
        }
        if format.block_len() <= 32 {
            // Not whole chunks of 64.
            plain(lab, format, scaling, 45, 32 * 9, 4);
            plain(lab, format, scaling, 45, 32 * 9, 1);
        }
    });
}

#[test]
fn every_form_at_gemma_widths() {
    every_kind(|lab, format, scaling| {
        plain(lab, format, scaling, 2560, 1536, 1);
        plain(lab, format, scaling, 1536, 12288, 1);
        plain(lab, format, scaling, 2816, 4096, 7);
        plain(lab, format, scaling, 1536, 2048, 16);
        if format.block_len() < 256 {
            plain(lab, format, scaling, 2816, 2112, 1);
        }
        let large = [Format::Bf16, Format::Nvfp4, Format::Q8_0, Format::Q4K, Format::Q6K];
        if large.contains(&format) || scaling == Scaling::Row {
            plain(lab, format, scaling, 5376, 21504, 1);
            plain(lab, format, scaling, 16384, 5376, 1);
            plain(lab, format, scaling, 5376, 8192, 8);
            plain(lab, format, scaling, 8192, 2816, 16);
        }
    });
}

#[test]
fn gate_and_up_are_multiplied_where_they_meet() {
    let Some(lab) = Lab::new() else { return };
    for (format, scaling) in KINDS {
        for (width, k, rows, gate) in
            [(48, 768, 1, Gate::GeluTanh), (208, 512, 6, Gate::Silu), (112, 1280, 11, Gate::GeluTanh)]
        {
            let what = format!("{format} {scaling:?} 2 x {width} x {k}, {rows} rows");
            let encoded = matrix(format, scaling, 2 * width, k, 11);
            let view = encoded.view("w");
            let packed = Packed::stack(&lab, std::slice::from_ref(&view));
            let x: Vec<f32> = random_bf16(rows * k, 4).iter().map(|v| v * 2.0).collect();
            let (device_x, out) = (lab.bf16(&x), lab.poisoned(rows * width * 2));
            let times = random(rows * (2 * width + 3), 9);
            let device_times = lab.f32(&times);
            let mut call = Linear {
                weights: packed.weights(),
                x: device_x.ptr(),
                x_stride: k,
                rows,
                out: out.ptr(),
                out_stride: width,
                output: Output::Gated(gate),
                most_planes: 1,
            };
            // SAFETY: the buffers are as large as the call says.
            lab.twice(&out, || unsafe {
                linear(lab.queue(), &call).unwrap();
            });
            let found = lab.read_bf16(&out, rows * width);
            let all: Vec<usize> = (0..2 * width).collect();
            let reference = decode(&view, &all);
            let f = |u: f64| if gate == Gate::Silu { u / (1.0 + (-u).exp()) } else { gelu(u) };
            let mut judge = Judge::new(&what);
            for n in 0..rows {
                let x = &x[n * k..][..k];
                for i in 0..width {
                    let (g, gs) = dot(&reference[i].0, &reference[i].1, x);
                    let (u, us) = dot(&reference[width + i].0, &reference[width + i].1, x);
                    let bound =
                        |row: usize, size| allowed(k, size) + rounding(format, rows, &reference[row].0, x);
                    // Both activations have slopes below 1.13; exp and tanh err by a few ulp.
                    let error =
                        1.2 * bound(i, gs) * u.abs() + g.abs() * bound(width + i, us) + 1e-5 * (g * u).abs();
                    let expected = f(g) * u;
                    judge.see(
                        (n, i),
                        found[n * width + i],
                        expected,
                        1.1 * error + expected.abs() * 2f64.powi(-8) + 1e-12,
                    );
                }
            }
            judge.finish(4e-3);

            // The same matrix as a gate for something else.
            let gated = lab.poisoned(rows * 2 * width * 2);
            call.output = Output::GateTimes { gate, times: device_times.ptr(), stride: 2 * width + 3 };
            (call.out, call.out_stride) = (gated.ptr(), 2 * width);
            // SAFETY: as above.
            unsafe { linear(lab.queue(), &call).unwrap() };
            let found = lab.read_bf16(&gated, rows * 2 * width);
            let mut judge = Judge::new(&what);
            for n in 0..rows {
                for i in 0..2 * width {
                    let x = &x[n * k..][..k];
                    let (g, gs) = dot(&reference[i].0, &reference[i].1, x);
                    let bound = allowed(k, gs) + rounding(format, rows, &reference[i].0, x);
                    let t = f64::from(times[n * (2 * width + 3) + i]);
                    let (expected, error) = (f(g) * t, (1.2 * bound + 1e-5 * g.abs()) * t.abs());
                    judge.see(
                        (n, i),
                        found[n * 2 * width + i],
                        expected,
                        1.1 * error + expected.abs() * 2f64.powi(-8) + 1e-12,
                    );
                }
            }
            judge.finish(4e-3);
        }
    }
}

/// What an input becomes, by its place.
type Inputs<'a> = &'a dyn Fn(usize, f32) -> f32;
/// A row of weights and its sizes, as [`decode`] gives them.
type Row = (Vec<f32>, Vec<f32>);

/// One row's sums of a matrix of every format for which x is brought into another, for inputs made from the random ones by their place.
fn one_row(x_of: impl Fn(usize, f32) -> f32, see: impl Fn(&str, Format, &[f32], &Row, f32)) {
    let Some(lab) = Lab::new() else { return };
    for (format, scaling) in [
        (Format::Fp8E4M3, Scaling::Row),
        (Format::Fp8E4M3, Scaling::Block128),
        (Format::Nvfp4, Scaling::Usual),
        (Format::GgufNvfp4, Scaling::Usual),
        (Format::Q4_0, Scaling::Usual),
        (Format::Int4G32, Scaling::Usual),
        (Format::Q4_1, Scaling::Usual),
        (Format::Q4K, Scaling::Usual),
    ] {
        let (m, k) = (77, 5 * 256);
        let encoded = matrix(format, scaling, m, k, 13);
        let view = encoded.view("w");
        let packed = Packed::stack(&lab, std::slice::from_ref(&view));
        let x: Vec<f32> = random_bf16(k, 5).into_iter().enumerate().map(|(i, v)| x_of(i, v)).collect();
        let x: Vec<f32> = x.into_iter().map(|v| bf16::from_f32(v).to_f32()).collect();
        let (device_x, out) = (lab.bf16(&x), lab.poisoned(m * 4));
        let call = Linear {
            weights: packed.weights(),
            x: device_x.ptr(),
            x_stride: k,
            rows: 1,
            out: out.ptr(),
            out_stride: m,
            output: Output::F32 { softcap: 0.0 },
            most_planes: 1,
        };
        // SAFETY: the buffers are as large as the call says.
        unsafe { linear(lab.queue(), &call).unwrap() };
        let found = lab.read_f32(&out, m);
        let all: Vec<usize> = (0..m).collect();
        for (i, w) in decode(&view, &all).iter().enumerate() {
            see(&format!("{format} {scaling:?}, output {i}"), format, &x, w, found[i]);
        }
    }
}

#[test]
fn one_row_of_any_finite_inputs_is_multiplied_within_its_rounding() {
    // The largest bf16 below a power of two does not fit the integers of that power; 2^-133 is the least bf16.
    let largest = 255.0 / 128.0;
    let cases: [(&str, Inputs); 9] = [
        ("zeros", &|_, _| 0.0),
        ("zeros but for a block", &|i, v| if i / 32 == 7 { v } else { 0.0 }),
        ("one input far above its block's", &|i, v| if i % 32 == 9 { 5e4 * v } else { v }),
        ("one input far above all", &|i, v| if i == 333 { 2f32.powi(100) } else { v }),
        ("only the largest mantissa", &|i, v| largest * v.signum() * 2f32.powi((i / 32) as i32 - 20)),
        ("the largest mantissa above others", &|i, v| if i % 16 == 3 { -largest } else { v }),
        ("huge", &|_, v| v * 2f32.powi(110)),
        ("tiny", &|_, v| v * 2f32.powi(-110)),
        ("subnormal", &|i, v| v.signum() * 2f32.powi(-127 - (i % 7) as i32)),
    ];
    for (name, x_of) in cases {
        one_row(x_of, |what, format, x, (w, sizes), found| {
            let (expected, size) = dot(w, sizes, x);
            // Below 2^-112 the integers' power of two stays at 2^-126.
            let least = w.iter().map(|w| f64::from(w.abs())).sum::<f64>() * 2f64.powi(-127);
            let sum = (x.len() / 16 + 32) as f64 * 2f64.powi(-23) * size;
            let bound = sum + rounding(format, 1, w, x) + least + 1e-44;
            let error = (f64::from(found) - expected).abs();
            assert!(error <= bound, "{name}, {what}: {found:e} for {expected:e}, {bound:e} is allowed");
        });
    }
}

#[test]
fn one_row_with_an_input_that_is_no_number_gives_none() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 77, 1279] {
            let x_of = |i, v| if i == at { bad } else { v };
            one_row(x_of, |what, _, _, _, found| {
                assert!(!found.is_finite(), "{bad} as input {at}, {what}: {found}");
            });
        }
    }
}

#[test]
fn what_a_product_does_not_take_is_refused_by_name() {
    let Some(lab) = Lab::new() else { return };
    let encoded = matrix(Format::Bf16, Scaling::Usual, 40, 64, 1);
    let view = encoded.view("w");
    let packed = Packed::stack(&lab, std::slice::from_ref(&view));
    let x = lab.bf16(&vec![bf16::ONE.to_f32(); 64 * 17]);
    let out = lab.poisoned(17 * 40 * 4);
    let good = Linear {
        weights: packed.weights(),
        x: x.ptr(),
        x_stride: 64,
        rows: 1,
        out: out.ptr(),
        out_stride: 40,
        output: Output::Bf16,
        most_planes: 1,
    };
    let bad = [
        (Linear { rows: 33, ..good }, "33 rows"),
        (Linear { x_stride: 65, ..good }, "multiples of 8"),
        (Linear { output: Output::Gated(Gate::Silu), ..good }, "gate and up of 40"),
    ];
    for (call, says) in bad {
        // SAFETY: refused before anything is launched.
        let error = unsafe { linear(lab.queue(), &call).unwrap_err() };
        assert!(error.to_string().contains(says), "{error}");
    }
}
