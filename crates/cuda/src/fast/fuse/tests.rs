//! Which verbs become one step, and which stay apart.

use lapidary_ops::{Gain, Group, KvRef, Phase, TapPoint};

use super::*;

const X: Act = Act(0);
const Y: Act = Act(1);
const Z: Act = Act(2);
const IN: Act = Act(3);
const IN2: Act = Act(4);

fn norm(n: u32) -> Norm {
    Norm { gain: Gain(n), eps: 1e-6 }
}

fn fused(verbs: Vec<Verb>) -> Vec<Step> {
    fuse(verbs, &|_| true)
}

#[test]
fn a_layers_end_and_the_next_ones_begin_are_one_step() {
    let steps = fused(vec![
        Verb::Linear(Y, IN, Mat(0)),
        Verb::NormAdd(X, Y, norm(0)),
        Verb::Scale(X, 0.5),
        Verb::RmsNorm(IN, X, norm(1)),
        Verb::Mark(Phase::Qkv),
        Verb::Linear(Y, IN, Mat(1)),
    ]);
    let [Step::Verb(_), Step::Residual(r), Step::Verb(Verb::Mark(_)), Step::Verb(_)] = &steps[..] else {
        panic!("{steps:?}")
    };
    assert_eq!((r.y, r.scalar, &r.outs[..]), (Some((Y, norm(0))), 0.5, &[(IN, Some(norm(1)))][..]));
    assert_eq!(r.plain.len(), 3);
}

#[test]
fn a_tap_between_keeps_the_norm_apart_only_where_it_must() {
    // The tap reads the residual, which the step has stored by then.
    let steps = fused(vec![
        Verb::NormAdd(X, Y, norm(0)),
        Verb::Tap(TapPoint::LayerOut(0), X),
        Verb::RmsNorm(IN, X, norm(1)),
    ]);
    assert!(matches!(&steps[..], [Step::Residual(r), Step::Verb(Verb::Tap(..))] if r.outs.len() == 1));
    // A scale after a tap must not reach the tap.
    let steps = fused(vec![
        Verb::NormAdd(X, Y, norm(0)),
        Verb::Tap(TapPoint::LayerOut(0), X),
        Verb::Scale(X, 2.0),
        Verb::RmsNorm(IN, X, norm(1)),
    ]);
    assert!(matches!(&steps[0], Step::Residual(r) if r.scalar == 1.0 && r.outs.is_empty()), "{steps:?}");
    assert_eq!(steps.len(), 4);
}

#[test]
fn norms_of_a_routed_layer_meet_in_one_step_and_its_branches_in_another() {
    let steps = fused(vec![
        Verb::NormAdd(X, Y, norm(0)),
        Verb::RmsNorm(IN, X, norm(1)),
        Verb::Linear(Y, IN, Mat(0)),
        Verb::RmsNorm(Y, Y, norm(2)),
        Verb::RmsNorm(IN2, X, norm(3)),
        Verb::Linear(Z, IN2, Mat(1)),
        Verb::NormAdd(Y, Z, norm(4)),
        Verb::NormAdd(X, Y, norm(5)),
    ]);
    let [Step::Residual(first), Step::Verb(_), Step::Verb(_), Step::Residual(last)] = &steps[..] else {
        panic!("{steps:?}")
    };
    assert_eq!(first.outs, [(IN, Some(norm(1))), (IN2, Some(norm(3)))]);
    assert_eq!(last.branches, Some((norm(2), Z, norm(4))));
    assert_eq!(last.plain.len(), 3);
}

/// A routed block as the model has it, its norms made before.
fn routed_verbs() -> Vec<Verb> {
    let [routes, logits, out, hidden, raw] = [5, 6, 7, 8, 9].map(Act);
    let route = RouteSpec { experts: 8, top_k: 2, per_expert_scale: Gain(9) };
    let f = Activation::GeluTanh;
    let experts =
        ExpertSpec { experts: 8, top_k: 2, width: 64, gate_up: Mat(3), down: Mat(4), activation: f };
    vec![
        Verb::Gated { out: hidden, gate_up: raw, x: IN, w: Mat(0), f },
        Verb::Linear(Y, hidden, Mat(1)),
        Verb::Mark(Phase::Router),
        Verb::Linear(logits, IN2, Mat(2)),
        Verb::Route(routes, logits, route),
        Verb::Tap(TapPoint::Routes(0), routes),
        Verb::Mark(Phase::Experts),
        Verb::Experts(out, Z, routes, experts),
    ]
}

