//! A pass as text, and the check of a pass at load.
//!
//! [`Recorder`] carries out nothing: it prints each verb on a line and verifies every width against the
//! [`Registry`] of what the handles stand for, so that a shape error is a load error with a name in it.

use crate::handles::{Act, ActKind, ActSpec, Gain, GainSpec, Mat, MatSpec};
use crate::ops::{
    Activation, AttnSpec, ExpertSpec, Norm, Ops, PerLayerSpec, QkvSpec, RouteSpec, TapPoint, ValueSource,
};

/// What every handle of a model stands for, in the order in which they were dealt.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    /// By [`Act`].
    pub acts: Vec<ActSpec>,
    /// By [`Mat`].
    pub mats: Vec<MatSpec>,
    /// By [`Gain`].
    pub gains: Vec<GainSpec>,
}

/// A width or handle that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {step} `{verb}`: {what}")]
pub struct ProgramError {
    /// Line of the listing, from 1.
    pub step: usize,
    /// The verb.
    pub verb: &'static str,
    /// What does not fit.
    pub what: String,
}

/// Runs `program` through a [`Recorder`] and returns the listing.
///
/// # Errors
/// The first width, kind or handle that does not fit.
pub fn check(registry: &Registry, program: &dyn Fn(&mut dyn Ops)) -> Result<Vec<String>, ProgramError> {
    let mut recorder = Recorder { registry, lines: Vec::new(), error: None, kept: false };
    program(&mut recorder);
    match recorder.error {
        Some(error) => Err(error),
        None => Ok(recorder.lines),
    }
}

/// Prints and verifies a pass.
#[derive(Debug)]
pub struct Recorder<'a> {
    registry: &'a Registry,
    lines: Vec<String>,
    error: Option<ProgramError>,
    kept: bool,
}

impl Recorder<'_> {
    fn line(&mut self, verb: &'static str, text: String) {
        self.lines.push(format!("{verb} {text}"));
    }

    fn fail(&mut self, verb: &'static str, what: String) {
        let step = self.lines.len() + 1;
        self.error.get_or_insert(ProgramError { step, verb, what });
    }

    fn name(&self, act: Act) -> &'static str {
        self.registry.acts.get(act.0 as usize).map_or("unknown", |a| a.name)
    }

    fn width(&mut self, verb: &'static str, act: Act) -> usize {
        match self.registry.acts.get(act.0 as usize) {
            Some(spec) => spec.width,
            None => {
                self.fail(verb, format!("activation {} was never allocated", act.0));
                0
            }
        }
    }

    fn mat(&mut self, verb: &'static str, mat: Mat) -> (String, usize, usize) {
        match self.registry.mats.get(mat.0 as usize) {
            Some(m) => (m.name.clone(), m.rows, m.cols),
            None => {
                self.fail(verb, format!("matrix {} was never packed", mat.0));
                (String::new(), 0, 0)
            }
        }
    }

    fn gain(&mut self, verb: &'static str, gain: Gain, len: usize) -> String {
        match self.registry.gains.get(gain.0 as usize) {
            Some(g) if g.len == len => g.name.clone(),
            Some(g) => {
                let what = format!("{} has {} values, {len} are needed", g.name, g.len);
                self.fail(verb, what);
                String::new()
            }
            None => {
                self.fail(verb, format!("vector {} was never loaded", gain.0));
                String::new()
            }
        }
    }

    fn expect(&mut self, verb: &'static str, act: Act, width: usize) {
        let found = self.width(verb, act);
        if found < width {
            let what = format!("{} is {found} wide, {width} are needed", self.name(act));
            self.fail(verb, what);
        }
    }

    fn same(&mut self, verb: &'static str, act: Act, width: usize) {
        let found = self.width(verb, act);
        if found != width {
            let what = format!("{} is {found} wide, not {width}", self.name(act));
            self.fail(verb, what);
        }
    }

    fn floats(&mut self, verb: &'static str, acts: &[Act]) {
        for &act in acts {
            if self.registry.acts.get(act.0 as usize).is_some_and(|a| a.kind != ActKind::F32) {
                let what = format!("{} is an input buffer, float32 is needed", self.name(act));
                self.fail(verb, what);
            }
        }
    }
}

