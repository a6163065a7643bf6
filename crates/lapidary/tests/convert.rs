//! Conversions to GGUF: what the files say, that they are repeatable, and the models that the project carries.

mod common;

use std::path::{Path, PathBuf};

use common::{On, Setup, stepper};
use lapidary::convert::{
    ConvertError, ConvertOptions, Layout, Mix, Types, chat_template, to_gguf, to_gguf_with, to_safetensors,
};
use lapidary_engine::Prompt;
use lapidary_formats::{Format, TensorView, decode_row};
use lapidary_reference::tiny::{self, Variant};
use lapidary_text::{Builtin, ChatInput, ChatTemplate, GgufVocab, Specials, Strings, Tokenizer};
use lapidary_weights::gguf::{self, Metadata, StringArray};
use lapidary_weights::safetensors::{Dtype, File, NewTensor, write};
use lapidary_weights::{Checkpoint, Role};
use serde_json::Value;

fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn vocab(meta: &Metadata) -> GgufVocab {
    let list = |key: &str| -> Strings { meta.require::<&StringArray>(key).expect(key).iter().collect() };
    GgufVocab {
        model: meta.require::<&str>("tokenizer.ggml.model").expect("model").to_owned(),
        tokens: list("tokenizer.ggml.tokens"),
        scores: Vec::new(),
        token_types: match meta.value("tokenizer.ggml.token_type") {
            Some(gguf::Value::Array(gguf::Array::I32(types))) => types.clone(),
            other => panic!("token types are {other:?}"),
        },
        merges: list("tokenizer.ggml.merges"),
        bos: meta.get("tokenizer.ggml.bos_token_id").unwrap(),
        eos: meta.get("tokenizer.ggml.eos_token_id").unwrap(),
        unk: meta.get("tokenizer.ggml.unknown_token_id").unwrap(),
        pad: meta.get("tokenizer.ggml.padding_token_id").unwrap(),
        add_space_prefix: meta.get("tokenizer.ggml.add_space_prefix").unwrap(),
        ..GgufVocab::default()
    }
}

const PEBBLES: [&str; 2] = ["moe", "e"];

fn pebble(name: &str) -> gguf::File {
    gguf::File::open(project(&format!("models/pebble-{name}-q8_0.gguf"))).expect("the model opens")
}

/// Tokenizer and template of the stored models make the prompts of the samples, which another program made from the
/// original files.
#[test]
fn the_pebbles_make_the_samples_prompts() {
    for name in PEBBLES {
        let file = pebble(name);
        let tokenizer = Tokenizer::from_gguf(vocab(file.metadata())).expect("the vocabulary is complete");
        let template: &str = file.metadata().require("tokenizer.chat_template").expect("a template");
        let template = ChatTemplate::new(template).expect("it compiles");
        assert!(template.is_gemma4());
        assert_eq!(template.unknown_markers(&tokenizer), Vec::<String>::new());
        let samples = std::fs::read(project(&format!("tests/pebble/{name}/samples.json"))).unwrap();
        let samples: Vec<Value> = serde_json::from_slice(&samples).unwrap();
        assert_eq!(samples.len(), 20);
        for sample in samples {
            let text = sample["rendered"].as_str().unwrap();
            let ids: Vec<u32> = serde_json::from_value(sample["prompt_ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(text, Specials::Parse), ids, "{name}: {text}");
            let list = |field: &str| sample[field].as_array().cloned().unwrap_or_default();
            if sample["messages"].is_array() {
                let input = ChatInput {
                    messages: list("messages"),
                    tools: list("tools"),
                    enable_thinking: sample["enable_thinking"].as_bool(),
                    ..ChatInput::default()
                };
                assert_eq!(template.encode(&tokenizer, &input).unwrap().ids, ids, "{name}: {text}");
            }
        }
    }
}

#[test]
fn the_pebbles_are_small_and_finite() {
    for name in PEBBLES {
        let file = pebble(name);
        assert!(file.file_bytes() < 8_000_000, "{name} has {} bytes", file.file_bytes());
        assert_eq!(file.unsupported_tensors().count(), 0);
        for tensor in file.tensors() {
            for view in matrices(&file, tensor) {
                lapidary_formats::validate(&view).expect("its scales are good");
            }
        }
    }
}

/// The matrix of a tensor, or all of a stack.
fn matrices<'a>(file: &'a gguf::File, tensor: &gguf::TensorInfo) -> Vec<TensorView<'a>> {
    match tensor.dims.as_slice() {
        [_, _, count] => (0..*count as usize).map(|i| file.view3(&tensor.name, i).unwrap()).collect(),
        _ => vec![file.view(&tensor.name).unwrap()],
    }
}

