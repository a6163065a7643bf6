//! Time of one sampled token over Gemma's 262,144 tokens, for several settings and two shapes of logits.
//! `cargo run --release -p lapidary-engine --example sampling_time`

use std::time::Instant;

use lapidary_engine::sampling::{Sampler, SamplingParams, TokenCounts, uniform};

const VOCAB: usize = 262_144;
const REPEATS: u64 = 200;

fn main() {
    let bell = |i: usize| ((0..4).map(|j| uniform(1, (i * 4 + j) as u64)).sum::<f64>() - 2.0) * 5.2;
    // A text model's row: a bell of spread 3 with a few tokens far above it.
    let peaked: Vec<f32> =
        (0..VOCAB).map(|i| (bell(i) + if i % 9973 == 0 { 14.0 } else { 0.0 }) as f32).collect();
    let flat: Vec<f32> = peaked.iter().map(|x| x * 0.05).collect();
    let open = SamplingParams { top_k: 0, top_p: 1.0, ..SamplingParams::default() };
    let settings = [
        ("greedy", SamplingParams::greedy()),
        ("default (top-k 64, top-p 0.95)", SamplingParams::default()),
        ("default with 5 logprobs", SamplingParams { logprobs: Some(5), ..SamplingParams::default() }),
        ("default with suppression", SamplingParams { suppress: vec![7, 9], ..SamplingParams::default() }),
        ("top-p 0.95 only", SamplingParams { top_p: 0.95, ..open.clone() }),
        ("min-p 0.05 only", SamplingParams { min_p: 0.05, ..open.clone() }),
        ("no filter", open),
    ];
    for (shape, logits) in [("peaked", &peaked), ("flat", &flat)] {
        for (name, params) in &settings {
            let mut sampler = Sampler::new(params.clone(), VOCAB).expect("the settings are legal");
            let counts = TokenCounts::new();
            let mut times: Vec<f64> = (0..REPEATS)
                .map(|position| {
                    let start = Instant::now();
                    sampler.sample(logits, position, &counts).expect("the logits are finite");
                    start.elapsed().as_secs_f64() * 1e6
                })
                .collect();
            times.sort_by(f64::total_cmp);
            println!(
                "{shape:7} {name:32} median {:8.1} us   best {:8.1} us",
                times[times.len() / 2],
                times[0]
            );
        }
    }
}
