//! A device: dealing handles at load, running passes afterwards.

use std::fmt;

use lapidary_formats::{FileMap, Format, TensorView};

use crate::batch::{Batch, BatchError, BatchShape};
use crate::handles::{Act, ActSpec, Gain, Mat};
use crate::kv::{Group, KvPlan, KvRef};
use crate::ops::{Ops, TapPoint};
use crate::steer::{Projections, SteerSet};
use crate::timing::PassTiming;

/// What a backend can fail with.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    #[error("{what} needs {needed} bytes, the device has {available} left")]
    OutOfMemory { what: String, needed: usize, available: usize },
    #[error("{tensor}: {reason}")]
    Tensor { tensor: String, reason: String },
    #[error("{device} cannot do this: {what}")]
    Unsupported { device: String, what: String },
    #[error("bad batch: {0}")]
    Batch(#[from] BatchError),
    #[error("{rows} rows exceed the {what} limit of {limit} that the buffers were made for")]
    TooManyRows { what: &'static str, rows: usize, limit: usize },
    #[error("a worker panicked in this step: {message}")]
    WorkerPanicked { message: String },
    #[error("device error: {0}")]
    Device(String),
}

/// Result of a backend call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a pass left behind.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// For each head row the token with the largest logit, or the one that the device [drew](crate::Batch::draws), or -1
    /// when a logit was not finite. Empty when the pass had no head.
    pub argmax: Vec<i32>,
    /// What was copied out.
    pub taps: Vec<Tap>,
    /// What steered rows projected onto their directions; empty when no row was steered.
    pub projections: Projections,
    /// Bytes of weights that the pass read, for a backend that counts them; else 0.
    pub weight_bytes: u64,
    /// The pass's times, when [`Backend::timings`] asked for them.
    pub timing: Option<PassTiming>,
}

/// One copied activation, `[rows, width]` float32.
#[derive(Clone, Debug, PartialEq)]
pub struct Tap {
    /// Where it was taken.
    pub point: TapPoint,
    /// Rows.
    pub rows: usize,
    /// Values in a row.
    pub width: usize,
    /// The values, row after row.
    pub values: Vec<f32>,
}

/// Bytes that a backend holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Packed weights that the backend owns.
    pub weights: usize,
    /// Weights used in place from a memory map.
    pub mapped: usize,
    /// Weights in the host's memory, where a device with memory of its own reads them.
    pub host: usize,
    /// Activations and scratch.
    pub activations: usize,
    /// Keys and values.
    pub kv: usize,
}

/// What a backend runs on, for `check`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceReport {
    /// "cpu", "cuda", ...
    pub backend: &'static str,
    /// The device's own name.
    pub device: String,
    /// Instruction set or architecture that kernels were chosen for.
    pub level: String,
    /// Workers or multiprocessors.
    pub units: usize,
    /// Arithmetic mode.
    pub mode: &'static str,
    /// Kernel for each weight format.
    pub kernels: Vec<KernelReport>,
}

/// The kernel that multiplies with one weight format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelReport {
    /// Format in the checkpoint.
    pub format: Format,
    /// What is used for it.
    pub kernel: String,
    /// Whether it is a plain fallback and not written for this device.
    pub fallback: bool,
}

/// A device that can hold one model and run passes over it.
pub trait Backend: Send + fmt::Debug {
    /// What this is and which kernels it chose.
    fn report(&self) -> DeviceReport;

    /// Announces the files that later views point into. A backend that would rather read a matrix in place
    /// than copy it finds the map that holds the view's bytes and keeps it.
    fn hold(&mut self, _maps: &[FileMap]) {}

