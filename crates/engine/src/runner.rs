//! A model on a device, one batch at a time.

use std::time::Instant;

use lapidary_model::kv_plan::kv_plan;
use lapidary_model::{Model, forward};
use lapidary_ops::{
    Backend, Batch, BatchShape, DeviceReport, GROUPS, Group, KvFormat, KvPlan, MemoryUse, Ops, Outcome,
    SteerSet, TailRows, TapPoint, TapSet,
};

use crate::error::{Error, Result};
use crate::profile::{Profile, Profiler};

/// Owns the device and the pools; knows nothing of sequences.
#[derive(Debug)]
pub struct Runner {
    model: Model,
    backend: Box<dyn Backend>,
    plan: KvPlan,
    /// By index: whether the device holds a steering set there.
    steer_sets: Vec<bool>,
    profiler: Option<Profiler>,
    /// What a pass for captures alone left, until the pass that it was made for is collected.
    captured: Option<Outcome>,
}

impl Runner {
    /// Takes over a model that was built on `backend`, with pools for one sequence of `context` positions.
    ///
    /// # Errors
    /// The backend cannot hold the pools.
    pub fn new(
        model: Model,
        mut backend: Box<dyn Backend>,
        kv: [KvFormat; GROUPS],
        context: usize,
    ) -> Result<Runner> {
        if context == 0 {
            return Err(Error::Zero { what: "context" });
        }
        check_context("context", context)?;
        let plan = kv_plan(&model.config, kv, 1, context, model.limits.rows);
        check_size(&plan)?;
        backend.kv(&plan)?;
        Ok(Runner { model, backend, plan, steer_sets: Vec::new(), profiler: None, captured: None })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// How keys and values are laid out.
    pub fn plan(&self) -> &KvPlan {
        &self.plan
    }

    /// Bytes that the device holds.
    pub fn memory(&self) -> MemoryUse {
        self.backend.memory()
    }

    /// Does what the device has put off until a pass needs it ([`Backend::settle`]).
    ///
    /// # Errors
    /// `Device`.
    pub fn settle(&mut self) -> Result<()> {
        Ok(self.backend.settle()?)
    }

    /// What the device is and which kernels it chose.
    pub fn report(&self) -> DeviceReport {
        self.backend.report()
    }

    /// Resizes the pools to `pages` by group, page 0 included; pages that both sizes have keep their contents.
    ///
    /// # Errors
    /// `TooLarge`; the backend cannot hold the pools, and then they are what they were.
    pub fn resize(&mut self, pages: [usize; GROUPS]) -> Result<()> {
        let mut plan = self.plan.clone();
        for (group, pages) in plan.groups.iter_mut().zip(pages) {
            group.pages = pages;
        }
        check_size(&plan)?;
        self.backend.kv(&plan)?;
        self.plan = plan;
        Ok(())
    }

    /// Gives the device steering set `index`, which rows of later batches may name, in place of the one that was
    /// there; `None` takes that one back.
    ///
    /// # Errors
    /// `Steering` for a set that does not fit the model, `Backend` for a device that cannot steer. What was there
    /// before is still there then.
    pub fn steer_set(&mut self, index: usize, set: Option<&SteerSet>) -> Result<()> {
        let limit = i32::MAX as usize;
        if index > limit {
            return Err(Error::TooLarge { what: "index of a steering set", found: index, limit });
        }
        let Some(set) = set else {
            // Whatever the device says, no batch names the set again.
            return match self.steer_sets.get_mut(index).map(std::mem::take) {
                Some(true) => Ok(self.backend.steer_set(index, None)?),
                Some(false) | None => Ok(()),
            };
        };
        set.check(self.model.layers.len(), self.model.config.hidden)?;
        self.backend.steer_set(index, Some(set))?;
        if index >= self.steer_sets.len() {
            self.steer_sets.resize(index + 1, false);
        }
        self.steer_sets[index] = true;
        Ok(())
    }

    /// Whether the device holds steering set `index`.
    pub fn holds_steer_set(&self, index: usize) -> bool {
        self.steer_sets.get(index).copied().unwrap_or(false)
    }

    /// For which rows the last layers run so that `taps` can be copied out.
    pub(crate) fn tail(&self, taps: &TapSet) -> TailRows {
        match taps.points.iter().any(|point| reaches_tail(*point, self.model.last_writer)) {
            true => TailRows::All,
            false => TailRows::Heads,
        }
    }

    /// Runs the model's pass over `batch`.
    ///
    /// # Errors
    /// `Backend` with what is wrong with the batch; nothing has run then.
    pub fn run(&mut self, batch: &Batch, shape: &BatchShape) -> Result<Outcome> {
        self.start(batch, shape)?;
        self.collect()
    }

    /// Runs any other straight-line program over the model's handles.
    pub(crate) fn run_program(
        &mut self,
        batch: &Batch,
        shape: &BatchShape,
        program: &(dyn Fn(&mut dyn Ops, &Model, &BatchShape) + Sync),
    ) -> Result<Outcome> {
        self.launch(batch, shape, program)?;
        self.collect()
    }

    /// Whether rows of a batch may [follow](Batch::follows) the pass before, which then need not be collected before the
    /// next is started: at most two are under way. Not while a profile is on, whose clocks are read between passes.
    pub fn follows(&self) -> bool {
        self.backend.follows() && self.profiler.is_none()
    }

    /// Whether the device can [draw](Batch::draws) the model's tokens.
    pub fn draws(&self) -> bool {
        self.backend.draws(self.model.config.vocab)
    }

    /// Starts the model's pass over `batch`; [`Runner::collect`] waits for the oldest that was started. Where the device
    /// works on its own, the caller has the time in between.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn start(&mut self, batch: &Batch, shape: &BatchShape) -> Result<()> {
        self.captured = None;
        if !self.captures_apart(shape) {
            return self.launch(batch, shape, &|s, m, shape| forward(s, m, shape));
        }
        let last_writer = self.model.last_writer;
        let mut own = batch.clone();
        own.heads.clear();
        own.draws.clear();
        own.taps.points.retain(|&point| reaches_tail(point, last_writer));
        let own_shape = BatchShape { head_rows: 0, drawn: false, ..shape.clone() };
        let captured = self.aside(|runner| {
            runner.launch(&own, &own_shape, &|s, m, shape| forward(s, m, shape))?;
            runner.collect()
        })?;
        let mut rest = batch.clone();
        rest.taps.points.retain(|&point| !reaches_tail(point, last_writer));
        let has_taps = !rest.taps.points.is_empty();
        let rest_shape = BatchShape { tail: TailRows::Heads, has_taps, ..shape.clone() };
        self.launch(&rest, &rest_shape, &|s, m, shape| forward(s, m, shape))?;
        self.captured = Some(captured);
        Ok(())
    }

