//! Bytes that a backend will take, known before it is made: for memory plans.
//!
//! The arithmetic stands beside what it counts (buffers, tiles, experts); plans are tested against
//! [`Backend::memory`](lapidary_ops::Backend::memory).

use lapidary_formats::Format;
use lapidary_ops::{ActKind, ActSpec};

use crate::backend::Compute;
use crate::buffers;
use crate::int8::{activations, tiles};

/// Bytes of an activation buffer.
pub fn activation_bytes(spec: &ActSpec, compute: Compute) -> usize {
    let int8 = compute == Compute::Fast && spec.kind == ActKind::Input;
    let blocks = if int8 { activations::row_bytes(spec.width) } else { 0 };
    (buffers::row_floats(spec.width).saturating_mul(size_of::<f32>()) + blocks).saturating_mul(spec.max_rows)
}

/// Bytes of a matrix `[rows, cols]` in packed form; `None` for one that stays in the bytes of its file.
pub fn packed_bytes(format: Format, rows: usize, cols: usize, compute: Compute) -> Option<usize> {
    (compute == Compute::Fast).then(|| tiles::packed_bytes(format, rows, cols)).flatten()
}

/// Bytes of the intermediate values of routed experts: `top_k` experts of hidden width `width` for each of `rows` rows
/// of `hidden` values.
pub fn experts_bytes(rows: usize, top_k: usize, width: usize, hidden: usize, compute: Compute) -> usize {
    let blocks = if compute == Compute::Fast { activations::row_bytes(width) } else { 0 };
    let floats = buffers::row_floats(width) + hidden;
    rows.saturating_mul(top_k).saturating_mul(floats * size_of::<f32>() + blocks)
}
