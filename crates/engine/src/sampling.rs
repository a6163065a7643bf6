//! From one row of logits to one token.
//!
//! A [`Sampler`] belongs to one request. Each call takes the softcapped logits of one position and carries
//! out, in this order: [`Limits`] and suppress (to -inf), logit bias, penalties, temperature, top-k, top-p, min-p, draw.
//! The order of the filters is the one of Hugging Face transformers. Temperature 0 takes the best token
//! after suppression, bias and penalties.
//!
//! Invariants:
//! - The token is a function of (parameters, logits, position, counts). The random number comes from a
//!   counter-based generator keyed by (seed, position), so neither the neighbours in a batch nor the number
//!   of earlier draws matter, and a verified draft gives the tokens that plain decoding gives.
//! - Equal logits are ordered by token id, lowest first, everywhere.
//! - No call sorts the vocabulary: top-k and top-p find their last kept token by selection in linear time.
//! - Logprobs describe the model's own distribution: no mask, bias, penalty, temperature or filter is in them.
//!
//! Deliberately absent: where masks come from, and stop conditions.

mod filter;
mod mask;
mod params;
mod penalty;
mod random;
mod softmax;

#[cfg(test)]
mod tests;

pub use mask::TokenMask;
pub use params::SamplingParams;
pub use penalty::TokenCounts;
pub use random::{philox4x32, uniform};
pub use softmax::{log_sum_exp, logprobs, top_logprobs};

use filter::Entry;

/// What can be wrong with sampling parameters, logits or token ids.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// A parameter is NaN, infinite or outside its range.
    #[error("{name} is {value}, expected {expected}")]
    Parameter {
        /// Name of the field of [`SamplingParams`].
        name: &'static str,
        /// The value that was given.
        value: f64,
        /// The legal range in words.
        expected: &'static str,
    },
    /// A token id is not in the vocabulary.
    #[error("{name} names token {token}, but the vocabulary has {vocab} tokens (0 to {})", vocab.saturating_sub(1))]
    TokenOutOfRange {
        /// The list that holds the id.
        name: &'static str,
        /// The id.
        token: u32,
        /// Number of tokens in the vocabulary.
        vocab: usize,
    },
    /// `logit_bias` names a token more than once.
    #[error("logit_bias names token {token} more than once, give each token one bias")]
    DuplicateBias {
        /// The id.
        token: u32,
    },
    /// The row of logits has another length than the vocabulary.
    #[error("got {got} logits at position {position}, expected one for each of {vocab} tokens")]
    LogitsLength {
        /// Length of the row.
        got: usize,
        /// Number of tokens in the vocabulary.
        vocab: usize,
        /// Position in the sequence.
        position: u64,
    },
    /// A logit is NaN or +inf; -inf is legal, since masks write it.
    #[error("the logit of token {token} at position {position} is {value}, expected a finite number or -inf")]
    NonFiniteLogit {
        /// The token whose logit it is.
        token: u32,
        /// The value.
        value: f32,
        /// Position in the sequence.
        position: u64,
    },
    /// Every token is masked or suppressed.
    #[error(
        "no token is left to choose from at position {position}: all logits are -inf after masks and suppression"
    )]
    NothingLeft {
        /// Position in the sequence.
        position: u64,
    },
}

/// The token that was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Token id.
    pub token: u32,
    /// Natural logarithm of the token's probability in the model's own distribution, if
    /// [`SamplingParams::logprobs`] asks for it.
    pub logprob: Option<f32>,
    /// The most likely tokens of the model's own distribution with their logprobs, best first; as many as
    /// [`SamplingParams::logprobs`] asks for.
    pub top: Vec<(u32, f32)>,
}

/// What a token may be beside what the parameters say.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Limits<'a> {
    /// Only these.
    pub mask: Option<&'a TokenMask>,
    /// Not these; ids outside the vocabulary are passed over.
    pub without: &'a [u32],
}

impl Limits<'_> {
    fn apply(&self, row: &mut [f32]) {
        if let Some(mask) = self.mask {
            mask.apply(row);
        }
        for token in self.without {
            if let Some(x) = row.get_mut(*token as usize) {
                *x = f32::NEG_INFINITY;
            }
        }
    }
}

