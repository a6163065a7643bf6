//! How far two runs of numbers are apart.

use std::fmt;

/// What [`compare`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Whether every number on both sides is finite. The distances mean nothing when it is not.
    pub finite: bool,
    /// Largest `|actual - expected|`.
    pub max_abs: f64,
    /// Root mean square of the differences over that of the expected numbers; infinite when only the
    /// expected numbers are all zero.
    pub rel_rms: f64,
    /// Where the largest difference is, or the first number that is not finite.
    pub worst: usize,
    /// The number there.
    pub actual: f32,
    /// What was expected there.
    pub expected: f32,
    /// How many numbers were compared.
    pub len: usize,
}

/// The largest distances that are accepted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// For [`Report::rel_rms`].
    pub rel: f64,
    /// For [`Report::max_abs`].
    pub max: f64,
}

impl Limits {
    /// A float32 engine against the goldens: about ten times the float32 noise of the published
    /// implementation, and ten times less than the mildest of the known mistakes costs.
    pub const FLOAT32: Limits = Limits { rel: 5e-5, max: 5e-3 };
}

/// Compares number by number.
///
/// # Panics
/// When the lengths differ or there is nothing to compare: a test that compares nothing must not pass.
#[track_caller]
pub fn compare(actual: &[f32], expected: &[f32]) -> Report {
    assert_eq!(actual.len(), expected.len(), "as many numbers as expected");
    assert!(!actual.is_empty(), "numbers to compare");
    let at = |finite, worst: usize, max_abs, rel_rms| Report {
        finite,
        max_abs,
        rel_rms,
        worst,
        actual: actual[worst],
        expected: expected[worst],
        len: actual.len(),
    };
    let pairs = || actual.iter().zip(expected).map(|(&a, &e)| (a as f64, e as f64));
    if let Some(i) = pairs().position(|(a, e)| !a.is_finite() || !e.is_finite()) {
        return at(false, i, f64::INFINITY, f64::INFINITY);
    }
    let (mut worst, mut max_abs, mut error, mut size) = (0, 0.0, 0.0, 0.0);
    for (i, (a, e)) in pairs().enumerate() {
        let d = (a - e).abs();
        if d > max_abs {
            (worst, max_abs) = (i, d);
        }
        error += d * d;
        size += e * e;
    }
    let rel_rms = if error == 0.0 { 0.0 } else { (error / size).sqrt() };
    at(true, worst, max_abs, rel_rms)
}

/// Asserts that a comparison stays within `limits`, finite first.
///
/// # Panics
/// When it does not; the message says where and how far.
#[track_caller]
pub fn assert_close(what: &str, report: &Report, limits: Limits) {
    assert!(report.finite, "{what}: not finite: {report}");
    let close = report.rel_rms <= limits.rel && report.max_abs <= limits.max;
    assert!(close, "{what}: beyond rel {:e} max {:e}: {report}", limits.rel, limits.max);
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { max_abs, rel_rms, worst, actual, expected, len, .. } = self;
        write!(f, "rel {rel_rms:.3e}, max {max_abs:.3e} at {worst} of {len} ({actual}, expected {expected})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_by_hand() {
        let r = compare(&[1.0, 2.0, 3.5], &[1.0, 2.25, 3.0]);
        assert_eq!((r.finite, r.max_abs, r.worst, r.actual, r.expected), (true, 0.5, 2, 3.5, 3.0));
        let rel = ((0.0625 + 0.25) / (1.0 + 5.0625 + 9.0f64)).sqrt();
        assert!((r.rel_rms - rel).abs() < 1e-15);
        assert_eq!(compare(&[1.0], &[0.0]).rel_rms, f64::INFINITY);
        assert_eq!(compare(&[0.0], &[0.0]).rel_rms, 0.0);
    }

    #[test]
    fn what_is_not_finite_is_never_close() {
        // An infinity equals itself and a NaN compares as false with any limit: both must fail.
        for (a, e) in [(f32::NAN, 1.0), (f32::INFINITY, f32::INFINITY), (1.0, f32::NAN)] {
            let r = compare(&[0.0, a], &[0.0, e]);
            assert!(!r.finite && r.worst == 1);
            let wide = Limits { rel: f64::INFINITY, max: f64::INFINITY };
            assert!(std::panic::catch_unwind(|| assert_close("x", &r, wide)).is_err());
        }
    }

    #[test]
    fn each_limit_is_held_alone() {
        let r = compare(&[1.0, 100.0], &[1.01, 100.0]);
        let close =
            |rel, max| std::panic::catch_unwind(|| assert_close("x", &r, Limits { rel, max })).is_ok();
        assert!(close(1e-3, 0.02));
        assert!(!close(1e-5, 0.02));
        assert!(!close(1e-3, 0.001));
    }
}
