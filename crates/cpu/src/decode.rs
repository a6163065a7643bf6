//! Rows of file formats as float32, on whole vectors.
//!
//! Each value takes the exact steps of `lapidary_formats::decode_row`, so the bits are the same at every level; what
//! has no form here is decoded there.

use lapidary_formats::{Format, Scales, TensorView};

use crate::int8::{beside, decode_file_row};
use crate::level::{Isa, for_level};

/// Decodes row `row` of `view`.
pub(crate) fn decode_row(isa: Isa, view: &TensorView<'_>, row: usize, out: &mut [f32]) {
    assert!(row < view.rows && out.len() == view.cols, "row {row} of {}", view.name);
    let row_bytes = view.row_bytes();
    let bytes = &view.bytes[row * row_bytes..(row + 1) * row_bytes];
    match (view.format, &view.scales) {
        (Format::Bf16, Scales::None) => bf16(isa, bytes, out),
        (Format::Fp8E4M3, Scales::Tensor(scale)) => fp8(isa, bytes, *scale, out),
        (Format::Fp8E4M3, Scales::Row(scales)) => fp8(isa, bytes, scales[row], out),
        (Format::Fp8E4M3, Scales::Block128 { values, first_row }) => {
            let across = view.cols.div_ceil(128);
            let scales = &values[(first_row + row) / 128 * across..][..across];
            for ((bytes, out), &scale) in bytes.chunks(128).zip(out.chunks_mut(128)).zip(scales) {
                fp8(isa, bytes, scale, out);
            }
        }
        (format, Scales::None) if decode_file_row(isa, format, bytes, &[], out) => {}
        (format, scales @ (Scales::Nvfp4 { .. } | Scales::Group32Bf16(_) | Scales::Tensor(_))) => {
            let (beside, multiplier) = beside(scales);
            let of_row = beside.len() / view.rows;
            if !decode_file_row(isa, format, bytes, &beside[row * of_row..][..of_row], out) {
                return lapidary_formats::decode_row(view, row, out);
            }
            if multiplier != 1.0 {
                out.iter_mut().for_each(|v| *v *= multiplier);
            }
        }
        _ => lapidary_formats::decode_row(view, row, out),
    }
}

for_level! {
    pub fn bf16(bytes: &[u8], out: &mut [f32]) {
        for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
        }
    }
}

for_level! {
    /// An E4M3 byte's exponent and mantissa, moved to where float32 has them, are 2^-120 of the number; that
    /// holds for subnormals too. `validate` has refused NaN codes.
    pub fn fp8(bytes: &[u8], scale: f32, out: &mut [f32]) {
        const UP: f32 = f32::from_bits((120 + 127) << 23);
        for (value, &code) in out.iter_mut().zip(bytes) {
            let code = u32::from(code);
            *value = f32::from_bits((code & 0x80) << 24 | (code & 0x7F) << 20) * UP * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_decodes_as_the_formats_do() {
        let values: Vec<f32> = (0..3 * 768).map(|i| ((i * 7919) % 1013) as f32 / 506.0 - 1.0).collect();
        for format in Format::ALL {
            let encoded = lapidary_formats::encode_rows(format, &values, 3, 768).expect("finite values");
            let mut views = vec![encoded.view("w")];
            if format == Format::Fp8E4M3 {
                for scales in [
                    Scales::Tensor(0.37),
                    Scales::Row(vec![0.3, 1.7, 0.9]),
                    Scales::Block128 { values: (1..=12).map(|i| i as f32 / 7.0).collect(), first_row: 126 },
                ] {
                    views.push(TensorView { scales, ..encoded.view("w") });
                }
            }
            for isa in Isa::here() {
                let level = isa.level();
                let (mut found, mut exact) = (vec![0.0; 768], vec![0.0; 768]);
                for (view, row) in views.iter().flat_map(|v| (0..3).map(move |row| (v, row))) {
                    decode_row(isa, view, row, &mut found);
                    lapidary_formats::decode_row(view, row, &mut exact);
                    let same = found.iter().zip(&exact).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{format} {level} row {row}");
                }
            }
        }
        // All E4M3 codes but NaN.
        let codes: Vec<u8> = (0..=255).filter(|c| c & 0x7F != 0x7F).collect();
        let isa = Isa::new(None).expect("the best level is there");
        let mut found = vec![0.0; codes.len()];
        fp8(isa, &codes, 1.0, &mut found);
        for (&code, value) in codes.iter().zip(found) {
            assert_eq!(value.to_bits(), lapidary_formats::fp8::e4m3_to_f32(code).to_bits(), "{code}");
        }
    }
}
