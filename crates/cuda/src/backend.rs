//! The backend: what it owns, and how a pass runs.

use std::sync::Arc;
use std::time::Duration;

use lapidary_formats::{Format, TensorView};
use lapidary_ops::{
    Act, ActKind, ActRows, ActSpec, Backend, Batch, BatchShape, DeviceReport, Error, Gain, Group,
    KernelReport, KvPlan, KvRef, Mat, MemoryUse, Ops, Outcome, PassTiming, Phase, Result, SteerSet,
};

use crate::buffers::Buffer;
use crate::driver::{
    Arena, Context, DevPtr, Event, Graph, Kernels, Pinned, Staging, Stream, built_architectures,
};
use crate::fast::{self, Tiles};
use crate::flight::{Flight, Pending};
use crate::graphs::{Graphs, Left, Plan};
use crate::hooks::Hooks;
use crate::kernels::draw;
use crate::kernels::heads::{self, Cell};
use crate::kernels::step::Follow;
use crate::kv::KvPools;
use crate::launch::Queue;
use crate::matrix::{Matrix, Store, Tied};
use crate::ops::{CudaOps, Mode};
use crate::upload::Upload;
use crate::workspace::Workspace;

/// How a pass computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compute {
    /// True float32: weights decoded exactly, float32 activations and sums.
    #[default]
    F32,
    /// Inputs of products in bf16, float32 sums and residual.
    Fast,
}

/// What a [`CudaBackend`] is made of.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaOptions {
    /// Which of the driver's devices.
    pub ordinal: usize,
    /// Arithmetic mode.
    pub compute: Compute,
    /// Puts random values of this format in the place of every matrix, so that speed can be measured without a
    /// checkpoint.
    pub random_weights: Option<Format>,
    /// Whether every pass runs as it is, none is recorded: for comparisons.
    pub eager: bool,
    /// Keeps tables of which only single rows are read in the host's memory, where the device fetches the rows.
    pub tables_on_host: bool,
}

/// Weights and activations are taken from the device in pieces of this size.
const ARENA_BLOCK: usize = 64 << 20;

/// A GPU as a device.
///
/// Fields are dropped in order, the memory that queued work may use after [`Drop`] has waited for it.
pub struct CudaBackend {
    pub(crate) options: CudaOptions,
    /// Whether matrices are packed for the fast kernels.
    packs: bool,
    tiles: Option<Tiles>,
    /// Whether marks note the time.
    pub(crate) timings: bool,
    graphs: Graphs,
    pub(crate) stream: Arc<Stream>,
    pub(crate) kernels: Kernels,
    pub(crate) mats: Vec<Matrix>,
    /// By handle: place and length.
    pub(crate) gains: Vec<(DevPtr, usize)>,
    /// The largest size of any value of each.
    pub(crate) most_gain: Vec<f32>,
    pub(crate) acts: Vec<Buffer>,
    pub(crate) kv: KvPools,
    pub(crate) upload: Upload,
    pub(crate) workspace: Workspace,
    pub(crate) hooks: Hooks,
    staging: Staging,
    weights: Arena,
    host_tables: Vec<Pinned>,
    activations: Arena,
    uploaded: bool,
    /// Counts what was allocated since the start; a recording from before the last of it is stale.
    moves: usize,
    /// Where rows that are lent arrive.
    lent: Option<Pinned>,
    /// Runs that were queued and not collected.
    pub(crate) flight: Flight,
    pub(crate) context: Arc<Context>,
}

impl CudaBackend {
    /// Opens the device.
    ///
    /// # Errors
    /// `Unsupported` where there is no driver, no such device, or none that this build has kernels for.
    pub fn new(options: CudaOptions) -> Result<CudaBackend> {
        let context = Context::new(options.ordinal)
            .map_err(|e| Error::Unsupported { device: "cuda".into(), what: e.to_string() })?;
        // The fast kernels are Hopper's, and in the build only where it was compiled for that; elsewhere the fast mode is
        // bf16 inputs on the general ones.
        let hopper = context.info.arch == 90 && built_architectures().contains(&"90a");
        let packs = options.compute == Compute::Fast && hopper;
        let stream = Arc::new(Stream::new(&context)?);
        Ok(CudaBackend {
            options,
            packs,
            tiles: options.random_weights.map(Tiles::new),
            timings: false,
            graphs: Graphs::default(),
            staging: Staging::new(&context, &stream),
            stream,
            kernels: Kernels::new(&context),
            mats: Vec::new(),
            gains: Vec::new(),
            most_gain: Vec::new(),
            acts: Vec::new(),
            kv: KvPools::empty(packs),
            upload: Upload::default(),
            workspace: Workspace::new(&context),
            hooks: Hooks::default(),
            weights: Arena::new(&context, "weights", ARENA_BLOCK),
            host_tables: Vec::new(),
            activations: Arena::new(&context, "activations", ARENA_BLOCK),
            uploaded: false,
            moves: 0,
            lent: None,
            flight: Flight::default(),
            context,
        })
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Where launches go.
    pub(crate) fn queue(&self) -> Queue<'_> {
        Queue { stream: &self.stream, kernels: &self.kernels }
    }

