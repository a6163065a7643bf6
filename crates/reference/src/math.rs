//! The formulas of a pass on plain slices: what a reader checks by eye.
//!
//! Inputs and outputs are float32, everything in between is float64, so a result is the formula's value
//! rounded once.

use lapidary_ops::Activation;

/// `sum_i a_i b_i`.
///
/// Eight partial sums, always the same eight for a given length: the order depends on nothing but the
/// matrix, and the compiler may keep them in registers.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0f64; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a8.remainder().iter().zip(b8.remainder()).map(|(&x, &y)| x as f64 * y as f64).sum();
    for (x, y) in a8.zip(b8) {
        for i in 0..8 {
            sums[i] += x[i] as f64 * y[i] as f64;
        }
    }
    sums.iter().sum::<f64>() + rest
}

/// `x_i * (mean(x^2) + eps)^(-1/2) * gain_i`, in place; no gain is a gain of 1.
pub fn rms_norm(x: &mut [f32], gain: Option<&[f32]>, eps: f32) {
    let mean_square = dot(x, x) / x.len() as f64;
    let factor = 1.0 / (mean_square + eps as f64).sqrt();
    for (i, v) in x.iter_mut().enumerate() {
        let g = gain.map_or(1.0, |g| g[i] as f64);
        *v = (*v as f64 * factor * g) as f32;
    }
}

/// The gate's activation; formulas at [`Activation`].
pub fn activate(f: Activation, u: f64) -> f64 {
    match f {
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (u + 0.044715 * u * u * u);
            0.5 * u * (1.0 + inner.tanh())
        }
        Activation::Silu => u / (1.0 + (-u).exp()),
    }
}

/// `cap * tanh(z / cap)` when there is a cap.
pub fn soft_cap(z: f64, cap: Option<f32>) -> f64 {
    match cap {
        Some(c) => c as f64 * (z / c as f64).tanh(),
        None => z,
    }
}

/// `exp(x_i - max) / sum_j exp(x_j - max)`, in place.
pub fn softmax(x: &mut [f64]) {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    for v in x.iter_mut() {
        *v = (*v - max).exp();
        sum += *v;
    }
    for v in x.iter_mut() {
        *v /= sum;
    }
}

/// Rotates one head in place: pair `(a, b) = (x_i, x_{i + D/2})` becomes `(a cos - b sin, b cos + a sin)`,
/// `cos_sin = [cos_0 .. cos_{D/2-1}, sin_0 .. sin_{D/2-1}]`.
pub fn rotate(x: &mut [f32], cos_sin: &[f32]) {
    let half = x.len() / 2;
    for i in 0..half {
        let (a, b) = (x[i] as f64, x[i + half] as f64);
        let (cos, sin) = (cos_sin[i] as f64, cos_sin[i + half] as f64);
        x[i] = (a * cos - b * sin) as f32;
        x[i + half] = (b * cos + a * sin) as f32;
    }
}

/// The indices of the `k` largest values, descending; of equal values the lower index comes first.
///
/// Values that are not numbers count as the smallest, so the indices are valid whatever comes in.
pub fn top_k(values: &[f64], k: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::with_capacity(k);
    while chosen.len() < k {
        let mut best: Option<usize> = None;
        for i in (0..values.len()).filter(|i| !chosen.contains(i)) {
            let better =
                best.is_none_or(|b| values[i] > values[b] || values[b].is_nan() && !values[i].is_nan());
            if better {
                best = Some(i);
            }
        }
        let Some(i) = best else { break };
        chosen.push(i);
    }
    chosen
}

