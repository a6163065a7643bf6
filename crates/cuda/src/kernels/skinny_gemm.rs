//! Products with packed weights for 1 to 16 rows, of some forms to 32: `kernels/skinny_FORM_sm90.cu`.
//!
//! One kernel serves a plain product, a gated pair of matrices, a product whose result is a gate for something else, and
//! chosen experts. [`Choice::of`] decides strips a warp, where x is kept and how k is cut into planes.

pub use super::skinny_shape::{Choice, most_rows};
use super::skinny_shape::{SHARED_OF_TWO, Variant, Work};
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
    /// Rows, from 1 to [`most_rows`].
    pub rows: usize,
    /// `[planes][rows][out_stride]`; beyond 16 rows there is one plane.
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
struct SkinnyArgs {
    w: DevPtr,
    row_scale: DevPtr,
    x: DevPtr,
    out: DevPtr,
    times: DevPtr,
    groups: DevPtr,
    group_weight: DevPtr,
    strip_bytes: u64,
    group_bytes: u64,
    strips: i32,
    k: i32,
    chunks: i32,
    ldx: i32,
    rows: i32,
    ldo: i32,
    m: i32,
    lwm: i32,
    planes: i32,
    cut: i32,
    epilogue: i32,
    activation: i32,
    ld_times: i32,
    per_group: i32,
    magic_group: u32,
    magic_chunks: u32,
    scale_rows: i32,
    softcap: f32,
}

// SAFETY: mirrors `SkinnyArgs` in kernels/common/skinny.cuh.
unsafe impl Args for SkinnyArgs {}

fn refuse(what: String) -> Error {
    Error::Shape { kernel: "skinny_gemm", what }
}

/// Queues a product. Returns how many planes of sums were written.
///
/// # Errors
/// `Shape` for rows beyond [`most_rows`], a stride of x that is no multiple of 8, a gated matrix whose halves are no whole strips,
/// inputs that are neither whole chunks nor small enough for shared memory.
///
/// # Safety
/// All pointers are what their fields say, 16-byte aligned, and stay so until the work is done.
pub unsafe fn linear(queue: Queue<'_>, call: &Linear) -> Result<usize> {
    let shape = call.weights.shape;
    let gated = matches!(call.output, Output::Gated(_));
    check(shape, call.rows, most_rows(shape.form), call.x_stride, gated)?;
    let sms = queue.stream.context().info.multiprocessors as usize;
    let most_planes = match call.output {
        Output::F32 { softcap: 0.0 } if call.rows <= MAX_ROWS => call.most_planes,
        _ => 1,
    };
    let choice = Choice::of(shape, call.rows, gated, most_planes, sms);
    // SAFETY: the caller's.
    unsafe { linear_as(queue, call, choice) }
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
    let gated = matches!(call.output, Output::Gated(_));
    if choice.tiles > 1 && matches!(choice.variant, Variant::Shared | Variant::SharedTwo) {
        return Err(refuse(format!("{} inputs for more than 8 rows", shape.cols)));
    }
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
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { launch(queue, shape, call.rows, choice, &args)? };
    Ok(choice.planes)
}

/// The planes that [`linear`] would write for this product.
pub fn planes(shape: PackedShape, rows: usize, most_planes: usize, multiprocessors: usize) -> usize {
    Choice::of(shape, rows, false, most_planes, multiprocessors).planes
}

/// Gate and up of chosen experts: `hidden[group][row] = weight[group][row] * f(gate) * up` in bf16, zero where the row
/// did not choose the group's expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsUp {
    /// Gate rows, then up rows, of every expert.
    pub weights: Weights,
    /// The choice.
    pub chosen: Chosen,
    /// Experts that each row chooses.
    pub top_k: usize,
    /// bf16 `[rows][x_stride]`.
    pub x: DevPtr,
    /// Values from row to row of `x`.
    pub x_stride: usize,
    /// Rows, 1 to 16.
    pub rows: usize,
    /// `[groups][rows][hidden_stride]`, room for `min(experts, rows * top_k)` groups.
    pub hidden: DevPtr,
    /// Values from row to row of `hidden`, a multiple of 8.
    pub hidden_stride: usize,
    /// Activation.
    pub gate: Gate,
}

