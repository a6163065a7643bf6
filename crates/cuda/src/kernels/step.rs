//! What a decoding step begins with: `kernels/step.cu`.

use crate::driver::{DevPtr, Kernel};
use crate::error::Result;
use crate::launch::{Args, Queue, Shape};

/// Columns of a batch; the first two are the ids.
pub const COLUMNS: usize = 17;

/// Whose tokens rows take that follow the pass before.
#[derive(Clone, Copy, Debug)]
pub struct Follow {
    /// int32 by head row: what the pass before chose.
    pub chosen: DevPtr,
    /// Rows of the smallest table that ids index.
    pub below: i32,
}

/// A batch that moves to the device.
#[derive(Clone, Copy, Debug)]
pub struct Begin {
    /// int32, pinned host memory.
    pub from: DevPtr,
    /// int32 on the device.
    pub to: DevPtr,
    /// Where each column begins in both, and its entries.
    pub columns: [(usize, usize); COLUMNS],
    /// Which of the columns says whom a row follows, and what they take; `None` where every id is given.
    pub follow: Option<(usize, Follow)>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct StepArgs {
    from: DevPtr,
    to: DevPtr,
    chosen: DevPtr,
    place: [i32; COLUMNS],
    length: [i32; COLUMNS],
    follows: i32,
    below: i32,
}

// SAFETY: mirrors `StepArgs` in kernels/step.cu.
unsafe impl Args for StepArgs {}

/// Queues [`Begin`].
///
/// # Errors
/// The driver's.
///
/// # Safety
/// Both places have the columns; the host leaves `from` alone until the work is done; rows follow rows of `chosen`.
pub unsafe fn begin(queue: Queue<'_>, call: &Begin) -> Result<()> {
    let longest = call.columns.iter().map(|c| c.1).max().unwrap_or(0);
    let args = StepArgs {
        from: call.from,
        to: call.to,
        chosen: call.follow.map_or(DevPtr::NULL, |f| f.1.chosen),
        place: call.columns.map(|c| c.0 as i32),
        length: call.columns.map(|c| c.1 as i32),
        follows: call.follow.map_or(0, |f| call.columns[f.0].0 as i32),
        below: call.follow.map_or(1, |f| f.1.below),
    };
    let shape = Shape::grid([longest.div_ceil(256).clamp(1, 16) as u32, COLUMNS as u32, 1], 256);
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new("step", "step_begin"), shape, &args) }
}