struct Tiny {
    folder: tempfile::TempDir,
}

impl Tiny {
    fn new(variant: Variant) -> Tiny {
        let folder = tempfile::tempdir().expect("a temporary folder");
        tiny::write(variant, folder.path()).expect("the checkpoint is written");
        let tiny = Tiny { folder };
        if variant == Variant::Gemma3 {
            // The only scale of scores that GGUF files of this depth can mean.
            tiny.set("query_pre_attn_scalar", variant.sizes().head_dim[0].into());
        }
        tiny
    }

    fn set(&self, field: &str, value: Value) {
        let path = self.path("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let text = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
        text[field] = value;
        std::fs::write(&path, config.to_string()).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn checkpoint(&self) -> Checkpoint {
        Checkpoint::open(self.path("model.safetensors")).expect("the checkpoint opens")
    }
}

#[test]
fn a_conversion_is_repeatable() {
    for variant in Variant::ALL {
        let tiny = Tiny::new(variant);
        for name in ["a.gguf", "b.gguf"] {
            to_gguf(&tiny.checkpoint(), &tiny.path(name), &ConvertOptions::new(Format::Q8_0)).unwrap();
        }
        let [a, b] = ["a.gguf", "b.gguf"].map(|name| std::fs::read(tiny.path(name)).unwrap());
        assert!(a == b, "{variant:?}");
        assert_eq!(std::fs::read_dir(tiny.folder.path()).unwrap().count(), 4, "nothing else stays behind");
    }
}

/// In float32 nothing is lost, so every value can be held against its origin; gains of Gemma 3 grow by one.
#[test]
fn every_value_arrives_in_its_place() {
    use lapidary_weights::LayerRole::*;
    use lapidary_weights::names::{Spelling, spell};
    for variant in Variant::ALL {
        let tiny = Tiny::new(variant);
        let (checkpoint, out) = (tiny.checkpoint(), tiny.path("f32.gguf"));
        let report = to_gguf(&checkpoint, &out, &ConvertOptions::new(Format::F32)).unwrap();
        let file = gguf::File::open(&out).unwrap();
        assert_eq!((report.tensors, report.bytes), (file.tensors().count(), file.file_bytes()));
        assert_eq!(report.fallbacks, []);
        let mut seen = 0;
        for role in checkpoint.roles() {
            let Some(tensor) = file.tensor(&spell(role, Spelling::Gguf).unwrap()) else {
                assert!(report.dropped.contains(&role.to_string()), "{variant:?} lacks {role}");
                continue;
            };
            let norm = matches!(
                role,
                Role::FinalNorm
                    | Role::Layer(_, InputNorm | PostAttnNorm | PreFfnNorm | PostFfnNorm | QNorm | KNorm)
            );
            let plus = if variant == Variant::Gemma3 && norm { 1.0 } else { 0.0 };
            let from = checkpoint.tensor(role).unwrap().unwrap();
            let (mut expected, mut found) = (vec![0.0; from.cols], vec![0.0; from.cols]);
            let mut row = 0;
            for to in matrices(&file, tensor) {
                assert_eq!(from.cols, to.cols, "{variant:?} {role}");
                for local in 0..to.rows {
                    decode_row(&from, row, &mut expected);
                    decode_row(&to, local, &mut found);
                    expected.iter_mut().for_each(|v| *v += plus);
                    assert_eq!(expected, found, "{variant:?} {role} row {row}");
                    row += 1;
                }
            }
            assert_eq!(row, from.rows, "{variant:?} {role}");
            seen += 1;
        }
        let computed = usize::from(variant != Variant::Gemma3);
        assert_eq!(seen + computed, report.tensors, "{variant:?}: all tensors but rope_freqs");
        let dead = if variant == Variant::PerLayerInputs { 9 } else { 0 };
        assert_eq!(report.dropped.len(), dead, "{variant:?}: keys, values and key norms of three layers");
    }
}

#[test]
fn widths_that_are_no_whole_blocks_fall_back_by_name() {
    let tiny = Tiny::new(Variant::Moe);
    let report =
        to_gguf(&tiny.checkpoint(), &tiny.path("q4_k.gguf"), &ConvertOptions::new(Format::Q4K)).unwrap();
    let embedding = report.fallbacks.iter().find(|f| f.tensor == "token_embd.weight").expect("it is named");
    assert_eq!((embedding.cols, embedding.format), (69, Format::Bf16));
    let file = gguf::File::open(tiny.path("q4_k.gguf")).unwrap();
    for fallback in &report.fallbacks {
        assert_eq!(file.tensor(&fallback.tensor).unwrap().kind.format(), Some(fallback.format));
    }
    assert!(report.fallbacks.iter().all(|f| !f.tensor.contains("ffn_gate_inp")), "the router is never asked");
}

/// Every golden's widths are whole blocks of 32, and none of 256: so the mix falls back as llama-quantize does.
#[test]
fn a_mix_chooses_tensor_by_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(project("tests/goldens/moe26b")).unwrap();
    let out = folder.path().join("mix.gguf");
    let mut last = (0, 0);
    let options = ConvertOptions { types: Types::Mix(Mix::Q4KM), ..ConvertOptions::new(Format::F32) };
    let report = to_gguf_with(&checkpoint, &out, &options, &mut |w| {
        assert!(w.done > last.0 && w.done <= w.total, "{w:?}");
        last = (w.done, w.total);
    })
    .unwrap();
    assert!(last.0 == last.1 && last.1 > 0, "{last:?}");
    let file = gguf::File::open(&out).unwrap();
    assert_eq!(file.metadata().require::<u32>("general.file_type").unwrap(), 15);
    // Eight experts: keys and values in Q8_0, the attention output in Q5_1 for Q5_K.
    for (name, format) in [
        ("token_embd.weight", Format::Q8_0),
        ("blk.0.attn_q.weight", Format::Q5_0),
        ("blk.0.attn_k.weight", Format::Q8_0),
        ("blk.0.attn_output.weight", Format::Q5_1),
        ("blk.0.ffn_gate_inp.weight", Format::F32),
        ("blk.2.ffn_down.weight", Format::Q8_0),
        ("blk.1.ffn_down.weight", Format::Q5_0),
    ] {
        assert_eq!(file.tensor(name).unwrap().kind.format(), Some(format), "{name}");
        let matrix = report.matrices.iter().find(|m| m.tensor == name).expect(name);
        assert_eq!((matrix.from, matrix.format), (Format::Bf16, format), "{name}");
    }
    assert!(report.fallbacks.iter().any(|f| f.tensor == "blk.0.attn_q.weight" && f.format == Format::Q5_0));
}

/// The errors told are those of the file's values, and no larger than the format's grid explains.
#[test]
fn the_errors_told_are_those_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(project("tests/goldens/dense31b")).unwrap();
    // Half a step of an even grid over the block's range, over the RMS of values that fill it like these: at most.
    for (format, bound) in
        [(Format::Q8_0, 0.01), (Format::Q5_0, 0.06), (Format::Q4_0, 0.12), (Format::Bf16, 0.0)]
    {
        let out = folder.path().join(format.name());
        let report = to_gguf(&checkpoint, &out, &ConvertOptions::new(format)).unwrap();
        let file = gguf::File::open(&out).unwrap();
        let role = Role::Layer(1, lapidary_weights::LayerRole::Up);
        let (before, after) =
            (checkpoint.tensor(role).unwrap().unwrap(), file.view("blk.1.ffn_up.weight").unwrap());
        let (mut a, mut b) = (vec![0.0; before.cols], vec![0.0; before.cols]);
        let (mut errors, mut squares, mut max) = (0f64, 0f64, 0f64);
        for row in 0..before.rows {
            decode_row(&before, row, &mut a);
            decode_row(&after, row, &mut b);
            for (&a, &b) in a.iter().zip(&b) {
                let e = f64::from(b) - f64::from(a);
                (errors, squares, max) =
                    (errors + e * e, squares + f64::from(a) * f64::from(a), max.max(e.abs()));
            }
        }
        let told = &report.matrices.iter().find(|m| m.tensor == "blk.1.ffn_up.weight").unwrap().error;
        assert!((told.relative_rms() - (errors / squares).sqrt()).abs() < 1e-12, "{format}");
        assert_eq!(told.max, max, "{format}");
        assert!(told.relative_rms() <= bound, "{format}: {}", told.relative_rms());
        assert!(bound == 0.0 || told.relative_rms() > bound / 10.0, "{format}: {}", told.relative_rms());
    }
}

