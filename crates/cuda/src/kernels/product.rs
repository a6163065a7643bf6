//! Products with weights of any format in float32.

use crate::args::{MatrixArgs, Rows};
use crate::driver::{DevPtr, Kernel};
use crate::error::Result;
use crate::launch::{Args, Queue, Shape};

const LINEAR_16: Kernel = Kernel::new("product", "linear_16");
const LINEAR_64: Kernel = Kernel::new("product", "linear_64");
const EXPERTS_16: Kernel = Kernel::new("product", "experts_16");
const THREADS: u32 = 256;
/// Outputs of a block.
const OUTS: usize = 64;

#[derive(Clone, Copy)]
#[repr(C)]
struct LinearArgs {
    out: Rows,
    x: Rows,
    w: MatrixArgs,
    rows: i32,
    softcap: f32,
}

// SAFETY: mirrors `LinearArgs` in kernels/product.cu.
unsafe impl Args for LinearArgs {}

/// `out = cap(x W^T)` for `rows` rows; no cap where `softcap` is `None`.
///
/// # Safety
/// The module's.
pub unsafe fn linear(
    queue: Queue<'_>,
    out: Rows,
    x: Rows,
    w: MatrixArgs,
    rows: usize,
    softcap: Option<f32>,
) -> Result<()> {
    // Bits are the same either way; a tall tile decodes each weight for more rows.
    let (kernel, tall) = if rows <= 16 { (LINEAR_16, 16) } else { (LINEAR_64, 64) };
    let grid = [(w.rows as usize).div_ceil(OUTS) as u32, rows.div_ceil(tall) as u32, 1];
    let args = LinearArgs { out, x, w, rows: rows as i32, softcap: softcap.unwrap_or(0.0) };
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel, Shape::grid(grid, THREADS), &args) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertArgs {
    out: Rows,
    x: Rows,
    w: MatrixArgs,
    order: DevPtr,
    starts: DevPtr,
    outs: i32,
    per_row: i32,
}

// SAFETY: mirrors `ExpertArgs` in kernels/product.cu.
unsafe impl Args for ExpertArgs {}

/// Which rows each of `experts` takes, from [`route::sort_pairs`](super::route::sort_pairs).
#[derive(Clone, Copy, Debug)]
pub struct Grouped {
    /// Pairs by expert.
    pub order: DevPtr,
    /// By expert: first entry of `order`; one more at the end.
    pub starts: DevPtr,
    /// Experts.
    pub experts: usize,
}

/// `out[pair] = x[pair / per_row] W_e^T` with `e` the pair's expert; `outs` outputs an expert.
///
/// # Safety
/// The module's.
pub unsafe fn experts(
    queue: Queue<'_>,
    out: Rows,
    x: Rows,
    w: MatrixArgs,
    grouped: Grouped,
    outs: usize,
    per_row: usize,
) -> Result<()> {
    let Grouped { order, starts, experts } = grouped;
    let grid = [outs.div_ceil(OUTS) as u32, experts as u32, 1];
    let args = ExpertArgs { out, x, w, order, starts, outs: outs as i32, per_row: per_row as i32 };
    // SAFETY: the caller's.
    unsafe { queue.launch(EXPERTS_16, Shape::grid(grid, THREADS), &args) }
}
