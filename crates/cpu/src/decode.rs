//! Rows of file formats as float32, on whole vectors.
//!
//! The decoders are those of `lapidary-formats`, compiled for each level; each value takes the same exact steps,
//! so the bits are the same at every level.

use lapidary_formats::codec::*;
use lapidary_formats::{Format, Scales, TensorView};

use crate::level::{Isa, for_level};

/// Decodes row `row` of `view`.
pub(crate) fn decode_row(isa: Isa, view: &TensorView<'_>, row: usize, out: &mut [f32]) {
    if !matches!(view.scales, Scales::None) {
        return lapidary_formats::decode_row(view, row, out);
    }
    assert!(row < view.rows && out.len() == view.cols, "row {row} of {}", view.name);
    let row_bytes = view.row_bytes();
    let bytes = &view.bytes[row * row_bytes..(row + 1) * row_bytes];
    match view.format {
        Format::Bf16 => bf16(isa, bytes, out),
        Format::Q4_0 => q4_0(isa, bytes, out),
        Format::Q4_1 => q4_1(isa, bytes, out),
        Format::Q5_0 => q5_0(isa, bytes, out),
        Format::Q5_1 => q5_1(isa, bytes, out),
        Format::Q8_0 => q8_0(isa, bytes, out),
        Format::Q4K => q4_k(isa, bytes, out),
        Format::Q5K => q5_k(isa, bytes, out),
        Format::Q6K => q6_k(isa, bytes, out),
        format => lapidary_formats::decode_codes(format, bytes, out),
    }
}

macro_rules! decoders {
    ($($name:ident: $decode:path, $block:literal, $len:literal;)*) => {
        $(for_level! {
            pub fn $name(bytes: &[u8], out: &mut [f32]) {
                let blocks = bytes.as_chunks::<$block>().0.iter().zip(out.as_chunks_mut::<$len>().0);
                for (block, out) in blocks {
                    $decode(block, out);
                }
            }
        })*
    };
}

decoders! {
    bf16: float::decode_bf16, 2, 1;
    q4_0: q4_0::decode, 18, 32;
    q4_1: q4_1::decode, 20, 32;
    q5_0: q5_0::decode, 22, 32;
    q5_1: q5_1::decode, 24, 32;
    q8_0: q8_0::decode, 34, 32;
    q4_k: q4_k::decode, 144, 256;
    q5_k: q5_k::decode, 176, 256;
    q6_k: q6_k::decode, 210, 256;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::level::Level;

    #[test]
    fn every_level_decodes_as_the_formats_do() {
        let values: Vec<f32> = (0..3 * 768).map(|i| ((i * 7919) % 1013) as f32 / 506.0 - 1.0).collect();
        for format in Format::ALL {
            let encoded = lapidary_formats::encode_rows(format, &values, 3, 768).expect("finite values");
            let view = encoded.view("w");
            for level in [Level::Scalar, Level::Avx2, Level::Avx512] {
                let Some(isa) = Isa::new(Some(level)) else { continue };
                let (mut found, mut exact) = (vec![0.0; 768], vec![0.0; 768]);
                for row in 0..3 {
                    decode_row(isa, &view, row, &mut found);
                    lapidary_formats::decode_row(&view, row, &mut exact);
                    let same = found.iter().zip(&exact).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{format} {level} row {row}");
                }
            }
        }
    }
}
