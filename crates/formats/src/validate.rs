//! Everything that can be known to be wrong with a matrix before it is used.
//!
//! The guarantee: a view that passes decodes to finite float32 in every row. Codes are only read where the
//! format has codes that aren't finite (FP8, F32, F16, BF16) or where a tensor or row scale is zero; block
//! formats are read at their scales. The work is one pass over the bytes; large matrices can be checked in
//! parallel by [`TensorView::slice_rows`].

use half::{bf16, f16};

use crate::fp8::e4m3_to_f32;
use crate::{Format, FormatError, Scales, TensorView, decode_codes};

/// Checks lengths, scales and codes of a matrix.
///
/// # Errors
/// The first contradiction found: an empty or unaddressable shape, a row that isn't whole blocks, a byte or
/// scale count that contradicts the shape, scales of the wrong kind, a scale that isn't finite (beside the codes
/// or inside a block) or overflows float32 with its codes, a zero tensor or row scale over codes that aren't
/// zero (a zero block scale is legal: a zero block), a value that isn't finite.
pub fn validate(view: &TensorView) -> Result<(), FormatError> {
    check_shape(view)?;
    check_scale_layout(view)?;
    check_outer_scales(view)?;
    match view.format {
        Format::F32 => check_floats::<4>(view, |b| f32::from_le_bytes(b).is_finite()),
        Format::F16 => check_floats::<2>(view, |b| f16::from_le_bytes(b).is_finite()),
        Format::Bf16 => check_floats::<2>(view, |b| bf16::from_le_bytes(b).is_finite()),
        Format::Fp8E4M3 => check_floats::<1>(view, |[b]| b & 0x7F != 0x7F),
        Format::Nvfp4 | Format::Int4G32 => Ok(()),
        Format::Mxfp4 => check_mxfp4(view),
        Format::GgufNvfp4 => check_gguf_nvfp4(view),
        format => check_f16_scales(view, f16_scales(format)),
    }
}

fn check_shape(view: &TensorView) -> Result<(), FormatError> {
    let TensorView { rows, cols, format, .. } = *view;
    let tensor = || view.name.clone();
    if rows == 0 || cols == 0 {
        return Err(FormatError::Empty { tensor: tensor(), rows, cols });
    }
    if !cols.is_multiple_of(format.block_len()) {
        return Err(FormatError::PartialBlock { tensor: tensor(), format, cols });
    }
    let Some(expected) = format.row_bytes(cols).and_then(|bytes| bytes.checked_mul(rows)) else {
        return Err(FormatError::TooLarge { tensor: tensor(), rows, cols });
    };
    let found = view.bytes.len();
    if found != expected {
        return Err(FormatError::ByteLength { tensor: tensor(), format, rows, cols, expected, found });
    }
    Ok(())
}

/// Kind and number of the scales beside the codes.
fn check_scale_layout(view: &TensorView) -> Result<(), FormatError> {
    let TensorView { rows, cols, format, .. } = *view;
    let count = |unit, expected, found| match expected == found {
        true => Ok(()),
        false => Err(FormatError::ScaleCount { tensor: view.name.clone(), unit, expected, found }),
    };
    match (format, &view.scales) {
        (Format::Fp8E4M3 | Format::GgufNvfp4, Scales::Tensor(_)) => Ok(()),
        (Format::Fp8E4M3, Scales::Row(scales)) => count("row scales", rows, scales.len()),
        (Format::Fp8E4M3, Scales::Block128 { values, first_row }) => {
            // The scaled matrix may go on behind this view, so bands beyond the needed ones are legal; a part of
            // one isn't.
            let across = cols.div_ceil(128);
            let needed = first_row.saturating_add(rows).div_ceil(128).saturating_mul(across);
            let whole = values.len().next_multiple_of(across);
            count("128 x 128 block scales", needed.max(whole), values.len())
        }
        (Format::Nvfp4, Scales::Nvfp4 { blocks, .. }) => {
            count("block scales", rows * (cols / 16), blocks.len())
        }
        (Format::Int4G32, Scales::Group32Bf16(bytes)) => {
            count("bytes of bf16 group scales", rows * (cols / 32) * 2, bytes.len())
        }
        (Format::Fp8E4M3 | Format::Nvfp4 | Format::Int4G32, _) => Err(scale_kind(view)),
        (_, Scales::None) => Ok(()),
        _ => Err(scale_kind(view)),
    }
}

