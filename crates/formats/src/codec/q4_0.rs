//! Q4_0: 32 four-bit codes around zero under one f16 scale.
//!
//! ```text
//! 0   2                  18
//! +---+------------------+
//! | d | qs: 16 bytes     |   byte j: input j in the low nibble, input j + 16 in the high one
//! +---+------------------+
//! value = d * (code - 8)
//! ```
//!
//! The encoder is ggml's reference: the element of largest magnitude gets code 0, that is -8.

use super::{f16_at, put_f16, reciprocal, signed_max};

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    for (j, &byte) in block[2..].iter().enumerate() {
        out[j] = d * f32::from((byte & 15) as i8 - 8);
        out[j + 16] = d * f32::from((byte >> 4) as i8 - 8);
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 32]) -> [u8; 18] {
    let mut block = [0; 18];
    let d = signed_max(values) / -8.0;
    let inverse = reciprocal(d);
    put_f16(&mut block, 0, d);
    let code = |v: f32| ((v * inverse + 8.5) as u8).min(15);
    for j in 0..16 {
        block[2 + j] = code(values[j]) | code(values[j + 16]) << 4;
    }
    block
}
