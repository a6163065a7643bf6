//! Verification: sound models in every format pass, planted faults are found where they are.

mod common;

use std::path::{Path, PathBuf};

use common::drive::{Random, TINY};
use lapidary::convert::{ConvertOptions, to_gguf, to_safetensors};
use lapidary::verify::{Arithmetic, Dump, Formats, Report, default_tokens, typical_loss, verify};
use lapidary::{Checkpoint, Compute, EmbedScale, LoadOptions, Stepper, load_stepper};
use lapidary_formats::{Format, Scales, TensorView, decode_row};
use lapidary_reference::tiny::{self, Variant};
use lapidary_weights::export::Layout;
use lapidary_weights::names::{Spelling, spell};
use lapidary_weights::safetensors::{Dtype, Entry, File, NewTensor, write};
use lapidary_weights::{ExpertPart, LayerRole, Role, gguf};

/// More than the tiny models' window of keys.
const TOKENS: usize = 29;

fn stepper(path: &Path, compute: Compute) -> (Stepper, Formats) {
    let checkpoint = Checkpoint::open(path).expect("it opens");
    let options = LoadOptions {
        context: Some(TOKENS),
        chunk: TOKENS,
        head_rows: 8,
        threads: Some(2),
        compute,
        embed_scale: EmbedScale::F32,
        ..LoadOptions::default()
    };
    let stepper = load_stepper(&checkpoint, &options, &mut |_| {}).expect("it loads");
    let formats = Formats::of(&checkpoint, stepper.model().layers.len());
    (stepper, formats)
}

fn dump(path: &Path) -> Dump {
    let (mut s, formats) = stepper(path, Compute::F32);
    let tokens = default_tokens(&s, TOKENS);
    Dump::make(&mut s, &tokens, formats).expect("it runs")
}

fn held(path: &Path, compute: Compute, dump: &Dump) -> Report {
    let (mut s, formats) = stepper(path, compute);
    let arithmetic = if compute == Compute::F32 { Arithmetic::F32 } else { Arithmetic::Fast };
    verify(&mut s, &formats, arithmetic, dump).expect("it runs")
}

struct Model {
    folder: tempfile::TempDir,
}

impl Model {
    /// A model with odd widths, which quantised formats cannot hold.
    fn tiny(variant: Variant) -> Model {
        let folder = tempfile::tempdir().expect("a folder");
        tiny::write(variant, folder.path()).expect("the checkpoint is written");
        Model { folder }
    }

    /// A trained model in bf16: the stored Q8_0 file, decoded and rounded.
    fn pebble(name: &str) -> Model {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let source =
            Checkpoint::open(root.join(format!("models/pebble-{name}-q8_0.gguf"))).expect("it opens");
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::copy(
            root.join(format!("tests/pebble/{name}/config.json")),
            folder.path().join("config.json"),
        )
        .expect("a config");
        let mut list: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
        let mut add = |role: Role, view: &TensorView<'_>, shape: Vec<usize>| {
            let name = spell(role, Spelling::Composite).expect("a name");
            let mut row = vec![0.0; view.cols];
            let mut bytes = Vec::new();
            for r in 0..view.rows {
                decode_row(view, r, &mut row);
                bytes.extend(row.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()));
            }
            list.push((name, shape, bytes));
        };
        for role in source.roles().filter(|r| *r != Role::RopeFreqs) {
            match role {
                Role::Layer(layer, LayerRole::ExpertsGateUp | LayerRole::ExpertsDown) => {
                    let parts: &[ExpertPart] = match role {
                        Role::Layer(_, LayerRole::ExpertsDown) => &[ExpertPart::Down],
                        _ => &[ExpertPart::Gate, ExpertPart::Up],
                    };
                    for index in 0..source.experts_in_file(layer) as u32 {
                        for &part in parts {
                            let view = source.expert(layer, index, part).unwrap().expect("an expert");
                            let shape = vec![view.rows, view.cols];
                            add(Role::Layer(layer, LayerRole::Expert { index, part }), &view, shape);
                        }
                    }
                }
                // The trained scalars are all 1, so that a missing one would change nothing.
                Role::Layer(1, LayerRole::LayerScalar) => {
                    let bytes = 0.75f32.to_le_bytes();
                    let view = TensorView {
                        name: "scalar".into(),
                        rows: 1,
                        cols: 1,
                        format: Format::F32,
                        bytes: &bytes,
                        scales: Scales::None,
                    };
                    add(role, &view, vec![1]);
                }
                _ => {
                    let view = source.tensor(role).unwrap().expect("it is one of the roles");
                    let shape = if view.rows == 1 { vec![view.cols] } else { vec![view.rows, view.cols] };
                    add(role, &view, shape);
                }
            }
        }
        let tensors: Vec<NewTensor<'_>> = list
            .iter()
            .map(|(name, shape, bytes)| NewTensor {
                name: name.clone(),
                dtype: Dtype::Bf16,
                shape: shape.clone(),
                bytes,
            })
            .collect();
        write(&folder.path().join("model.safetensors"), &tensors, &Default::default())
            .expect("it is written");
        Model { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn gguf(&self, format: Format) -> PathBuf {
        let out = self.folder.path().join(format!("{format}.gguf"));
        to_gguf(&Checkpoint::open(self.path()).unwrap(), &out, &ConvertOptions::new(format))
            .expect("it converts");
        out
    }

    fn safetensors(&self, layout: Layout) -> PathBuf {
        let out = self.folder.path().join(format!("{layout:?}"));
        to_safetensors(&Checkpoint::open(self.path()).unwrap(), &out, layout, &mut |_| {})
            .expect("it converts");
        out
    }
}

