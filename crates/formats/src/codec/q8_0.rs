//! Q8_0: 32 signed bytes under one f16 scale.
//!
//! ```text
//! 0   2                  34
//! +---+------------------+
//! | d | qs: 32 x i8      |
//! +---+------------------+
//! value = code * d
//! ```
//!
//! The encoder is ggml's reference: the largest magnitude gets 127, halves round away from zero.

use super::{abs_max, f16_at, put_f16, reciprocal};

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    for (value, &code) in out.iter_mut().zip(&block[2..]) {
        *value = f32::from(code as i8) * d;
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 32]) -> [u8; 34] {
    let mut block = [0; 34];
    let d = abs_max(values) / 127.0;
    let inverse = reciprocal(d);
    put_f16(&mut block, 0, d);
    for (code, value) in block[2..].iter_mut().zip(values) {
        *code = (value * inverse).round() as i8 as u8;
    }
    block
}
