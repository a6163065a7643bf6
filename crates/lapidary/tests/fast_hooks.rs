//! Captures and steering in the GPU's fast mode, at real widths: a capture changes no bit, an edit is its formula, and
//! rows of one batch are steered each by its own set.
#![cfg(feature = "cuda")]

mod common;

use std::path::Path;

use common::drive::{assert_bits, values};
use lapidary::synth::{Mix, Size, SynthOptions, write};
use lapidary::{Checkpoint, Compute, Device, LoadOptions, Stepper, load_stepper};
use lapidary_formats::Format;
use lapidary_ops::{SteerEdit, SteerMode, SteerSet, Tap, TapPoint};
use lapidary_reference::compare;

/// The shapes differ in what is joined: two branches, per-layer inputs, neither.
const MODELS: [(Size, Mix, usize); 4] = [
    (Size::Dense31b, Mix::Q8_0, 2),
    (Size::Moe26b, Mix::Q4_0, 2),
    (Size::E2b, Mix::Q4KM, 25),
    (Size::Moe26b, Mix::Bf16, 1),
];

fn write_model(size: Size, mix: Mix, layers: usize, path: &Path) {
    let options = SynthOptions { layers: Some(layers), seed: 7, ..SynthOptions::default() };
    write(size, mix, path, &options, &mut |_, _| {}).expect("the file is written");
}

fn load(path: &Path, compute: Compute) -> Stepper {
    let options = LoadOptions {
        context: Some(120),
        chunk: 40,
        compute,
        device: Device::Cuda { ordinal: 0 },
        ..LoadOptions::default()
    };
    load_stepper(&Checkpoint::open(path).expect("the file opens"), &options, &mut |_| {}).expect("it loads")
}

fn prompt(n: u32, by: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 7919 + by) % 262_144).collect()
}

fn logits(s: &mut Stepper) -> Vec<f32> {
    let mut out = vec![0.0; s.model().config.vocab];
    s.logits_into(&mut out).expect("a head ran");
    out
}

/// Logits after a prompt of two batches and after four steps, the last two of which are recorded.
fn run(s: &mut Stepper, each: &mut dyn FnMut(&Stepper)) -> Vec<f32> {
    s.reset();
    s.prefill(&prompt(53, 11)).expect("the prompt runs");
    let mut all = logits(s);
    for token in prompt(4, 5) {
        s.decode_step(token, s.cursor()).expect("the step runs");
        all.extend(logits(s));
        each(s);
    }
    all
}

fn every_point(layers: usize, moe: bool) -> Vec<TapPoint> {
    let of = |l| {
        let routes = moe.then_some(TapPoint::Routes(l));
        [TapPoint::LayerOut(l), TapPoint::Attn(l), TapPoint::Mlp(l), TapPoint::Qkv(l)]
            .into_iter()
            .chain(routes)
    };
    [TapPoint::Embed].into_iter().chain((0..layers).flat_map(of)).chain([TapPoint::FinalNorm]).collect()
}

