//! A model as handles: everything that a pass names, and nothing that it computes.

use lapidary_ops::program::Registry;
use lapidary_ops::{
    Act, Activation, AttnSpec, CloseSpec, ExpertSpec, Gain, Mat, Norm, PerLayerSpec, QkvSpec, RouteSpec,
};

use crate::config::Config;

/// A model that a backend holds.
#[derive(Clone, Debug)]
pub struct Model {
    /// The description that it was built from.
    pub config: Config,
    /// Shared activation buffers.
    pub acts: Acts,
    /// Embedding.
    pub embed: Mat,
    /// Multiplies embeddings.
    pub embed_scale: f32,
    /// Rope frequencies by group index.
    pub inv_freq: [Gain; 2],
    /// Layers in order.
    pub layers: Vec<Layer>,
    /// Per-layer embeddings.
    pub per_layer: Option<PerLayer>,
    /// Final norm.
    pub final_norm: Norm,
    /// Output head; the embedding when tied.
    pub head: Mat,
    /// The last layer with keys and values of its own: after its KV write only head rows go on.
    pub last_writer: usize,
    /// What the handles stand for.
    pub registry: Registry,
    /// Most rows and head rows of one pass.
    pub limits: Limits,
}

/// How many rows the buffers hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Rows of one pass, the largest prefill chunk.
    pub rows: usize,
    /// Rows of one pass whose logits are wanted.
    pub head_rows: usize,
}

/// Buffers that every layer shares.
#[derive(Clone, Copy, Debug)]
pub struct Acts {
    /// The residual stream.
    pub x: Act,
    /// Normed residual, the input of the next product.
    pub input: Act,
    /// A branch's output before it joins the residual.
    pub y: Act,
    /// cos and sin by group index.
    pub rope: [Act; 2],
    /// The residual of head rows after the final norm.
    pub final_norm: Act,
    /// The same as input of the head.
    pub head_input: Act,
    /// Logits.
    pub logits: Act,
}

/// One layer.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub input_norm: Norm,
    /// Attention.
    pub attn: Attention,
    /// Norm of the attention branch's output.
    pub post_attn_norm: Norm,
    /// The feed-forward block.
    pub mlp: Mlp,
    /// Norm of the feed-forward branch's output.
    pub post_ffn_norm: Norm,
    /// Per-layer embedding branch.
    pub per_layer: Option<PerLayerBranch>,
    /// Multiplies the residual at the end.
    pub scalar: Option<f32>,
}

/// A layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Stacked q, k, v projection (q, k or q alone).
    pub qkv: Mat,
    /// Output projection.
    pub out: Mat,
    /// Stacked projection's output.
    pub qkv_act: Act,
    /// Heads' output.
    pub heads_act: Act,
    /// Norms, rope, KV write.
    pub finish: QkvSpec,
    /// Scores and sums.
    pub spec: AttnSpec,
}

/// A gated MLP.
#[derive(Clone, Copy, Debug)]
pub struct Dense {
    /// Norm of the residual before it.
    pub norm: Norm,
    /// Stacked gate and up projection.
    pub gate_up: Mat,
    /// Down projection.
    pub down: Mat,
    /// Gate and up side by side.
    pub gate_up_act: Act,
    /// Their product.
    pub hidden_act: Act,
    /// The gate's activation.
    pub activation: Activation,
}

/// Routed experts beside the dense branch.
#[derive(Clone, Copy, Debug)]
pub struct Moe {
    /// The dense branch.
    pub dense: Dense,
    /// Norm of the dense branch's output.
    pub dense_post: Norm,
    /// The router's own norm of the raw residual, its scale and `hidden^(-1/2)` folded in.
    pub router_norm: Norm,
    /// Router projection.
    pub router: Mat,
    /// Choice of experts.
    pub route: RouteSpec,
    /// Norm of the residual before the experts.
    pub expert_norm: Norm,
    /// The experts.
    pub experts: ExpertSpec,
    /// Norm of the experts' output.
    pub expert_post: Norm,
    /// Buffers: router input, router logits, routes, expert input, expert output.
    pub acts: MoeActs,
}

/// Buffers of a routed block.
#[derive(Clone, Copy, Debug)]
pub struct MoeActs {
    /// Router input.
    pub router_input: Act,
    /// Router logits.
    pub router_logits: Act,
    /// Chosen experts and weights.
    pub routes: Act,
    /// Experts' input.
    pub input: Act,
    /// Experts' output.
    pub output: Act,
}

/// A layer's feed-forward block.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "a layer is a few hundred bytes of handles either way")]
pub enum Mlp {
    /// Dense only.
    Dense(Dense),
    /// Routed experts beside a dense branch.
    Moe(Moe),
}

/// Per-layer embeddings of the model.
#[derive(Clone, Copy, Debug)]
pub struct PerLayer {
    /// Projection of the embedding, `[layers * width, hidden]`.
    pub projection: Mat,
    /// Table, norm and scales.
    pub spec: PerLayerSpec,
    /// The embedding as input of the projection.
    pub input_act: Act,
    /// Every layer's input.
    pub inputs_act: Act,
    /// Gate output and gated input, one layer's width.
    pub gate_act: Act,
    /// The same as input of the projection back.
    pub hidden_act: Act,
}

/// The per-layer embedding branch of one layer.
#[derive(Clone, Copy, Debug)]
pub struct PerLayerBranch {
    /// `[width, hidden]`.
    pub gate: Mat,
    /// `[hidden, width]`.
    pub projection: Mat,
    /// Norm of the branch's output.
    pub post_norm: Norm,
    /// The gate's activation.
    pub activation: Activation,
}

impl Layer {
    /// How the layer ends: what joins the residual, and the next layer's input norm when there is one.
    pub fn closing(&self, acts: &Acts, index: usize, steer: bool, next: Option<&Layer>) -> CloseSpec {
        CloseSpec {
            y: acts.y,
            post: self.per_layer.map_or(self.post_ffn_norm, |p| p.post_norm),
            scalar: self.scalar,
            layer: index,
            steer,
            next: next.map(|n| (acts.input, n.input_norm)),
        }
    }
}
