//! Weight matrices as the backend holds them.
//!
//! Weights stay in the bytes of their file format and are decoded a tile of rows at a time. The trait lends
//! views for the length of a call only, so the bytes are copied into owned memory; use in place from a memory
//! map needs a promise that the signature does not give.

use lapidary_formats::{Format, Scales, TensorView};
use lapidary_ops::{Error, Result};

use crate::memory::Aligned;

/// A matrix of stacked parts, `[rows, cols]` = `[outputs, inputs]`.
#[derive(Debug)]
pub(crate) struct Matrix {
    /// Outputs of all parts.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The parts in order.
    pub parts: Vec<Part>,
}

/// Consecutive rows of a matrix that share a format.
#[derive(Debug)]
pub(crate) struct Part {
    /// Row of the matrix that is this part's first.
    pub first_row: usize,
    /// The weights.
    pub weights: FileRows,
}

impl Matrix {
    /// Copies and checks the parts.
    pub fn new(parts: &[TensorView<'_>]) -> Result<Matrix> {
        let Some(first) = parts.first() else {
            return Err(Error::Tensor { tensor: "matrix".into(), reason: "has no parts".into() });
        };
        let mut matrix = Matrix { rows: 0, cols: first.cols, parts: Vec::with_capacity(parts.len()) };
        for part in parts {
            if part.cols != first.cols {
                let reason = format!("has {} columns, {} has {}", part.cols, first.name, first.cols);
                return Err(Error::Tensor { tensor: part.name.clone(), reason });
            }
            matrix.parts.push(Part { first_row: matrix.rows, weights: FileRows::new(part)? });
            matrix.rows += part.rows;
        }
        Ok(matrix)
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|p| p.weights.bytes()).sum()
    }

    /// The part that holds row `row`.
    ///
    /// # Panics
    /// When the matrix has no such row.
    pub fn part_of(&self, row: usize) -> &Part {
        assert!(row < self.rows, "row {row} of a matrix of {}", self.rows);
        let after = self.parts.partition_point(|p| p.first_row <= row);
        &self.parts[after - 1]
    }

    /// Decodes row `row`.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        let part = self.part_of(row);
        part.weights.decode_row(row - part.first_row, out);
    }
}

/// Rows in the bytes of their file format.
#[derive(Debug)]
pub(crate) struct FileRows {
    /// Points into `codes` and `block_scales`, which live and stay where they are as long as this does.
    view: TensorView<'static>,
    codes: Aligned,
    block_scales: Aligned,
}

impl FileRows {
    fn new(view: &TensorView<'_>) -> Result<FileRows> {
        lapidary_formats::validate(view)
            .map_err(|e| Error::Tensor { tensor: view.name.clone(), reason: e.to_string() })?;
        let codes = Aligned::copy_of(view.bytes, &view.name)?;
        let block_scales = match &view.scales {
            Scales::Nvfp4 { blocks, .. } => Aligned::copy_of(blocks, &view.name)?,
            Scales::Group32Bf16(bytes) => Aligned::copy_of(bytes, &view.name)?,
            _ => Aligned::zeroed(0, &view.name)?,
        };
        // SAFETY: `Aligned` memory never moves, is not written after this, and is freed only when `FileRows` is
        // dropped. The view is private and lent out with the lifetime of `&self` only.
        let own = |a: &Aligned| unsafe { std::slice::from_raw_parts(a.start().cast_const(), a.len()) };
        let scales = match &view.scales {
            Scales::None => Scales::None,
            Scales::Tensor(s) => Scales::Tensor(*s),
            Scales::Row(s) => Scales::Row(s.clone()),
            Scales::Block128 { values, first_row } => {
                Scales::Block128 { values: values.clone(), first_row: *first_row }
            }
            Scales::Nvfp4 { tensor, .. } => Scales::Nvfp4 { blocks: own(&block_scales), tensor: *tensor },
            Scales::Group32Bf16(_) => Scales::Group32Bf16(own(&block_scales)),
        };
        let view = TensorView {
            name: view.name.clone(),
            rows: view.rows,
            cols: view.cols,
            format: view.format,
            bytes: own(&codes),
            scales,
        };
        Ok(FileRows { view, codes, block_scales })
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.view.rows
    }

    fn bytes(&self) -> usize {
        let scales = match &self.view.scales {
            Scales::Row(s) => s.len() * size_of::<f32>(),
            Scales::Block128 { values, .. } => values.len() * size_of::<f32>(),
            _ => 0,
        };
        self.codes.len() + self.block_scales.len() + scales
    }

    /// Decodes row `row` exactly.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        lapidary_formats::decode_row(&self.view, row, out);
    }

    /// Rows `first .. first + rows` as they stand in memory, where they are float32 already.
    pub fn floats(&self, first: usize, rows: usize) -> Option<&[f32]> {
        if self.view.format != Format::F32 || cfg!(target_endian = "big") {
            return None;
        }
        let row_bytes = self.view.cols * size_of::<f32>();
        let bytes = &self.view.bytes[first * row_bytes..(first + rows) * row_bytes];
        // SAFETY: every bit pattern is a float32; the prefix and suffix are checked to be empty.
        let (before, floats, after) = unsafe { bytes.align_to::<f32>() };
        (before.is_empty() && after.is_empty()).then_some(floats)
    }
}
