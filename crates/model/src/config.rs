//! What a checkpoint says about its model, read once and validated.
//!
//! `Config` is the same whether it came from `config.json` ([`Config::from_json`]) or from GGUF metadata
//! ([`Config::from_checkpoint`] takes either). Everything that the pass needs to know about a layer is
//! decided here, so that nothing later asks which variant it is running.

use lapidary_ops::{Activation, Group};

use crate::error::{Error, Result};

/// The two families that this engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// E2B, E4B, 12B, 26B-A4B, 31B.
    Gemma4,
    /// Gemma 3 text, 270M to 27B.
    Gemma3,
}

/// On which layers vision blocks see their own future.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VisionBlocks {
    /// Causal everywhere.
    Causal,
    /// Bidirectional within a block on sliding layers, causal on full ones (Gemma 4 `"vision"`).
    Sliding,
    /// Bidirectional within a block on both (multimodal Gemma 3).
    Both,
}

/// Rotary embedding of one layer kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base.
    pub theta: f64,
    /// Share of the head's pairs that rotate; the exponent's denominator is the whole head either way.
    pub rotated: f64,
    /// Divides every frequency (linear scaling).
    pub factor: f64,
}

impl Rope {
    /// Frequencies of the `head_dim / 2` pairs: `theta^(-2i / head_dim) / factor`, 0 for pairs that do not
    /// rotate.
    pub fn inv_freq(&self, head_dim: usize) -> Vec<f32> {
        let rotated = (self.rotated * head_dim as f64 / 2.0).floor() as usize;
        (0..head_dim / 2)
            .map(|i| {
                let f = self.theta.powf(-((2 * i) as f64) / head_dim as f64) / self.factor;
                if i < rotated { f as f32 } else { 0.0 }
            })
            .collect()
    }
}

/// One layer's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Sliding or full attention.
    pub group: Group,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Hidden width of the dense MLP.
    pub intermediate: usize,
    /// The earlier layer whose keys and values this one reads, if it has none of its own.
    pub donor: Option<usize>,
    /// Values are the raw key projection; there is no value projection.
    pub values_are_keys: bool,
}

/// Routed experts, present in every layer or in none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeConfig {
    /// Experts in a layer.
    pub experts: usize,
    /// Experts chosen for a token.
    pub top_k: usize,
    /// Hidden width of one expert.
    pub width: usize,
}

/// Per-layer embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerLayerConfig {
    /// Width of one layer's input.
    pub width: usize,
    /// Rows of the per-layer table.
    pub vocab: usize,
}

/// A validated model description.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Family.
    pub family: Family,
    /// `model_type` or GGUF architecture, for reports.
    pub model_type: String,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads, the same in every layer.
    pub heads: usize,
    /// Layers in order.
    pub layers: Vec<LayerConfig>,
    /// Keys that a sliding row sees, itself included.
    pub window: usize,
    /// Longest context the model was made for.
    pub max_positions: usize,
    /// Epsilon of every norm.
    pub eps: f32,
    /// `c tanh(z / c)` on the final logits; none when the checkpoint states none.
    pub final_softcap: Option<f32>,
    /// The same on attention scores.
    pub attn_softcap: Option<f32>,
    /// Multiplies attention scores.
    pub score_scale: f32,
    /// The MLP gate's activation.
    pub activation: Activation,
    /// Rope by group index.
    pub rope: [Rope; 2],
    /// Vision mask rule.
    pub vision: VisionBlocks,
    /// Experts.
    pub moe: Option<MoeConfig>,
    /// Per-layer embeddings.
    pub per_layer: Option<PerLayerConfig>,
    /// Norm gains are stored minus one (Gemma 3 safetensors).
    pub norm_plus_one: bool,
    /// Values pass a weightless norm.
    pub value_norm: bool,
    /// Layers end with a scalar.
    pub layer_scalar: bool,
    /// Whether the head is the embedding; a head tensor in the file is honoured either way.
    pub tied: bool,
    /// Padding token.
    pub pad: u32,
    /// First token of every sequence.
    pub bos: u32,
    /// Tokens that end generation, as far as the model's own config says.
    pub eos: Vec<u32>,
    /// Image, audio and video placeholders of a composite model; they are looked up as `pad`.
    pub placeholders: Vec<u32>,
    /// What was assumed or overridden while reading, for the user.
    pub notes: Vec<String>,
}

impl Config {
    /// The first layer without keys and values of its own, or the number of layers.
    pub fn first_shared(&self) -> usize {
        self.layers.iter().position(|l| l.donor.is_some()).unwrap_or(self.layers.len())
    }

    /// The id whose embedding stands for `token`: placeholders are looked up as the pad token.
    pub fn lookup_id(&self, token: u32) -> u32 {
        if self.placeholders.contains(&token) { self.pad } else { token }
    }

