//! The per-layer branch in one kernel: `kernels/per_layer_sm90.cu`.

use super::producers::{Branch, NormOut};
use super::skinny_gemm::{Gate, Weights};
use crate::driver::{DevPtr, Kernel};
use crate::error::{Error, Result};
use crate::launch::{Args, Queue, Shape};
use crate::pack::{Form, PackedShape};

const FAMILY: &str = "per_layer_sm90";
/// Width of a layer's own inputs that it takes.
pub const WIDTH: usize = 256;
/// Widest residual.
const MAX_HIDDEN: usize = 3072;
/// Blocks of the one cluster.
const BLOCKS: usize = 16;

/// Of one row: `x1 = x + rms(y; post)`, `h = f(W_gate x1) * times`, `x = (x1 + rms(W_proj h; close)) * scalar`, `outs = rms(x)`.
#[derive(Clone, Copy, Debug)]
pub struct PerLayer {
    /// The row, float32.
    pub x: DevPtr,
    /// Where it goes on: `x`, or elsewhere.
    pub x_out: DevPtr,
    /// Its values.
    pub width: usize,
    /// The branch that joins first.
    pub y: Branch,
    /// Gain and epsilon of the norm before that.
    pub post: (DevPtr, f32),
    /// `[256][width]`.
    pub gate: Weights,
    /// Its activation.
    pub activation: Gate,
    /// float32: the layer's own inputs.
    pub times: DevPtr,
    /// `[width][256]`, in the form of `gate`.
    pub projection: Weights,
    /// Gain and epsilon of the norm behind the projection.
    pub close: (DevPtr, f32),
    /// Multiplies the sum.
    pub scalar: f32,
    /// What is made of it, the present ones first; both with one gain.
    pub outs: [NormOut; 2],
    /// Epsilon of that norm.
    pub out_eps: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct PerLayerArgs {
    x: DevPtr,
    x_out: DevPtr,
    y: Branch,
    post: DevPtr,
    gate: DevPtr,
    proj: DevPtr,
    gate_scale: DevPtr,
    proj_scale: DevPtr,
    times: DevPtr,
    close: DevPtr,
    outs: [NormOut; 2],
    gate_strip_bytes: u64,
    proj_strip_bytes: u64,
    width: i32,
    gate_chunks: i32,
    proj_chunks: i32,
    strips: i32,
    activation: i32,
    n_outs: i32,
    post_eps: f32,
    close_eps: f32,
    out_eps: f32,
    scalar: f32,
}

// SAFETY: mirrors `PerLayerArgs` in kernels/per_layer_sm90.cu.
unsafe impl Args for PerLayerArgs {}

/// Why matrices of these shapes are not for this kernel, if they aren't; `most_shared` is what a block may have.
pub fn refuses(gate: PackedShape, projection: PackedShape, most_shared: usize) -> Option<String> {
    let (form, hidden) = (gate.form, gate.cols);
    let whole = hidden.is_multiple_of(form.chunk_inputs()) && WIDTH.is_multiple_of(form.chunk_inputs());
    if projection.form != form
        || gate.rows != WIDTH
        || (projection.rows, projection.cols) != (hidden, WIDTH)
        || !whole
        || hidden > MAX_HIDDEN
    {
        return Some(format!("{gate:?} and {projection:?}"));
    }
    let shared = shared(gate, projection);
    (shared > most_shared).then(|| format!("{shared} bytes of shared memory"))
}

fn strips_of_block(projection: PackedShape) -> usize {
    projection.strips().div_ceil(BLOCKS)
}

/// Strips of 16 values in the order in which a row's squares are added up, those beyond its width included: whole warps of
/// the eight blocks that norm a residual.
fn row_strips(width: usize) -> usize {
    width.div_ceil(8 * 128) * 8 * 8
}

fn shared(gate: PackedShape, projection: PackedShape) -> usize {
    let per = strips_of_block(projection);
    let floats = 8 * 256 + 8 * 16 + 8 + BLOCKS + row_strips(gate.cols) + 2 * per * 16;
    gate.strip_bytes() + per * projection.strip_bytes() + floats * 4 + (WIDTH + gate.cols) * 2
}

/// Queues [`PerLayer`].
///
/// # Errors
/// `Shape` for what [`refuses`] refuses, and for strides that are no multiples of 4.
///
/// # Safety
/// All pointers are what their fields say, 16-byte aligned, and stay so until the work is done.
pub unsafe fn per_layer(queue: Queue<'_>, call: &PerLayer) -> Result<()> {
    let (gate, projection) = (call.gate.shape, call.projection.shape);
    let refuse = |what| Err(Error::Shape { kernel: "per_layer", what });
    let entry = match gate.form {
        Form::Bf16 => "per_layer_bf16",
        Form::Fp8 => "per_layer_fp8",
        Form::Fp8Block => "per_layer_fp8_block",
        Form::Nvfp4 => "per_layer_nvfp4",
        Form::Int4 => "per_layer_int4",
        Form::Int4Bf16 => "per_layer_int4_bf16",
        Form::Int4Min => "per_layer_int4_min",
        Form::Int8 => "per_layer_int8",
        Form::Int8Min => "per_layer_int8_min",
        Form::Q4K => "per_layer_q4_k",
        Form::Q5K => "per_layer_q5_k",
        Form::Sub16 => "per_layer_sub16",
    };
    let most = queue.kernels.get(Kernel::new(FAMILY, entry))?.max_dynamic_shared;
    if let Some(what) = refuses(gate, projection, most as usize) {
        return refuse(what);
    }
    if call.width != gate.cols || !call.y.plane_stride.is_multiple_of(4) {
        return refuse(format!("a row of {}, planes every {} values", call.width, call.y.plane_stride));
    }
    let outs = call.outs.iter().take_while(|o| o.p != DevPtr::NULL).count();
    let [first, second] = call.outs;
    if outs == 2 && first.gain != second.gain {
        return refuse("outputs with two gains".into());
    }
    let args = PerLayerArgs {
        x: call.x,
        x_out: call.x_out,
        y: call.y,
        post: call.post.0,
        gate: call.gate.strips,
        proj: call.projection.strips,
        gate_scale: call.gate.row_scales,
        proj_scale: call.projection.row_scales,
        times: call.times,
        close: call.close.0,
        outs: call.outs,
        gate_strip_bytes: gate.strip_bytes() as u64,
        proj_strip_bytes: projection.strip_bytes() as u64,
        width: call.width as i32,
        gate_chunks: gate.chunks() as i32,
        proj_chunks: projection.chunks() as i32,
        strips: projection.strips() as i32,
        activation: call.activation as i32,
        n_outs: outs as i32,
        post_eps: call.post.1,
        close_eps: call.close.1,
        out_eps: call.out_eps,
        scalar: call.scalar,
    };
    let shape = Shape::new(BLOCKS as u32, 256)
        .shared(shared(gate, projection) as u32)
        .cluster(BLOCKS as u32)
        .dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new(FAMILY, entry), shape, &args) }
}
