//! NVFP4 as in safetensors: sixteen E2M1 codes in eight bytes; an E4M3 scale for these sixteen inputs and one
//! float32 multiplier for the matrix lie elsewhere.
//!
//! ```text
//! byte    0      1      2            7
//!      +------+------+------+- - -+-------+
//!      | 1  0 | 3  2 | 5  4 |     | 15 14 |   the even input in the low nibble
//!      +------+------+------+- - -+-------+
//! value = (e2m1(code) * e4m3(block)) * tensor
//! ```
//!
//! The inner product has at most six significant bits, so it is exact and the value is the true product of the
//! three numbers rounded once.

use super::abs_max;
use crate::fp4::{E2M1_MAX, e2m1_from_f32, e2m1_to_f32};
use crate::fp8::{E4M3_MAX, e4m3_from_f32, e4m3_to_f32};

/// The codes' own values, unscaled.
#[inline]
pub fn decode(codes: &[u8; 8], out: &mut [f32; 16]) {
    for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        *pair = [e2m1_to_f32(byte), e2m1_to_f32(byte >> 4)];
    }
}

/// The matrix multiplier that maps the largest magnitude to 6 * 448; 1 for an all-zero matrix.
pub fn tensor_scale_of(values: &[f32]) -> f32 {
    match abs_max(values) {
        0.0 => 1.0,
        max => (max / (E2M1_MAX * E4M3_MAX)).max(f32::MIN_POSITIVE),
    }
}

/// Codes and E4M3 scale of sixteen inputs: the scale maps their largest magnitude to 6, codes are the nearest
/// under the rounded scale. A scale that rounds to zero makes a zero block.
pub fn encode(values: &[f32; 16], tensor: f32) -> ([u8; 8], u8) {
    let block = e4m3_from_f32(abs_max(values) / E2M1_MAX / tensor);
    let scale = e4m3_to_f32(block) * tensor;
    let mut codes = [0; 8];
    if scale != 0.0 {
        for (byte, pair) in codes.iter_mut().zip(values.as_chunks::<2>().0) {
            *byte = e2m1_from_f32(pair[0] / scale) | e2m1_from_f32(pair[1] / scale) << 4;
        }
    }
    (codes, block)
}
