//! A product of one row with the residual step before it in one kernel: `kernels/common/prologue.cuh`.

use super::producers::Residual;
use super::skinny_gemm::{Linear, Output, SkinnyArgs, check, linear_arguments, refuse};
use super::skinny_shape::{Choice, Variant};
use crate::driver::{DevPtr, Kernel};
use crate::error::Result;
use crate::launch::{Args, Queue, Shape};
use crate::pack::{Form, PackedShape};

#[derive(Clone, Copy)]
#[repr(C)]
struct PrologueArgs {
    x: DevPtr,
    x_out: DevPtr,
    y: DevPtr,
    post: DevPtr,
    gain: DevPtr,
    plane_stride: u64,
    planes: i32,
    width: i32,
    eps: f32,
    scalar: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct AfterArgs {
    product: SkinnyArgs,
    before: PrologueArgs,
}

// SAFETY: mirrors `AfterArgs` in kernels/common/skinny.cuh.
unsafe impl Args for AfterArgs {}

/// The launch shape of a gated product with such a step before it, if there is a kernel.
pub fn choice(shape: PackedShape, multiprocessors: usize) -> Option<Choice> {
    let choice = Choice::of(shape, 1, true, 1, multiprocessors);
    let fits =
        matches!((shape.form, choice.variant), (Form::Bf16, Variant::Shared) | (Form::Q4K, Variant::Row))
            && shape.cols.is_multiple_of(8)
            && shape.cols <= 3072;
    fits.then_some(choice)
}

/// Queues `before`, of one row, one branch and one normed copy in bf16, and the gated product of that copy. The copy itself is left nowhere.
///
/// # Errors
/// `Shape` for what [`choice`] has no kernel for, and other steps and products.
///
/// # Safety
/// As [`producers::residual`](super::producers::residual) and [`skinny_gemm::linear`](super::skinny_gemm::linear); `x_out` is elsewhere than `x`.
pub unsafe fn gated(queue: Queue<'_>, before: &Residual, call: &Linear) -> Result<()> {
    let shape = call.weights.shape;
    let sms = queue.stream.context().info.multiprocessors as usize;
    check(shape, call.rows, call.x_stride, true)?;
    let choice = choice(shape, sms).filter(|_| {
        call.rows == 1
            && before.rows == 1
            && before.width == shape.cols
            && before.x != before.x_out
            && before.z.planes == 0
            && matches!(call.output, Output::Gated(_))
    });
    let Some(choice) = choice else {
        return Err(refuse(format!("{shape:?} behind a residual step of {}", before.width)));
    };
    let product = linear_arguments(call, choice);
    let before_args = PrologueArgs {
        x: before.x,
        x_out: before.x_out,
        y: before.y.p,
        post: before.post,
        gain: before.outs[0].gain,
        plane_stride: before.y.plane_stride,
        planes: before.y.planes,
        width: before.width as i32,
        eps: before.eps,
        scalar: before.scalar,
    };
    let args = AfterArgs { product, before: before_args };
    let (fours, two) = (shape.cols.div_ceil(1024).max(2), shape.cols <= 2048);
    // Where x is not kept as it is, the row lies behind it.
    let (image, entry, row) = match (shape.form, two) {
        (Form::Bf16, true) => ("skinny_bf16_sm90", "skinny_bf16_after_2", 0),
        (Form::Bf16, false) => ("skinny_bf16_sm90", "skinny_bf16_after_3", 0),
        (_, true) => ("skinny_q4_k_sm90", "skinny_q4_k_after_2", 2 * shape.cols),
        (_, false) => ("skinny_q4_k_sm90", "skinny_q4_k_after_3", 2 * shape.cols),
    };
    let shared = choice.shared(shape, 1) + 2 * 8 * fours * 4 + row;
    let grid = Shape::grid([choice.blocks as u32, 1, 1], 288).shared(shared as u32).dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new(image, entry), grid, &args) }
}