#[test]
fn the_same_program_gives_the_same_bits() {
    let models = TINY.map(Model::tiny).into_iter().chain(["moe", "e"].map(Model::pebble));
    for model in models {
        for compute in [Compute::F32, Compute::Fast] {
            let (mut s, formats) = stepper(model.path(), compute);
            let tokens = default_tokens(&s, TOKENS);
            let dump = Dump::make(&mut s, &tokens, formats).unwrap();
            let r = held(model.path(), compute, &dump);
            assert!(r.same_program && r.first_departure().is_none(), "{compute:?}: {r:?}");
            assert!(r.layers.iter().all(|c| c.worst == 0.0), "{r:?}");
            assert!(
                r.embed.worst == 0.0
                    && r.head.worst == 0.0
                    && r.whole.as_ref().unwrap().logits.kl == 0.0
                    && r.whole.as_ref().unwrap().logits.top1 == 1.0
            );
        }
    }
}

#[test]
fn sound_models_pass_in_every_format_and_arithmetic() {
    for name in ["moe", "e"] {
        let model = Model::pebble(name);
        let dump = dump(model.path());
        let formats =
            [Format::F32, Format::Q8_0, Format::Q6K, Format::Q4_0, Format::Q4K].map(|f| model.gguf(f));
        let layouts = [Layout::Fp8Row, Layout::Nvfp4Divisor].map(|l| model.safetensors(l));
        for path in formats.into_iter().chain(layouts).chain([model.path().to_owned()]) {
            for compute in [Compute::F32, Compute::Fast] {
                let r = held(&path, compute, &dump);
                let worst = r.layers.iter().map(|c| c.median / c.allowed).fold(0.0, f64::max);
                let file = path.file_name().unwrap().to_string_lossy();
                eprintln!(
                    "{name} {file} {compute:?}: {worst:.2} of what is explained, KL {:.1e}",
                    r.whole.as_ref().unwrap().logits.kl
                );
                assert_eq!(r.first_departure(), None, "{name} {file} {compute:?}: {r:?}");
            }
        }
    }
}

/// Changes the bytes of a tensor of a GGUF file.
fn patch(path: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let (start, length) = {
        let file = gguf::File::open(path).unwrap();
        let info = file.tensor(tensor).unwrap_or_else(|| panic!("no {tensor}"));
        (info.start as usize, info.bytes.unwrap() as usize)
    };
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes[start..start + length]);
    std::fs::write(path, bytes).unwrap();
}

fn tensor(path: &Path, name: &str) -> Vec<u8> {
    gguf::File::open(path).unwrap().bytes(name).unwrap().to_vec()
}

