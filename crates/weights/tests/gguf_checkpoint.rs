//! GGUF files as checkpoints: by role, with their scales, and what is refused.

mod support;

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::{Duration, Instant};

use lapidary_formats::{Format, Scales, TensorView, decode_row, encode_rows, validate};
use lapidary_weights::LayerRole::*;
use lapidary_weights::gguf::{GgmlType, Value, Version, Writer};
use lapidary_weights::{Checkpoint, ConfigSource, ExpertPart, Ignored, Kind, Role};
use support::message;

#[derive(Clone)]
struct Tensor {
    name: &'static str,
    /// Row length first.
    dims: Vec<u64>,
    kind: GgmlType,
    bytes: Vec<u8>,
}

/// Values that differ from tensor to tensor, encoded.
fn tensor(name: &'static str, dims: &[u64], format: Format) -> Tensor {
    let seed: u32 = name.bytes().map(u32::from).sum();
    let (cols, count) = (dims[0] as usize, dims.iter().product::<u64>() as usize);
    let values: Vec<f32> = (0..count).map(|i| ((seed as usize * 7 + i) as f32 * 0.37).sin()).collect();
    let bytes = encode_rows(format, &values, count / cols, cols).unwrap().bytes;
    Tensor { name, dims: dims.to_vec(), kind: GgmlType::of(format).unwrap(), bytes }
}

fn f32s(name: &'static str, values: &[f32]) -> Tensor {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor { name, dims: vec![values.len() as u64], kind: GgmlType::of(Format::F32).unwrap(), bytes }
}

/// Of a type that can't be decoded: `blocks` blocks of zeros.
fn raw(name: &'static str, number: u32, blocks: u64) -> Tensor {
    let (len, bytes) = GgmlType(number).block().unwrap();
    let zeros = vec![0; (blocks * bytes) as usize];
    Tensor { name, dims: vec![blocks * len], kind: GgmlType(number), bytes: zeros }
}

fn writer(keys: &[(&str, &str)], tensors: &[Tensor]) -> Writer {
    let mut writer = Writer::new(Version::V3);
    for (key, value) in keys {
        writer.set(key, Value::from(*value)).unwrap();
    }
    for t in tensors {
        writer.tensor(t.name, &t.dims, t.kind).unwrap();
    }
    writer
}

fn bytes_of(keys: &[(&str, &str)], tensors: &[Tensor]) -> Vec<u8> {
    let mut body = writer(keys, tensors).begin(Vec::new()).unwrap();
    tensors.iter().for_each(|t| body.write(t.name, &t.bytes).unwrap());
    body.finish().unwrap()
}

const GEMMA4: &[(&str, &str)] = &[("general.architecture", "gemma4")];

fn open(tensors: &[Tensor]) -> lapidary_weights::Result<Checkpoint> {
    open_with(GEMMA4, tensors)
}

fn open_with(keys: &[(&str, &str)], tensors: &[Tensor]) -> lapidary_weights::Result<Checkpoint> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.gguf");
    std::fs::write(&path, bytes_of(keys, tensors)).unwrap();
    // The map keeps the file when its name goes with the folder.
    Checkpoint::open(path)
}

fn decode(view: &TensorView) -> Vec<f32> {
    validate(view).unwrap();
    let mut out = vec![0.0; view.rows * view.cols];
    out.chunks_mut(view.cols).enumerate().for_each(|(row, out)| decode_row(view, row, out));
    assert!(out.iter().all(|v| v.is_finite()));
    out
}

/// Two layers' worth of names in several types; sizes unequal.
fn tensors() -> Vec<Tensor> {
    vec![
        tensor("token_embd.weight", &[96, 11], Format::Q8_0),
        tensor("output_norm.weight", &[96], Format::F32),
        f32s("rope_freqs.weight", &[1.0, 1.0, 1e30]),
        tensor("blk.0.attn_q.weight", &[96, 7], Format::Q4_0),
        f32s("blk.0.layer_output_scale.weight", &[0.75]),
        tensor("blk.1.attn_k.weight", &[96, 3], Format::Bf16),
        tensor("blk.1.attn_norm.weight", &[5], Format::F16),
    ]
}

