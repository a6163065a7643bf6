//! One model in every layout: what a loader decodes is what the format defines, and the pass over it is the pass over
//! those decoded values.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::files::rewritten;
use common::{On, Setup, stepper};
use half::bf16;
use lapidary::convert::{ConvertOptions, to_gguf};
use lapidary_engine::Prompt;
use lapidary_formats::{Format, TensorView, decode_row, encode_rows, validate};
use lapidary_ops::TapPoint;
use lapidary_reference::tiny::{self, Variant};
use lapidary_reference::{Limits, assert_close, compare};
use lapidary_weights::export::{Layout, export};
use lapidary_weights::gguf::GgmlType;
use lapidary_weights::names::{Spelling, spell};
use lapidary_weights::safetensors::{Dtype, NewTensor, write};
use lapidary_weights::{Checkpoint, ExpertPart, LayerRole, Role};
use serde_json::Value;

fn backends() -> Vec<On> {
    [On::Reference, On::Cpu { threads: 2 }].into_iter().chain(common::gpu()).collect()
}

/// Layers of the wide model: two sliding ones and a full one.
const LAYERS: usize = 3;

/// The tiny model with experts, its sides grown to whole blocks of every format: K-quants have blocks of 256. Its own
/// sides differ from each other, so each can be told by its length. Rows stay odd where nothing asks for blocks.
const GROWN: [(usize, usize); 10] = [
    (69, 256),   // hidden
    (50, 512),   // dense MLP
    (37, 256),   // an expert
    (74, 512),   // gate and up of an expert
    (10, 128),   // head, sliding
    (22, 256),   // head, full
    (60, 768),   // queries, sliding
    (132, 1536), // queries, full
    (30, 384),   // keys, sliding
    (44, 512),   // keys, full
];

/// How much larger than usual a matrix is. Matrices that engines fuse have scales of their own.
fn size_of(name: &str) -> f32 {
    let larger = [("k_proj", 2.0), ("v_proj", 4.0), ("up_proj", 8.0)];
    larger.iter().find(|(part, _)| name.contains(part)).map_or(1.0, |l| l.1)
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().expect("a temporary folder"))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    fn checkpoint(&self) -> Checkpoint {
        Checkpoint::open(self.path()).expect("the checkpoint opens")
    }
}

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn save(folder: &Path, tensors: &Tensors, dtype: Dtype) {
    let bytes = |values: &[f32]| -> Vec<u8> {
        match dtype {
            Dtype::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    };
    let bytes: Vec<Vec<u8>> = tensors.values().map(|(_, values)| bytes(values)).collect();
    let list: Vec<NewTensor> = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, (shape, _)), bytes)| NewTensor {
            name: name.clone(),
            dtype,
            shape: shape.clone(),
            bytes,
        })
        .collect();
    write(&folder.join("model.safetensors"), &list, &BTreeMap::new()).expect("the file is written");
}