/// Changes the float32 behind a metadata key.
fn patch_key(path: &Path, key: &str, value: f32) {
    let mut bytes = std::fs::read(path).unwrap();
    let at = bytes
        .windows(key.len() + 4)
        .position(|w| w.starts_with(key.as_bytes()) && w[key.len()..] == [6, 0, 0, 0]);
    let at = at.unwrap_or_else(|| panic!("no key {key}")) + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn planted_faults_are_named_by_their_layer() {
    for name in ["moe", "e"] {
        let model = Model::pebble(name);
        let dump = dump(model.path());
        let full = (0..).find(|&l| is_full(model.path(), l)).unwrap();
        let last = dump.hidden.len() - 1;
        type Fault = (&'static str, String, Box<dyn Fn(&Path)>);
        let faults: Vec<Fault> = vec![
            (
                "swapped norms",
                "layer 2".into(),
                Box::new(|p| {
                    let (a, b) = ("blk.2.post_attention_norm.weight", "blk.2.ffn_norm.weight");
                    let (x, y) = (tensor(p, a), tensor(p, b));
                    patch(p, a, |bytes| bytes.copy_from_slice(&y));
                    patch(p, b, |bytes| bytes.copy_from_slice(&x));
                }),
            ),
            (
                "a missing layer scalar",
                "layer 1".into(),
                Box::new(|p| {
                    patch(p, "blk.1.layer_output_scale.weight", |bytes| {
                        bytes.copy_from_slice(&1.0f32.to_le_bytes())
                    });
                }),
            ),
            (
                "another rope base of full layers",
                format!("layer {full}"),
                Box::new(|p| {
                    patch_key(p, "gemma4.rope.freq_base", 10_000.0);
                }),
            ),
            (
                "another rope base of sliding layers",
                "layer 0".into(),
                Box::new(|p| {
                    patch_key(p, "gemma4.rope.freq_base_swa", 1_000_000.0);
                }),
            ),
            (
                "a bad block",
                format!("layer {last}"),
                Box::new(move |p| {
                    // The scale of one block of 32 weights, sixty times what it was.
                    patch(p, &format!("blk.{last}.ffn_down.weight"), |bytes| {
                        let scale = half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32() * 60.0;
                        bytes[..2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
                    });
                }),
            ),
            (
                "a bad row of the final norm",
                "head".into(),
                Box::new(|p| {
                    patch(p, "output_norm.weight", |bytes| {
                        bytes[..4].copy_from_slice(&40.0f32.to_le_bytes());
                    });
                }),
            ),
        ];
        for (what, expected, plant) in faults {
            let path = model.gguf(Format::Q8_0);
            plant(&path);
            let report = held(&path, Compute::F32, &dump);
            assert_eq!(report.first_departure(), Some(expected.clone()), "{name}, {what}: {report:?}");
            let others = report
                .layers
                .iter()
                .enumerate()
                .filter(|(l, c)| c.departs() && format!("layer {l}") != expected);
            let sliding_or_full = what.contains("rope");
            assert!(sliding_or_full || others.count() == 0, "{name}, {what}: only its own layer departs");
        }
    }
}

fn is_full(path: &Path, layer: usize) -> bool {
    let config = lapidary::Config::from_checkpoint(&Checkpoint::open(path).unwrap()).unwrap();
    config.layers[layer].group == lapidary_ops::Group::Full
}

/// Codes of one tensor in a file: a block every `block` bytes, whose byte `code` holds codes and nothing else.
struct Codes {
    file: PathBuf,
    start: usize,
    bytes: usize,
    block: usize,
    code: usize,
}

/// The layers' matrices of a GGUF file in `format`.
fn codes_of_gguf(path: &Path, format: Format, block: usize, code: usize) -> Vec<Codes> {
    let file = gguf::File::open(path).unwrap();
    let of_layers = |t: &&gguf::TensorInfo| t.name.starts_with("blk.") && t.kind.format() == Some(format);
    let matrices = file.tensors().filter(of_layers).filter(|t| t.dims.len() > 1);
    matrices
        .map(|t| Codes {
            file: path.to_owned(),
            start: t.start as usize,
            bytes: t.bytes.unwrap() as usize,
            block,
            code,
        })
        .collect()
}

/// The quantised matrices of a folder of safetensors.
fn codes_of_safetensors(path: &Path) -> Vec<Codes> {
    let file = path.join("model.safetensors");
    let opened = File::open(&file).unwrap();
    let header = std::fs::read(&file).unwrap()[..8].try_into().map(u64::from_le_bytes).unwrap() as usize;
    let codes = |e: &&Entry| e.shape.len() == 2 && matches!(e.dtype, Dtype::F8E4M3 | Dtype::U8 | Dtype::I32);
    // A scale of NVFP4 is FP8 too.
    let entries = opened.entries().iter().filter(codes).filter(|e| !e.name.ends_with("scale"));
    entries
        .map(|e| Codes {
            file: file.clone(),
            start: 8 + header + e.begin as usize,
            bytes: (e.end - e.begin) as usize,
            block: 16,
            code: 5,
        })
        .collect()
}

/// One flipped bit in every ten thousandth block, wherever it falls among the layers' matrices.
fn flipped_bits_are_noticed(path: &Path, matrices: &[Codes], what: &str, random: &mut Random) {
    let dump = dump(path);
    assert!(!matrices.is_empty(), "{what} has matrices");
    let blocks: usize = matrices.iter().map(|m| m.bytes / m.block).sum();
    let flips = blocks.div_ceil(10_000);
    let sound = std::fs::read(&matrices[0].file).unwrap();
    for trial in 0..6 {
        let mut bytes = sound.clone();
        for _ in 0..flips {
            let m = &matrices[random.next() as usize % matrices.len()];
            let at = m.start + (random.next() as usize % (m.bytes / m.block)) * m.block + m.code;
            // The low half of a byte: no code of eight bits becomes a NaN, which loading refuses.
            let bit = random.next() % 4;
            let makes_nan = bytes[at] & 0x70 == 0x70;
            bytes[at] ^= 1 << if makes_nan { 4 } else { bit };
        }
        std::fs::write(&matrices[0].file, &bytes).unwrap();
        let report = held(path, Compute::F32, &dump);
        assert!(report.first_departure().is_some(), "{what} trial {trial}: {flips} flips of {blocks} blocks");
    }
    std::fs::write(&matrices[0].file, &sound).unwrap();
    assert_eq!(held(path, Compute::F32, &dump).first_departure(), None, "{what}");
}

#[test]
fn flipped_bits_in_one_of_ten_thousand_blocks_of_gguf_are_noticed() {
    let mut random = Random::new(5);
    for name in ["moe", "e"] {
        let model = Model::pebble(name);
        for (format, block, code) in [
            (Format::Bf16, 64, 62),
            (Format::Q8_0, 34, 33),
            (Format::Q4_0, 18, 17),
            (Format::Q4_1, 20, 19),
            (Format::Q5_0, 22, 21),
            (Format::Q5_1, 24, 23),
            (Format::Iq4Nl, 18, 17),
            (Format::Mxfp4, 17, 16),
            (Format::Q4K, 144, 143),
            (Format::Q5K, 176, 175),
            (Format::Q6K, 210, 127),
        ] {
            let path = model.gguf(format);
            let codes = codes_of_gguf(&path, format, block, code);
            flipped_bits_are_noticed(&path, &codes, &format!("{name} {format}"), &mut random);
        }
    }
}

#[test]
fn flipped_bits_in_one_of_ten_thousand_blocks_of_safetensors_are_noticed() {
    let mut random = Random::new(6);
    for name in ["moe", "e"] {
        let model = Model::pebble(name);
        for layout in [Layout::Fp8Row, Layout::Fp8Block, Layout::Nvfp4Divisor, Layout::Int4] {
            let path = model.safetensors(layout);
            let codes = codes_of_safetensors(&path);
            flipped_bits_are_noticed(&path, &codes, &format!("{name} {layout:?}"), &mut random);
        }
    }
}

#[test]
fn dumps_come_back_from_their_files_and_others_are_refused() {
    let model = Model::tiny(Variant::Moe);
    let made = dump(model.path());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dump.safetensors");
    made.write(&path).unwrap();
    let (layers, width) = (made.hidden.len(), made.embed.len() / TOKENS);
    let vocab = made.logits.len() / TOKENS;
    assert_eq!(Dump::read(&path, layers, width, vocab).unwrap(), made);
    for (layers, width, vocab, message) in [
        (layers + 1, width, vocab, "hidden"),
        (layers - 1, width, vocab, "is there, but the model has"),
        (layers, width + 1, vocab, "the model"),
        (layers, width, vocab + 1, "logits"),
        (layers, width, 40, "the vocabulary has 40"),
    ] {
        let error = Dump::read(&path, layers, width, vocab).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
    let mut bad = made.clone();
    bad.hidden[2][7] = f32::NAN;
    bad.write(&path).unwrap();
    assert!(Dump::read(&path, layers, width, vocab).unwrap_err().to_string().contains("hidden.2"));
    // More tokens than a batch holds are refused, and the stepper goes on.
    let (mut s, formats) = stepper(model.path(), Compute::F32);
    let long = Dump { tokens: vec![5; TOKENS + 1], ..made.clone() };
    assert!(verify(&mut s, &formats, Arithmetic::F32, &long).is_err());
    assert!(verify(&mut s, &formats, Arithmetic::F32, &made).unwrap().first_departure().is_none());
}

#[test]
fn coarser_formats_lose_more() {
    assert_eq!(typical_loss(Format::F32), 0.0);
    let losses = [Format::Bf16, Format::Q8_0, Format::Q6K, Format::Q4K, Format::Q4_0].map(typical_loss);
    assert!(losses.windows(2).all(|p| p[0] < p[1]), "{losses:?}");
}
