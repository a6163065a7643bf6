//! Weights that are quantised while they are loaded: the bits of the converted file, on every backend.

mod common;

use std::path::Path;

use common::drive::{assert_bits, logits, same_bits, tiny_folder, tokens};
use common::{EVERY, On, Setup};
use lapidary::convert::{ConvertOptions, Types, to_gguf};
use lapidary::plan::{MemoryPlan, PlanOptions};
use lapidary::{Checkpoint, Compute, Config, Device, Format, KvFormat, Requantise};
use lapidary_engine::{Runner, Stepper};
use lapidary_model::{BuildOptions, EmbedScale, Limits, Model};
use lapidary_reference::tiny::Variant;
use lapidary_weights::export::{Layout, export};

const LIMITS: Limits = Limits { rows: 16, head_rows: 4 };

fn load(path: &Path, on: On, requantise: Requantise) -> Result<Stepper, lapidary_model::Error> {
    load_scaled(path, on, requantise, EmbedScale::Auto)
}

fn load_scaled(
    path: &Path,
    on: On,
    requantise: Requantise,
    embed_scale: EmbedScale,
) -> Result<Stepper, lapidary_model::Error> {
    let checkpoint = Checkpoint::open(path).expect("checkpoint opens");
    let mut backend = on.backend();
    let options = BuildOptions { limits: LIMITS, embed_scale, requantise };
    let config = common::config(&checkpoint);
    let model = Model::build(config, &checkpoint, backend.as_mut(), &options, &mut |_| {})?;
    let kv = [Setup::default().kv; 2];
    Ok(Stepper::new(Runner::new(model, backend, kv, 100).expect("pools fit"), 100))
}

/// Logits after a prompt and three steps.
fn run(s: &mut Stepper) -> Vec<f32> {
    let prompt = tokens(s, 3, 37);
    let mut token = s.prefill(&prompt).expect("the prompt runs");
    let mut all = logits(s);
    for _ in 0..3 {
        token = s.decode_step(token, s.cursor()).expect("the step runs");
        all.extend(logits(s));
    }
    all
}

const VARIANTS: [Variant; 4] = [Variant::Dense, Variant::Moe, Variant::PerLayerInputs, Variant::Unified];

#[test]
fn fp8_and_nvfp4_are_the_bits_of_the_exported_folder() {
    for variant in VARIANTS {
        let source = tiny_folder(variant);
        for (layout, requantise) in
            [(Layout::Fp8Row, Requantise::fp8()), (Layout::Nvfp4Divisor, Requantise::nvfp4())]
        {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let checkpoint = Checkpoint::open(&source).expect("checkpoint opens");
            if let Err(e) = export(&checkpoint, folder.path(), layout) {
                // A width that NVFP4 cannot have is refused both ways.
                let on = On::Cpu { threads: 1 };
                assert!(
                    load(&source, on, requantise).is_err(),
                    "{variant:?} {layout:?}: only export says {e}"
                );
                continue;
            }
            for on in EVERY {
                let what = format!("{variant:?} {layout:?} {on:?}");
                let expected =
                    run(&mut load(folder.path(), on, Requantise::default()).expect("the file loads"));
                let found = run(&mut load(&source, on, requantise).expect("the source loads"));
                assert_bits(&what, &found, &expected);
                let plain = run(&mut load(&source, on, Requantise::default()).expect("the source loads"));
                assert!(!same_bits(&found, &plain), "{what}: it is quantised");
                // The head is beside the layers, and does something of its own.
                let head = run(&mut load(&source, on, requantise.with_fp8_head()).expect("the source loads"));
                assert!(!same_bits(&head, &found) && head.iter().all(|v| v.is_finite()), "{what}: head");
            }
        }
    }
}

#[test]
fn q8_0_is_the_bits_of_the_converted_file() {
    for variant in VARIANTS {
        let source = tiny_folder(variant);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("model.gguf");
        let checkpoint = Checkpoint::open(&source).expect("checkpoint opens");
        let options = ConvertOptions { types: Types::All(Format::Q8_0), ..ConvertOptions::new(Format::Q8_0) };
        to_gguf(&checkpoint, &path, &options).expect("it converts");
        for on in EVERY {
            // An embedding whose rows are not whole blocks stays bf16, whose scale depends on the kind of file.
            let load = |path, requantise| load_scaled(path, on, requantise, EmbedScale::F32);
            let expected = run(&mut load(&path, Requantise::default()).expect("the file loads"));
            let found = run(&mut load(&source, Requantise::q8_0()).expect("the source loads"));
            assert_bits(&format!("{variant:?} {on:?}"), &found, &expected);
        }
    }
}

#[test]
fn what_is_quantised_already_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let checkpoint = Checkpoint::open(tiny_folder(Variant::Dense)).expect("checkpoint opens");
    export(&checkpoint, folder.path(), Layout::Fp8Row).expect("it exports");
    let error = load(folder.path(), On::Cpu { threads: 1 }, Requantise::nvfp4()).unwrap_err().to_string();
    assert!(error.contains("already") && error.contains("layers.0"), "{error}");
}

/// The plan knows what will be loaded.
#[test]
fn a_plan_counts_what_is_loaded() {
    let source = tiny_folder(Variant::Dense);
    let checkpoint = Checkpoint::open(&source).expect("checkpoint opens");
    let config = Config::from_checkpoint(&checkpoint).expect("config is read");
    let plan = |requantise| {
        let options = PlanOptions {
            context: 64,
            sequences: 1,
            limits: LIMITS,
            kv: [KvFormat::F32; 2],
            compute: Compute::F32,
            device: Device::Cpu,
            requantise,
            memory: None,
        };
        MemoryPlan::new(&checkpoint, &config, &options)
    };
    for requantise in [Requantise::fp8(), Requantise::q8_0(), Requantise::fp8().with_fp8_head()] {
        let stepper = load(&source, On::Cpu { threads: 1 }, requantise).expect("the source loads");
        let held = stepper.runner().memory();
        let (planned, held) = (plan(requantise).weight_bytes() as f64, (held.weights + held.mapped) as f64);
        // Scales are counted as float32; how a backend keeps them is its own.
        assert!((planned / held - 1.0).abs() < 0.02, "{requantise:?}: planned {planned}, held {held}");
        // Rows that are no whole blocks of 32 stay as they are.
        let plain = plan(Requantise::default()).weight_bytes() as f64;
        assert!(planned < plain || requantise == Requantise::q8_0() && planned == plain, "{requantise:?}");
    }
}
