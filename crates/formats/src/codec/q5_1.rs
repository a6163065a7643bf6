//! Q5_1: 32 five-bit codes above a minimum; the fifth bits are kept apart.
//!
//! ```text
//! 0   2   4        8                  24
//! +---+---+--------+------------------+
//! | d | m | qh u32 | qs: 16 bytes     |   byte j: input j in the low nibble, input j + 16 in the high one
//! +---+---+--------+------------------+   bit i of qh: fifth bit of input i
//! value = d * code + m
//! ```
//!
//! The encoder is ggml's reference: codes 0 and 31 are the block's extremes.

use super::{f16_at, min_max, put_f16, q5_0, reciprocal};

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for (j, &byte) in block[8..].iter().enumerate() {
        let low_code = byte & 15 | ((high >> j & 1) << 4) as u8;
        let high_code = byte >> 4 | ((high >> (j + 16) & 1) << 4) as u8;
        out[j] = d * f32::from(low_code) + m;
        out[j + 16] = d * f32::from(high_code) + m;
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 32]) -> [u8; 24] {
    let mut block = [0; 24];
    let (min, max) = min_max(values);
    let d = (max - min) / 31.0;
    let inverse = reciprocal(d);
    put_f16(&mut block, 0, d);
    put_f16(&mut block, 2, min);
    q5_0::pack(&mut block[4..], |j| (((values[j] - min) * inverse + 0.5) as u8).min(31));
    block
}
