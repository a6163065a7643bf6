//! The vocabulary: what a forward pass may ask of a device.
//!
//! `R` is the number of active rows: all rows of the batch, or after [`Ops::keep_rows`] only those whose
//! logits are wanted. Every verb works on the first `R` rows of its buffers. Sums over inputs run in an order
//! fixed by the matrix and sums over keys in blocks aligned to absolute positions, so the bits of a row
//! depend on nothing but the row's own sequence.

use crate::handles::{Act, Gain, Mat};
use crate::kv::KvRef;

/// RMS norm: `x * (mean(x^2) + eps)^(-1/2) * gain`, over the width of the buffer or head.
///
/// The gain multiplies as it stands; families that store `gain - 1` are folded when the model is built.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// One factor for each value.
    pub gain: Gain,
    /// Added to the mean square.
    pub eps: f32,
}

/// The gate's activation in a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `0.5 u (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))`.
    GeluTanh,
    /// `u / (1 + exp(-u))`.
    Silu,
}

/// Where a layer's values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueSource {
    /// Its own projection, after the keys in the stacked output.
    Projected,
    /// The raw key projection, before the key norm and rotation.
    Keys,
}

/// What happens to the stacked q, k, v projection of a layer before attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkvSpec {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Norm of each query head.
    pub q_norm: Norm,
    /// Keys and values of this layer; `None` where the layer reads another's.
    pub kv: Option<KvSpec>,
    /// cos and sin of the row's angles, from [`Ops::rope_table`].
    pub rope: Act,
}

/// The key/value half of [`QkvSpec`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvSpec {
    /// Norm of each key head.
    pub k_norm: Norm,
    /// Where values come from.
    pub values: ValueSource,
    /// Epsilon of the weightless norm of each value head; `None` stores values as projected.
    pub v_norm_eps: Option<f32>,
    /// Where keys and values are written.
    pub cache: KvRef,
}

/// Attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttnSpec {
    /// Query heads; head `h` reads key/value head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Multiplies each score.
    pub scale: f32,
    /// `c tanh(score / c)` when given.
    pub softcap: Option<f32>,
    /// Keys that a row sees at most, itself included; the cut is on the past side only.
    pub window: Option<usize>,
    /// Where keys and values are read.
    pub cache: KvRef,
}

/// From router logits to chosen experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteSpec {
    /// Experts.
    pub experts: usize,
    /// Chosen for each row.
    pub top_k: usize,
    /// Multiplies the renormalised weight of each expert.
    pub per_expert_scale: Gain,
}

/// The experts of one layer. Both matrices stack all experts: expert `e` has rows
/// `e * 2 * width ..` of `gate_up` (gate rows first) and `e * hidden ..` of `down`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertSpec {
    /// Experts.
    pub experts: usize,
    /// Chosen for each row.
    pub top_k: usize,
    /// Hidden width of one expert.
    pub width: usize,
    /// `[experts * 2 * width, hidden]`.
    pub gate_up: Mat,
    /// `[experts * hidden, width]`.
    pub down: Mat,
    /// The gate's activation.
    pub activation: Activation,
}

/// Per-layer inputs from the context projection and the token table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerSpec {
    /// `[vocabulary, layers * width]`.
    pub table: Mat,
    /// Layers.
    pub layers: usize,
    /// Width of one layer's input.
    pub width: usize,
    /// Norm of each layer's part of the projection.
    pub norm: Norm,
    /// Multiplies the projection before the norm, `hidden^(-1/2)`.
    pub context_scale: f32,
    /// Multiplies the table row, `width^(1/2)`.
    pub token_scale: f32,
    /// Multiplies the sum of both, `2^(-1/2)`.
    pub mix_scale: f32,
}

