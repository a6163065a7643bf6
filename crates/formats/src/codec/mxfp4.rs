//! MXFP4 (GGUF type 39): 32 E2M1 codes under one E8M0 scale.
//!
//! ```text
//! 0   1                  17
//! +---+------------------+
//! | e | qs: 16 bytes     |   byte j: input j in the low nibble, input j + 16 in the high one
//! +---+------------------+
//! value = 2^(e - 128) * (2 * e2m1(code))
//! ```
//!
//! Codes are doubled integers and the scale is halved, as in ggml; so code 8 is +0, not -0. The encoder is
//! ggml's reference: the exponent of the largest magnitude less two, then the nearest code.

use super::{abs_max, nearest};
use crate::fp4::E2M1_DOUBLED;

/// Half the E8M0 scale: `2^(e - 128)`. The reserved 255 gives `2^127`; [`validate`](crate::validate) refuses it.
#[inline]
pub fn half_scale(e: u8) -> f32 {
    if e < 2 { f32::from_bits(0x0020_0000 << e) } else { f32::from_bits((u32::from(e) - 1) << 23) }
}

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 17], out: &mut [f32; 32]) {
    let d = half_scale(block[0]);
    for (j, &byte) in block[1..].iter().enumerate() {
        out[j] = d * f32::from(E2M1_DOUBLED[(byte & 15) as usize]);
        out[j + 16] = d * f32::from(E2M1_DOUBLED[(byte >> 4) as usize]);
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 32]) -> [u8; 17] {
    let mut block = [0; 17];
    // The biased exponent field is floor(log2) + 127, and E2M1's largest number has exponent 2.
    let exponent = (abs_max(values).to_bits() >> 23).saturating_sub(2) as u8;
    let d = half_scale(exponent);
    block[0] = exponent;
    for j in 0..16 {
        block[1 + j] = nearest(&E2M1_DOUBLED, d, values[j]) | nearest(&E2M1_DOUBLED, d, values[j + 16]) << 4;
    }
    block
}