#[test]
fn a_capture_changes_no_bit_and_is_near_the_float32_modes() {
    if common::gpu().is_none() {
        return;
    }
    for (size, mix, layers) in MODELS {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("model.gguf");
        write_model(size, mix, layers, &path);
        let what = size.name();
        let mut fast = load(&path, Compute::Fast);
        let plain = run(&mut fast, &mut |_| {});
        let points = every_point(layers, size == Size::Moe26b);
        let captured = |s: &mut Stepper| {
            let mut taps = Vec::new();
            s.set_capture(&points);
            let each = |s: &Stepper| {
                points.iter().map(|&p| s.tap(p).expect("it is captured").clone()).collect::<Vec<_>>()
            };
            let logits = run(s, &mut |s| taps.push(each(s)));
            s.set_capture(&[]);
            (logits, taps)
        };
        let (with, found) = captured(&mut fast);
        assert_bits(&format!("{what}: capture on and off"), &with, &plain);
        for point in &points {
            fast.set_capture(std::slice::from_ref(point));
            assert_bits(&format!("{what}: only {point:?}"), &run(&mut fast, &mut |_| {}), &plain);
        }
        fast.set_capture(&[]);
        drop(fast);
        let (_, expected) = captured(&mut load(&path, Compute::F32));
        // Twice what was seen at the widest of the points, attention; see fast_gpu.rs.
        let mut compared = 0;
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.len(), points.len(), "{what}");
            // Where two experts are nearly equal, rounding may exchange them, and what follows is that of other experts.
            let other = (0..layers).find(|&l| chosen(found, l) != chosen(expected, l)).unwrap_or(usize::MAX);
            for e in expected {
                let f = found.iter().find(|f| f.point == e.point).expect("both have every point");
                if behind(e.point, other) {
                    continue;
                }
                compared += 1;
                assert_eq!((f.rows, f.width), (e.rows, e.width), "{what} {:?}", e.point);
                let (f, e_values) = match e.point {
                    // Behind the queries are keys and values, which the fast kernels leave elsewhere.
                    TapPoint::Qkv(_) => (&f.values[..1024], &e.values[..1024]),
                    // Which expert is which is not a matter of degree.
                    TapPoint::Routes(_) => (&f.values[f.width / 2..], &e.values[f.width / 2..]),
                    _ => (&f.values[..], &e.values[..]),
                };
                let report = compare(f, e_values);
                if e.point == TapPoint::Embed {
                    // A row of the table times a number, whichever form it is read from.
                    assert_bits(&format!("{what} {}", mix.name()), f, e_values);
                }
                println!("{what} step {step} {:?}: {report}", e.point);
                assert!(
                    report.finite && report.rel_rms <= 0.03,
                    "{what} step {step} {:?}: {report}",
                    e.point
                );
            }
        }
        assert!(compared >= 2 * points.len(), "{what}: {compared} of {} compared", 4 * points.len());
    }
}

/// The experts that a layer's rows chose, if any.
fn chosen(taps: &[Tap], layer: usize) -> Option<Vec<f32>> {
    let routes = taps.iter().find(|t| t.point == TapPoint::Routes(layer))?;
    Some(routes.values[..routes.width / 2].to_vec())
}

/// Whether a point depends on what the experts of `layer` did.
fn behind(point: TapPoint, layer: usize) -> bool {
    use TapPoint::{Attn, Embed, FinalNorm, LayerOut, Mlp, PerLayer, Qkv, Routes};
    match point {
        Embed | PerLayer => false,
        FinalNorm => layer != usize::MAX,
        Mlp(l) | LayerOut(l) | Routes(l) => l >= layer,
        Attn(l) | Qkv(l) => l > layer,
    }
}

/// Of an embedding in FP8 that is also the head there is one copy, which single rows are read from too.
#[test]
fn rows_of_a_packed_fp8_embedding_are_exact() {
    if common::gpu().is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    write_model(Size::Moe26b, Mix::Bf16, 1, &path);
    let embedded = |compute| {
        let options = LoadOptions {
            context: Some(60),
            compute,
            device: Device::Cuda { ordinal: 0 },
            requantise: lapidary::Requantise::default().with_fp8_head(),
            ..LoadOptions::default()
        };
        let checkpoint = Checkpoint::open(&path).expect("the file opens");
        let mut s = load_stepper(&checkpoint, &options, &mut |_| {}).expect("it loads");
        s.set_capture(&[TapPoint::Embed]);
        // Every place in a strip of 16 rows, and the last row.
        let tokens: Vec<u32> = (0..33).map(|i| i * 17).chain([262_143]).collect();
        s.prefill(&tokens).expect("the prompt runs");
        (s.tap(TapPoint::Embed).expect("it is captured").values.clone(), s.runner().memory().weights)
    };
    let ((exact, _), (packed, _)) = (embedded(Compute::F32), embedded(Compute::Fast));
    assert_bits("embeddings", &packed, &exact);
}

/// The edits of one row in float64, and what it projected before each.
fn expected(row: &[f32], edits: &[SteerEdit]) -> (Vec<f64>, Vec<f64>) {
    let mut x: Vec<f64> = row.iter().map(|&v| f64::from(v)).collect();
    let mut projected = Vec::new();
    for edit in edits {
        let u: Vec<f64> = edit.unit.iter().map(|&v| f64::from(v)).collect();
        let p: f64 = x.iter().zip(&u).map(|(x, u)| x * u).sum();
        projected.push(p);
        let (s, n, to) = (f64::from(edit.strength), f64::from(edit.norm), f64::from(edit.to));
        if s == 0.0 || edit.gate.is_some_and(|gate| p <= f64::from(gate)) {
            continue;
        }
        let before: f64 = x.iter().map(|v| v * v).sum();
        let by = match edit.mode {
            SteerMode::Add => s * n,
            SteerMode::Ablate | SteerMode::Renorm => -s * p,
            SteerMode::Clamp => s * (to - p),
        };
        x.iter_mut().zip(&u).for_each(|(x, u)| *x += by * u);
        if edit.mode == SteerMode::Renorm {
            let after: f64 = x.iter().map(|v| v * v).sum();
            x.iter_mut().for_each(|v| *v *= (before / after).sqrt());
        }
    }
    (x, projected)
}

