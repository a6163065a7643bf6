//! Products with packed weights for very many rows by the warpgroup's matrix instruction: `kernels/gemm_wide_sm90.cu` for weights
//! that are exact in bf16, `kernels/gemm_scaled_sm90.cu` for blocks of small integers.

use crate::driver::{DevPtr, Kernel};
use crate::error::{Error, Result};
use crate::kernels::skinny_gemm::{Linear, Output};
use crate::launch::{Args, Queue, Shape};
use crate::pack::{Form, PackedShape};

const FAMILY: &str = "gemm_wide_sm90";
const SCALED_FAMILY: &str = "gemm_scaled_sm90";
/// Rows are padded to whole tiles.
const PADDING: usize = 128;

#[derive(Clone, Copy)]
#[repr(C)]
struct ArrangeArgs {
    x: DevPtr,
    out: DevPtr,
    sums: DevPtr,
    ldx: i32,
    rows: i32,
    padded: i32,
    k: i32,
    chunks: i32,
    pad: i32,
}

// SAFETY: mirrors `ArrangeArgs` in kernels/common/wide.cuh.
unsafe impl Args for ArrangeArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
struct WideArgs {
    w: DevPtr,
    row_scale: DevPtr,
    x: DevPtr,
    sums: DevPtr,
    out: DevPtr,
    times: DevPtr,
    strip_bytes: u64,
    strips: i32,
    chunks: i32,
    rows: i32,
    padded: i32,
    ldo: i32,
    m: i32,
    epilogue: i32,
    activation: i32,
    ld_times: i32,
    softcap: f32,
}

// SAFETY: mirrors `WideArgs` in kernels/common/wide.cuh.
unsafe impl Args for WideArgs {}

/// A form's kernels.
struct Entries {
    /// Brings x into the order of the form.
    arrange: &'static str,
    product: Product,
}

