//! Random numbers without a state. Philox (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
//! as 1, 2, 3", 2011) turns a counter and a key into four words; with the position as counter and the seed
//! as key, any position's number can be had without those before it, on a device as well as here.

/// Philox 4x32 with ten rounds.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let (mut c, mut k) = (counter, key);
    for _ in 0..10 {
        let a = u64::from(MULTIPLIER[0]) * u64::from(c[0]);
        let b = u64::from(MULTIPLIER[1]) * u64::from(c[2]);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// The uniform number in [0, 1) that decides `position` under `seed`: the upper 53 bits of the first two
/// words, the first word being the higher one.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let words =
        philox4x32([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11;
    bits as f64 * (-53f64).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the authors publish with their implementation (kat_vectors of Random123).
    #[test]
    fn philox_gives_the_published_answers() {
        let all = u32::MAX;
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([all; 4], [all; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let expected = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(philox4x32(counter, [0xa409_3822, 0x299f_31d0]), expected);
    }

    #[test]
    fn uniforms_lie_in_the_unit_interval_and_depend_on_every_bit() {
        let base = uniform(0, 0);
        for bit in 0..64 {
            assert_ne!(uniform(1 << bit, 0), base, "seed bit {bit}");
            assert_ne!(uniform(0, 1 << bit), base, "position bit {bit}");
        }
        let mean =
            (0..10_000).map(|i| uniform(3, i)).inspect(|u| assert!((0.0..1.0).contains(u))).sum::<f64>()
                / 1e4;
        // Standard error of the mean of 10,000 uniforms: sqrt(1/12)/100 = 0.0029; five of them.
        assert!((mean - 0.5).abs() < 0.0145, "{mean}");
    }
}
