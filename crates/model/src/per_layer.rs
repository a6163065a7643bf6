//! Per-layer embeddings (E2B, E4B): a small input of its own for every layer.

use lapidary_ops::{Ops, Phase, TapPoint};

use crate::model::{Acts, PerLayer, PerLayerBranch};

/// Once a pass, from the scaled embeddings (soft tokens in place) and the token ids.
pub fn prepare(s: &mut dyn Ops, a: &Acts, p: &PerLayer) {
    s.mark(Phase::PerLayerInputs);
    s.cast(p.input_act, a.x);
    s.linear(p.inputs_act, p.input_act, p.projection);
    s.per_layer_inputs(p.inputs_act, p.inputs_act, &p.spec);
    s.tap(TapPoint::PerLayer, p.inputs_act);
}

/// `y = W_proj(f(W_gate x) * inputs[layer])`, reading the residual without a norm; the layer's close norms
/// and adds it.
pub fn apply(s: &mut dyn Ops, a: &Acts, p: &PerLayer, b: &PerLayerBranch, index: usize) {
    s.mark(Phase::PerLayer);
    s.cast(p.input_act, a.x);
    s.linear(p.gate_act, p.input_act, b.gate);
    s.per_layer_gate(p.hidden_act, p.gate_act, p.inputs_act, index, b.activation);
    s.linear(a.y, p.hidden_act, b.projection);
}
