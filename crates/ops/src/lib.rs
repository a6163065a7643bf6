//! The contract between the Gemma model and a device.
//!
//! A forward pass is one function that calls verbs on [`Ops`], naming activation buffers ([`Act`]), packed
//! matrices ([`Mat`]) and small vectors ([`Gain`]) by copyable handles. A [`Backend`] deals the handles at
//! load, takes each step's data as a [`Batch`], and decides how the pass is carried out: by every worker of a
//! CPU team at once, recorded into a CUDA graph, or printed by a [`program::Recorder`].
//!
//! The types that matter: [`Ops`] (the vocabulary, each verb with its formula), [`Backend`] (loading and
//! running), [`Batch`] and [`BatchShape`] (one step), [`KvPlan`] (how keys and values are laid out).
//!
//! Deliberately absent: any model, any kernel, any file, any scheduling.

mod backend;
mod batch;
mod draw;
mod handles;
mod kv;
mod ops;
pub mod program;
mod steer;
mod timing;

pub use backend::{Backend, DeviceReport, Error, KernelReport, MemoryUse, Outcome, Result, Tap};
pub use batch::{Batch, BatchError, BatchShape, PageTable, RowSpan, TailRows, TapSet};
pub use draw::Draw;
pub use handles::{Act, ActKind, ActRows, ActSpec, Gain, GainSpec, Mat, MatSpec};
pub use kv::{GROUPS, Group, KvFormat, KvGroupPlan, KvLayerShape, KvPlan, KvRef, PAGE_TOKENS};
pub use lapidary_formats::{FileBytes, FileMap, Format, Scales, TensorView};
pub use ops::{
    Activation, AttnSpec, CloseSpec, ExpertSpec, KvSpec, Norm, Ops, PerLayerSpec, Phase, QkvSpec, RouteSpec,
    TapPoint, ValueSource,
};
pub use steer::{Projections, SteerEdit, SteerError, SteerMode, SteerSet};
pub use timing::{PassTiming, PhaseSpan};
