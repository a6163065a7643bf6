//! The sizes of the published models and the tensors that a converted file of each has.

use lapidary_formats::Format;

use super::values::Rng;
use crate::error::{Error, Result};

/// A published Gemma 4 model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants are the models' names")]
pub enum Size {
    E2b,
    E4b,
    Dense12b,
    Moe26b,
    Dense31b,
}

impl Size {
    /// Every size.
    pub const ALL: [Size; 5] = [Size::E2b, Size::E4b, Size::Dense12b, Size::Moe26b, Size::Dense31b];

    /// Its name in lower case, as in `gemma-4-26b-a4b`.
    pub const fn name(self) -> &'static str {
        match self {
            Size::E2b => "e2b",
            Size::E4b => "e4b",
            Size::Dense12b => "12b",
            Size::Moe26b => "26b-a4b",
            Size::Dense31b => "31b",
        }
    }

    /// The size of this name.
    pub fn from_name(name: &str) -> Option<Size> {
        Size::ALL.into_iter().find(|size| size.name() == name)
    }

    /// The model's shape, cut or extended to `layers` if given.
    pub(super) fn shape(self, layers: Option<usize>) -> Result<Shape> {
        let mut shape = self.published();
        if let Some(layers) = layers {
            // Both kinds of layer must be among those that write keys, for the others to read.
            let least = if shape.kv_shared > 0 { shape.kv_shared + shape.period } else { 1 };
            if !(least..=MAX_LAYERS).contains(&layers) {
                return Err(Error::Synth {
                    problem: format!(
                        "{} can't have {layers} layers: take {least} to {MAX_LAYERS}",
                        self.name()
                    ),
                });
            }
            shape.layers = layers;
        }
        Ok(shape)
    }

    fn published(self) -> Shape {
        let small = Shape {
            layers: 0,
            hidden: 0,
            heads: 8,
            kv_heads: [1, 1],
            head_dim: [256, 512],
            ff: 0,
            window: 512,
            period: 6,
            context: 131_072,
            vocab: 262_144,
            kv_shared: 0,
            double_wide: false,
            per_layer: 256,
            values_are_keys: false,
            moe: None,
        };
        let large = Shape {
            heads: 16,
            kv_heads: [8, 1],
            window: 1024,
            context: 262_144,
            per_layer: 0,
            values_are_keys: true,
            ..small.clone()
        };
        match self {
            Size::E2b => Shape {
                hidden: 1536,
                layers: 35,
                ff: 6144,
                period: 5,
                kv_shared: 20,
                double_wide: true,
                ..small
            },
            Size::E4b => {
                Shape { hidden: 2560, layers: 42, ff: 10_240, kv_heads: [2, 2], kv_shared: 18, ..small }
            }
            Size::Dense12b => Shape { hidden: 3840, layers: 48, ff: 15_360, ..large },
            Size::Moe26b => Shape {
                hidden: 2816,
                layers: 30,
                ff: 2112,
                kv_heads: [8, 2],
                moe: Some(Moe { experts: 128, top_k: 8, ff: 704 }),
                ..large
            },
            Size::Dense31b => {
                Shape { hidden: 5376, layers: 60, ff: 21_504, heads: 32, kv_heads: [16, 4], ..large }
            }
        }
    }
}

/// Bound of what is asked for by hand; no file of so many layers is of use.
const MAX_LAYERS: usize = 512;

/// The numbers that decide every tensor's shape. Pairs are of sliding and full layers.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: [usize; 2],
    pub head_dim: [usize; 2],
    pub ff: usize,
    pub window: usize,
    /// Every so many layers one is full; the last one is too.
    pub period: usize,
    pub context: usize,
    pub vocab: usize,
    /// Last layers that read other layers' keys and values.
    pub kv_shared: usize,
    /// Whether those have a feed-forward of twice the width.
    pub double_wide: bool,
    /// Width of per-layer embeddings; 0 for none.
    pub per_layer: usize,
    /// Whether full layers have no matrix for values.
    pub values_are_keys: bool,
    pub moe: Option<Moe>,
}

/// The routed part of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moe {
    pub experts: usize,
    pub top_k: usize,
    pub ff: usize,
}

/// One tensor of a file, row length first in `dims`.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub fill: Fill,
}

/// What a tensor's values are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    /// A matrix, its values of deviation `1 / sqrt(fan_in)`.
    Matrix { fan_in: usize },
    /// float32 values within a tenth of this one.
    Near(f32),
    /// float32 values of this deviation.
    Spread(f32),
    /// float32 frequency divisors: 1 for this part of them, then as good as infinite, so that those aren't rotated.
    RopeFactors(f32),
}

impl Fill {
    /// The `n` values of a tensor that isn't a matrix.
    pub fn values(self, n: usize, rng: &mut Rng) -> Vec<f32> {
        match self {
            Fill::Matrix { .. } => unreachable!("matrices are written in pieces"),
            Fill::Near(middle) => (0..n).map(|_| middle * (0.9 + 0.2 * rng.unit())).collect(),
            Fill::Spread(deviation) => (0..n).map(|_| deviation * rng.normal()).collect(),
            Fill::RopeFactors(part) => {
                let rotated = (n as f32 * part) as usize;
                (0..n).map(|i| if i < rotated { 1.0 } else { 1e30 }).collect()
            }
        }
    }
}

