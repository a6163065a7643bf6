//! A borrowed matrix: codes, shape and the scales that live outside the codes.

use crate::Format;

/// One matrix of a checkpoint, `y = x W^T` with `W` of shape `[rows, cols]` = `[outputs, inputs]`.
///
/// Vectors are matrices of one row. The bytes usually point into a memory-mapped file.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    /// The name in the file, for messages.
    pub name: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs; a whole number of [`Format::block_len`].
    pub cols: usize,
    /// How `bytes` is laid out.
    pub format: Format,
    /// The codes, row after row, `rows * format.row_bytes(cols)` bytes.
    pub bytes: &'a [u8],
    /// Scales outside the codes.
    pub scales: Scales<'a>,
}

/// Scales that are stored beside the codes. A decoded value is `code * scale` (and times `tensor` for NVFP4).
#[derive(Clone, Debug)]
pub enum Scales<'a> {
    /// None, or inside the blocks.
    None,
    /// One multiplier for the matrix: FP8, and GGUF NVFP4 where the file has a scale tensor beside the weights.
    Tensor(f32),
    /// One multiplier a row.
    Row(Vec<f32>),
    /// One multiplier for each `128 x 128` block, row-major `[ceil(rows / 128), ceil(cols / 128)]`; the last
    /// block of either side may be ragged. `first_row` is where this view starts inside the scaled matrix,
    /// so that a slice of rows need not begin at a block border.
    Block128 {
        /// The multipliers of the whole matrix.
        values: Vec<f32>,
        /// Row of the scaled matrix that this view's row 0 is.
        first_row: usize,
    },
    /// NVFP4: one E4M3 byte for each 16 inputs, `[rows, cols / 16]`, and one multiplier for the matrix.
    Nvfp4 {
        /// E4M3 block scales.
        blocks: &'a [u8],
        /// The matrix multiplier (files may hold its reciprocal; loading turns it into a multiplier).
        tensor: f32,
    },
    /// One little-endian bf16 for each 32 inputs, `[rows, cols / 32]`.
    Group32Bf16(&'a [u8]),
}

impl<'a> TensorView<'a> {
    /// Bytes of one row of codes.
    pub fn row_bytes(&self) -> usize {
        self.format.row_bytes(self.cols).expect("columns are a whole number of blocks")
    }

    /// The rows `first .. first + rows` of this view, scales included.
    ///
    /// # Panics
    /// When the range leaves the matrix.
    pub fn slice_rows(&self, first: usize, rows: usize) -> TensorView<'a> {
        assert!(first + rows <= self.rows, "row range leaves {}", self.name);
        let row_bytes = self.row_bytes();
        let scales = match &self.scales {
            Scales::None => Scales::None,
            Scales::Tensor(s) => Scales::Tensor(*s),
            Scales::Row(s) => Scales::Row(s[first..first + rows].to_vec()),
            Scales::Block128 { values, first_row } => {
                Scales::Block128 { values: values.clone(), first_row: first_row + first }
            }
            Scales::Nvfp4 { blocks, tensor } => {
                let n = self.cols / 16;
                Scales::Nvfp4 { blocks: &blocks[first * n..(first + rows) * n], tensor: *tensor }
            }
            Scales::Group32Bf16(s) => {
                let n = self.cols / 32 * 2;
                Scales::Group32Bf16(&s[first * n..(first + rows) * n])
            }
        };
        TensorView {
            name: self.name.clone(),
            rows,
            cols: self.cols,
            format: self.format,
            bytes: &self.bytes[first * row_bytes..(first + rows) * row_bytes],
            scales,
        }
    }
}
