//! Q3_K: 256 three-bit codes in sixteen sub-blocks of 16 with signed six-bit scales.
//!
//! ```text
//! 0              32              96            108 110
//! +--------------+---------------+-------------+---+
//! | hmask: 32 B  | qs: 64 bytes  | scales: 12 B| d |
//! +--------------+---------------+-------------+---+
//! qs      the low two bits, see k_quant
//! hmask   bit i / 32 of byte i % 32 is the third bit of input i
//! scales  low four bits of scale j: nibble j / 8 of byte j % 8; high two: bits 2 (j / 4) of byte 8 + j % 4
//! value = (d * (scale - 32)) * (code - 4)
//! ```

use super::f16_at;
use super::k_quant::{encode_signed, put_two_bits, two_bits};

/// The sixteen scales of twelve bytes, -32 to 31.
#[inline]
pub fn unpack_scales(bytes: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|j| {
        let low = bytes[j % 8] >> (4 * (j / 8)) & 15;
        let high = bytes[8 + j % 4] >> (2 * (j / 4)) & 3;
        (low | high << 4) as i8 - 32
    })
}

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = f16_at(block, 108);
    let scales = unpack_scales(block[96..108].as_array().expect("twelve bytes"));
    for (i, value) in out.iter_mut().enumerate() {
        let third = block[i % 32] >> (i / 32) & 1;
        let code = (two_bits(&block[32..96], i) | third << 2) as i8 - 4;
        *value = d * f32::from(scales[i / 16]) * f32::from(code);
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 256]) -> [u8; 110] {
    let q = encode_signed(values, -4, -32);
    let mut block = [0; 110];
    for (i, code) in q.codes.iter().enumerate() {
        let stored = (code + 4) as u8;
        block[i % 32] |= (stored >> 2) << (i / 32);
        put_two_bits(&mut block[32..96], i, stored & 3);
    }
    for (j, scale) in q.scales.iter().enumerate() {
        let stored = (scale + 32) as u8;
        block[96 + j % 8] |= (stored & 15) << (4 * (j / 8));
        block[104 + j % 4] |= (stored >> 4) << (2 * (j / 4));
    }
    block[108..110].copy_from_slice(&q.d.to_le_bytes());
    block
}
