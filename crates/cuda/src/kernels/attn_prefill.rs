//! Attention for many rows over paged bf16 keys and values: `kernels/attn_prefill_sm90.cu`.

use lapidary_ops::PAGE_TOKENS;

use crate::driver::{DevPtr, Kernel};
use crate::error::{Error, Result};
use crate::kernels::attn_decode::{AttnDecode, KvColumns};
use crate::launch::{Args, Queue, Shape};

#[derive(Clone, Copy)]
#[repr(C)]
struct PrefillAttnArgs {
    q: DevPtr,
    kv: DevPtr,
    at: KvColumns,
    out: DevPtr,
    ld_q: i32,
    ld_out: i32,
    heads: i32,
    kv_heads: i32,
    window: i32,
    rows: i32,
    scale: f32,
}

// SAFETY: mirrors `PrefillAttnArgs` in kernels/attn_prefill_sm90.cu.
unsafe impl Args for PrefillAttnArgs {}

/// Queues the attention of one layer for any number of rows. Rows of one sequence stand together. The workspace of
/// `call` is not used. FP8 is left to [`attn_decode`](crate::kernels::attn_decode::attn_decode), which takes any number
/// of rows too.
///
/// # Errors
/// `Shape` for heads that [`PageShape::supports`](crate::kernels::attn_decode::PageShape::supports) denies, and for FP8.
///
/// # Safety
/// As [`attn_decode`](crate::kernels::attn_decode::attn_decode).
pub unsafe fn attn_prefill(queue: Queue<'_>, call: &AttnDecode) -> Result<()> {
    let (d, kv_heads) = (call.pages.head_dim, call.pages.kv_heads);
    if !call.pages.supports(call.heads)
        || call.pages.fp8
        || !call.q_stride.is_multiple_of(2)
        || !call.out_stride.is_multiple_of(2)
    {
        return Err(Error::Shape {
            kernel: "attn_prefill",
            what: format!("{} heads of {d} over {kv_heads} kv heads, fp8 {}", call.heads, call.pages.fp8),
        });
    }
    let args = PrefillAttnArgs {
        q: call.q,
        kv: call.pool,
        at: call.columns,
        out: call.out,
        ld_q: call.q_stride as i32,
        ld_out: call.out_stride as i32,
        heads: call.heads as i32,
        kv_heads: kv_heads as i32,
        window: call.window.map_or(0, |w| i32::try_from(w).unwrap_or(i32::MAX)),
        rows: call.rows as i32,
        scale: call.scale,
    };
    let all = call.heads / kv_heads;
    let group = all.min(8);
    let shared = 2 * 2 * PAGE_TOKENS * d * 2 + 2 * 8 * 4 * 32 * 16 + 4 * 2 * 8;
    let grid = [call.rows.div_ceil(64 / group) as u32, (kv_heads * (all / group)) as u32, 1];
    let entry = if d == 256 { "attn_prefill_256" } else { "attn_prefill_512" };
    let shape = Shape::grid(grid, 256).shared(shared as u32).dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new("attn_prefill_sm90", entry), shape, &args) }
}