/// The bf16 model that all layouts are made from.
fn wide() -> Folder {
    let small = Folder::new();
    tiny::write(Variant::Moe, small.path()).unwrap();
    let grown = |n: usize| GROWN.iter().find(|(from, _)| *from == n).map_or(n, |g| g.1);
    let from = small.checkpoint();
    let mut tensors = Tensors::new();
    let mut state = 1u64;
    for role in from.roles() {
        if matches!(role, Role::Layer(n, _) if n as usize >= LAYERS) {
            continue;
        }
        let name = role.to_string();
        let stored = from.stored(role).unwrap();
        let shape: Vec<usize> = stored.shape.iter().map(|&n| grown(n)).collect();
        let count: usize = shape.iter().product();
        let matrix = shape.len() > 1;
        // The small model's values, over and over, cover a vector; matrices are drawn.
        let mut row = vec![0.0; from.tensor(role).unwrap().unwrap().cols];
        decode_row(&from.tensor(role).unwrap().unwrap(), 0, &mut row);
        let size = size_of(&name) * 1.7 / (*shape.last().unwrap() as f32).sqrt();
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let value = |i: usize| if matrix { size * draw() } else { row[i % row.len()] };
        tensors.insert(name, (shape, (0..count).map(value).collect()));
    }
    let folder = Folder::new();
    save(folder.path(), &tensors, Dtype::Bf16);
    let mut config = tiny::config(Variant::Moe);
    let text = &mut config["text_config"];
    for field in ["hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "global_head_dim"]
    {
        text[field] = grown(text[field].as_u64().unwrap() as usize).into();
    }
    text["num_hidden_layers"] = LAYERS.into();
    let kinds: Vec<Value> = text["layer_types"].as_array().unwrap()[..LAYERS].to_vec();
    text["layer_types"] = kinds.into();
    std::fs::write(folder.file("config.json"), config.to_string()).unwrap();
    folder
}

fn matrix(checkpoint: &Checkpoint, role: Role) -> Vec<f32> {
    values(&checkpoint.tensor(role).unwrap().unwrap())
}

fn values(view: &TensorView<'_>) -> Vec<f32> {
    validate(view).expect("its scales are good");
    let mut values = vec![0.0; view.rows * view.cols];
    values.chunks_exact_mut(view.cols).enumerate().for_each(|(row, out)| decode_row(view, row, out));
    values
}

/// The decoded values of a checkpoint as float32 safetensors.
fn decoded(checkpoint: &Checkpoint, config: &Path) -> Folder {
    let mut tensors = Tensors::new();
    for role in checkpoint.roles().filter(|role| *role != Role::RopeFreqs) {
        let shape = checkpoint.stored(role).unwrap().shape.to_vec();
        tensors.insert(spell(role, Spelling::Composite).unwrap(), (shape, matrix(checkpoint, role)));
    }
    let folder = Folder::new();
    save(folder.path(), &tensors, Dtype::F32);
    let mut config: Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(folder.file("config.json"), config.to_string()).unwrap();
    folder
}

fn logits(model: &Path, on: On) -> Vec<f32> {
    let tokens: Vec<u32> = (0..19).map(|i| 2 + i * 37 % 150).collect();
    let mut stepper = stepper(model, on, Setup::default());
    let mut logits = Vec::new();
    stepper
        .score(&Prompt::from(tokens.as_slice()), &mut |_, row| logits.extend_from_slice(row), &mut |_, _| {})
        .expect("the prompt runs");
    logits
}

fn same_logits(what: &str, model: &Path, plain: &Path) {
    for on in backends() {
        let report = compare(&logits(model, on), &logits(plain, on));
        assert_close(&format!("{what} on {on:?}"), &report, Limits::FLOAT32);
    }
}

#[test]
fn every_gguf_format_decodes_as_defined_and_its_logits_follow() {
    let wide = wide();
    let original = wide.checkpoint();
    for format in Format::ALL.into_iter().filter(|f| GgmlType::of(*f).is_some()) {
        let out = Folder::new();
        let file = out.file("model.gguf");
        let report = to_gguf(&original, &file, &ConvertOptions::new(format)).unwrap();
        assert_eq!(report.fallbacks, [], "{format}: every width is whole blocks");
        let converted = Checkpoint::open(&file).expect("the file opens");
        let mut coded = 0;
        for role in converted.roles().filter(|role| *role != Role::RopeFreqs) {
            let stored = converted.stored(role).unwrap();
            let source = matrix(&original, role);
            let cols = *stored.shape.last().unwrap();
            if stored.shape.len() > 1 && !matches!(role, Role::Layer(_, LayerRole::Router)) {
                assert_eq!(stored.format, format, "{role}");
                coded += 1;
            }
            let defined = encode_rows(stored.format, &source, source.len() / cols, cols).unwrap();
            let view = converted.tensor(role).unwrap().unwrap();
            assert!(view.bytes == &defined.bytes[..], "{format}: {role} is other bytes");
            let (mut a, mut b) = (vec![0.0; cols], vec![0.0; cols]);
            for row in 0..view.rows {
                decode_row(&view, row, &mut a);
                decode_row(&defined.view("defined"), row, &mut b);
                assert!(a.iter().all(|v| v.is_finite()) && a == b, "{format}: {role} row {row}");
            }
        }
        assert!(coded > 20, "{format}: {coded} matrices");
        let plain = decoded(&converted, &wide.file("config.json"));
        same_logits(&format!("{format}"), &file, plain.path());
    }
}

#[test]
fn every_safetensors_layout_gives_the_logits_of_its_decoded_values() {
    let wide = wide();
    for layout in Layout::ALL {
        let out = Folder::new();
        export(&wide.checkpoint(), out.path(), layout).unwrap();
        let plain = decoded(&out.checkpoint(), &out.file("config.json"));
        same_logits(&format!("{layout:?}"), out.path(), plain.path());
    }
}

/// The layouts that hold the same numbers give the same logits. Those of four-bit codes stay as near as their grids
/// are fine, value by value, and are the logits of those values by the test above; a scale taken for its reciprocal
/// would be off by orders.
#[test]
fn h02_all_published_expert_layouts_load() {
    let wide = wide();
    let of = |layout| {
        let out = Folder::new();
        export(&wide.checkpoint(), out.path(), layout).unwrap();
        let found = logits(out.path(), On::Cpu { threads: 2 });
        (out, found)
    };
    let fused = logits(wide.path(), On::Cpu { threads: 2 });
    assert!(of(Layout::PerExpert).1 == fused && of(Layout::MoeStacks).1 == fused, "the same numbers");
    let (divisor, multiplier, int4) =
        (of(Layout::Nvfp4Divisor), of(Layout::Nvfp4Multiplier), of(Layout::Int4));
    // The divisor is the rounded reciprocal of the multiplier.
    assert_close("both NVFP4 schemes", &compare(&divisor.1, &multiplier.1), Limits::FLOAT32);
    // E2M1's widest gap is from 4 to 6 of the block's largest: half of it is 1/6, and the block's own scale is off by
    // up to 1/16. INT4's gap is 1/7 where the codes end at 7, so a value is off by half of that; bf16 scales add 1/256.
    for (out, block, bound) in
        [(divisor, 16, 1.0 / 6.0 + 1.0 / 16.0), (multiplier, 16, 0.23), (int4, 32, 0.076)]
    {
        let (coded, original) = (out.0.checkpoint(), wide.checkpoint());
        for layer in 0..LAYERS as u32 {
            for (e, part) in (0..7).flat_map(|e| ExpertPart::ALL.map(|part| (e, part))) {
                let expert =
                    |checkpoint: &Checkpoint| values(&checkpoint.expert(layer, e, part).unwrap().unwrap());
                let (found, expected) = (expert(&coded), expert(&original));
                for (found, expected) in found.chunks(block).zip(expected.chunks(block)) {
                    let largest = expected.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    let off = found.iter().zip(expected).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
                    assert!(off <= bound * largest, "layer {layer} expert {e} {part:?}: {off} of {largest}");
                }
            }
        }
        // Unrelated logits of the same size would be 1.41 apart; four bits in every matrix of a random model, whose
        // choice of experts hangs on little, leave this much.
        let report = compare(&out.1, &fused);
        assert!(report.finite && report.rel_rms < 0.9, "{report}");
        assert!(report.rel_rms > 1e-3, "it is not quantised: {report}");
    }
}

fn tiny_gguf(variant: Variant) -> (Folder, PathBuf) {
    let folder = Folder::new();
    tiny::write(variant, folder.path()).unwrap();
    let checkpoint = Checkpoint::open(folder.file("model.safetensors")).unwrap();
    let out = folder.file("plain.gguf");
    to_gguf(&checkpoint, &out, &ConvertOptions::new(Format::F32)).unwrap();
    (folder, out)
}

#[test]
fn h06_the_head_is_what_the_file_holds() {
    let (folder, tied) = tiny_gguf(Variant::Dense);
    let (equal, different) = (folder.file("equal.gguf"), folder.file("different.gguf"));
    let head = [("output.weight", "token_embd.weight")];
    rewritten(&tied, &equal, |_, bytes| Some(bytes.to_vec()), &head, &[]);
    // A head of half the embedding: logits of half the size before the cap.
    let halved = |bytes: &[u8]| -> Vec<u8> {
        let values = bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b) * 0.5);
        values.flat_map(f32::to_le_bytes).collect()
    };
    rewritten(
        &tied,
        &different,
        |name, bytes| Some(if name == "output.weight" { halved(bytes) } else { bytes.to_vec() }),
        &head,
        &[],
    );
    assert_eq!(Checkpoint::open(&tied).unwrap().head_differs().unwrap(), None);
    assert_eq!(Checkpoint::open(&equal).unwrap().head_differs().unwrap(), Some(false));
    assert_eq!(Checkpoint::open(&different).unwrap().head_differs().unwrap(), Some(true));
    for on in backends() {
        let expected = logits(&tied, on);
        assert!(logits(&equal, on) == expected, "an equal head changes nothing");
        let half: Vec<f32> = expected.iter().map(|z| 30.0 * ((z / 30.0).atanh() / 2.0).tanh()).collect();
        assert_close("half a head", &compare(&logits(&different, on), &half), Limits::FLOAT32);
    }
}

