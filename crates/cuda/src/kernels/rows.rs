//! The verbs that work on each row alone.

use lapidary_ops::Activation;

use crate::args::{MatrixArgs, Rows, activation_code};
use crate::driver::{DevPtr, Kernel};
use crate::error::{Error, Result};
use crate::kernels::skinny_gemm::Weights;
use crate::launch::{Args, Queue, Shape};
use crate::pack::Form;

const fn kernel(entry: &'static str) -> Kernel {
    Kernel::new("rows", entry)
}

const THREADS: u32 = 256;

fn by_row(rows: usize) -> Shape {
    Shape::new(rows as u32, THREADS)
}

#[derive(Clone, Copy)]
#[repr(C)]
struct EmbedArgs {
    out: Rows,
    table: MatrixArgs,
    tokens: DevPtr,
    scale: f32,
}

// SAFETY: mirrors `EmbedArgs` in kernels/rows.cu.
unsafe impl Args for EmbedArgs {}

/// `out[r] = table[tokens[r]] * scale`.
///
/// # Safety
/// The module's; every token is a row of the table.
pub unsafe fn embed(
    queue: Queue<'_>,
    out: Rows,
    table: MatrixArgs,
    tokens: DevPtr,
    scale: f32,
    rows: usize,
) -> Result<()> {
    let threads = 128;
    let shape = Shape::grid([rows as u32, (table.cols as u32).div_ceil(16 * threads), 1], threads);
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("embed"), shape, &EmbedArgs { out, table, tokens, scale }) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct PackedArgs {
    out: Rows,
    strips: DevPtr,
    row_scales: DevPtr,
    tokens: DevPtr,
    chunks: i32,
    fp8: i32,
    scale: f32,
    pad: i32,
}

// SAFETY: mirrors `PackedArgs` in kernels/rows.cu.
unsafe impl Args for PackedArgs {}

/// [`embed`] from a table that is packed for products, in bf16 or FP8.
///
/// # Errors
/// `Shape` for another form.
///
/// # Safety
/// The module's; every token is a row of the table.
pub unsafe fn embed_packed(
    queue: Queue<'_>,
    out: Rows,
    table: &Weights,
    tokens: DevPtr,
    scale: f32,
    rows: usize,
) -> Result<()> {
    let fp8 = match table.shape.form {
        Form::Bf16 => 0,
        Form::Fp8 => 1,
        other => return Err(Error::Shape { kernel: "embed_packed", what: other.name().into() }),
    };
    let chunks = table.shape.chunks() as i32;
    let (strips, row_scales) = (table.strips, table.row_scales);
    let args = PackedArgs { out, strips, row_scales, tokens, chunks, fp8, scale, pad: 0 };
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("embed_packed"), by_row(rows), &args) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SoftArgs {
    out: Rows,
    soft: DevPtr,
    values: DevPtr,
}

// SAFETY: mirrors `SoftArgs` in kernels/rows.cu.
unsafe impl Args for SoftArgs {}

/// `out[r] = values[soft[r]]` where there is one.
///
/// # Safety
/// The module's.
pub unsafe fn inject_soft(
    queue: Queue<'_>,
    out: Rows,
    soft: DevPtr,
    values: DevPtr,
    rows: usize,
) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("inject_soft"), by_row(rows), &SoftArgs { out, soft, values }) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RopeArgs {
    out: Rows,
    inv_freq: DevPtr,
    positions: DevPtr,
}

// SAFETY: mirrors `RopeArgs` in kernels/rows.cu.
unsafe impl Args for RopeArgs {}

/// `out[r] = [cos(p f) .., sin(p f) ..]`.
///
/// # Safety
/// The module's.
pub unsafe fn rope_table(
    queue: Queue<'_>,
    out: Rows,
    inv_freq: DevPtr,
    positions: DevPtr,
    rows: usize,
) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("rope_table"), by_row(rows), &RopeArgs { out, inv_freq, positions }) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct NormArgs {
    out: Rows,
    x: Rows,
    gain: DevPtr,
    eps: f32,
    add: i32,
}

// SAFETY: mirrors `NormArgs` in kernels/rows.cu.
unsafe impl Args for NormArgs {}

/// `out = rms(x; gain)`; `out` may be `x`.
///
/// # Safety
/// The module's.
pub unsafe fn rms_norm(
    queue: Queue<'_>,
    out: Rows,
    x: Rows,
    gain: DevPtr,
    eps: f32,
    rows: usize,
) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("rms_norm"), by_row(rows), &NormArgs { out, x, gain, eps, add: 0 }) }
}

/// `out += rms(x; gain)`, the same bits as the norm and the sum one after the other.
///
/// # Safety
/// The module's.
pub unsafe fn norm_add(
    queue: Queue<'_>,
    out: Rows,
    x: Rows,
    gain: DevPtr,
    eps: f32,
    rows: usize,
) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("rms_norm"), by_row(rows), &NormArgs { out, x, gain, eps, add: 1 }) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MapArgs {
    out: Rows,
    x: Rows,
    y: Rows,
    f: i32,
    from: i32,
    by: f32,
}

