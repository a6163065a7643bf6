//! Small random checkpoints of every variant, in the layout of the published ones.
//!
//! [`write`] makes a folder with `config.json` and a bf16 `model.safetensors`, always the same for the same
//! variant. No two sides of a variant are equal and hardly any divides another, so a transposed matrix or a
//! swapped width cannot go unnoticed, and no width is a whole number of any kernel's block. Weights are
//! scaled so that activations stay of order one, attention is neither flat nor stuck on one key, and logits
//! spread over several units.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::{Error, Result};

/// Which checkpoint to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Like 31B: dense, K=V on full layers; composite names, `global_head_dim` in the config.
    Dense,
    /// The tensors of [`Variant::Dense`] under text-only names, with `per_layer_config` in the config.
    DensePerLayerConfig,
    /// Like 26B-A4B: routed experts beside the dense branch, K=V on full layers.
    Moe,
    /// Like E2B: per-layer inputs, KV sharing with dead tensors, double-wide MLP on the shared layers.
    PerLayerInputs,
    /// Like 12B: `gemma4_unified`, whose config has no field of per-layer inputs or experts.
    Unified,
    /// Gemma 3 text: gains stored as `gain - 1`, no value norm, its own score scale.
    Gemma3,
}

impl Variant {
    /// Every variant.
    pub const ALL: [Variant; 6] = [
        Variant::Dense,
        Variant::DensePerLayerConfig,
        Variant::Moe,
        Variant::PerLayerInputs,
        Variant::Unified,
        Variant::Gemma3,
    ];

    /// A name for folders and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Variant::Dense => "dense",
            Variant::DensePerLayerConfig => "dense_per_layer_config",
            Variant::Moe => "moe",
            Variant::PerLayerInputs => "per_layer_inputs",
            Variant::Unified => "unified",
            Variant::Gemma3 => "gemma3",
        }
    }

    /// The sides of the variant's matrices.
    pub fn sizes(self) -> Sizes {
        let dense = Sizes {
            vocab: 211,
            hidden: 75,
            inner: 131,
            heads: 6,
            kv_heads: [3, 2],
            head_dim: [10, 22],
            window: 7,
            full_layers: &[false, false, true, false, true],
            shared_layers: 0,
            per_layer: 0,
            experts: None,
        };
        match self {
            Variant::Dense | Variant::DensePerLayerConfig => dense,
            Variant::Moe => Sizes {
                vocab: 223,
                hidden: 69,
                inner: 50,
                full_layers: &[false, false, true, false, true],
                experts: Some(ExpertSizes { experts: 7, top_k: 3, width: 37 }),
                ..dense
            },
            Variant::PerLayerInputs => Sizes {
                vocab: 197,
                hidden: 57,
                inner: 46,
                heads: 4,
                kv_heads: [2, 2],
                full_layers: &[false, true, false, true, false, false, true],
                shared_layers: 3,
                per_layer: 13,
                ..dense
            },
            Variant::Unified => {
                Sizes { vocab: 233, hidden: 63, inner: 94, full_layers: &[false, true, false, true], ..dense }
            }
            Variant::Gemma3 => Sizes {
                vocab: 199,
                hidden: 65,
                inner: 118,
                kv_heads: [2, 2],
                head_dim: [14, 14],
                full_layers: &[false, false, true, false],
                ..dense
            },
        }
    }
}

/// The sides of a tiny checkpoint; pairs are by group, sliding and full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Tokens.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP; twice that on the shared layers of [`Variant::PerLayerInputs`].
    pub inner: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: [usize; 2],
    /// Values of a head.
    pub head_dim: [usize; 2],
    /// Positions that a sliding layer sees.
    pub window: usize,
    /// For each layer whether it sees every position.
    pub full_layers: &'static [bool],
    /// Layers at the end that read another's keys and values.
    pub shared_layers: usize,
    /// Width of one layer's input; 0 without.
    pub per_layer: usize,
    /// Routed experts.
    pub experts: Option<ExpertSizes>,
}

/// Routed experts of a tiny checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSizes {
    /// Experts.
    pub experts: usize,
    /// Chosen for a token.
    pub top_k: usize,
    /// Hidden width of one.
    pub width: usize,
}