#[test]
fn a_routed_block_is_two_steps_whether_its_routes_are_tapped_or_not() {
    let steps: Vec<_> = fused(routed_verbs())
        .into_iter()
        .filter(|s| !matches!(s, Step::Verb(Verb::Mark(_) | Verb::Tap(..))))
        .collect();
    let [Step::GatedRouter(first), Step::LinearExperts(second)] = &steps[..] else { panic!("{steps:?}") };
    assert!(matches!(first[0], Step::Verb(Verb::Gated { .. })) && matches!(first[1], Step::Router { .. }));
    assert_eq!(second[0], Step::Verb(Verb::Linear(Y, Act(8), Mat(1))));
    assert!(matches!(second[1], Step::Experts { .. }));
}

#[test]
fn what_a_routed_blocks_branches_share_keeps_them_apart() {
    // The router reads what the dense branch writes, or what that reads is written before the experts.
    let mut chained = routed_verbs();
    chained.insert(2, Verb::Cast(IN2, Y));
    let steps = fused(chained);
    assert!(!steps.iter().any(|s| matches!(s, Step::GatedRouter(_))), "{steps:?}");
    let mut read = routed_verbs();
    read.insert(6, Verb::Tap(TapPoint::Mlp(0), Y));
    let steps = fused(read);
    assert!(!steps.iter().any(|s| matches!(s, Step::LinearExperts(_))), "{steps:?}");
}

fn per_layer_verbs() -> Vec<Verb> {
    const GATE: Act = Act(5);
    const HIDDEN: Act = Act(6);
    const INPUTS: Act = Act(7);
    vec![
        Verb::NormAdd(X, Y, norm(0)),
        Verb::Mark(Phase::PerLayer),
        Verb::Cast(IN2, X),
        Verb::Linear(GATE, IN2, Mat(0)),
        Verb::PerLayerGate(HIDDEN, GATE, INPUTS, 3, Activation::GeluTanh),
        Verb::Linear(Y, HIDDEN, Mat(1)),
        Verb::NormAdd(X, Y, norm(1)),
        Verb::Scale(X, 0.5),
        Verb::RmsNorm(IN, X, norm(2)),
        Verb::Linear(Y, IN, Mat(2)),
    ]
}

#[test]
fn the_per_layer_branch_is_one_step_from_residual_to_residual() {
    let steps = fused(per_layer_verbs());
    let [Step::Verb(Verb::Mark(_)), Step::PerLayer(p), Step::Verb(Verb::Linear(..))] = &steps[..] else {
        panic!("{steps:?}")
    };
    assert_eq!((p.product, p.close.scalar), ((Y, Act(6), Mat(1)), 0.5));
    assert_eq!(p.close.outs, [(IN, Some(norm(2)))]);
    assert_eq!(p.parts().len(), 4);
}

#[test]
fn a_reader_inside_or_behind_the_per_layer_branch_keeps_it_apart() {
    let mut tapped = per_layer_verbs();
    tapped.insert(6, Verb::Tap(TapPoint::Mlp(3), Y));
    let mut read_later = per_layer_verbs();
    read_later.insert(9, Verb::Cast(Z, IN2));
    for verbs in [tapped, read_later] {
        let steps = fused(verbs);
        assert!(!steps.iter().any(|s| matches!(s, Step::PerLayer(_))), "{steps:?}");
    }
}

#[test]
fn a_tap_of_two_branches_leaves_them_joined() {
    let verbs = |tap: Option<usize>| {
        let mut verbs = vec![
            Verb::Linear(Y, IN, Mat(0)),
            Verb::RmsNorm(Y, Y, norm(2)),
            Verb::Linear(Z, IN2, Mat(1)),
            Verb::NormAdd(Y, Z, norm(4)),
            Verb::NormAdd(X, Y, norm(5)),
        ];
        if let Some(at) = tap {
            verbs.insert(at, Verb::Tap(TapPoint::Mlp(3), Y));
        }
        verbs
    };
    let mut steps = fused(verbs(Some(4)));
    let tap = Step::TapBranches { point: TapPoint::Mlp(3), y: (Y, norm(2)), z: (Z, norm(4)) };
    assert_eq!(steps.remove(2), tap);
    assert_eq!(steps, fused(verbs(None)));
    // Of one branch alone there is a value only where the verbs run one by one.
    let steps = fused(verbs(Some(2)));
    assert!(steps.iter().any(|s| matches!(s, Step::Verb(Verb::Tap(..)))));
    assert!(steps.iter().all(|s| !matches!(s, Step::Residual(r) if r.branches.is_some())), "{steps:?}");
}

