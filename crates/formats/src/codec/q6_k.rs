//! Q6_K: 256 six-bit codes in sixteen sub-blocks of 16 with signed byte scales.
//!
//! ```text
//! 0              128            192              208 210
//! +--------------+--------------+----------------+---+
//! | ql: 128 B    | qh: 64 B     | scales: 16 x i8| d |
//! +--------------+--------------+----------------+---+
//! input i = 128 g + r   low four bits: ql byte 64 g + r % 64, low nibble when r < 64, else the high one
//!                       high two bits: qh byte 32 g + r % 32, bits 2 (r / 32) and the next
//! value = (d * scale) * (code - 32)
//! ```

use super::f16_at;
use super::k_quant::{encode_signed, put_two_bits, two_bits};

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = f16_at(block, 208);
    for (j, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(block[192 + j] as i8);
        for (l, value) in out.iter_mut().enumerate() {
            let i = 16 * j + l;
            let low = block[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
            let code = (low | two_bits(&block[128..192], i) << 4) as i8 - 32;
            *value = scale * f32::from(code);
        }
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 256]) -> [u8; 210] {
    let q = encode_signed(values, -32, -128);
    let mut block = [0; 210];
    for (i, code) in q.codes.iter().enumerate() {
        let stored = (code + 32) as u8;
        block[i / 128 * 64 + i % 64] |= (stored & 15) << (i % 128 / 64 * 4);
        put_two_bits(&mut block[128..192], i, stored >> 4);
    }
    for (stored, scale) in block[192..208].iter_mut().zip(q.scales) {
        *stored = scale as u8;
    }
    block[208..210].copy_from_slice(&q.d.to_le_bytes());
    block
}
