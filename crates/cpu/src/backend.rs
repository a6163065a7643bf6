//! The backend: what it owns, and how a pass runs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lapidary_formats::{Format, TensorView};
use lapidary_ops::{
    Act, ActKind, ActRows, ActSpec, Backend, Batch, BatchShape, DeviceReport, Error, FileMap, Gain, Group,
    KernelReport, KvPlan, KvRef, Mat, MemoryUse, Ops, Outcome, PAGE_TOKENS, PassTiming, Projections, Result,
    SteerSet,
};

use crate::ahead::Followers;
use crate::buffers::Buffer;
use crate::file_rows::Maps;
use crate::int8;
use crate::kv::{self, KvPools, Side};
use crate::late::Allowance;
use crate::level::{Isa, Level};
use crate::linear::X_BLOCK;
use crate::matrix::{Matrix, Packing};
use crate::memory::Slabs;
use crate::ops::CpuOps;
use crate::pass::{Pass, Scratch, Upload, Workspace};
use crate::team::Team;
use crate::topology::available_cores;

/// How products with weights are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compute {
    /// True float32: weights decoded exactly, float32 activations and sums.
    #[default]
    F32,
    /// Activations in int8 blocks, integer products.
    Fast,
}

/// What a [`CpuBackend`] is made of.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Workers; `None` for as many as [`available_cores`].
    pub threads: Option<usize>,
    /// Arithmetic mode.
    pub compute: Compute,
    /// Instruction set, for tests; `None` for the best that the processor has.
    pub level: Option<Level>,
    /// Matrices of experts that are packed, in the order in which they come; the ones after them stay in the file
    /// and their chosen experts are paged in. `None` for all.
    pub packed_experts: Option<usize>,
    /// Whether F32, F16, BF16 and FP8 weights stay in the file's pages, which the system can take back and read again. Otherwise
    /// they move to memory of their own after the first pass; experts, and models some of whose experts stay, never do.
    pub stay_in_file: bool,
}

/// The CPU as a device.
pub struct CpuBackend {
    isa: Isa,
    compute: Compute,
    /// Matrices of experts that are yet to be packed.
    experts_to_pack: usize,
    stay_in_file: bool,
    maps: Vec<FileMap>,
    slabs: Slabs,
    team: Team,
    allowance: Arc<Allowance>,
    /// What the first pass took.
    first_pass: Option<Duration>,
    /// Parts of matrices that may not be packed yet.
    late: usize,
    /// Matrices that may be in a file's pages and are to move, the last first.
    to_move: Vec<usize>,
    acts: Vec<Buffer>,
    mats: Vec<Matrix>,
    followers: Followers,
    gains: Vec<Vec<f32>>,
    kv: KvPools,
    upload: Upload,
    uploaded: bool,
    steer_sets: Vec<Option<SteerSet>>,
    timings: bool,
    workspace: Workspace,
    scratch: Vec<Mutex<Scratch>>,
    outcome: Option<Outcome>,
}

impl CpuBackend {
    /// Starts the team.
    ///
    /// # Errors
    /// `Unsupported` for a level that this processor lacks or a mode that is not there, `Device` where threads
    /// cannot be started or there are to be none.
    pub fn new(options: CpuOptions) -> Result<CpuBackend> {
        let unsupported = |what: String| Error::Unsupported { device: "cpu".into(), what };
        let isa = Isa::new(options.level).ok_or_else(|| {
            let wanted = options.level.map_or("", Level::name);
            unsupported(format!("level {wanted} on a processor whose best is {}", Level::detect()))
        })?;
        let isa = if options.compute == Compute::F32 { isa.exact() } else { isa };
        let workers = options.threads.unwrap_or_else(available_cores);
        if workers == 0 {
            return Err(Error::Device("a cpu team needs at least 1 thread".into()));
        }
        let team =
            Team::new(workers).map_err(|e| Error::Device(format!("starting {workers} threads: {e}")))?;
        Ok(CpuBackend {
            isa,
            compute: options.compute,
            experts_to_pack: options.packed_experts.unwrap_or(usize::MAX),
            stay_in_file: options.stay_in_file || options.packed_experts.is_some(),
            maps: Vec::new(),
            slabs: Slabs::default(),
            team,
            allowance: Arc::default(),
            first_pass: None,
            late: 0,
            to_move: Vec::new(),
            acts: Vec::new(),
            mats: Vec::new(),
            followers: Followers::default(),
            gains: Vec::new(),
            kv: KvPools::empty(),
            upload: Upload::default(),
            uploaded: false,
            steer_sets: Vec::new(),
            timings: false,
            workspace: Workspace::empty()?,
            scratch: (0..workers).map(|_| Mutex::default()).collect(),
            outcome: None,
        })
    }

