//! Float32 matrices to any format.

use crate::codec::*;
use crate::fp4::E2M1_MAX;
use crate::fp8::E4M3_MAX;
use crate::{Format, FormatError, Scales, TensorView, validate};

/// A matrix in a format, with the scales that lie beside the codes.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    /// How `bytes` is laid out.
    pub format: Format,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The codes, row after row.
    pub bytes: Vec<u8>,
    /// Scales outside the codes.
    pub scales: EncodedScales,
}

/// [`Scales`] that own their bytes.
#[derive(Clone, Debug, PartialEq)]
pub enum EncodedScales {
    /// None, or inside the blocks.
    None,
    /// One multiplier for the matrix.
    Tensor(f32),
    /// One multiplier a row.
    Row(Vec<f32>),
    /// One multiplier for each 128 x 128 block, row-major.
    Block128(Vec<f32>),
    /// NVFP4: E4M3 bytes `[rows, cols / 16]` and the matrix multiplier.
    Nvfp4 {
        /// E4M3 block scales.
        blocks: Vec<u8>,
        /// The matrix multiplier.
        tensor: f32,
    },
    /// Little-endian bf16 `[rows, cols / 32]`.
    Group32Bf16(Vec<u8>),
}

impl Encoded {
    /// The matrix as a view under `name`.
    pub fn view(&self, name: impl Into<String>) -> TensorView<'_> {
        let scales = match &self.scales {
            EncodedScales::None => Scales::None,
            EncodedScales::Tensor(scale) => Scales::Tensor(*scale),
            EncodedScales::Row(scales) => Scales::Row(scales.clone()),
            EncodedScales::Block128(values) => Scales::Block128 { values: values.clone(), first_row: 0 },
            EncodedScales::Nvfp4 { blocks, tensor } => Scales::Nvfp4 { blocks, tensor: *tensor },
            EncodedScales::Group32Bf16(bytes) => Scales::Group32Bf16(bytes),
        };
        TensorView {
            name: name.into(),
            rows: self.rows,
            cols: self.cols,
            format: self.format,
            bytes: &self.bytes,
            scales,
        }
    }
}

/// Where the scales go in formats that leave a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// What the format's files usually have: FP8 a scale a row, GGUF NVFP4 none beside the blocks.
    Usual,
    /// One for the matrix: FP8 and GGUF NVFP4.
    Tensor,
    /// One a row: FP8.
    Row,
    /// One for each 128 x 128 block: FP8.
    Block128,
}

/// Encodes a row-major matrix with the format's usual scales.
///
/// # Errors
/// A shape that contradicts the number of values or the format's blocks; a value that isn't finite; values so
/// large that the format's scales or codes overflow (reported as the bad scale or value they would become).
pub fn encode_rows(format: Format, values: &[f32], rows: usize, cols: usize) -> Result<Encoded, FormatError> {
    encode_rows_scaled(format, Scaling::Usual, values, rows, cols)
}

/// [`encode_rows`] with a choice of scales.
///
/// # Errors
/// As [`encode_rows`], and a placement that the format can't carry.
pub fn encode_rows_scaled(
    format: Format,
    scaling: Scaling,
    values: &[f32],
    rows: usize,
    cols: usize,
) -> Result<Encoded, FormatError> {
    let tensor = String::from("to encode");
    if rows == 0 || cols == 0 {
        return Err(FormatError::Empty { tensor, rows, cols });
    }
    if rows.checked_mul(cols) != Some(values.len()) {
        let expected = rows.saturating_mul(cols);
        return Err(FormatError::ValueCount { rows, cols, expected, found: values.len() });
    }
    if format.row_bytes(cols).is_none() {
        return Err(FormatError::PartialBlock { tensor, format, cols });
    }
    if let Some(i) = values.iter().position(|v| !v.is_finite()) {
        return Err(FormatError::BadValue { tensor, row: i / cols, col: i % cols, value: values[i] });
    }
    if format == Format::GgufNvfp4 && scaling == Scaling::Usual {
        let limit = E2M1_MAX * E4M3_MAX;
        if let Some(i) = values.iter().position(|v| v.abs() > limit) {
            return Err(FormatError::OutOfRange {
                format,
                row: i / cols,
                col: i % cols,
                value: values[i],
                limit,
            });
        }
    }
    let (bytes, scales) = match format {
        Format::Fp8E4M3 => encode_fp8(values, rows, cols, scaling),
        Format::GgufNvfp4 if scaling == Scaling::Tensor => {
            let scale = nvfp4::tensor_scale_of(values);
            let scaled: Vec<f32> = values.iter().map(|v| v / scale).collect();
            (blocks(&scaled, gguf_nvfp4::encode), EncodedScales::Tensor(scale))
        }
        _ if scaling != Scaling::Usual => {
            let scaling = scaling.name();
            let expected = if format == Format::GgufNvfp4 { "Usual or Tensor" } else { "Usual" };
            return Err(FormatError::Scaling { format, scaling, expected });
        }
        Format::Nvfp4 => {
            let tensor = nvfp4::tensor_scale_of(values);
            let parts = values.as_chunks().0.iter().map(|block| nvfp4::encode(block, tensor));
            let (codes, blocks): (Vec<[u8; 8]>, Vec<u8>) = parts.unzip();
            (codes.into_flattened(), EncodedScales::Nvfp4 { blocks, tensor })
        }
        Format::Int4G32 => {
            let groups = values.as_chunks().0.iter().map(int4_g32::encode);
            let (codes, scales): (Vec<[u8; 16]>, Vec<[u8; 2]>) =
                groups.map(|(codes, scale)| (codes, scale.to_le_bytes())).unzip();
            (codes.into_flattened(), EncodedScales::Group32Bf16(scales.into_flattened()))
        }
        _ => (encode_blocks(format, values), EncodedScales::None),
    };
    let encoded = Encoded { format, rows, cols, bytes, scales };
    validate(&encoded.view(tensor))?;
    Ok(encoded)
}