fn edits(width: usize, layer: usize) -> SteerSet {
    let edit = |mode, strength: f32, i| SteerEdit::new(layer, mode, strength, &values(i, width)).unwrap();
    let mut edits = vec![
        edit(SteerMode::Add, 0.03, 1),
        edit(SteerMode::Ablate, 1.0, 2),
        edit(SteerMode::Clamp, 0.5, 3),
        edit(SteerMode::Renorm, 0.8, 4),
        edit(SteerMode::Add, 5.0, 5),
        edit(SteerMode::Add, 0.0, 6),
    ];
    edits[2].to = 3.0;
    edits[3].gate = Some(-1e9);
    edits[4].gate = Some(1e9);
    SteerSet { edits }
}

#[test]
fn edits_are_their_formulas_and_strength_0_changes_no_bit() {
    if common::gpu().is_none() {
        return;
    }
    for (size, mix, layers) in MODELS {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("model.gguf");
        write_model(size, mix, layers, &path);
        let what = size.name();
        let mut s = load(&path, Compute::Fast);
        let plain = run(&mut s, &mut |_| {});
        let (layer, width) = (layers - 1, s.model().config.hidden);
        let mut set = edits(width, layer);
        let mut rows = Vec::new();
        s.set_capture(&[TapPoint::LayerOut(layer)]);
        run(&mut s, &mut |s| rows.push(s.hidden(layer).expect("it is captured").values.clone()));
        // Nothing before the last layer's end is steered, so its rows are the edits of those without.
        s.set_steering(Some(&set)).expect("it fits");
        let mut at = 0;
        let steered = run(&mut s, &mut |s| {
            let (wanted, projected) = expected(&rows[at], &set.edits);
            let scale = rows[at].iter().fold(1.0f64, |m, v| m.max(f64::from(v.abs())));
            let bound = scale * width as f64 * f64::from(f32::EPSILON);
            for (i, (found, wanted)) in s.hidden(layer).unwrap().values.iter().zip(&wanted).enumerate() {
                let off = (f64::from(*found) - wanted).abs();
                assert!(off <= bound, "{what} step {at}: value {i} is {found}, not {wanted}");
            }
            for (i, (found, wanted)) in s.projections().row(0).iter().zip(&projected).enumerate() {
                let off = (f64::from(*found) - wanted).abs();
                assert!(off <= bound, "{what} step {at}: projection {i} is {found}, not {wanted}");
            }
            assert_eq!(s.projections().row(0).len(), set.edits.len());
            at += 1;
        });
        assert!(at == 4 && steered != plain, "{what}");
        s.set_capture(&[]);
        set.edits.iter_mut().for_each(|e| e.strength = 0.0);
        s.set_steering(Some(&set)).expect("it fits");
        assert_bits(&format!("{what}: strength 0"), &run(&mut s, &mut |_| {}), &plain);
        for layer in 0..layers {
            set.edits.iter_mut().for_each(|e| e.layer = layer);
            s.set_steering(Some(&set)).expect("it fits");
            assert_bits(&format!("{what}: strength 0 at layer {layer}"), &run(&mut s, &mut |_| {}), &plain);
        }
        s.set_steering(None).expect("it is taken back");
        assert_bits(&format!("{what}: without"), &run(&mut s, &mut |_| {}), &plain);
    }
}

