//! Reading packed bytes back: what the kernels' decoding amounts to, in float32 and one element at a time. Tests hold
//! packing to the formats with it.

use half::{bf16, f16};
use lapidary_formats::codec::k_quant::unpack_scales;
use lapidary_formats::fp4::e2m1_to_f32;
use lapidary_formats::fp8::e4m3_to_f32;

use super::form::{Form, PackedShape};
use super::strips::{NARROW, STRIP_ROWS, SUB16};

/// One row of a packed matrix as float32, without the scale of [`row_scales`](super::row_scales).
///
/// # Panics
/// When the row or the bytes do not fit the shape.
pub fn decode_row(shape: PackedShape, packed: &[u8], row: usize) -> Vec<f32> {
    assert_eq!(packed.len(), shape.bytes());
    let strip = &packed[row / STRIP_ROWS * shape.strip_bytes()..][..shape.strip_bytes()];
    let inputs = shape.form.chunk_inputs();
    let chunk = |k: usize| &strip[k / inputs * shape.form.chunk_bytes()..][..shape.form.chunk_bytes()];
    (0..shape.cols).map(|k| element(shape.form, chunk(k), row % STRIP_ROWS, k % inputs)).collect()
}

fn element(form: Form, c: &[u8], row: usize, k: usize) -> f32 {
    let (g, r) = (row % 8, row / 8);
    let word = |at: usize| u32::from_le_bytes([c[at], c[at + 1], c[at + 2], c[at + 3]]);
    let half = |at: usize| f16::from_le_bytes([c[at], c[at + 1]]).to_f32();
    // Where a lane's order of 64 inputs puts k: block, lane of the quad, word, place in the word's four.
    let narrow = (k % 64 / 32, k % 32 / 8, k % 8 / 4, k % 4);
    let nibble = || {
        let (h, t, _, _) = narrow;
        let i = k % 8;
        let w = word(k / 64 * 512 + (4 * g + t) * 16 + (h * 2 + r) * 4);
        (w >> (4 * (i >> 1) + 16 * (i & 1)) & 15) as f32
    };
    let byte = |[_, st, si]: [usize; 3]| {
        let inside = k % 32;
        let (h, i, t) = (k % 64 / 32, inside / si % 2, inside / st % 4);
        let at = k / 64 * 1024 + h * 512 + (4 * g + t) * 16 + (r * 2 + i) * 4;
        f32::from(c[at + [0, 2, 1, 3][k % 4]])
    };
    match form {
        Form::Bf16 => {
            let (h, t, j, _) = narrow;
            let at = (2 * h + j) * 512 + (4 * g + t) * 16 + (k % 4 / 2 * 2 + r) * 4 + k % 2 * 2;
            bf16::from_le_bytes([c[at], c[at + 1]]).to_f32()
        }
        Form::Fp8 | Form::Fp8Block => {
            let (h, t, j, e) = narrow;
            let value = e4m3_to_f32(c[r * 512 + (4 * g + t) * 16 + (2 * h + j) * 4 + [1, 3, 0, 2][e]]);
            if form == Form::Fp8 {
                return value;
            }
            let second = row as i32 >= word(1032) as i32;
            value * f32::from_bits(word(1024 + 4 * usize::from(second)))
        }
        Form::Nvfp4 => {
            let (t, w) = (k / 16, k % 16 / 8);
            let code = word((4 * g + t) * 16 + (r * 2 + w) * 4) >> (k % 8 / 2 * 4 + k % 2 * 16) & 15;
            e2m1_to_f32(code as u8) * e4m3_to_f32(c[512 + (4 * g + t) * 2 + r])
        }
        Form::Int4 => (nibble() - 8.0) * half(512 + g * 8 + narrow.0 * 4 + r * 2),
        Form::Int4Bf16 => {
            let at = 512 + g * 8 + narrow.0 * 4 + r * 2;
            (nibble() - 8.0) * bf16::from_le_bytes([c[at], c[at + 1]]).to_f32()
        }
        Form::Int8 => (byte(NARROW) - 128.0) * half(1024 + g * 8 + narrow.0 * 4 + r * 2),
        Form::Int4Min | Form::Int8Min => {
            let (q, scales) = if form == Form::Int4Min { (nibble(), 512) } else { (byte(NARROW), 1024) };
            let at = scales + g * 16 + narrow.0 * 8 + r * 4;
            half(at) * q + half(at + 2)
        }
        Form::Q4K | Form::Q5K => {
            let (q, headers) = if form == Form::Q4K { (nibble(), 2048) } else { (byte(NARROW), 4096) };
            let at = headers + row * 16;
            let (scales, minimums) = unpack_scales(c[at + 4..at + 16].as_array().expect("twelve bytes"));
            let j = k / 32;
            half(at) * f32::from(scales[j]) * q - half(at + 2) * f32::from(minimums[j])
        }
        Form::Sub16 => {
            let scale = f32::from(c[4096 + k / 64 * 64 + row * 4 + k % 64 / 16]) - 128.0;
            half(4352 + 2 * row) * scale * (byte(SUB16) - 128.0)
        }
    }
}
