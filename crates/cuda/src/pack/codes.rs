//! A row of any format as plain codes and scales, one code a byte in the order of the inputs.
//!
//! This is the middle of packing: formats differ up to here, forms from here on.

use half::bf16;
use lapidary_formats::codec::iq4_nl::LEVELS;
use lapidary_formats::codec::k_quant::two_bits;
use lapidary_formats::codec::q3_k;
use lapidary_formats::{Format, Scales, TensorView, decode_row};

/// One row's codes, and its scales in the order of the chunk layouts.
#[derive(Debug, Default)]
pub struct Row {
    /// A byte an input (bf16: two, little-endian), as the form stores it, padded with the form's zero.
    pub codes: Vec<u8>,
    /// Scales, see [`read_row`].
    pub scales: Vec<u8>,
}

/// Bytes of scales for each 64 inputs (256 for the forms with headers): NVFP4 4 E4M3; f16 or bf16 2 x 2; with
/// minimums 2 x (2 + 2); K headers 16; Sub16 16 scales + 128, then d.
pub fn read_row(view: &TensorView<'_>, row: usize, padded: usize, out: &mut Row) {
    let Row { codes, scales } = out;
    codes.clear();
    scales.clear();
    let bytes = &view.bytes[row * view.row_bytes()..][..view.row_bytes()];
    let mut zero = 0;
    match view.format {
        Format::Bf16 => codes.extend_from_slice(bytes),
        Format::Fp8E4M3 => codes.extend_from_slice(bytes),
        Format::Nvfp4 => {
            codes.extend(bytes.iter().flat_map(|b| [b & 15, b >> 4]));
            let Scales::Nvfp4 { blocks, .. } = &view.scales else { unreachable!("checked by validate") };
            scales.extend_from_slice(&blocks[row * (view.cols / 16)..][..view.cols / 16]);
        }
        Format::GgufNvfp4 => {
            for block in bytes.as_chunks::<36>().0 {
                // 0x7F counts as zero there; the top bit is ignored.
                scales.extend(block[..4].iter().map(|&s| if s & 0x7F == 0x7F { 0 } else { s & 0x7F }));
                for sub in block[4..].as_chunks::<8>().0 {
                    codes.extend(sub.iter().map(|b| b & 15));
                    codes.extend(sub.iter().map(|b| b >> 4));
                }
            }
        }
        Format::Int4G32 => {
            zero = 8;
            codes.extend(bytes.iter().flat_map(|b| [b & 15, b >> 4]));
            let Scales::Group32Bf16(groups) = &view.scales else { unreachable!("checked by validate") };
            scales.extend_from_slice(&groups[row * (view.cols / 32) * 2..][..view.cols / 32 * 2]);
        }
        Format::Q4_0 => {
            zero = 8;
            for block in bytes.as_chunks::<18>().0 {
                scales.extend_from_slice(&block[..2]);
                nibbles(codes, &block[2..], |q| q);
            }
        }
        Format::Q4_1 => {
            for block in bytes.as_chunks::<20>().0 {
                scales.extend_from_slice(&block[..4]);
                nibbles(codes, &block[4..], |q| q);
            }
        }
        Format::Q8_0 => {
            zero = 128;
            for block in bytes.as_chunks::<34>().0 {
                scales.extend_from_slice(&block[..2]);
                codes.extend(block[2..].iter().map(|q| q ^ 0x80));
            }
        }
        Format::Q5_0 => {
            zero = 128;
            for block in bytes.as_chunks::<22>().0 {
                scales.extend_from_slice(&block[..2]);
                fifth_bits(codes, &block[2..], |q| q + 128 - 16);
            }
        }
        Format::Iq4Nl => {
            zero = 128;
            for block in bytes.as_chunks::<18>().0 {
                scales.extend_from_slice(&block[..2]);
                nibbles(codes, &block[2..], level);
            }
        }
        Format::Q5_1 => {
            for block in bytes.as_chunks::<24>().0 {
                scales.extend_from_slice(&block[..4]);
                fifth_bits(codes, &block[4..], |q| q);
            }
        }
        Format::Q4K => {
            for block in bytes.as_chunks::<144>().0 {
                scales.extend_from_slice(&block[..16]);
                for pair in block[16..].as_chunks::<32>().0 {
                    nibbles(codes, pair, |q| q);
                }
            }
        }
        Format::Q5K => {
            for block in bytes.as_chunks::<176>().0 {
                scales.extend_from_slice(&block[..16]);
                for j in 0..8 {
                    let low = &block[48 + j / 2 * 32..][..32];
                    let fifth = &block[16..48];
                    codes.extend(
                        low.iter().zip(fifth).map(|(b, f)| b >> (4 * (j % 2)) & 15 | (f >> j & 1) << 4),
                    );
                }
            }
        }
        Format::Q6K => {
            zero = 128;
            for block in bytes.as_chunks::<210>().0 {
                scales.extend(block[192..208].iter().map(|s| s ^ 0x80));
                scales.extend_from_slice(&block[208..]);
                codes.extend((0..256).map(|i| {
                    let low = block[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
                    (low | two_bits(&block[128..192], i) << 4) + 128 - 32
                }));
            }
        }
        Format::Q3K => {
            zero = 128;
            for block in bytes.as_chunks::<110>().0 {
                let subs = q3_k::unpack_scales(block[96..108].as_array().expect("twelve bytes"));
                scales.extend(subs.map(|s| s as u8 ^ 0x80));
                scales.extend_from_slice(&block[108..]);
                codes.extend((0..256).map(|i| {
                    let third = block[i % 32] >> (i / 32) & 1;
                    (two_bits(&block[32..96], i) | third << 2) + 128 - 4
                }));
            }
        }
        Format::Iq4Xs => {
            zero = 128;
            for block in bytes.as_chunks::<136>().0 {
                let high = u16::from_le_bytes([block[2], block[3]]);
                for j in 0..8 {
                    let low = block[4 + j / 2] >> (4 * (j % 2)) & 15;
                    let scale = (low | ((high >> (2 * j) & 3) << 4) as u8) + 128 - 32;
                    scales.extend([scale; 2]);
                }
                scales.extend_from_slice(&block[..2]);
                for sub in block[8..].as_chunks::<16>().0 {
                    nibbles(codes, sub, level);
                }
            }
        }
        // What has no form of its own: through float32, rounded to bf16.
        _ => {
            let mut values = vec![0.0; view.cols];
            decode_row(view, row, &mut values);
            codes.extend(values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()));
        }
    }
    codes.resize(padded * codes.len().div_ceil(view.cols), zero);
}

/// Input `j` in the low nibble of byte `j`, input `j + n` in the high one.
fn nibbles(codes: &mut Vec<u8>, bytes: &[u8], map: impl Fn(u8) -> u8) {
    codes.extend(bytes.iter().map(|b| map(b & 15)));
    codes.extend(bytes.iter().map(|b| map(b >> 4)));
}

/// The same with `qh`, a fifth bit for each input, in front.
fn fifth_bits(codes: &mut Vec<u8>, bytes: &[u8], map: impl Fn(u8) -> u8) {
    let high = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let fifth = |i: usize| ((high >> i & 1) << 4) as u8;
    codes.extend(bytes[4..].iter().enumerate().map(|(j, b)| map(b & 15 | fifth(j))));
    codes.extend(bytes[4..].iter().enumerate().map(|(j, b)| map(b >> 4 | fifth(j + 16))));
}

fn level(code: u8) -> u8 {
    LEVELS[code as usize] as u8 ^ 0x80
}
