//! Files with the real shapes of published models and no data: a whole header, then a hole as long as the weights.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::fs::File;
use std::io::Write;
use std::path::Path;

use lapidary_ops::Format;
use lapidary_weights::gguf::{GgmlType, Value as Meta, Version, Writer};
use lapidary_weights::names::{Spelling, spell};
use lapidary_weights::{LayerRole, Role};
use serde_json::{Map, Value, json};

/// A published model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Real {
    /// 26B-A4B.
    A4b,
    /// 31B.
    Dense31b,
}

struct Sizes {
    hidden: usize,
    layers: usize,
    inner: usize,
    heads: usize,
    /// Key/value heads of sliding and full layers.
    kv_heads: [usize; 2],
    experts: Option<(usize, usize, usize)>,
}

const VOCAB: usize = 262_144;
const HEAD_DIM: [usize; 2] = [256, 512];

impl Real {
    fn sizes(self) -> Sizes {
        match self {
            Real::A4b => Sizes {
                hidden: 2816,
                layers: 30,
                inner: 2112,
                heads: 16,
                kv_heads: [8, 2],
                experts: Some((128, 8, 704)),
            },
            Real::Dense31b => {
                Sizes { hidden: 5376, layers: 60, inner: 21_504, heads: 32, kv_heads: [16, 4], experts: None }
            }
        }
    }

    /// Every sixth layer is full.
    fn is_full(layer: usize) -> bool {
        layer % 6 == 5
    }

