//! Q5_0: 32 five-bit codes around zero under one f16 scale; the fifth bits are kept apart.
//!
//! ```text
//! 0   2        6                  22
//! +---+--------+------------------+
//! | d | qh u32 | qs: 16 bytes     |   byte j: input j in the low nibble, input j + 16 in the high one
//! +---+--------+------------------+   bit i of qh: fifth bit of input i
//! value = d * (code - 16)
//! ```
//!
//! The encoder is ggml's reference: the element of largest magnitude gets code 0, that is -16.

use super::{f16_at, put_f16, reciprocal, signed_max};

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for (j, &byte) in block[6..].iter().enumerate() {
        let low_code = byte & 15 | ((high >> j & 1) << 4) as u8;
        let high_code = byte >> 4 | ((high >> (j + 16) & 1) << 4) as u8;
        out[j] = d * f32::from(low_code as i8 - 16);
        out[j + 16] = d * f32::from(high_code as i8 - 16);
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 32]) -> [u8; 22] {
    let mut block = [0; 22];
    let d = signed_max(values) / -16.0;
    let inverse = reciprocal(d);
    put_f16(&mut block, 0, d);
    pack(&mut block[2..], |j| ((values[j] * inverse + 16.5) as u8).min(31));
    block
}

/// Stores 32 five-bit codes as `qh` and `qs`, 20 bytes; Q5_1 packs its codes alike.
pub(super) fn pack(out: &mut [u8], code: impl Fn(usize) -> u8) {
    let mut high = 0u32;
    for j in 0..16 {
        let (a, b) = (code(j), code(j + 16));
        out[4 + j] = a & 15 | (b & 15) << 4;
        high |= u32::from(a >> 4) << j | u32::from(b >> 4) << (j + 16);
    }
    out[..4].copy_from_slice(&high.to_le_bytes());
}