/// Draws the tokens of one request.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    vocab: usize,
    scratch: Scratch,
}

/// Buffers kept between calls; no value in them outlives a call.
#[derive(Debug, Clone, Default)]
struct Scratch {
    edited: Vec<f32>,
    weights: Vec<f32>,
    kept: Vec<Entry>,
    order: Vec<Entry>,
}

impl Sampler {
    /// A sampler for logits over `vocab` tokens.
    ///
    /// # Errors
    /// What [`SamplingParams::validate`] finds.
    pub fn new(params: SamplingParams, vocab: usize) -> Result<Self, SamplingError> {
        params.validate(vocab)?;
        Ok(Self { params, vocab, scratch: Scratch::default() })
    }

    /// The parameters this sampler was made with.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Chooses the token that follows a row of softcapped `logits` (one for each token of the vocabulary).
    ///
    /// `position` is the position in the sequence that the token will occupy; it selects the random number.
    /// `counts` says which tokens the penalties apply to.
    ///
    /// # Errors
    /// A row of the wrong length, a NaN or +inf logit, a counted token outside the vocabulary, or a row in
    /// which every token is -inf. The sampler is unchanged by an error.
    pub fn sample(
        &mut self,
        logits: &[f32],
        position: u64,
        counts: &TokenCounts,
    ) -> Result<Sampled, SamplingError> {
        self.sample_limited(logits, None, position, counts, Limits::default())
    }

    /// [`sample`](Self::sample) among the tokens that `limits` leaves; they come before everything else and are
    /// not in the reported logprobs. `best` is a token with the largest logit of a row that was found finite, where
    /// a device has looked already; otherwise that is done here.
    ///
    /// # Errors
    /// As for [`sample`](Self::sample).
    pub fn sample_limited(
        &mut self,
        logits: &[f32],
        best: Option<u32>,
        position: u64,
        counts: &TokenCounts,
        limits: Limits<'_>,
    ) -> Result<Sampled, SamplingError> {
        let kept = self.keep(logits, best, position, counts, limits)?;
        let token = match kept {
            Kept::One(token) => token,
            Kept::All => draw(&self.scratch.weights, uniform(self.params.seed, position)) as u32,
            Kept::Some => {
                self.scratch.weights.clear();
                self.scratch.weights.extend(self.scratch.kept.iter().map(|e| e.weight));
                let index = draw(&self.scratch.weights, uniform(self.params.seed, position));
                self.scratch.kept[index].token
            }
        };
        self.report(logits, position, token)
    }

    /// A token that was chosen elsewhere, with the logprobs that the parameters ask for.
    ///
    /// # Errors
    /// A token outside the row, and as for [`sample`](Self::sample).
    pub fn report(&self, logits: &[f32], position: u64, token: u32) -> Result<Sampled, SamplingError> {
        if token as usize >= logits.len() {
            return Err(SamplingError::TokenOutOfRange { name: "forced", token, vocab: logits.len() });
        }
        let Some(n) = self.params.logprobs else {
            return Ok(Sampled { token, logprob: None, top: Vec::new() });
        };
        let lse = log_sum_exp(logits, position)?;
        let logprob = Some((f64::from(logits[token as usize]) - lse) as f32);
        let top =
            softmax::top_with(logits, n as usize, lse).into_iter().map(|(t, l)| (t, l as f32)).collect();
        Ok(Sampled { token, logprob, top })
    }

    /// The probabilities that [`sample`](Self::sample) draws from: tokens that survive the filters, most
    /// likely first. They add up to 1. Meant for display and tests; it sorts what it returns.
    ///
    /// # Errors
    /// As for [`sample`](Self::sample).
    pub fn distribution(
        &mut self,
        logits: &[f32],
        position: u64,
        counts: &TokenCounts,
    ) -> Result<Vec<(u32, f64)>, SamplingError> {
        let mut weighted: Vec<(u32, f64)> =
            match self.keep(logits, None, position, counts, Limits::default())? {
                Kept::One(token) => vec![(token, 1.0)],
                Kept::All => {
                    let weights = self.scratch.weights.iter().enumerate();
                    weights.filter(|(_, w)| **w > 0.0).map(|(t, w)| (t as u32, f64::from(*w))).collect()
                }
                Kept::Some => {
                    let kept = self.scratch.kept.iter().filter(|e| e.weight > 0.0);
                    kept.map(|e| (e.token, f64::from(e.weight))).collect()
                }
            };
        let total: f64 = weighted.iter().map(|(_, w)| w).sum();
        weighted.iter_mut().for_each(|(_, w)| *w /= total);
        weighted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        Ok(weighted)
    }