fn same(c: &Checkpoint) {
    let expected = tensors();
    assert_eq!((c.kind(), c.roles().count()), (Kind::Gguf, expected.len()));
    for t in &expected {
        let role = c.roles().find(|r| c.stored(*r).unwrap().name == t.name).unwrap();
        let view = c.tensor(role).unwrap().unwrap();
        assert_eq!((view.bytes, &*view.name), (&t.bytes[..], t.name));
        let place = view.bytes.as_ptr_range();
        let held = c.maps().iter().any(|m| {
            let map = (**m).as_ref().as_ptr_range();
            map.start <= place.start && place.end <= map.end
        });
        assert!(held, "{} points into none of the maps", t.name);
    }
    let embed = c.expect(Role::Embed, 11, 96).unwrap();
    assert_eq!((embed.rows, embed.cols, embed.format), (11, 96, Format::Q8_0));
    let stored = c.stored(Role::Layer(0, QProj)).unwrap();
    assert_eq!((stored.shape, stored.format, stored.bytes), (&[7, 96][..], Format::Q4_0, 7 * 3 * 18));
    assert_eq!(c.expect_vector(Role::Layer(0, LayerScalar), 1).unwrap(), [0.75]);
    assert_eq!(c.expect_vector(Role::RopeFreqs, 3).unwrap(), [1.0, 1.0, 1e30]);
    assert_eq!(c.vector(Role::Layer(1, InputNorm), 5).unwrap().unwrap().len(), 5);
    message(c.vector(Role::FinalNorm, 95), &["output_norm.weight", "[96]", "[95]"]);
    message(c.vector(Role::Layer(0, QProj), 672), &["blk.0.attn_q.weight", "[7, 96]"]);
    message(c.expect(Role::Layer(0, QProj), 8, 96), &["blk.0.attn_q.weight", "[8, 96]", ".gguf"]);
    message(c.expect(Role::Layer(1, QProj), 8, 96), &["missing"]);

    // Frequency divisors are no parameters.
    assert_eq!(c.parameters(), 96 * 11 + 96 + 96 * 7 + 1 + 96 * 3 + 5);
    let shares: Vec<_> = c.formats().iter().map(|s| (s.format, s.tensors)).collect();
    let expected =
        [(Format::F32, 3), (Format::F16, 1), (Format::Bf16, 1), (Format::Q4_0, 1), (Format::Q8_0, 1)];
    assert!(expected.iter().all(|e| shares.contains(e)) && shares.len() == expected.len(), "{shares:?}");
    let length: u64 = c.files().iter().map(|f| std::fs::metadata(f).unwrap().len()).sum();
    assert_eq!(c.total_bytes(), length);
    assert!(c.notes().is_empty() && c.text_files().tokenizer.is_none());
    let ConfigSource::Gguf(file) = c.config() else { panic!("the file holds the configuration") };
    assert_eq!(file.metadata().require::<&str>("general.architecture").unwrap(), "gemma4");
}

fn write_split(folder: &Path, name: &str) -> Vec<std::path::PathBuf> {
    let tensors = tensors();
    let mut body =
        writer(GEMMA4, &tensors).create_split(folder.join(name), NonZeroUsize::new(3).unwrap()).unwrap();
    tensors.iter().for_each(|t| body.write(t.name, &t.bytes).unwrap());
    body.finish().unwrap()
}

#[test]
fn file_folder_and_any_part_of_a_split_set_mean_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("gemma.gguf");
    std::fs::write(&file, bytes_of(GEMMA4, &tensors())).unwrap();
    std::fs::write(dir.path().join("mmproj-gemma.gguf"), b"not looked at").unwrap();
    for path in [dir.path(), &file] {
        let c = Checkpoint::open(path).unwrap();
        assert_eq!((c.path(), c.files().len()), (path, 1));
        same(&c);
    }

    let dir = tempfile::tempdir().unwrap();
    let parts = write_split(dir.path(), "gemma");
    assert_eq!(parts.len(), 3);
    for path in [dir.path(), &parts[0], &parts[2]] {
        let c = Checkpoint::open(path).unwrap();
        assert_eq!((c.files().len(), c.maps().len()), (3, 3));
        same(&c);
    }
    std::fs::remove_file(&parts[0]).unwrap();
    message(Checkpoint::open(dir.path()), &["file 1 of 3", "gemma-00001-of-00003.gguf"]);
}

