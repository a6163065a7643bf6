//! Copies of activations for the host, and edits of the residual: `kernels/hooks.cu`.

use crate::args::Rows;
use crate::driver::{DevPtr, Kernel};
use crate::error::Result;
use crate::launch::{Args, Queue, Shape};

const THREADS: u32 = 256;

/// An activation as it lies.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Source {
    /// First value of the first plane.
    pub p: DevPtr,
    /// Gain of its norm, where two sources are added; else null.
    pub gain: DevPtr,
    /// Values from plane to plane.
    pub plane_stride: u64,
    /// Planes to be added; 0 for no source.
    pub planes: i32,
    /// Values from row to row.
    pub stride: i32,
    /// 1 for bf16 values, of which there is one plane.
    pub bf16: i32,
    /// Keeps the size a multiple of 8.
    pub pad: i32,
}

impl Source {
    /// No source.
    pub const NONE: Source = Source {
        p: DevPtr::NULL,
        gain: DevPtr::NULL,
        plane_stride: 0,
        planes: 0,
        stride: 0,
        bf16: 0,
        pad: 0,
    };

    /// A buffer.
    pub fn rows(rows: Rows) -> Source {
        Source { p: rows.ptr, planes: 1, stride: rows.stride, bf16: rows.bf16, ..Source::NONE }
    }
}

/// What is copied out.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TapArgs {
    /// The activation.
    pub y: Source,
    /// A second branch: then both are normed and added.
    pub z: Source,
    /// float32 `[rows][width]`; host memory that is pinned.
    pub out: DevPtr,
    /// Values of a row.
    pub width: i32,
    /// Epsilon of both norms.
    pub eps: f32,
}

// SAFETY: mirrors `TapArgs` in kernels/hooks.cu.
unsafe impl Args for TapArgs {}

/// Copies `rows` rows out.
///
/// # Safety
/// The module's.
pub unsafe fn tap(queue: Queue<'_>, args: &TapArgs, rows: usize) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { queue.launch(Kernel::new("hooks", "tap"), Shape::new(rows as u32, THREADS), args) }
}

/// One edit on the device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Edit {
    /// Place in [`lapidary_ops::SteerMode::ALL`].
    pub mode: i32,
    /// Whether `gate` counts.
    pub gated: i32,
    /// How much of it.
    pub strength: f32,
    /// What `Clamp` sets.
    pub to: f32,
    /// What the projection must exceed.
    pub gate: f32,
    /// The length that the direction had.
    pub norm: f32,
}

/// Where a steering set is on the device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Set {
    /// By layer its first edit: `layers + 1` integers.
    pub first: DevPtr,
    /// The [`Edit`]s.
    pub edits: DevPtr,
    /// Unit directions, `[edits][width]`.
    pub units: DevPtr,
    /// Layers that `first` tells of; later ones have no edits.
    pub layers: i32,
    /// Keeps the size a multiple of 8.
    pub pad: i32,
}

/// Edits of rows at the end of a layer.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SteerArgs {
    /// The residual, float32.
    pub x: Rows,
    /// By batch row: which set, or -1.
    pub set: DevPtr,
    /// Active row to batch row, or null.
    pub map: DevPtr,
    /// An array of [`Set`].
    pub sets: DevPtr,
    /// `[batch row][stride]`; host memory that is pinned.
    pub projections: DevPtr,
    /// Values of a row of `projections`.
    pub stride: i32,
    /// The layer.
    pub layer: i32,
}

// SAFETY: mirrors `SteerArgs` in kernels/hooks.cu.
unsafe impl Args for SteerArgs {}

/// Makes the edits of each row's set.
///
/// # Safety
/// The module's; rows name sets of the array, or none.
pub unsafe fn steer(queue: Queue<'_>, args: &SteerArgs, rows: usize) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { queue.launch(Kernel::new("hooks", "steer"), Shape::new(rows as u32, THREADS), args) }
}
