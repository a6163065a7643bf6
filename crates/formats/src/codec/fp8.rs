//! FP8 E4M3 codes, one byte an input; the scale for the tensor, a row or a 128 x 128 block lies elsewhere.
//!
//! ```text
//! byte  s eeee mmm        value = e4m3(byte) * scale
//! ```

use half::bf16;

use super::abs_max;
use crate::fp8::{E4M3_MAX, e4m3_from_f32, e4m3_to_f32};

/// The code's own value, unscaled.
#[inline]
pub fn decode(code: &[u8; 1], out: &mut [f32; 1]) {
    out[0] = e4m3_to_f32(code[0]);
}

/// The multiplier that maps the largest magnitude to 448, rounded to bf16: FP8 files store their scales as bf16 or
/// float32, and so either holds it exactly. The rounding puts the largest magnitude at no more than 450, which still
/// rounds to 448. It is never zero: all-zero values get 1, and the smallest normal number stops subnormal quotients.
pub fn scale_of(values: &[f32]) -> f32 {
    match abs_max(values) {
        0.0 => 1.0,
        max => bf16::from_f32(max / E4M3_MAX).to_f32().max(f32::MIN_POSITIVE),
    }
}

/// The nearest code of `value / scale`.
pub fn encode(value: f32, scale: f32) -> u8 {
    e4m3_from_f32(value / scale)
}
