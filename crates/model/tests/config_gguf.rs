//! Configs from GGUF metadata, as writers of several years write it.

use lapidary_model::{Config, Error, Family, VisionBlocks};
use lapidary_ops::Group::{Full, Sliding};
use lapidary_weights::Checkpoint;
use lapidary_weights::gguf::{Array, GgmlType, StringArray, Value, Version, Writer};

/// Metadata and names of a model without values: every tensor is zeros.
#[derive(Clone)]
struct Model {
    arch: &'static str,
    keys: Vec<(String, Value)>,
    /// Row length first.
    tensors: Vec<(String, Vec<u64>)>,
}

impl Model {
    fn new(arch: &'static str) -> Model {
        let keys = vec![("general.architecture".into(), arch.into())];
        Model { arch, keys, tensors: vec![("token_embd.weight".into(), vec![20, 13])] }
    }

    fn set(mut self, key: &str, value: impl Into<Value>) -> Model {
        let own = key.starts_with("tokenizer.");
        let key = if own { key.to_owned() } else { format!("{}.{key}", self.arch) };
        self.keys.retain(|(k, _)| *k != key);
        self.keys.push((key, value.into()));
        self
    }

    fn without(mut self, key: &str) -> Model {
        let key = format!("{}.{key}", self.arch);
        let before = self.keys.len();
        self.keys.retain(|(k, _)| *k != key);
        assert!(self.keys.len() < before, "{key} was not there");
        self
    }

    fn tensor(mut self, name: &str, dims: &[u64]) -> Model {
        self.tensors.push((name.to_owned(), dims.to_vec()));
        self
    }

    fn read(&self) -> Result<Config, Error> {
        let mut writer = Writer::new(Version::V3);
        self.keys.iter().for_each(|(key, value)| writer.set(key, value.clone()).unwrap());
        for (name, dims) in &self.tensors {
            writer.tensor(name, dims, GgmlType(0)).unwrap();
        }
        let mut body = writer.begin(Vec::new()).unwrap();
        for (name, dims) in &self.tensors {
            body.write(name, &vec![0; 4 * dims.iter().product::<u64>() as usize]).unwrap();
        }
        let bytes = body.finish().unwrap().leak();
        Config::from_checkpoint(&Checkpoint::from_gguf_bytes("odd.gguf", bytes)?)
    }

    fn refused(&self, parts: &[&str]) {
        let text = self.read().expect_err("should have been refused").to_string();
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in: {text}");
        }
    }
}

/// Five layers, the third and the last with full attention, the last without a value projection.
fn gemma4() -> Model {
    Model::new("gemma4")
        .set("block_count", 5u32)
        .set("embedding_length", 20u32)
        .set("context_length", 4096u32)
        .set("feed_forward_length", 28u32)
        .set("attention.head_count", 6u32)
        .set("attention.head_count_kv", vec![3i32, 3, 2, 3, 2])
        .set("attention.key_length", 14u32)
        .set("attention.value_length", 14u32)
        .set("attention.key_length_swa", 10u32)
        .set("attention.value_length_swa", 10u32)
        .set("attention.sliding_window", 33u32)
        .set("attention.sliding_window_pattern", vec![true, true, false, true, false])
        .set("attention.layer_norm_rms_epsilon", 2e-6f32)
        .set("final_logit_softcapping", 30f32)
        .set("rope.freq_base", 1e6f32)
        .set("rope.freq_base_swa", 1e4f32)
        .tensor("blk.0.attn_v.weight", &[20, 30])
        .tensor("blk.1.attn_v.weight", &[20, 30])
        .tensor("blk.2.attn_v.weight", &[20, 28])
        .tensor("blk.3.attn_v.weight", &[20, 30])
}

#[test]
fn gemma4_with_a_value_for_each_layer() {
    let c = gemma4().read().unwrap();
    assert_eq!((c.family, &*c.model_type), (Family::Gemma4, "gemma4"));
    assert_eq!((c.vocab, c.hidden, c.heads, c.window, c.max_positions), (13, 20, 6, 33, 4096));
    assert_eq!((c.eps, c.final_softcap, c.attn_softcap, c.score_scale), (2e-6, Some(30.0), None, 1.0));
    let each: Vec<_> =
        c.layers.iter().map(|l| (l.group, l.kv_heads, l.head_dim, l.values_are_keys)).collect();
    assert_eq!(
        each,
        [
            (Sliding, 3, 10, false),
            (Sliding, 3, 10, false),
            (Full, 2, 14, false),
            (Sliding, 3, 10, false),
            (Full, 2, 14, true),
        ]
    );
    assert!(c.layers.iter().all(|l| l.intermediate == 28 && l.donor.is_none()));
    assert_eq!((c.rope[Sliding.index()].theta, c.rope[Sliding.index()].rotated), (1e4, 1.0));
    assert_eq!((c.rope[Full.index()].theta, c.rope[Full.index()].rotated), (1e6, 0.25));
    assert!(c.value_norm && c.layer_scalar && c.tied && !c.norm_plus_one);
    assert!(c.moe.is_none() && c.per_layer.is_none() && c.notes.is_empty());
    assert_eq!((c.pad, c.bos, &*c.eos, &*c.placeholders), (0, 2, &[1][..], &[][..]));
}

