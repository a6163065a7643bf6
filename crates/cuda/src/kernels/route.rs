//! The choice of experts, the order in which they take their rows, and the sum of their outputs.

use crate::args::Rows;
use crate::driver::{DevPtr, Kernel};
use crate::error::Result;
use crate::launch::{Args, Queue, Shape};

const fn kernel(entry: &'static str) -> Kernel {
    Kernel::new("route", entry)
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RouteArgs {
    out: Rows,
    logits: Rows,
    expert_scale: DevPtr,
    experts: i32,
    top_k: i32,
}

// SAFETY: mirrors `RouteArgs` in kernels/route.cu.
unsafe impl Args for RouteArgs {}

/// `out[r]` = ids and weights of the `top_k` best of `experts`.
///
/// # Safety
/// The module's; `top_k` is at most `experts`.
pub unsafe fn route(
    queue: Queue<'_>,
    out: Rows,
    logits: Rows,
    expert_scale: DevPtr,
    experts: usize,
    top_k: usize,
    rows: usize,
) -> Result<()> {
    let args = RouteArgs { out, logits, expert_scale, experts: experts as i32, top_k: top_k as i32 };
    let shape = Shape::new(rows as u32, 32).shared(experts as u32 * 4);
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("route"), shape, &args) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SortArgs {
    routes: Rows,
    order: DevPtr,
    starts: DevPtr,
    rows: i32,
    experts: i32,
    top_k: i32,
}

// SAFETY: mirrors `SortArgs` in kernels/route.cu.
unsafe impl Args for SortArgs {}

/// Pairs `row * top_k + choice` by expert: `order` of `rows * top_k` and `starts` of `experts + 1` integers.
///
/// # Safety
/// The module's.
pub unsafe fn sort_pairs(
    queue: Queue<'_>,
    routes: Rows,
    order: DevPtr,
    starts: DevPtr,
    experts: usize,
    top_k: usize,
    rows: usize,
) -> Result<()> {
    let (rows, experts, top_k) = (rows as i32, experts as i32, top_k as i32);
    let args = SortArgs { routes, order, starts, rows, experts, top_k };
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("sort_pairs"), Shape::new(1, 256), &args) }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CombineArgs {
    out: Rows,
    parts: Rows,
    routes: Rows,
    top_k: i32,
}

// SAFETY: mirrors `CombineArgs` in kernels/route.cu.
unsafe impl Args for CombineArgs {}

/// `out[r] = sum_k weight_k parts[r * top_k + k]`, in router order.
///
/// # Safety
/// The module's.
pub unsafe fn combine(
    queue: Queue<'_>,
    out: Rows,
    parts: Rows,
    routes: Rows,
    top_k: usize,
    rows: usize,
) -> Result<()> {
    let args = CombineArgs { out, parts, routes, top_k: top_k as i32 };
    // SAFETY: the caller's.
    unsafe { queue.launch(kernel("combine"), Shape::new(rows as u32, 256), &args) }
}
