//! The knobs of one request and their legal ranges. Ranges are checked once, when a sampler is made, so that
//! no step of a running request can fail because of them.

use lapidary_ops::Draw;

use super::{SamplingError, TokenCounts};

/// How the tokens of one request are chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy. Finite and not negative.
    pub temperature: f32,
    /// Keeps the `top_k` best tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the smallest set of best tokens whose probability reaches `top_p`, at least one; 1 keeps all.
    /// From 0 to 1.
    pub top_p: f32,
    /// Drops tokens less likely than `min_p` times the likeliest; 0 keeps all. From 0 to 1.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or answer; 1 is none.
    /// Finite and above 0.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that the answer has. From -2 to 2.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time the answer has it. From -2 to 2.
    pub frequency_penalty: f32,
    /// Added to the logits of tokens. Finite, each token at most once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that are never chosen, greedy included.
    pub suppress: Vec<u32>,
    /// Key of the random numbers.
    pub seed: u64,
    /// `Some(n)` reports the chosen token's logprob and the `n` best tokens'. `None` saves the pass over the
    /// vocabulary that this takes.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    /// What Gemma 4's own `generation_config.json` asks for: temperature 1, top-k 64, top-p 0.95.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 64,
            top_p: 0.95,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            suppress: Vec::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// The best token at every position.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks every field against its range and every token id against a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// The first field that is out of range, by name.
    pub fn validate(&self, vocab: usize) -> Result<(), SamplingError> {
        let check = |ok: bool, name, value: f32, expected| match ok {
            true => Ok(()),
            false => Err(SamplingError::Parameter { name, value: f64::from(value), expected }),
        };
        let (t, r) = (self.temperature, self.repetition_penalty);
        check(t.is_finite() && t >= 0.0, "temperature", t, "a finite number from 0 (greedy) up")?;
        check((0.0..=1.0).contains(&self.top_p), "top_p", self.top_p, "a number from 0 to 1 (off)")?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p, "a number from 0 (off) to 1")?;
        check(r.is_finite() && r > 0.0, "repetition_penalty", r, "a finite number above 0 (1 is off)")?;
        for (name, v) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            check((-2.0..=2.0).contains(&v), name, v, "a number from -2 to 2 (0 is off)")?;
        }

        let known = |name, token: u32| match (token as usize) < vocab {
            true => Ok(()),
            false => Err(SamplingError::TokenOutOfRange { name, token, vocab }),
        };
        let mut biased: Vec<u32> = Vec::with_capacity(self.logit_bias.len());
        for (token, bias) in &self.logit_bias {
            known("logit_bias", *token)?;
            check(bias.is_finite(), "logit_bias", *bias, "a finite number")?;
            biased.push(*token);
        }
        biased.sort_unstable();
        if let Some(pair) = biased.windows(2).find(|w| w[0] == w[1]) {
            return Err(SamplingError::DuplicateBias { token: pair[0] });
        }
        for token in &self.suppress {
            known("suppress", *token)?;
        }
        match self.logprobs {
            Some(n) if n as usize > vocab => Err(SamplingError::Parameter {
                name: "logprobs",
                value: f64::from(n),
                expected: "at most the number of tokens in the vocabulary",
            }),
            _ => Ok(()),
        }
    }

    /// Whether the choice is the model's own best token, so that no logits need be looked at.
    pub fn is_plain_greedy(&self) -> bool {
        self.temperature == 0.0
            && self.logprobs.is_none()
            && self.suppress.is_empty()
            && self.logit_bias.is_empty()
            && !self.penalises()
    }

    /// How a device draws the token at `position` from the logits as they are, if it can: with few tokens kept, few
    /// suppressed, nothing else edited and no probabilities asked for. The token is the sampler's own.
    pub fn draw(&self, position: u64) -> Option<Draw> {
        let top_k = if self.temperature == 0.0 { 1 } else { self.top_k };
        let plain = self.logprobs.is_none() && self.logit_bias.is_empty() && !self.penalises();
        if !plain || !(1..=Draw::MOST_KEPT).contains(&top_k) || self.suppress.len() > Draw::MOST_SUPPRESSED {
            return None;
        }
        let mut suppress = [-1; Draw::MOST_SUPPRESSED];
        for (to, &token) in suppress.iter_mut().zip(&self.suppress) {
            *to = i32::try_from(token).ok()?;
        }
        let inverse_temperature =
            if self.temperature == 0.0 { 1.0 } else { 1.0 / f64::from(self.temperature) };
        let (top_p, min_p, seed) = (self.top_p, self.min_p, self.seed);
        Some(Draw { inverse_temperature, top_k, top_p, min_p, seed, position, suppress })
            .filter(Draw::is_valid)
    }

    /// Whether any logit differs from the model's before the filters.
    pub(super) fn edits_logits(&self, counts: &TokenCounts) -> bool {
        !self.suppress.is_empty() || !self.logit_bias.is_empty() || (self.penalises() && !counts.is_empty())
    }

    /// Whether any penalty is on, so that tokens must be counted.
    pub(crate) fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}