/// The index of the largest value, the lower one of equals; `None` when any value is not finite.
pub fn argmax(values: &[f32]) -> Option<usize> {
    if !values.iter().all(|v| v.is_finite()) {
        return None;
    }
    let mut best = None;
    for (i, &v) in values.iter().enumerate() {
        if best.is_none_or(|b: usize| v > values[b]) {
            best = Some(i);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gelu(u: f64) -> f64 {
        activate(Activation::GeluTanh, u)
    }

    #[test]
    fn dot_covers_the_tail_beyond_eight() {
        let a: Vec<f32> = (1..=19).map(|i| i as f32).collect();
        let ones = [1.0; 19];
        assert_eq!(dot(&a, &ones), 190.0);
        assert_eq!(dot(&a, &a), 2470.0);
    }

    #[test]
    fn dot_keeps_small_terms_beside_large_ones() {
        // In float32 the one would be lost: 2^25 + 1 has no representation there.
        assert_eq!(dot(&[33554432.0, 1.0, -33554432.0], &[1.0, 1.0, 1.0]), 1.0);
    }

    #[test]
    fn rms_norm_multiplies_by_the_gain_itself() {
        let mut x = [3.0, -4.0];
        rms_norm(&mut x, Some(&[2.0, 0.5]), 0.0);
        // Mean square 12.5.
        let r = 12.5f64.sqrt();
        assert_eq!(x, [(6.0 / r) as f32, (-2.0 / r) as f32]);
    }

    #[test]
    fn rms_norm_adds_epsilon_to_the_mean_square() {
        let mut x = [0.0, 0.0, 0.0];
        rms_norm(&mut x, None, 1e-6);
        assert_eq!(x, [0.0; 3]);
        let mut x = [1.0, 1.0];
        rms_norm(&mut x, None, 3.0);
        assert_eq!(x, [0.5, 0.5]);
    }

    #[test]
    fn gelu_is_the_tanh_form() {
        // tanh t = (1 - e^-2t) / (1 + e^-2t), so gelu(u) = u / (1 + e^-2t): another road to the same value.
        for i in -60..=60 {
            let u = i as f64 / 10.0;
            let t = 0.797_884_560_802_865_4 * (u + 0.044715 * u.powi(3));
            assert!((gelu(u) - u / (1.0 + (-2.0 * t).exp())).abs() < 1e-14, "{u}");
        }
        // The erf form has 0.841344746 at 1; this one must not.
        assert!((gelu(1.0) - 0.841_191_990_608_297).abs() < 1e-12);
        assert_eq!(gelu(0.0), 0.0);
    }

    #[test]
    fn silu_at_known_points() {
        let silu = |u| activate(Activation::Silu, u);
        assert_eq!(silu(0.0), 0.0);
        assert!((silu(1.0) - 0.731_058_578_630_004_9).abs() < 1e-15);
        assert!((silu(-2.0) + 0.238_405_844_044_234_9).abs() < 1e-15);
    }

    #[test]
    fn rotation_pairs_halves_and_not_neighbours() {
        // A quarter turn of pair 0 and none of pair 1.
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rotate(&mut x, &[0.0, 1.0, 1.0, 0.0]);
        assert_eq!(x, [-3.0, 2.0, 1.0, 4.0]);
    }

    #[test]
    fn softmax_survives_large_scores() {
        let mut x = [1000.0, 1000.0 + 3f64.ln()];
        softmax(&mut x);
        assert!((x[0] - 0.25).abs() < 1e-12 && (x[1] - 0.75).abs() < 1e-12);
    }

    #[test]
    fn top_k_breaks_ties_towards_the_lower_index() {
        assert_eq!(top_k(&[1.0, 3.0, 2.0, 3.0, 2.0], 4), [1, 3, 2, 4]);
        assert_eq!(top_k(&[f64::NAN, 1.0, f64::NAN], 2), [1, 0]);
    }

    #[test]
    fn argmax_refuses_what_is_not_finite() {
        assert_eq!(argmax(&[-1.0, 5.0, 5.0]), Some(1));
        assert_eq!(argmax(&[0.0, f32::NAN, 1.0]), None);
        assert_eq!(argmax(&[0.0, f32::NEG_INFINITY]), None);
    }
}