    /// Whether the layers behind the last key and value write run twice: for all rows in a pass of its own, which captures
    /// are taken from, and for the rows whose logits are wanted as if nothing were captured. Where a row's bits depend on how
    /// many run beside it, a capture would otherwise change the logits. Keys and values get the same bits both times.
    fn captures_apart(&self, shape: &BatchShape) -> bool {
        let some_end_early = (1..shape.rows).contains(&shape.head_rows);
        shape.tail == TailRows::All && shape.has_taps && some_end_early && self.backend.rows_change_bits()
    }

    /// Waits for the pass that was started.
    ///
    /// # Errors
    /// What went wrong in it.
    pub fn collect(&mut self) -> Result<Outcome> {
        let mut outcome = self.backend.collect()?;
        if let Some(profiler) = &mut self.profiler {
            profiler.end(outcome.timing.as_ref());
        }
        if let Some(captured) = self.captured.take() {
            outcome.taps.extend(captured.taps);
            outcome.weight_bytes += captured.weight_bytes;
            outcome.projections.fill_from(&captured.projections);
        }
        Ok(outcome)
    }

    /// Notes from here on where the time of each step goes; with `keep_spans` each pass in detail, which a Chrome trace
    /// is drawn from.
    ///
    /// # Errors
    /// `Backend` for a device that cannot tell.
    pub fn start_profile(&mut self, keep_spans: bool) -> Result<()> {
        self.backend.timings(true)?;
        self.profiler = Some(Profiler::new(keep_spans));
        Ok(())
    }

    /// Runs passes that are no steps of anybody's: the profile doesn't count them, and their time falls between two steps.
    pub(crate) fn aside<T>(&mut self, passes: impl FnOnce(&mut Runner) -> T) -> T {
        let profiler = self.profiler.take();
        let result = passes(self);
        self.profiler = profiler;
        result
    }

    /// Ends the profile; `None` where none was on.
    pub fn take_profile(&mut self) -> Option<Profile> {
        let profile = self.profiler.take().map(Profiler::finish);
        // What the device goes on noting nobody reads, should it refuse.
        let _ = self.backend.timings(false);
        profile
    }

