//! Keys and values in FP8, which only the GPU has: near what they were, the same however a prompt was cut, and the same
//! bytes for the general kernels and for the fast ones.
#![cfg(feature = "cuda")]

mod common;

use common::drive::{TINY, assert_bits, logits, name, tiny_folder, tokens};
use common::{EVERY, On, Setup, runner, stepper};
use lapidary::synth::{Mix, Size, SynthOptions, write};
use lapidary::{Checkpoint, Compute, Device, KvFormat, LoadOptions, Stepper, load_stepper};
use lapidary_ops::{Batch, PageTable, RowSpan, TailRows};
use lapidary_reference::compare;
use lapidary_reference::tiny::Variant;

fn setup(kv: KvFormat) -> Setup {
    Setup { rows: 16, head_rows: 9, context: 90, kv, ..Setup::default() }
}

/// Gemma 3's values are not normed, so nothing bounds them.
fn bounded() -> impl Iterator<Item = Variant> {
    TINY.into_iter().filter(|v| *v != Variant::Gemma3)
}

fn e4m3(code: u8) -> f32 {
    let (e, m) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = if e == 0 { m / 512.0 } else { (1.0 + m / 8.0) * 2f32.powi(e - 7) };
    if code & 128 == 0 { size } else { -size }
}

/// The first layer's keys and values depend on nothing that was stored, so they are the same in both formats but for the
/// code: off by half of its last bit, under a scale that is a power of two and reaches what a normed head can hold.
#[test]
fn cells_are_the_nearest_codes_under_one_scale_a_side() {
    for variant in bounded() {
        let folder = tiny_folder(variant);
        for on in EVERY.into_iter().filter(|on| *on == On::Cuda) {
            let page = |kv| {
                let mut r = runner(&folder, on, Setup { rows: 40, ..setup(kv) });
                let group = r.model().layers[0].attn.spec.cache.group;
                let shape = r.plan().groups[group.index()].layers[0];
                let ids: Vec<i32> = (0..31).map(|i| 3 + i * 6).collect();
                let table = PageTable { start: 0, count: 1, first_block: 0 };
                let batch = Batch {
                    tokens: ids.clone(),
                    per_layer_tokens: ids,
                    positions: (0..31).collect(),
                    visible_to: [(1..32).collect(), (1..32).collect()],
                    pages: [vec![1], vec![1]],
                    spans: vec![RowSpan { first_row: 0, rows: 31, tables: [table; 2] }],
                    heads: vec![30],
                    ..Batch::default()
                };
                let layers = r.model().layers.len();
                r.run(&batch, &batch.shape(layers, TailRows::Heads)).unwrap();
                let mut bytes = Vec::new();
                r.page_read(group, 1, &mut bytes).unwrap();
                (shape, bytes)
            };
            let ((shape, exact), (_, codes)) = (page(KvFormat::F32), page(KvFormat::Fp8));
            let side = shape.kv_heads * 32 * shape.head_dim;
            let exact: Vec<f32> =
                exact.as_chunks::<4>().0.iter().take(2 * side).map(|b| f32::from_le_bytes(*b)).collect();
            for (which, (exact, codes)) in exact.chunks(side).zip(codes.chunks(side)).enumerate() {
                // Half a unit in the last place of a normal code is 2^-4 of it, of the others 2^-10 of the scale.
                let fits = |scale: f32| {
                    let near =
                        |(e, c): (&f32, &u8)| (e4m3(*c) * scale - e).abs() <= e.abs() / 16.0 + scale / 1024.0;
                    exact.iter().zip(codes).all(near)
                };
                let scales: Vec<f32> = (-24..8).map(|n| 2f32.powi(n)).filter(|&s| fits(s)).collect();
                let what = format!("{} side {which}", name(&folder));
                let most = exact.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                assert!(scales.len() == 1 && most <= 448.0 * scales[0], "{what}: {scales:?}, up to {most}");
                if which == 1 {
                    let bound = (shape.head_dim as f32).sqrt() / 448.0;
                    assert!(scales[0] >= bound && scales[0] < 2.0 * bound, "{what}: {scales:?}");
                }
            }
        }
    }
}