/// Steps of one row and of three, in which some layer is captured or steered with strength 0: the kernels that join most
/// do so for one row.
#[test]
fn hooks_change_no_bit_of_one_row_or_of_three() {
    if common::gpu().is_none() {
        return;
    }
    for (size, format, layers) in [
        (Size::E2b, Format::Bf16, None),
        (Size::E4b, Format::Q4K, None),
        (Size::Dense31b, Format::Fp8E4M3, Some(2)),
    ] {
        let options = LoadOptions {
            context: Some(60),
            chunk: 40,
            random_weights: Some(format),
            ..LoadOptions::default()
        };
        let mut s = common::random_on_gpu(size, layers, options);
        let (what, layers) = (size.name(), s.model().config.layers.len());
        let vocab = s.model().config.vocab;
        let set_of = |layer, width| {
            let mut set = edits(width, layer);
            set.edits.iter_mut().for_each(|e| e.strength = 0.0);
            set
        };
        for rows in [1, 3] {
            let slots: Vec<usize> = (0..rows).collect();
            let mut steps = |points: &[TapPoint], steered: Option<usize>| {
                let width = s.model().config.hidden;
                s.alloc_slots(rows, 60).expect("slots fit");
                s.set_capture(&[]);
                for slot in 0..rows {
                    // The second of three is not steered.
                    let set = steered.filter(|_| slot != 1).map(|layer| set_of(layer, width));
                    s.set_slot_steering(slot, set.as_ref()).expect("it fits");
                    s.prefill_slot(slot, &prompt(17 + 5 * slot as u32, 3)).expect("the prompt runs");
                }
                s.set_capture(points);
                let mut all = Vec::new();
                for (step, token) in prompt(3, 5).into_iter().enumerate() {
                    let at: Vec<usize> = slots.iter().map(|slot| 17 + 5 * slot + step).collect();
                    s.decode_batch(&vec![token; rows], &at, &slots, &mut vec![0; rows]).expect("it runs");
                    for row in 0..rows {
                        let mut logits = vec![0.0; vocab];
                        s.logits_row_into(row, &mut logits).expect("there are as many rows");
                        all.extend(logits);
                    }
                }
                all
            };
            let plain = steps(&[], None);
            for layer in 0..layers {
                let points = [TapPoint::LayerOut(layer), TapPoint::Attn(layer), TapPoint::Mlp(layer)];
                let hooks = [(&points[..], None), (&[][..], Some(layer)), (&points[..], Some(layer))];
                for (points, steered) in hooks {
                    let found = steps(points, steered);
                    assert_bits(&format!("{what}: {rows} rows, {points:?}, {steered:?}"), &found, &plain);
                }
            }
            let end = [TapPoint::FinalNorm];
            assert_bits(&format!("{what}: {rows} rows, the end"), &steps(&end, None), &plain);
        }
    }
}

/// Three sequences decoded together: what steers one of them changes no bit of another. (Where experts are chosen, a row's
/// company changes who shares them, and with it the order of sums, whether it is steered or not.)
#[test]
fn rows_of_one_batch_are_steered_each_by_its_own_set() {
    if common::gpu().is_none() {
        return;
    }
    let (size, mix, layers) = MODELS[0];
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    write_model(size, mix, layers, &path);
    let mut s = load(&path, Compute::Fast);
    let (width, vocab) = (s.model().config.hidden, s.model().config.vocab);
    let sets = [edits(width, 0), edits(width, 1)];
    let mut batch = |which: [Option<usize>; 3]| {
        s.alloc_slots(3, 60).expect("slots fit");
        for (slot, set) in which.iter().enumerate() {
            s.set_slot_steering(slot, set.map(|i| &sets[i])).expect("it fits");
            s.prefill_slot(slot, &prompt(17 + 5 * slot as u32, 3)).expect("the prompt runs");
        }
        let mut rows = vec![Vec::new(); 3];
        for (step, token) in prompt(4, 5).into_iter().enumerate() {
            let at = [17 + step, 22 + step, 27 + step];
            s.decode_batch(&[token; 3], &at, &[0, 1, 2], &mut [0; 3]).expect("the batch runs");
            for (row, all) in rows.iter_mut().enumerate() {
                let mut logits = vec![0.0; vocab];
                s.logits_row_into(row, &mut logits).expect("there are as many rows");
                all.extend(logits);
                all.extend(s.projections().row(row).iter().filter(|p| !p.is_nan()));
            }
        }
        rows
    };
    let mixed = batch([Some(0), None, Some(1)]);
    for (row, which) in [[Some(0), None, None], [None; 3], [None, None, Some(1)]].into_iter().enumerate() {
        let alone = batch(which);
        assert_bits(&format!("row {row}"), &mixed[row], &alone[row]);
    }
    let none = batch([None; 3]);
    assert!(mixed[0] != none[0] && mixed[2] != none[2]);
}