// SAFETY: mirrors `MapArgs` in kernels/rows.cu.
unsafe impl Args for MapArgs {}

unsafe fn map(queue: Queue<'_>, entry: &'static str, rows: usize, args: MapArgs) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel(entry), by_row(rows), &args) }
}

/// `out = x`.
///
/// # Safety
/// The module's.
pub unsafe fn cast(queue: Queue<'_>, out: Rows, x: Rows, rows: usize) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { map(queue, "cast", rows, MapArgs { out, x, y: x, f: 0, from: 0, by: 0.0 }) }
}

/// `out += x`.
///
/// # Safety
/// The module's.
pub unsafe fn add(queue: Queue<'_>, out: Rows, x: Rows, rows: usize) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { map(queue, "add", rows, MapArgs { out, x, y: x, f: 0, from: 0, by: 0.0 }) }
}

/// `out *= by`.
///
/// # Safety
/// The module's.
pub unsafe fn scale(queue: Queue<'_>, out: Rows, by: f32, rows: usize) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { map(queue, "scale", rows, MapArgs { out, x: out, y: out, f: 0, from: 0, by }) }
}

/// `out = f(x) * y[:, from ..]`.
///
/// # Safety
/// The module's; `y` has `from + out.width` columns.
pub unsafe fn gate(
    queue: Queue<'_>,
    out: Rows,
    x: Rows,
    y: Rows,
    from: usize,
    f: Activation,
    rows: usize,
) -> Result<()> {
    let args = MapArgs { out, x, y, f: activation_code(f), from: from as i32, by: 0.0 };
    // SAFETY: the caller's.
    unsafe { map(queue, "gate", rows, args) }
}

/// How the two sources of per-layer inputs are mixed.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PerLayerArgs {
    /// Where the inputs go; may be `context`.
    pub out: Rows,
    /// Projection of the embedding.
    pub context: Rows,
    /// Token table.
    pub table: MatrixArgs,
    /// Ids in it.
    pub tokens: DevPtr,
    /// Norm of each layer's part of the projection.
    pub gain: DevPtr,
    /// Width of one layer's part.
    pub width: i32,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Multiplies the projection before the norm.
    pub context_scale: f32,
    /// Multiplies the table row.
    pub token_scale: f32,
    /// Multiplies the sum.
    pub mix_scale: f32,
}

// SAFETY: mirrors `PerLayerArgs` in kernels/rows.cu.
unsafe impl Args for PerLayerArgs {}

/// Per-layer inputs of `rows` rows and `layers` layers.
///
/// # Safety
/// The module's; every token is a row of the table.
pub unsafe fn per_layer_inputs(
    queue: Queue<'_>,
    args: &PerLayerArgs,
    rows: usize,
    layers: usize,
) -> Result<()> {
    let shape = Shape::grid([rows as u32, layers as u32, 1], 128).shared(args.width as u32 * 4);
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("per_layer_inputs"), shape, args) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct KeepArgs {
    x: Rows,
    heads: DevPtr,
    count: i32,
}

// SAFETY: mirrors `KeepArgs` in kernels/rows.cu.
unsafe impl Args for KeepArgs {}

/// `x[i] = x[heads[i]]` for `count` ascending heads.
///
/// # Safety
/// The module's.
pub unsafe fn keep_rows(queue: Queue<'_>, x: Rows, heads: DevPtr, count: usize) -> Result<()> {
    let shape = Shape::new((x.width as u32).div_ceil(THREADS), THREADS);
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("keep_rows"), shape, &KeepArgs { x, heads, count: count as i32 }) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ArgmaxArgs {
    logits: Rows,
    best: DevPtr,
    best_id: DevPtr,
    out: DevPtr,
    parts: i32,
}

// SAFETY: mirrors `ArgmaxArgs` in kernels/rows.cu.
unsafe impl Args for ArgmaxArgs {}

/// Parts that a row of logits is searched in.
pub const ARGMAX_PARTS: usize = 64;

/// `out[r]` = the place of the largest logit of row `r`, of equals the lower; -1 where one is not finite.
/// `scratch` has `rows * ARGMAX_PARTS * 8` bytes.
///
/// # Safety
/// The module's.
pub unsafe fn argmax(
    queue: Queue<'_>,
    out: DevPtr,
    logits: Rows,
    scratch: DevPtr,
    rows: usize,
) -> Result<()> {
    let best_id = scratch.at(rows * ARGMAX_PARTS * 4);
    let args = ArgmaxArgs { logits, best: scratch, best_id, out, parts: ARGMAX_PARTS as i32 };
    // SAFETY: the caller's.
    unsafe {
        let shape = Shape::grid([ARGMAX_PARTS as u32, rows as u32, 1], THREADS);
        queue.launch(kernel("argmax_parts"), shape, &args)?;
        queue.launch(kernel("argmax_rows"), Shape::new(rows as u32, 32), &args)
    }
}
