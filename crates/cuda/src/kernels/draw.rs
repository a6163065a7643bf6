//! Tokens that the device draws: `kernels/draw.cu`.

use lapidary_ops::Draw;

use super::producers::Told;
use crate::driver::{DevPtr, Kernel};
use crate::error::{Error, Result};
use crate::launch::{Args, Queue, Shape};

/// Integers that say how a row is drawn.
pub const PARAMETERS: usize = 17;
/// Logits of a block.
const PART: usize = 4096;
/// Blocks whose candidates the last one holds.
const MOST_PARTS: usize = 128;

/// Most logits of a row.
pub const MOST_LOGITS: usize = PART * MOST_PARTS;

/// How a row is drawn, as the kernel reads it; all zeros for a row that keeps the token of its largest logit.
pub fn parameters(draw: Option<&Draw>) -> [i32; PARAMETERS] {
    let mut p = [0; PARAMETERS];
    let Some(draw) = draw else { return p };
    let wide = [draw.inverse_temperature.to_bits(), draw.seed, draw.position];
    for (pair, value) in p.as_chunks_mut::<2>().0.iter_mut().zip(wide) {
        *pair = [value as i32, (value >> 32) as i32];
    }
    p[6] = draw.top_k as i32;
    p[7] = draw.top_p.to_bits() as i32;
    p[8] = draw.min_p.to_bits() as i32;
    p[9..].copy_from_slice(&draw.suppress);
    p
}

/// Tokens that are drawn where [`argmax`](super::producers::argmax) left those of the largest logits.
#[derive(Clone, Copy, Debug)]
pub struct DrawCall {
    /// float32 `[rows][stride]`.
    pub logits: DevPtr,
    /// Values from row to row.
    pub stride: usize,
    /// Logits of a row, at most [`MOST_LOGITS`].
    pub vocab: usize,
    /// Rows.
    pub rows: usize,
    /// int32 `[rows][PARAMETERS]`: [`parameters`].
    pub draws: DevPtr,
    /// int32 by row: the token of the largest logit, replaced by the drawn one; a row with -1 keeps it.
    pub out: DevPtr,
    /// [`workspace_bytes`] of memory, zeroed once.
    pub workspace: DevPtr,
    /// Where the host reads the same.
    pub told: Option<Told>,
}

/// Most rows of a call: the counters in front of its workspace.
const MAX_ROWS: usize = super::producers::MAX_ARGMAX_ROWS;

/// Memory that [`draw`] needs for `rows` rows of `vocab` logits. It is zeroed once; calls leave it ready for the next.
pub const fn workspace_bytes(rows: usize, vocab: usize) -> usize {
    MAX_ROWS * 4 + rows * vocab.div_ceil(PART) * Draw::MOST_KEPT as usize * 8
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DrawArgs {
    logits: DevPtr,
    draws: DevPtr,
    out: DevPtr,
    candidates: DevPtr,
    counters: DevPtr,
    told: DevPtr,
    turn: DevPtr,
    ld: i32,
    vocab: i32,
    told_rows: i32,
    pad: i32,
}

// SAFETY: mirrors `DrawArgs` in kernels/draw.cu.
unsafe impl Args for DrawArgs {}

/// Queues [`DrawCall`].
///
/// # Errors
/// `Shape` for more rows or logits than the kernel holds.
///
/// # Safety
/// Every place holds what its field says.
pub unsafe fn draw(queue: Queue<'_>, call: &DrawCall) -> Result<()> {
    let told_rows = call.told.map_or(call.rows, |t| t.rows);
    if call.rows > MAX_ROWS.min(told_rows) || call.vocab > MOST_LOGITS {
        let what = format!("{} rows of {} logits", call.rows, call.vocab);
        return Err(Error::Shape { kernel: "draw", what });
    }
    let args = DrawArgs {
        logits: call.logits,
        draws: call.draws,
        out: call.out,
        candidates: call.workspace.at(MAX_ROWS * 4),
        counters: call.workspace,
        told: call.told.map_or(DevPtr::NULL, |t| t.at),
        turn: call.told.map_or(DevPtr::NULL, |t| t.turn),
        ld: call.stride as i32,
        vocab: call.vocab as i32,
        told_rows: told_rows as i32,
        pad: 0,
    };
    let shape = Shape::grid([call.vocab.div_ceil(PART) as u32, call.rows as u32, 1], 256);
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new("draw", "draw"), shape, &args) }
}
