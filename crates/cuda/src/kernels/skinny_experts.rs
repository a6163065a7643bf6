//! Chosen experts, and what shares their launches: the router beside the dense branch's gate and up, its down product
//! beside the experts' gate and up. Kernels: `kernels/skinny_FORM_sm90.cu`.

use super::producers::{self, Router, RouterArgs};
use super::skinny_gemm::{
    Chosen, Gate, Linear, MAX_EXPERTS, MAX_PLANES, Output, SkinnyArgs, Weights, arguments, check, launch,
    linear, linear_arguments, refuse,
};
use super::skinny_shape::{Choice, SHARED_OF_TWO, Variant, Work, has_row_kernel};
use crate::driver::DevPtr;
use crate::error::Result;
use crate::launch::{Args, Queue, Shape};
use crate::pack::{Form, PackedShape};

#[derive(Clone, Copy)]
#[repr(C)]
struct UpArgs {
    experts: SkinnyArgs,
    side: SkinnyArgs,
    side_jobs: i32,
    pad: i32,
}

// SAFETY: mirrors `UpArgs` in kernels/common/skinny.cuh.
unsafe impl Args for UpArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
struct RoutedArgs {
    product: SkinnyArgs,
    router: RouterArgs,
    router_blocks: i32,
    pad: i32,
}

// SAFETY: mirrors `RoutedArgs` in kernels/common/skinny.cuh.
unsafe impl Args for RoutedArgs {}

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

/// Queues [`ExpertsUp`], and a plain product into float32 that neither reads nor writes what it does: in the same launch
/// where their forms agree. Returns how many planes of sums the product wrote.
///
/// # Errors
/// `Shape`, as [`linear`].
///
/// # Safety
/// As [`linear`]; the ids in `chosen` are experts of the stack.
pub unsafe fn experts_up(queue: Queue<'_>, call: &ExpertsUp, side: Option<&Linear>) -> Result<usize> {
    let shape = call.weights.shape;
    check(shape, call.rows, call.x_stride, true)?;
    whole_chunks(shape)?;
    let sms = queue.stream.context().info.multiprocessors as usize;
    let groups = likely_groups(call.rows, call.top_k);
    let work = Work { shape, rows: call.rows, gated: true, most_planes: 1, sms, groups, scaled: false };
    let row = call.rows == 1 && has_row_kernel(shape.form);
    let mut choice = work.balance(if row { Variant::RowUp } else { Variant::Up });
    let shared = Choice { variant: if row { Variant::RowUp } else { Variant::UpShared }, ..choice };
    let beside = side.and_then(|side| Beside::new(side, call, shared, groups, sms));
    let mut planes = 0;
    if let (Some(side), None) = (side, &beside) {
        // SAFETY: the caller's.
        planes = unsafe { linear(queue, side)? };
    }
    let mut bytes = choice.shared(shape, call.rows);
    if choice.tiles == 1 {
        let with_x = shared.shared(shape, call.rows) + beside.as_ref().map_or(0, |b| b.shared);
        if with_x <= SHARED_OF_TWO {
            (choice, bytes) = (shared, with_x);
        }
    }
    let mut args = arguments(&call.weights, call.rows, choice, true);
    args.x = call.x;
    args.ldx = call.x_stride as i32;
    args.out = call.hidden;
    args.ldo = call.hidden_stride as i32;
    args.groups = call.chosen.groups;
    args.group_weight = call.chosen.weights;
    args.activation = call.gate as i32;
    let mut all = UpArgs { experts: args, side: args, side_jobs: 0, pad: 0 };
    if let Some(b) = beside {
        (all.side, all.side_jobs, planes) = (b.args, b.jobs as i32, b.args.planes as usize);
        choice.blocks = b.blocks;
    }
    let grid = Shape::new(choice.blocks as u32, 288).shared(bytes as u32).dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(choice.kernel(shape.form), grid, &all)? };
    Ok(planes)
}

/// A plain product in the launch of the experts' gate and up.
struct Beside {
    args: SkinnyArgs,
    /// Units times planes; each is a block's first work.
    jobs: usize,
    /// Blocks of the launch.
    blocks: usize,
    /// Bytes that its inputs take in shared memory.
    shared: usize,
}