    /// Edits the logits and applies the filters. The survivors' weights, relative to the best token's 1,
    /// are left in the scratch, in order of token id.
    fn keep(
        &mut self,
        logits: &[f32],
        best: Option<u32>,
        position: u64,
        counts: &TokenCounts,
        limits: Limits<'_>,
    ) -> Result<Kept, SamplingError> {
        let (p, s) = (&self.params, &mut self.scratch);
        if logits.len() != self.vocab {
            return Err(SamplingError::LogitsLength { got: logits.len(), vocab: self.vocab, position });
        }
        let raw_max = match best.and_then(|best| logits.get(best as usize)) {
            Some(max) => *max,
            None => softmax::checked_max(logits).map_err(|e| e.at(position))?,
        };
        let (row, max) = if p.edits_logits(counts) || limits != Limits::default() {
            s.edited.clear();
            s.edited.extend_from_slice(logits);
            limits.apply(&mut s.edited);
            penalty::edit(&mut s.edited, p, counts)?;
            (s.edited.as_slice(), softmax::checked_max(&s.edited).map_err(|e| e.at(position))?)
        } else {
            (logits, raw_max)
        };
        if max == f32::NEG_INFINITY {
            return Err(SamplingError::NothingLeft { position });
        }
        if p.temperature == 0.0 || p.top_k == 1 {
            let best = row.iter().position(|x| *x == max).expect("the maximum is one of the logits");
            return Ok(Kept::One(best as u32));
        }

        let inverse_temperature = 1.0 / f64::from(p.temperature);
        let top_k = p.top_k as usize;
        let total;
        if top_k != 0 && top_k < row.len() {
            filter::top_k(row, top_k, &mut s.order, &mut s.kept);
            for e in &mut s.kept {
                e.weight = softmax::weight(e.logit, max, inverse_temperature);
            }
            total = s.kept.iter().map(|e| f64::from(e.weight)).sum();
        } else {
            total = softmax::weights(row, max, inverse_temperature, &mut s.weights);
            if p.top_p == 1.0 && p.min_p == 0.0 {
                return Ok(Kept::All);
            }
            filter::above(row, &s.weights, filter::floor(p, total, row.len()), &mut s.kept);
        }
        if p.top_p < 1.0 {
            filter::top_p(&mut s.kept, &mut s.order, f64::from(p.top_p) * total);
        }
        if p.min_p > 0.0 {
            s.kept.retain(|e| e.weight >= p.min_p);
        }
        Ok(Kept::Some)
    }
}

/// Where the survivors of the filters are.
enum Kept {
    /// There is just this token.
    One(u32),
    /// All tokens: `Scratch::weights`, indexed by token.
    All,
    /// `Scratch::kept`.
    Some,
}

/// The index at which the running sum of `weights` passes `u` times their total.
///
/// The sums are taken in float64, by blocks first, so that only one block is walked weight by weight.
fn draw(weights: &[f32], u: f64) -> usize {
    const BLOCK: usize = 512;
    let sum = |block: &[f32]| block.iter().map(|w| f64::from(*w)).sum::<f64>();
    let total: f64 = weights.chunks(BLOCK).map(sum).sum();
    let mut left = u * total;
    let mut last_possible = 0;
    for (b, block) in weights.chunks(BLOCK).enumerate() {
        let mass = sum(block);
        if mass <= left {
            left -= mass;
            if let Some(i) = block.iter().rposition(|w| *w > 0.0) {
                last_possible = b * BLOCK + i;
            }
            continue;
        }
        for (i, w) in block.iter().enumerate().filter(|(_, w)| **w > 0.0) {
            last_possible = b * BLOCK + i;
            left -= f64::from(*w);
            if left < 0.0 {
                return last_possible;
            }
        }
        break;
    }
    // Rounding can leave a remainder of a few units in the last place: the last token with any weight.
    last_possible
}