fn heads_verbs() -> Vec<Verb> {
    let cache = KvRef { group: Group::Sliding, index: 0, writes: true };
    let (heads, kv_heads, head_dim) = (8, 2, 256);
    let finish = QkvSpec { heads, kv_heads, head_dim, q_norm: norm(0), kv: None, rope: IN };
    let attend = AttnSpec { heads, kv_heads, head_dim, scale: 1.0, softcap: None, window: None, cache };
    vec![
        Verb::Linear(Y, X, Mat(0)),
        Verb::QkvFinish(Y, finish),
        Verb::Mark(Phase::Attention),
        Verb::Attention(Z, Y, attend),
    ]
}

#[test]
fn heads_and_attention_are_one_step_where_nothing_reads_the_heads() {
    let steps = fused(heads_verbs());
    let [Step::Verb(Verb::Linear(..)), Step::Verb(Verb::Mark(_)), Step::Heads(h)] = &steps[..] else {
        panic!("{steps:?}")
    };
    assert_eq!((h.qkv, h.out), (Y, Z));
    assert_eq!(h.parts().each_ref().map(Step::uses), [(vec![Y, IN], vec![Y]), (vec![Y], vec![Z])]);
    for between in [Verb::Tap(TapPoint::Qkv(0), Y), Verb::KeepRows(vec![X])] {
        let mut verbs = heads_verbs();
        verbs.insert(2, between);
        let steps = fused(verbs);
        assert!(!steps.iter().any(|s| matches!(s, Step::Heads(_))), "{steps:?}");
    }
}

#[test]
fn a_buffer_in_use_is_not_written_early() {
    // IN is read between, so its second norm stays where it is.
    let steps =
        fused(vec![Verb::NormAdd(X, Y, norm(0)), Verb::Linear(Z, IN, Mat(0)), Verb::RmsNorm(IN, X, norm(1))]);
    assert!(matches!(&steps[0], Step::Residual(r) if r.outs.is_empty()));
    assert_eq!(steps.len(), 3);
}

#[test]
fn a_gated_products_input_is_made_in_it_where_the_residual_is_touched_next_by_a_step() {
    let verbs = || {
        let [hidden, raw] = [5, 6].map(Act);
        vec![
            Verb::NormAdd(X, Y, norm(0)),
            Verb::RmsNorm(IN, X, norm(1)),
            Verb::Mark(Phase::Mlp),
            Verb::Gated { out: hidden, gate_up: raw, x: IN, w: Mat(0), f: Activation::GeluTanh },
            Verb::Linear(Y, hidden, Mat(1)),
            Verb::NormAdd(X, Y, norm(2)),
        ]
    };
    let steps = fused(verbs());
    let [Step::Verb(Verb::Mark(_)), Step::NormedGated(both), Step::Verb(_), Step::Residual(last)] =
        &steps[..]
    else {
        panic!("{steps:?}")
    };
    assert!(matches!(&both[0], Step::Residual(r) if r.outs == [(IN, Some(norm(1)))]));
    assert_eq!((both[0].uses().1.contains(&X), last.x), (true, X));
    // A tap of the residual, a second reader of what is made, an end without another step.
    let mut tapped = verbs();
    tapped.insert(1, Verb::Tap(TapPoint::LayerOut(0), X));
    let mut read = verbs();
    read.push(Verb::Cast(Z, IN));
    let mut ends = verbs();
    ends[5] = Verb::RmsNorm(Z, X, norm(3));
    for verbs in [tapped, read, ends] {
        let steps = fused(verbs);
        assert!(!steps.iter().any(|s| matches!(s, Step::NormedGated(_))), "{steps:?}");
    }
}