#[test]
fn a_file_in_the_program_is_checked_like_one_on_disk() {
    let bytes: &'static [u8] = bytes_of(GEMMA4, &tensors()).leak();
    let c = Checkpoint::from_gguf_bytes("built-in", bytes).unwrap();
    assert_eq!((c.path(), c.total_bytes()), (Path::new("built-in"), bytes.len() as u64));
    let [map] = &c.maps()[..] else { panic!("one file has one map") };
    assert_eq!((**map).as_ref().as_ptr_range(), bytes.as_ptr_range());
    assert_eq!(c.expect_vector(Role::Layer(0, LayerScalar), 1).unwrap(), [0.75]);

    message(
        Checkpoint::from_gguf_bytes("built-in", &bytes[..bytes.len() - 25]),
        &["built-in", "blk.1.attn_norm"],
    );
    message(Checkpoint::from_gguf_bytes("built-in", b""), &["built-in", "truncated"]);
    let dir = tempfile::tempdir().unwrap();
    let part: &'static [u8] = std::fs::read(&write_split(dir.path(), "gemma")[0]).unwrap().leak();
    for name in ["built-in", "gemma-00001-of-00003.gguf"] {
        message(Checkpoint::from_gguf_bytes(name, part), &[name, "one of 3 files"]);
    }
}

#[test]
fn maps_outlive_the_checkpoint() {
    let c = open(&tensors()).unwrap();
    let maps = c.maps();
    drop(c);
    assert_eq!(&(*maps[0]).as_ref()[..4], b"GGUF");
}

#[test]
fn an_nvfp4_matrix_is_multiplied_by_the_scale_beside_it() {
    let down = tensor("blk.3.ffn_down.weight", &[192, 5], Format::GgufNvfp4);
    let plain =
        decode(&open(std::slice::from_ref(&down)).unwrap().expect(Role::Layer(3, Down), 5, 192).unwrap());
    let c = open(&[
        down.clone(),
        f32s("blk.3.ffn_down.scale", &[0.375]),
        f32s("blk.3.ffn_down.input_scale", &[f32::NAN]),
    ])
    .unwrap();
    let scaled = decode(&c.expect(Role::Layer(3, Down), 5, 192).unwrap());
    assert!(plain.iter().any(|v| *v != 0.0));
    assert!(scaled.iter().zip(&plain).all(|(s, p)| *s == p * 0.375));
    let stored = c.stored(Role::Layer(3, Down)).unwrap();
    assert_eq!(stored.bytes, 5 * 3 * 36 + 4);
    assert_eq!((c.roles().count(), c.parameters()), (1, 5 * 192));
}

