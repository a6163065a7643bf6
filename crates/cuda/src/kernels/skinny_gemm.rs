//! Products with packed weights for 1 to 16 rows: `kernels/skinny_FORM_sm90.cu`.
//!
//! One kernel serves a plain product, a gated pair of matrices, a product whose result is a gate for something else, and
//! chosen experts. [`Choice::of`] decides strips a warp, where x is kept and how k is cut into planes.

pub use super::skinny_shape::Choice;
use super::skinny_shape::Variant;
use crate::driver::DevPtr;
use crate::error::{Error, Result};
use crate::launch::{Args, Queue, Shape};
use crate::pack::PackedShape;

/// Most rows of one product.
pub const MAX_ROWS: usize = 16;
/// Most planes that a product is cut into.
pub const MAX_PLANES: usize = 3;
/// Most experts of a layer.
pub const MAX_EXPERTS: usize = 128;

/// A packed matrix on the device, or a stack of equal ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights {
    /// Form and size of one matrix (of one expert).
    pub shape: PackedShape,
    /// Strips, one matrix after the other.
    pub strips: DevPtr,
    /// A float32 factor for each output of all matrices, or null.
    pub row_scales: DevPtr,
}

/// What becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Output {
    /// float32, in as many planes as [`Choice::planes`] says; the reader adds them.
    F32 {
        /// `c tanh(sum / c)`; 0 for none, and then only is there one plane.
        softcap: f32,
    },
    /// bf16.
    Bf16,
    /// The matrix is gate and up, half of its outputs each: `f(gate) * up` in bf16.
    Gated(Gate),
    /// `f(sum) * times[row][output]` in bf16.
    GateTimes {
        /// Activation.
        gate: Gate,
        /// float32, a row every `stride` values.
        times: DevPtr,
        /// Values from row to row of `times`.
        stride: usize,
    },
}

/// The gate's activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// The tanh form of GELU.
    GeluTanh = 0,
    /// SiLU.
    Silu = 1,
}

/// A product with one matrix.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// The matrix.
    pub weights: Weights,
    /// bf16 `[rows][x_stride]`.
    pub x: DevPtr,
    /// Values from row to row of `x`, a multiple of 8.
    pub x_stride: usize,
    /// Rows, 1 to 16.
    pub rows: usize,
    /// `[planes][rows][out_stride]`.
    pub out: DevPtr,
    /// Values from row to row of `out`.
    pub out_stride: usize,
    /// What is written.
    pub output: Output,
    /// Planes that `out` has room for.
    pub most_planes: usize,
}

/// The experts that a router chose, on the device.
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    /// int32: how many distinct experts, then their ids (room for 128).
    pub groups: DevPtr,
    /// float32 `[expert in the list][16]`: the weight that each row gives it, 0 where it did not choose it.
    pub weights: DevPtr,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct SkinnyArgs {
    pub w: DevPtr,
    pub row_scale: DevPtr,
    pub x: DevPtr,
    pub out: DevPtr,
    pub times: DevPtr,
    pub groups: DevPtr,
    pub group_weight: DevPtr,
    pub strip_bytes: u64,
    pub group_bytes: u64,
    pub strips: i32,
    pub k: i32,
    pub chunks: i32,
    pub ldx: i32,
    pub rows: i32,
    pub ldo: i32,
    pub m: i32,
    pub lwm: i32,
    pub planes: i32,
    pub cut: i32,
    pub epilogue: i32,
    pub activation: i32,
    pub ld_times: i32,
    pub per_group: i32,
    pub magic_group: u32,
    pub magic_chunks: u32,
    pub softcap: f32,
}

// SAFETY: mirrors `SkinnyArgs` in kernels/common/skinny.cuh.
unsafe impl Args for SkinnyArgs {}

pub(super) fn refuse(what: String) -> Error {
    Error::Shape { kernel: "skinny_gemm", what }
}

/// Queues a product. Returns how many planes of sums were written.
///
/// # Errors
/// `Shape` for rows beyond 16, a stride of x that is no multiple of 8, a gated matrix whose halves are no whole strips,
/// inputs that are neither whole chunks nor small enough for shared memory.
///
/// # Safety
/// All pointers are what their fields say, 16-byte aligned, and stay so until the work is done.
pub unsafe fn linear(queue: Queue<'_>, call: &Linear) -> Result<usize> {
    let shape = call.weights.shape;
    let gated = matches!(call.output, Output::Gated(_));
    check(shape, call.rows, call.x_stride, gated)?;
    let sms = queue.stream.context().info.multiprocessors as usize;
    let most_planes = match call.output {
        Output::F32 { softcap: 0.0 } => call.most_planes,
        _ => 1,
    };
    let choice = Choice::of(shape, call.rows, gated, most_planes, sms);
    // SAFETY: the caller's.
    unsafe { linear_as(queue, call, choice) }
}