    /// Workers of the team.
    pub fn threads(&self) -> usize {
        self.team.workers()
    }

    fn packing(&self) -> Packing<'_> {
        let int8 = self.compute == Compute::Fast;
        let (team, slabs, allowance) = (&self.team, &self.slabs, &self.allowance);
        Packing { isa: self.isa, int8, team, slabs, allowance, maps: Maps(&self.maps) }
    }

    fn keep(&mut self, matrix: Matrix) -> Result<Mat> {
        let handle = Mat(u32::try_from(self.mats.len()).map_err(|_| too_many("matrices"))?);
        self.late += matrix.late().count();
        if matrix.is_to_move() {
            self.to_move.push(self.mats.len());
        }
        self.mats.push(matrix);
        self.followers.push();
        Ok(handle)
    }

    /// Moves matrices out of the file's pages, for `time` or one matrix longer.
    fn move_in(&mut self, time: Duration) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < time
            && let Some(index) = self.to_move.pop()
        {
            self.mats[index].move_in(&self.team, &self.slabs)?;
        }
        Ok(())
    }

    /// Makes ordinary ones of matrices that passes have packed.
    fn settle_packed(&mut self) {
        if self.late > 0 {
            self.late = self.mats.iter_mut().map(Matrix::settle).sum();
        }
    }

    /// Rows that every buffer with rows of kind `rows` has.
    fn row_limit(&self, rows: ActRows) -> usize {
        let of_kind = self.acts.iter().filter(|a| a.spec.rows == rows);
        of_kind.map(|a| a.spec.max_rows).min().unwrap_or(usize::MAX)
    }
}

impl std::fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuBackend")
            .field("level", &self.isa.level())
            .field("compute", &self.compute)
            .field("threads", &self.threads())
            .field("matrices", &self.mats.len())
            .finish_non_exhaustive()
    }
}

impl Backend for CpuBackend {
    fn report(&self) -> DeviceReport {
        let level = self.isa.level();
        let fast = self.compute == Compute::Fast;
        let kernels = Format::ALL.map(|format| {
            let int8 = if fast { int8::kernel_name(self.isa, format) } else { None };
            let kernel = match (int8, format) {
                (Some(name), _) => format!("int8 x {format}, {name}"),
                (None, Format::Bf16 | Format::Fp8E4M3) if self.isa.bf16() => {
                    format!("bf16 x {format}, avx512-bf16")
                }
                (None, Format::F32) => format!("f32 x f32, {level}"),
                (None, _) => format!("decoded to f32, f32 x f32, {level}"),
            };
            KernelReport { format, kernel, fallback: level == Level::Scalar }
        });
        DeviceReport {
            backend: "cpu",
            device: processor_name(),
            level: level.name().to_string(),
            units: self.threads(),
            mode: if fast { "fast" } else { "f32" },
            kernels: kernels.to_vec(),
        }
    }

    fn hold(&mut self, maps: &[FileMap]) {
        self.maps.extend_from_slice(maps);
    }

    fn reads_later(&self, mat: Mat) -> bool {
        self.mats.get(mat.0 as usize).is_some_and(|m| m.late().next().is_some())
    }

