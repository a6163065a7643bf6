//! How far runs of a model are from a reference run, token by token.

use std::ops::Range;

use lapidary_engine::{Heads, Prompt, Stepper};
use serde::{Deserialize, Serialize};

use super::error::{EvalError, Result};
use super::{Record, Scored, Unit, distance};

/// Something that gives rows of logits for a unit: a model, or a file of them.
pub trait Rows {
    /// Tokens of the vocabulary.
    fn vocab(&self) -> usize;

    /// Makes ready for a unit.
    ///
    /// # Errors
    /// What the engine refuses.
    fn begin(&mut self, unit: &Unit) -> Result<()>;

    /// Hands the rows that predict `tokens` of the unit to `sink`. Ranges follow one another, the first begins where the
    /// unit's scored tokens begin.
    ///
    /// # Errors
    /// What the engine refuses.
    fn rows(&mut self, unit: &Unit, tokens: Range<usize>, sink: &mut dyn FnMut(&[f32])) -> Result<()>;
}

/// Rows that a model computes.
#[derive(Debug)]
pub struct StepperRows<'a>(pub &'a mut Stepper);

impl Rows for StepperRows<'_> {
    fn vocab(&self) -> usize {
        self.0.model().config.vocab
    }

    fn begin(&mut self, unit: &Unit) -> Result<()> {
        self.0.reset();
        let first = unit.scored.start - 1;
        if first > 0 {
            self.0.prefill_each(&Prompt::from(&unit.ids[..first]), Heads::None, &mut |_| {})?;
        }
        Ok(())
    }

    fn rows(&mut self, unit: &Unit, tokens: Range<usize>, sink: &mut dyn FnMut(&[f32])) -> Result<()> {
        let predicting = Prompt::from(&unit.ids[tokens.start - 1..tokens.end - 1]);
        self.0.score(&predicting, &mut |_, row| sink(row), &mut |_, _| {})?;
        Ok(())
    }
}

/// What one unit gave for one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KlUnit {
    /// `KL(reference || test)` of each position, in nats.
    pub kl: Vec<f32>,
    /// Positions at which both have the same best token.
    pub same_top: usize,
    /// Sum over all logits of the squared differences.
    pub error_squares: f64,
    /// Sum over all logits of the squared reference.
    pub squares: f64,
    /// Largest difference of a logit.
    pub max_error: f64,
    /// Sums of `-ln p` of the tokens that really follow, by reference and test.
    pub nats: [f64; 2],
}

/// How far one run is from the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Kl {
    /// Positions compared.
    pub positions: usize,
    /// Mean of `KL(reference || test)` in nats.
    pub mean: f64,
    /// Standard error of that mean, positions taken as independent.
    pub standard_error: f64,
    /// Median.
    pub median: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest.
    pub max: f64,
    /// Share of positions with the same best token.
    pub same_top: f64,
    /// Root mean square of the logits' differences.
    pub logit_rms: f64,
    /// That over the root mean square of the reference's logits.
    pub logit_relative: f64,
    /// Largest difference of a logit.
    pub logit_max: f64,
    /// Mean of `-ln p` of the tokens that really follow, by reference and test.
    pub nats: [f64; 2],
}

impl Kl {
    fn of(units: &[KlUnit], vocab: usize) -> Kl {
        let mut kl: Vec<f64> = units.iter().flat_map(|u| &u.kl).map(|&v| f64::from(v)).collect();
        kl.sort_by(f64::total_cmp);
        let positions = kl.len();
        let n = positions as f64;
        let sum = |f: fn(&KlUnit) -> f64| units.iter().map(f).sum::<f64>();
        let mean = kl.iter().sum::<f64>() / n;
        let variance = kl.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        // The smallest value that at least this share of the positions doesn't exceed.
        let percentile = |share: f64| kl[((share * n).ceil() as usize).clamp(1, positions) - 1];
        let logits = n * vocab as f64;
        let (errors, squares) = (sum(|u| u.error_squares), sum(|u| u.squares));
        Kl {
            positions,
            mean,
            standard_error: (variance / n).sqrt(),
            median: percentile(0.5),
            p99: percentile(0.99),
            max: kl[positions - 1],
            same_top: units.iter().map(|u| u.same_top).sum::<usize>() as f64 / n,
            logit_rms: (errors / logits).sqrt(),
            logit_relative: if errors == 0.0 { 0.0 } else { (errors / squares).sqrt() },
            logit_max: units.iter().fold(0.0, |max, u| max.max(u.max_error)),
            nats: [sum(|u| u.nats[0]) / n, sum(|u| u.nats[1]) / n],
        }
    }
}