#[test]
fn h07_rotation_factors_come_from_the_file_or_are_computed_and_sliding_layers_ignore_them() {
    let (folder, with) = tiny_gguf(Variant::Dense);
    let (without, other) = (folder.file("without.gguf"), folder.file("other.gguf"));
    rewritten(&with, &without, |name, b| (name != "rope_freqs.weight").then(|| b.to_vec()), &[], &[]);
    let ones = |b: &[u8]| vec![1.0f32; b.len() / 4].into_iter().flat_map(f32::to_le_bytes).collect();
    rewritten(
        &with,
        &other,
        |name, b| Some(if name == "rope_freqs.weight" { ones(b) } else { b.to_vec() }),
        &[],
        &[],
    );
    assert!(Checkpoint::open(&with).unwrap().stored(Role::RopeFreqs).is_some());
    assert!(Checkpoint::open(&without).unwrap().stored(Role::RopeFreqs).is_none());
    for on in backends() {
        let computed = compare(&logits(&with, on), &logits(&without, on));
        assert_close("computed factors", &computed, Limits::FLOAT32);
        let rotated = compare(&logits(&other, on), &logits(&with, on));
        assert!(rotated.rel_rms > 1e-2, "other factors are used: {rotated}");
        // Layers 0 and 1 are sliding, layer 2 is the first full one.
        let [a, b] = [&with, &other].map(|path| layer_outputs(path, on));
        assert!(a[0] == b[0] && a[1] == b[1], "sliding layers ignore the factors");
        assert!(a[2] != b[2]);
    }
}

