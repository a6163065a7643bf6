//! One file a format: its layout drawing, its scalar decoder and, where the project quantises, its encoder.
//!
//! A decoder turns one block of bytes into float32 in exactly the operations, and their order, of the format's
//! definition. For the GGUF formats that is ggml's `dequantize_row_*`, so results agree bit for bit. An encoder
//! turns one block of finite float32 into bytes; it chooses simply, not optimally, and says how in its file.
//! Drawings give a block's bytes from offset 0; multi-byte numbers are little-endian.

pub mod float;
pub mod fp8;
pub mod gguf_nvfp4;
pub mod int4_g32;
pub mod iq4_nl;
pub mod iq4_xs;
pub mod k_quant;
pub mod mxfp4;
pub mod nvfp4;
pub mod q2_k;
pub mod q3_k;
pub mod q4_0;
pub mod q4_1;
pub mod q4_k;
pub mod q5_0;
pub mod q5_1;
pub mod q5_k;
pub mod q6_k;
pub mod q8_0;

use half::f16;

/// The float32 value of the f16 at `offset`.
#[inline]
fn f16_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

/// Stores `value` as f16 at `offset` and returns what was stored.
fn put_f16(block: &mut [u8], offset: usize, value: f32) -> f32 {
    let stored = f16::from_f32(value);
    block[offset..offset + 2].copy_from_slice(&stored.to_le_bytes());
    stored.to_f32()
}

/// The element of largest magnitude with its sign; the first of equals.
fn signed_max(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max: f32, &v| if v.abs() > max.abs() { v } else { max })
}

/// Largest magnitude.
fn abs_max(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max: f32, v| max.max(v.abs()))
}

/// Smallest and largest element.
fn min_max(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| (lo.min(v), hi.max(v)))
}

/// `1 / d`, and 0 for a zero `d`, so that a zero block gets zero codes.
fn reciprocal(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Index of the entry for which `scale * entry` is nearest to `value`; the first of equals.
fn nearest(table: &[i8; 16], scale: f32, value: f32) -> u8 {
    let mut best = (f32::INFINITY, 0);
    for (code, &entry) in table.iter().enumerate() {
        let error = (scale * f32::from(entry) - value).abs();
        if error < best.0 {
            best = (error, code as u8);
        }
    }
    best.1
}
