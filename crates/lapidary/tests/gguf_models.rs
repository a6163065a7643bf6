//! The models with goldens, written as GGUF: the same numbers as from safetensors, bit for bit.

mod common;

use common::{On, Setup, stepper};
use lapidary_engine::Prompt;
use lapidary_formats::{Format, decode_row};
use lapidary_model::{Config, Family};
use lapidary_ops::Group;
use lapidary_reference::{Golden, Limits, assert_close, compare};
use lapidary_weights::gguf::{GgmlType, Version, Writer};
use lapidary_weights::names::{Spelling, spell};
use lapidary_weights::{Checkpoint, ConfigSource, LayerRole, Role};

/// How a converter may write experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Experts {
    Fused,
    Separate,
    /// Without their own scale, which is multiplied into the down matrices.
    Folded,
}

/// One tensor: name, lengths slowest first, values or bf16 bytes.
struct Tensor {
    name: String,
    shape: Vec<usize>,
    format: Format,
    bytes: Vec<u8>,
}

impl Tensor {
    fn f32s(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor { name: name.into(), shape: shape.to_vec(), format: Format::F32, bytes }
    }
}

fn config_of(checkpoint: &Checkpoint) -> Config {
    Config::from_checkpoint(checkpoint).expect("config is read")
}

fn tensors(checkpoint: &Checkpoint, config: &Config, experts: Experts) -> Vec<Tensor> {
    let mut all = Vec::new();
    for role in checkpoint.roles() {
        let Some(name) = spell(role, Spelling::Gguf) else { continue };
        let (stored, view) = (checkpoint.stored(role).unwrap(), checkpoint.tensor(role).unwrap().unwrap());
        let mut values = vec![0.0; view.rows * view.cols];
        values.chunks_mut(view.cols).enumerate().for_each(|(r, out)| decode_row(&view, r, out));
        if stored.shape.len() < 2 {
            // Converters add the one that Gemma 3's gains lack.
            if config.norm_plus_one {
                values.iter_mut().for_each(|v| *v += 1.0);
            }
            if matches!(role, Role::Layer(_, LayerRole::PerExpertScale)) && experts == Experts::Folded {
                continue;
            }
            all.push(Tensor::f32s(&name, &[values.len()], &values));
            continue;
        }
        match (role, experts) {
            (Role::Layer(layer, LayerRole::ExpertsGateUp), Experts::Separate) => {
                let &[count, rows, cols] = stored.shape else { panic!("a stack") };
                for (part, name) in ["ffn_gate_exps", "ffn_up_exps"].iter().enumerate() {
                    let half = rows / 2 * cols;
                    let values: Vec<f32> =
                        (0..count).flat_map(|e| &values[(2 * e + part) * half..][..half]).copied().collect();
                    all.push(Tensor::f32s(
                        &format!("blk.{layer}.{name}.weight"),
                        &[count, rows / 2, cols],
                        &values,
                    ));
                }
            }
            (Role::Layer(layer, LayerRole::ExpertsDown), Experts::Folded) => {
                let scale = Role::Layer(layer, LayerRole::PerExpertScale);
                let scales = checkpoint.expect_vector(scale, stored.shape[0]).unwrap();
                let each = values.len() / scales.len();
                values.chunks_mut(each).zip(scales).for_each(|(v, s)| v.iter_mut().for_each(|v| *v *= s));
                all.push(Tensor::f32s(&name, stored.shape, &values));
            }
            _ => {
                let (shape, format, bytes) = (stored.shape.to_vec(), view.format, view.bytes.to_vec());
                all.push(Tensor { name, shape, format, bytes });
            }
        }
    }
    if config.family == Family::Gemma4 {
        let head_dim = config.layers.iter().find(|l| l.group == Group::Full).expect("a full layer").head_dim;
        let rotated = (config.rope[Group::Full.index()].rotated * head_dim as f64 / 2.0) as usize;
        let divisors: Vec<f32> = (0..head_dim / 2).map(|i| if i < rotated { 1.0 } else { 1e30 }).collect();
        all.push(Tensor::f32s("rope_freqs.weight", &[head_dim / 2], &divisors));
    }
    all
}