impl Ops for Recorder<'_> {
    fn embed(&mut self, out: Act, table: Mat, scale: f32) {
        let (name, _, cols) = self.mat("embed", table);
        self.same("embed", out, cols);
        self.floats("embed", &[out]);
        self.line("embed", format!("{} = {name} * {scale}", self.name(out)));
    }

    fn inject_soft(&mut self, out: Act) {
        self.floats("inject_soft", &[out]);
        self.line("inject_soft", self.name(out).to_string());
    }

    fn rope_table(&mut self, out: Act, inv_freq: Gain) {
        let width = self.width("rope_table", out);
        let freq = self.gain("rope_table", inv_freq, width / 2);
        self.floats("rope_table", &[out]);
        self.line("rope_table", format!("{} from {freq}", self.name(out)));
    }

    fn rms_norm(&mut self, out: Act, x: Act, norm: Norm) {
        let width = self.width("rms_norm", x);
        self.same("rms_norm", out, width);
        self.floats("rms_norm", &[x]);
        let gain = self.gain("rms_norm", norm.gain, width);
        self.line("rms_norm", format!("{} = {} by {gain}", self.name(out), self.name(x)));
    }

    fn cast(&mut self, out: Act, x: Act) {
        let width = self.width("cast", x);
        self.same("cast", out, width);
        self.floats("cast", &[x]);
        self.line("cast", format!("{} = {}", self.name(out), self.name(x)));
    }

    fn linear(&mut self, out: Act, x: Act, w: Mat) {
        let (name, rows, cols) = self.mat("linear", w);
        self.same("linear", x, cols);
        self.same("linear", out, rows);
        self.floats("linear", &[out]);
        self.line("linear", format!("{} = {} x {name} [{rows}, {cols}]", self.name(out), self.name(x)));
    }

    fn geglu(&mut self, out: Act, gate_up: Act, f: Activation) {
        let width = self.width("geglu", out);
        self.same("geglu", gate_up, 2 * width);
        self.floats("geglu", &[gate_up]);
        self.line("geglu", format!("{} = {f:?} {}", self.name(out), self.name(gate_up)));
    }

    fn add(&mut self, x: Act, y: Act) {
        let width = self.width("add", x);
        self.same("add", y, width);
        self.floats("add", &[x, y]);
        self.line("add", format!("{} += {}", self.name(x), self.name(y)));
    }

    fn scale(&mut self, x: Act, by: f32) {
        self.floats("scale", &[x]);
        self.line("scale", format!("{} *= {by}", self.name(x)));
    }

    fn qkv_finish(&mut self, qkv: Act, spec: &QkvSpec) {
        let d = spec.head_dim;
        let parts = match spec.kv {
            None => 0,
            Some(kv) if kv.values == ValueSource::Keys => 1,
            Some(_) => 2,
        };
        self.expect("qkv_finish", qkv, (spec.heads + parts * spec.kv_heads) * d);
        self.same("qkv_finish", spec.rope, d);
        self.floats("qkv_finish", &[qkv, spec.rope]);
        let mut text = format!("{} by {}", self.name(qkv), self.gain("qkv_finish", spec.q_norm.gain, d));
        if let Some(kv) = spec.kv {
            let k_norm = self.gain("qkv_finish", kv.k_norm.gain, d);
            if !kv.cache.writes {
                self.fail("qkv_finish", "keys are computed but not written".into());
            }
            text += &format!(
                ", {k_norm}, values {:?}{} -> {:?} kv {}",
                kv.values,
                if kv.v_norm_eps.is_some() { " normed" } else { "" },
                kv.cache.group,
                kv.cache.index
            );
        }
        self.line("qkv_finish", text);
    }

    fn attention(&mut self, out: Act, qkv: Act, spec: &AttnSpec) {
        self.same("attention", out, spec.heads * spec.head_dim);
        self.expect("attention", qkv, spec.heads * spec.head_dim);
        self.floats("attention", &[qkv]);
        if spec.kv_heads == 0 || !spec.heads.is_multiple_of(spec.kv_heads) {
            self.fail("attention", format!("{} heads over {} kv heads", spec.heads, spec.kv_heads));
        }
        let window = spec.window.map_or(String::new(), |w| format!(" window {w}"));
        let cap = spec.softcap.map_or(String::new(), |c| format!(" softcap {c}"));
        let AttnSpec { heads, kv_heads, head_dim, scale, .. } = spec;
        self.line(
            "attention",
            format!(
                "{} = {heads}/{kv_heads} heads of {head_dim} x {scale}, {:?} kv {}{window}{cap}",
                self.name(out),
                spec.cache.group,
                spec.cache.index
            ),
        );
    }

    fn route(&mut self, out: Act, logits: Act, spec: &RouteSpec) {
        self.same("route", logits, spec.experts);
        self.same("route", out, 2 * spec.top_k);
        self.floats("route", &[out, logits]);
        let scale = self.gain("route", spec.per_expert_scale, spec.experts);
        self.line("route", format!("{} = top {} of {} by {scale}", self.name(out), spec.top_k, spec.experts));
    }

    fn experts(&mut self, out: Act, x: Act, routes: Act, spec: &ExpertSpec) {
        let hidden = self.width("experts", out);
        self.same("experts", x, hidden);
        self.same("experts", routes, 2 * spec.top_k);
        self.floats("experts", &[out, routes]);
        let (gate_up, rows, cols) = self.mat("experts", spec.gate_up);
        if (rows, cols) != (spec.experts * 2 * spec.width, hidden) {
            self.fail("experts", format!("{gate_up} is [{rows}, {cols}]"));
        }
        let (down, rows, cols) = self.mat("experts", spec.down);
        if (rows, cols) != (spec.experts * hidden, spec.width) {
            self.fail("experts", format!("{down} is [{rows}, {cols}]"));
        }
        self.line(
            "experts",
            format!("{} = {} of {} experts, width {}", self.name(out), spec.top_k, spec.experts, spec.width),
        );
    }

    fn per_layer_inputs(&mut self, out: Act, context: Act, spec: &PerLayerSpec) {
        let width = spec.layers * spec.width;
        self.same("per_layer_inputs", out, width);
        self.same("per_layer_inputs", context, width);
        self.floats("per_layer_inputs", &[out, context]);
        self.gain("per_layer_inputs", spec.norm.gain, spec.width);
        let (table, _, cols) = self.mat("per_layer_inputs", spec.table);
        if cols != width {
            self.fail("per_layer_inputs", format!("{table} is {cols} wide, not {width}"));
        }
        self.line("per_layer_inputs", format!("{} = {} + {table}", self.name(out), self.name(context)));
    }

    fn per_layer_gate(&mut self, out: Act, gate: Act, inputs: Act, layer: usize, f: Activation) {
        let width = self.width("per_layer_gate", gate);
        self.same("per_layer_gate", out, width);
        self.expect("per_layer_gate", inputs, (layer + 1) * width);
        self.floats("per_layer_gate", &[gate, inputs]);
        self.line(
            "per_layer_gate",
            format!("{} = {f:?} {} * {}[{layer}]", self.name(out), self.name(gate), self.name(inputs)),
        );
    }

    fn keep_rows(&mut self, acts: &[Act]) {
        if self.kept {
            self.fail("keep_rows", "rows were dropped before".into());
        }
        self.kept = true;
        let names: Vec<_> = acts.iter().map(|&a| self.name(a)).collect();
        self.line("keep_rows", names.join(" "));
    }

    fn logits(&mut self, out: Act, x: Act, head: Mat, softcap: Option<f32>) {
        let (name, rows, cols) = self.mat("logits", head);
        self.same("logits", x, cols);
        self.same("logits", out, rows);
        self.floats("logits", &[out]);
        if !self.kept {
            self.fail("logits", "the rows whose logits are wanted were not kept before".into());
        }
        let cap = softcap.map_or(String::new(), |c| format!(" softcap {c}"));
        self.line("logits", format!("{} = {} x {name}{cap}", self.name(out), self.name(x)));
    }

    fn argmax(&mut self, logits: Act) {
        self.floats("argmax", &[logits]);
        self.line("argmax", self.name(logits).to_string());
    }

    fn steer(&mut self, x: Act, layer: usize) {
        self.floats("steer", &[x]);
        self.line("steer", format!("{} at the end of layer {layer}", self.name(x)));
    }

    // Taps are points of the pass, not steps of it: the listing stays free of them.
    fn tap(&mut self, _point: TapPoint, _x: Act) {}

    fn fork(&mut self) {
        self.line("fork", String::new());
    }
    fn resume(&mut self) {
        self.line("resume", String::new());
    }
    fn join(&mut self) {
        self.line("join", String::new());
    }
}