#[test]
fn each_expert_of_an_nvfp4_stack_has_its_scale() {
    let gate_up = tensor("blk.0.ffn_gate_up_exps.weight", &[64, 6, 3], Format::GgufNvfp4);
    let down = tensor("blk.0.ffn_down_exps.weight", &[128, 5, 3], Format::GgufNvfp4);
    let scales = [0.5, 3.0, 0.125];
    let plain = open(&[gate_up.clone(), down.clone()]).unwrap();
    let c = open(&[
        gate_up.clone(),
        down,
        f32s("blk.0.ffn_gate_up_exps.scale", &scales),
        f32s("blk.0.ffn_down_exps.scale", &[2.0, 4.0, 8.0]),
    ])
    .unwrap();
    for (e, scale) in scales.iter().enumerate() {
        for part in [ExpertPart::Gate, ExpertPart::Up] {
            let of = |c: &Checkpoint| decode(&c.expect_expert(0, e as u32, part, 3, 64).unwrap());
            assert!(of(&c).iter().zip(of(&plain)).all(|(s, p)| *s == p * scale), "{part:?} {e}");
        }
        // The scale of that name is a role of its own.
        let down = c.expect_expert(0, e as u32, ExpertPart::Down, 5, 128).unwrap();
        assert!(matches!(down.scales, Scales::None));
    }
    assert_eq!(c.expect_vector(Role::Layer(0, PerExpertScale), 3).unwrap(), [2.0, 4.0, 8.0]);
    let whole = c.tensor(Role::Layer(0, ExpertsGateUp)).unwrap().unwrap();
    let Scales::Row(rows) = &whole.scales else { panic!("the whole stack has the scales of its rows") };
    assert_eq!(rows.len(), 18);
    assert_eq!((rows[5], rows[6], rows[17]), (0.5, 3.0, 0.125));
    // One number is for all experts.
    let c = open(&[gate_up, f32s("blk.0.ffn_gate_up_exps.scale", &[3.0])]).unwrap();
    let up = c.expect_expert(0, 2, ExpertPart::Up, 3, 64).unwrap();
    assert!(matches!(up.scales, Scales::Tensor(s) if s == 3.0));
}

#[test]
fn a_scale_that_cannot_be_is_named() {
    let down = || tensor("blk.3.ffn_down.weight", &[192, 5], Format::GgufNvfp4);
    let scale = "blk.3.ffn_down.scale";
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e36] {
        let c = open(&[down(), f32s(scale, &[bad])]).unwrap();
        message(c.tensor(Role::Layer(3, Down)), &[scale, "element 0", "finite"]);
    }
    message(open(&[down(), f32s(scale, &[1.0, 1.0])]), &[scale, "[2]", "{1}"]);
    message(open(&[down(), tensor(scale, &[1], Format::F16)]), &[scale, "F16", "F32"]);
    message(open(&[f32s(scale, &[1.0])]), &["blk.3.ffn_down.weight", scale, "missing"]);
    let other = tensor("blk.3.ffn_down.weight", &[192, 5], Format::Q8_0);
    message(open(&[other, f32s(scale, &[1.0])]), &[scale, "Q8_0", "NVFP4"]);
}

#[test]
fn experts_are_sliced_from_fused_and_separate_stacks() {
    let (gate, up) = (
        tensor("blk.1.ffn_gate_exps.weight", &[32, 3, 5], Format::Q8_0),
        tensor("blk.1.ffn_up_exps.weight", &[32, 3, 5], Format::Q8_0),
    );
    let down = tensor("blk.1.ffn_down_exps.weight", &[32, 7, 5], Format::Q4_0);
    // An expert's gate rows, then its up rows.
    let each = gate.bytes.len() / 5;
    let rows = gate.bytes.chunks(each).zip(up.bytes.chunks(each));
    let fused = Tensor {
        name: "blk.1.ffn_gate_up_exps.weight",
        dims: vec![32, 6, 5],
        bytes: rows.flat_map(|(g, u)| [g, u].concat()).collect(),
        ..gate.clone()
    };
    let separate = open(&[gate.clone(), up.clone(), down.clone()]).unwrap();
    let together = open(&[fused.clone(), down.clone()]).unwrap();
    for c in [&separate, &together] {
        assert_eq!((c.experts_in_file(1), c.experts_in_file(0)), (5, 0));
        for e in 0..5 {
            let part = |part, rows| c.expect_expert(1, e, part, rows, 32).unwrap().bytes;
            let at = e as usize;
            assert_eq!(part(ExpertPart::Gate, 3), &gate.bytes[at * each..][..each]);
            assert_eq!(part(ExpertPart::Up, 3), &up.bytes[at * each..][..each]);
            assert_eq!(part(ExpertPart::Down, 7), &down.bytes[at * 7 * 18..][..7 * 18]);
        }
        assert!(c.expert(1, 5, ExpertPart::Up).unwrap().is_none());
        message(c.expect_expert(1, 0, ExpertPart::Up, 4, 32), &["blk.1.ffn_"]);
    }
    let both = "blk.1.ffn_gate_up_exps.weight";
    message(open(&[gate, fused.clone()]), &[both, "blk.1.ffn_gate_exps.weight", "keep one"]);
    message(open(&[up, fused]), &[both, "blk.1.ffn_up_exps.weight"]);
}

