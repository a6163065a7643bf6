//! The fast mode: a pass is taken down as a list of verbs, neighbouring verbs are joined into the steps that one kernel
//! carries out, and the steps are queued.
//!
//! [`Recorder`] takes a pass down. [`fuse`](fuse::fuse) joins what can be joined: it moves nothing across a verb that
//! reads or writes the same buffers. A tap keeps nothing apart: it takes what it wants from where the steps leave it, so
//! that a pass with taps runs the kernels of one without. What has no kernel of its own,
//! by its shape or because it is rare, runs on the verbs of the float32 mode, which read and write bf16 inputs too.
//! A pass that is decoded is recorded as a graph, so none of this is done again.

mod emit;
mod experts;
mod fuse;
mod heads;
mod per_layer;
mod random;
mod weights;

pub(crate) use emit::{Planes, run};
pub(crate) use random::{Tiles, repeat};
pub(crate) use weights::{PackOptions, Packed, ROUTER_ROWS, decoded, float_view, keeps_file_form};

use std::collections::BTreeSet;

use lapidary_ops::{
    Act, Activation, AttnSpec, ExpertSpec, Gain, Mat, Norm, Ops, PerLayerSpec, Phase, QkvSpec, RouteSpec,
    TapPoint, TapSet,
};

/// A verb with what it names.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verb {
    Embed(Act, Mat, f32),
    InjectSoft(Act),
    RopeTable(Act, Gain),
    RmsNorm(Act, Act, Norm),
    Cast(Act, Act),
    Linear(Act, Act, Mat),
    Gated { out: Act, gate_up: Act, x: Act, w: Mat, f: Activation },
    Geglu(Act, Act, Activation),
    Add(Act, Act),
    Scale(Act, f32),
    QkvFinish(Act, QkvSpec),
    Attention(Act, Act, AttnSpec),
    Route(Act, Act, RouteSpec),
    Experts(Act, Act, Act, ExpertSpec),
    PerLayerInputs(Act, Act, PerLayerSpec),
    PerLayerGate(Act, Act, Act, usize, Activation),
    KeepRows(Vec<Act>),
    Logits(Act, Act, Mat, Option<f32>),
    Argmax(Act),
    Tap(TapPoint, Act),
    NormAdd(Act, Act, Norm),
    Steer(Act, usize),
    Mark(Phase),
}

impl Verb {
    /// The buffers that it reads, and those that it writes.
    pub fn uses(&self) -> (Vec<Act>, Vec<Act>) {
        match *self {
            Verb::Embed(out, ..) | Verb::InjectSoft(out) | Verb::RopeTable(out, _) => (vec![], vec![out]),
            Verb::RmsNorm(out, x, _)
            | Verb::Cast(out, x)
            | Verb::Linear(out, x, _)
            | Verb::Geglu(out, x, _) => (vec![x], vec![out]),
            Verb::Gated { out, gate_up, x, .. } => (vec![x], vec![gate_up, out]),
            Verb::Add(x, y) => (vec![x, y], vec![x]),
            Verb::NormAdd(x, y, _) => (vec![x, y], vec![x, y]),
            Verb::Scale(x, _) | Verb::Steer(x, _) => (vec![x], vec![x]),
            Verb::QkvFinish(qkv, spec) => (vec![qkv, spec.rope], vec![qkv]),
            Verb::Attention(out, qkv, _) => (vec![qkv], vec![out]),
            Verb::Route(out, logits, _) => (vec![logits], vec![out]),
            Verb::Experts(out, x, routes, _) => (vec![x, routes], vec![out]),
            Verb::PerLayerInputs(out, context, _) => (vec![context], vec![out]),
            Verb::PerLayerGate(out, gate, inputs, ..) => (vec![gate, inputs], vec![out]),
            Verb::KeepRows(ref acts) => (acts.clone(), acts.clone()),
            Verb::Logits(out, x, ..) => (vec![x], vec![out]),
            Verb::Argmax(x) | Verb::Tap(_, x) => (vec![x], vec![]),
            Verb::Mark(_) => (vec![], vec![]),
        }
    }
}

