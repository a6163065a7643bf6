//! E2M1, the four-bit number of MXFP4 and NVFP4: a sign and one of eight magnitudes.

/// The largest E2M1 number.
pub const E2M1_MAX: f32 = 6.0;

/// Value of every E2M1 code; 8 is negative zero.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Twice the value of every E2M1 code as an integer, the table of integer kernels. Negative zero becomes zero.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Value of the E2M1 code in the low four bits.
#[inline]
pub fn e2m1_to_f32(code: u8) -> f32 {
    E2M1[(code & 15) as usize]
}

/// The nearest E2M1 code, ties to the even code; numbers beyond 6 become 6 with their sign, NaN becomes 6.
pub fn e2m1_from_f32(value: f32) -> u8 {
    let magnitude = value.abs();
    let code = if magnitude <= 0.25 {
        0
    } else if magnitude < 0.75 {
        1
    } else if magnitude <= 1.25 {
        2
    } else if magnitude < 1.75 {
        3
    } else if magnitude <= 2.5 {
        4
    } else if magnitude < 3.5 {
        5
    } else if magnitude <= 5.0 {
        6
    } else {
        7
    };
    if value.is_sign_negative() { code | 8 } else { code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_encodes_to_itself_and_doubles() {
        for code in 0..16u8 {
            assert_eq!(e2m1_from_f32(e2m1_to_f32(code)), code);
            assert_eq!(2.0 * e2m1_to_f32(code), E2M1_DOUBLED[code as usize] as f32);
        }
    }
}