    fn settle(&mut self) -> Result<()> {
        for late in self.mats.iter().flat_map(Matrix::late) {
            let next = AtomicUsize::new(0);
            self.team.run(&|_| {
                loop {
                    let group = next.fetch_add(1, Ordering::Relaxed);
                    if group >= late.groups() {
                        return;
                    }
                    late.pack_group(group);
                }
            })?;
        }
        self.settle_packed();
        self.move_in(Allowance::ALL)
    }

    fn pack(&mut self, parts: &[TensorView<'_>], group_rows: usize) -> Result<Mat> {
        let rows = parts.iter().fold(0usize, |sum, p| sum.saturating_add(p.rows));
        let experts = group_rows < rows;
        let matrix = if experts && self.experts_to_pack == 0 {
            Matrix::paged(self.packing(), parts)?
        } else {
            Matrix::new(self.packing(), parts)?
        };
        let matrix = if experts || self.stay_in_file { matrix.stay() } else { matrix };
        self.experts_to_pack = self.experts_to_pack.saturating_sub(usize::from(experts));
        if group_rows == 0 || !matrix.rows.is_multiple_of(group_rows) {
            let reason = format!("{} rows are not a whole number of groups of {group_rows}", matrix.rows);
            return Err(Error::Tensor { tensor: parts[0].name.clone(), reason });
        }
        self.keep(matrix)
    }

    fn pack_rows(&mut self, part: &TensorView<'_>) -> Result<Mat> {
        let matrix = Matrix::table(self.packing(), part)?;
        self.keep(matrix)
    }

    fn vector(&mut self, name: &str, values: &[f32]) -> Result<Gain> {
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            let reason = format!("value {i} is {}, not finite", values[i]);
            return Err(Error::Tensor { tensor: name.to_string(), reason });
        }
        let handle = Gain(u32::try_from(self.gains.len()).map_err(|_| too_many("vectors"))?);
        self.gains.push(values.to_vec());
        Ok(handle)
    }

    fn activation(&mut self, spec: ActSpec) -> Result<Act> {
        let handle = Act(u16::try_from(self.acts.len()).map_err(|_| too_many("activations"))?);
        self.acts.push(Buffer::new(spec, self.compute == Compute::Fast)?);
        Ok(handle)
    }

    fn kv(&mut self, plan: &KvPlan) -> Result<()> {
        self.kv.resize(plan)
    }

    fn steer_set(&mut self, index: usize, set: Option<&SteerSet>) -> Result<()> {
        if index >= self.steer_sets.len() {
            self.steer_sets.resize(index + 1, None);
        }
        self.steer_sets[index] = set.cloned();
        Ok(())
    }

    fn timings(&mut self, on: bool) -> Result<()> {
        self.timings = on;
        Ok(())
    }

    fn upload(&mut self, batch: &Batch) -> Result<()> {
        self.uploaded = false;
        for (what, rows, limit) in [
            ("batch row", batch.tokens.len(), self.row_limit(ActRows::Batch)),
            ("head row", batch.heads.len(), self.row_limit(ActRows::Heads)),
        ] {
            if rows > limit {
                return Err(Error::TooManyRows { what, rows, limit });
            }
        }
        batch.check_steer(&|set| self.steer_sets.get(set).is_some_and(Option::is_some))?;
        self.upload.take(batch, &self.kv.plan)?;
        self.uploaded = true;
        Ok(())
    }