#[test]
fn what_belongs_beside_a_model_is_refused_by_name() {
    for (keys, part) in [
        (&[("general.architecture", "gemma4_assistant")][..], "gemma4_assistant drafter"),
        (&[("general.architecture", "clip")], "mmproj"),
        (&[("general.architecture", "gemma4"), ("general.type", "mmproj")], "mmproj"),
        (&[("general.architecture", "gemma4"), ("general.type", "adapter")], "LoRA"),
        (&[("general.type", "imatrix")], "importance matrices"),
    ] {
        message(open_with(keys, &tensors()), &["odd.gguf", part, "not yet supported"]);
    }
    let with = |t: Tensor| open(&[tensors(), vec![t]].concat());
    message(with(f32s("blk.0.attn_q.weight.lora_a", &[1.0])), &["LoRA", "blk.0.attn_q.weight.lora_a"]);
    message(with(f32s("blk.0.attn_q.bias", &[1.0])), &["unknown tensor blk.0.attn_q.bias", "gemma4"]);
    message(with(f32s("altup_proj.weight", &[1.0])), &["unknown tensor altup_proj.weight"]);
    let other = open_with(&[("general.architecture", "qwen")], &[f32s("blk.0.attn_q.bias", &[1.0])]);
    message(other, &["blk.0.attn_q.bias", "architecture is qwen"]);
    message(with(raw("blk.1.ffn_up.weight", 16, 1)), &["odd.gguf", "blk.1.ffn_up.weight", "IQ2_XXS"]);
    message(with(raw("blk.1.ffn_up.weight", 26, 3)), &["blk.1.ffn_up.weight", "I32"]);
    let mut keys = Writer::new(Version::V3);
    keys.set("general.architecture", 4u32).unwrap();
    let bytes: &'static [u8] = keys.begin(Vec::new()).unwrap().finish().unwrap().leak();
    message(
        Checkpoint::from_gguf_bytes("built-in", bytes),
        &["built-in", "general.architecture", "a string"],
    );
}

#[test]
fn towers_are_counted_and_their_types_do_not_matter() {
    let towers = [
        f32s("v.blk.0.attn_q.weight", &[1.0, 2.0]),
        raw("v.patch_embd.weight", 16, 1),
        raw("a.conv1d.0.weight", 26, 3),
        f32s("mm.input_projection.weight", &[1.0]),
    ];
    let c = open(&[tensors(), towers.to_vec()].concat()).unwrap();
    assert_eq!(c.ignored(), Ignored { vision: 2, audio: 1, projector: 1, bytes: 8 + 66 + 12 + 4 });
    assert_eq!(c.roles().count(), tensors().len());
}

#[test]
fn sixty_gigabytes_open_in_no_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("huge.gguf");
    let mut plan = writer(GEMMA4, &[]);
    let names: Vec<String> = (0..60).map(|n| format!("blk.{n}.ffn_up.weight")).collect();
    let (rows, cols) = (25_000, 20_000);
    for name in &names {
        plan.tensor(name, &[cols, rows], GgmlType::of(Format::Bf16).unwrap()).unwrap();
    }
    let mut head = Vec::new();
    drop(plan.begin(&mut head).unwrap());
    let length = head.len() as u64 + 60 * rows * cols * 2;
    std::fs::write(&path, &head).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
    let start = Instant::now();
    let c = Checkpoint::open(&path).unwrap();
    assert_eq!((c.total_bytes(), c.parameters()), (length, 60 * rows * cols));
    let last = c.expect(Role::Layer(59, Up), rows as usize, cols as usize).unwrap();
    let mut row = vec![1.0; cols as usize];
    decode_row(&last, rows as usize - 1, &mut row);
    assert!(row.iter().all(|v| *v == 0.0));
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}
