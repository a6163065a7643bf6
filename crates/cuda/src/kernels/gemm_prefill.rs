//! Products with packed weights for many rows, and grouped experts: `kernels/gemm_prefill_sm90.cu`.

use crate::driver::{DevPtr, Kernel};
use crate::error::{Error, Result};
use crate::kernels::skinny_gemm::{Gate, Linear, Output, Weights};
use crate::launch::{Args, Queue, Shape};
use crate::pack::{Form, PackedShape};

const FAMILY: &str = "gemm_prefill_sm90";

#[derive(Clone, Copy)]
#[repr(C)]
struct PrefillArgs {
    w: DevPtr,
    row_scale: DevPtr,
    x: DevPtr,
    out: DevPtr,
    times: DevPtr,
    counts: DevPtr,
    pairs: DevPtr,
    pair_weight: DevPtr,
    strip_bytes: u64,
    group_bytes: u64,
    strips: i32,
    k: i32,
    chunks: i32,
    ldx: i32,
    rows: i32,
    ldo: i32,
    m: i32,
    epilogue: i32,
    activation: i32,
    ld_times: i32,
    list_stride: i32,
    top_k: i32,
    x_by_pair: i32,
    softcap: f32,
}

// SAFETY: mirrors `PrefillArgs` in kernels/common/prefill.cuh.
unsafe impl Args for PrefillArgs {}

fn refuse(what: String) -> Error {
    Error::Shape { kernel: "gemm_prefill", what }
}

/// Stages of one chunk, as in `kernels/gemm_prefill_sm90.cu`.
const fn stages(form: Form) -> usize {
    match form {
        Form::Q4K | Form::Q5K | Form::Sub16 => 2,
        Form::Bf16 => 3,
        _ => 4,
    }
}

/// Rows of x that a block takes.
#[derive(Clone, Copy)]
enum Tile {
    Rows64,
    Rows128,
}

impl Tile {
    const fn rows(self) -> usize {
        match self {
            Tile::Rows64 => 64,
            Tile::Rows128 => 128,
        }
    }
}

fn shared(shape: PackedShape, tile: Tile) -> usize {
    let rows = tile.rows();
    stages(shape.form) * (8 * shape.form.chunk_bytes() + rows * (shape.form.chunk_inputs() + 8) * 2)
        + rows * 4
        + 8 * 1024
}

macro_rules! entries {
    ($($form:ident $name:literal),*) => {
        [$((Form::$form, [concat!("prefill_", $name, "_64"), concat!("prefill_", $name, "_128")])),*]
    };
}

static ENTRIES: [(Form, [&str; 2]); 12] = entries![
    Bf16 "bf16", Fp8 "fp8", Fp8Block "fp8_block", Nvfp4 "nvfp4", Int4 "int4", Int4Bf16 "int4_bf16",
    Int4Min "int4_min", Int8 "int8", Int8Min "int8_min", Q4K "q4_k", Q5K "q5_k", Sub16 "sub16"
];

fn kernel(form: Form, tile: Tile) -> Kernel {
    let (_, names) = ENTRIES.iter().find(|(f, _)| *f == form).expect("every form has its kernels");
    Kernel::new(FAMILY, names[matches!(tile, Tile::Rows128) as usize])
}

fn arguments(weights: &Weights, gated: bool) -> PrefillArgs {
    let shape = weights.shape;
    let half = if gated { 2 } else { 1 };
    PrefillArgs {
        w: weights.strips,
        row_scale: weights.row_scales,
        x: DevPtr::NULL,
        out: DevPtr::NULL,
        times: DevPtr::NULL,
        counts: DevPtr::NULL,
        pairs: DevPtr::NULL,
        pair_weight: DevPtr::NULL,
        strip_bytes: shape.strip_bytes() as u64,
        group_bytes: shape.bytes() as u64,
        strips: (shape.strips() / half) as i32,
        k: shape.cols as i32,
        chunks: shape.chunks() as i32,
        ldx: 0,
        rows: 0,
        ldo: 0,
        m: (shape.rows / half) as i32,
        epilogue: if gated { 2 } else { 0 },
        activation: 0,
        ld_times: 0,
        list_stride: 0,
        top_k: 1,
        x_by_pair: 0,
        softcap: 0.0,
    }
}

