//! Handles: what a pass names its data by.
//!
//! Handles carry no shape and no lifetime. A backend deals them in build order, so two backends that build the
//! same model deal equal handles, and one model can be run by either.

use lapidary_formats::Format;

/// An activation buffer: rows x width of float32, or of whatever form the backend's `linear` wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Act(pub u16);

/// A packed weight matrix `[rows, cols]` = `[outputs, inputs]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mat(pub u32);

/// A small float32 vector: a norm gain, per-expert scales, rope frequencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gain(pub u32);

/// The form in which an activation is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActKind {
    /// float32, on every backend and in every mode.
    F32,
    /// Whatever this backend's `linear` wants as input (int8 blocks, bf16, FP8, or float32 in the float32
    /// mode). Only `linear`, `logits`, `experts` and [`tap`](crate::Ops::tap) read it.
    Input,
}

/// How many rows an activation has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActRows {
    /// One for every row of the batch.
    Batch,
    /// One for every row whose logits are wanted.
    Heads,
}

/// What a backend allocates for an [`Act`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActSpec {
    /// What the buffer holds, for listings and messages.
    pub name: &'static str,
    /// Values in a row.
    pub width: usize,
    /// The form of the values.
    pub kind: ActKind,
    /// Which rows it has.
    pub rows: ActRows,
    /// Rows to allocate.
    pub max_rows: usize,
}

/// What is known of a [`Mat`] once it is packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatSpec {
    /// Name of the first part in the checkpoint.
    pub name: String,
    /// Outputs of all parts together.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Formats of the parts in the checkpoint, without repeats.
    pub formats: Vec<Format>,
}

/// What is known of a [`Gain`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GainSpec {
    /// Name in the checkpoint, or what it was computed for.
    pub name: String,
    /// Values.
    pub len: usize,
}
