//! exp, tanh and the gate functions on float32, written so that the compiler can run them on whole vectors.
//!
//! Branch-free, no fused multiply-add: the same bits at every level and in every lane. Polynomials and the
//! two-part ln 2 are those of the Cephes library (`expf`, `tanhf`); errors below 3e-7 relative.

use lapidary_ops::Activation;

use crate::level::for_level;

/// `e^x`. Underflows to 0, overflows to infinity, keeps NaN.
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "the published constants")]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let c = x.clamp(-104.0, 89.0);
    let t = c * std::f32::consts::LOG2_E + ROUND;
    let n = t - ROUND;
    let r = c - n * 0.693_359_375 + n * 2.121_944_40e-4;
    let mut p = 1.987_569_15e-4;
    p = p * r + 1.398_199_950_7e-3;
    p = p * r + 8.333_451_907_3e-3;
    p = p * r + 4.166_579_589_4e-2;
    p = p * r + 1.666_666_545_9e-1;
    p = p * r + 5.000_000_120_1e-1;
    let e = p * r * r + r + 1.0;
    // 2^n in two factors, so that both are normal numbers over the whole range.
    let n = (t.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    e * power(half) * power(n.wrapping_sub(half))
}

/// Hyperbolic tangent.
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "the published constants")]
pub(crate) fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let mut p = -5.704_988_727_45e-3;
    p = p * z + 2.063_908_879_54e-2;
    p = p * z - 5.373_971_555_31e-2;
    p = p * z + 1.333_144_220_36e-1;
    p = p * z - 3.333_328_194_22e-1;
    let near = p * z * x + x;
    let far = (1.0 - 2.0 / (exp(2.0 * a) + 1.0)).copysign(x);
    if a < 0.625 { near } else { far }
}

/// `0.5 u (1 + tanh(y))` is `u / (1 + e^(-2y))`; the latter keeps its relative accuracy for large negative u.
#[inline(always)]
fn gelu_tanh(u: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    let y = SQRT_2_OVER_PI * (u + 0.044_715 * u * u * u);
    u / (1.0 + exp(-2.0 * y))
}

#[inline(always)]
fn silu(u: f32) -> f32 {
    u / (1.0 + exp(-u))
}

/// `out = f(gate) * up`, element by element.
pub(crate) fn gate(isa: crate::level::Isa, f: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match f {
        Activation::GeluTanh => gate_gelu(isa, gate, up, out),
        Activation::Silu => gate_silu(isa, gate, up, out),
    }
}

for_level! {
    pub fn gate_gelu(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            *o = gelu_tanh(g) * u;
        }
    }
}

for_level! {
    pub fn gate_silu(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            *o = silu(g) * u;
        }
    }
}

for_level! {
    /// `x = cap * tanh(x / cap)`.
    pub fn softcap(x: &mut [f32], cap: f32) {
        for v in x {
            *v = cap * tanh(*v / cap);
        }
    }
}

for_level! {
    /// `x = x + y`.
    pub fn add(x: &mut [f32], y: &[f32]) {
        for (a, &b) in x.iter_mut().zip(y) {
            *a += b;
        }
    }
}

for_level! {
    /// `x = x * by`.
    pub fn scale(x: &mut [f32], by: f32) {
        for a in x {
            *a *= by;
        }
    }
}

for_level! {
    /// `x = e^(x - m)`; returns the sum, in lanes fixed by position.
    pub fn exp_minus(x: &mut [f32; 32], m: f32) -> f32 {
        for v in x.iter_mut() {
            *v = exp(*v - m);
        }
        let mut lanes = [0.0f32; 8];
        for part in x.chunks_exact(8) {
            for (l, &v) in lanes.iter_mut().zip(part) {
                *l += v;
            }
        }
        ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64, from: f32, to: f32) -> f64 {
        let steps = 200_001;
        (0..steps)
            .map(|i| from + (to - from) * (i as f32 / (steps - 1) as f32))
            .map(|x| {
                let e = exact(f64::from(x));
                ((f64::from(f(x)) - e) / e.abs().max(1e-37)).abs()
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn functions_match_the_exact_ones() {
        assert!(worst(exp, f64::exp, -86.0, 88.0) < 3e-7);
        assert!(worst(tanh, f64::tanh, -12.0, 12.0) < 4e-7);
        let gelu = |u: f64| {
            let y = (2.0 / std::f64::consts::PI).sqrt() * (u + 0.044715 * u * u * u);
            u / (1.0 + (-2.0 * y).exp())
        };
        // The argument's own rounding is amplified by its size: |2y| up to 40 here, 40 * 2^-24 * 4.
        assert!(worst(gelu_tanh, gelu, -4.5, 8.0) < 1e-5);
        assert!(worst(silu, |u| u / (1.0 + (-u).exp()), -40.0, 40.0) < 5e-6);
    }

    #[test]
    fn ends_and_not_a_number() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
        assert_eq!(tanh(100.0), 1.0);
        assert_eq!(tanh(-100.0), -1.0);
        assert_eq!(silu(-1000.0), 0.0);
    }

    #[test]
    fn the_tanh_gate_is_not_the_erf_gate() {
        // Exact erf gate at 2: 1.954499736; tanh form: 1.954597694.
        assert!((gelu_tanh(2.0) - 1.954_597_7).abs() < 1e-6);
    }
}
