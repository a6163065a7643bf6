//! Activations in int8 blocks.
//!
//! A row is cut into blocks of 32: `x_i ~ scale * code_i`, `scale = max|x| / 127`, codes rounded to nearest,
//! halves to even. Beside the codes each block keeps the sums that weights with an offset or a minimum ask
//! for. A block with a value that is not finite gets the scale NaN, so that every output that it touches is
//! NaN too; a block whose largest magnitude is below 1e-30 is zero.
//!
//! ```text
//! row   codes: 32 x i8 a block | heads: 16 bytes a block     (whole row: a multiple of 64 bytes)
//! ```

use crate::level::for_level;

/// Inputs in a block.
pub(crate) const BLOCK: usize = 32;

/// What a block has beside its codes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Head {
    /// Multiplies the codes.
    pub scale: f32,
    /// Sum of all 32 codes.
    pub sum: i32,
    /// Sum of the first 16 codes.
    pub half: i32,
    /// `scale * sum`.
    pub scaled_sum: f32,
}

/// Bytes of a row of `width` inputs; none where the width is not whole blocks, which no packed weight has.
pub(crate) fn row_bytes(width: usize) -> usize {
    if !width.is_multiple_of(BLOCK) {
        return 0;
    }
    (width / BLOCK * (BLOCK + size_of::<Head>())).next_multiple_of(64)
}

/// Splits a row's bytes into codes and heads.
#[cfg(test)]
pub(crate) fn split_row(bytes: &mut [u8], width: usize) -> (&mut [i8], &mut [Head]) {
    let (codes, heads) = bytes.split_at_mut(width);
    // SAFETY: every bit pattern is an i8 and a `Head`; the prefixes are checked to be empty below.
    let (codes, heads) = unsafe { (codes.align_to_mut::<i8>(), heads.align_to_mut::<Head>()) };
    assert!(codes.0.is_empty() && heads.0.is_empty(), "rows of int8 blocks start on 16 bytes");
    (codes.1, &mut heads.1[..width / BLOCK])
}

/// Rows in int8 blocks, `stride` bytes apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantRows<'a> {
    /// The rows.
    pub bytes: &'a [u8],
    /// Bytes from one row to the next.
    pub stride: usize,
    /// Rows.
    pub count: usize,
    /// Inputs.
    pub width: usize,
}

#[cfg(test)]
impl<'a> QuantRows<'a> {
    /// Rows `from .. from + count`.
    pub fn slice(&self, from: usize, count: usize) -> QuantRows<'a> {
        assert!(from + count <= self.count, "rows {from} + {count} of {}", self.count);
        QuantRows { bytes: &self.bytes[from * self.stride..(from + count) * self.stride], count, ..*self }
    }
}

/// Quantises inputs `col ..` of the row of `width` inputs whose bytes start at `row`.
///
/// # Safety
/// The row's bytes, aligned to 16, are there, and nobody else uses those of these columns.
pub(crate) unsafe fn quantise_at(isa: crate::level::Isa, row: *mut u8, width: usize, col: usize, x: &[f32]) {
    assert!(col.is_multiple_of(BLOCK) && col + x.len() <= width && width.is_multiple_of(BLOCK));
    // SAFETY: inside the row by the assertion; the caller answers for the rest. Different columns are different
    // bytes, so they are split by hand and the row is not borrowed as a whole.
    unsafe {
        let codes = std::slice::from_raw_parts_mut(row.add(col).cast::<i8>(), x.len());
        let heads = row.add(width).cast::<Head>().add(col / BLOCK);
        quantise(isa, x, codes, std::slice::from_raw_parts_mut(heads, x.len() / BLOCK));
    }
}

/// Quantises whole blocks.
pub(crate) fn quantise(isa: crate::level::Isa, x: &[f32], codes: &mut [i8], heads: &mut [Head]) {
    let blocks = x.len() / BLOCK;
    assert!(x.len().is_multiple_of(BLOCK) && codes.len() == x.len() && heads.len() == blocks);
    quantise_blocks(isa, x, codes, heads);
}

for_level! {
    pub fn quantise_blocks(x: &[f32], codes: &mut [i8], heads: &mut [Head]) {
        // Adding 1.5 * 2^23 leaves the nearest integer, halves to even, in the low bits of the sum.
        const ROUND: f32 = 12_582_912.0;
        let blocks = x.as_chunks::<BLOCK>().0.iter().zip(codes.as_chunks_mut::<BLOCK>().0);
        for ((x, codes), head) in blocks.zip(heads) {
            // As integers, magnitudes order as they do as floats, infinity and NaN above all.
            let mut most = 0u32;
            for v in x {
                most = most.max(v.to_bits() & 0x7FFF_FFFF);
            }
            let largest = f32::from_bits(most);
            if !largest.is_finite() || largest < 1e-30 {
                let scale = if largest.is_finite() { 0.0 } else { f32::NAN };
                codes.fill(0);
                *head = Head { scale, sum: 0, half: 0, scaled_sum: scale };
                continue;
            }
            let inverse = 127.0 / largest;
            let mut rounded = [0i32; BLOCK];
            for (r, v) in rounded.iter_mut().zip(x) {
                *r = (v * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
            }
            let (mut half, mut rest) = (0, 0);
            for l in 0..BLOCK / 2 {
                half += rounded[l];
                rest += rounded[l + BLOCK / 2];
            }
            for (c, r) in codes.iter_mut().zip(rounded) {
                *c = r as i8;
            }
            let (scale, sum) = (largest / 127.0, half + rest);
            *head = Head { scale, sum, half, scaled_sum: scale * sum as f32 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::level::Isa;

    #[test]
    fn blocks_are_nearest_codes_with_their_sums_at_every_level() {
        for isa in Isa::here() {
            let level = isa.level();
            // The second block is zero, the third has a half that rounds to even, the fourth is not finite.
            let mut x: Vec<f32> = (0..128).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
            x[32..64].fill(0.0);
            x[64..96].fill(0.0);
            (x[64], x[65], x[66]) = (127.0, 2.5, -3.5);
            x[100] = f32::INFINITY;
            let (mut codes, mut heads) = (vec![0i8; 128], vec![Head::default(); 4]);
            quantise(isa, &x, &mut codes, &mut heads);
            for b in [0, 2] {
                let (x, codes, head) = (&x[32 * b..][..32], &codes[32 * b..][..32], heads[b]);
                let largest = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                assert_eq!(head.scale, largest / 127.0);
                for (v, &c) in x.iter().zip(codes) {
                    assert!((v - head.scale * f32::from(c)).abs() <= 0.5001 * head.scale, "{level} {v} {c}");
                }
                assert_eq!(head.sum, codes.iter().map(|&c| i32::from(c)).sum::<i32>());
                assert_eq!(head.half, codes[..16].iter().map(|&c| i32::from(c)).sum::<i32>());
                assert_eq!(head.scaled_sum, head.scale * head.sum as f32);
            }
            assert_eq!(codes[64..67], [127, 2, -4]);
            assert!(codes[32..64].iter().all(|&c| c == 0) && heads[1].scale == 0.0);
            assert!(heads[3].scale.is_nan() && heads[3].scaled_sum.is_nan());
        }
    }
}