fn scale_kind(view: &TensorView) -> FormatError {
    let expected = match view.format {
        Format::Fp8E4M3 => "a tensor scale, row scales or 128 x 128 block scales",
        Format::Nvfp4 => "E4M3 block scales and a tensor scale",
        Format::Int4G32 => "bf16 group scales",
        Format::GgufNvfp4 => "no scales beside the codes, or a tensor scale",
        _ => "no scales beside the codes",
    };
    let found = match view.scales {
        Scales::None => "no scales beside the codes",
        Scales::Tensor(_) => "a tensor scale",
        Scales::Row(_) => "row scales",
        Scales::Block128 { .. } => "128 x 128 block scales",
        Scales::Nvfp4 { .. } => "E4M3 block scales and a tensor scale",
        Scales::Group32Bf16(_) => "bf16 group scales",
    };
    FormatError::ScaleKind { tensor: view.name.clone(), format: view.format, expected, found }
}

/// Values of the scales beside the codes.
fn check_outer_scales(view: &TensorView) -> Result<(), FormatError> {
    // The largest magnitude that a scale multiplies.
    let reach = match view.format {
        Format::Nvfp4 | Format::GgufNvfp4 => 6.0 * 448.0,
        Format::Int4G32 => 8.0,
        _ => 448.0,
    };
    let usable = |scale: f32| (scale * reach).is_finite();
    match &view.scales {
        Scales::None => {}
        Scales::Tensor(scale) | Scales::Nvfp4 { tensor: scale, .. } => {
            if !usable(*scale) {
                return Err(bad_scale(view, 0, 0, "of the tensor", *scale));
            }
            if *scale == 0.0
                && let Some(row) = (0..view.rows).find(|&row| has_code(view, row))
            {
                return Err(FormatError::ZeroScale { tensor: view.name.clone(), row, scale: "tensor" });
            }
        }
        Scales::Row(scales) => {
            for (row, &scale) in scales.iter().enumerate() {
                if !usable(scale) {
                    return Err(bad_scale(view, row, 0, "of the row", scale));
                }
                if scale == 0.0 && has_code(view, row) {
                    return Err(FormatError::ZeroScale { tensor: view.name.clone(), row, scale: "row" });
                }
            }
        }
        Scales::Block128 { values, first_row } => {
            let across = view.cols.div_ceil(128);
            for band in first_row / 128..(first_row + view.rows).div_ceil(128) {
                for (block, &scale) in values[band * across..][..across].iter().enumerate() {
                    if !usable(scale) {
                        let row = (band * 128).saturating_sub(*first_row);
                        return Err(bad_scale(view, row, block * 128, "of the 128 x 128 block", scale));
                    }
                }
            }
        }
        Scales::Group32Bf16(bytes) => {
            let scale = |b: &[u8; 2]| bf16::from_le_bytes(*b).to_f32();
            let groups = bytes.as_chunks::<2>().0;
            if let Some(i) = groups.iter().position(|b| !usable(scale(b))) {
                let per_row = view.cols / 32;
                return Err(bad_scale(
                    view,
                    i / per_row,
                    i % per_row * 32,
                    "of the group",
                    scale(&groups[i]),
                ));
            }
        }
    }
    if let Scales::Nvfp4 { blocks, .. } = &view.scales
        && let Some(i) = first_match(blocks.as_chunks::<1>().0, |[b]| b & 0x7F == 0x7F)
    {
        let per_row = view.cols / 16;
        return Err(bad_scale(view, i / per_row, i % per_row * 16, "of the block", e4m3_to_f32(blocks[i])));
    }
    Ok(())
}

/// Whether a row of an FP8, NVFP4 or GGUF NVFP4 matrix has a code that isn't zero.
fn has_code(view: &TensorView, row: usize) -> bool {
    let bytes = &view.bytes[row * view.row_bytes()..][..view.row_bytes()];
    match view.format {
        Format::Nvfp4 => bytes.iter().any(|b| b & 0x77 != 0),
        Format::GgufNvfp4 => bytes.as_chunks::<36>().0.iter().flat_map(|b| &b[4..]).any(|b| b & 0x77 != 0),
        _ => bytes.iter().any(|b| b & 0x7F != 0),
    }
}