/// Takes a pass down.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// What was called, in order.
    pub verbs: Vec<Verb>,
    taps: TapSet,
    /// Layers at which some steering set has an edit.
    steered: BTreeSet<usize>,
    /// Whether every row is a head row, so that keeping them drops none.
    keeps_all: bool,
}

impl Recorder {
    /// For a batch with these taps, and sets that edit rows at the layers `steered`.
    pub fn new(taps: &TapSet, steered: &BTreeSet<usize>, keeps_all: bool) -> Recorder {
        Recorder { verbs: Vec::new(), taps: taps.clone(), steered: steered.clone(), keeps_all }
    }
}

impl Ops for Recorder {
    fn embed(&mut self, out: Act, table: Mat, scale: f32) {
        self.verbs.push(Verb::Embed(out, table, scale));
    }
    fn inject_soft(&mut self, out: Act) {
        self.verbs.push(Verb::InjectSoft(out));
    }
    fn rope_table(&mut self, out: Act, inv_freq: Gain) {
        self.verbs.push(Verb::RopeTable(out, inv_freq));
    }
    fn rms_norm(&mut self, out: Act, x: Act, norm: Norm) {
        self.verbs.push(Verb::RmsNorm(out, x, norm));
    }
    fn cast(&mut self, out: Act, x: Act) {
        self.verbs.push(Verb::Cast(out, x));
    }
    fn linear(&mut self, out: Act, x: Act, w: Mat) {
        self.verbs.push(Verb::Linear(out, x, w));
    }
    fn geglu(&mut self, out: Act, gate_up: Act, f: Activation) {
        self.verbs.push(Verb::Geglu(out, gate_up, f));
    }
    fn add(&mut self, x: Act, y: Act) {
        self.verbs.push(Verb::Add(x, y));
    }
    fn scale(&mut self, x: Act, by: f32) {
        self.verbs.push(Verb::Scale(x, by));
    }
    fn qkv_finish(&mut self, qkv: Act, spec: &QkvSpec) {
        self.verbs.push(Verb::QkvFinish(qkv, *spec));
    }
    fn attention(&mut self, out: Act, qkv: Act, spec: &AttnSpec) {
        self.verbs.push(Verb::Attention(out, qkv, *spec));
    }
    fn route(&mut self, out: Act, logits: Act, spec: &RouteSpec) {
        self.verbs.push(Verb::Route(out, logits, *spec));
    }
    fn experts(&mut self, out: Act, x: Act, routes: Act, spec: &ExpertSpec) {
        self.verbs.push(Verb::Experts(out, x, routes, *spec));
    }
    fn per_layer_inputs(&mut self, out: Act, context: Act, spec: &PerLayerSpec) {
        self.verbs.push(Verb::PerLayerInputs(out, context, *spec));
    }
    fn per_layer_gate(&mut self, out: Act, gate: Act, inputs: Act, layer: usize, f: Activation) {
        self.verbs.push(Verb::PerLayerGate(out, gate, inputs, layer, f));
    }
    fn keep_rows(&mut self, acts: &[Act]) {
        if !self.keeps_all {
            self.verbs.push(Verb::KeepRows(acts.to_vec()));
        }
    }
    fn logits(&mut self, out: Act, x: Act, head: Mat, softcap: Option<f32>) {
        self.verbs.push(Verb::Logits(out, x, head, softcap));
    }
    fn argmax(&mut self, logits: Act) {
        self.verbs.push(Verb::Argmax(logits));
    }
    fn tap(&mut self, point: TapPoint, x: Act) {
        if self.taps.wants(point) {
            self.verbs.push(Verb::Tap(point, x));
        }
    }
    fn norm_add(&mut self, x: Act, y: Act, norm: Norm) {
        self.verbs.push(Verb::NormAdd(x, y, norm));
    }
    fn gated_linear(&mut self, out: Act, gate_up: Act, x: Act, w: Mat, f: Activation) {
        self.verbs.push(Verb::Gated { out, gate_up, x, w, f });
    }
    fn steer(&mut self, x: Act, layer: usize) {
        if self.steered.contains(&layer) {
            self.verbs.push(Verb::Steer(x, layer));
        }
    }
    fn mark(&mut self, phase: Phase) {
        self.verbs.push(Verb::Mark(phase));
    }
}