    /// Finds each KV-sharing layer its donor: the last layer below `first` of the same kind.
    pub(crate) fn donor(groups: &[Group], first: usize, layer: usize) -> Result<Option<usize>> {
        if layer < first {
            return Ok(None);
        }
        let donor = groups[..first].iter().rposition(|&g| g == groups[layer]);
        match donor {
            Some(donor) => Ok(Some(donor)),
            None => Err(Error::config(
                "num_kv_shared_layers",
                format!(
                    "layer {layer} shares keys and values, but no {:?} layer below {first} has any",
                    groups[layer]
                ),
            )),
        }
    }

    /// Checks what a pass relies on, whatever file the numbers came from.
    pub(crate) fn validate(self) -> Result<Config> {
        let positive = [
            ("vocab_size", self.vocab),
            ("hidden_size", self.hidden),
            ("num_hidden_layers", self.layers.len()),
            ("num_attention_heads", self.heads),
            ("sliding_window", self.window),
            ("max_position_embeddings", self.max_positions),
        ];
        for (field, value) in positive {
            if value == 0 {
                return Err(Error::config(field, "must not be 0"));
            }
            if value > MAX_DIM {
                return Err(Error::config(field, format!("{value} is beyond {MAX_DIM}")));
            }
        }
        for (i, l) in self.layers.iter().enumerate() {
            if l.kv_heads == 0 || !self.heads.is_multiple_of(l.kv_heads) {
                return Err(Error::config(
                    "num_key_value_heads",
                    format!("layer {i} has {} query heads over {} key/value heads", self.heads, l.kv_heads),
                ));
            }
            if l.head_dim == 0 || !l.head_dim.is_multiple_of(2) || l.head_dim > MAX_DIM {
                return Err(Error::config(
                    "head_dim",
                    format!("layer {i} has head dimension {}", l.head_dim),
                ));
            }
            if l.intermediate == 0 || l.intermediate > MAX_DIM {
                return Err(Error::config("intermediate_size", format!("layer {i} has {}", l.intermediate)));
            }
            let donor = l.donor.map(|d| (self.layers[d].kv_heads, self.layers[d].head_dim));
            if donor.is_some_and(|d| d != (l.kv_heads, l.head_dim)) {
                return Err(Error::config(
                    "num_kv_shared_layers",
                    format!("layer {i} and the layer that it shares with differ in heads"),
                ));
            }
        }
        if let Some(m) = self.moe {
            if m.experts == 0 || m.width == 0 || m.experts > MAX_DIM || m.width > MAX_DIM {
                return Err(Error::config("num_experts", "expert count and width must not be 0"));
            }
            if m.top_k == 0 || m.top_k > m.experts {
                return Err(Error::config("top_k_experts", format!("{} of {} experts", m.top_k, m.experts)));
            }
        }
        if let Some(p) = self.per_layer
            && (p.vocab == 0 || p.width > MAX_DIM || p.vocab > MAX_DIM)
        {
            return Err(Error::config("vocab_size_per_layer_input", format!("{} rows", p.vocab)));
        }
        if !self.eps.is_finite() || self.eps < 0.0 {
            return Err(Error::config("rms_norm_eps", format!("{}", self.eps)));
        }
        if !self.score_scale.is_normal() {
            let problem = format!("scores would be multiplied by {}", self.score_scale);
            return Err(Error::config("query_pre_attn_scalar", problem));
        }
        for cap in [self.final_softcap, self.attn_softcap].into_iter().flatten() {
            if !cap.is_finite() || cap <= 0.0 {
                return Err(Error::config("logit_softcapping", format!("{cap} is not a positive number")));
            }
        }
        for rope in self.rope {
            let good = |x: f64| x.is_finite() && x > 0.0;
            let largest = (rope.theta.recip().max(1.0) / rope.factor) as f32;
            let in_range = good(rope.theta) && good(rope.factor) && largest.is_finite();
            if !in_range || !(0.0..=1.0).contains(&rope.rotated) {
                return Err(Error::config("rope_parameters", format!("{rope:?}")));
            }
        }
        // Soft rows look up the pad token in the per-layer table too.
        let vocab = self.per_layer.map_or(self.vocab, |p| p.vocab.min(self.vocab));
        for (field, id) in [("pad_token_id", self.pad), ("bos_token_id", self.bos)] {
            if id as usize >= vocab {
                return Err(Error::config(field, format!("{id} is outside the vocabulary of {vocab}")));
            }
        }
        Ok(self)
    }
}

/// Larger than any dimension of a real model, small enough that products of three fit 64 bits.
pub(crate) const MAX_DIM: usize = 1 << 24;

/// More layers than any real model has.
pub(crate) const MAX_LAYERS: usize = 1 << 10;

/// Layer kinds when a file does not list them: every `period`-th is full.
pub(crate) fn periodic(layers: usize, period: usize) -> Vec<Group> {
    (0..layers).map(|i| if (i + 1).is_multiple_of(period) { Group::Full } else { Group::Sliding }).collect()
}