    fn config(self) -> Value {
        let s = self.sizes();
        let kinds: Vec<&str> = (0..s.layers)
            .map(|i| if Real::is_full(i) { "full_attention" } else { "sliding_attention" })
            .collect();
        json!({
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "eos_token_id": [1, 106],
            "image_token_id": 258_880, "audio_token_id": 258_881, "video_token_id": 258_884,
            "tie_word_embeddings": true,
            "text_config": {
                "model_type": "gemma4_text",
                "attention_bias": false,
                "attention_k_eq_v": true,
                "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
                "enable_moe_block": s.experts.is_some(),
                "final_logit_softcapping": 30.0,
                "head_dim": HEAD_DIM[0], "global_head_dim": HEAD_DIM[1],
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": s.hidden,
                "hidden_size_per_layer_input": 0,
                "intermediate_size": s.inner,
                "layer_types": kinds,
                "max_position_embeddings": 262_144,
                "moe_intermediate_size": s.experts.map(|e| e.2),
                "num_attention_heads": s.heads,
                "num_experts": s.experts.map(|e| e.0),
                "num_global_key_value_heads": s.kv_heads[1],
                "num_hidden_layers": s.layers,
                "num_key_value_heads": s.kv_heads[0],
                "num_kv_shared_layers": 0,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {
                    "full_attention":
                        {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
                    "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
                },
                "sliding_window": 1024,
                "tie_word_embeddings": true,
                "top_k_experts": s.experts.map(|e| e.1),
                "use_bidirectional_attention": "vision",
                "use_double_wide_mlp": false,
                "vocab_size": VOCAB,
            },
        })
    }

    /// Every text tensor that the published file holds.
    fn tensors(self) -> Vec<(Role, Vec<usize>)> {
        use LayerRole::*;
        let s = self.sizes();
        let h = s.hidden;
        let mut list = vec![(Role::Embed, vec![VOCAB, h]), (Role::FinalNorm, vec![h])];
        for i in 0..s.layers {
            let full = usize::from(Real::is_full(i));
            let (d, kv) = (HEAD_DIM[full], s.kv_heads[full]);
            let mut add = |role, shape: &[usize]| list.push((Role::Layer(i as u32, role), shape.to_vec()));
            for norm in [InputNorm, PostAttnNorm, PreFfnNorm, PostFfnNorm] {
                add(norm, &[h]);
            }
            add(LayerScalar, &[1]);
            add(QProj, &[s.heads * d, h]);
            add(KProj, &[kv * d, h]);
            if full == 0 {
                add(VProj, &[kv * d, h]);
            }
            add(OProj, &[h, s.heads * d]);
            add(QNorm, &[d]);
            add(KNorm, &[d]);
            add(Gate, &[s.inner, h]);
            add(Up, &[s.inner, h]);
            add(Down, &[h, s.inner]);
            if let Some((experts, _, width)) = s.experts {
                for norm in [PreFfnNorm2, PostFfnNorm1, PostFfnNorm2] {
                    add(norm, &[h]);
                }
                add(Router, &[experts, h]);
                add(RouterScale, &[h]);
                add(PerExpertScale, &[experts]);
                add(ExpertsGateUp, &[experts, 2 * width, h]);
                add(ExpertsDown, &[experts, h, width]);
            }
        }
        list
    }

    /// Writes `config.json` and `model.safetensors` in bf16 into a folder.
    pub fn write_safetensors(self, folder: &Path) {
        std::fs::write(folder.join("config.json"), self.config().to_string()).expect("config is written");
        let mut header = Map::new();
        let mut end = 0u64;
        for (role, shape) in self.tensors() {
            let begin = end;
            end += 2 * shape.iter().product::<usize>() as u64;
            let name = spell(role, Spelling::Composite).expect("safetensors files have this role");
            header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}));
        }
        let header = Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        sparse(&folder.join("model.safetensors"), &bytes, end);
    }

    /// Writes a GGUF file as Google's QAT releases are: matrices Q4_0, the embedding Q6_K, router and vectors F32.
    pub fn write_gguf(self, path: &Path) {
        let s = self.sizes();
        let mut w = Writer::new(Version::V3);
        let mut set = |key: &str, value: Meta| {
            let key = if key.contains("general") { key.to_string() } else { format!("gemma4.{key}") };
            w.set(&key, value).expect("the key is new");
        };
        let n = |v: usize| Meta::U32(v as u32);
        let each = |f: &dyn Fn(usize) -> u32| Meta::from((0..s.layers).map(f).collect::<Vec<u32>>());
        set("general.architecture", Meta::from("gemma4"));
        set("block_count", n(s.layers));
        set("embedding_length", n(s.hidden));
        set("context_length", n(262_144));
        set("feed_forward_length", n(s.inner));
        set("attention.head_count", n(s.heads));
        set("attention.head_count_kv", each(&|i| s.kv_heads[usize::from(Real::is_full(i))] as u32));
        set("attention.key_length", n(HEAD_DIM[1]));
        set("attention.value_length", n(HEAD_DIM[1]));
        set("attention.key_length_swa", n(HEAD_DIM[0]));
        set("attention.value_length_swa", n(HEAD_DIM[0]));
        set("attention.sliding_window", n(1024));
        set(
            "attention.sliding_window_pattern",
            Meta::from((0..s.layers).map(|i| !Real::is_full(i)).collect::<Vec<bool>>()),
        );
        set("final_logit_softcapping", Meta::F32(30.0));
        if let Some((experts, chosen, width)) = s.experts {
            set("expert_count", n(experts));
            set("expert_used_count", n(chosen));
            set("expert_feed_forward_length", n(width));
        }
        let mut data = 0u64;
        for (role, shape) in self.tensors().into_iter().chain([(Role::RopeFreqs, vec![256])]) {
            let format = match role {
                Role::Embed => Format::Q6K,
                Role::Layer(_, LayerRole::Router) => Format::F32,
                _ if shape.len() == 1 => Format::F32,
                _ => Format::Q4_0,
            };
            let dims: Vec<u64> = shape.iter().rev().map(|&d| d as u64).collect();
            let name = spell(role, Spelling::Gguf).expect("GGUF files have this role");
            w.tensor(&name, &dims, GgmlType::of(format).expect("GGUF has this format"))
                .expect("the shape is legal");
            let row = format.row_bytes(shape[shape.len() - 1]).expect("rows are whole blocks") as u64;
            let rows: u64 = shape[..shape.len() - 1].iter().map(|&d| d as u64).product();
            data += (rows * row).next_multiple_of(32);
        }
        let mut header = Vec::new();
        w.begin(&mut header).expect("a vector takes everything");
        sparse(path, &header, data);
    }
}

fn sparse(path: &Path, header: &[u8], hole: u64) {
    let mut file = File::create(path).expect("the file is created");
    file.write_all(header).expect("the header is written");
    file.set_len(header.len() as u64 + hole).expect("the file system has sparse files");
}
