//! Required behaviours of loading (H03, H04) through the whole way from a file to a step. Those of scales (H01) are
//! tested with the weights crate, those of layouts, heads and rotation (H02, H06, H07, H08) in `formats.rs`, those that
//! end in a note (H05, H06) in `front_door.rs`.

mod common;

use std::path::Path;

use common::drive::{Random, assert_bits, score, tokens};
use common::files::{Tensor, decoded_tensors, golden_gguf, save};
use common::{EVERY, On, Setup, stepper};
use lapidary_engine::{Prompt, Runner, Stepper};
use lapidary_formats::{EncodedScales, Format, Scaling, encode_rows_scaled};
use lapidary_model::{BuildOptions, Config, EmbedScale, Limits, Model};
use lapidary_ops::KvFormat;
use lapidary_reference::Golden;
use lapidary_weights::gguf::Header;
use lapidary_weights::safetensors::Dtype;
use lapidary_weights::{Checkpoint, Ignored, LayerRole, Role};

/// The tensors of one matrix in FP8, and what they decode to.
fn fp8(tensor: &Tensor, scaling: Scaling) -> (Tensor, Tensor, Tensor) {
    let [rows, cols] = tensor.shape[..] else { panic!("a matrix") };
    let values: Vec<f32> = tensor.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let encoded = encode_rows_scaled(Format::Fp8E4M3, scaling, &values, rows, cols).unwrap();
    let scale = match &encoded.scales {
        EncodedScales::Tensor(scale) => Tensor::f32s(&[1], &[*scale]),
        EncodedScales::Row(scales) => Tensor::f32s(&[rows, 1], scales),
        other => panic!("{other:?}"),
    };
    let mut decoded = vec![0.0; rows * cols];
    for (r, out) in decoded.chunks_exact_mut(cols).enumerate() {
        lapidary_formats::decode_row(&encoded.view("encoded"), r, out);
    }
    assert!(decoded != values && decoded.iter().all(|v| v.is_finite()));
    let decoded = Tensor::f32s(&tensor.shape, &decoded);
    (Tensor { dtype: Dtype::F8E4M3, shape: tensor.shape.clone(), bytes: encoded.bytes }, scale, decoded)
}

/// Recipes that quantise every linear layer reach small ones too: routers, the projection of per-layer inputs, and the
/// projector of a vision tower, which is not read.
#[test]
fn h03_a_router_or_projector_in_fp8_is_dequantised() {
    for (variant, parts, small) in [
        ("moe26b", &["router.proj.weight"][..], Role::Layer(1, LayerRole::Router)),
        (
            "e2b",
            &["per_layer_model_projection.weight", "per_layer_input_gate.weight"],
            Role::PerLayerModelProj,
        ),
    ] {
        let source = Golden::root().join(variant);
        let mut coded = decoded_tensors(&Checkpoint::open(&source).unwrap());
        let mut plain = coded.clone();
        let small_names = coded.keys().filter(|n| parts.iter().any(|part| n.ends_with(part)));
        let small_names: Vec<String> = small_names.cloned().collect();
        assert!(!small_names.is_empty(), "{variant}");
        for (i, name) in small_names.iter().enumerate() {
            let scaling = if i % 2 == 0 { Scaling::Row } else { Scaling::Tensor };
            let (codes, scale, decoded) = fp8(&coded[name], scaling);
            plain.insert(name.clone(), decoded);
            coded.insert(name.clone(), codes);
            coded.insert(format!("{name}_scale"), scale);
        }
        let projector = "model.embed_vision.embedding_projection.weight";
        let codes = Tensor { dtype: Dtype::F8E4M3, shape: vec![3, 5], bytes: vec![0x38; 15] };
        coded.insert(projector.into(), codes);
        coded.insert(format!("{projector}_scale"), Tensor::f32s(&[1], &[0.5]));

        let [a, b] = [&coded, &plain].map(|tensors| {
            let dir = tempfile::tempdir().unwrap();
            save(dir.path(), &source.join("config.json"), tensors);
            dir
        });
        let checkpoint = Checkpoint::open(a.path()).unwrap();
        assert_eq!(checkpoint.tensor(small).unwrap().unwrap().format, Format::Fp8E4M3);
        assert_eq!(checkpoint.ignored(), Ignored { projector: 2, bytes: 15 + 4, ..Ignored::default() });
        for on in EVERY {
            let run = |folder: &Path| {
                let mut s = stepper(folder, on, Setup::default());
                let prompt = tokens(&s, 3, 23);
                score(&mut s, &Prompt::from(&prompt[..])).0
            };
            assert_bits(&format!("{variant} on {on:?}"), &run(a.path()), &run(b.path()));
        }
    }
}

