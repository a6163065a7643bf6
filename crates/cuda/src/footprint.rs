//! Bytes that the backend will take, known before it is made: for memory plans.

use lapidary_formats::{Format, Scales, TensorView};
use lapidary_ops::{ActKind, ActSpec};

use crate::buffers::stride;
use crate::pack::PackedShape;

/// Bytes of a matrix `[rows, cols]` in the form that the fast kernels read, its scales as the format usually has them.
pub fn packed_bytes(format: Format, rows: usize, cols: usize) -> usize {
    let view = TensorView { name: String::new(), rows, cols, format, bytes: &[], scales: Scales::None };
    let scales = if matches!(format, Format::Fp8E4M3 | Format::Nvfp4) { rows * 4 } else { 0 };
    PackedShape::of(&view).bytes() + scales
}

/// Bytes of an activation buffer; `half` where inputs of products are bf16.
pub fn activation_bytes(spec: &ActSpec, half: bool) -> usize {
    let bytes = if half && spec.kind == ActKind::Input { 2 } else { 4 };
    stride(spec.width).saturating_mul(spec.max_rows).saturating_mul(bytes)
}
