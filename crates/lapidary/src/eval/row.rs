//! What two rows of logits say of each other, and one of a token.

/// `ln(sum exp z)`, in float64 around the largest.
fn log_sum_exp(row: &[f32]) -> f64 {
    let best = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    best + row.iter().map(|&z| (f64::from(z) - best).exp()).sum::<f64>().ln()
}

/// Natural logarithm of the probability that `row` gives to `token`.
///
/// # Panics
/// When the token is outside the row.
pub fn log_probability(row: &[f32], token: u32) -> f64 {
    f64::from(row[token as usize]) - log_sum_exp(row)
}

/// How far a row of logits is from a reference row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distance {
    /// `KL(reference || test)` in nats.
    pub kl: f64,
    /// Whether both have the same largest logit (ties: the lower id).
    pub same_top: bool,
    /// Sum of the squared differences of the logits.
    pub error_squares: f64,
    /// Sum of the squared reference logits.
    pub squares: f64,
    /// Largest difference of a logit.
    pub max_error: f64,
    /// `ln(sum exp z)` of reference and test.
    pub log_sums: [f64; 2],
}

/// Compares two rows of equal length.
pub fn distance(reference: &[f32], test: &[f32]) -> Distance {
    assert_eq!(reference.len(), test.len(), "rows of one vocabulary");
    let log_sums = [log_sum_exp(reference), log_sum_exp(test)];
    let mut d = Distance {
        kl: 0.0,
        same_top: top(reference) == top(test),
        error_squares: 0.0,
        squares: 0.0,
        max_error: 0.0,
        log_sums,
    };
    for (&r, &t) in reference.iter().zip(test) {
        let (r, t) = (f64::from(r), f64::from(t));
        let (log_p, log_q) = (r - log_sums[0], t - log_sums[1]);
        d.kl += log_p.exp() * (log_p - log_q);
        d.error_squares += (t - r).powi(2);
        d.squares += r * r;
        d.max_error = d.max_error.max((t - r).abs());
    }
    d
}

fn top(row: &[f32]) -> usize {
    row.iter().enumerate().fold(0, |best, (i, &z)| if z > row[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_by_hand() {
        // Probabilities 1/2, 1/4, 1/4 and 1/4, 1/2, 1/4; a shift of all logits changes none.
        let (p, q) = ([2f32.ln() + 5.0, 5.0, 5.0], [-7.0, 2f32.ln() - 7.0, -7.0]);
        assert!((log_probability(&p, 0) - 0.5f64.ln()).abs() < 1e-6);
        let d = distance(&p, &q);
        let expected = 0.5 * 2f64.ln() - 0.25 * 2f64.ln();
        assert!((d.kl - expected).abs() < 1e-6 && !d.same_top, "{d:?}");
        assert!((d.max_error - (12.0 + 2f64.ln())).abs() < 1e-5);
        let same = distance(&p, &p);
        assert_eq!((same.kl, same.same_top, same.error_squares), (0.0, true, 0.0));
    }

    #[test]
    fn logits_of_any_size_have_finite_logarithms() {
        let row = [30_000.0, -30_000.0, 29_999.0];
        assert!((log_probability(&row, 0) + (1.0 + (-1f64).exp()).ln()).abs() < 1e-12);
        // Double precision at this size.
        assert!((log_probability(&row, 1) + 60_000.0 + (1.0 + (-1f64).exp()).ln()).abs() < 1e-10);
    }
}