    /// Rows that every buffer with rows of kind `rows` has.
    fn row_limit(&self, rows: ActRows) -> usize {
        let of_kind = self.acts.iter().filter(|a| a.spec.rows == rows);
        of_kind.map(|a| a.spec.max_rows).min().unwrap_or(usize::MAX)
    }

    fn pack_matrix(&mut self, parts: &[TensorView<'_>], group_rows: usize, tied: Tied) -> Result<Mat> {
        self.context.bind()?;
        let rows: usize = parts.iter().map(|p| p.rows).sum();
        if let Some(first) = parts.first()
            && (group_rows == 0 || !rows.is_multiple_of(group_rows))
        {
            let reason = format!("{rows} rows are not a whole number of groups of {group_rows}");
            return Err(Error::Tensor { tensor: first.name.clone(), reason });
        }
        let mut store = Store { arena: &mut self.weights, staging: &mut self.staging, host: None };
        let fast = self.packs.then_some(&mut self.tiles);
        let matrix = Matrix::new(&mut store, parts, group_rows, tied, fast)?;
        self.keep(matrix)
    }

    fn keep(&mut self, matrix: Matrix) -> Result<Mat> {
        let handle = Mat(u32::try_from(self.mats.len()).map_err(|_| too_many("matrices"))?);
        self.mats.push(matrix);
        self.moves += 1;
        Ok(handle)
    }

    /// How often anything that recordings point to has moved.
    fn moved(&self) -> usize {
        self.moves + self.upload.moves + self.workspace.moves + self.hooks.moves + self.flight.moves
    }

    /// Recorded passes that are kept.
    pub fn recordings(&self) -> usize {
        self.graphs.len()
    }

    /// Queues a pass verb by verb.
    fn run_once(&mut self, shape: &BatchShape, program: &(dyn Fn(&mut dyn Ops) + Sync)) -> Result<Pending> {
        let packs = self.packs;
        let mut ops = CudaOps::new(self, shape.rows, Mode::Run);
        if packs {
            fast::run(&mut ops, program)
        } else {
            program(&mut ops)
        }
        let pending = ops.finish()?;
        self.graphs.ran(shape, self.moved());
        Ok(pending)
    }

    /// Records a pass of a shape that ran before.
    fn record(&mut self, shape: &BatchShape, program: &(dyn Fn(&mut dyn Ops) + Sync)) -> Result<()> {
        let stream = self.stream.clone();
        let (mut left, mut failed) = (Left::default(), None);
        let packs = self.packs;
        let graph = Graph::record(&stream, || {
            let mut ops = CudaOps::new(self, shape.rows, Mode::Record);
            if packs {
                fast::run(&mut ops, program)
            } else {
                program(&mut ops)
            }
            match ops.finish() {
                Ok(pending) => left = pending.left,
                Err(e) => failed = Some(e),
            }
            Ok(())
        });
        if let Some(e) = failed {
            return Err(e);
        }
        self.graphs.keep(shape, graph?, left);
        Ok(())
    }

    /// Queues the recording of a pass over the uploaded batch.
    fn repeat(&mut self, shape: &BatchShape) -> Result<Pending> {
        let gone = || Error::Device("a recorded pass is gone".into());
        let recorded = self.graphs.get(shape).ok_or_else(gone)?;
        for (column, below) in recorded.left.below.into_iter().enumerate() {
            self.upload.check_ids(column, below.unwrap_or(i32::MAX))?;
        }
        // SAFETY: nothing that the recording points to has moved since, and the backend waits before it frees any.
        unsafe { recorded.graph.launch(&self.stream)? };
        let Left { tokens, told, below, weight_bytes, ref taps, .. } = recorded.left;
        let left = Left { tokens, told, below, weight_bytes, taps: taps.clone(), ..Left::default() };
        Ok(Pending { left, repeated: Some(shape.clone()) })
    }

    /// What rows of `batch` take that follow the pass before.
    fn follow(&self, batch: &Batch) -> Result<Follow> {
        let (count, below) = self.flight.chosen();
        batch.check_follows(count)?;
        // Copies and projections have one place each.
        let hooked = !batch.taps.points.is_empty() || batch.steer.iter().any(|&set| set >= 0);
        match self.flight.has_room() && Backend::follows(self) && !hooked {
            true => Ok(Follow { chosen: self.workspace.tokens(), below }),
            false => Err(Error::Device(
                "a pass behind two others, or behind one while phases are timed, rows tapped or steered"
                    .into(),
            )),
        }
    }

    /// A float32 activation of at least `rows` rows.
    fn float_buffer(&self, act: Act, rows: usize) -> Result<&Buffer> {
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

    /// Waits for queued work, so that memory it uses may be changed.
    fn settle(&mut self) -> Result<()> {
        self.context.bind()?;
        Ok(self.stream.wait()?)
    }
}

impl std::fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaBackend")
            .field("device", &self.context.info)
            .field("options", &self.options)
            .field("matrices", &self.mats.len())
            .finish_non_exhaustive()
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // A failure here was, or would have been, reported by the call that collects.
        let _ = self.settle();
    }
}