/// What `bench --profile` and `--trace-file` tell of a GPU: parts that add up to a whole measured for itself, and a trace
/// whose events lie one after the other on each track.
#[test]
fn parts_of_a_gpus_steps_add_up() {
    if common::gpu().is_none() {
        return;
    }
    let (size, mix, layers) = MODELS[1];
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    write_model(size, mix, layers, &path);
    for compute in [Compute::Fast, Compute::F32] {
        let mut s = load(&path, compute);
        let plain = run(&mut s, &mut |_| {});
        s.start_profile(true).expect("a GPU has a clock");
        let start = std::time::Instant::now();
        let timed = run(&mut s, &mut |_| {});
        for token in prompt(40, 9) {
            s.decode_step(token, s.cursor()).expect("the step runs");
        }
        let profile = s.take_profile().expect("it was on");
        let whole = start.elapsed();
        assert_bits(&format!("{compute:?}: the clock changes nothing"), &timed, &plain);
        let report = lapidary::timings::Report::new(&profile);
        println!("{compute:?} {:?}, {:.4} unaccounted\n{}", whole, report.unaccounted(), report.text());
        assert!(
            profile.total <= whole && report.unaccounted().abs() < 0.03,
            "{compute:?}\n{}",
            report.text()
        );
        for class in &report.classes {
            let phases: f64 = class.phases.iter().map(|p| p.time.total.as_secs_f64()).sum();
            let device = class.device.total.as_secs_f64();
            assert!(
                (phases - device).abs() <= 1e-6 * device,
                "{compute:?}: phases are the whole of the pass"
            );
        }
        let trace = lapidary::timings::chrome_trace(&profile);
        let events = trace["traceEvents"].as_array().expect("a list");
        let mut by_track = std::collections::BTreeMap::<u64, Vec<(f64, f64)>>::new();
        for e in events.iter().filter(|e| e["ph"] == "X") {
            let (ts, dur) = (e["ts"].as_f64().expect("a time"), e["dur"].as_f64().expect("a time"));
            assert!(ts >= 0.0 && dur >= 0.0 && e["name"].is_string(), "{e}");
            by_track.entry(e["tid"].as_u64().expect("a track")).or_default().push((ts, ts + dur));
        }
        assert_eq!(by_track.len(), 3);
        for (track, spans) in &mut by_track {
            spans.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
            let overlap = spans.windows(2).find(|p| p[1].0 < p[0].1 - 1e-3);
            assert!(overlap.is_none(), "{compute:?} track {track}: {overlap:?}");
        }
    }
}

/// A measurement: one layer captured, and steered, beside neither; `bench --hooks` is the same for people. Run with
/// `--ignored --nocapture`; it proves nothing on a machine that is busy.
#[test]
#[ignore = "a measurement"]
fn what_hooks_cost() {
    if common::gpu().is_none() {
        return;
    }
    let options = LoadOptions {
        context: Some(700),
        random_weights: Some(lapidary::Format::Fp8E4M3),
        ..LoadOptions::default()
    };
    let mut s = common::random_on_gpu(Size::Moe26b, None, options);
    let (layer, width) = (15, s.model().config.hidden);
    let edit = SteerEdit::new(layer, SteerMode::Ablate, 0.01, &values(1, width)).unwrap();
    let set = SteerSet { edits: vec![edit] };
    let mut steps = [const { Vec::new() }; 3];
    for _ in 0..3 {
        for (mode, seconds) in steps.iter_mut().enumerate() {
            s.reset();
            s.set_capture(if mode == 1 { &[TapPoint::LayerOut(15)] } else { &[] });
            s.set_steering((mode == 2).then_some(&set)).expect("it fits");
            s.prefill(&prompt(512, 3)).expect("the prompt runs");
            for step in 0..67 {
                let clock = std::time::Instant::now();
                s.decode_step((step * 7919 + 5) % 262_144, s.cursor()).expect("the step runs");
                if step >= 3 {
                    seconds.push(clock.elapsed().as_secs_f64());
                }
            }
        }
    }
    let medians = steps.map(|mut v| {
        v.sort_by(f64::total_cmp);
        v[v.len() / 2] * 1e3
    });
    let cost = |ms: f64| 100.0 * (ms / medians[0] - 1.0);
    println!(
        "26b fp8 at 512: {:.3} ms a step, one layer captured {:.3} ({:+.2} %), one layer steered {:.3} ({:+.2} %)",
        medians[0],
        medians[1],
        cost(medians[1]),
        medians[2],
        cost(medians[2])
    );
}
