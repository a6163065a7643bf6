//! The fast mode: int8 activations, packed weights, mixed formats, and the rule that a row's bits are its own.

mod common;

use common::*;
use lapidary_cpu::{Compute, CpuOptions, Level};
use lapidary_formats::{Encoded, encode_rows};
use lapidary_ops::*;

fn fast(threads: usize, level: Level) -> CpuOptions {
    CpuOptions { level: Some(level), compute: Compute::Fast, ..options(threads) }
}

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

/// Formats whose products take float32 activations in every mode.
fn takes_floats(format: Format) -> bool {
    matches!(format, Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8E4M3)
}

/// Whether inputs are rounded to bf16 for products with this format.
fn rounds_to_bf16(format: Format, level: Level) -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has && level == Level::Avx512 && matches!(format, Format::Bf16 | Format::Fp8E4M3)
}

#[test]
fn the_error_of_a_product_is_the_rounding_of_its_inputs() {
    for level in levels() {
        for format in Format::ALL {
            // 208 inputs end in half a block, which only NVFP4 of the block formats has.
            for (rows, k) in [(33, 96usize), (50, 640), (16, 704), (5, 2112), (19, 256), (3, 768), (21, 208)]
            {
                if !k.is_multiple_of(format.block_len()) {
                    continue;
                }
                let mut rig = Rig::new(fast(2, level));
                let encoded = weights(format, rows, k, 3);
                let view = encoded.view("matrix");
                let w = rig.cpu.pack(std::slice::from_ref(&view), rows).expect("a valid matrix");
                let (x, input, out) = (rig.act(k), rig.input(k), rig.act(rows));
                let (n, soft) = (70, values(70 * k, 5));
                rig.rows(n, &soft);
                rig.run(&|ops| {
                    ops.inject_soft(x);
                    ops.cast(input, x);
                    ops.linear(out, input, w);
                });
                let found = rig.read(out, n);
                let w = decoded(&view);
                let (mut error, mut expected) = (0.0, 0.0);
                for (i, x) in soft.chunks_exact(k).enumerate() {
                    for (j, w) in w.chunks_exact(k).enumerate() {
                        let mut exact = 0.0f64;
                        let (mut most, mut size, mut variance) = (0.0f64, 0.0f64, 0.0f64);
                        for (x, w) in x.chunks(32).zip(w.chunks(32)) {
                            let largest = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                            // Codes are off by half a step at most, evenly spread: variance step^2 / 12.
                            let step = f64::from(largest) / 127.0;
                            for (x, w) in x.iter().zip(w) {
                                let (x, w) = (f64::from(*x), f64::from(*w));
                                exact += x * w;
                                size += (x * w).abs();
                                most += step * 0.5001 * w.abs();
                                variance += step * step / 12.0 * w * w;
                            }
                        }
                        if takes_floats(format) || !k.is_multiple_of(32) {
                            (most, variance) = (0.0, 0.0);
                        }
                        if rounds_to_bf16(format, level) {
                            for (x, w) in x.iter().zip(w) {
                                // Half of the last of eight bits.
                                let step = 2f64.powi(x.abs().log2().floor() as i32 - 7);
                                most += 0.5 * step * f64::from(w.abs());
                                variance += step * step / 12.0 * f64::from(*w).powi(2);
                            }
                        }
                        // Float sums: 64 stands for the parts of formats with offsets, larger than their terms.
                        let rounding = 64.0 * size * (k as f64 / 8.0 + 6.0) * EPS;
                        let e = f64::from(found[i * rows + j]) - exact;
                        assert!(
                            e.abs() <= most + rounding,
                            "{level} {format} {k} [{i}, {j}]: off by {e}, bound {most} + {rounding}"
                        );
                        error += e * e;
                        expected += variance + rounding * rounding;
                    }
                }
                // Over all outputs the error is that of rounding, within sampling error.
                assert!(error <= 1.3 * expected, "{level} {format} {k}: {error}, expected {expected}");
            }
        }
    }
}