impl Backend for CudaBackend {
    fn report(&self) -> DeviceReport {
        let info = &self.context.info;
        let kernels = Format::ALL.map(|format| match self.packs {
            true => KernelReport {
                format,
                kernel: match (crate::pack::Form::is_exact(format), form_of(format).name()) {
                    (true, name) => format!("bf16 x {name} on tensor cores"),
                    (false, name) => format!("bf16 x {name} on tensor cores, weights rounded to bf16"),
                },
                fallback: false,
            },
            false => KernelReport {
                format,
                kernel: "decoded to f32, f32 sums".into(),
                fallback: self.options.compute == Compute::Fast,
            },
        });
        DeviceReport {
            backend: "cuda",
            device: info.name.clone(),
            level: format!("sm_{}", info.arch),
            units: info.multiprocessors as usize,
            mode: match self.options.compute {
                Compute::F32 => "f32",
                Compute::Fast => "fast",
            },
            kernels: kernels.to_vec(),
        }
    }

    fn pack(&mut self, parts: &[TensorView<'_>], group_rows: usize) -> Result<Mat> {
        self.pack_matrix(parts, group_rows, Tied::No)
    }

    fn pack_tied(&mut self, part: &TensorView<'_>) -> Result<Mat> {
        self.pack_matrix(std::slice::from_ref(part), part.rows, Tied::Yes)
    }

    fn pack_rows(&mut self, part: &TensorView<'_>) -> Result<Mat> {
        self.context.bind()?;
        let host = self.options.tables_on_host.then_some((&self.context, &mut self.host_tables));
        let mut store = Store { arena: &mut self.weights, staging: &mut self.staging, host };
        let matrix = Matrix::table(&mut store, part, &mut self.tiles)?;
        self.keep(matrix)
    }

    fn vector(&mut self, name: &str, values: &[f32]) -> Result<Gain> {
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            let reason = format!("value {i} is {}, not finite", values[i]);
            return Err(Error::Tensor { tensor: name.to_string(), reason });
        }
        self.context.bind()?;
        let handle = Gain(u32::try_from(self.gains.len()).map_err(|_| too_many("vectors"))?);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let ptr = self.weights.take(bytes.len())?;
        // SAFETY: as many bytes were just taken.
        unsafe { self.staging.copy(ptr, &bytes)? };
        self.gains.push((ptr, values.len()));
        self.most_gain.push(values.iter().fold(0.0, |most, v| v.abs().max(most)));
        Ok(handle)
    }

    fn activation(&mut self, spec: ActSpec) -> Result<Act> {
        self.context.bind()?;
        let handle = Act(u16::try_from(self.acts.len()).map_err(|_| too_many("activations"))?);
        let half = self.options.compute == Compute::Fast;
        self.acts.push(Buffer::new(&mut self.activations, &self.stream, spec, half)?);
        Ok(handle)
    }

