//! The memory's read bandwidth: `kernels/bandwidth.cu`.

use crate::driver::{Block, Context, DevPtr, Event, Kernel, Kernels, Stream};
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

/// Bytes a second that the device reads: the best of several launches over `bytes` of memory, far more than its cache
/// holds.
///
/// # Errors
/// `OutOfMemory`, or what the driver says.
pub fn measure(context: &std::sync::Arc<Context>, bytes: usize) -> Result<f64> {
    let bytes = bytes / 16 * 16;
    let memory = Block::new(context, "measuring the memory", bytes + 256)?;
    let (stream, kernels) = (Stream::new(context)?, Kernels::new(context));
    let queue = Queue { stream: &stream, kernels: &kernels };
    let (before, after) = (Event::timed(context)?, Event::timed(context)?);
    let mut best = 0.0f64;
    // SAFETY: the block holds `bytes` and the sink behind them, and each launch is waited for.
    unsafe {
        stream.fill(memory.ptr(), 0x5a, bytes + 256)?;
        for blocks in [2, 3, 4, 8] {
            for _ in 0..4 {
                before.record(&stream)?;
                read_all(queue, memory.ptr(), bytes, memory.ptr().at(bytes), blocks)?;
                after.record(&stream)?;
                stream.wait()?;
                best = best.max(bytes as f64 / after.micros_since(&before)? * 1e6);
            }
        }
    }
    Ok(best)
}