fn layer_outputs(model: &Path, on: On) -> Vec<Vec<f32>> {
    let tokens: Vec<u32> = (0..19).map(|i| 2 + i * 37 % 150).collect();
    let mut stepper = stepper(model, on, Setup::default());
    stepper.set_capture(&[TapPoint::LayerOut(0), TapPoint::LayerOut(1), TapPoint::LayerOut(2)]);
    let mut outputs = Vec::new();
    stepper
        .score(&Prompt::from(tokens.as_slice()), &mut |_, _| {}, &mut |_, o| {
            outputs.extend(o.taps.iter().map(|t| t.values.clone()));
        })
        .expect("the prompt runs");
    outputs
}

/// The wide model's q, k and v differ in size, and so do gate and up: each keeps its own scale, or the pass over the
/// fused matrices would not be that over the separate decoded ones.
#[test]
fn h08_fused_projections_keep_their_own_scales() {
    let wide = wide();
    for layout in [Layout::Nvfp4Multiplier, Layout::Fp8Tensor] {
        let out = Folder::new();
        export(&wide.checkpoint(), out.path(), layout).unwrap();
        let checkpoint = out.checkpoint();
        let scale = |role| {
            let view = checkpoint.tensor(Role::Layer(0, role)).unwrap().unwrap();
            match view.scales {
                lapidary_formats::Scales::Nvfp4 { tensor, .. } => tensor,
                lapidary_formats::Scales::Tensor(scale) => scale,
                other => panic!("{other:?}"),
            }
        };
        use LayerRole::*;
        for (small, large, times) in [(QProj, KProj, 2.0), (QProj, VProj, 4.0), (Gate, Up, 8.0)] {
            let ratio = scale(large) / scale(small);
            assert!(
                (ratio / times - 1.0f32).abs() < 0.05,
                "{layout:?}: {large:?} has {ratio} times the scale"
            );
        }
        let plain = decoded(&checkpoint, &out.file("config.json"));
        same_logits(&format!("{layout:?}"), out.path(), plain.path());
    }
}
