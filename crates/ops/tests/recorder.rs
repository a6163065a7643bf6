//! The recorder names the step, the verb and the buffer of what does not fit, and prints what does.

use lapidary_ops::program::{Registry, check};
use lapidary_ops::{
    Act, ActKind, ActRows, ActSpec, Activation, AttnSpec, CloseSpec, ExpertSpec, Format, Gain, GainSpec,
    Group, KvRef, KvSpec, Mat, MatSpec, Norm, Ops, PerLayerSpec, QkvSpec, RouteSpec, ValueSource,
};

const X: Act = Act(0);
const Y: Act = Act(1);
const INPUT: Act = Act(2);
const WIDE: Act = Act(3);
const ROPE: Act = Act(4);
const LOGITS: Act = Act(5);
const GATE: Act = Act(6);
const ROUTES: Act = Act(7);

const TABLE: Mat = Mat(0);
const QKV: Mat = Mat(1);
const EXPERTS_UP: Mat = Mat(2);
const EXPERTS_DOWN: Mat = Mat(3);

/// x, y, input of 6; wide of 20 = (2 + 2 * 1.5) heads of 4; rope of 4; logits of 11.
fn registry() -> Registry {
    let act = |name, width, kind| ActSpec { name, width, kind, rows: ActRows::Batch, max_rows: 2 };
    let mat = |name: &str, rows, cols| MatSpec { name: name.into(), rows, cols, formats: vec![Format::Bf16] };
    let gain = |name: &str, len| GainSpec { name: name.into(), len };
    Registry {
        acts: vec![
            act("x", 6, ActKind::F32),
            act("y", 6, ActKind::F32),
            act("input", 6, ActKind::Input),
            act("wide", 20, ActKind::F32),
            act("rope", 4, ActKind::F32),
            act("logits", 11, ActKind::F32),
            act("gate", 10, ActKind::F32),
            act("routes", 4, ActKind::F32),
        ],
        mats: vec![mat("embed", 11, 6), mat("qkv", 20, 6), mat("up", 3 * 2 * 5, 6), mat("down", 3 * 6, 5)],
        gains: vec![gain("norm", 6), gain("head norm", 4), gain("freq", 2), gain("scale", 3)],
    }
}

const fn norm(gain: u32) -> Norm {
    Norm { gain: Gain(gain), eps: 1e-6 }
}

fn cache(writes: bool) -> KvRef {
    KvRef { group: Group::Sliding, index: 2, writes }
}

fn qkv(kv_heads: usize, writes: bool) -> QkvSpec {
    let kv =
        KvSpec { k_norm: norm(1), values: ValueSource::Keys, v_norm_eps: Some(1e-6), cache: cache(writes) };
    QkvSpec { heads: 2, kv_heads, head_dim: 4, q_norm: norm(1), kv: Some(kv), rope: ROPE }
}

fn attn(heads: usize, kv_heads: usize, head_dim: usize) -> AttnSpec {
    AttnSpec { heads, kv_heads, head_dim, scale: 1.0, softcap: None, window: Some(7), cache: cache(false) }
}

fn experts(width: usize) -> ExpertSpec {
    ExpertSpec {
        experts: 3,
        top_k: 2,
        width,
        gate_up: EXPERTS_UP,
        down: EXPERTS_DOWN,
        activation: Activation::Silu,
    }
}

#[test]
fn a_pass_that_fits_is_printed_a_verb_a_line() {
    let lines = check(&registry(), &|s| {
        s.embed(X, TABLE, 2.5);
        s.inject_soft(X);
        s.rope_table(ROPE, Gain(2));
        s.rms_norm(INPUT, X, norm(0));
        s.linear(WIDE, INPUT, QKV);
        s.qkv_finish(WIDE, &qkv(1, true));
        s.fork();
        s.resume();
        s.join();
        s.keep_rows(&[X, Y]);
        s.close_layer(
            X,
            &CloseSpec {
                y: Y,
                post: norm(0),
                scalar: Some(0.5),
                layer: 0,
                steer: true,
                next: Some((INPUT, norm(0))),
            },
        );
        s.logits(LOGITS, INPUT, TABLE, Some(30.0));
        s.argmax(LOGITS);
    });
    let expected = [
        "embed x = embed * 2.5",
        "inject_soft x",
        "rope_table rope from freq",
        "rms_norm input = x by norm",
        "linear wide = input x qkv [20, 6]",
        "qkv_finish wide by head norm, head norm, values Keys normed -> Sliding kv 2",
        "fork ",
        "resume ",
        "join ",
        "keep_rows x y",
        "rms_norm y = y by norm",
        "add x += y",
        "scale x *= 0.5",
        "steer x at the end of layer 0",
        "rms_norm input = x by norm",
        "logits logits = input x embed softcap 30",
        "argmax logits",
    ];
    assert_eq!(lines.unwrap(), expected);
}

