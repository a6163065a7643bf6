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

/// Bytes of the float32 copy that is kept of a matrix of few rows, since a router's product is in float32.
pub fn float_copy_bytes(rows: usize, cols: usize) -> usize {
    if rows <= crate::fast::ROUTER_ROWS { rows * cols * 4 } else { 0 }
}

/// What the driver and this backend take beside all that is planned by shape: code of the kernels (some 60 MiB once all are
/// loaded), 64 recorded passes of some 700 nodes (a kilobyte or two each), the batch, and a block of each arena that is
/// begun and not filled.
const FIXED: usize = 512 << 20;

/// Bytes between kernels: queries in bf16, three products in planes, parts of attention for 128 rows, and [`FIXED`].
pub fn kernel_bytes(rows: usize, queries: usize, widest: usize) -> usize {
    use crate::kernels::skinny_gemm::{MAX_PLANES, MAX_ROWS};
    let planes = 3 * MAX_PLANES * MAX_ROWS * stride(widest) * 4;
    // A head's parts are float32 and at most eight for each of its values, in clusters that fill the device once.
    let attention = rows.min(128).saturating_mul(queries).saturating_mul(4);
    rows.saturating_mul(queries).saturating_mul(2).saturating_add(planes).saturating_add(attention) + FIXED
}

/// Bytes of an activation buffer; `half` where inputs of products are bf16.
pub fn activation_bytes(spec: &ActSpec, half: bool) -> usize {
    let bytes = if half && spec.kind == ActKind::Input { 2 } else { 4 };
    stride(spec.width).saturating_mul(spec.max_rows).saturating_mul(bytes)
}
