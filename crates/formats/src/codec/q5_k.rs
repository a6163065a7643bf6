//! Q5_K: Q4_K with a fifth bit for each code.
//!
//! ```text
//! 0   2      4              16           48                   176
//! +---+------+--------------+------------+--------------------+
//! | d | dmin | scales: 12 B | qh: 32 B   | qs: 4 x 32 bytes   |   scales: see k_quant
//! +---+------+--------------+------------+--------------------+
//! qs as in Q4_K; bit j of qh byte l is the fifth bit of input l of sub-block j
//! value = (d * scale) * code - dmin * minimum
//! ```

use super::f16_at;
use super::k_quant::{encode_affine, pack_scales, unpack_scales};

/// Decodes one block.
#[inline]
pub fn decode(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    let (scales, minimums) = unpack_scales(block[4..16].as_array().expect("twelve bytes"));
    for (j, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[j]);
        let minimum = dmin * f32::from(minimums[j]);
        let codes = &block[48 + j / 2 * 32..][..32];
        for ((value, byte), fifth) in out.iter_mut().zip(codes).zip(&block[16..48]) {
            let code = byte >> (4 * (j % 2)) & 15 | (fifth >> j & 1) << 4;
            *value = scale * f32::from(code) - minimum;
        }
    }
}

/// Encodes one block.
pub fn encode(values: &[f32; 256]) -> [u8; 176] {
    let q = encode_affine::<8>(values, 31, 63);
    let mut block = [0; 176];
    block[0..2].copy_from_slice(&q.d.to_le_bytes());
    block[2..4].copy_from_slice(&q.dmin.to_le_bytes());
    block[4..16].copy_from_slice(&pack_scales(&q.scales, &q.minimums));
    for (i, &code) in q.codes.iter().enumerate() {
        block[16 + i % 32] |= (code >> 4) << (i / 32);
        block[48 + i / 64 * 32 + i % 32] |= (code & 15) << (i % 64 / 32 * 4);
    }
    block
}