    fn kv(&mut self, plan: &KvPlan) -> Result<()> {
        self.settle()?;
        // Weights come before the pools.
        self.staging.release()?;
        self.moves += 1;
        self.kv.resize(&self.context, &self.stream, plan)
    }

    fn steer_set(&mut self, index: usize, set: Option<&SteerSet>) -> Result<()> {
        self.settle()?;
        self.hooks.set(&self.context, &self.stream, index, set)
    }

    fn timings(&mut self, on: bool) -> Result<()> {
        if self.timings != on {
            self.settle()?;
            self.timings = on;
            // Recordings have their marks inside.
            self.moves += 1;
        }
        Ok(())
    }

    fn follows(&self) -> bool {
        // Marks of a recorded pass are read before it runs again.
        !self.timings
    }

    fn draws(&self, vocab: usize) -> bool {
        vocab <= draw::MOST_LOGITS
    }

    fn rows_change_bits(&self) -> bool {
        // Kernels for few rows add up in another order than those for many.
        self.packs
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
        let follow = match batch.follows.is_empty() {
            true => {
                self.settle()?;
                None
            }
            false => Some(self.follow(batch)?),
        };
        let queue = Queue { stream: &self.stream, kernels: &self.kernels };
        let turn = (self.flight.turn(), follow);
        self.upload.take(&self.context, queue, batch, &self.kv.plan, turn)?;
        self.hooks.prepare(&self.context, batch)?;
        self.uploaded = true;
        Ok(())
    }

    fn run(&mut self, shape: &BatchShape, program: &(dyn Fn(&mut dyn Ops) + Sync)) -> Result<()> {
        let batch = &self.upload.batch;
        let drawn = batch.draws.iter().any(Option::is_some);
        let own = (batch.tokens.len(), batch.heads.len(), drawn);
        if !self.uploaded || (shape.rows, shape.head_rows, shape.drawn) != own {
            return Err(Error::Device("the pass to run is not of the shape of the uploaded batch".into()));
        }
        self.context.bind()?;
        if self.upload.batch.follows.is_empty() {
            self.flight.clear();
        }
        let plan = if self.options.eager {
            Plan::Run
        } else {
            self.graphs.plan(shape, &self.upload.batch.taps, self.moved())
        };
        let done = match plan {
            Plan::Run => self.run_once(shape, program),
            Plan::Record => self.record(shape, program).and_then(|()| self.repeat(shape)),
            Plan::Repeat => self.repeat(shape),
        };
        let pending = match done {
            Ok(pending) => pending,
            Err(e) => {
                // What was queued before the failure still uses the buffers.
                let _ = self.settle();
                self.flight.lost();
                return Err(e);
            }
        };
        // One upload is for one run.
        self.uploaded = self.upload.batch.follows.is_empty();
        self.flight.begun(&self.context, &self.stream, pending, self.workspace.tokens())
    }

    fn collect(&mut self) -> Result<Outcome> {
        self.context.bind()?;
        let (pending, argmax) = self.flight.land()?;
        let recorded = pending.repeated.as_ref().and_then(|shape| self.graphs.get(shape));
        let timing = match self.timings {
            true => Some(pass_timing(&recorded.map_or(&pending.left, |r| &r.left).marks)?),
            false => None,
        };
        let weight_bytes = pending.left.weight_bytes;
        let taps = self.hooks.taken(&pending.left.taps);
        let projections = self.hooks.projections(&self.upload.batch);
        Ok(Outcome { argmax, taps, projections, weight_bytes, timing })
    }

    fn read(&mut self, act: Act, rows: usize, out: &mut Vec<f32>) -> Result<()> {
        let buffer = self.float_buffer(act, rows)?;
        self.context.bind()?;
        *out = buffer.read(&self.stream, rows)?;
        Ok(())
    }

    fn lend_rows(&mut self, act: Act, rows: &[usize], to: &mut dyn FnMut(&[&[f32]])) -> Result<()> {
        let buffer = self.float_buffer(act, rows.iter().max().map_or(0, |last| last + 1))?;
        self.context.bind()?;
        let (stride, bytes) = (buffer.stride_bytes(), buffer.width() * 4);
        let ptr = buffer.rows.ptr;
        if self.lent.as_ref().is_none_or(|p| p.bytes().len() < bytes * rows.len()) {
            self.lent = Some(Pinned::new(&self.context, bytes * rows.len())?);
        }
        let lent = self.lent.as_mut().expect("made above");
        for (out, row) in lent.bytes_mut().chunks_exact_mut(bytes).zip(rows) {
            // SAFETY: the row is in the buffer; the wait comes before the bytes are read.
            unsafe { self.stream.download(out, ptr.at(row * stride))? };
        }
        self.stream.wait()?;
        let floats = lent.floats();
        let all: Vec<&[f32]> = floats.chunks_exact(bytes / 4).take(rows.len()).collect();
        to(&all);
        Ok(())
    }