fn check(shape: PackedShape, x_stride: usize, gated: bool) -> Result<()> {
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

/// Queues a product of any number of rows; `call.most_planes` counts for nothing, there is one plane.
///
/// # Errors
/// `Shape` for strides that are no multiples of 8 and gated matrices whose halves are no whole strips.
///
/// # Safety
/// As [`skinny_gemm::linear`](crate::kernels::skinny_gemm::linear).
pub unsafe fn linear(queue: Queue<'_>, call: &Linear) -> Result<()> {
    let shape = call.weights.shape;
    let gated = matches!(call.output, Output::Gated(_));
    check(shape, call.x_stride, gated)?;
    let mut args = arguments(&call.weights, gated);
    args.x = call.x;
    args.ldx = call.x_stride as i32;
    args.out = call.out;
    args.ldo = call.out_stride as i32;
    args.rows = call.rows as i32;
    match call.output {
        Output::F32 { softcap } => args.softcap = softcap,
        Output::Bf16 => args.epilogue = 1,
        Output::Gated(gate) => args.activation = gate as i32,
        Output::GateTimes { gate, times, stride } => {
            args.epilogue = 3;
            args.activation = gate as i32;
            args.times = times;
            args.ld_times = stride as i32;
        }
    }
    // Narrow outputs fill the chip only with the smaller tile.
    let blocks = shape.rows.div_ceil(128) * call.rows.div_ceil(128);
    let sms = queue.stream.context().info.multiprocessors as usize;
    let tile = if call.rows <= 64 || blocks < sms { Tile::Rows64 } else { Tile::Rows128 };
    let grid = [call.rows.div_ceil(tile.rows()) as u32, shape.rows.div_ceil(128) as u32, 1];
    let grid = Shape::grid(grid, 256).shared(shared(shape, tile) as u32).dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(kernel(shape.form, tile), grid, &args) }
}

/// Which rows chose which expert, by [`sort_pairs`].
#[derive(Clone, Copy, Debug)]
pub struct Lists {
    /// int32 by expert: how many rows chose it.
    pub counts: DevPtr,
    /// int32 `[experts][list_stride]`: `row * top_k + place`, in order.
    pub pairs: DevPtr,
    /// Room for each expert, at least the rows.
    pub list_stride: usize,
    /// Experts.
    pub experts: usize,
    /// Experts that each row chooses.
    pub top_k: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SortArgs {
    routes: DevPtr,
    counts: DevPtr,
    pairs: DevPtr,
    rows: i32,
    top_k: i32,
    list_stride: i32,
}

// SAFETY: mirrors `SortArgs` in kernels/gemm_prefill_sm90.cu.
unsafe impl Args for SortArgs {}

/// Queues the making of [`Lists`] from float32 `routes`, `[rows][2 * top_k]`: ids, then weights.
///
/// # Errors
/// Those of a launch.
///
/// # Safety
/// All pointers are what their fields say and stay so until the work is done.
pub unsafe fn sort_pairs(queue: Queue<'_>, routes: DevPtr, rows: usize, lists: &Lists) -> Result<()> {
    let args = SortArgs {
        routes,
        counts: lists.counts,
        pairs: lists.pairs,
        rows: rows as i32,
        top_k: lists.top_k as i32,
        list_stride: lists.list_stride as i32,
    };
    // SAFETY: the caller's; one warp an expert.
    unsafe {
        queue.launch(
            Kernel::new(FAMILY, "sort_pairs"),
            Shape::new(lists.experts as u32, 32).dependent(),
            &args,
        )
    }
}

/// Experts over all rows that chose them.
#[derive(Clone, Copy, Debug)]
pub struct Grouped {
    /// Every expert's matrix.
    pub weights: Weights,
    /// Who chose whom.
    pub lists: Lists,
    /// bf16: `[rows][x_stride]` for [`grouped_up`], `[rows * top_k][x_stride]` for [`grouped_down`].
    pub x: DevPtr,
    /// Values from row to row of `x`, a multiple of 8.
    pub x_stride: usize,
    /// `[rows * top_k][out_stride]`: bf16 for up, float32 for down.
    pub out: DevPtr,
    /// Values from row to row of `out`.
    pub out_stride: usize,
}

/// Queues `out[pair] = weight * f(gate) * up` in bf16, with the weights in `routes`.
///
/// # Errors
/// `Shape`, as [`linear`].
///
/// # Safety
/// As [`linear`]; lists and routes belong together.
pub unsafe fn grouped_up(queue: Queue<'_>, call: &Grouped, gate: Gate, routes: DevPtr) -> Result<()> {
    let mut args = grouped(call, true)?;
    args.activation = gate as i32;
    args.pair_weight = routes;
    // SAFETY: the caller's.
    unsafe { launch_grouped(queue, call, &args, 64) }
}

/// Queues `out[pair] = Down x[pair]` in float32.
///
/// # Errors
/// `Shape`, as [`linear`].
///
/// # Safety
/// As [`grouped_up`].
pub unsafe fn grouped_down(queue: Queue<'_>, call: &Grouped) -> Result<()> {
    let mut args = grouped(call, false)?;
    args.x_by_pair = 1;
    // SAFETY: the caller's.
    unsafe { launch_grouped(queue, call, &args, 128) }
}

fn grouped(call: &Grouped, gated: bool) -> Result<PrefillArgs> {
    check(call.weights.shape, call.x_stride, gated)?;
    let mut args = arguments(&call.weights, gated);
    args.x = call.x;
    args.ldx = call.x_stride as i32;
    args.out = call.out;
    args.ldo = call.out_stride as i32;
    args.counts = call.lists.counts;
    args.pairs = call.lists.pairs;
    args.list_stride = call.lists.list_stride as i32;
    args.top_k = call.lists.top_k as i32;
    Ok(args)
}

/// # Safety
/// As [`grouped_up`].
unsafe fn launch_grouped(queue: Queue<'_>, call: &Grouped, args: &PrefillArgs, outputs: usize) -> Result<()> {
    let shape = call.weights.shape;
    let grid = [1, (args.m as usize).div_ceil(outputs) as u32, call.lists.experts as u32];
    let grid = Shape::grid(grid, 256).shared(shared(shape, Tile::Rows64) as u32).dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(kernel(shape.form, Tile::Rows64), grid, args) }
}

