//! Eight-bit numbers: E4M3 values, and the two eight-bit scale types E8M0 and UE4M3.
//!
//! ```text
//! E4M3   s eeee mmm   bias 7; exponent 0 is subnormal (m * 2^-9); no infinities; s.1111.111 is NaN; 448 the largest
//! UE4M3  . eeee mmm   E4M3 without its sign: a set top bit is no number of the format
//! E8M0     eeeeeeee   2^(e - 127); 255 is NaN
//! ```
//!
//! The tables are computed at compile time from these definitions, so they are the definitions.

/// The largest finite E4M3 number.
pub const E4M3_MAX: f32 = 448.0;

/// Value of every E4M3 byte; NaN at 0x7F and 0xFF.
pub static E4M3: [f32; 256] = e4m3_table();

/// Value of an E4M3 byte (finite-only variant, `F8_E4M3` in safetensors).
#[inline]
pub fn e4m3_to_f32(code: u8) -> f32 {
    E4M3[code as usize]
}

/// The nearest E4M3 byte, ties to even; numbers beyond 448 become 448 with their sign, NaN becomes NaN.
pub fn e4m3_from_f32(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7F;
    }
    if magnitude < 1.0 / 64.0 {
        // Subnormals are multiples of 2^-9. Rounding up to eight of them gives 0x08, the smallest normal number.
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0x7_FFFF + (bits >> 20 & 1);
    // Exponent and mantissa are adjacent in both layouts; only the bias differs (127 - 7 = 120).
    let code = (rounded >> 20) - (120 << 3);
    sign | code.min(0x7E) as u8
}

/// Value of a UE4M3 byte. 0x7F, which would be NaN, counts as zero and the top bit is ignored, as ggml decodes
/// it; [`validate`](crate::validate) refuses both.
#[inline]
pub fn ue4m3_to_f32(code: u8) -> f32 {
    match code {
        0x7F => 0.0,
        // The one place where ignoring the top bit shows: 0xFF continues the number line to 480.
        0xFF => 480.0,
        _ => E4M3[(code & 0x7F) as usize],
    }
}

/// The nearest UE4M3 byte of a number that isn't negative, ties to even, at most 448.
pub fn ue4m3_from_f32(value: f32) -> u8 {
    e4m3_from_f32(value.max(0.0))
}

/// Value of an E8M0 byte: `2^(code - 127)`, NaN for 255.
#[inline]
pub fn e8m0_to_f32(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let exponent = (code as u32 >> 3) & 15;
        let mantissa = code as u32 & 7;
        let magnitude = if exponent == 15 && mantissa == 7 {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 / 512.0
        } else {
            f32::from_bits((exponent + 120) << 23 | mantissa << 20)
        };
        table[code] = if code >= 128 { -magnitude } else { magnitude };
        code += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_e4m3_number_encodes_to_itself() {
        for code in 0..=255u8 {
            let value = e4m3_to_f32(code);
            if value.is_nan() {
                assert_eq!(code & 0x7F, 0x7F);
            } else {
                assert_eq!(e4m3_from_f32(value), code, "{value}");
            }
        }
    }

    #[test]
    fn e4m3_saturates_and_rounds_ties_to_even() {
        assert_eq!(e4m3_to_f32(0x7E), E4M3_MAX);
        assert_eq!(e4m3_from_f32(1e30), 0x7E);
        assert_eq!(e4m3_from_f32(f32::NEG_INFINITY), 0xFE);
        assert_eq!(e4m3_from_f32(1.0 + 1.0 / 16.0), 0x38);
        assert_eq!(e4m3_from_f32(1.0 + 3.0 / 16.0), 0x3A);
        assert_eq!(e4m3_from_f32(0.5 / 512.0), 0x00);
        assert_eq!(e4m3_from_f32(1.5 / 512.0), 0x02);
        assert_eq!(e4m3_from_f32(7.75 / 512.0), 0x08);
    }

    #[test]
    fn e8m0_spans_subnormal_to_nan() {
        assert_eq!(e8m0_to_f32(0), 2f32.powi(-127));
        assert_eq!(e8m0_to_f32(127), 1.0);
        assert_eq!(e8m0_to_f32(254), 2f32.powi(127));
        assert!(e8m0_to_f32(255).is_nan());
    }
}
