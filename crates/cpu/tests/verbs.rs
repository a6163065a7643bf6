//! The verbs that work row by row, routing, experts, taps, dropped rows and a panicking worker.

mod common;

use common::*;
use lapidary_cpu::CpuOptions;
use lapidary_formats::encode_rows;
use lapidary_ops::*;

const WIDTHS: [usize; 6] = [96, 160, 640, 704, 2112, 37];

fn f64s(x: &[f32]) -> impl Iterator<Item = f64> {
    x.iter().map(|&v| f64::from(v))
}

fn inv_rms(x: &[f32], by: f64, eps: f64) -> f64 {
    1.0 / (f64s(x).map(|v| (v * by).powi(2)).sum::<f64>() / x.len() as f64 + eps).sqrt()
}

fn gelu(u: f64) -> f64 {
    // 0.5 u (1 + tanh(y)), without the cancellation at large negative y.
    let y = (2.0 / std::f64::consts::PI).sqrt() * (u + 0.044715 * u * u * u);
    u / (1.0 + (-2.0 * y).exp())
}

fn silu(u: f64) -> f64 {
    u / (1.0 + (-u).exp())
}

#[test]
fn norms_sums_and_scales_match_f64() {
    for level in levels() {
        for (width, rows) in WIDTHS.into_iter().zip([1, 3, 17, 2, 5, 257]) {
            let mut rig = Rig::new(CpuOptions { level: Some(level), ..options(2) });
            let (x, y, z) = (rig.act(width), rig.act(width), rig.act(width));
            let g = values(width, 2);
            let norm = Norm { gain: rig.gain(&g), eps: 1e-6 };
            let soft = values(rows * width, 3);
            rig.rows(rows, &soft);
            rig.run(&|ops| {
                ops.inject_soft(x);
                ops.rms_norm(y, x, norm);
                ops.cast(z, x);
                ops.scale(z, 0.3);
                ops.add(z, y);
                ops.rms_norm(x, x, norm);
            });
            let exact: Vec<f64> = soft
                .chunks_exact(width)
                .flat_map(|row| {
                    let f = inv_rms(row, 1.0, 1e-6);
                    f64s(row).zip(f64s(&g)).map(move |(v, g)| v * f * g)
                })
                .collect();
            // width / 16 sums, halved by the root, and five more roundings.
            let rel = (width as f64 / 32.0 + 8.0) * EPS;
            let bounded = || exact.iter().map(|&e| (e, e.abs() * rel));
            let (found_y, found_x, found_z) = (rig.read(y, rows), rig.read(x, rows), rig.read(z, rows));
            assert_near("norm", &found_y, bounded());
            assert_bits("norm in place", &found_x, &found_y);
            let sums = f64s(&soft).zip(&exact).map(|(v, e)| {
                let s = f64::from(0.3f32) * v;
                (s + e, e.abs() * rel + 3.0 * EPS * (s.abs() + e.abs()))
            });
            assert_near("sum", &found_z, sums);
        }
    }
}

#[test]
fn gates_match_f64() {
    for level in levels() {
        for f in [Activation::GeluTanh, Activation::Silu] {
            let (width, rows) = (704, 5);
            let mut rig = Rig::new(CpuOptions { level: Some(level), ..options(3) });
            let (x, y) = (rig.act(2 * width), rig.act(width));
            let soft: Vec<f32> = values(rows * 2 * width, 3).iter().map(|v| v * 6.0).collect();
            rig.rows(rows, &soft);
            rig.run(&|ops| {
                ops.inject_soft(x);
                ops.geglu(y, x, f);
            });
            let exact = soft.chunks_exact(2 * width).flat_map(|row| {
                f64s(&row[..width]).zip(f64s(&row[width..])).map(|(g, u)| {
                    let e = if f == Activation::Silu { silu(g) } else { gelu(g) } * u;
                    // The exponential's argument is at most 2 * 0.8 * (6 + 0.0447 * 216) = 25 with 6 roundings.
                    (e, e.abs() * 160.0 * EPS)
                })
            });
            assert_near("gate", &rig.read(y, rows), exact);
        }
    }
}