fn metadata(config: &Config) -> Writer {
    let arch = if config.family == Family::Gemma4 { "gemma4" } else { "gemma3" };
    let key = |name: &str| format!("{arch}.{name}");
    let mut w = Writer::new(Version::V3);
    w.set("general.architecture", arch).unwrap();
    let each = |f: &dyn Fn(&lapidary_model::LayerConfig) -> usize| -> Vec<u32> {
        config.layers.iter().map(|l| f(l) as u32).collect()
    };
    w.set(&key("attention.head_count_kv"), each(&|l| l.kv_heads)).unwrap();
    w.set(&key("feed_forward_length"), each(&|l| l.intermediate)).unwrap();
    let sliding: Vec<bool> = config.layers.iter().map(|l| l.group == Group::Sliding).collect();
    w.set(&key("attention.sliding_window_pattern"), sliding).unwrap();
    let dim = |g| config.layers.iter().find(|l| l.group == g).expect("a layer of the group").head_dim;
    let moe = config.moe;
    for (name, value) in [
        ("block_count", config.layers.len()),
        ("embedding_length", config.hidden),
        ("context_length", config.max_positions),
        ("attention.head_count", config.heads),
        ("attention.key_length", dim(Group::Full)),
        ("attention.key_length_swa", dim(Group::Sliding)),
        ("attention.sliding_window", config.window),
        ("attention.shared_kv_layers", config.layers.len() - config.first_shared()),
        ("embedding_length_per_layer_input", config.per_layer.map_or(0, |p| p.width)),
        ("expert_count", moe.map_or(0, |m| m.experts)),
        ("expert_used_count", moe.map_or(0, |m| m.top_k)),
        ("expert_feed_forward_length", moe.map_or(0, |m| m.width)),
    ] {
        w.set(&key(name), value as u32).unwrap();
    }
    w.set(&key("attention.layer_norm_rms_epsilon"), config.eps).unwrap();
    if let Some(cap) = config.final_softcap {
        w.set(&key("final_logit_softcapping"), cap).unwrap();
    }
    w.set(&key("rope.freq_base"), config.rope[Group::Full.index()].theta as f32).unwrap();
    w.set(&key("rope.freq_base_swa"), config.rope[Group::Sliding.index()].theta as f32).unwrap();
    w.set("tokenizer.ggml.eos_token_ids", config.eos.clone()).unwrap();
    w
}

/// The model of a golden as a GGUF file.
fn convert(golden: &Golden, experts: Experts) -> (tempfile::TempDir, std::path::PathBuf) {
    let checkpoint = Checkpoint::open(golden.folder()).expect("checkpoint opens");
    let config = config_of(&checkpoint);
    let tensors = tensors(&checkpoint, &config, experts);
    let mut writer = metadata(&config);
    for t in &tensors {
        let dims: Vec<u64> = t.shape.iter().rev().map(|&d| d as u64).collect();
        writer.tensor(&t.name, &dims, GgmlType::of(t.format).expect("a format of GGUF")).unwrap();
    }
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("model.gguf");
    let mut body = writer.create(&path).unwrap();
    tensors.iter().for_each(|t| body.write(&t.name, &t.bytes).unwrap());
    body.finish().unwrap();

    let converted = Checkpoint::open(&path).expect("GGUF opens");
    assert!(matches!(converted.config(), ConfigSource::Gguf(_)));
    let found = config_of(&converted);
    // What GGUF does not state: what it calls itself, placeholders without a vocabulary, gains without their one.
    let expected = Config {
        model_type: found.model_type.clone(),
        placeholders: Vec::new(),
        norm_plus_one: false,
        vision: found.vision,
        notes: Vec::new(),
        ..config
    };
    assert_eq!(found, expected);
    (dir, path)
}

fn logits(path: &std::path::Path, on: On, prompt: &Prompt) -> Vec<f32> {
    let mut logits = Vec::new();
    stepper(path, on, Setup::default())
        .score(prompt, &mut |_, row| logits.extend_from_slice(row), &mut |_, _| {})
        .expect("the prompt runs");
    assert!(logits.iter().all(|v| v.is_finite()));
    logits
}

#[test]
fn gguf_gives_the_bits_of_safetensors() {
    for (variant, experts) in [
        ("dense31b", Experts::Fused),
        ("moe26b", Experts::Fused),
        ("moe26b", Experts::Separate),
        ("moe26b", Experts::Folded),
        ("e2b", Experts::Fused),
        ("unified12b", Experts::Fused),
        ("gemma3", Experts::Fused),
    ] {
        let golden = Golden::variant(variant).expect("golden");
        let ids: Vec<u32> = golden.tokens("input_ids").expect("tokens").iter().map(|&t| t as u32).collect();
        let prompt = Prompt::from(&ids[..]);
        let (_dir, path) = convert(&golden, experts);
        for on in [On::Reference, On::Cpu { threads: 2 }].into_iter().chain(common::gpu()) {
            let expected = logits(golden.folder(), on, &prompt);
            let found = logits(&path, on, &prompt);
            if experts == Experts::Folded {
                // The product is rounded once more; the golden's own limits hold.
                let limits = Limits { rel: 5e-5, max: 5e-3 };
                assert_close(variant, &compare(&found, &expected), limits);
            } else {
                assert!(found == expected, "{variant} {experts:?} on {on:?}");
            }
        }
    }
}