/// How a layer ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CloseSpec {
    /// What is added to the residual.
    pub y: Act,
    /// Norm of `y` before the addition.
    pub post: Norm,
    /// Multiplies the whole residual afterwards.
    pub scalar: Option<f32>,
    /// The layer that ends.
    pub layer: usize,
    /// Whether rows are steered here; the same for every layer of a pass.
    pub steer: bool,
    /// The next layer's input buffer and norm.
    pub next: Option<(Act, Norm)>,
}

/// A value that a pass can be asked to copy out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TapPoint {
    /// Scaled embeddings, soft tokens in place, `[R, hidden]`.
    Embed,
    /// Combined per-layer inputs, `[R, layers * width]`.
    PerLayer,
    /// Normed, rotated queries in the first `heads * head_dim` columns of the stacked projection.
    Qkv(usize),
    /// Attention output before the output projection, `[R, heads * head_dim]`.
    Attn(usize),
    /// Chosen experts (ids, then weights), `[R, 2 * top_k]`.
    Routes(usize),
    /// MLP output before its post norm, `[R, hidden]`.
    Mlp(usize),
    /// Residual after the layer, its scalar and steering included, `[R, hidden]`.
    LayerOut(usize),
    /// After the final norm, head rows only, `[head rows, hidden]`.
    FinalNorm,
}

/// Where time goes, for [`Ops::mark`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Phase {
    Embed,
    PerLayerInputs,
    Qkv,
    Attention,
    AttnOut,
    Mlp,
    Router,
    Experts,
    PerLayer,
    Head,
}

/// The verbs of a pass. Nothing here returns an error: a backend remembers its first failure and
/// [`Backend::run`](crate::Backend::run) reports it.
pub trait Ops {
    /// `out[r] = table[token[r]] * scale`.
    fn embed(&mut self, out: Act, table: Mat, scale: f32);

    /// `out[r] = batch.soft_values` at soft rows, as given.
    fn inject_soft(&mut self, out: Act);

    /// `out[r] = [cos(p f_0), .., cos(p f_n), sin(p f_0), .., sin(p f_n)]` with `p` the row's position and `f`
    /// the frequencies in `inv_freq`; products, cosines and sines in float32.
    fn rope_table(&mut self, out: Act, inv_freq: Gain);

    /// `out = rms(x; norm)`; `out` and `x` may be the same buffer.
    fn rms_norm(&mut self, out: Act, x: Act, norm: Norm);

    /// `out = x`, in the form that `linear` wants.
    fn cast(&mut self, out: Act, x: Act);

    /// `out = x W^T`. An `x` of kind F32 is multiplied with float32 activations in every mode.
    fn linear(&mut self, out: Act, x: Act, w: Mat);

    /// `out = f(gate) * up` with `gate_up = [gate, up]` side by side.
    fn geglu(&mut self, out: Act, gate_up: Act, f: Activation);

    /// `x = x + y`.
    fn add(&mut self, x: Act, y: Act);

    /// `x = x * by`.
    fn scale(&mut self, x: Act, by: f32);

    /// On the stacked projection `qkv = [q, k, v]` (parts that the spec lacks are absent): norms each query
    /// head and rotates it in place; norms and rotates keys, norms values, and writes both to the cache.
    ///
    /// Rotation pairs `i` with `i + head_dim / 2`: `[a cos - b sin, b cos + a sin]`.
    fn qkv_finish(&mut self, qkv: Act, spec: &QkvSpec);

    /// `out = softmax(scale * q K^T) V` for each head, over the keys visible to the row:
    /// `position - window < j < visible_to`. Queries are the first columns of `qkv`.
    fn attention(&mut self, out: Act, qkv: Act, spec: &AttnSpec);

    /// `p = softmax(logits)` over all experts; the `top_k` largest (ties: the lower id) in descending order;
    /// their weights divided by their sum, then multiplied by the per-expert scale.
    /// `out[r] = [ids as numbers, weights]`, `2 * top_k` wide.
    fn route(&mut self, out: Act, logits: Act, spec: &RouteSpec);