    fn launch(
        &mut self,
        batch: &Batch,
        shape: &BatchShape,
        program: &(dyn Fn(&mut dyn Ops, &Model, &BatchShape) + Sync),
    ) -> Result<()> {
        let start = Instant::now();
        let c = &self.model.config;
        let limits = self.model.limits;
        if shape.rows > limits.rows {
            return Err(Error::TooManyRows { rows: shape.rows, limit: limits.rows });
        }
        if shape.head_rows > limits.head_rows {
            return Err(Error::TooManyRows { rows: shape.head_rows, limit: limits.head_rows });
        }
        let per_layer_vocab = c.per_layer.map_or(c.vocab, |p| p.vocab);
        batch.check(&self.plan, c.hidden, c.vocab, per_layer_vocab).map_err(lapidary_ops::Error::Batch)?;
        batch.check_steer(&|set| self.holds_steer_set(set)).map_err(lapidary_ops::Error::Batch)?;
        for (asked, able, what) in [
            (!batch.follows.is_empty(), self.follows(), "take a row's token from the pass before"),
            (!batch.draws.is_empty(), self.draws(), "draw tokens"),
        ] {
            if asked && !able {
                let device = self.backend.report().backend.to_owned();
                return Err(lapidary_ops::Error::Unsupported { device, what: what.to_owned() }.into());
            }
        }
        let model = &self.model;
        self.backend.upload(batch)?;
        if let Some(profiler) = &mut self.profiler {
            profiler.begin(batch, start);
        }
        self.backend.run(shape, &|s| program(s, model, shape))?;
        Ok(())
    }

    /// Lends the logits of some of the last pass's head rows, without copying them where the device's memory is at
    /// hand.
    ///
    /// # Errors
    /// `Backend` for a row that the buffer does not have; nothing was lent then.
    pub fn lend_logits(&mut self, rows: &[usize], to: &mut dyn FnMut(&[&[f32]])) -> Result<()> {
        let logits = self.model.acts.logits;
        Ok(self.backend.lend_rows(logits, rows, to)?)
    }

    /// Appends the bytes of one page of a group, as the device stores them.
    ///
    /// # Errors
    /// `Backend` where the device cannot hand pages out.
    pub fn page_read(&mut self, group: Group, page: usize, out: &mut Vec<u8>) -> Result<()> {
        Ok(self.backend.page_read(group, page, out)?)
    }

    /// Puts back what [`Runner::page_read`] gave, into any page of the group.
    ///
    /// # Errors
    /// `Backend`; nothing has changed then.
    pub fn page_write(&mut self, group: Group, page: usize, bytes: &[u8]) -> Result<()> {
        Ok(self.backend.page_write(group, page, bytes)?)
    }

    pub(crate) fn backend(&mut self) -> &mut dyn Backend {
        self.backend.as_mut()
    }
}

/// Positions are 32 bits wide in a batch, and one past the last is named too.
pub(crate) fn check_context(what: &'static str, context: usize) -> Result<()> {
    let limit = i32::MAX as usize - 1;
    match context > limit {
        true => Err(Error::TooLarge { what, found: context, limit }),
        false => Ok(()),
    }
}

/// Page numbers are 32 bits wide, and a pool's size must be one that a device can be asked for.
fn check_size(plan: &KvPlan) -> Result<()> {
    for group in &plan.groups {
        let limit = i32::MAX as usize;
        if group.pages > limit {
            return Err(Error::TooLarge { what: "number of pages", found: group.pages, limit });
        }
        let mut bytes = 0usize;
        for layer in 0..group.layers.len() {
            let pool = group.page_bytes(layer).checked_mul(group.pages);
            bytes = pool.and_then(|p| p.checked_add(bytes)).unwrap_or(usize::MAX);
            // Backends that hold float32 in place of a format need up to four times as much.
            let limit = isize::MAX as usize / 4;
            if bytes > limit {
                return Err(Error::TooLarge { what: "bytes of keys and values", found: bytes, limit });
            }
        }
    }
    Ok(())
}

/// Whether a capture needs rows that end after layer `last_writer`'s KV write.
fn reaches_tail(point: TapPoint, last_writer: usize) -> bool {
    match point {
        TapPoint::Embed | TapPoint::PerLayer | TapPoint::FinalNorm => false,
        TapPoint::Qkv(layer) => layer > last_writer,
        TapPoint::Attn(l) | TapPoint::Routes(l) | TapPoint::Mlp(l) | TapPoint::LayerOut(l) => {
            l >= last_writer
        }
    }
}
