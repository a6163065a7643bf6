//! What the K-quants share: the packing of twelve scale bytes, the order of two-bit codes, and two encoders.
//!
//! Q4_K and Q5_K keep eight six-bit scales `s` and eight six-bit minimums `m` in twelve bytes:
//!
//! ```text
//! byte 0-3    hi2(s[4..8])  s[0..4]        (two bits, six bits)
//!      4-7    hi2(m[4..8])  m[0..4]
//!      8-11   lo4(m[4..8])  lo4(s[4..8])   (four bits, four bits)
//! ```
//!
//! Q2_K and Q3_K keep 256 two-bit codes in 64 bytes: input `128 g + 32 t + l` is in byte `32 g + l`, bits `2t`
//! and `2t + 1`.
//!
//! The encoders here are plain: each sub-block gets the scale (and minimum) that its extremes ask for, these
//! are rounded to steps of the block's f16 scale, and codes are the nearest under what was stored. There is no
//! search for a smaller error, which the encoders of llama.cpp do.

use half::f16;

use super::{min_max, reciprocal, signed_max};

/// The eight scales and eight minimums of twelve bytes.
#[inline]
pub fn unpack_scales(bytes: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let mut scales = [0; 8];
    let mut minimums = [0; 8];
    for j in 0..4 {
        scales[j] = bytes[j] & 63;
        minimums[j] = bytes[4 + j] & 63;
        scales[4 + j] = bytes[8 + j] & 15 | bytes[j] >> 6 << 4;
        minimums[4 + j] = bytes[8 + j] >> 4 | bytes[4 + j] >> 6 << 4;
    }
    (scales, minimums)
}

/// The inverse of [`unpack_scales`].
pub fn pack_scales(scales: &[u8; 8], minimums: &[u8; 8]) -> [u8; 12] {
    let mut bytes = [0; 12];
    for j in 0..4 {
        bytes[j] = scales[j] | scales[4 + j] >> 4 << 6;
        bytes[4 + j] = minimums[j] | minimums[4 + j] >> 4 << 6;
        bytes[8 + j] = scales[4 + j] & 15 | (minimums[4 + j] & 15) << 4;
    }
    bytes
}

/// The two-bit code of input `i`.
#[inline]
pub fn two_bits(codes: &[u8], i: usize) -> u8 {
    codes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
}

/// Stores the two-bit code of input `i` over zero bits.
pub fn put_two_bits(codes: &mut [u8], i: usize, code: u8) {
    codes[i / 128 * 32 + i % 32] |= code << (i % 128 / 32 * 2);
}

/// A block of `value = d * scale * code - dmin * minimum`, not yet packed.
pub struct Affine<const N: usize> {
    /// Block scale.
    pub d: f16,
    /// Block scale of the minimums.
    pub dmin: f16,
    /// A scale for each sub-block.
    pub scales: [u8; N],
    /// A minimum for each sub-block.
    pub minimums: [u8; N],
    /// A code for each input.
    pub codes: [u8; 256],
}

/// Quantises `N` sub-blocks to codes `0..=max_code` with scales and minimums `0..=max_scale`.
pub fn encode_affine<const N: usize>(values: &[f32; 256], max_code: u8, max_scale: u8) -> Affine<N> {
    let len = 256 / N;
    // The stored minimum can only lower a sub-block, so one whose values are all positive starts at zero.
    let ranges: [(f32, f32); N] = std::array::from_fn(|j| {
        let (lo, hi) = min_max(&values[j * len..(j + 1) * len]);
        (lo.min(0.0), hi.max(0.0))
    });
    let widest = ranges.iter().fold(0.0, |max: f32, (lo, hi)| max.max(hi - lo));
    let lowest = ranges.iter().fold(0.0, |max: f32, (lo, _)| max.max(-lo));
    let d = f16::from_f32(widest / f32::from(max_code) / f32::from(max_scale));
    let dmin = f16::from_f32(lowest / f32::from(max_scale));
    let (scale_inverse, min_inverse) = (reciprocal(d.to_f32()), reciprocal(dmin.to_f32()));
    let steps = |x: f32| x.round_ties_even().clamp(0.0, f32::from(max_scale)) as u8;
    let scales = ranges.map(|(lo, hi)| steps((hi - lo) / f32::from(max_code) * scale_inverse));
    let minimums = ranges.map(|(lo, _)| steps(-lo * min_inverse));
    let codes = std::array::from_fn(|i| {
        let inverse = reciprocal(d.to_f32() * f32::from(scales[i / len]));
        let minimum = dmin.to_f32() * f32::from(minimums[i / len]);
        ((values[i] + minimum) * inverse).round_ties_even().clamp(0.0, f32::from(max_code)) as u8
    });
    Affine { d, dmin, scales, minimums, codes }
}

/// A block of `value = d * scale * code` with signed scales and codes, not yet packed.
pub struct Signed {
    /// Block scale.
    pub d: f16,
    /// A scale for each 16 inputs.
    pub scales: [i8; 16],
    /// A code for each input.
    pub codes: [i8; 256],
}

/// Quantises sixteen sub-blocks of 16 to codes `min_code..=-min_code - 1` with scales
/// `min_scale..=-min_scale - 1`: the element of largest magnitude, and the largest scale, get the minimum.
pub fn encode_signed(values: &[f32; 256], min_code: i8, min_scale: i8) -> Signed {
    let subs = values.as_chunks::<16>().0;
    let wanted: [f32; 16] = std::array::from_fn(|j| signed_max(&subs[j]) / f32::from(min_code));
    let d = f16::from_f32(signed_max(&wanted) / f32::from(min_scale));
    let inverse = reciprocal(d.to_f32());
    let scales = wanted.map(|scale| to_signed(scale * inverse, min_scale));
    let codes = std::array::from_fn(|i| {
        to_signed(values[i] * reciprocal(d.to_f32() * f32::from(scales[i / 16])), min_code)
    });
    Signed { d, scales, codes }
}

fn to_signed(x: f32, min: i8) -> i8 {
    x.round_ties_even().clamp(f32::from(min), -f32::from(min) - 1.0) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_survive_packing() {
        let scales = [1, 63, 17, 32, 62, 3, 48, 15];
        let minimums = [60, 2, 33, 31, 7, 47, 16, 63];
        assert_eq!(unpack_scales(&pack_scales(&scales, &minimums)), (scales, minimums));
    }

    #[test]
    fn two_bit_codes_survive_packing() {
        let code = |i: usize| (i * 7 / 3 % 4) as u8;
        let mut codes = [0; 64];
        (0..256).for_each(|i| put_two_bits(&mut codes, i, code(i)));
        assert!((0..256).all(|i| two_bits(&codes, i) == code(i)));
    }
}