fn check_floats<const N: usize>(
    view: &TensorView,
    finite: impl Fn([u8; N]) -> bool,
) -> Result<(), FormatError> {
    let codes = view.bytes.as_chunks::<N>().0;
    let Some(i) = first_match(codes, |code| !finite(code)) else { return Ok(()) };
    let mut value = [0.0];
    decode_codes(view.format, &codes[i], &mut value);
    Err(FormatError::BadValue {
        tensor: view.name.clone(),
        row: i / view.cols,
        col: i % view.cols,
        value: value[0],
    })
}

/// Names and offsets of the f16 scales in a block.
fn f16_scales(format: Format) -> &'static [(&'static str, usize)] {
    match format {
        Format::Q4_0 | Format::Q5_0 | Format::Q8_0 | Format::Iq4Nl | Format::Iq4Xs => &[("d", 0)],
        Format::Q4_1 | Format::Q5_1 => &[("d", 0), ("m", 2)],
        Format::Q4K | Format::Q5K => &[("d", 0), ("dmin", 2)],
        Format::Q2K => &[("d", 80), ("dmin", 82)],
        Format::Q3K => &[("d", 108)],
        Format::Q6K => &[("d", 208)],
        _ => &[],
    }
}

fn check_f16_scales(view: &TensorView, scales: &[(&'static str, usize)]) -> Result<(), FormatError> {
    let scale = |block: &[u8], offset: usize| f16::from_le_bytes([block[offset], block[offset + 1]]);
    for (i, block) in view.bytes.chunks_exact(view.format.block_bytes()).enumerate() {
        for &(name, offset) in scales {
            if !scale(block, offset).is_finite() {
                return Err(bad_block(view, i, name, scale(block, offset).to_string()));
            }
        }
    }
    Ok(())
}

fn check_mxfp4(view: &TensorView) -> Result<(), FormatError> {
    for (i, block) in view.bytes.as_chunks::<17>().0.iter().enumerate() {
        // 253 and 254 are numbers, but 2^125 times the doubled code 12 overflows.
        if block[0] >= 253 {
            let value =
                if block[0] == 255 { "NaN".into() } else { format!("2^{}", i32::from(block[0]) - 127) };
            return Err(bad_block(view, i, "e", value));
        }
    }
    Ok(())
}

fn check_gguf_nvfp4(view: &TensorView) -> Result<(), FormatError> {
    for (i, block) in view.bytes.as_chunks::<36>().0.iter().enumerate() {
        for (s, &scale) in block[..4].iter().enumerate() {
            if scale >= 0x7F {
                let value =
                    if scale & 0x7F == 0x7F { "NaN".into() } else { format!("signed ({scale:#04x})") };
                let (row, col) = block_position(view, i);
                return Err(bad_scale(view, row, col + 16 * s, "d", value));
            }
        }
    }
    Ok(())
}

fn bad_block(view: &TensorView, block: usize, scale: &'static str, value: String) -> FormatError {
    let (row, col) = block_position(view, block);
    bad_scale(view, row, col, scale, value)
}

fn bad_scale(
    view: &TensorView,
    row: usize,
    col: usize,
    scale: &'static str,
    value: impl ToString,
) -> FormatError {
    FormatError::BadScale { tensor: view.name.clone(), row, col, scale, value: value.to_string() }
}

/// Row and first column of a block.
fn block_position(view: &TensorView, block: usize) -> (usize, usize) {
    let per_row = view.cols / view.format.block_len();
    (block / per_row, block % per_row * view.format.block_len())
}

/// Position of the first item that matches. Runs are tested without an early exit, which vectorises.
fn first_match<const N: usize>(items: &[[u8; N]], matches: impl Fn([u8; N]) -> bool) -> Option<usize> {
    const RUN: usize = 4096;
    let run = items.chunks(RUN).position(|run| run.iter().fold(false, |any, &item| any | matches(item)))?;
    items[run * RUN..].iter().position(|&item| matches(item)).map(|i| run * RUN + i)
}