#[test]
fn embeddings_soft_rows_and_per_layer_inputs() {
    let (vocab, width, layers, part, rows) = (300, 96, 3, 32, 9);
    let mut rig = Rig::new(options(2));
    let table = encode_rows(Format::Q8_0, &values(vocab * width, 4), vocab, width).expect("finite values");
    let view = table.view("table");
    let table = rig.cpu.pack_rows(&view).expect("a valid table");
    let (x, out, gated) = (rig.act(width), rig.act(width), rig.act(part));
    let g = values(part, 5);
    let gain = rig.gain(&g);
    let spec = PerLayerSpec {
        table,
        layers,
        width: part,
        norm: Norm { gain, eps: 1e-6 },
        context_scale: 0.25,
        token_scale: 5.5,
        mix_scale: 0.7,
    };
    let gate = rig.act(part);
    let gate_from = rig.matrix(part, width, &values(part * width, 6));
    rig.sequence(rows, 0, &[[0; 0], [0; 0]]);
    rig.batch.tokens = (0..rows as i32).map(|r| (r * 37) % vocab as i32).collect();
    rig.batch.per_layer_tokens = (0..rows as i32).map(|r| (r * 53) % vocab as i32).collect();
    rig.batch.soft_rows = vec![2, 7];
    rig.batch.soft_values = values(2 * width, 8);
    rig.batch.taps.points = vec![TapPoint::Embed];
    let outcome = rig.run(&|ops| {
        ops.embed(x, table, 9.5);
        ops.inject_soft(x);
        ops.tap(TapPoint::Embed, x);
        ops.tap(TapPoint::PerLayer, x);
        ops.per_layer_inputs(out, x, &spec);
        ops.linear(gate, x, gate_from);
        ops.per_layer_gate(gated, gate, out, 1, Activation::GeluTanh);
        ops.per_layer_inputs(x, x, &spec);
    });
    let mut row = vec![0.0; width];
    let mut embedded = Vec::new();
    for r in 0..rows {
        lapidary_formats::decode_row(&view, rig.batch.tokens[r] as usize, &mut row);
        embedded.extend(row.iter().map(|v| v * 9.5));
    }
    embedded[2 * width..3 * width].copy_from_slice(&rig.batch.soft_values[..width]);
    embedded[7 * width..8 * width].copy_from_slice(&rig.batch.soft_values[width..]);
    let tap = Tap { point: TapPoint::Embed, rows, width, values: embedded.clone() };
    assert_eq!(outcome.taps, [tap], "only the wanted point, with the embeddings' own bits");
    let mut exact = Vec::new();
    for r in 0..rows {
        lapidary_formats::decode_row(&view, rig.batch.per_layer_tokens[r] as usize, &mut row);
        for l in 0..layers {
            let context = &embedded[r * width + l * part..][..part];
            let f = inv_rms(context, 0.25, 1e-6);
            for i in 0..part {
                let c = f64::from(context[i]) * 0.25 * f * f64::from(g[i]);
                let t = f64::from(row[l * part + i]) * f64::from(5.5f32);
                exact.push(((c + t) * f64::from(0.7f32), 16.0 * EPS * (c.abs() + t.abs())));
            }
        }
    }
    let (mixed, gates) = (rig.read(out, rows), rig.read(gate, rows));
    assert_near("per-layer inputs", &mixed, exact);
    assert_bits("in place", &rig.read(x, rows), &mixed);
    let expected = (0..rows * part).map(|i| {
        let e = gelu(f64::from(gates[i])) * f64::from(mixed[i / part * width + part + i % part]);
        (e, e.abs().max(1e-30) * 1e-4)
    });
    assert_near("per-layer gate", &rig.read(gated, rows), expected);
}

#[test]
fn the_default_of_a_fused_verb_has_its_bits() {
    let (width, rows) = (160, 7);
    let run = |fused: bool, workers: usize| {
        let mut rig = Rig::new(options(workers));
        let (x, y, next) = (rig.act(width), rig.act(width), rig.input(width));
        let gate_up = rig.act(2 * width);
        let norm = Norm { gain: rig.gain(&values(width, 5)), eps: 1e-6 };
        let w = rig.matrix(2 * width, width, &values(2 * width * width, 6));
        rig.rows(rows, &values(rows * width, 7));
        rig.batch.taps.points = vec![TapPoint::LayerOut(3)];
        let close =
            CloseSpec { y, post: norm, scalar: Some(0.6), layer: 3, steer: false, next: Some((next, norm)) };
        let outcome = rig.run(&|ops| {
            ops.inject_soft(x);
            ops.cast(next, x);
            if fused {
                ops.gated_linear(y, gate_up, next, w, Activation::GeluTanh);
                ops.norm_add(x, y, norm);
                ops.close_layer(x, &close);
            } else {
                ops.linear(gate_up, next, w);
                ops.geglu(y, gate_up, Activation::GeluTanh);
                ops.rms_norm(y, y, norm);
                ops.add(x, y);
                ops.rms_norm(y, y, norm);
                ops.add(x, y);
                ops.scale(x, 0.6);
                ops.tap(TapPoint::LayerOut(3), x);
                ops.rms_norm(next, x, norm);
            }
            ops.linear(gate_up, next, w);
        });
        assert_eq!(outcome.taps.len(), 1);
        assert_bits("tap", &outcome.taps[0].values, &rig.read(x, rows));
        [outcome.taps[0].values.clone(), rig.read(gate_up, rows)].concat()
    };
    let plain = run(false, 1);
    for workers in 1..=3 {
        assert_bits("fused", &run(true, workers), &plain);
    }
}