    fn run(&mut self, shape: &BatchShape, program: &(dyn Fn(&mut dyn Ops) + Sync)) -> Result<()> {
        let batch = &self.upload.batch;
        if !self.uploaded || (shape.rows, shape.head_rows) != (batch.tokens.len(), batch.heads.len()) {
            return Err(Error::Device("the pass to run is not of the shape of the uploaded batch".into()));
        }
        self.outcome = None;
        self.settle_packed();
        let time = self.time_to_pack(shape);
        self.allowance.set(time);
        if self.first_pass.is_some() {
            self.move_in(time)?;
        }
        let begun = Instant::now();
        let sync = self.team.sync();
        let best = (0..self.team.workers()).map(|_| Mutex::default()).collect();
        let pass = Pass {
            isa: self.isa,
            sync,
            acts: &self.acts,
            mats: &self.mats,
            gains: &self.gains,
            followers: &self.followers,
            kv: &self.kv,
            upload: &self.upload,
            workspace: &self.workspace,
            // SAFETY: no pass runs yet.
            workspace_floats: unsafe { self.workspace.bytes() } / size_of::<f32>(),
            outcome: Mutex::default(),
            best,
            clock: self.timings.then(|| (Instant::now(), Mutex::default())),
            steer_sets: &self.steer_sets,
            projections: (0..self.team.workers()).map(|_| Mutex::default()).collect(),
        };
        let scratch = &self.scratch;
        self.team.run(&|worker| {
            let mut scratch = scratch[worker].lock().unwrap_or_else(PoisonError::into_inner);
            program(&mut CpuOps::new(&pass, worker, shape.rows, &mut scratch));
        })?;
        self.first_pass.get_or_insert_with(|| begun.elapsed());
        let device = pass.clock.as_ref().map(|(begun, _)| begun.elapsed());
        let mut outcome = pass.outcome.into_inner().unwrap_or_else(PoisonError::into_inner);
        if shape.steered {
            let noted =
                pass.projections.into_iter().map(|n| n.into_inner().unwrap_or_else(PoisonError::into_inner));
            outcome.projections = projections(&self.upload.batch.steer, &self.steer_sets, noted.flatten());
        }
        outcome.timing = pass.clock.zip(device).map(|((_, marks), device)| {
            PassTiming::from_marks(&marks.into_inner().unwrap_or_else(PoisonError::into_inner), device)
        });
        self.outcome = Some(outcome);
        Ok(())
    }

    fn collect(&mut self) -> Result<Outcome> {
        self.outcome.take().ok_or_else(|| Error::Device("there is no finished pass to collect".into()))
    }

    fn read(&mut self, act: Act, rows: usize, out: &mut Vec<f32>) -> Result<()> {
        let buffer = self.readable(act, rows)?;
        out.clear();
        for r in 0..rows {
            // SAFETY: no pass runs while the backend is borrowed here.
            out.extend_from_slice(unsafe { buffer.row(r) });
        }
        Ok(())
    }

    fn lend_rows(&mut self, act: Act, rows: &[usize], to: &mut dyn FnMut(&[&[f32]])) -> Result<()> {
        let buffer = self.readable(act, rows.iter().max().map_or(0, |last| last + 1))?;
        // SAFETY: no pass runs while the backend is borrowed here.
        let lent: Vec<&[f32]> = rows.iter().map(|&row| unsafe { buffer.row(row) }).collect();
        to(&lent);
        Ok(())
    }

    fn kv_store(&mut self, cache: KvRef, page: usize, in_page: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let d = self.check_cell(cache, page, in_page, k.len(), v.len())?;
        let (_, format) = self.kv.layer(cache);
        for (side, values) in [(Side::Keys, k), (Side::Values, v)] {
            for (head, values) in values.chunks_exact(d).enumerate() {
                // SAFETY: no pass runs while the backend is borrowed here.
                kv::encode(format, values, unsafe { self.kv.cell_mut(cache, page, side, head, in_page) });
            }
        }
        Ok(())
    }

    fn kv_load(
        &mut self,
        cache: KvRef,
        page: usize,
        in_page: usize,
        k: &mut [f32],
        v: &mut [f32],
    ) -> Result<()> {
        let d = self.check_cell(cache, page, in_page, k.len(), v.len())?;
        let (_, format) = self.kv.layer(cache);
        for (side, values) in [(Side::Keys, k), (Side::Values, v)] {
            for (head, values) in values.chunks_exact_mut(d).enumerate() {
                // SAFETY: no pass runs while the backend is borrowed here.
                kv::decode(format, unsafe { self.kv.cell_mut(cache, page, side, head, in_page) }, values);
            }
        }
        Ok(())
    }

    fn page_read(&mut self, group: Group, page: usize, out: &mut Vec<u8>) -> Result<()> {
        self.kv.read_page(group, page, out)
    }