/// From a file to one step, as far as it goes.
fn run(path: &Path) -> Result<u32, String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let checkpoint = Checkpoint::open(path).map_err(|e| text(&e))?;
    let config = Config::from_checkpoint(&checkpoint).map_err(|e| text(&e))?;
    let mut backend = On::Cpu { threads: 1 }.backend();
    let options = BuildOptions {
        limits: Limits { rows: 3, head_rows: 1 },
        embed_scale: EmbedScale::Auto,
        requantise: Default::default(),
    };
    let model =
        Model::build(config, &checkpoint, backend.as_mut(), &options, &mut |_| {}).map_err(|e| text(&e))?;
    let runner = Runner::new(model, backend, [KvFormat::F32; 2], 16).map_err(|e| text(&e))?;
    Stepper::new(runner, 16).decode_step(2, 0).map_err(|e| text(&e))
}

#[test]
fn h04_a_file_cut_anywhere_is_refused_by_tensor_and_size() {
    let dir = tempfile::tempdir().unwrap();
    let whole = golden_gguf("unified12b", dir.path());
    run(&whole).unwrap();
    let bytes = std::fs::read(&whole).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    let path = dir.path().join("cut.gguf");
    for part in 0..64 {
        let length = bytes.len() * part / 64;
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = run(&path).expect_err(&format!("{part}/64"));
        assert!(error.contains("cut.gguf") && !error.contains('\n'), "{error}");
        if length as u64 > header.data_start {
            // Whichever tensor lies across the end or beyond it, and where the file ends.
            let named = header
                .tensors
                .iter()
                .any(|t| error.contains(t.name.as_str()) && t.range().is_some_and(|r| r.end > length as u64));
            assert!(named && error.contains(&length.to_string()), "{part}/64: {error}");
        } else {
            assert!(error.contains("truncated"), "{part}/64: {error}");
        }
    }
}

/// Fields that lie, anywhere in the header: a message that names the file, or a model that still runs; no panic, no
/// allocation of what a field claims. (`gguf_damage.rs` of the weights crate takes the reader's fields one by one.)
#[test]
fn h04_a_header_that_lies_never_panics_on_the_way_to_a_step() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.gguf");
    let bytes = std::fs::read(golden_gguf("unified12b", dir.path())).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    let (mut refused, mut ran) = (0, 0);
    let mut random = Random::new(4);
    std::fs::write(&path, &bytes).unwrap();
    for _ in 0..2000 {
        let at = (random.next() % header.data_start) as usize;
        let width = [1, 4, 8][random.next() as usize % 3];
        let value = [0, 1, 0x7f, 0x80, 0xff, 1 << 31, 1 << 32, 1 << 63, u64::MAX, u64::MAX - 31];
        let value = value[random.next() as usize % value.len()].to_le_bytes();
        let mut damaged = bytes[..header.data_start as usize].to_vec();
        let end = damaged.len().min(at + width);
        damaged[at..end].copy_from_slice(&value[..end - at]);
        overwrite(&path, &damaged);
        match run(&path) {
            Ok(_) => ran += 1,
            Err(error) => {
                refused += 1;
                assert!(!error.is_empty() && !error.contains('\n'), "byte {at}: {error}");
            }
        }
    }
    assert!(refused > 500 && ran > 5, "{refused} refused, {ran} ran");
}

/// Puts `bytes` in place of the file's first ones.
fn overwrite(path: &Path, bytes: &[u8]) {
    use std::io::Write;
    let mut file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all(bytes).unwrap();
}
