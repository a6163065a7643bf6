//! Head norms, rotation and the writing of keys and values; single cells in and out.

use crate::args::{Pool, Rows};
use crate::driver::{DevPtr, Kernel};
use crate::error::Result;
use crate::launch::{Args, Queue, Shape};

/// Widest head that a block of threads holds.
pub const MOST_HEAD_DIM: usize = 1024;

/// What happens to a layer's stacked projection before attention.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FinishArgs {
    /// `[q, k, v]`, the parts that the layer has.
    pub qkv: Rows,
    /// cos and sin of the row's angles; as wide as a head.
    pub rope: Rows,
    /// Where keys and values go.
    pub kv: Pool,
    /// Norm of query heads.
    pub q_gain: DevPtr,
    /// Norm of key heads.
    pub k_gain: DevPtr,
    /// By batch row: `page * 32 + place`, or -1.
    pub cell: DevPtr,
    /// Active row to batch row, or null.
    pub map: DevPtr,
    /// Query heads.
    pub heads: i32,
    /// Key/value heads; 0 where the layer has none of its own.
    pub kv_heads: i32,
    /// Values are the raw keys.
    pub values_are_keys: i32,
    /// Values are normed.
    pub norm_values: i32,
    /// Epsilon of the queries' norm.
    pub q_eps: f32,
    /// Of the keys'.
    pub k_eps: f32,
    /// Of the values'.
    pub v_eps: f32,
}

// SAFETY: mirrors `FinishArgs` in kernels/heads.cu.
unsafe impl Args for FinishArgs {}

/// Norms, rotates, writes to the cache.
///
/// # Safety
/// The module's; heads are at most [`MOST_HEAD_DIM`] wide.
pub unsafe fn qkv_finish(queue: Queue<'_>, args: &FinishArgs, rows: usize) -> Result<()> {
    let threads = (args.rope.width as u32).next_multiple_of(32);
    let blocks = (args.heads + 2 * args.kv_heads) as u32;
    let shape = Shape::grid([blocks, rows as u32, 1], threads).shared(threads * 4);
    // SAFETY: the caller's.
    unsafe { queue.launch(Kernel::new("heads", "qkv_finish"), shape, args) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CellArgs {
    kv: Pool,
    values: DevPtr,
    page: i32,
    in_page: i32,
}

// SAFETY: mirrors `CellArgs` in kernels/heads.cu.
unsafe impl Args for CellArgs {}

/// A place in a pool.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// Page.
    pub page: usize,
    /// Position in it.
    pub in_page: usize,
}

/// Stores `values`, `[K, V][kv_heads][head_dim]` float32, as one position.
///
/// # Safety
/// The module's; the cell is in the pool.
pub unsafe fn cell_store(queue: Queue<'_>, kv: Pool, values: DevPtr, cell: Cell) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { single(queue, "cell_store", kv, values, cell) }
}

/// Loads one position into `values`.
///
/// # Safety
/// The module's; the cell is in the pool.
pub unsafe fn cell_load(queue: Queue<'_>, kv: Pool, values: DevPtr, cell: Cell) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { single(queue, "cell_load", kv, values, cell) }
}

unsafe fn single(queue: Queue<'_>, entry: &'static str, kv: Pool, values: DevPtr, cell: Cell) -> Result<()> {
    let threads = (kv.head_dim as u32).next_multiple_of(32);
    let shape = Shape::grid([kv.kv_heads as u32, 2, 1], threads);
    let args = CellArgs { kv, values, page: cell.page as i32, in_page: cell.in_page as i32 };
    // SAFETY: the caller's.
    unsafe { queue.launch(Kernel::new("heads", entry), shape, &args) }
}
