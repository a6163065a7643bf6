//! What can be wrong with a matrix or with a request to encode one.

use crate::Format;

/// A matrix that contradicts its format, or values that a format can't hold.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FormatError {
    /// Rows or columns are zero.
    #[error("tensor {tensor}: shape {rows} x {cols} is empty; expected at least one row and one column")]
    Empty {
        /// The matrix.
        tensor: String,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
    },
    /// A row isn't a whole number of blocks.
    #[error("tensor {tensor}: {cols} columns; {format} needs a multiple of {}", format.block_len())]
    PartialBlock {
        /// The matrix.
        tensor: String,
        /// Its format.
        format: Format,
        /// Its columns.
        cols: usize,
    },
    /// The shape needs more bytes than can be addressed.
    #[error("tensor {tensor}: shape {rows} x {cols} is too large to address")]
    TooLarge {
        /// The matrix.
        tensor: String,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
    },
    /// The codes' length contradicts the shape.
    #[error("tensor {tensor}: {found} bytes; {rows} x {cols} in {format} takes {expected}")]
    ByteLength {
        /// The matrix.
        tensor: String,
        /// Its format.
        format: Format,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
        /// Bytes that the shape takes.
        expected: usize,
        /// Bytes that are there.
        found: usize,
    },
    /// Scales of a kind that the format doesn't use, or none where it needs them.
    #[error("tensor {tensor}: {found}; {format} needs {expected}")]
    ScaleKind {
        /// The matrix.
        tensor: String,
        /// Its format.
        format: Format,
        /// The kinds that the format takes.
        expected: &'static str,
        /// The kind that is there.
        found: &'static str,
    },
    /// Too few or too many scales.
    #[error("tensor {tensor}: {found} {unit}; the shape needs {expected}")]
    ScaleCount {
        /// The matrix.
        tensor: String,
        /// What is counted, such as "row scales".
        unit: &'static str,
        /// How many the shape needs.
        expected: usize,
        /// How many are there.
        found: usize,
    },
    /// A scale is NaN, infinite, reserved, or so large that its codes overflow float32.
    #[error(
        "tensor {tensor}, row {row}, column {col}: scale {scale} is {value}; expected a finite multiplier"
    )]
    BadScale {
        /// The matrix.
        tensor: String,
        /// First row that the scale covers.
        row: usize,
        /// First column that the scale covers.
        col: usize,
        /// Which scale, such as "d" or "weight_scale".
        scale: &'static str,
        /// What is there.
        value: String,
    },
    /// A tensor or row scale is zero although codes under it aren't: a scale that was never filled in.
    #[error("tensor {tensor}, row {row}: the {scale} scale is zero over codes that aren't")]
    ZeroScale {
        /// The matrix.
        tensor: String,
        /// First row with a code that isn't zero.
        row: usize,
        /// "tensor" or "row".
        scale: &'static str,
    },
    /// A code or value is NaN or infinite.
    #[error("tensor {tensor}, row {row}, column {col}: value is {value}; expected a finite number")]
    BadValue {
        /// The matrix.
        tensor: String,
        /// Its row.
        row: usize,
        /// Its column.
        col: usize,
        /// What is there.
        value: f32,
    },
    /// The number of values to encode contradicts the shape.
    #[error("{found} values to encode; {rows} x {cols} is {expected}")]
    ValueCount {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Their product, saturated.
        expected: usize,
        /// Values given.
        found: usize,
    },
    /// A value to encode lies beyond what the format reaches without a tensor scale.
    #[error(
        "row {row}, column {col}: {value} is beyond {limit}, the largest magnitude of {format}; use a tensor scale"
    )]
    OutOfRange {
        /// The format.
        format: Format,
        /// Row of the value.
        row: usize,
        /// Column of the value.
        col: usize,
        /// The value.
        value: f32,
        /// The format's largest magnitude.
        limit: f32,
    },
    /// The format can't carry the asked placement of scales.
    #[error("{format} can't be encoded with {scaling} scales; use {expected}")]
    Scaling {
        /// The format.
        format: Format,
        /// What was asked.
        scaling: &'static str,
        /// What it takes.
        expected: &'static str,
    },
}
