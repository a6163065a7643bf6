//! Exponentials over a whole vocabulary, fast and summed in float64.
//!
//! A row has up to 262,144 logits and is needed once a token, so the loops are written for the compiler to
//! turn into vector code: an own exponential instead of the library's, no branch, fixed lanes.

use super::{SamplingError, filter};

/// Where a row of logits is not usable; the position is added by who knows it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct BadLogit {
    token: u32,
    value: f32,
}

impl BadLogit {
    pub fn at(self, position: u64) -> SamplingError {
        SamplingError::NonFiniteLogit { token: self.token, value: self.value, position }
    }
}

/// The largest logit; -inf for a row of nothing but -inf, or for an empty one. NaN and +inf are refused.
pub(super) fn checked_max(row: &[f32]) -> Result<f32, BadLogit> {
    const LANES: usize = 16;
    let mut max = [f32::NEG_INFINITY; LANES];
    // All ones while every value was below +inf, which is false for NaN too.
    let mut good = [u32::MAX; LANES];
    let mut chunks = row.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            let x = chunk[lane];
            max[lane] = if x > max[lane] { x } else { max[lane] };
            good[lane] &= if x < f32::INFINITY { u32::MAX } else { 0 };
        }
    }
    let rest = chunks.remainder();
    if good.contains(&0) || rest.iter().any(|x| !below_infinity(*x)) {
        let token = row.iter().position(|x| !below_infinity(*x)).expect("a lane saw such a value");
        return Err(BadLogit { token: token as u32, value: row[token] });
    }
    Ok(max.iter().chain(rest).fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m }))
}

/// False for NaN as well.
fn below_infinity(x: f32) -> bool {
    x < f32::INFINITY
}

/// exp((logit - max) * inverse_temperature) for a logit that is not above `max`.
///
/// The exponent is split into a whole and a fractional power of two in float64, so that a large distance
/// from the maximum costs no accuracy; 2^fraction is its Taylor series to degree 7 in float32 (remainder
/// below 6e-9 on [-1/2, 1/2]). Relative error below 2.4e-7 (two units in the last place); results below
/// 2^-126 become 0.
#[inline]
pub(super) fn weight(logit: f32, max: f32, inverse_temperature: f64) -> f32 {
    /// 1.5 * 2^52: adding it leaves the nearest integer in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    /// ln(2)^n / n!
    const TAYLOR: [f32; 8] = [
        1.0,
        std::f32::consts::LN_2,
        0.240_226_5,
        0.055_504_11,
        0.009_618_129,
        0.001_333_355_8,
        0.000_154_035_3,
        0.000_015_252_734,
    ];
    let y = (f64::from(logit) - f64::from(max)) * (inverse_temperature * std::f64::consts::LOG2_E);
    let y = if y > -150.0 { y } else { -150.0 };
    let shifted = y + ROUND;
    let fraction = (y - (shifted - ROUND)) as f32;
    let whole = shifted.to_bits() as i32;
    let power = f32::from_bits(((whole + 127).max(0) as u32) << 23);
    TAYLOR.iter().rev().fold(0.0, |sum, c| sum * fraction + c) * power
}

/// Fills `out` with the weights of a row and returns their sum.
pub(super) fn weights(row: &[f32], max: f32, inverse_temperature: f64, out: &mut Vec<f32>) -> f64 {
    out.clear();
    out.extend(row.iter().map(|x| weight(*x, max, inverse_temperature)));
    sum(out)
}

fn sum(weights: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0f64; LANES];
    let mut chunks = weights.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            lanes[lane] += f64::from(chunk[lane]);
        }
    }
    lanes.iter().sum::<f64>() + chunks.remainder().iter().map(|w| f64::from(*w)).sum::<f64>()
}

/// ln of the sum of exp over a row of softcapped logits; a token's logprob is its logit minus this.
///
/// The weights are float32 (relative error below 2.4e-7) and their sum float64, so the exponentials of all
/// logprobs of a row add up to 1 within 1e-6.
///
/// # Errors
/// A NaN or +inf logit, or nothing but -inf, naming `position`.
pub fn log_sum_exp(logits: &[f32], position: u64) -> Result<f64, SamplingError> {
    const BLOCK: usize = 1024;
    let max = checked_max(logits).map_err(|e| e.at(position))?;
    if max == f32::NEG_INFINITY {
        return Err(SamplingError::NothingLeft { position });
    }
    let mut block = [0.0f32; BLOCK];
    let mut total = 0.0;
    for chunk in logits.chunks(BLOCK) {
        for (out, x) in block.iter_mut().zip(chunk) {
            *out = weight(*x, max, 1.0);
        }
        total += sum(&block[..chunk.len()]);
    }
    Ok(f64::from(max) + total.ln())
}

/// Natural-log probabilities of `tokens` under a row of softcapped logits.
///
/// # Errors
/// As [`log_sum_exp`], and a token outside the row.
pub fn logprobs(logits: &[f32], position: u64, tokens: &[u32]) -> Result<Vec<f64>, SamplingError> {
    let lse = log_sum_exp(logits, position)?;
    let of = |token: &u32| match logits.get(*token as usize) {
        Some(x) => Ok(f64::from(*x) - lse),
        None => Err(SamplingError::TokenOutOfRange { name: "logprobs", token: *token, vocab: logits.len() }),
    };
    tokens.iter().map(of).collect()
}

/// The `n` most likely tokens of a row with their natural-log probabilities, best first, equal ones by lowest
/// id; fewer if fewer are above -inf.
///
/// # Errors
/// As [`log_sum_exp`].
pub fn top_logprobs(logits: &[f32], position: u64, n: usize) -> Result<Vec<(u32, f64)>, SamplingError> {
    Ok(top_with(logits, n, log_sum_exp(logits, position)?))
}

/// [`top_logprobs`] for a row whose `log_sum_exp` is known.
pub(super) fn top_with(logits: &[f32], n: usize, lse: f64) -> Vec<(u32, f64)> {
    if n == 0 {
        return Vec::new();
    }
    let (mut buffer, mut kept) = (Vec::new(), Vec::new());
    filter::top_k(logits, n, &mut buffer, &mut kept);
    kept.sort_by(filter::rank);
    kept.iter().map(|e| (e.token, f64::from(e.logit) - lse)).collect()
}
