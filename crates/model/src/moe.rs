//! The routed block: a dense branch and chosen experts, each with its own norms, summed.

use lapidary_ops::{Ops, Phase, TapPoint};

use crate::layer;
use crate::model::{Acts, Moe};

/// `y = rms(MLP(x); dense_post) + rms(Experts(x); expert_post)`.
///
/// Router and experts read the residual `x` itself, each through a norm of its own; the router's input is
/// not the experts' input.
pub fn block(s: &mut dyn Ops, a: &Acts, e: &Moe, index: usize) {
    s.fork();
    layer::mlp(s, a, &e.dense);
    s.rms_norm(a.y, a.y, e.dense_post);
    s.resume();
    s.mark(Phase::Router);
    s.rms_norm(e.acts.router_input, a.x, e.router_norm);
    s.linear(e.acts.router_logits, e.acts.router_input, e.router);
    s.route(e.acts.routes, e.acts.router_logits, &e.route);
    s.tap(TapPoint::Routes(index), e.acts.routes);
    s.mark(Phase::Experts);
    s.rms_norm(e.acts.input, a.x, e.expert_norm);
    s.experts(e.acts.output, e.acts.input, e.acts.routes, &e.experts);
    s.join();
    s.norm_add(a.y, e.acts.output, e.expert_post);
}
