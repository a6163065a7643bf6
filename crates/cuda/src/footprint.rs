//! Bytes that the backend will take, known before it is made: for memory plans.

use lapidary_ops::{ActKind, ActSpec};

use crate::buffers::stride;

/// Bytes of an activation buffer; `half` where inputs of products are bf16.
pub fn activation_bytes(spec: &ActSpec, half: bool) -> usize {
    let bytes = if half && spec.kind == ActKind::Input { 2 } else { 4 };
    stride(spec.width).saturating_mul(spec.max_rows).saturating_mul(bytes)
}
