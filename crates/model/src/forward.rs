//! The whole pass.
//!
//! There is one. Decode, prefill, batched decode and scoring are different batches over it. It is a
//! straight-line function of the model and the batch's shape: it never reads a value that a device computed.

use lapidary_ops::{BatchShape, Ops, Phase, TailRows, TapPoint};

use crate::model::{Layer, Mlp, Model};
use crate::{layer, moe, per_layer};

/// Runs the pass over the rows that the backend was given.
///
/// After the last layer that writes keys and values, nobody reads rows whose logits aren't wanted, so they
/// end there (`shape.tail`); a pass without head rows ends there altogether.
pub fn forward(s: &mut dyn Ops, m: &Model, shape: &BatchShape) {
    let a = &m.acts;
    let mut all_rows = true;
    s.mark(Phase::Embed);
    s.embed(a.x, m.embed, m.embed_scale);
    if shape.has_soft {
        s.inject_soft(a.x);
    }
    s.tap(TapPoint::Embed, a.x);
    for group in 0..2 {
        s.rope_table(a.rope[group], m.inv_freq[group]);
    }
    if let Some(p) = &m.per_layer {
        per_layer::prepare(s, a, p);
    }
    let (first, end) = shape.layers;
    let layers = &m.layers[first..end];
    if let Some(l) = layers.first() {
        s.rms_norm(a.input, a.x, l.input_norm);
    }
    for (i, l) in (first..).zip(layers) {
        layer::project(s, a, l, i);
        if i == m.last_writer && shape.tail == TailRows::Heads {
            if shape.head_rows == 0 {
                return;
            }
            keep_head_rows(s, m, l);
            all_rows = false;
        }
        layer::attend(s, a, l, i);
        match &l.mlp {
            Mlp::Dense(d) => layer::mlp(s, a, d),
            Mlp::Moe(e) => moe::block(s, a, e, i),
        }
        s.tap(TapPoint::Mlp(i), a.y);
        if let (Some(p), Some(branch)) = (&m.per_layer, &l.per_layer) {
            s.norm_add(a.x, a.y, l.post_ffn_norm);
            per_layer::apply(s, a, p, branch, i);
        }
        s.close_layer(a.x, &l.closing(a, i, shape.steered, layers.get(i - first + 1)));
    }
    if shape.head_rows > 0 {
        if all_rows {
            s.keep_rows(&[a.x]);
        }
        head(s, m);
    }
}

/// Everything that later layers read row by row.
fn keep_head_rows(s: &mut dyn Ops, m: &Model, l: &Layer) {
    let a = &m.acts;
    match &m.per_layer {
        Some(p) => s.keep_rows(&[a.x, l.attn.qkv_act, a.rope[0], a.rope[1], p.inputs_act]),
        None => s.keep_rows(&[a.x, l.attn.qkv_act, a.rope[0], a.rope[1]]),
    }
}

fn head(s: &mut dyn Ops, m: &Model) {
    let a = &m.acts;
    s.mark(Phase::Head);
    s.rms_norm(a.final_norm, a.x, m.final_norm);
    s.tap(TapPoint::FinalNorm, a.final_norm);
    s.cast(a.head_input, a.final_norm);
    s.logits(a.logits, a.head_input, m.head, m.config.final_softcap);
    s.argmax(a.logits);
}

/// The attention sublayer of one layer alone, on a residual that was given as soft rows.
pub fn attention_sublayer(s: &mut dyn Ops, m: &Model, layer: usize) {
    let a = &m.acts;
    let l = &m.layers[layer];
    s.embed(a.x, m.embed, m.embed_scale);
    s.inject_soft(a.x);
    for group in 0..2 {
        s.rope_table(a.rope[group], m.inv_freq[group]);
    }
    s.rms_norm(a.input, a.x, l.input_norm);
    layer::project(s, a, l, layer);
    layer::attend(s, a, l, layer);
}

/// The feed-forward sublayer of one layer alone, on a residual that was given as soft rows.
pub fn ffn_sublayer(s: &mut dyn Ops, m: &Model, layer: usize) {
    let a = &m.acts;
    let l = &m.layers[layer];
    s.embed(a.x, m.embed, m.embed_scale);
    s.inject_soft(a.x);
    match &l.mlp {
        Mlp::Dense(d) => layer::mlp(s, a, d),
        Mlp::Moe(e) => moe::block(s, a, e, layer),
    }
    s.norm_add(a.x, a.y, l.post_ffn_norm);
}

/// One layer alone on a residual that was given as soft rows for every row. Unlike a pass over a part of the layers, what
/// the per-layer branch takes from the embedding comes from the tokens' own.
pub fn layer_alone(s: &mut dyn Ops, m: &Model, layer: usize) {
    let a = &m.acts;
    let l = &m.layers[layer];
    s.embed(a.x, m.embed, m.embed_scale);
    for group in 0..2 {
        s.rope_table(a.rope[group], m.inv_freq[group]);
    }
    if let Some(p) = &m.per_layer {
        per_layer::prepare(s, a, p);
    }
    s.inject_soft(a.x);
    s.rms_norm(a.input, a.x, l.input_norm);
    layer::project(s, a, l, layer);
    layer::attend(s, a, l, layer);
    match &l.mlp {
        Mlp::Dense(d) => layer::mlp(s, a, d),
        Mlp::Moe(e) => moe::block(s, a, e, layer),
    }
    if let (Some(p), Some(branch)) = (&m.per_layer, &l.per_layer) {
        s.norm_add(a.x, a.y, l.post_ffn_norm);
        per_layer::apply(s, a, p, branch, layer);
    }
    s.close_layer(a.x, &l.closing(a, layer, false, None));
}