impl Tensor {
    pub fn values(&self) -> u64 {
        self.dims.iter().product()
    }

    pub fn bytes(&self, format: Format) -> u64 {
        self.values() / format.block_len() as u64 * format.block_bytes() as u64
    }
}

impl Shape {
    pub fn is_sliding(&self, layer: usize) -> bool {
        !(layer + 1).is_multiple_of(self.period) && layer + 1 != self.layers
    }

    pub fn writes_kv(&self, layer: usize) -> bool {
        layer + self.kv_shared < self.layers
    }

    pub fn ff_of(&self, layer: usize) -> usize {
        self.ff * if self.double_wide && !self.writes_kv(layer) { 2 } else { 1 }
    }

    pub fn kv_heads_of(&self, layer: usize) -> usize {
        self.kv_heads[usize::from(!self.is_sliding(layer))]
    }

    /// Every tensor in the order of a converted file.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut list = List { prefix: String::new(), tensors: Vec::new() };
        let Shape { hidden, layers, vocab, per_layer, .. } = *self;
        list.matrix("token_embd", &[hidden, vocab]);
        if per_layer > 0 {
            list.add(
                "per_layer_token_embd.weight",
                &[per_layer * layers, vocab],
                Fill::Matrix { fan_in: per_layer },
            );
            list.matrix("per_layer_model_proj", &[hidden, per_layer * layers]);
            list.gain("per_layer_proj_norm", per_layer, 1.0);
        }
        list.gain("output_norm", hidden, 1.0);
        list.add("rope_freqs.weight", &[self.head_dim[1] / 2], Fill::RopeFactors(0.25));
        for layer in 0..layers {
            list.prefix = format!("blk.{layer}.");
            self.attention(&mut list, layer);
            self.feed_forward(&mut list, layer);
            if per_layer > 0 {
                list.matrix("inp_gate", &[hidden, per_layer]);
                list.matrix("proj", &[per_layer, hidden]);
                list.gain("post_norm", hidden, 0.3);
            }
            list.gain("layer_output_scale", 1, 1.0);
        }
        list.tensors
    }

    fn attention(&self, list: &mut List, layer: usize) {
        let sliding = self.is_sliding(layer);
        let head_dim = self.head_dim[usize::from(!sliding)];
        let (queries, keys) = (head_dim * self.heads, head_dim * self.kv_heads_of(layer));
        list.gain("attn_norm", self.hidden, 1.0);
        list.matrix("attn_q", &[self.hidden, queries]);
        list.gain("attn_q_norm", head_dim, 1.0);
        if self.writes_kv(layer) {
            list.matrix("attn_k", &[self.hidden, keys]);
            // Scores have no scale of their own: normed queries and keys of this size give scores of deviation 2.
            list.gain("attn_k_norm", head_dim, 2.0 / (head_dim as f32).sqrt());
            if sliding || !self.values_are_keys {
                list.matrix("attn_v", &[self.hidden, keys]);
            }
        }
        list.matrix("attn_output", &[queries, self.hidden]);
        list.gain("post_attention_norm", self.hidden, 0.3);
    }

    fn feed_forward(&self, list: &mut List, layer: usize) {
        let (hidden, ff) = (self.hidden, self.ff_of(layer));
        list.gain("ffn_norm", hidden, 1.0);
        list.matrix("ffn_gate", &[hidden, ff]);
        list.matrix("ffn_up", &[hidden, ff]);
        list.matrix("ffn_down", &[ff, hidden]);
        list.gain("post_ffw_norm", hidden, 0.3);
        let Some(Moe { experts, ff, .. }) = self.moe else { return };
        list.gain("pre_ffw_norm_2", hidden, 1.0);
        list.gain("post_ffw_norm_1", hidden, 0.7);
        list.gain("post_ffw_norm_2", hidden, 0.7);
        list.add("ffn_gate_inp.weight", &[hidden, experts], Fill::Spread(1.5));
        list.add("ffn_gate_inp.scale", &[hidden], Fill::Near(1.0));
        list.matrix("ffn_gate_up_exps", &[hidden, 2 * ff, experts]);
        list.matrix("ffn_down_exps", &[ff, hidden, experts]);
        list.add("ffn_down_exps.scale", &[experts], Fill::Near(1.0));
    }
}

/// Tensors that are being listed.
struct List {
    prefix: String,
    tensors: Vec<Tensor>,
}

impl List {
    fn add(&mut self, name: &str, dims: &[usize], fill: Fill) {
        let dims = dims.iter().map(|&d| d as u64).collect();
        self.tensors.push(Tensor { name: format!("{}{name}", self.prefix), dims, fill });
    }

    fn matrix(&mut self, module: &str, dims: &[usize]) {
        self.add(&format!("{module}.weight"), dims, Fill::Matrix { fan_in: dims[0] });
    }

    fn gain(&mut self, module: &str, n: usize, middle: f32) {
        self.add(&format!("{module}.weight"), &[n], Fill::Near(middle));
    }
}
