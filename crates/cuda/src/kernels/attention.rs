//! Attention in float32 over pages.

use crate::args::{Pool, Rows};
use crate::driver::{DevPtr, Kernel};
use crate::error::Result;
use crate::launch::{Args, Queue, Shape};

/// One layer's attention.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AttentionArgs {
    /// Heads' output.
    pub out: Rows,
    /// Queries in the first columns.
    pub q: Rows,
    /// Keys and values.
    pub kv: Pool,
    /// By batch row: position.
    pub positions: DevPtr,
    /// By batch row: last visible key + 1.
    pub visible_to: DevPtr,
    /// By batch row: where its page table would begin at block 0.
    pub table: DevPtr,
    /// Page numbers.
    pub pages: DevPtr,
    /// Active row to batch row, or null.
    pub map: DevPtr,
    /// Query heads.
    pub heads: i32,
    /// Window, or 0.
    pub window: i32,
    /// Multiplies scores.
    pub scale: f32,
    /// Cap of scores, or 0.
    pub softcap: f32,
}

// SAFETY: mirrors `AttentionArgs` in kernels/attention.cu.
unsafe impl Args for AttentionArgs {}

/// Attention of `rows` rows.
///
/// # Safety
/// The module's; heads are at most 1024 wide.
pub unsafe fn attention(queue: Queue<'_>, args: &AttentionArgs, rows: usize) -> Result<()> {
    let shape = Shape::grid([args.heads as u32, rows as u32, 1], 128).shared(args.kv.head_dim as u32 * 4);
    // SAFETY: the caller's.
    unsafe { queue.launch(Kernel::new("attention", "attention"), shape, args) }
}