/// Positions whose rows of the reference are kept at a time.
const ROWS_AT_ONCE: usize = 16;

/// Compares every run of `tests` with the reference over all units. The reference computes each row once.
///
/// # Errors
/// [`EvalError::Vocabulary`], what the engine refuses, the record's own.
pub fn kl(
    reference: &mut dyn Rows,
    tests: &mut [&mut dyn Rows],
    units: &[Unit],
    record: &mut Record,
    progress: &mut dyn FnMut(Scored),
) -> Result<Vec<Kl>> {
    let vocab = reference.vocab();
    if let Some(test) = tests.iter().find(|t| t.vocab() != vocab) {
        return Err(EvalError::Vocabulary { reference: vocab, test: test.vocab() });
    }
    let (mut done, total) = (0, Unit::count(units));
    if total == 0 {
        return Err(EvalError::Nothing { what: "no token counts".to_owned() });
    }
    let mut results: Vec<Vec<KlUnit>> = vec![Vec::new(); tests.len()];
    for unit in units {
        let of_unit = record.next(|| compare(reference, tests, unit, vocab))?;
        results.iter_mut().zip(of_unit).for_each(|(list, result)| list.push(result));
        done += unit.scored.len();
        progress(Scored { done, total });
    }
    Ok(results.iter().map(|units| Kl::of(units, vocab)).collect())
}

fn compare(
    reference: &mut dyn Rows,
    tests: &mut [&mut dyn Rows],
    unit: &Unit,
    vocab: usize,
) -> Result<Vec<KlUnit>> {
    reference.begin(unit)?;
    tests.iter_mut().try_for_each(|t| t.begin(unit))?;
    let mut results = vec![KlUnit::default(); tests.len()];
    let mut kept: Vec<f32> = Vec::with_capacity(ROWS_AT_ONCE * vocab);
    for start in unit.scored.clone().step_by(ROWS_AT_ONCE) {
        let tokens = start..unit.scored.end.min(start + ROWS_AT_ONCE);
        kept.clear();
        reference.rows(unit, tokens.clone(), &mut |row| kept.extend_from_slice(row))?;
        for (test, result) in tests.iter_mut().zip(&mut results) {
            let mut pairs = kept.chunks_exact(vocab).zip(&unit.ids[tokens.clone()]);
            test.rows(unit, tokens.clone(), &mut |row| {
                let (expected, &next) = pairs.next().expect("as many rows as the reference gave");
                let d = distance(expected, row);
                result.kl.push(d.kl as f32);
                result.same_top += usize::from(d.same_top);
                result.error_squares += d.error_squares;
                result.squares += d.squares;
                result.max_error = result.max_error.max(d.max_error);
                for (nats, (row, log_sum)) in
                    result.nats.iter_mut().zip([(expected, d.log_sums[0]), (row, d.log_sums[1])])
                {
                    *nats += log_sum - f64::from(row[next as usize]);
                }
            })?;
        }
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_means_by_hand() {
        let unit = KlUnit {
            kl: (1..=200).rev().map(|v| v as f32).collect(),
            same_top: 150,
            error_squares: 8.0,
            squares: 32.0,
            max_error: 3.0,
            nats: [200.0, 400.0],
        };
        let kl = Kl::of(&[unit.clone(), unit], 4);
        assert_eq!((kl.positions, kl.median, kl.p99, kl.max), (400, 100.0, 198.0, 200.0));
        assert_eq!((kl.mean, kl.same_top, kl.nats), (100.5, 0.75, [1.0, 2.0]));
        assert_eq!((kl.logit_rms, kl.logit_relative, kl.logit_max), ((16f64 / 1600.0).sqrt(), 0.5, 3.0));
    }
}
