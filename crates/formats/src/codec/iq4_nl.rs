//! IQ4_NL: 32 codes that index sixteen unevenly spaced levels, under one f16 scale.
//!
//! ```text
//! 0   2                  18
//! +---+------------------+
//! | d | qs: 16 bytes     |   byte j: input j in the low nibble, input j + 16 in the high one
//! +---+------------------+
//! value = d * LEVELS[code]
//! ```
//!
//! The encoder maps the element of largest magnitude to -127 and takes the nearest level for the others.

use super::{f16_at, nearest, put_f16, signed_max};

/// The levels, shared with IQ4_XS.
pub const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    for (j, &byte) in block[2..].iter().enumerate() {
        out[j] = d * f32::from(LEVELS[(byte & 15) as usize]);
        out[j + 16] = d * f32::from(LEVELS[(byte >> 4) as usize]);
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 32]) -> [u8; 18] {
    let mut block = [0; 18];
    let d = put_f16(&mut block, 0, signed_max(values) / -127.0);
    for j in 0..16 {
        block[2 + j] = nearest(&LEVELS, d, values[j]) | nearest(&LEVELS, d, values[j + 16]) << 4;
    }
    block
}