/// Writes `config.json` and `model.safetensors` of `variant` into `dir`, which is made when absent.
///
/// # Errors
/// When a file cannot be written.
pub fn write(variant: Variant, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(|source| Error::Io { path: dir.into(), source })?;
    let path = dir.join("config.json");
    let text = serde_json::to_string_pretty(&config(variant)).expect("a JSON value prints");
    fs::write(&path, text).map_err(|source| Error::Io { path, source })?;

    let path = dir.join("model.safetensors");
    let tensors = tensors(variant);
    let views = tensors.iter().map(|(name, (shape, bytes))| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), bytes);
        (name.as_str(), view.expect("two bytes for each value of the shape"))
    });
    safetensors::serialize_to_file(views, None, &path).map_err(|source| Error::Safetensors { path, source })
}

/// The variant's `config.json`.
pub fn config(variant: Variant) -> Value {
    let s = variant.sizes();
    let names = ["sliding_attention", "full_attention"];
    let layer_types: Vec<&str> = s.full_layers.iter().map(|&full| names[full as usize]).collect();
    let mut text = json!({
        "attention_bias": false,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": s.head_dim[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "layer_types": layer_types,
        "max_position_embeddings": 2048,
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.full_layers.len(),
        "num_key_value_heads": s.kv_heads[0],
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "sliding_window": s.window,
        "tie_word_embeddings": true,
        "vocab_size": s.vocab,
    });
    if variant == Variant::Gemma3 {
        let own = json!({
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "dtype": "bfloat16",
            "attn_logit_softcapping": null,
            "final_logit_softcapping": null,
            // Not the head's width, so that one taken for the other shows.
            "query_pre_attn_scalar": 11,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 1000000.0,
        });
        extend(&mut text, own);
        return text;
    }

    let rope = json!({"rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }});
    extend(&mut text, rope);
    extend(
        &mut text,
        json!({
            "attention_k_eq_v": keys_are_values(variant),
            "final_logit_softcapping": 30.0,
            "num_kv_shared_layers": s.shared_layers,
            "use_double_wide_mlp": s.shared_layers > 0,
        }),
    );
    if variant == Variant::DensePerLayerConfig {
        let full = s.full_layers.iter().enumerate().filter(|(_, full)| **full);
        let own = json!({"head_dim": s.head_dim[1], "num_key_value_heads": s.kv_heads[1]});
        let layers: serde_json::Map<String, Value> =
            full.map(|(l, _)| (l.to_string(), own.clone())).collect();
        extend(&mut text, json!({"per_layer_config": layers}));
    } else {
        let kv_heads = keys_are_values(variant).then_some(s.kv_heads[1]);
        extend(&mut text, json!({"global_head_dim": s.head_dim[1], "num_global_key_value_heads": kv_heads}));
    }
    if variant != Variant::Unified {
        let e = s.experts;
        extend(
            &mut text,
            json!({
                "hidden_size_per_layer_input": s.per_layer,
                "vocab_size_per_layer_input": s.vocab,
                "enable_moe_block": e.is_some(),
                "num_experts": e.map(|e| e.experts),
                "top_k_experts": e.map(|e| e.top_k),
                "moe_intermediate_size": e.map(|e| e.width),
            }),
        );
    }

    if variant == Variant::DensePerLayerConfig {
        let own =
            json!({"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "bfloat16"});
        extend(&mut text, own);
        return text;
    }
    let (architecture, model_type) = match variant {
        Variant::Unified => ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified"),
        _ => ("Gemma4ForConditionalGeneration", "gemma4"),
    };
    extend(&mut text, json!({"model_type": format!("{model_type}_text")}));
    json!({
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "audio_config": null,
        "vision_config": null,
        "image_token_id": s.vocab - 3,
        "audio_token_id": s.vocab - 2,
        "video_token_id": s.vocab - 1,
        "eos_token_id": [1, 106],
        "text_config": text,
        "tie_word_embeddings": true,
    })
}

fn extend(object: &mut Value, more: Value) {
    let (Value::Object(object), Value::Object(more)) = (object, more) else {
        unreachable!("both are written as objects above");
    };
    object.extend(more);
}

fn keys_are_values(variant: Variant) -> bool {
    !matches!(variant, Variant::PerLayerInputs | Variant::Gemma3)
}

/// Shape and bf16 bytes by name.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn tensors(variant: Variant) -> Tensors {
    let s = variant.sizes();
    let prefix = match variant {
        Variant::DensePerLayerConfig | Variant::Gemma3 => "model.",
        _ => "model.language_model.",
    };
    let gemma3 = variant == Variant::Gemma3;
    // Both dense variants hold the same numbers.
    let seed = if variant == Variant::DensePerLayerConfig { Variant::Dense } else { variant } as u64;
    let mut w =
        Writer { random: Random(0x6c61_7069 + seed), tensors: Tensors::new(), prefix: prefix.into(), gemma3 };

    w.matrix("embed_tokens.weight", &[s.vocab, s.hidden], (s.hidden as f64).powf(-0.5));
    // The last gain spreads the logits: an embedding row has norm 1.
    w.gain("norm.weight", s.hidden, 5.0);
    if s.per_layer > 0 {
        let all = s.full_layers.len() * s.per_layer;
        w.matrix("embed_tokens_per_layer.weight", &[s.vocab, all], (s.per_layer as f64).powf(-0.5));
        w.linear("per_layer_model_projection.weight", all, s.hidden);
        w.gain("per_layer_projection_norm.weight", s.per_layer, 1.0);
    }
    for l in 0..s.full_layers.len() {
        w.prefix = format!("{prefix}layers.{l}.");
        layer(&mut w, variant, l);
    }
    w.tensors
}

fn layer(w: &mut Writer, variant: Variant, l: usize) {
    let s = variant.sizes();
    let full = s.full_layers[l];
    let shared = l >= s.full_layers.len() - s.shared_layers;
    let (d, kv) = (s.head_dim[full as usize], s.kv_heads[full as usize]);
    let inner = if shared { 2 * s.inner } else { s.inner };

    for name in [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ] {
        w.gain(&format!("{name}.weight"), s.hidden, 1.0);
    }
    w.linear("self_attn.q_proj.weight", s.heads * d, s.hidden);
    w.linear("self_attn.o_proj.weight", s.hidden, s.heads * d);
    // Scores of unit heads have a deviation of sqrt(d); these gains bring it near 1.5.
    let head_gain = 1.2 * (d as f64).powf(-0.25);
    w.gain("self_attn.q_norm.weight", d, head_gain);
    // Published files hold keys and values for the shared layers too: dead weights that must be ignored.
    w.gain("self_attn.k_norm.weight", d, head_gain);
    w.linear("self_attn.k_proj.weight", kv * d, s.hidden);
    if !(full && keys_are_values(variant)) {
        w.linear("self_attn.v_proj.weight", kv * d, s.hidden);
    }
    w.linear("mlp.gate_proj.weight", inner, s.hidden);
    w.linear("mlp.up_proj.weight", inner, s.hidden);
    w.linear("mlp.down_proj.weight", s.hidden, inner);
    if variant == Variant::Gemma3 {
        return;
    }
    w.uniform("layer_scalar", 1, 0.5, 1.0);
    if s.per_layer > 0 {
        w.linear("per_layer_input_gate.weight", s.per_layer, s.hidden);
        w.linear("per_layer_projection.weight", s.hidden, s.per_layer);
        w.gain("post_per_layer_input_norm.weight", s.hidden, 1.0);
    }
    if let Some(e) = s.experts {
        for name in
            ["pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
        {
            w.gain(&format!("{name}.weight"), s.hidden, 1.0);
        }
        // The router's input has norm 1, so its logits have the deviation of these weights.
        w.matrix("router.proj.weight", &[e.experts, s.hidden], 2.0);
        w.gain("router.scale", s.hidden, 1.0);
        w.uniform("router.per_expert_scale", e.experts, 0.5, 1.5);
        let scale = (s.hidden as f64).powf(-0.5);
        w.matrix("experts.gate_up_proj", &[e.experts, 2 * e.width, s.hidden], scale);
        w.matrix("experts.down_proj", &[e.experts, s.hidden, e.width], (e.width as f64).powf(-0.5));
    }
}

/// Draws tensors and keeps them.
struct Writer {
    random: Random,
    tensors: Tensors,
    prefix: String,
    gemma3: bool,
}

impl Writer {
    fn push(&mut self, name: &str, shape: &[usize], mut draw: impl FnMut(&mut Random) -> f64) {
        let len = shape.iter().product();
        let bytes = (0..len).flat_map(|_| bf16::from_f64(draw(&mut self.random)).to_le_bytes()).collect();
        self.tensors.insert(format!("{}{name}", self.prefix), (shape.to_vec(), bytes));
    }

    /// Normal values of deviation `scale`.
    fn matrix(&mut self, name: &str, shape: &[usize], scale: f64) {
        self.push(name, shape, |r| r.normal() * scale);
    }

    /// Keeps the size of what it multiplies.
    fn linear(&mut self, name: &str, rows: usize, cols: usize) {
        self.matrix(name, &[rows, cols], (cols as f64).powf(-0.5));
    }

    /// A norm's gain about `center`, stored the way of the family.
    fn gain(&mut self, name: &str, len: usize, center: f64) {
        let folded = if self.gemma3 { 1.0 } else { 0.0 };
        self.push(name, &[len], |r| center * (1.0 + 0.1 * r.normal()) - folded);
    }

    fn uniform(&mut self, name: &str, len: usize, from: f64, to: f64) {
        self.push(name, &[len], |r| from + (to - from) * r.uniform());
    }
}

/// SplitMix64: a few lines, and the same stream on every machine.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Near enough to normal: a sum of twelve uniform values has mean 6 and variance 1. No logarithm or
    /// cosine, whose last bit differs between systems.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    fn written(variant: Variant) -> (Value, Vec<u8>) {
        let dir = tempfile::tempdir().unwrap();
        write(variant, dir.path()).unwrap();
        let config = fs::read_to_string(dir.path().join("config.json")).unwrap();
        (serde_json::from_str(&config).unwrap(), fs::read(dir.path().join("model.safetensors")).unwrap())
    }

    #[test]
    fn the_same_variant_is_the_same_bytes() {
        for variant in Variant::ALL {
            assert_eq!(written(variant), written(variant));
        }
    }

    #[test]
    fn values_are_finite_and_of_the_intended_size() {
        for variant in Variant::ALL {
            let (_, bytes) = written(variant);
            let file = SafeTensors::deserialize(&bytes).unwrap();
            for (name, tensor) in file.tensors() {
                let (pairs, _) = tensor.data().as_chunks::<2>();
                let values: Vec<f64> = pairs.iter().map(|&b| bf16::from_le_bytes(b).to_f64()).collect();
                assert!(values.iter().all(|v| v.is_finite() && v.abs() < 20.0), "{name}");
                if name.ends_with("q_proj.weight") {
                    let cols = tensor.shape()[1] as f64;
                    let unit = values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64 * cols;
                    assert!((0.8..1.2).contains(&unit), "{name} {unit}");
                }
            }
        }
    }

    #[test]
    fn both_dense_forms_hold_the_same_tensors() {
        let (a, b) = (written(Variant::Dense).1, written(Variant::DensePerLayerConfig).1);
        let (a, b) = (SafeTensors::deserialize(&a).unwrap(), SafeTensors::deserialize(&b).unwrap());
        assert_eq!(a.len(), b.len());
        for (name, tensor) in a.tensors() {
            let other = b.tensor(&name.replace("language_model.", "")).unwrap();
            assert_eq!(tensor.data(), other.data(), "{name}");
        }
    }

    #[test]
    fn sides_differ_from_each_other() {
        for variant in Variant::ALL {
            let s = variant.sizes();
            let [ds, df] = s.head_dim;
            let mut sides = vec![s.vocab, s.hidden, s.inner, s.heads * ds, s.kv_heads[0] * ds];
            if ds != df {
                sides.extend([s.heads * df, s.kv_heads[1] * df]);
            }
            for (i, a) in sides.iter().enumerate() {
                assert!(!sides[i + 1..].contains(a), "{variant:?}: {sides:?}");
            }
            assert_eq!(s.heads % s.kv_heads[0] + s.heads % s.kv_heads[1], 0);
            assert!(ds % 2 == 0 && df % 2 == 0);
        }
    }
}
