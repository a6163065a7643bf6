//! A layer's two sublayers.

use lapidary_ops::{Ops, Phase, TapPoint};

use crate::model::{Acts, Dense, Layer};

/// The first half of attention, up to the KV write: `q, k, v = W a` with head norms and rope.
pub fn project(s: &mut dyn Ops, a: &Acts, l: &Layer, index: usize) {
    s.mark(Phase::Qkv);
    s.linear(l.attn.qkv_act, a.input, l.attn.qkv);
    s.qkv_finish(l.attn.qkv_act, &l.attn.finish);
    s.tap(TapPoint::Qkv(index), l.attn.qkv_act);
}

/// The second half: `x = x + rms(W_o softmax(q K^T) V; post_attention_norm)`.
pub fn attend(s: &mut dyn Ops, a: &Acts, l: &Layer, index: usize) {
    s.mark(Phase::Attention);
    s.attention(l.attn.heads_act, l.attn.qkv_act, &l.attn.spec);
    s.tap(TapPoint::Attn(index), l.attn.heads_act);
    s.mark(Phase::AttnOut);
    s.linear(a.y, l.attn.heads_act, l.attn.out);
    s.norm_add(a.x, a.y, l.post_attn_norm);
}

/// `y = W_down(f(W_gate n) * (W_up n))`, `n = rms(x; norm)`.
pub fn mlp(s: &mut dyn Ops, a: &Acts, d: &Dense) {
    s.mark(Phase::Mlp);
    s.rms_norm(a.input, a.x, d.norm);
    s.gated_linear(d.hidden_act, d.gate_up_act, a.input, d.gate_up, d.activation);
    s.linear(a.y, d.hidden_act, d.down);
}