impl Beside {
    /// `None` where the two cannot be one launch.
    fn new(side: &Linear, call: &ExpertsUp, experts: Choice, groups: usize, sms: usize) -> Option<Beside> {
        let (shape, form) = (side.weights.shape, call.weights.shape.form);
        let whole = shape.cols.is_multiple_of(form.chunk_inputs());
        let plain = side.output == Output::F32 { softcap: 0.0 };
        if shape.form != form
            || !whole
            || !plain
            || side.rows != call.rows
            || !side.x_stride.is_multiple_of(8)
        {
            return None;
        }
        let one = Choice { planes: 1, ..experts };
        let jobs_of_plane = arguments(&side.weights, side.rows, one, false).per_group as usize;
        let of_experts = arguments(&call.weights, call.rows, experts, true).per_group as usize * groups;
        let blocks = (of_experts + jobs_of_plane).min(2 * sms);
        // Blocks that have a unit of the experts less than others.
        let free = blocks - of_experts % blocks;
        let planes = (free / jobs_of_plane).clamp(1, side.most_planes.clamp(1, MAX_PLANES));
        let planes = planes.min(shape.chunks());
        let jobs = planes * jobs_of_plane;
        if jobs > blocks {
            return None;
        }
        let args = linear_arguments(side, Choice { planes, ..experts });
        let inputs = args.cut as usize * form.chunk_inputs();
        let shared = match experts.variant {
            Variant::RowUp => experts.row_inputs(form, args.cut as usize),
            _ => side.rows * (inputs * 2 + 16),
        };
        Some(Beside { args, jobs, blocks, shared })
    }
}

/// A gated product with the router beside it, which reads other inputs: one launch.
///
/// # Errors
/// `Shape`, as [`linear`] and [`producers::router`].
///
/// # Safety
/// As [`linear`] and [`producers::router`].
pub unsafe fn gated_and_router(queue: Queue<'_>, call: &Linear, router: &Router) -> Result<()> {
    let shape = call.weights.shape;
    check(shape, call.rows, call.x_stride, true)?;
    let (router_args, router_blocks) = producers::router_arguments(router)?;
    let sms = queue.stream.context().info.multiprocessors as usize;
    let work = Work { shape, rows: call.rows, gated: true, most_planes: 1, sms, groups: 1, scaled: false };
    let choice = work.balance(Variant::Routed);
    let row = call.rows == 1 && has_row_kernel(shape.form);
    let shared = Choice { variant: if row { Variant::RowRouted } else { Variant::RoutedShared }, ..choice };
    let choice = match choice.tiles == 1 && shared.shared(shape, call.rows) <= SHARED_OF_TWO {
        true => shared,
        false if shape.cols.is_multiple_of(shape.form.chunk_inputs()) => choice,
        // SAFETY: the caller's.
        false => unsafe {
            producers::router(queue, router)?;
            return linear(queue, call).map(|_| ());
        },
    };
    let product = linear_arguments(call, choice);
    let all = RoutedArgs { product, router: router_args, router_blocks: router_blocks as i32, pad: 0 };
    let bytes = choice.shared(shape, call.rows).max(producers::ROUTER_SHARED);
    let blocks = choice.blocks + router_blocks;
    let grid = Shape::new(blocks as u32, 288).shared(bytes as u32).dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(choice.kernel(shape.form), grid, &all) }
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
    check(shape, call.rows, call.hidden_stride, false)?;
    whole_chunks(shape)?;
    let sms = queue.stream.context().info.multiprocessors as usize;
    let groups = likely_groups(call.rows, call.top_k);
    let scaled = call.weights.row_scales != DevPtr::NULL;
    let most_planes = call.most_planes;
    let work = Work { shape, rows: call.rows, gated: false, most_planes, sms, groups, scaled };
    // The kernel for one row takes the experts' inputs as one vector, and four-bit integers two chunks, perhaps of two experts, at a time.
    let pairs = matches!(shape.form, Form::Int4 | Form::Int4Bf16 | Form::Int4Min);
    let row = call.rows == 1
        && has_row_kernel(shape.form)
        && call.hidden_stride == shape.cols
        && !(pairs && scaled);
    let choice =
        match Some(work.balance(Variant::RowDown)).filter(|c| row && c.shared(shape, 1) <= SHARED_OF_TWO) {
            Some(choice) => choice,
            None => work.balance(Variant::Down),
        };
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

fn whole_chunks(shape: PackedShape) -> Result<()> {
    match shape.cols.is_multiple_of(shape.form.chunk_inputs()) && shape.rows.is_multiple_of(16) {
        true => Ok(()),
        false => Err(refuse(format!("experts of {} x {}", shape.rows, shape.cols))),
    }
}
