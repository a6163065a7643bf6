//! Perplexity: how surprised a model is by a text.

use lapidary_engine::Stepper;
use serde::{Deserialize, Serialize};

use super::error::Result;
use super::{Record, Scored, Unit, log_probability};

/// What one unit gave.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PplUnit {
    /// Tokens scored.
    pub tokens: usize,
    /// Sum of `-ln p` over them.
    pub nats: f64,
    /// Sum of the squares of `-ln p`.
    pub squares: f64,
}

/// Perplexity of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Ppl {
    /// Tokens scored.
    pub tokens: usize,
    /// Mean of `-ln p`.
    pub nats: f64,
    /// Standard error of that mean, tokens taken as independent.
    pub standard_error: f64,
    /// What each unit gave.
    pub units: Vec<PplUnit>,
}

impl Ppl {
    /// `exp` of the mean.
    pub fn perplexity(&self) -> f64 {
        self.nats.exp()
    }

    fn of(units: Vec<PplUnit>) -> Ppl {
        let sum = |f: fn(&PplUnit) -> f64| units.iter().map(f).sum::<f64>();
        let tokens = units.iter().map(|u| u.tokens).sum();
        let n = tokens as f64;
        let nats = sum(|u| u.nats) / n;
        let variance = (sum(|u| u.squares) / n - nats * nats).max(0.0);
        Ppl { tokens, nats, standard_error: (variance / n).sqrt(), units }
    }
}

/// Scores every unit, or takes its score from the record.
///
/// # Errors
/// What the engine refuses, and the record's own.
pub fn ppl(
    stepper: &mut Stepper,
    units: &[Unit],
    record: &mut Record,
    progress: &mut dyn FnMut(Scored),
) -> Result<Ppl> {
    let (mut done, total) = (0, Unit::count(units));
    let mut results = Vec::with_capacity(units.len());
    for unit in units {
        results.push(record.next(|| {
            let mut result = PplUnit { tokens: 0, nats: 0.0, squares: 0.0 };
            unit.run(stepper, &mut |token, row| {
                let nats = -log_probability(row, unit.ids[token]);
                result.tokens += 1;
                result.nats += nats;
                result.squares += nats * nats;
            })?;
            Ok(result)
        })?);
        done += unit.scored.len();
        progress(Scored { done, total });
    }
    Ok(Ppl::of(results))
}