/// A folder with everything beside the weights, towers copied, names as the source spells them.
#[test]
fn safetensors_conversions_are_whole_folders() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Tiny::new(Variant::Gemma3);
    let tower = [1u8, 2, 3, 4];
    {
        let file = File::open(&tiny.path("model.safetensors")).unwrap();
        let mut list: Vec<NewTensor> = file
            .entries()
            .iter()
            .map(|e| NewTensor {
                name: e.name.clone(),
                dtype: e.dtype,
                shape: e.shape.clone(),
                bytes: file.bytes(e),
            })
            .collect();
        let name = "model.vision_tower.patch.weight".to_owned();
        list.push(NewTensor { name, dtype: Dtype::Bf16, shape: vec![2], bytes: &tower });
        write(&tiny.path("more.safetensors"), &list, &Default::default()).unwrap();
    }
    std::fs::rename(tiny.path("more.safetensors"), tiny.path("model.safetensors")).unwrap();
    std::fs::write(tiny.path("generation_config.json"), "{}").unwrap();
    std::fs::write(tiny.path("chat_template.jinja"), "x").unwrap();
    let out = folder.path().join("fp8");
    let report = to_safetensors(&tiny.checkpoint(), &out, Layout::Fp8Row, &mut |_| {}).unwrap();
    assert!(report.notes.iter().any(|n| n.contains("1 tensors of vision")), "{:?}", report.notes);
    let mut names: Vec<_> =
        std::fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"]);
    let (from, to) = (
        File::open(&tiny.path("model.safetensors")).unwrap(),
        File::open(&out.join("model.safetensors")).unwrap(),
    );
    let copied = to.find("model.vision_tower.patch.weight").expect("the tower is there");
    assert_eq!(to.bytes(copied), tower);
    let prefix =
        if from.find("model.embed_tokens.weight").is_some() { "model." } else { "model.language_model." };
    assert!(to.find(&format!("{prefix}layers.0.mlp.up_proj.weight_scale")).is_some(), "{prefix}");
    assert_eq!(report.bytes, to.len());

    // There, and not to be replaced; then a width that the format can't have.
    let error = to_safetensors(&tiny.checkpoint(), &out, Layout::Fp8Row, &mut |_| {}).expect_err("it exists");
    assert!(error.to_string().contains("fp8"), "{error}");
    let error =
        to_safetensors(&tiny.checkpoint(), &folder.path().join("no"), Layout::Nvfp4Divisor, &mut |_| {});
    let error = error.expect_err("rows of 65").to_string();
    assert!(error.contains("proj.weight") && error.contains("multiple of 16"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing half done stays");
}

#[test]
fn what_a_file_cannot_say_is_refused_and_nothing_is_written() {
    let edit = |variant, field: &str, value: Value| {
        let tiny = Tiny::new(variant);
        tiny.set(field, value);
        std::fs::write(tiny.path("out.gguf"), "precious").unwrap();
        let error = to_gguf(&tiny.checkpoint(), &tiny.path("out.gguf"), &ConvertOptions::new(Format::Q8_0));
        assert_eq!(std::fs::read(tiny.path("out.gguf")).unwrap(), b"precious");
        assert!(!tiny.path("out.gguf.part").exists());
        error.expect_err(field)
    };
    let refused = |error: ConvertError, named: &str| {
        assert!(
            matches!(error, ConvertError::NotExpressible { .. }) && error.to_string().contains(named),
            "{error}"
        );
    };
    refused(edit(Variant::Dense, "hidden_activation", "silu".into()), "hidden_activation");
    refused(edit(Variant::Gemma3, "query_pre_attn_scalar", 100.into()), "query_pre_attn_scalar");
    let error = edit(Variant::Moe, "num_experts", 6.into());
    assert!(matches!(error, ConvertError::Experts { layer: 0, found: 7, expected: 6 }), "{error}");
    let error = edit(Variant::Dense, "intermediate_size", 130.into());
    assert!(error.to_string().contains("gate_proj"), "{error}");

    let tiny = Tiny::new(Variant::Dense);
    let out = tiny.path("out.gguf");
    let error = to_gguf(&tiny.checkpoint(), &out, &ConvertOptions::new(Format::Nvfp4)).expect_err("no type");
    assert!(error.to_string().contains("NVFP4"), "{error}");
    assert!(!out.exists());
}

#[test]
fn generation_defaults_become_keys() {
    let tiny = Tiny::new(Variant::Unified);
    let generation = serde_json::json!({
        "do_sample": true, "temperature": 0.75, "top_k": 61, "top_p": 0.5, "eos_token_id": [7, 1, 5],
        "suppress_tokens": [200, 199],
    });
    std::fs::write(tiny.path("generation_config.json"), generation.to_string()).unwrap();
    let out = tiny.path("out.gguf");
    let report = to_gguf(&tiny.checkpoint(), &out, &ConvertOptions::new(Format::Bf16)).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("tokenizer.json")), "{:?}", report.notes);
    let file = gguf::File::open(&out).unwrap();
    let meta = file.metadata();
    let list = |key: &str| match meta.value(key) {
        Some(gguf::Value::Array(list)) => list.integers().unwrap(),
        other => panic!("{key} is {other:?}"),
    };
    // 106 is in config.json alone.
    assert_eq!(list("tokenizer.ggml.eos_token_ids"), [7, 1, 5, 106]);
    assert_eq!(list("tokenizer.ggml.suppress_tokens"), [200, 199]);
    assert_eq!(meta.require::<u32>("tokenizer.ggml.eos_token_id").unwrap(), 7);
    assert_eq!(meta.require::<f32>("general.sampling.temp").unwrap(), 0.75);
    assert_eq!(meta.require::<f32>("general.sampling.top_p").unwrap(), 0.5);
    assert_eq!(meta.value("general.sampling.top_k"), Some(&gguf::Value::I32(61)));
    assert_eq!(meta.value("general.sampling.min_p"), None);
}