#[test]
fn routes_take_the_lower_of_equals_and_survive_non_finite_logits() {
    let (experts, k) = (7, 3);
    let mut rig = Rig::new(options(2));
    let (logits, out) = (rig.act(experts), rig.act(2 * k));
    let scale: Vec<f32> = (0..experts).map(|e| 1.0 + e as f32 / 8.0).collect();
    let spec = RouteSpec { experts, top_k: k, per_expert_scale: rig.gain(&scale) };
    let rows = 4;
    // Non-finite logits come from an overflowing product: the batch itself must be finite.
    let mut z = vec![1.0f32, 3.0, 2.0, 3.0, 2.0, -1.0, 0.5];
    z.extend([0.0; 7]);
    z.extend([3e38, 1.0, -3e38, 2.0, 0.0, 1.0, 1.0]);
    z.extend([3e38, 3e38, 3e38, 3e38, 3e38, 3e38, 3e38]);
    rig.rows(rows, &z);
    rig.run(&|ops| {
        ops.inject_soft(logits);
        ops.scale(logits, 2.0);
        ops.route(out, logits, &spec);
    });
    let found = rig.read(out, rows);
    assert_eq!(found[..k], [1.0, 3.0, 2.0], "equal logits: the lower id first");
    assert_eq!(found[2 * k..3 * k], [0.0, 1.0, 2.0]);
    let p: Vec<f64> = [6.0, 6.0, 4.0f64].iter().map(|z| (z - 6.0).exp()).collect();
    let sum: f64 = p.iter().sum();
    let exact = p.iter().zip([1, 3, 2]).map(|(p, e)| (p / sum * f64::from(scale[e]), 1e-6));
    assert_near("weights", &found[k..2 * k], exact);
    for row in found.chunks_exact(2 * k).skip(2) {
        let ids = &row[..k];
        assert!(ids.iter().all(|&e| e >= 0.0 && e < experts as f32 && e.fract() == 0.0), "{ids:?}");
        assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2], "{ids:?}");
    }
}

#[test]
fn experts_match_f64_and_grouping_changes_no_bit() {
    let (experts, k, hidden, width) = (9, 4, 96, 72);
    for level in levels() {
        let mut alone: Vec<f32> = Vec::new();
        for workers in 1..=3 {
            let mut rig = Rig::new(CpuOptions { level: Some(level), ..options(workers) });
            let (gu, dn) = (values(experts * 2 * width * hidden, 71), values(experts * hidden * width, 72));
            let spec = ExpertSpec {
                experts,
                top_k: k,
                width,
                gate_up: rig.matrix(experts * 2 * width, hidden, &gu),
                down: rig.matrix(experts * hidden, width, &dn),
                activation: Activation::GeluTanh,
            };
            let router_weights = values(experts * hidden, 73);
            let router = rig.matrix(experts, hidden, &router_weights);
            let scale = rig.gain(&vec![1.0; experts]);
            let (x, input) = (rig.act(hidden), rig.input(hidden));
            let (logits, routes, out) = (rig.act(experts), rig.act(2 * k), rig.act(hidden));
            let rows = 83;
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
                (rig.read(out, n), rig.read(routes, n))
            };
            if alone.is_empty() {
                alone = (0..rows).flat_map(|r| run(r, 1).0).collect();
            }
            for n in [1, 2, 7, 33, rows] {
                assert_bits(
                    &format!("{level} {workers} workers {n} rows"),
                    &run(0, n).0,
                    &alone[..n * hidden],
                );
            }
            let (found, routes) = run(0, rows);
            let mut exact = Vec::new();
            for r in 0..rows {
                let x = &soft[r * hidden..(r + 1) * hidden];
                let mut sum = vec![(0.0, 0.0); hidden];
                for i in 0..k {
                    let (e, weight) = (routes[r * 2 * k + i] as usize, f64::from(routes[r * 2 * k + k + i]));
                    let dot = |w: &[f32], row: usize, x: &[f64]| -> (f64, f64) {
                        let terms = f64s(&w[row * x.len()..(row + 1) * x.len()]).zip(x).map(|(a, b)| a * b);
                        terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()))
                    };
                    let x: Vec<f64> = f64s(x).collect();
                    let (h, dh): (Vec<f64>, Vec<f64>) = (0..width)
                        .map(|j| {
                            let (g, ga) = dot(&gu, e * 2 * width + j, &x);
                            let (u, ua) = dot(&gu, e * 2 * width + width + j, &x);
                            // The gate's slope is below 1.13; sums of 96 have 17 roundings, the gate 40.
                            let h = gelu(g) * u;
                            (h, EPS * (17.0 * (1.13 * ga * u.abs() + gelu(g).abs() * ua) + 40.0 * h.abs()))
                        })
                        .unzip();
                    for (o, s) in sum.iter_mut().enumerate() {
                        let (y, ya) = dot(&dn, e * hidden + o, &h);
                        let carried: f64 = (0..width)
                            .map(|j| f64::from(dn[(e * hidden + o) * width + j]).abs() * dh[j])
                            .sum();
                        s.0 += weight * y;
                        s.1 += weight.abs() * (carried + 20.0 * EPS * ya);
                    }
                }
                exact.extend(sum);
            }
            assert_near(&format!("{level} {workers} workers"), &found, exact);
        }
    }
}

