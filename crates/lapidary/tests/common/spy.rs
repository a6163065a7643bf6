//! A backend that passes everything on to another and can be told to change it on the way: a vector at load,
//! a verb of a pass, a batch. Tests step into known mistakes with it.

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use lapidary_engine::sampling::{Sampler, SamplingParams, TokenCounts};
use lapidary_engine::{Runner, Stepper};
use lapidary_model::{BuildOptions, Config, Limits, Model};
use lapidary_ops::{
    Act, ActSpec, Activation, AttnSpec, Backend, Batch, BatchShape, DeviceReport, Draw, Error, ExpertSpec,
    Gain, Group, KvPlan, KvRef, Mat, MemoryUse, Norm, Ops, Outcome, PerLayerSpec, Phase, QkvSpec, Result,
    RouteSpec, SteerSet, TapPoint, TensorView,
};
use lapidary_weights::Checkpoint;

use super::{On, Setup};

/// One primitive verb with its arguments. Fused verbs arrive as the primitives that they stand for.
#[derive(Clone, Copy, Debug)]
pub enum Verb<'a> {
    Embed(Act, Mat, f32),
    InjectSoft(Act),
    RopeTable(Act, Gain),
    RmsNorm(Act, Act, Norm),
    Cast(Act, Act),
    Linear(Act, Act, Mat),
    Geglu(Act, Act, Activation),
    Add(Act, Act),
    Scale(Act, f32),
    QkvFinish(Act, QkvSpec),
    Attention(Act, Act, AttnSpec),
    Route(Act, Act, RouteSpec),
    Experts(Act, Act, Act, ExpertSpec),
    PerLayerInputs(Act, Act, PerLayerSpec),
    PerLayerGate(Act, Act, Act, usize, Activation),
    KeepRows(&'a [Act]),
    Logits(Act, Act, Mat, Option<f32>),
    Argmax(Act),
    Tap(TapPoint, Act),
    Steer(Act, usize),
}

impl Verb<'_> {
    pub fn run(self, s: &mut dyn Ops) {
        match self {
            Verb::Embed(out, table, scale) => s.embed(out, table, scale),
            Verb::InjectSoft(out) => s.inject_soft(out),
            Verb::RopeTable(out, freq) => s.rope_table(out, freq),
            Verb::RmsNorm(out, x, norm) => s.rms_norm(out, x, norm),
            Verb::Cast(out, x) => s.cast(out, x),
            Verb::Linear(out, x, w) => s.linear(out, x, w),
            Verb::Geglu(out, x, f) => s.geglu(out, x, f),
            Verb::Add(x, y) => s.add(x, y),
            Verb::Scale(x, by) => s.scale(x, by),
            Verb::QkvFinish(qkv, spec) => s.qkv_finish(qkv, &spec),
            Verb::Attention(out, q, spec) => s.attention(out, q, &spec),
            Verb::Route(out, x, spec) => s.route(out, x, &spec),
            Verb::Experts(out, x, routes, spec) => s.experts(out, x, routes, &spec),
            Verb::PerLayerInputs(out, x, spec) => s.per_layer_inputs(out, x, &spec),
            Verb::PerLayerGate(out, g, i, l, f) => s.per_layer_gate(out, g, i, l, f),
            Verb::KeepRows(acts) => s.keep_rows(acts),
            Verb::Logits(out, x, head, cap) => s.logits(out, x, head, cap),
            Verb::Argmax(x) => s.argmax(x),
            Verb::Tap(point, x) => s.tap(point, x),
            Verb::Steer(x, layer) => s.steer(x, layer),
        }
    }
}