#[test]
fn a_tokenizer_that_does_not_fit_is_refused() {
    let tiny = Tiny::new(Variant::Dense);
    std::fs::copy(project("tests/pebble/moe/tokenizer.json"), tiny.path("tokenizer.json")).unwrap();
    let error = to_gguf(&tiny.checkpoint(), &tiny.path("out.gguf"), &ConvertOptions::new(Format::Bf16));
    let error = error.expect_err("4096 tokens").to_string();
    assert!(error.contains("tokenizer.json: 4096 tokens for an embedding of 211 rows"), "{error}");
}

/// Text-only checkpoints of Gemma 3 come with the tokenizer of their larger siblings, whose image marker has no row.
#[test]
fn special_tokens_without_a_row_are_left_out_and_named() {
    let tiny = Tiny::new(Variant::Dense);
    let text = std::fs::read_to_string(project("tests/pebble/moe/tokenizer.json")).unwrap();
    let mut file: Value = serde_json::from_str(&text).unwrap();
    let rows = 211;
    let pieces = file["model"]["vocab"].as_object_mut().unwrap();
    pieces.retain(|_, id| id.as_u64().unwrap() < rows - 3);
    pieces.extend(["a", "b", "ab"].iter().zip(rows - 3..).map(|(piece, id)| (piece.to_string(), id.into())));
    file["model"]["merges"] = serde_json::json!([["a", "b"]]);
    let mut marker = file["added_tokens"][0].clone();
    marker["id"] = rows.into();
    marker["content"] = "<image_soft_token>".into();
    file["added_tokens"].as_array_mut().unwrap().push(marker);
    std::fs::write(tiny.path("tokenizer.json"), file.to_string()).unwrap();
    let out = tiny.path("out.gguf");
    let report = to_gguf(&tiny.checkpoint(), &out, &ConvertOptions::new(Format::Bf16)).unwrap();
    assert!(report.notes.iter().any(|n| n.contains("left out: <image_soft_token>")), "{:?}", report.notes);
    let written = gguf::File::open(out).unwrap();
    assert_eq!(vocab(written.metadata()).tokens.len(), rows as usize);
}