#[test]
fn kept_rows_move_up_in_order() {
    for workers in 1..=3 {
        let (width, rows) = (37, 11);
        let mut rig = Rig::new(options(workers));
        let (x, y, rope) = (rig.act(width), rig.act(width), rig.act(8));
        let freq = rig.gain(&[1.0, 0.5, 0.25, 0.125]);
        let soft = values(rows * width, 7);
        rig.rows(rows, &soft);
        rig.batch.heads = vec![0, 3, 4, 10];
        rig.run(&|ops| {
            ops.inject_soft(x);
            ops.cast(y, x);
            ops.keep_rows(&[x, y]);
            ops.scale(y, 2.0);
            ops.rope_table(rope, freq);
        });
        let expected: Vec<f32> =
            [0, 3, 4, 10].iter().flat_map(|r| soft[r * width..(r + 1) * width].to_vec()).collect();
        assert_bits("x", &rig.read(x, 4), &expected);
        let doubled: Vec<f32> = expected.iter().map(|v| v * 2.0).collect();
        assert_bits("y", &rig.read(y, 4), &doubled);
        // Positions follow the rows that were kept.
        for (row, position) in rig.read(rope, 4).chunks_exact(8).zip([0.0f32, 3.0, 4.0, 10.0]) {
            assert!((row[1] - (position * 0.5).cos()).abs() < 1e-6 && (row[4] - position.sin()).abs() < 1e-6);
        }
    }
}

#[test]
fn a_panicking_worker_ends_the_pass_and_not_the_backend() {
    for workers in 1..=3 {
        let (width, rows) = (96, 40);
        let mut rig = Rig::new(options(workers));
        let (x, y) = (rig.act(width), rig.act(width));
        let w = rig.matrix(width, width, &values(width * width, 6));
        rig.rows(rows, &values(rows * width, 7));
        let good = |ops: &mut dyn Ops| {
            ops.inject_soft(x);
            ops.linear(y, x, w);
            ops.linear(x, y, w);
        };
        rig.run(&good);
        let expected = rig.read(x, rows);
        for victim in 0..workers {
            let caller = std::thread::current().id();
            let error = rig.try_run(&|ops| {
                ops.inject_soft(x);
                ops.linear(y, x, w);
                let thread = std::thread::current();
                let id = if thread.id() == caller { "lapidary-cpu-0" } else { thread.name().unwrap_or("") };
                assert!(id != format!("lapidary-cpu-{victim}"), "injected into {id}");
                ops.linear(x, y, w);
            });
            let Err(Error::WorkerPanicked { message }) = error else {
                panic!("no error from worker {victim}")
            };
            assert!(message.contains("injected"), "{message}");
            rig.run(&good);
            assert_bits("after the panic", &rig.read(x, rows), &expected);
        }
        // A handle that was never dealt is a panic of every worker, and an error all the same.
        assert!(matches!(rig.try_run(&|ops| ops.scale(Act(99), 1.0)), Err(Error::WorkerPanicked { .. })));
    }
}

#[test]
fn memory_is_counted_and_the_report_names_kernels() {
    let mut rig = Rig::new(options(2));
    let before = rig.cpu.memory();
    let w = encode_rows(Format::Q4_0, &values(33 * 64, 1), 33, 64).expect("finite values");
    rig.cpu.pack(&[w.view("w")], 33).expect("a valid matrix");
    rig.gain(&[1.0; 10]);
    rig.act(37);
    let after = rig.cpu.memory();
    assert_eq!(after.weights - before.weights, 33 * 36 + 40);
    // Rows of 37 floats start on 16 floats: 48.
    assert_eq!(after.activations - before.activations, MAX_ROWS * 48 * 4);
    let report = rig.cpu.report();
    assert_eq!((report.backend, report.units, report.kernels.len()), ("cpu", 2, Format::ALL.len()));
    assert_eq!(report.level, lapidary_cpu::Level::detect().name());
}
