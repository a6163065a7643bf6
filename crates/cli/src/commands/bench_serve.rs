//! `lapidary bench serve`

use std::io::{Write, stdout};
use std::time::Duration;

use anyhow::bail;
use lapidary_server::bench::{self, BenchOptions};

/// Measure a running server from outside.
///
/// Sends completions to any server that speaks OpenAI's format, at times drawn beforehand, and prints JSON: time to the first
/// token, time between tokens, throughput, and the share of replies within a bound.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  lapidary bench serve --url http://127.0.0.1:8000 --requests 200 --rate 4 --prompt-words 100-400 \
--output-tokens 32-128"
)]
pub struct Args {
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The model's name; left out when not given
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// How many requests
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub requests: u32,
    /// Requests a second, on average; all at once when not given
    #[arg(long, value_name = "R", value_parser = rate)]
    pub rate: Option<f64>,
    /// Requests in flight at most, the next one sent as one ends; no bound when not given
    #[arg(long, value_name = "N", conflicts_with = "rate", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub streams: Option<u32>,
    /// Words of a prompt: a number, or FROM-TO
    #[arg(long, value_name = "N", default_value = "100", value_parser = range)]
    pub prompt_words: (usize, usize),
    /// Words at the beginning of every prompt that are the same for all
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub shared_words: usize,
    /// Tokens of a reply: a number, or FROM-TO
    #[arg(long, value_name = "N", default_value = "64", value_parser = range)]
    pub output_tokens: (usize, usize),
    /// Seed of lengths, texts and times
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,
    /// A reply is good if its first token came within so many milliseconds ...
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    pub good_first_ms: u64,
    /// ... and the mean time between its tokens is at most so many
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pub good_token_ms: u64,
    /// Most seconds of a request
    #[arg(long, value_name = "S", default_value_t = 300)]
    pub timeout: u64,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("expected a number above 0".into()),
    }
}

fn range(text: &str) -> Result<(usize, usize), String> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    match (from.parse(), to.parse()) {
        (Ok(from), Ok(to)) if from <= to && from > 0 => Ok((from, to)),
        _ => Err("expected a number above 0, or FROM-TO".into()),
    }
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let options = BenchOptions {
        url: args.url.clone(),
        key: std::env::var("LAPIDARY_API_KEY").ok(),
        model: args.model.clone(),
        requests: args.requests as usize,
        rate: args.rate.unwrap_or(f64::INFINITY),
        streams: args.streams.map(|n| n as usize),
        prompt_words: args.prompt_words,
        output_tokens: args.output_tokens,
        shared_words: args.shared_words,
        seed: args.seed,
        good_first: Duration::from_millis(args.good_first_ms),
        good_token: Duration::from_millis(args.good_token_ms),
        timeout: Duration::from_secs(args.timeout),
    };
    // One thread: what it takes it takes from the server, where both are on one machine.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let figures = match runtime.block_on(bench::run(&options)) {
        Ok(figures) => figures,
        Err(problem) => bail!(problem),
    };
    writeln!(stdout().lock(), "{figures:#}")?;
    Ok(())
}
