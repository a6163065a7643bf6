//! A capture changes no bit of the logits: every point that can be captured with every choice of positions, in the fast
//! modes of both backends, and on a device where a row's bits depend on how many rows run beside it.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use common::drive::{assert_bits, logits, same_bits, tiny_folder, tokens, values};
use common::spy::{Hooks, Verb, hooked};
use common::{On, Setup, stepper};
use lapidary::capture::{CapturePositions, CaptureSpec, LayerChoice, Recording, What};
use lapidary::{Checkpoint, Compute, Device, LoadOptions, load_stepper};
use lapidary_engine::{Heads, Prompt, Stepper};
use lapidary_ops::{SteerEdit, SteerMode, SteerSet, TapPoint};
use lapidary_reference::tiny::Variant;

/// Rows of a batch: the prompt's last one is neither full nor few enough for the kernels for few rows.
const CHUNK: usize = 40;
const PROMPT: usize = 73;
const STEPS: usize = 2;

/// Logits after a prompt and a few steps, with what a recording asks for copied out of each batch.
fn run(s: &mut Stepper, prompt: &[u32], recording: &mut Option<Recording>) -> Vec<f32> {
    let (prompt, given) = prompt.split_at(prompt.len() - STEPS);
    s.reset();
    let mut all = Vec::new();
    let parts = prompt.chunks(CHUNK).chain(given.chunks(1));
    for part in parts {
        let first = s.cursor();
        let wanted = recording.as_ref().map_or(&[][..], |r| r.points(first..first + part.len()));
        s.set_capture(wanted);
        let mut take = |chunk: lapidary_engine::Chunk<'_>| {
            if let Some(recording) = recording {
                recording.take(chunk.batch, 0..chunk.positions.len(), chunk.positions, chunk.outcome);
            }
        };
        s.prefill_each(&Prompt::from(part), Heads::Last, &mut take).expect("the batch runs");
        all.extend(logits(s));
    }
    s.set_capture(&[]);
    all
}

/// Every kind of activation at every layer by itself, and all at once, each with every choice of positions.
fn every_capture(layers: usize, moe: bool) -> Vec<CaptureSpec> {
    let kinds = [What::Hidden, What::Attn, What::Mlp].into_iter().chain(moe.then_some(What::Routes));
    let kinds: Vec<What> = kinds.collect();
    let mut each: Vec<(Vec<What>, LayerChoice)> = Vec::new();
    for layer in 0..layers {
        let only = || layer.to_string().parse().expect("a layer");
        each.extend(kinds.iter().map(|&what| (vec![what], only())));
    }
    each.push((kinds, LayerChoice::All));
    let choices = [
        CapturePositions::Last,
        CapturePositions::All,
        CapturePositions::Generated,
        CapturePositions::Range(PROMPT - STEPS - 9..PROMPT - STEPS - 2),
    ];
    let pairs = each.iter().flat_map(|(what, layers)| {
        choices.iter().map(|positions| {
            let (positions, what, layers) = (positions.clone(), what.clone(), layers.clone());
            CaptureSpec { positions, what, layers }
        })
    });
    pairs.collect()
}

fn no_capture_changes_a_bit(what: &str, s: &mut Stepper) {
    let config = s.model().config.clone();
    let ids: Vec<u32> = (0..PROMPT as u32).map(|i| (i * 7919 + 11) % config.vocab as u32).collect();
    let plain = run(s, &ids, &mut None);
    for spec in every_capture(config.layers.len(), config.moe.is_some()) {
        let mut recording = Some(Recording::new(&spec, &config, PROMPT - STEPS, &[]).expect("it fits"));
        let found = run(s, &ids, &mut recording);
        assert_bits(&format!("{what}: {spec:?}"), &found, &plain);
        let tensors = recording.expect("made above").tensors();
        let wanted = (0..PROMPT).filter(|&p| spec.positions.wants(p, PROMPT - STEPS)).count();
        assert!(tensors.iter().all(|t| t.shape[0] == wanted), "{what}: {spec:?} gave other positions");
    }
}

/// `None` only for a binary that was taken elsewhere without the file, and then it says so.
fn pebble(model: &str, compute: Compute, device: Device) -> Option<Stepper> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let name = format!("pebble-{model}-q8_0.gguf");
    if !folder.is_dir() && !Path::new("models").join(&name).is_file() {
        println!("skipped: {name} was not brought along");
        return None;
    }
    let path = if folder.is_dir() { folder } else { "models".into() }.join(name);
    let options = LoadOptions { context: Some(120), chunk: CHUNK, compute, device, ..LoadOptions::default() };
    Some(load_stepper(&Checkpoint::open(path).expect("opens"), &options, &mut |_| {}).expect("loads"))
}

#[test]
fn no_capture_changes_a_bit_of_the_processors_fast_mode() {
    for model in ["e", "moe"] {
        let Some(mut s) = pebble(model, Compute::Fast, Device::default()) else { continue };
        no_capture_changes_a_bit(model, &mut s);
    }
}