    /// `out = sum_k weight_k * Down_k(f(Gate_k x) * (Up_k x))` in router order.
    fn experts(&mut self, out: Act, x: Act, routes: Act, spec: &ExpertSpec);

    /// `out[r, l] = (rms(context[r, l] * context_scale) + table[token[r], l] * token_scale) * mix_scale` with
    /// the ids of `per_layer_tokens`; `out` and `context` may be the same buffer.
    fn per_layer_inputs(&mut self, out: Act, context: Act, spec: &PerLayerSpec);

    /// `out = f(gate) * inputs[:, layer]`, all `width` wide but `inputs`, which holds every layer's part.
    fn per_layer_gate(&mut self, out: Act, gate: Act, inputs: Act, layer: usize, f: Activation);

    /// Keeps the rows whose logits are wanted: compacts `acts` to them and makes every later verb see those
    /// rows only. At most once in a pass.
    fn keep_rows(&mut self, acts: &[Act]);

    /// `out = softcap(x E^T)`; `c tanh(z / c)` when `softcap` is given.
    fn logits(&mut self, out: Act, x: Act, head: Mat, softcap: Option<f32>);

    /// The largest logit of each head row (ties: the lower id), reported in
    /// [`Outcome::argmax`](crate::Outcome::argmax); -1 for a row with a logit that is not finite.
    fn argmax(&mut self, logits: Act);

    /// Copies `x` out when the batch asks for `point`. Does not change a bit of anything else.
    fn tap(&mut self, point: TapPoint, x: Act);

    /// `x = x + rms(y; norm)`. Overwrites `y` where the default runs.
    fn norm_add(&mut self, x: Act, y: Act, norm: Norm) {
        self.rms_norm(y, y, norm);
        self.add(x, y);
    }

    /// `out = f(gate) * up` with `[gate, up] = x W^T`, by way of `gate_up`.
    fn gated_linear(&mut self, out: Act, gate_up: Act, x: Act, w: Mat, f: Activation) {
        self.linear(gate_up, x, w);
        self.geglu(out, gate_up, f);
    }

    /// Makes the edits of each row's [steering set](crate::SteerSet) for `layer`, in order, and notes each row's
    /// projection before each edit in [`Outcome::projections`](crate::Outcome::projections).
    ///
    /// With `u` the unit direction, `p = x . u` summed in an order fixed by the width, and `s` the strength:
    /// nothing where `s = 0` or `p` does not exceed the gate; else [`SteerMode`](crate::SteerMode)'s formula, the
    /// factor before `u` rounded to float32 first. `Renorm` then multiplies by `|x| / |x'|` where `x'` is not
    /// zero. All in float32, so that a row's bits depend on nothing but the row.
    ///
    /// A backend that steers overrides this and [`Backend::steer_set`](crate::Backend::steer_set); one that
    /// doesn't refuses every set, so that no batch reaches this default.
    fn steer(&mut self, _x: Act, _layer: usize) {
        unreachable!("a batch is steered by a set, and a backend without this verb takes none");
    }

    /// Ends a layer and opens the next: `x = (x + rms(y; post)) * scalar`, the rows' steering where there is any,
    /// the layer's tap, and the next layer's `input = rms(x; norm)`.
    fn close_layer(&mut self, x: Act, spec: &CloseSpec) {
        self.norm_add(x, spec.y, spec.post);
        if let Some(by) = spec.scalar {
            self.scale(x, by);
        }
        if spec.steer {
            self.steer(x, spec.layer);
        }
        self.tap(TapPoint::LayerOut(spec.layer), x);
        if let Some((input, norm)) = spec.next {
            self.rms_norm(input, x, norm);
        }
    }

    /// What follows may run beside the main lane, until [`resume`](Ops::resume).
    fn fork(&mut self) {}
    /// Back to the main lane.
    fn resume(&mut self) {}
    /// The main lane waits here for the other.
    fn join(&mut self) {}
    /// What follows belongs to `phase`.
    fn mark(&mut self, _phase: Phase) {}
}