    /// Takes over a matrix made of `parts` stacked by rows (q + k + v; gate + up; all experts). Each run of
    /// `group_rows` rows may be used on its own (an expert), so packing must not mix rows of two runs; it is
    /// the whole height for an ordinary matrix.
    ///
    /// Parts may differ in format.
    ///
    /// # Errors
    /// `Tensor` for parts of unequal width or codes that the format's rules forbid, `OutOfMemory`.
    fn pack(&mut self, parts: &[TensorView<'_>], group_rows: usize) -> Result<Mat>;

    /// Takes over a matrix of which only single rows are ever read (an embedding table that is not the head).
    fn pack_rows(&mut self, part: &TensorView<'_>) -> Result<Mat> {
        self.pack(std::slice::from_ref(part), part.rows)
    }

    /// Takes over a matrix that is read row by row and multiplied with: an embedding that is also the head.
    fn pack_tied(&mut self, part: &TensorView<'_>) -> Result<Mat> {
        self.pack(std::slice::from_ref(part), part.rows)
    }

    /// Whether a matrix that was taken over is yet to be read from the files, so that their memory is better kept.
    fn reads_later(&self, _mat: Mat) -> bool {
        false
    }

    /// Does what taking over matrices has put off until a pass needs it, for whoever would rather wait now than in the first
    /// passes.
    ///
    /// # Errors
    /// `Device`.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Takes over a vector.
    fn vector(&mut self, name: &str, values: &[f32]) -> Result<Gain>;

    /// Allocates an activation buffer.
    fn activation(&mut self, spec: ActSpec) -> Result<Act>;

    /// Allocates the KV pools, or resizes them; pages that both sizes have keep their contents, and layer
    /// shapes and formats never change after the first call.
    fn kv(&mut self, plan: &KvPlan) -> Result<()>;

    /// Takes over steering set `index` in place of the one that was there, or gives that one back for `None`. The
    /// set has passed [`SteerSet::check`]. No pass is under way.
    ///
    /// # Errors
    /// `Unsupported` by the default: a backend that cannot steer says so here, before any row asks for it.
    fn steer_set(&mut self, _index: usize, set: Option<&SteerSet>) -> Result<()> {
        match set {
            None => Ok(()),
            Some(_) => Err(Error::Unsupported {
                device: self.report().backend.to_owned(),
                what: "steering is not there for this device".to_owned(),
            }),
        }
    }

    /// Whether later passes note how long each [phase](crate::Phase) takes. Off at first, and then a mark costs nothing.
    ///
    /// # Errors
    /// `Unsupported` by the default, for a backend without a clock.
    fn timings(&mut self, on: bool) -> Result<()> {
        match on {
            false => Ok(()),
            true => Err(Error::Unsupported {
                device: self.report().backend.to_owned(),
                what: "times of phases are not there for this device".to_owned(),
            }),
        }
    }

    /// Whether rows of a batch may [follow](Batch::follows) the pass before: then one more pass may be uploaded and run
    /// while that one is not collected, and the device takes the tokens of such rows from what it chose.
    fn follows(&self) -> bool {
        false
    }

    /// Whether the device can [draw](Batch::draws) the tokens of head rows with `vocab` logits. The tokens in the
    /// [`Outcome`] of such rows are the drawn ones.
    fn draws(&self, _vocab: usize) -> bool {
        false
    }

    /// Whether the bits of a row may depend on how many rows run beside it.
    fn rows_change_bits(&self) -> bool {
        false
    }

    /// Takes the next pass's data. The batch has passed [`Batch::check`] and [`Batch::check_steer`], and no row of it
    /// follows the pass before unless the backend [follows](Backend::follows).
    fn upload(&mut self, batch: &Batch) -> Result<()>;

    /// Carries out `program`, a straight-line function of the model and `shape`. Returns once the work is
    /// done or queued.
    ///
    /// Programs for equal shapes whose rows are all head rows and none of them soft are the same verbs, so that a
    /// backend may record the first and repeat it. Anything else (a sublayer alone) is given soft rows.
    fn run(&mut self, shape: &BatchShape, program: &(dyn Fn(&mut dyn Ops) + Sync)) -> Result<()>;

    /// Waits for the oldest run and hands over what it left.
    fn collect(&mut self) -> Result<Outcome>;

    /// Reads the first `rows` rows of a float32 activation, as the last pass left it.
    fn read(&mut self, act: Act, rows: usize, out: &mut Vec<f32>) -> Result<()>;

    /// Lends the rows `rows` of a float32 activation, as the last pass left it, all at once. A backend whose memory
    /// is at hand lends them in place; this default copies all rows up to the last.
    ///
    /// # Errors
    /// As [`Backend::read`]; nothing was lent then.
    fn lend_rows(&mut self, act: Act, rows: &[usize], to: &mut dyn FnMut(&[&[f32]])) -> Result<()> {
        let count = rows.iter().max().map_or(0, |last| last + 1);
        let mut values = Vec::new();
        if count > 0 {
            self.read(act, count, &mut values)?;
        }
        let width = values.len() / count.max(1);
        let lent: Vec<&[f32]> = rows.iter().map(|row| &values[row * width..(row + 1) * width]).collect();
        to(&lent);
        Ok(())
    }

    /// Writes one position's keys and values (`kv_heads * head_dim` each) straight into a page.
    fn kv_store(&mut self, cache: KvRef, page: usize, in_page: usize, k: &[f32], v: &[f32]) -> Result<()>;

    /// Reads one position's keys and values as stored.
    fn kv_load(
        &mut self,
        cache: KvRef,
        page: usize,
        in_page: usize,
        k: &mut [f32],
        v: &mut [f32],
    ) -> Result<()>;

    /// Appends the bytes of one page of a group as stored, layer after layer, [`KvGroupPlan::page_bytes`](crate::KvGroupPlan::page_bytes) each.
    ///
    /// # Errors
    /// `Unsupported` by a backend that cannot hand pages out; a page outside the pools.
    fn page_read(&mut self, _group: Group, _page: usize, _out: &mut Vec<u8>) -> Result<()> {
        Err(Error::Unsupported {
            device: self.report().backend.into(),
            what: "hand out pages of keys and values".into(),
        })
    }

    /// Puts back what [`Backend::page_read`] handed out, into any page of the same group.
    ///
    /// # Errors
    /// As `page_read`, and a wrong number of bytes; nothing has changed then.
    fn page_write(&mut self, _group: Group, _page: usize, _bytes: &[u8]) -> Result<()> {
        Err(Error::Unsupported {
            device: self.report().backend.into(),
            what: "take in pages of keys and values".into(),
        })
    }

    /// Bytes held.
    fn memory(&self) -> MemoryUse;
}