type OnConfig = dyn Fn(&mut Config) + Send + Sync;
type OnModel = dyn Fn(&mut Model) + Send + Sync;
type OnVerb = dyn Fn(&Model, Verb<'_>, &mut dyn Ops) + Send + Sync;
type OnVector = dyn Fn(&str, &mut Vec<f32>) + Send + Sync;
type OnPack = dyn Fn(&mut Vec<TensorView<'_>>) + Send + Sync;
type OnBatch = dyn Fn(&Model, &mut Batch) + Send + Sync;
type OnMemory = dyn Fn(&'static str, &Batch) -> bool + Send + Sync;
type AfterRun = dyn Fn(&Model, &Batch, &mut dyn Backend) + Send + Sync;

/// What is changed on the way; everything that is absent passes as it is.
#[derive(Clone, Default)]
pub struct Hooks {
    pub config: Option<Arc<OnConfig>>,
    pub model: Option<Arc<OnModel>>,
    pub verb: Option<Arc<OnVerb>>,
    pub vector: Option<Arc<OnVector>>,
    pub pack: Option<Arc<OnPack>>,
    pub batch: Option<Arc<OnBatch>>,
    pub after: Option<Arc<AfterRun>>,
    /// Whether there is no memory to upload a batch, to run it, to read its logits, or to hold a steering set.
    pub starved: Option<Arc<OnMemory>>,
    /// What the backend says of itself.
    pub rows_change_bits: bool,
    /// Makes a device that works on its own of the backend, one that draws tokens and whose passes may follow each other,
    /// and counts them.
    pub passes: Option<Arc<Passes>>,
    built: Arc<OnceLock<Model>>,
    /// The verbs that ran, on any worker, in the order of their first appearance since the last look.
    seen: Arc<Mutex<Vec<&'static str>>>,
}

/// Passes of a backend that works on its own.
#[derive(Debug, Default)]
pub struct Passes {
    all: AtomicUsize,
    behind: AtomicUsize,
    drawn: AtomicUsize,
}

impl Passes {
    /// All so far, and those of them that were started before the one in front of them was collected.
    pub fn count(&self) -> (usize, usize) {
        (self.all.load(Ordering::SeqCst), self.behind.load(Ordering::SeqCst))
    }

    /// Tokens that the device drew.
    pub fn drawn(&self) -> usize {
        self.drawn.load(Ordering::SeqCst)
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooks")
    }
}

impl Hooks {
    pub fn config(f: impl Fn(&mut Config) + Send + Sync + 'static) -> Hooks {
        Hooks { config: Some(Arc::new(f)), ..Hooks::default() }
    }
    pub fn model(f: impl Fn(&mut Model) + Send + Sync + 'static) -> Hooks {
        Hooks { model: Some(Arc::new(f)), ..Hooks::default() }
    }
    pub fn verb(f: impl Fn(&Model, Verb<'_>, &mut dyn Ops) + Send + Sync + 'static) -> Hooks {
        Hooks { verb: Some(Arc::new(f)), ..Hooks::default() }
    }
    pub fn vector(f: impl Fn(&str, &mut Vec<f32>) + Send + Sync + 'static) -> Hooks {
        Hooks { vector: Some(Arc::new(f)), ..Hooks::default() }
    }
    pub fn pack(f: impl Fn(&mut Vec<TensorView<'_>>) + Send + Sync + 'static) -> Hooks {
        Hooks { pack: Some(Arc::new(f)), ..Hooks::default() }
    }
    pub fn batch(f: impl Fn(&Model, &mut Batch) + Send + Sync + 'static) -> Hooks {
        Hooks { batch: Some(Arc::new(f)), ..Hooks::default() }
    }
    pub fn after(f: impl Fn(&Model, &Batch, &mut dyn Backend) + Send + Sync + 'static) -> Hooks {
        Hooks { after: Some(Arc::new(f)), ..Hooks::default() }
    }

    pub fn starved(f: impl Fn(&'static str, &Batch) -> bool + Send + Sync + 'static) -> Hooks {
        Hooks { starved: Some(Arc::new(f)), ..Hooks::default() }
    }

    /// The verbs since the last call.
    pub fn take_seen(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.seen.lock().expect("no test thread panicked"))
    }

    fn note(&self, verb: &'static str) {
        let mut seen = self.seen.lock().expect("no test thread panicked");
        if !seen.contains(&verb) {
            seen.push(verb);
        }
    }
}

/// The token that [`poisoned`] looks for.
pub const POISON: u32 = 77;

/// Any row with token 77 gets an embedding of infinities, which the first norm turns into no number.
pub fn poisoned() -> Hooks {
    poisoned_where(|token, _| token == POISON as i32)
}

/// The same for rows of which `is_poison` holds, of their token and position.
pub fn poisoned_where(is_poison: impl Fn(i32, i32) -> bool + Send + Sync + 'static) -> Hooks {
    // A batch must be finite when it arrives, so the last step to infinity is taken inside the pass; other
    // rows come back from it exactly.
    let mut hooks = Hooks::batch(move |model, batch: &mut Batch| {
        for row in 0..batch.tokens.len() {
            if is_poison(batch.tokens[row], batch.positions[row]) {
                batch.soft_rows.push(row as i32);
                batch.soft_values.extend(std::iter::repeat_n(f32::MAX, model.config.hidden));
            }
        }
    });
    hooks.verb = Hooks::verb(|_, verb, s| {
        verb.run(s);
        if let Verb::Embed(x, ..) = verb {
            s.inject_soft(x);
            s.scale(x, 4.0);
            s.scale(x, 0.25);
        }
    })
    .verb;
    hooks
}

/// A stepper whose backend is hooked.
pub fn hooked(folder: &Path, on: On, setup: Setup, hooks: &Hooks) -> Stepper {
    Stepper::new(hooked_runner(folder, on, setup, hooks), setup.context)
}

/// A runner whose backend is hooked.
pub fn hooked_runner(folder: &Path, on: On, setup: Setup, hooks: &Hooks) -> Runner {
    let checkpoint = Checkpoint::open(folder).expect("checkpoint opens");
    let mut config = Config::from_checkpoint(&checkpoint).expect("config is read");
    if let Some(change) = &hooks.config {
        change(&mut config);
    }
    let mut backend: Box<dyn Backend> = Box::new(Spy { hooks: hooks.clone(), ..Spy::new(on.backend()) });
    let limits = Limits { rows: setup.rows, head_rows: setup.head_rows };
    let options = BuildOptions { limits, embed_scale: setup.scale, requantise: Default::default() };
    let mut model =
        Model::build(config, &checkpoint, backend.as_mut(), &options, &mut |_| {}).expect("model builds");
    if let Some(change) = &hooks.model {
        change(&mut model);
    }
    assert!(hooks.built.set(model.clone()).is_ok(), "hooks serve one model");
    Runner::new(model, backend, [setup.kv; 2], setup.context).expect("pools fit")
}

#[derive(Debug)]
struct Spy {
    inner: Box<dyn Backend>,
    hooks: Hooks,
    batch: Batch,
    /// What passes gave that nobody has collected, and what the last one chose.
    under_way: VecDeque<Outcome>,
    chosen: Vec<i32>,
}

impl Backend for Spy {
    fn report(&self) -> DeviceReport {
        self.inner.report()
    }
    fn pack(&mut self, parts: &[TensorView<'_>], group_rows: usize) -> Result<Mat> {
        let mut parts = parts.to_vec();
        if let Some(change) = &self.hooks.pack {
            change(&mut parts);
        }
        self.inner.pack(&parts, group_rows)
    }
    fn pack_rows(&mut self, part: &TensorView<'_>) -> Result<Mat> {
        self.inner.pack_rows(part)
    }

    fn pack_tied(&mut self, part: &TensorView<'_>) -> Result<Mat> {
        self.inner.pack_tied(part)
    }
    fn vector(&mut self, name: &str, values: &[f32]) -> Result<Gain> {
        let mut values = values.to_vec();
        if let Some(change) = &self.hooks.vector {
            change(name, &mut values);
        }
        self.inner.vector(name, &values)
    }
    fn activation(&mut self, spec: ActSpec) -> Result<Act> {
        self.inner.activation(spec)
    }
    fn kv(&mut self, plan: &KvPlan) -> Result<()> {
        self.inner.kv(plan)
    }
    fn steer_set(&mut self, index: usize, set: Option<&SteerSet>) -> Result<()> {
        if set.is_some_and(|set| !set.edits.is_empty()) {
            self.allocates("steer")?;
        }
        self.inner.steer_set(index, set)
    }
    fn timings(&mut self, on: bool) -> Result<()> {
        self.inner.timings(on)
    }
    fn rows_change_bits(&self) -> bool {
        self.hooks.rows_change_bits
    }
    fn follows(&self) -> bool {
        self.hooks.passes.is_some()
    }
    fn draws(&self, _vocab: usize) -> bool {
        self.hooks.passes.is_some()
    }
    fn upload(&mut self, batch: &Batch) -> Result<()> {
        self.batch = batch.clone();
        if self.hooks.passes.is_some() {
            self.follow();
        }
        if let (Some(change), Some(model)) = (&self.hooks.batch, self.hooks.built.get()) {
            change(model, &mut self.batch);
        }
        self.allocates("upload")?;
        self.inner.upload(&self.batch)
    }
    fn run(&mut self, shape: &BatchShape, program: &(dyn Fn(&mut dyn Ops) + Sync)) -> Result<()> {
        self.allocates("run")?;
        let hooks = &self.hooks;
        self.inner.run(shape, &|s| program(&mut SpyOps { s, hooks }))?;
        if let (Some(after), Some(model)) = (&self.hooks.after, self.hooks.built.get()) {
            after(model, &self.batch, self.inner.as_mut());
        }
        if let Some(passes) = &self.hooks.passes {
            passes.all.fetch_add(1, Ordering::SeqCst);
            passes.behind.fetch_add(usize::from(!self.under_way.is_empty()), Ordering::SeqCst);
            let mut outcome = self.inner.collect()?;
            self.draw(&mut outcome.argmax)?;
            self.chosen.clone_from(&outcome.argmax);
            self.under_way.push_back(outcome);
        }
        Ok(())
    }
    fn collect(&mut self) -> Result<Outcome> {
        match self.hooks.passes {
            None => self.inner.collect(),
            Some(_) => self.under_way.pop_front().ok_or_else(|| Error::Device("nothing is under way".into())),
        }
    }
    fn read(&mut self, act: Act, rows: usize, out: &mut Vec<f32>) -> Result<()> {
        self.inner.read(act, rows, out)
    }
    fn lend_rows(&mut self, act: Act, rows: &[usize], to: &mut dyn FnMut(&[&[f32]])) -> Result<()> {
        self.allocates("lend")?;
        self.inner.lend_rows(act, rows, to)
    }
    fn kv_store(&mut self, cache: KvRef, page: usize, place: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.inner.kv_store(cache, page, place, k, v)
    }
    fn kv_load(
        &mut self,
        cache: KvRef,
        page: usize,
        place: usize,
        k: &mut [f32],
        v: &mut [f32],
    ) -> Result<()> {
        self.inner.kv_load(cache, page, place, k, v)
    }
    fn page_read(&mut self, group: Group, page: usize, out: &mut Vec<u8>) -> Result<()> {
        self.inner.page_read(group, page, out)
    }
    fn page_write(&mut self, group: Group, page: usize, bytes: &[u8]) -> Result<()> {
        self.inner.page_write(group, page, bytes)
    }
    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }
}

impl Spy {
    fn new(inner: Box<dyn Backend>) -> Spy {
        let (hooks, batch) = (Hooks::default(), Batch::default());
        Spy { inner, hooks, batch, under_way: VecDeque::new(), chosen: Vec::new() }
    }

    /// Puts the tokens in that the pass before chose, as a device does that looks them up by itself.
    fn follow(&mut self) {
        let b = &mut self.batch;
        let most = if b.follows.is_empty() { 0 } else { 1 };
        assert!(self.under_way.len() <= most, "{} passes are under way", self.under_way.len());
        for (row, head) in std::mem::take(&mut b.follows).into_iter().enumerate() {
            if let Ok(head) = usize::try_from(head) {
                let token = self.chosen[head].max(0);
                (b.tokens[row], b.per_layer_tokens[row]) = (token, token);
            }
        }
    }

    /// Draws the tokens that the batch asks for.
    fn draw(&mut self, chosen: &mut [i32]) -> Result<()> {
        let draws = std::mem::take(&mut self.batch.draws);
        for (head, draw) in draws.iter().enumerate() {
            let Some(draw) = draw.filter(|_| chosen[head] >= 0) else { continue };
            let model = self.hooks.built.get().expect("passes run on a model that is built");
            self.inner.lend_rows(model.acts.logits, &[head], &mut |logits| {
                chosen[head] = drawn(&draw, logits[0]) as i32;
            })?;
            if let Some(passes) = &self.hooks.passes {
                passes.drawn.fetch_add(1, Ordering::SeqCst);
            }
        }
        Ok(())
    }

    fn allocates(&self, what: &'static str) -> Result<()> {
        match &self.hooks.starved {
            Some(starved) if starved(what, &self.batch) => {
                Err(Error::OutOfMemory { what: what.to_owned(), needed: 7, available: 3 })
            }
            _ => Ok(()),
        }
    }
}

/// What the sampler draws.
pub fn drawn(draw: &Draw, logits: &[f32]) -> u32 {
    let params = SamplingParams {
        temperature: (1.0 / draw.inverse_temperature) as f32,
        top_k: draw.top_k,
        top_p: draw.top_p,
        min_p: draw.min_p,
        seed: draw.seed,
        suppress: draw.suppress.iter().filter_map(|&token| u32::try_from(token).ok()).collect(),
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(params, logits.len()).expect("the parameters are in their ranges");
    sampler.sample(logits, draw.position, &TokenCounts::new()).expect("the row is finite").token
}

struct SpyOps<'a> {
    s: &'a mut dyn Ops,
    hooks: &'a Hooks,
}

impl SpyOps<'_> {
    fn pass(&mut self, name: &'static str, verb: Verb<'_>) {
        self.hooks.note(name);
        match (&self.hooks.verb, self.hooks.built.get()) {
            (Some(change), Some(model)) => change(model, verb, self.s),
            _ => verb.run(self.s),
        }
    }
}

impl Ops for SpyOps<'_> {
    fn embed(&mut self, out: Act, table: Mat, scale: f32) {
        self.pass("embed", Verb::Embed(out, table, scale));
    }
    fn inject_soft(&mut self, out: Act) {
        self.pass("inject_soft", Verb::InjectSoft(out));
    }
    fn rope_table(&mut self, out: Act, freq: Gain) {
        self.pass("rope_table", Verb::RopeTable(out, freq));
    }
    fn rms_norm(&mut self, out: Act, x: Act, norm: Norm) {
        self.pass("rms_norm", Verb::RmsNorm(out, x, norm));
    }
    fn cast(&mut self, out: Act, x: Act) {
        self.pass("cast", Verb::Cast(out, x));
    }
    fn linear(&mut self, out: Act, x: Act, w: Mat) {
        self.pass("linear", Verb::Linear(out, x, w));
    }
    fn geglu(&mut self, out: Act, gate_up: Act, f: Activation) {
        self.pass("geglu", Verb::Geglu(out, gate_up, f));
    }
    fn add(&mut self, x: Act, y: Act) {
        self.pass("add", Verb::Add(x, y));
    }
    fn scale(&mut self, x: Act, by: f32) {
        self.pass("scale", Verb::Scale(x, by));
    }
    fn qkv_finish(&mut self, qkv: Act, spec: &QkvSpec) {
        self.pass("qkv_finish", Verb::QkvFinish(qkv, *spec));
    }
    fn attention(&mut self, out: Act, qkv: Act, spec: &AttnSpec) {
        self.pass("attention", Verb::Attention(out, qkv, *spec));
    }
    fn route(&mut self, out: Act, logits: Act, spec: &RouteSpec) {
        self.pass("route", Verb::Route(out, logits, *spec));
    }
    fn experts(&mut self, out: Act, x: Act, routes: Act, spec: &ExpertSpec) {
        self.pass("experts", Verb::Experts(out, x, routes, *spec));
    }
    fn per_layer_inputs(&mut self, out: Act, context: Act, spec: &PerLayerSpec) {
        self.pass("per_layer_inputs", Verb::PerLayerInputs(out, context, *spec));
    }
    fn per_layer_gate(&mut self, out: Act, gate: Act, inputs: Act, layer: usize, f: Activation) {
        self.pass("per_layer_gate", Verb::PerLayerGate(out, gate, inputs, layer, f));
    }
    fn keep_rows(&mut self, acts: &[Act]) {
        self.pass("keep_rows", Verb::KeepRows(acts));
    }
    fn logits(&mut self, out: Act, x: Act, head: Mat, softcap: Option<f32>) {
        self.pass("logits", Verb::Logits(out, x, head, softcap));
    }
    fn argmax(&mut self, logits: Act) {
        self.pass("argmax", Verb::Argmax(logits));
    }
    fn tap(&mut self, point: TapPoint, x: Act) {
        self.pass("tap", Verb::Tap(point, x));
    }
    fn steer(&mut self, x: Act, layer: usize) {
        self.pass("steer", Verb::Steer(x, layer));
    }
    fn fork(&mut self) {
        self.s.fork();
    }
    fn resume(&mut self) {
        self.s.resume();
    }
    fn join(&mut self) {
        self.s.join();
    }
    fn mark(&mut self, phase: Phase) {
        self.s.mark(phase);
    }
}