    fn kv_store(&mut self, cache: KvRef, page: usize, in_page: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.kv.check_cell(cache, page, in_page, k.len(), v.len())?;
        self.context.bind()?;
        let bytes: Vec<u8> = k.iter().chain(v).flat_map(|x| x.to_le_bytes()).collect();
        let values = self.workspace.cell(&self.stream, bytes.len())?;
        // SAFETY: the cell and its values were checked; the memory is not pinned, so it is read by now.
        unsafe {
            self.stream.upload(values, &bytes)?;
            heads::cell_store(self.queue(), self.kv.pool(cache), values, Cell { page, in_page })?;
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
        self.kv.check_cell(cache, page, in_page, k.len(), v.len())?;
        self.context.bind()?;
        let mut bytes = vec![0; (k.len() + v.len()) * 4];
        let values = self.workspace.cell(&self.stream, bytes.len())?;
        // SAFETY: the cell and its values were checked; the wait comes before the bytes are used.
        unsafe {
            heads::cell_load(self.queue(), self.kv.pool(cache), values, Cell { page, in_page })?;
            self.stream.download(&mut bytes, values)?;
        }
        self.settle()?;
        for (x, b) in k.iter_mut().chain(v).zip(bytes.as_chunks::<4>().0) {
            *x = f32::from_le_bytes(*b);
        }
        Ok(())
    }

    fn page_read(&mut self, group: Group, page: usize, out: &mut Vec<u8>) -> Result<()> {
        let places = self.kv.page(group, page)?;
        self.context.bind()?;
        for (place, len) in places {
            let start = out.len();
            out.resize(start + len, 0);
            // SAFETY: the page is in the pool; the wait comes before the bytes are used.
            unsafe { self.stream.download(&mut out[start..], place)? };
            self.stream.wait()?;
        }
        Ok(())
    }

    fn page_write(&mut self, group: Group, page: usize, bytes: &[u8]) -> Result<()> {
        let places = self.kv.page(group, page)?;
        let needed: usize = places.iter().map(|p| p.1).sum();
        if bytes.len() != needed {
            return Err(Error::Device(format!("{} bytes for a page of {needed}", bytes.len())));
        }
        self.settle()?;
        let mut rest = bytes;
        for (place, len) in places {
            let (own, after) = rest.split_at(len);
            // SAFETY: the page is in the pool; the memory is not pinned, so it is read when this returns.
            unsafe { self.stream.upload(place, own)? };
            rest = after;
        }
        Ok(())
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse {
            weights: self.weights.bytes(),
            mapped: 0,
            host: self.host_tables.iter().map(|t| t.bytes().len()).sum(),
            activations: self.activations.bytes()
                + self.workspace.bytes()
                + self.upload.bytes()
                + self.hooks.bytes(),
            kv: self.kv.bytes(),
        }
    }
}

/// The times of marks from the first one on; the last ends the pass.
fn pass_timing(marks: &[(Option<Phase>, Event)]) -> Result<PassTiming> {
    let (Some((_, first)), Some((_, last))) = (marks.first(), marks.last()) else {
        return Ok(PassTiming::default());
    };
    let since = |event: &Event| -> Result<Duration> {
        Ok(Duration::from_secs_f64(event.micros_since(first)?.max(0.0) / 1e6))
    };
    let mut begun = Vec::with_capacity(marks.len());
    for (phase, event) in marks {
        if let Some(phase) = phase {
            begun.push((*phase, since(event)?));
        }
    }
    Ok(PassTiming::from_marks(&begun, since(last)?))
}

/// The form that a matrix of `format` is packed into, whatever its scales.
fn form_of(format: Format) -> crate::pack::Form {
    let scales = lapidary_formats::Scales::None;
    let view = TensorView { name: String::new(), rows: 0, cols: 0, format, bytes: &[], scales };
    crate::pack::Form::of(&view)
}

fn too_many(what: &str) -> Error {
    Error::Device(format!("too many {what} for their handles"))
}