impl Scaling {
    fn name(self) -> &'static str {
        match self {
            Scaling::Usual => "Usual",
            Scaling::Tensor => "Tensor",
            Scaling::Row => "Row",
            Scaling::Block128 => "Block128",
        }
    }
}

fn encode_fp8(values: &[f32], rows: usize, cols: usize, scaling: Scaling) -> (Vec<u8>, EncodedScales) {
    match scaling {
        Scaling::Tensor => {
            let scale = fp8::scale_of(values);
            (values.iter().map(|&v| fp8::encode(v, scale)).collect(), EncodedScales::Tensor(scale))
        }
        Scaling::Usual | Scaling::Row => {
            let scales: Vec<f32> = values.chunks(cols).map(fp8::scale_of).collect();
            let rows = values.chunks(cols).zip(&scales);
            let codes = rows.flat_map(|(row, &scale)| row.iter().map(move |&v| fp8::encode(v, scale)));
            (codes.collect(), EncodedScales::Row(scales))
        }
        Scaling::Block128 => {
            let across = cols.div_ceil(128);
            let mut scales = Vec::with_capacity(rows.div_ceil(128) * across);
            let mut block = Vec::with_capacity(128 * 128);
            for band in values.chunks(128 * cols) {
                for start in (0..cols).step_by(128) {
                    block.clear();
                    for row in band.chunks(cols) {
                        block.extend_from_slice(&row[start..cols.min(start + 128)]);
                    }
                    scales.push(fp8::scale_of(&block));
                }
            }
            let code = |(i, &v): (usize, &f32)| {
                let (row, col) = (i / cols, i % cols);
                fp8::encode(v, scales[row / 128 * across + col / 128])
            };
            (values.iter().enumerate().map(code).collect(), EncodedScales::Block128(scales))
        }
    }
}

/// The formats whose codes need nothing beside them.
fn encode_blocks(format: Format, values: &[f32]) -> Vec<u8> {
    match format {
        Format::F32 => blocks(values, float::encode_f32),
        Format::F16 => blocks(values, float::encode_f16),
        Format::Bf16 => blocks(values, float::encode_bf16),
        Format::Q4_0 => blocks(values, q4_0::encode),
        Format::Q4_1 => blocks(values, q4_1::encode),
        Format::Q5_0 => blocks(values, q5_0::encode),
        Format::Q5_1 => blocks(values, q5_1::encode),
        Format::Q8_0 => blocks(values, q8_0::encode),
        Format::Q2K => blocks(values, q2_k::encode),
        Format::Q3K => blocks(values, q3_k::encode),
        Format::Q4K => blocks(values, q4_k::encode),
        Format::Q5K => blocks(values, q5_k::encode),
        Format::Q6K => blocks(values, q6_k::encode),
        Format::Iq4Nl => blocks(values, iq4_nl::encode),
        Format::Iq4Xs => blocks(values, iq4_xs::encode),
        Format::Mxfp4 => blocks(values, mxfp4::encode),
        Format::GgufNvfp4 => blocks(values, gguf_nvfp4::encode),
        Format::Fp8E4M3 | Format::Nvfp4 | Format::Int4G32 => {
            unreachable!("scales of {format} lie beside the codes")
        }
    }
}

fn blocks<const B: usize, const L: usize>(values: &[f32], encode: impl Fn(&[f32; L]) -> [u8; B]) -> Vec<u8> {
    let (blocks, rest) = values.as_chunks::<L>();
    assert!(rest.is_empty(), "rows are whole blocks");
    let mut bytes = Vec::with_capacity(blocks.len() * B);
    blocks.iter().for_each(|block| bytes.extend_from_slice(&encode(block)));
    bytes
}
