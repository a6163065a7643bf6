//! Random weights, made as encoded blocks at the speed of memory: codes are random bits, and each block's scale is such
//! that its values have mean 0 and the wanted deviation.

use lapidary_formats::{EncodedScales, Format, encode_rows};

/// SplitMix64.
pub(super) struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Even in `[0, 1)`.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Of deviation 1, by Box and Muller's formula.
    pub fn normal(&mut self) -> f32 {
        let (r, turn) = (1.0 - self.unit(), self.unit());
        (-2.0 * r.ln()).sqrt() * (std::f32::consts::TAU * turn).cos()
    }

    fn bytes(&mut self, out: &mut [u8]) {
        for piece in out.chunks_mut(8) {
            piece.copy_from_slice(&self.next().to_le_bytes()[..piece.len()]);
        }
    }
}

/// Entries of the table that scales, or whole values of plain formats, are drawn from.
const TABLE: usize = 1 << 12;

/// Makes blocks of one format and deviation.
pub(super) struct Filler {
    format: Format,
    /// Encoded scales of blocks; of plain formats, values.
    table: Vec<[u8; 2]>,
    /// Encoded minimums that belong to the scales, where blocks have them.
    minimums: Vec<[u8; 2]>,
}

/// Deviation of even codes about their middle: of `n` neighbouring integers, `sqrt((n^2 - 1) / 12)`; about the integer
/// half a step beside the middle, `sqrt((n^2 + 2) / 12)`.
fn code_deviation(format: Format) -> f32 {
    match format {
        Format::Q8_0 => (65_538f32 / 12.0).sqrt(),
        Format::Q6K => (4_098f32 / 12.0).sqrt(),
        Format::Q5_0 => (1_026f32 / 12.0).sqrt(),
        Format::Q4_0 => (258f32 / 12.0).sqrt(),
        Format::Q4K => (255f32 / 12.0).sqrt(),
        other => unreachable!("no mix has {other}"),
    }
}

/// Mean of the sub-block scales of K-quants, which are even in 33..=63 and in 32..=95.
fn mean_sub_scale(format: Format) -> f32 {
    match format {
        Format::Q4K => 48.0,
        Format::Q6K => 63.5,
        _ => 1.0,
    }
}

impl Filler {
    pub fn new(format: Format, deviation: f32, rng: &mut Rng) -> Filler {
        if matches!(format, Format::F16 | Format::Bf16) {
            let values: Vec<f32> = (0..TABLE).map(|_| deviation * rng.normal()).collect();
            return Filler { format, table: halves(format, &values), minimums: Vec::new() };
        }
        let scale = deviation / code_deviation(format) / mean_sub_scale(format);
        // Codes of most formats reach one step further down than up; scales of either sign even that out. Where a
        // minimum cancels the codes' mean there is nothing to even out.
        let sign = |i: usize| if format != Format::Q4K && i % 2 == 1 { -1.0 } else { 1.0 };
        let scales: Vec<f32> = (0..TABLE).map(|i| sign(i) * scale * (0.8 + 0.4 * rng.unit())).collect();
        let middle_code = 7.5;
        let minimums: Vec<f32> = scales.iter().map(|scale| middle_code * scale).collect();
        Filler {
            format,
            table: halves(Format::F16, &scales),
            minimums: if format == Format::Q4K { halves(Format::F16, &minimums) } else { Vec::new() },
        }
    }

    /// Fills whole blocks.
    pub fn fill(&self, out: &mut [u8], rng: &mut Rng) {
        if self.format.block_len() == 1 {
            for four in out.chunks_mut(8) {
                let mut random = rng.next();
                for value in four.chunks_exact_mut(2) {
                    value.copy_from_slice(&self.table[random as usize % TABLE]);
                    random >>= 16;
                }
            }
            return;
        }
        rng.bytes(out);
        for block in out.chunks_exact_mut(self.format.block_bytes()) {
            let random = rng.next();
            let at = random as usize % TABLE;
            match self.format {
                Format::Q6K => {
                    // 128 low nibble pairs, 64 bytes of high bits, 16 scales, the block's scale.
                    block[192..208].iter_mut().for_each(|scale| *scale = 32 + *scale % 64);
                    block[208..].copy_from_slice(&self.table[at]);
                }
                Format::Q4K => {
                    block[..2].copy_from_slice(&self.table[at]);
                    block[2..4].copy_from_slice(&self.minimums[at]);
                    equal_scales_and_minimums(&mut block[4..16]);
                }
                _ => block[..2].copy_from_slice(&self.table[at]),
            }
        }
    }
}

/// Makes of 12 random bytes the packed 6-bit scales and minimums of a Q4_K block's eight parts, a part's two equal.
fn equal_scales_and_minimums(packed: &mut [u8]) {
    let sub_scale = |random: u8| 33 + random % 31;
    for i in 0..4 {
        let (low, high) = (sub_scale(packed[i]), sub_scale(packed[i + 4]));
        // Parts 0 to 3 lie in the low six bits; above them are the high two of parts 4 to 7, whose low four come last.
        packed[i] = low | (high >> 4 << 6);
        packed[i + 4] = packed[i];
        packed[i + 8] = (high & 15) * 17;
    }
}

/// Encodes values as a plain format of two bytes.
fn halves(format: Format, values: &[f32]) -> Vec<[u8; 2]> {
    let encoded = encode_rows(format, values, 1, values.len()).expect("the values are small and finite");
    debug_assert!(matches!(encoded.scales, EncodedScales::None));
    encoded.bytes.as_chunks::<2>().0.to_vec()
}

#[cfg(test)]
mod tests {
    use lapidary_formats::{Scales, TensorView, decode_row};

    use super::*;

    /// 96 rows of 2,560 values: the mean of as many is off by 1 / 496 of the deviation on average, and the deviation by
    /// less; scales that vary make both somewhat larger.
    #[test]
    fn blocks_have_mean_0_and_the_wanted_deviation() {
        let (rows, cols) = (96, 2560);
        for format in
            [Format::F16, Format::Bf16, Format::Q8_0, Format::Q4_0, Format::Q5_0, Format::Q4K, Format::Q6K]
        {
            let mut rng = Rng::new(3);
            let mut bytes = vec![0; rows * format.row_bytes(cols).expect("whole blocks")];
            Filler::new(format, 0.02, &mut rng).fill(&mut bytes, &mut rng);
            let view =
                TensorView { name: "w".into(), format, rows, cols, bytes: &bytes, scales: Scales::None };
            let mut values = vec![0.0; rows * cols];
            for (row, out) in values.chunks_exact_mut(cols).enumerate() {
                decode_row(&view, row, out);
            }
            assert!(values.iter().all(|v| v.is_finite()), "{format}");
            let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / values.len() as f64;
            let square = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / values.len() as f64;
            assert!(mean.abs() < 0.02 * 0.02, "{format}: mean {mean}");
            let deviation = square.sqrt() / 0.02;
            assert!((0.97..1.07).contains(&deviation), "{format}: deviation {deviation} of the wanted one");
        }
    }
}