enum Product {
    /// The weights are exact in bf16: by tile.
    Whole([&'static str; 3]),
    /// Blocks are scaled where they are added; `sums` of x with minimums. Tiles of 128 outputs and 128 rows.
    Scaled { entry: &'static str, sums: bool },
}

fn entries(form: Form) -> Entries {
    macro_rules! whole {
        ($arrange:literal, $name:literal) => {
            Entries {
                arrange: concat!("arrange_", $arrange),
                product: Product::Whole([
                    concat!("wide_", $name, "_2x128"),
                    concat!("wide_", $name, "_1x128"),
                    concat!("wide_", $name, "_2x64"),
                ]),
            }
        };
    }
    macro_rules! scaled {
        ($arrange:literal, $name:literal, $sums:literal) => {
            Entries {
                arrange: concat!("arrange_", $arrange),
                product: Product::Scaled { entry: concat!("scaled_", $name, "_128"), sums: $sums },
            }
        };
    }
    match form {
        Form::Bf16 => whole!("narrow", "bf16"),
        Form::Fp8 => whole!("narrow_scaled", "fp8"),
        Form::Nvfp4 => whole!("wide", "nvfp4"),
        Form::Fp8Block => scaled!("narrow_scaled", "fp8_block", false),
        Form::Int4 => scaled!("narrow", "int4", false),
        Form::Int4Bf16 => scaled!("narrow", "int4_bf16", false),
        Form::Int4Min => scaled!("narrow", "int4_min", true),
        Form::Int8 => scaled!("narrow", "int8", false),
        Form::Int8Min => scaled!("narrow", "int8_min", true),
        Form::Q4K => scaled!("narrow", "q4_k", true),
        Form::Q5K => scaled!("narrow", "q5_k", true),
        Form::Sub16 => scaled!("sub16", "sub16", false),
    }
}

/// Stages of one chunk.
fn stages(form: Form) -> usize {
    if form.chunk_inputs() == 256 { 2 } else { 4 }
}

/// Bytes of x in the kernel's order, and of its sums by 32 inputs.
fn arranged_bytes(shape: PackedShape, padded: usize) -> (usize, usize) {
    let inputs = shape.chunks() * shape.form.chunk_inputs();
    (inputs * padded * 2, inputs / 32 * padded * 4)
}

/// Memory that a product of `rows` needs for x in the kernel's order.
pub fn workspace_bytes(shape: PackedShape, rows: usize) -> usize {
    let (x, sums) = arranged_bytes(shape, rows.next_multiple_of(PADDING));
    x + sums
}

/// Queues a product of any number of rows; `call.most_planes` counts for nothing, there is one plane.
///
/// # Errors
/// `Shape` for strides that are no multiples of 8, and gated matrices whose halves are no whole strips.
///
/// # Safety
/// As [`skinny_gemm::linear`](crate::kernels::skinny_gemm::linear); `workspace` has [`workspace_bytes`].
pub unsafe fn linear(queue: Queue<'_>, call: &Linear, workspace: DevPtr) -> Result<()> {
    let shape = call.weights.shape;
    let gated = matches!(call.output, Output::Gated(_));
    let refuse = |what| Err(Error::Shape { kernel: "gemm_wide", what });
    let entries = entries(shape.form);
    if !call.x_stride.is_multiple_of(8) || !shape.cols.is_multiple_of(8) || call.rows == 0 {
        return refuse(format!("{} rows of {} inputs every {}", call.rows, shape.cols, call.x_stride));
    }
    if gated && !shape.rows.is_multiple_of(32) {
        return refuse(format!("gate and up of {} outputs, a multiple of 32 is wanted", shape.rows));
    }
    // Tiles of 256 outputs where they fill the chip, and where gate and up must meet; else of 128.
    let sms = queue.stream.context().info.multiprocessors as usize;
    let full = shape.rows.div_ceil(256) * call.rows.div_ceil(128);
    let (family, entry, outputs, rows, with_sums) = match (entries.product, gated, call.rows) {
        (Product::Scaled { entry, sums }, ..) => (SCALED_FAMILY, entry, 128, 128, sums),
        (Product::Whole(tiles), _, ..=64) => (FAMILY, tiles[2], 256, 64, false),
        (Product::Whole(tiles), false, _) if full < sms => (FAMILY, tiles[1], 128, 128, false),
        (Product::Whole(tiles), ..) => (FAMILY, tiles[0], 256, 128, false),
    };
    let padded = call.rows.next_multiple_of(rows);
    let pieces = shape.chunks() * shape.form.chunk_inputs() / 64;
    let sums = if with_sums { workspace.at(arranged_bytes(shape, padded).0) } else { DevPtr::NULL };
    let arrange = ArrangeArgs {
        x: call.x,
        out: workspace,
        sums,
        ldx: call.x_stride as i32,
        rows: call.rows as i32,
        padded: padded as i32,
        k: shape.cols as i32,
        chunks: pieces as i32,
        pad: 0,
    };
    let half = if gated { 2 } else { 1 };
    let mut args = WideArgs {
        w: call.weights.strips,
        row_scale: call.weights.row_scales,
        x: workspace,
        sums,
        out: call.out,
        times: DevPtr::NULL,
        strip_bytes: shape.strip_bytes() as u64,
        strips: (shape.strips() / half) as i32,
        chunks: shape.chunks() as i32,
        rows: call.rows as i32,
        padded: padded as i32,
        ldo: call.out_stride as i32,
        m: (shape.rows / half) as i32,
        epilogue: 0,
        activation: 0,
        ld_times: 0,
        softcap: 0.0,
    };
    match call.output {
        Output::F32 { softcap } => args.softcap = softcap,
        Output::Bf16 => args.epilogue = 1,
        Output::Gated(gate) => (args.epilogue, args.activation) = (2, gate as i32),
        Output::GateTimes { gate, times, stride } => {
            (args.epilogue, args.activation) = (3, gate as i32);
            (args.times, args.ld_times) = (times, stride as i32);
        }
    }
    let inputs = shape.form.chunk_inputs();
    let of_sums = if with_sums { inputs / 32 * rows * 4 } else { 0 };
    let stage = rows * inputs * 2 + outputs / 16 * shape.form.chunk_bytes() + of_sums;
    let shared = stages(shape.form) * (stage + 2 * 8);
    let grid = [(padded * 8).div_ceil(256) as u32, pieces as u32, 1];
    // SAFETY: the caller's; the shapes are the kernels' own.
    unsafe {
        queue.launch(Kernel::new(FAMILY, entries.arrange), Shape::grid(grid, 256).dependent(), &arrange)?;
        let grid = [(padded / rows) as u32, shape.rows.div_ceil(outputs) as u32, 1];
        let grid = Shape::grid(grid, 384).shared(shared as u32).dependent();
        queue.launch(Kernel::new(family, entry), grid, &args)
    }
}