/// A program that does not fit, the verb that says so, and a word of the message.
type Case = (fn(&mut dyn Ops), &'static str, &'static str);

const CASES: &[Case] = &[
    (|s| s.embed(WIDE, TABLE, 1.0), "embed", "wide is 20 wide, not 6"),
    (|s| s.embed(X, Mat(9), 1.0), "embed", "matrix 9 was never packed"),
    (|s| s.embed(INPUT, TABLE, 1.0), "embed", "input is an input buffer"),
    (|s| s.embed(Act(99), TABLE, 1.0), "embed", "activation 99 was never allocated"),
    (|s| s.inject_soft(INPUT), "inject_soft", "float32 is needed"),
    (|s| s.rope_table(ROPE, Gain(0)), "rope_table", "norm has 6 values, 2 are needed"),
    (|s| s.rope_table(ROPE, Gain(77)), "rope_table", "vector 77 was never loaded"),
    (|s| s.rms_norm(WIDE, X, norm(0)), "rms_norm", "wide is 20 wide, not 6"),
    (|s| s.rms_norm(X, INPUT, norm(0)), "rms_norm", "input is an input buffer"),
    (|s| s.rms_norm(INPUT, X, norm(1)), "rms_norm", "head norm has 4 values, 6 are needed"),
    (|s| s.cast(WIDE, X), "cast", "wide"),
    (|s| s.linear(WIDE, ROPE, QKV), "linear", "rope is 4 wide, not 6"),
    (|s| s.linear(X, INPUT, QKV), "linear", "x is 6 wide, not 20"),
    (|s| s.geglu(X, GATE, Activation::Silu), "geglu", "gate is 10 wide, not 12"),
    (|s| s.add(X, WIDE), "add", "wide"),
    (|s| s.scale(INPUT, 1.0), "scale", "input"),
    (|s| s.qkv_finish(X, &qkv(1, true)), "qkv_finish", "x is 6 wide, 12 are needed"),
    (|s| s.qkv_finish(WIDE, &qkv(1, false)), "qkv_finish", "not written"),
    (|s| s.qkv_finish(WIDE, &qkv(4, true)), "qkv_finish", "wide is 20 wide, 24 are needed"),
    (|s| s.attention(X, WIDE, &attn(2, 1, 4)), "attention", "x is 6 wide, not 8"),
    (|s| s.attention(X, WIDE, &attn(2, 0, 3)), "attention", "2 heads over 0 kv heads"),
    (|s| s.attention(X, WIDE, &attn(3, 2, 2)), "attention", "3 heads over 2 kv heads"),
    (
        |s| s.route(ROUTES, LOGITS, &RouteSpec { experts: 3, top_k: 2, per_expert_scale: Gain(3) }),
        "route",
        "logits is 11 wide, not 3",
    ),
    (|s| s.experts(Y, INPUT, ROUTES, &experts(4)), "experts", "up is [30, 6]"),
    (|s| s.experts(Y, INPUT, GATE, &experts(5)), "experts", "gate is 10 wide, not 4"),
    (
        |s| s.per_layer_gate(Y, X, GATE, 1, Activation::Silu),
        "per_layer_gate",
        "gate is 10 wide, 12 are needed",
    ),
    (
        |s| {
            let spec = PerLayerSpec {
                table: TABLE,
                layers: 5,
                width: 4,
                norm: norm(1),
                context_scale: 1.0,
                token_scale: 1.0,
                mix_scale: 1.0,
            };
            s.per_layer_inputs(WIDE, WIDE, &spec);
        },
        "per_layer_inputs",
        "embed is 6 wide, not 20",
    ),
    (|s| s.logits(LOGITS, INPUT, TABLE, None), "logits", "were not kept"),
    (
        |s| {
            s.keep_rows(&[X]);
            s.keep_rows(&[X]);
        },
        "keep_rows",
        "rows were dropped before",
    ),
];

#[test]
fn what_does_not_fit_is_named() {
    for (i, (program, verb, words)) in CASES.iter().enumerate() {
        let error = check(&registry(), &|s| program(s)).expect_err(&format!("case {i}, {verb}"));
        assert_eq!(error.verb, *verb, "case {i}: {error}");
        assert!(error.to_string().contains(words), "case {i}: {error}");
    }
}

#[test]
fn the_first_misfit_is_reported_with_its_line() {
    let error = check(&registry(), &|s| {
        s.embed(X, TABLE, 1.0);
        s.add(X, Y);
        s.add(X, WIDE);
        s.linear(X, INPUT, QKV);
    });
    let error = error.unwrap_err();
    assert_eq!((error.step, error.verb), (3, "add"));
}