#[test]
fn gemma4_with_scalars_shared_layers_and_per_layer_inputs() {
    let model = gemma4()
        .set("attention.head_count_kv", 2u64)
        .set("feed_forward_length", vec![28u32, 28, 28, 56, 56])
        .set("attention.sliding_window_pattern", 3u32)
        .set("attention.shared_kv_layers", 2u32)
        .set("embedding_length_per_layer_input", 4u32)
        .tensor("per_layer_token_embd.weight", &[20, 11]);
    let c = model.read().unwrap();
    // Layer 5 of 5 is full whatever the period says.
    let groups: Vec<_> = c.layers.iter().map(|l| l.group).collect();
    assert_eq!(groups, [Sliding, Sliding, Full, Sliding, Full]);
    assert_eq!(c.notes.len(), 1);
    let donors: Vec<_> = c.layers.iter().map(|l| l.donor).collect();
    assert_eq!(donors, [None, None, None, Some(1), Some(2)]);
    assert_eq!((c.layers[2].intermediate, c.layers[3].intermediate), (28, 56));
    assert!(c.layers.iter().all(|l| l.kv_heads == 2 && !l.values_are_keys));
    let p = c.per_layer.unwrap();
    assert_eq!((p.width, p.vocab, c.vision), (4, 11, VisionBlocks::Causal));
}

#[test]
fn gemma4_with_experts_and_a_tokenizer() {
    let tokens = StringArray::from_iter(["<pad>", "<eos>", "<bos>", "<|image|>", "a", "<|audio|>", "b"]);
    let c = gemma4()
        .set("expert_count", 7u32)
        .set("expert_used_count", 3u32)
        .set("expert_feed_forward_length", 9u32)
        .set("tokenizer.ggml.tokens", tokens)
        .set("tokenizer.ggml.eos_token_id", 6u32)
        .set("tokenizer.ggml.eos_token_ids", vec![1i32, 6])
        .set("tokenizer.ggml.eot_token_id", 4u32)
        .set("tokenizer.ggml.bos_token_id", 3u32)
        .set("tokenizer.ggml.padding_token_id", 1u32)
        .read()
        .unwrap();
    let m = c.moe.unwrap();
    assert_eq!((m.experts, m.top_k, m.width), (7, 3, 9));
    assert_eq!((c.pad, c.bos, &*c.eos), (1, 3, &[1, 4, 6][..]));
    assert_eq!(c.placeholders, [3, 5]);
}

fn gemma3() -> Model {
    Model::new("gemma3")
        .set("block_count", 7u32)
        .set("embedding_length", 20u32)
        .set("feed_forward_length", 28u32)
        .set("attention.head_count", 6u32)
        .set("attention.head_count_kv", 3u32)
        .set("attention.key_length", 16u32)
        .set("attention.sliding_window", 33u32)
}

#[test]
fn gemma3_with_what_it_leaves_out() {
    let c = gemma3().read().unwrap();
    assert_eq!((c.family, c.vocab, c.layers.len(), c.window), (Family::Gemma3, 13, 7, 33));
    let full: Vec<_> = c.layers.iter().map(|l| l.group == Full).collect();
    assert_eq!(full, [false, false, false, false, false, true, false]);
    assert!(c.layers.iter().all(|l| (l.head_dim, l.kv_heads, l.intermediate) == (16, 3, 28)));
    assert_eq!((c.score_scale, c.eps, c.final_softcap), (0.25, 1e-6, None));
    assert_eq!((c.rope[0].theta, c.rope[1].theta, c.rope[1].factor, c.rope[1].rotated), (1e4, 1e6, 1.0, 1.0));
    // The file's gains are whole, unlike those of safetensors.
    assert!(!c.norm_plus_one && !c.value_norm && !c.layer_scalar && c.notes.is_empty());

    let c = gemma3().set("rope.scaling.type", "linear").set("rope.scaling.factor", 8f32).read().unwrap();
    assert_eq!((c.rope[Sliding.index()].factor, c.rope[Full.index()].factor), (1.0, 8.0));
    gemma3().set("rope.scaling.type", "yarn").refused(&["rope scaling yarn"]);
}