#[cfg(feature = "cuda")]
#[test]
fn no_capture_changes_a_bit_of_a_gpus_modes() {
    use lapidary::synth::Size;
    use lapidary_formats::Format;
    if common::gpu().is_none() {
        return;
    }
    let device = Device::Cuda { ordinal: 0 };
    for model in ["e", "moe"] {
        for compute in [Compute::Fast, Compute::F32] {
            let Some(mut s) = pebble(model, compute, device) else { continue };
            no_capture_changes_a_bit(&format!("{model} {compute:?}"), &mut s);
        }
    }
    for (size, format, layers) in [(Size::E2b, Format::Q4K, None), (Size::Moe26b, Format::Fp8E4M3, Some(3))] {
        let options = LoadOptions {
            context: Some(120),
            chunk: CHUNK,
            random_weights: Some(format),
            ..LoadOptions::default()
        };
        let mut s = common::random_on_gpu(size, layers, options);
        no_capture_changes_a_bit(size.name(), &mut s);
    }
}

/// A backend whose rows come out otherwise once others have been dropped.
fn fickle() -> (Hooks, Arc<AtomicUsize>) {
    let (alone, passes) = (AtomicBool::new(false), Arc::new(AtomicUsize::new(0)));
    let counted = passes.clone();
    let mut hooks = Hooks::verb(move |_, verb, s| {
        match verb {
            Verb::Embed(..) => {
                alone.store(false, Ordering::Relaxed);
                counted.fetch_add(1, Ordering::Relaxed);
            }
            Verb::KeepRows(_) => alone.store(true, Ordering::Relaxed),
            _ => {}
        }
        verb.run(s);
        if let Verb::Geglu(out, ..) = verb
            && alone.load(Ordering::Relaxed)
        {
            s.scale(out, 1.0 + 1e-5);
        }
    });
    hooks.rows_change_bits = true;
    (hooks, passes)
}

/// The shape of what the GPU's fast mode does, where every value can be judged: outputs are those without a capture, and
/// what is captured is what one pass for all rows has.
#[test]
fn where_rows_change_bits_the_tail_runs_apart_for_a_capture() {
    for variant in [Variant::PerLayerInputs, Variant::Dense] {
        let folder = tiny_folder(variant);
        let setup = Setup { rows: 16, head_rows: 1, ..Setup::default() };
        let (hooks, passes) = fickle();
        let mut s = hooked(&folder, On::Reference, setup, &hooks);
        let mut steady = stepper(&folder, On::Reference, setup);
        let layers = s.model().config.layers.len();
        let (last, width) = (layers - 1, s.model().config.hidden);
        let ids = tokens(&s, 5, 23);
        let plain = after(&mut s, &ids);
        assert!(!same_bits(&plain, &after(&mut steady, &ids)), "{variant:?}: the backend is fickle");
        // One edit of strength 1 at the first layer, and one that only measures at the last.
        let edit = |layer, mode, s| SteerEdit::new(layer, mode, s, &values(3, width)).expect("a direction");
        let set = SteerSet { edits: vec![edit(0, SteerMode::Add, 0.1), edit(last, SteerMode::Ablate, 0.0)] };
        let points = [TapPoint::Embed, TapPoint::LayerOut(last), TapPoint::Mlp(last), TapPoint::FinalNorm];
        for set in [None, Some(&set)] {
            for s in [&mut s, &mut steady] {
                s.set_steering(set).expect("it fits");
            }
            let plain = after(&mut s, &ids);
            let unhooked = s.projections().clone();
            let before = passes.load(Ordering::Relaxed);
            s.set_capture(&points);
            let found = after(&mut s, &ids);
            // Two batches, of which the one with logits runs twice.
            assert_eq!(passes.load(Ordering::Relaxed) - before, 3, "{variant:?}");
            assert_bits(&format!("{variant:?}: capture on and off"), &found, &plain);
            steady.set_capture(&points);
            let _ = after(&mut steady, &ids);
            for point in &points[..3] {
                let (found, expected) = (s.tap(*point).expect("taken"), steady.tap(*point).expect("taken"));
                assert_eq!((found.rows, expected.rows), (7, 7), "{variant:?} {point:?}");
                assert_bits(&format!("{variant:?} {point:?}"), &found.values, &expected.values);
            }
            assert_eq!(s.tap(TapPoint::FinalNorm).expect("taken").rows, 1);
            if set.is_some() {
                // The last row's projections are those of the pass that the logits come from.
                let (found, all) = (s.projections(), steady.projections());
                assert_bits("the last row", found.row(6), unhooked.row(6));
                assert!(found.row(6) != all.row(6) && unhooked.row(0)[1].is_nan(), "{variant:?}");
                assert_bits("the first row", found.row(0), all.row(0));
            }
            // A capture before the tail needs no pass of its own, nor does a step of one row.
            for (points, runs) in [(&points[..1], 2), (&points[3..], 2)] {
                let before = passes.load(Ordering::Relaxed);
                s.set_capture(points);
                assert_bits("a capture before the tail", &after(&mut s, &ids), &plain);
                assert_eq!(passes.load(Ordering::Relaxed) - before, runs);
            }
            s.set_capture(&points);
            let before = passes.load(Ordering::Relaxed);
            s.decode_step(5, s.cursor()).expect("the step runs");
            assert_eq!(passes.load(Ordering::Relaxed) - before, 1);
            s.set_capture(&[]);
            steady.set_capture(&[]);
        }
    }
}

fn after(s: &mut Stepper, ids: &[u32]) -> Vec<f32> {
    s.reset();
    s.prefill(ids).expect("the prompt runs");
    logits(s)
}