/// Most rows of one call. Inputs that are no whole chunk are filled up in shared memory, which has room for 8.
pub fn most_rows(shape: PackedShape) -> usize {
    if shape.cols.is_multiple_of(shape.form.chunk_inputs()) { MAX_ROWS } else { 8 }
}

/// Queues a product in a shape of one's own choosing, from [`Choice::all`] of the same product.
///
/// # Errors
/// As [`linear`].
///
/// # Safety
/// As [`linear`]; the choice was made for this product.
pub unsafe fn linear_as(queue: Queue<'_>, call: &Linear, choice: Choice) -> Result<usize> {
    let shape = call.weights.shape;
    if choice.tiles > 1 && matches!(choice.variant, Variant::Shared | Variant::SharedTwo) {
        return Err(refuse(format!("{} inputs for more than 8 rows", shape.cols)));
    }
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { launch(queue, shape, call.rows, choice, &linear_arguments(call, choice))? };
    Ok(choice.planes)
}

/// What a kernel takes of a product in a shape.
pub(super) fn linear_arguments(call: &Linear, choice: Choice) -> SkinnyArgs {
    let gated = matches!(call.output, Output::Gated(_));
    let mut args = arguments(&call.weights, call.rows, choice, gated);
    args.x = call.x;
    args.ldx = call.x_stride as i32;
    args.out = call.out;
    args.ldo = call.out_stride as i32;
    match call.output {
        Output::F32 { softcap } => args.softcap = softcap,
        Output::Bf16 => args.epilogue = 1,
        Output::Gated(gate) => {
            args.epilogue = 2;
            args.activation = gate as i32;
        }
        Output::GateTimes { gate, times, stride } => {
            args.epilogue = 3;
            args.activation = gate as i32;
            args.times = times;
            args.ld_times = stride as i32;
        }
    }
    args
}

/// The planes that [`linear`] would write for this product.
pub fn planes(shape: PackedShape, rows: usize, most_planes: usize, multiprocessors: usize) -> usize {
    Choice::of(shape, rows, false, most_planes, multiprocessors).planes
}

pub(super) fn check(shape: PackedShape, rows: usize, x_stride: usize, gated: bool) -> Result<()> {
    if rows == 0 || rows > MAX_ROWS {
        return Err(refuse(format!("{rows} rows, it takes 1 to {MAX_ROWS}")));
    }
    if !x_stride.is_multiple_of(8) || !shape.cols.is_multiple_of(8) {
        return Err(refuse(format!(
            "{} inputs, {x_stride} from row to row: multiples of 8 are wanted",
            shape.cols
        )));
    }
    if gated && !shape.rows.is_multiple_of(32) {
        return Err(refuse(format!(
            "gate and up of {} outputs together, a multiple of 32 is wanted",
            shape.rows
        )));
    }
    Ok(())
}

pub(super) fn arguments(weights: &Weights, rows: usize, choice: Choice, gated: bool) -> SkinnyArgs {
    let shape = weights.shape;
    let strips = if gated { shape.strips() / 2 } else { shape.strips() };
    let per_group = strips.div_ceil(choice.unit() / if gated { 2 } else { 1 });
    SkinnyArgs {
        w: weights.strips,
        row_scale: weights.row_scales,
        x: DevPtr::NULL,
        out: DevPtr::NULL,
        times: DevPtr::NULL,
        groups: DevPtr::NULL,
        group_weight: DevPtr::NULL,
        strip_bytes: shape.strip_bytes() as u64,
        group_bytes: shape.bytes() as u64,
        strips: strips as i32,
        k: shape.cols as i32,
        chunks: shape.chunks() as i32,
        ldx: 0,
        rows: rows as i32,
        ldo: 0,
        m: (if gated { shape.rows / 2 } else { shape.rows }) as i32,
        lwm: choice.lwm as i32,
        planes: choice.planes as i32,
        cut: shape.chunks().div_ceil(choice.planes) as i32,
        epilogue: 0,
        activation: 0,
        ld_times: 0,
        per_group: per_group as i32,
        magic_group: reciprocal(per_group),
        magic_chunks: reciprocal(shape.chunks()),
        softcap: 0.0,
    }
}

/// What `divide` in the kernel wants: 2^32 / n rounded up, 0 for 1. Quotients are exact for dividends whose product with n
/// stays below 2^31.
fn reciprocal(n: usize) -> u32 {
    if n == 1 { 0 } else { ((1u64 << 32).div_ceil(n as u64)) as u32 }
}

/// # Safety
/// As [`linear`].
pub(super) unsafe fn launch(
    queue: Queue<'_>,
    shape: PackedShape,
    rows: usize,
    choice: Choice,
    args: &impl Args,
) -> Result<()> {
    let grid = [choice.blocks as u32, choice.planes as u32, 1];
    let grid = Shape::grid(grid, 288).shared(choice.shared(shape, rows) as u32).dependent();
    // SAFETY: the caller's.
    unsafe { queue.launch(choice.kernel(shape.form), grid, args) }
}