#[test]
fn the_stored_template_is_the_built_in_one() {
    let conversation = ChatInput {
        messages: vec![serde_json::json!({"role": "user", "content": "Hello"})],
        ..ChatInput::default()
    };
    for builtin in [Builtin::Gemma4, Builtin::Gemma4Small, Builtin::Gemma3] {
        let stored = ChatTemplate::new(&chat_template(builtin)).unwrap().render(&conversation).unwrap();
        assert_eq!(stored, ChatTemplate::builtin(builtin).render(&conversation).unwrap(), "{builtin:?}");
    }
}

/// Greedy replies of the stored models. Where the two best logits of the original model are at least half apart at
/// every step, 8-bit weights must not change the reply.
#[test]
fn the_pebbles_reply_as_the_original_models_did() {
    for name in PEBBLES {
        let model = project(&format!("models/pebble-{name}-q8_0.gguf"));
        let setup = Setup { context: 700, ..Setup::default() };
        let mut stepper = stepper(&model, On::Cpu { threads: 2 }, setup);
        let samples = std::fs::read(project(&format!("tests/pebble/{name}/samples.json"))).unwrap();
        let samples: Vec<Value> = serde_json::from_slice(&samples).unwrap();
        let clear = |sample: &&Value| sample["min_margin"].as_f64().unwrap() > 0.5;
        let ids = |sample: &Value, field: &str| -> Vec<u32> {
            serde_json::from_value(sample[field].clone()).unwrap()
        };
        assert!(samples.iter().filter(clear).count() >= 5);
        for sample in samples.iter().filter(clear) {
            let expected = ids(sample, "reply_ids");
            stepper.reset();
            let mut token = stepper.prefill_prompt(&Prompt::from(&ids(sample, "prompt_ids")[..])).unwrap();
            let mut reply = vec![token];
            while reply.len() < expected.len() {
                token = stepper.decode_step(token, stepper.cursor()).unwrap();
                reply.push(token);
            }
            assert_eq!(reply, expected, "{name}: {}", sample["reply"]);
        }
    }
}