#[test]
fn logits_are_the_same_in_every_cut_and_slot() {
    for variant in bounded() {
        let folder = tiny_folder(variant);
        for on in EVERY.into_iter().filter(|on| *on == On::Cuda) {
            let run = |kv, rows: usize| {
                let mut s = stepper(&folder, on, Setup { rows, ..setup(kv) });
                let prompt = tokens(&s, 5, 71);
                let mut token = s.prefill(&prompt).unwrap();
                let mut all = logits(&mut s);
                for _ in 0..5 {
                    token = s.decode_step(token, s.cursor()).unwrap();
                    all.extend(logits(&mut s));
                }
                (token, all)
            };
            let what = name(&folder);
            let (_, whole) = run(KvFormat::Fp8, 16);
            for rows in [1, 7] {
                assert_bits(&format!("{what} {rows} rows"), &run(KvFormat::Fp8, rows).1, &whole);
            }
            let vocab = whole.len() / 6;
            let report = compare(&whole[..vocab], &run(KvFormat::F32, 16).1[..vocab]);
            println!("{what}: {report}");
            assert!(report.finite && report.rel_rms > 0.0, "{what}: {report}");
            // A slot is a run of pages.
            let mut s = stepper(&folder, on, setup(KvFormat::Fp8));
            s.alloc_slots(3, 90).unwrap();
            let prompts: Vec<Vec<u32>> = [33, 5, 64].iter().map(|&n| tokens(&s, n, n as usize)).collect();
            let mut next = [0; 3];
            for slot in 0..3 {
                next[slot] = s.prefill_slot(slot, &prompts[slot]).unwrap();
            }
            let at = [33, 5, 64];
            let mut out = [0; 3];
            s.decode_batch(&next, &at, &[0, 1, 2], &mut out).unwrap();
            let mut rows = vec![vec![0.0; vocab]; 3];
            rows.iter_mut().enumerate().for_each(|(i, row)| s.logits_row_into(i, row).unwrap());
            for slot in 0..3 {
                let mut alone = stepper(&folder, on, setup(KvFormat::Fp8));
                assert_eq!(alone.prefill(&prompts[slot]).unwrap(), next[slot]);
                alone.decode_step(next[slot], at[slot]).unwrap();
                assert_bits(&format!("{what} slot {slot}"), &rows[slot], &logits(&mut alone));
            }
            let mut s = stepper(&folder, on, setup(KvFormat::Fp8));
            s.alloc_slots(2, 70).unwrap();
            s.slot_smoke().unwrap();
        }
    }
}

#[test]
fn values_that_nothing_bounds_are_refused_by_name() {
    for on in EVERY.into_iter().filter(|on| *on == On::Cuda) {
        let mut s = stepper(&tiny_folder(Variant::Gemma3), on, setup(KvFormat::Fp8));
        let error = s.prefill(&[5, 6, 7]).unwrap_err().to_string();
        assert!(error.contains("not normed"), "{error}");
    }
}

/// The fast mode reads and writes the same codes as the float32 mode, so that what differs is what differs in bf16.
#[test]
fn the_fast_modes_cells_are_the_float32_modes() {
    if common::gpu().is_none() {
        return;
    }
    for (size, mix, layers) in [(Size::Dense31b, Mix::Q8_0, 2), (Size::Moe26b, Mix::Q4_0, 2)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("model.gguf");
        let options = SynthOptions { layers: Some(layers), seed: 7, ..SynthOptions::default() };
        write(size, mix, &path, &options, &mut |_, _| {}).expect("the file is written");
        let run = |compute, kv| {
            let options = LoadOptions {
                context: Some(160),
                chunk: 96,
                compute,
                kv: Some(kv),
                device: Device::Cuda { ordinal: 0 },
                ..LoadOptions::default()
            };
            let checkpoint = Checkpoint::open(&path).expect("the file opens");
            let mut s: Stepper = load_stepper(&checkpoint, &options, &mut |_| {}).expect("it loads");
            let prompt: Vec<u32> = (0..110).map(|i| (i * 7919 + 11) % 262_144).collect();
            s.prefill(&prompt).expect("the prompt runs");
            let mut all = logits(&mut s);
            for i in 0..4 {
                s.decode_step(i * 104_729 % 262_144, s.cursor()).expect("the step runs");
                all.extend(logits(&mut s));
            }
            all
        };
        let exact = run(Compute::F32, KvFormat::Fp8);
        let (fast, bf16) = (run(Compute::Fast, KvFormat::Fp8), run(Compute::Fast, KvFormat::Bf16));
        let (own, lost) = (compare(&fast, &exact), compare(&fast, &bf16));
        println!("{}: fp8 fast against f32 {own}; fp8 against bf16 {lost}", size.name());
        // As in fast_gpu.rs; a rounding that falls the other way in a code costs up to 2^-3 of one key or value.
        let limit = if size == Size::Moe26b { 0.06 } else { 0.014 };
        assert!(own.finite && own.rel_rms <= limit, "{}: {own}", size.name());
        assert!(lost.rel_rms > 0.0 && lost.rel_rms <= 0.0625, "{}: {lost}", size.name());
    }
}
