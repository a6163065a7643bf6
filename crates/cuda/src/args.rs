//! What kernels of several families take: the Rust side of kernels/common/args.cuh, decode.cuh and kv.cuh.

use lapidary_ops::{Activation, KvFormat};

use crate::driver::DevPtr;

/// An activation: rows of `width` values, `stride` values apart.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Rows {
    /// First value of the first row.
    pub ptr: DevPtr,
    /// Values from one row to the next.
    pub stride: i32,
    /// Values of a row.
    pub width: i32,
    /// 1 for bf16 values, 0 for float32.
    pub bf16: i32,
    /// Keeps the size a multiple of 8.
    pub pad: i32,
}

impl Rows {
    /// Float32 rows without gaps.
    pub fn floats(ptr: DevPtr, width: usize) -> Rows {
        Rows { ptr, stride: width as i32, width: width as i32, bf16: 0, pad: 0 }
    }

    /// The part from column `first` on, `width` wide.
    pub fn columns(self, first: usize, width: usize) -> Rows {
        let bytes = if self.bf16 == 1 { 2 } else { 4 };
        Rows { ptr: self.ptr.at(first * bytes), width: width as i32, ..self }
    }
}

/// Where the uploaded batch's columns are on the device.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Columns {
    /// Token of each row.
    pub tokens: DevPtr,
    /// Id for the per-layer table.
    pub per_layer_tokens: DevPtr,
    /// Absolute position.
    pub positions: DevPtr,
    /// By group: last visible key + 1.
    pub visible_to: [DevPtr; 2],
    /// By group: the page of block `b` is `pages[table[row] + b]`.
    pub table: [DevPtr; 2],
    /// By group: page numbers.
    pub pages: [DevPtr; 2],
    /// By group: `page * 32 + place` that the row writes, or -1.
    pub cell: [DevPtr; 2],
    /// Which of the given embeddings, or -1.
    pub soft: DevPtr,
    /// The given embeddings.
    pub soft_values: DevPtr,
    /// Rows whose logits are wanted.
    pub heads: DevPtr,
    /// Steering set, or -1; nothing where no row is steered.
    pub steer: DevPtr,
    /// By head row how its token is drawn ([`parameters`](crate::kernels::draw::parameters)); nothing where none is.
    pub draws: DevPtr,
}

/// The pool of one layer.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Pool {
    /// First byte of page 0.
    pub ptr: DevPtr,
    /// Key/value heads.
    pub kv_heads: i32,
    /// Values of a head.
    pub head_dim: i32,
    /// [`kv_code`].
    pub format: i32,
    /// Bytes of one head's key or value at one position.
    pub row_bytes: i32,
    /// 1 for the layout of the fast kernels ([`PageShape`](crate::kernels::attn_decode::PageShape)).
    pub fast: i32,
    /// FP8: what a stored key, and a stored value, is multiplied with; powers of two.
    pub scales: [f32; 2],
    /// Keeps the size a multiple of 8.
    pub pad: i32,
}

/// A matrix: its parts, in ascending order of rows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MatrixArgs {
    /// An array of [`PartArgs`].
    pub parts: DevPtr,
    /// Parts.
    pub count: i32,
    /// Outputs.
    pub rows: i32,
    /// Inputs.
    pub cols: i32,
    /// Keeps the size a multiple of 8.
    pub pad: i32,
}

/// Rows of one format under one kind of scale, in the bytes of their file.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PartArgs {
    /// `[rows, row_bytes]`.
    pub codes: DevPtr,
    /// Scales by blocks; null where the format has none outside its codes.
    pub scales: DevPtr,
    /// One float a row, or null.
    pub row_scale: DevPtr,
    /// Bytes of a row of codes.
    pub row_bytes: i64,
    /// Row of the matrix that is the part's first.
    pub first_row: i32,
    /// Rows.
    pub rows: i32,
    /// Place of the format in [`lapidary_ops::Format::ALL`].
    pub format: i32,
    /// FP8 with a scale for 128 x 128 values: blocks across; 0 otherwise.
    pub block_cols: i32,
    /// The same: row of the scaled matrix that is the part's first.
    pub first_scaled_row: i32,
    /// Keeps the size a multiple of 8.
    pub pad: i32,
}

/// The number that kernels know an activation function by.
pub fn activation_code(f: Activation) -> i32 {
    match f {
        Activation::GeluTanh => 0,
        Activation::Silu => 1,
    }
}

/// The number that kernels know an element type of keys and values by.
pub fn kv_code(format: KvFormat) -> i32 {
    match format {
        KvFormat::F32 => 0,
        KvFormat::F16 => 1,
        KvFormat::Bf16 => 2,
        KvFormat::Q8_0 => 3,
        KvFormat::Fp8 => 4,
    }
}
