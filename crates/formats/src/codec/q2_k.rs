//! Q2_K: 256 two-bit codes in sixteen sub-blocks of 16, each with a four-bit scale and minimum.
//!
//! ```text
//! 0               16               80  82     84
//! +---------------+----------------+---+------+
//! | scales: 16 B  | qs: 64 bytes   | d | dmin |   scale in the low nibble, minimum in the high one
//! +---------------+----------------+---+------+   qs: see k_quant
//! value = (d * scale) * code - dmin * minimum
//! ```

use super::f16_at;
use super::k_quant::{encode_affine, put_two_bits, two_bits};

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 84], out: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    for (j, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(block[j] & 15);
        let minimum = dmin * f32::from(block[j] >> 4);
        for (l, value) in out.iter_mut().enumerate() {
            *value = scale * f32::from(two_bits(&block[16..80], 16 * j + l)) - minimum;
        }
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 256]) -> [u8; 84] {
    let q = encode_affine::<16>(values, 3, 15);
    let mut block = [0; 84];
    for (byte, (scale, minimum)) in block.iter_mut().zip(q.scales.iter().zip(q.minimums)) {
        *byte = scale | minimum << 4;
    }
    for (i, &code) in q.codes.iter().enumerate() {
        put_two_bits(&mut block[16..80], i, code);
    }
    block[80..82].copy_from_slice(&q.d.to_le_bytes());
    block[82..84].copy_from_slice(&q.dmin.to_le_bytes());
    block
}