#[test]
fn gemma3_of_62_layers_scales_scores_by_its_width() {
    let c = gemma3().set("block_count", 62u32).set("embedding_length", 24u32).read().unwrap();
    assert_eq!(c.score_scale, 0.5);
}

#[test]
fn other_architectures_are_refused_by_name() {
    Model::new("gemma4_assistant").refused(&["odd.gguf", "gemma4_assistant", "drafter"]);
    Model::new("gemma3n").refused(&["gemma3n", "gemma4 and gemma3"]);
    Model::new("llama").refused(&["llama"]);
    let nameless = Model { keys: Vec::new(), ..gemma4() };
    nameless.refused(&["odd.gguf", "general.architecture", "missing"]);
}

#[test]
fn wrong_metadata_is_named_with_file_and_key() {
    let set = |key: &str, value: Value| gemma4().set(key, value);
    let floats: Value = Array::F32(vec![1.0]).into();
    for (model, parts) in [
        (gemma4().without("block_count"), &["odd.gguf", "gemma4.block_count", "missing"][..]),
        (gemma4().without("embedding_length"), &["gemma4.embedding_length", "missing"]),
        (gemma4().without("attention.head_count_kv"), &["gemma4.attention.head_count_kv", "missing"]),
        (gemma4().without("attention.sliding_window"), &["gemma4.attention.sliding_window", "missing"]),
        (set("block_count", "five".into()), &["gemma4.block_count", "unsigned", "string"]),
        (set("block_count", 0u32.into()), &["gemma4.block_count", "0 layers"]),
        (set("block_count", u32::MAX.into()), &["gemma4.block_count", "4294967295"]),
        (set("block_count", (-1i32).into()), &["gemma4.block_count"]),
        (set("embedding_length", u64::MAX.into()), &["gemma4.embedding_length"]),
        (set("embedding_length", u32::MAX.into()), &["hidden_size", "4294967295"]),
        (set("attention.head_count_kv", vec![3u32, 3].into()), &["gemma4.attention.head_count_kv", "5"]),
        (set("attention.head_count_kv", 4u32.into()), &["num_key_value_heads", "6 query heads over 4"]),
        (set("attention.head_count_kv", 0u32.into()), &["num_key_value_heads"]),
        (
            set("attention.sliding_window_pattern", vec![true].into()),
            &["sliding_window_pattern", "1 entries"],
        ),
        (set("attention.sliding_window_pattern", 0u32.into()), &["sliding_window_pattern", "0"]),
        (set("attention.sliding_window_pattern", floats.clone()), &["sliding_window_pattern", "bools"]),
        (set("attention.shared_kv_layers", 5u32.into()), &["shared_kv_layers", "5 of 5"]),
        (set("attention.shared_kv_layers", 4u32.into()), &["layer 2", "Full"]),
        (set("attention.value_length", 8u32.into()), &["gemma4.attention.value_length", "key length"]),
        (set("attention.key_length_swa", 9u32.into()), &["value_length_swa"]),
        (set("attention.key_length", 0u32.into()), &["value_length"]),
        (set("attention.layer_norm_rms_epsilon", f32::NAN.into()), &["rms_norm_eps"]),
        (set("attention.layer_norm_rms_epsilon", 1u32.into()), &["layer_norm_rms_epsilon", "float"]),
        (set("final_logit_softcapping", 0f32.into()), &["softcapping"]),
        (set("rope.freq_base", f32::INFINITY.into()), &["rope"]),
        (set("expert_count", 7u32.into()), &["gemma4.expert_used_count", "missing"]),
        (set("embedding_length_per_layer_input", 4u32.into()), &["embed_tokens_per_layer", "missing"]),
        (set("tokenizer.ggml.bos_token_id", 13u32.into()), &["bos_token_id", "13"]),
        (set("tokenizer.ggml.eos_token_id", "x".into()), &["tokenizer.ggml.eos_token_id"]),
        (set("tokenizer.ggml.eos_token_ids", vec![-1i32].into()), &["tokenizer.ggml.eos_token_ids"]),
        (set("tokenizer.ggml.eos_token_ids", floats), &["tokenizer.ggml.eos_token_ids"]),
    ] {
        model.refused(parts);
    }
    for (embed, part) in [(None, "missing"), (Some(vec![20u64]), "[20]"), (Some(vec![]), "[]")] {
        let mut model = gemma4();
        model.tensors.remove(0);
        model.tensors.extend(embed.map(|dims| ("token_embd.weight".to_owned(), dims)));
        model.refused(&["embed_tokens", part]);
    }
}
