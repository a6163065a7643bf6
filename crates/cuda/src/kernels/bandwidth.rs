//! The memory's read bandwidth: `kernels/bandwidth.cu`.

use crate::driver::{DevPtr, Kernel};
use crate::error::Result;
use crate::launch::{Args, Queue, Shape};

#[derive(Clone, Copy)]
#[repr(C)]
struct BandwidthArgs {
    p: DevPtr,
    sink: DevPtr,
    n: u64,
}

// SAFETY: mirrors `BandwidthArgs` in kernels/bandwidth.cu.
unsafe impl Args for BandwidthArgs {}

/// Queues one read of `bytes` bytes (a multiple of 16) at `p` with `blocks` blocks a multiprocessor.
///
/// # Errors
/// Those of a launch.
///
/// # Safety
/// Both places exist until the work is done, `sink` with 4 bytes.
pub unsafe fn read_all(queue: Queue<'_>, p: DevPtr, bytes: usize, sink: DevPtr, blocks: u32) -> Result<()> {
    let args = BandwidthArgs { p, sink, n: (bytes / 16) as u64 };
    let shape = Shape::new(queue.stream.context().info.multiprocessors * blocks, 512);
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new("bandwidth", "read_all"), shape, &args) }
}
