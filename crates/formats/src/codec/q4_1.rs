//! Q4_1: 32 four-bit codes above a minimum.
//!
//! ```text
//! 0   2   4                  20
//! +---+---+------------------+
//! | d | m | qs: 16 bytes     |   byte j: input j in the low nibble, input j + 16 in the high one
//! +---+---+------------------+
//! value = d * code + m
//! ```
//!
//! The encoder is ggml's reference: codes 0 and 15 are the block's extremes.

use super::{f16_at, min_max, put_f16, reciprocal};

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    for (j, &byte) in block[4..].iter().enumerate() {
        out[j] = d * f32::from(byte & 15) + m;
        out[j + 16] = d * f32::from(byte >> 4) + m;
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 32]) -> [u8; 20] {
    let mut block = [0; 20];
    let (min, max) = min_max(values);
    let d = (max - min) / 15.0;
    let inverse = reciprocal(d);
    put_f16(&mut block, 0, d);
    put_f16(&mut block, 2, min);
    let code = |v: f32| (((v - min) * inverse + 0.5) as u8).min(15);
    for j in 0..16 {
        block[4 + j] = code(values[j]) | code(values[j + 16]) << 4;
    }
    block
}