/// Stacked parts of different formats, as a checkpoint's q, k and v may be.
fn mixed(k: usize) -> Vec<Encoded> {
    let formats: &[(Format, usize)] = if k.is_multiple_of(256) {
        &[
            (Format::Q4K, 37),
            (Format::Q6K, 21),
            (Format::Bf16, 5),
            (Format::Q5K, 16),
            (Format::Q2K, 19),
            (Format::GgufNvfp4, 33),
        ]
    } else {
        &[
            (Format::Q5_0, 37),
            (Format::Q8_0, 21),
            (Format::F16, 5),
            (Format::Q4_1, 16),
            (Format::Mxfp4, 19),
            (Format::Nvfp4, 33),
            (Format::Int4G32, 9),
        ]
    };
    let encoded = |(i, &(format, rows)): (usize, &(Format, usize))| weights(format, rows, k, i as u64 + 11);
    formats.iter().enumerate().map(encoded).collect()
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch_and_team() {
    for level in levels() {
        for k in [160, 512] {
            let parts = mixed(k);
            let views: Vec<_> = parts.iter().map(|p| p.view("part")).collect();
            let rows = views.iter().map(|v| v.rows).sum();
            let soft = values(257 * k, 5);
            let mut alone: Vec<f32> = Vec::new();
            for workers in 1..=3 {
                let mut rig = Rig::new(fast(workers, level));
                let w = rig.cpu.pack(&views, rows).expect("a valid matrix");
                let gain = rig.gain(&values(k, 9));
                let (x, input, out) = (rig.act(k), rig.input(k), rig.act(rows));
                let mut run = |from: usize, n: usize| {
                    rig.rows(n, &soft[from * k..(from + n) * k]);
                    rig.run(&|ops| {
                        ops.inject_soft(x);
                        ops.rms_norm(input, x, Norm { gain, eps: 1e-6 });
                        ops.linear(out, input, w);
                    });
                    rig.read(out, n)
                };
                if alone.is_empty() {
                    alone = (0..257).flat_map(|r| run(r, 1)).collect();
                }
                for n in (1..=33).chain([64, 65, 129, 257]) {
                    assert_bits(&format!("{level} {k} {n} rows"), &run(0, n), &alone[..n * rows]);
                }
            }
        }
    }
}

#[test]
fn the_fused_gate_has_the_bits_of_its_two_verbs() {
    for level in levels() {
        for compute in [Compute::Fast, Compute::F32] {
            for (k, width, format) in [
                (160, 96, Format::Q5_0),
                (96, 352, Format::Bf16),
                (256, 2112, Format::Q4K),
                (96, 72, Format::Q8_0),
            ] {
                for workers in 1..=3 {
                    let mut rig = Rig::new(CpuOptions { compute, ..fast(workers, level) });
                    let (gate, up) = (weights(format, width, k, 3), weights(Format::Q8_0, width, k, 4));
                    let parts = [gate.view("gate"), up.view("up")];
                    let w = rig.cpu.pack(&parts, 2 * width).expect("a valid matrix");
                    let down = weights(Format::F32, 7, width, 6);
                    let down = rig.cpu.pack(&[down.view("down")], 7).expect("a valid matrix");
                    let small = if width.is_multiple_of(32) { Format::Q4_0 } else { Format::F32 };
                    let small = weights(small, 7, width, 7);
                    let small = rig.cpu.pack(&[small.view("small")], 7).expect("a valid matrix");
                    let (x, input, stacked) = (rig.act(k), rig.input(k), rig.act(2 * width));
                    let (a, b) = (rig.input(width), rig.input(width));
                    let outs = [rig.act(7), rig.act(7), rig.act(7), rig.act(7)];
                    for n in [1, 2, 67] {
                        rig.rows(n, &values(n * k, 5));
                        rig.run(&|ops| {
                            ops.inject_soft(x);
                            ops.cast(input, x);
                            ops.gated_linear(a, stacked, input, w, Activation::GeluTanh);
                            ops.linear(stacked, input, w);
                            ops.geglu(b, stacked, Activation::GeluTanh);
                            // The floats and the int8 blocks of both.
                            ops.linear(outs[0], a, down);
                            ops.linear(outs[1], b, down);
                            ops.linear(outs[2], a, small);
                            ops.linear(outs[3], b, small);
                        });
                        let read = outs.map(|o| rig.read(o, n));
                        assert_bits(&format!("{level} {format} {n} floats"), &read[0], &read[1]);
                        assert_bits(&format!("{level} {format} {n} blocks"), &read[2], &read[3]);
                        assert!(read[0].iter().any(|&v| v != 0.0));
                    }
                }
            }
        }
    }
}

#[test]
fn grouping_rows_by_expert_changes_no_bit_and_little_value() {
    let (experts, k) = (9, 4);
    // Whole tiles and blocks; a gate and up border inside a tile; a width of no whole blocks.
    for (hidden, width, format, down_format) in [
        (96, 160, Format::Q4_0, Format::Q8_0),
        (256, 96, Format::Q4K, Format::Q5_1),
        (96, 160, Format::Nvfp4, Format::Int4G32),
        (192, 64, Format::GgufNvfp4, Format::GgufNvfp4),
        (96, 72, Format::Q8_0, Format::F32),
    ] {
        for level in levels() {
            let mut alone: Vec<f32> = Vec::new();
            for (compute, workers) in
                [(Compute::Fast, 1), (Compute::Fast, 2), (Compute::Fast, 3), (Compute::F32, 2)]
            {
                let mut rig = Rig::new(CpuOptions { compute, ..fast(workers, level) });
                let gu = weights(format, experts * 2 * width, hidden, 71);
                let dn = weights(down_format, experts * hidden, width, 72);
                let pack = |rig: &mut Rig, m: &Encoded, rows: usize, each: usize| {
                    let all = m.view("experts");
                    let parts: Vec<_> = (0..rows / each).map(|e| all.slice_rows(e * each, each)).collect();
                    rig.cpu.pack(&parts, each).expect("a valid matrix")
                };
                let spec = ExpertSpec {
                    experts,
                    top_k: k,
                    width,
                    gate_up: pack(&mut rig, &gu, experts * 2 * width, 2 * width),
                    down: pack(&mut rig, &dn, experts * hidden, hidden),
                    activation: Activation::GeluTanh,
                };
                let router = rig.matrix(experts, hidden, &values(experts * hidden, 73));
                let scale = rig.gain(&vec![1.0; experts]);
                let (x, input) = (rig.act(hidden), rig.input(hidden));
                let (logits, routes, out) = (rig.act(experts), rig.act(2 * k), rig.act(hidden));
                let rows = 147;
                let soft = values(rows * hidden, 74);
                let mut run = |from: usize, n: usize| {
                    rig.rows(n, &soft[from * hidden..(from + n) * hidden]);
                    rig.run(&|ops| {
                        ops.inject_soft(x);
                        ops.cast(input, x);
                        ops.linear(logits, x, router);
                        ops.route(routes, logits, &RouteSpec { experts, top_k: k, per_expert_scale: scale });
                        ops.experts(out, input, routes, &spec);
                    });
                    rig.read(out, n)
                };
                if alone.is_empty() {
                    alone = (0..rows).flat_map(|r| run(r, 1)).collect();
                }
                if compute == Compute::Fast {
                    for n in [1, 2, 7, 33, rows] {
                        let what = format!("{level} {format} {workers} workers {n} rows");
                        assert_bits(&what, &run(0, n), &alone[..n * hidden]);
                    }
                } else {
                    // Two products of eight-bit inputs: each about 1 / (127 sqrt 12) of evenly spread values'
                    // root mean square 1 / sqrt 3, so half a percent; the product of gate and up doubles it.
                    let exact = run(0, rows);
                    let (mut error, mut size) = (0.0, 0.0);
                    for (a, b) in alone.iter().zip(&exact) {
                        assert!(a.is_finite());
                        error += f64::from(a - b).powi(2);
                        size += f64::from(*b).powi(2);
                    }
                    assert!(error.sqrt() < 0.015 * size.sqrt(), "{level} {format}: {error} of {size}");
                    assert!(error > 0.0 || down_format == Format::F32);
                }
            }
        }
    }
}

/// A file in memory that notes what was asked for.
#[derive(Default)]
struct Wanted {
    bytes: Vec<u8>,
    ranges: std::sync::Mutex<Vec<std::ops::Range<usize>>>,
}

impl AsRef<[u8]> for Wanted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl FileBytes for Wanted {
    fn want(&self, bytes: &[u8]) {
        let start = bytes.as_ptr() as usize - self.bytes.as_ptr() as usize;
        if !bytes.is_empty() {
            self.ranges.lock().expect("no panic holds it").push(start..start + bytes.len());
        }
    }
}

/// The view over bytes of a file: its codes, then the scales beside them.
fn in_file<'a>(view: TensorView<'a>, file: &'a [u8], runs: &[std::ops::Range<usize>; 2]) -> TensorView<'a> {
    let scales = match view.scales {
        Scales::Nvfp4 { tensor, .. } => Scales::Nvfp4 { blocks: &file[runs[1].clone()], tensor },
        Scales::Group32Bf16(_) => Scales::Group32Bf16(&file[runs[1].clone()]),
        other => other,
    };
    TensorView { bytes: &file[runs[0].clone()], scales, ..view }
}

/// Experts that stay in the file have the bits of packed ones; the others' bytes are neither asked for nor read.
#[test]
fn experts_in_the_file_have_the_bits_of_packed_ones_and_only_the_chosen_are_read() {
    let (experts, k) = (11, 3);
    for (hidden, width, format, down_format) in [
        (96, 160, Format::Q4_0, Format::Q8_0),
        (256, 96, Format::Q4K, Format::Nvfp4),
        (64, 96, Format::GgufNvfp4, Format::Int4G32),
        (96, 72, Format::Q8_0, Format::F32),
    ] {
        for level in levels() {
            let gate_up = weights(format, experts * 2 * width, hidden, 71);
            let down = weights(down_format, experts * hidden, width, 72);
            let router = values(experts * hidden, 73);
            let soft = values(5 * hidden, 74);
            let run = |file: Option<FileMap>, gu: &TensorView<'_>, dn: &TensorView<'_>, n: usize, threads| {
                let packed_experts = file.as_ref().map(|_| 0);
                let mut rig = Rig::new(CpuOptions { packed_experts, ..fast(threads, level) });
                rig.cpu.hold(file.as_slice());
                let router = rig.matrix(experts, hidden, &router);
                let before = rig.cpu.memory();
                // Gates and ups are parts of their own, as where a file has them in tensors of their own.
                let halves: Vec<_> = (0..2 * experts).map(|h| gu.slice_rows(h * width, width)).collect();
                let spec = ExpertSpec {
                    experts,
                    top_k: k,
                    width,
                    gate_up: rig.cpu.pack(&halves, 2 * width).expect("a valid matrix"),
                    down: rig.cpu.pack(std::slice::from_ref(dn), hidden).expect("a valid matrix"),
                    activation: Activation::GeluTanh,
                };
                if file.is_some() {
                    assert_eq!(rig.cpu.memory().weights, before.weights, "nothing is held twice");
                    let beside = |v: &TensorView<'_>| match v.scales {
                        Scales::Nvfp4 { blocks, .. } => blocks.len(),
                        Scales::Group32Bf16(bytes) => bytes.len(),
                        _ => 0,
                    };
                    let mapped = gu.bytes.len() + dn.bytes.len() + beside(gu) + beside(dn);
                    assert_eq!(rig.cpu.memory().mapped - before.mapped, mapped);
                }
                let scale = rig.gain(&vec![1.0; experts]);
                let (x, input) = (rig.act(hidden), rig.input(hidden));
                let (logits, routes, out) = (rig.act(experts), rig.act(2 * k), rig.act(hidden));
                rig.rows(n, &soft[..n * hidden]);
                rig.run(&|ops| {
                    ops.inject_soft(x);
                    ops.cast(input, x);
                    ops.linear(logits, x, router);
                    ops.route(routes, logits, &RouteSpec { experts, top_k: k, per_expert_scale: scale });
                    ops.experts(out, input, routes, &spec);
                });
                (rig.read(out, n), rig.read(routes, n))
            };
            for (n, threads) in [(1, 2), (5, 3)] {
                let (packed, routes) = run(None, &gate_up.view("gate_up"), &down.view("down"), n, threads);
                let chosen = |expert: usize| {
                    routes.chunks_exact(2 * k).any(|r| r[..k].iter().any(|&id| id as usize == expert))
                };
                // One file of the four runs of bytes, what nobody chose overwritten with what is no number.
                let mut file = Wanted::default();
                let mut wanted = Vec::new();
                let runs = [gate_up.view("gate_up"), down.view("down")].map(|view| {
                    let scales = match view.scales {
                        Scales::Nvfp4 { blocks, .. } => blocks.to_vec(),
                        Scales::Group32Bf16(bytes) => bytes.to_vec(),
                        _ => Vec::new(),
                    };
                    [view.bytes.to_vec(), scales].map(|mut bytes| {
                        let each = bytes.len() / experts;
                        let start = file.bytes.len();
                        for e in 0..experts {
                            let own = e * each..(e + 1) * each;
                            if !chosen(e) {
                                bytes[own].fill(0xFF);
                            } else if each > 0 {
                                wanted.push(start + own.start..start + own.end);
                            }
                        }
                        file.bytes.extend_from_slice(&bytes);
                        start..start + bytes.len()
                    })
                });
                let file = std::sync::Arc::new(file);
                let gu = in_file(gate_up.view("gate_up"), &file.bytes, &runs[0]);
                let dn = in_file(down.view("down"), &file.bytes, &runs[1]);
                let (paged, _) = run(Some(file.clone()), &gu, &dn, n, threads);
                assert_bits(&format!("{level} {format} {n} rows"), &paged, &packed);
                let mut asked = file.ranges.lock().expect("no panic holds it").clone();
                // What is asked for in pieces that touch is one range.
                let joined = |ranges: &mut Vec<std::ops::Range<usize>>| {
                    ranges.sort_by_key(|r| r.start);
                    ranges.dedup_by(|b, a| {
                        a.end == b.start && {
                            a.end = b.end;
                            true
                        }
                    });
                };
                joined(&mut asked);
                joined(&mut wanted);
                assert_eq!(asked, wanted, "{level} {format} {n} rows");
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_stays_alone_and_shows() {
    for level in levels() {
        let mut rig = Rig::new(fast(2, level));
        let (k, rows) = (96, 40);
        let encoded = weights(Format::Q4_0, rows, k, 3);
        let w = rig.cpu.pack(&[encoded.view("matrix")], rows).expect("a valid matrix");
        let (x, input, out) = (rig.act(k), rig.input(k), rig.act(rows));
        let mut soft = values(3 * k, 5);
        soft[k + 40] = 3e38;
        rig.rows(3, &soft);
        rig.batch.heads = vec![0, 1, 2];
        let outcome = rig.run(&|ops| {
            ops.inject_soft(x);
            ops.scale(x, 100.0);
            ops.keep_rows(&[x]);
            ops.cast(input, x);
            ops.logits(out, input, w, Some(30.0));
            ops.argmax(out);
        });
        assert!(outcome.argmax[0] >= 0 && outcome.argmax[1] == -1 && outcome.argmax[2] >= 0);
    }
}

#[test]
fn dropped_rows_keep_their_blocks_and_a_packed_head_embeds() {
    for level in levels() {
        let mut rig = Rig::new(fast(2, level));
        let (k, vocab) = (160, 301);
        let table = weights(Format::Q6K, 1, 256, 1);
        assert!(rig.cpu.pack(&[table.view("alone")], 1).is_ok());
        let table = weights(Format::Q5_0, vocab, k, 3);
        let w = rig.cpu.pack(&[table.view("table")], vocab).expect("a valid matrix");
        let (x, input, out) = (rig.act(k), rig.input(k), rig.act(vocab));
        rig.sequence(5, 0, &[[0; 0], [0; 0]]);
        rig.batch.tokens = vec![300, 7, 16, 0, 299];
        rig.run(&|ops| ops.embed(x, w, 0.5));
        let exact = decoded(&table.view("table"));
        let rows = [300, 7, 16, 0, 299].map(|t: usize| &exact[t * k..(t + 1) * k]).concat();
        let halves: Vec<f32> = rows.iter().map(|v| v * 0.5).collect();
        assert_bits("embedding", &rig.read(x, 5), &halves);
        // Rows 1 and 4 kept: their logits are those that they have among all.
        let all = {
            rig.run(&|ops| {
                ops.embed(x, w, 0.5);
                ops.cast(input, x);
                ops.linear(out, input, w);
            });
            rig.read(out, 5)
        };
        rig.batch.heads = vec![1, 4];
        rig.run(&|ops| {
            ops.embed(x, w, 0.5);
            ops.cast(input, x);
            ops.keep_rows(&[x, input]);
            ops.logits(out, input, w, None);
        });
        let kept = [&all[vocab..2 * vocab], &all[4 * vocab..]].concat();
        assert_bits("kept rows", &rig.read(out, 2), &kept);
    }
}

#[test]
fn every_quantised_format_has_an_integer_kernel_and_the_report_says_so() {
    for level in levels() {
        let report = Rig::new(fast(1, level)).cpu.report();
        assert_eq!(report.mode, "fast");
        for kernel in report.kernels {
            assert_eq!(
                kernel.kernel.starts_with("bf16 x"),
                rounds_to_bf16(kernel.format, level),
                "{kernel:?}"
            );
            let int8 = kernel.kernel.starts_with("int8");
            assert_eq!(int8, !takes_floats(kernel.format), "{kernel:?}");
            assert_eq!(kernel.fallback, level == Level::Scalar, "{kernel:?}");
        }
    }
}

#[test]
fn tables_and_float_weights_stay_in_a_held_map() {
    let (rows, k) = (64, 96);
    let encoded = weights(Format::Bf16, rows, k, 3);
    let file: FileMap = std::sync::Arc::new(encoded.view("w").bytes.to_vec());
    let bytes: &[u8] = (*file).as_ref();
    for compute in [Compute::F32, Compute::Fast] {
        let mut rig = Rig::new(CpuOptions { compute, ..options(2) });
        rig.cpu.hold(&[std::sync::Arc::clone(&file)]);
        let before = rig.cpu.memory();
        let mapped = view(Format::Bf16, rows, k, bytes);
        let table = rig.cpu.pack_rows(&mapped).expect("a valid matrix");
        let w = rig
            .cpu
            .pack(&[mapped.slice_rows(0, 20), mapped.slice_rows(20, 44)], rows)
            .expect("a valid matrix");
        let memory = rig.cpu.memory();
        assert_eq!(memory.mapped - before.mapped, 2 * bytes.len());
        assert_eq!(memory.weights, before.weights);
        // A copy where no map holds the bytes.
        let elsewhere = bytes.to_vec();
        let copied = rig.cpu.pack(&[view(Format::Bf16, rows, k, &elsewhere)], rows).expect("a valid matrix");
        assert!(rig.cpu.memory().weights >= memory.weights + bytes.len());
        let (x, a, b) = (rig.act(k), rig.act(rows), rig.act(rows));
        rig.sequence(3, 0, &[[0; 0], [0; 0]]);
        rig.batch.tokens = vec![63, 0, 21];
        rig.run(&|ops| {
            ops.embed(x, table, 1.0);
            ops.linear(a, x, w);
            ops.linear(b, x, copied);
        });
        let (a, b) = (rig.read(a, 3), rig.read(b, 3));
        assert_bits("in place and copied", &a, &b);
    }
}
