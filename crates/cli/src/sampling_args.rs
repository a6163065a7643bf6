//! The flags that decide how an answer's tokens are chosen.

use std::hash::{BuildHasher, RandomState};

use clap::Args;
use lapidary::{AnswerOptions, Gemma};

/// How an answer is made.
#[derive(Clone, Debug, Args)]
pub struct SamplingArgs {
    /// Most tokens of an answer; until the model ends it when not given (256 for plain completions)
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: Option<u32>,
    /// Divides the logits: 0 is greedy, 1 the model's own spread; the model's choice when not given, else 1
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: Option<f32>,
    /// Choose among the K best tokens, 0 for all; the model's choice when not given, else 64
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Choose among the best tokens that together have probability P; the model's choice when not given, else 0.95
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = probability)]
    pub top_p: Option<f32>,
    /// Leave out tokens less likely than P times the likeliest; 0 when not given
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = probability)]
    pub min_p: Option<f32>,
    /// Makes the choice repeatable; another one each time when not given
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Always take the best token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p", "seed"])]
    pub greedy: bool,
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(t) if t.is_finite() && t >= 0.0 => Ok(t),
        _ => Err("expected a finite number from 0 up".into()),
    }
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if (0.0..=1.0).contains(&p) => Ok(p),
        _ => Err("expected a number from 0 to 1".into()),
    }
}

impl SamplingArgs {
    /// The model's own choices with these in their place; `tokens` where no number was given.
    pub fn options(&self, gemma: &Gemma, tokens: usize) -> AnswerOptions {
        let mut options = gemma.answer_options(self.tokens.map_or(tokens, |n| n as usize));
        let s = &mut options.sampling;
        // Keys of the standard hasher are random, so this differs from run to run.
        s.seed = self.seed.unwrap_or_else(|| RandomState::new().hash_one("seed") >> 11);
        s.temperature = if self.greedy { 0.0 } else { self.temperature.unwrap_or(s.temperature) };
        s.top_k = self.top_k.unwrap_or(s.top_k);
        s.top_p = self.top_p.unwrap_or(s.top_p);
        s.min_p = self.min_p.unwrap_or(s.min_p);
        options
    }
}