/// Queues [`ExpertsUp`].
///
/// # Errors
/// `Shape`, as [`linear`].
///
/// # Safety
/// As [`linear`]; the ids in `chosen` are experts of the stack.
pub unsafe fn experts_up(queue: Queue<'_>, call: &ExpertsUp) -> Result<()> {
    let shape = call.weights.shape;
    check(shape, call.rows, MAX_ROWS, call.x_stride, true)?;
    whole_chunks(shape)?;
    let sms = queue.stream.context().info.multiprocessors as usize;
    let groups = likely_groups(call.rows, call.top_k);
    let work = Work { shape, rows: call.rows, gated: true, most_planes: 1, sms, groups, scaled_groups: 0 };
    let mut choice = work.balance(Variant::Up);
    let shared = Choice { variant: Variant::UpShared, ..choice };
    if choice.tiles == 1 && shared.shared(shape, call.rows) <= SHARED_OF_TWO {
        choice = shared;
    }
    let mut args = arguments(&call.weights, call.rows, choice, true);
    args.x = call.x;
    args.ldx = call.x_stride as i32;
    args.out = call.hidden;
    args.ldo = call.hidden_stride as i32;
    args.groups = call.chosen.groups;
    args.group_weight = call.chosen.weights;
    args.activation = call.gate as i32;
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { launch(queue, shape, call.rows, choice, &args) }
}

/// Down of chosen experts, summed over them: `out[row] = sum over groups of Down_group hidden[group][row]`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsDown {
    /// All experts' matrices.
    pub weights: Weights,
    /// The choice; its weights are in `hidden` already.
    pub chosen: Chosen,
    /// Experts that each row chooses.
    pub top_k: usize,
    /// bf16 `[groups][rows][hidden_stride]`.
    pub hidden: DevPtr,
    /// Values from row to row of `hidden`, a multiple of 8.
    pub hidden_stride: usize,
    /// Rows, 1 to 16.
    pub rows: usize,
    /// float32 `[planes][rows][out_stride]`.
    pub out: DevPtr,
    /// Values from row to row of `out`.
    pub out_stride: usize,
    /// Planes that `out` has room for.
    pub most_planes: usize,
}

/// Queues [`ExpertsDown`]. Returns how many planes of sums were written.
///
/// # Errors
/// `Shape`, as [`linear`].
///
/// # Safety
/// As [`experts_up`].
pub unsafe fn experts_down(queue: Queue<'_>, call: &ExpertsDown) -> Result<usize> {
    let shape = call.weights.shape;
    check(shape, call.rows, MAX_ROWS, call.hidden_stride, false)?;
    whole_chunks(shape)?;
    let sms = queue.stream.context().info.multiprocessors as usize;
    let groups = likely_groups(call.rows, call.top_k);
    let scaled_groups =
        if call.weights.row_scales == DevPtr::NULL { 0 } else { MAX_EXPERTS.min(call.rows * call.top_k) };
    let most_planes = call.most_planes;
    let work = Work { shape, rows: call.rows, gated: false, most_planes, sms, groups, scaled_groups };
    let choice = work.balance(Variant::Down);
    let mut args = arguments(&call.weights, call.rows, choice, false);
    args.x = call.hidden;
    args.ldx = call.hidden_stride as i32;
    args.out = call.out;
    args.ldo = call.out_stride as i32;
    args.groups = call.chosen.groups;
    args.group_weight = call.chosen.weights;
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { launch(queue, shape, call.rows, choice, &args)? };
    Ok(choice.planes)
}

/// Distinct experts that the launch shape is chosen for: all different for one row, fewer for many.
fn likely_groups(rows: usize, top_k: usize) -> usize {
    let all = MAX_EXPERTS as f64;
    (all * (1.0 - (1.0 - top_k as f64 / all).powi(rows as i32))).round().max(1.0) as usize
}

fn check(shape: PackedShape, rows: usize, most: usize, x_stride: usize, gated: bool) -> Result<()> {
    if rows == 0 || rows > most {
        return Err(refuse(format!("{rows} rows, it takes 1 to {most}")));
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

fn whole_chunks(shape: PackedShape) -> Result<()> {
    match shape.cols.is_multiple_of(shape.form.chunk_inputs()) && shape.rows.is_multiple_of(16) {
        true => Ok(()),
        false => Err(refuse(format!("experts of {} x {}", shape.rows, shape.cols))),
    }
}

fn arguments(weights: &Weights, rows: usize, choice: Choice, gated: bool) -> SkinnyArgs {
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
        scale_rows: choice.scale_rows as i32,
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
unsafe fn launch(
    queue: Queue<'_>,
    shape: PackedShape,
    rows: usize,
    choice: Choice,
    args: &SkinnyArgs,
) -> Result<()> {
    let grid = [choice.blocks as u32, choice.planes as u32, 1];
    let grid = Shape::grid(grid, 288).shared(choice.shared(shape, rows) as u32).dependent();
    // SAFETY: the caller's.
    unsafe { queue.launch(choice.kernel(shape.form), grid, args) }
}