/// `out[row] = sum of the row's parts in router order`.
#[derive(Clone, Copy, Debug)]
pub struct Combine {
    /// float32 `[rows * top_k][parts_stride]`.
    pub parts: DevPtr,
    /// Values from part to part, a multiple of 4.
    pub parts_stride: usize,
    /// float32 `[rows][out_stride]`.
    pub out: DevPtr,
    /// Values from row to row, a multiple of 4.
    pub out_stride: usize,
    /// Rows.
    pub rows: usize,
    /// Parts of a row.
    pub top_k: usize,
    /// Values of a row, a multiple of 4.
    pub width: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CombineArgs {
    parts: DevPtr,
    out: DevPtr,
    top_k: i32,
    ld_parts: i32,
    ldo: i32,
    width: i32,
}

// SAFETY: mirrors `CombineArgs` in kernels/gemm_prefill_sm90.cu.
unsafe impl Args for CombineArgs {}

/// Queues [`Combine`].
///
/// # Errors
/// `Shape` for sizes that are no multiples of 4.
///
/// # Safety
/// All pointers are what their fields say, 16-byte aligned, and stay so until the work is done.
pub unsafe fn combine_pairs(queue: Queue<'_>, call: &Combine) -> Result<()> {
    let sizes = [call.parts_stride, call.out_stride, call.width];
    if sizes.iter().any(|s| !s.is_multiple_of(4)) {
        return Err(refuse(format!("parts of {sizes:?}")));
    }
    let args = CombineArgs {
        parts: call.parts,
        out: call.out,
        top_k: call.top_k as i32,
        ld_parts: call.parts_stride as i32,
        ldo: call.out_stride as i32,
        width: call.width as i32,
    };
    let grid = [call.width.div_ceil(1024) as u32, call.rows as u32, 1];
    // SAFETY: the caller's; four values a thread.
    unsafe { queue.launch(Kernel::new(FAMILY, "combine_pairs"), Shape::grid(grid, 256).dependent(), &args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_fits_shared_memory() {
        for form in Form::ALL {
            let shape = PackedShape { form, rows: 128, cols: 256 };
            for tile in [Tile::Rows64, Tile::Rows128] {
                assert!(shared(shape, tile) <= 227 << 10, "{form:?} {}", shared(shape, tile));
            }
        }
    }
}
