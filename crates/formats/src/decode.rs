//! Any row of any view as float32.

use half::bf16;

use crate::codec::*;
use crate::fp8::e4m3_to_f32;
use crate::{Format, Scales, TensorView};

/// Decodes one row of `view` into `out`, scales of every kind applied.
///
/// Codes are decoded as [`decode_codes`] does and multiplied by the scales beside them, one float32 product for
/// each scale. NVFP4 is `(code * block) * tensor`; the first product is exact.
///
/// # Panics
/// When the row lies outside the matrix, `out` isn't one row long, or the view's lengths contradict its shape
/// (which [`validate`](crate::validate) reports as an error).
pub fn decode_row(view: &TensorView, row: usize, out: &mut [f32]) {
    assert!(row < view.rows, "row {row} lies outside the {} rows of {}", view.rows, view.name);
    assert_eq!(out.len(), view.cols, "the output is one row of {}", view.name);
    let row_bytes = view.row_bytes();
    decode_codes(view.format, &view.bytes[row * row_bytes..(row + 1) * row_bytes], out);
    match &view.scales {
        Scales::None => {}
        Scales::Tensor(scale) => multiply(out, *scale),
        Scales::Row(scales) => multiply(out, scales[row]),
        Scales::Block128 { values, first_row } => {
            let blocks = view.cols.div_ceil(128);
            let scales = &values[(first_row + row) / 128 * blocks..][..blocks];
            out.chunks_mut(128).zip(scales).for_each(|(block, &scale)| multiply(block, scale));
        }
        Scales::Nvfp4 { blocks, tensor } => {
            let scales = &blocks[row * (view.cols / 16)..][..view.cols / 16];
            for (block, &scale) in out.chunks_mut(16).zip(scales) {
                multiply(block, e4m3_to_f32(scale));
                multiply(block, *tensor);
            }
        }
        Scales::Group32Bf16(bytes) => {
            let scales = &bytes[row * (view.cols / 32) * 2..][..view.cols / 32 * 2];
            for (group, &scale) in out.chunks_mut(32).zip(scales.as_chunks::<2>().0) {
                multiply(group, bf16::from_le_bytes(scale).to_f32());
            }
        }
    }
}

/// Decodes a run of whole blocks into `out`.
///
/// For the formats that carry their scales in the blocks this is the final value. For those whose scales lie
/// elsewhere it is the code's own number: E4M3 or E2M1 as float32, and `code - 8` for INT4.
///
/// # Panics
/// When `bytes` isn't exactly as many whole blocks as `out` has.
pub fn decode_codes(format: Format, bytes: &[u8], out: &mut [f32]) {
    match format {
        Format::F32 => blocks(bytes, out, float::decode_f32),
        Format::F16 => blocks(bytes, out, float::decode_f16),
        Format::Bf16 => blocks(bytes, out, float::decode_bf16),
        Format::Fp8E4M3 => blocks(bytes, out, fp8::decode),
        Format::Nvfp4 => blocks(bytes, out, nvfp4::decode),
        Format::Int4G32 => blocks(bytes, out, int4_g32::decode),
        Format::Q4_0 => blocks(bytes, out, q4_0::decode),
        Format::Q4_1 => blocks(bytes, out, q4_1::decode),
        Format::Q5_0 => blocks(bytes, out, q5_0::decode),
        Format::Q5_1 => blocks(bytes, out, q5_1::decode),
        Format::Q8_0 => blocks(bytes, out, q8_0::decode),
        Format::Q2K => blocks(bytes, out, q2_k::decode),
        Format::Q3K => blocks(bytes, out, q3_k::decode),
        Format::Q4K => blocks(bytes, out, q4_k::decode),
        Format::Q5K => blocks(bytes, out, q5_k::decode),
        Format::Q6K => blocks(bytes, out, q6_k::decode),
        Format::Iq4Nl => blocks(bytes, out, iq4_nl::decode),
        Format::Iq4Xs => blocks(bytes, out, iq4_xs::decode),
        Format::Mxfp4 => blocks(bytes, out, mxfp4::decode),
        Format::GgufNvfp4 => blocks(bytes, out, gguf_nvfp4::decode),
    }
}

#[inline(always)]
fn blocks<const B: usize, const L: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; B], &mut [f32; L]),
) {
    let (bytes, rest) = bytes.as_chunks::<B>();
    let (out, left) = out.as_chunks_mut::<L>();
    assert!(
        rest.is_empty() && left.is_empty() && bytes.len() == out.len(),
        "{} blocks and {} bytes of codes for {} blocks and {} values",
        bytes.len(),
        rest.len(),
        out.len(),
        left.len()
    );
    for (block, out) in bytes.iter().zip(out) {
        decode(block, out);
    }
}

fn multiply(values: &mut [f32], scale: f32) {
    values.iter_mut().for_each(|v| *v *= scale);
}