    fn page_write(&mut self, group: Group, page: usize, bytes: &[u8]) -> Result<()> {
        self.kv.write_page(group, page, bytes)
    }

    fn memory(&self) -> MemoryUse {
        let lock = |s: &Mutex<Scratch>| s.lock().unwrap_or_else(PoisonError::into_inner).bytes();
        // SAFETY: no pass runs while the backend is borrowed here.
        let workspace = unsafe { self.workspace.bytes() };
        MemoryUse {
            weights: self.mats.iter().map(Matrix::bytes).sum::<usize>()
                + self.gains.iter().map(|g| g.len() * size_of::<f32>()).sum::<usize>(),
            mapped: self.mats.iter().map(Matrix::mapped).sum(),
            host: 0,
            activations: self.acts.iter().map(Buffer::bytes).sum::<usize>()
                + workspace
                + self.scratch.iter().map(lock).sum::<usize>(),
            kv: self.kv.bytes(),
        }
    }
}

impl CpuBackend {
    /// What a pass may spend on packing. One of many rows would have to pack for each [block](X_BLOCK) of them otherwise; one
    /// without logits ends an answer or is part of a prompt, and nobody gains by what it packs.
    fn time_to_pack(&self, shape: &BatchShape) -> Duration {
        match self.first_pass {
            _ if shape.rows > X_BLOCK => Allowance::ALL,
            Some(first) if shape.head_rows > 0 => first * self.team.workers() as u32,
            _ => Duration::ZERO,
        }
    }

    /// The float32 activation `act`, if it has `rows` rows.
    fn readable(&self, act: Act, rows: usize) -> Result<&Buffer> {
        let unknown = || Error::Device(format!("activation {} was never allocated", act.0));
        let buffer = self.acts.get(act.0 as usize).ok_or_else(unknown)?;
        if buffer.spec.kind != ActKind::F32 {
            return Err(Error::Device(format!("{} is not a float32 activation", buffer.spec.name)));
        }
        if rows > buffer.spec.max_rows {
            let limit = buffer.spec.max_rows;
            return Err(Error::TooManyRows { what: buffer.spec.name, rows, limit });
        }
        Ok(buffer)
    }

    /// Checks a cell's address and the lengths that go with it; returns the head width.
    fn check_cell(&self, cache: KvRef, page: usize, in_page: usize, k: usize, v: usize) -> Result<usize> {
        let group = &self.kv.plan.groups[cache.group.index()];
        let bad = |what: String| Err(Error::Device(what));
        let Some(shape) = group.layers.get(cache.index) else {
            return bad(format!("the {:?} group has no KV pool {}", cache.group, cache.index));
        };
        if page >= group.pages || in_page >= PAGE_TOKENS {
            return bad(format!(
                "position {in_page} of page {page} is outside a pool of {} pages",
                group.pages
            ));
        }
        let width = shape.kv_heads * shape.head_dim;
        if k != width || v != width {
            return bad(format!("{k} keys and {v} values, not {width} each"));
        }
        Ok(shape.head_dim)
    }
}

/// What the workers noted, by row and edit.
fn projections(
    steer: &[i32],
    sets: &[Option<SteerSet>],
    noted: impl Iterator<Item = (usize, usize, f32)>,
) -> Projections {
    let in_use = steer.iter().filter_map(|&set| sets.get(usize::try_from(set).ok()?)?.as_ref());
    let stride = in_use.map(|set| set.edits.len()).max().unwrap_or(0);
    let mut all = Projections::new(steer.len(), stride);
    for (row, edit, p) in noted {
        all.values[row * stride + edit] = p;
    }
    all
}

fn too_many(what: &str) -> Error {
    Error::Device(format!("too many {what} for their handles"))
}

/// The processor's own name where the system tells it.
fn processor_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|l| l.starts_with("model name"));
    line.and_then(|l| l.split_once(':')).map_or("cpu".to_string(), |(_, name)| name.trim().to_string())
}
