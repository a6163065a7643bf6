//! What choosing a token costs over a vocabulary of 262,144. Prints times; asserts only what no machine may miss.

use std::time::Instant;

use lapidary_engine::sampling::{Limits, Sampler, SamplingParams, TokenCounts, TokenMask, uniform};

const VOCAB: usize = 262_144;

#[test]
fn a_token_of_a_large_vocabulary_is_chosen_within_milliseconds() {
    let rows: Vec<Vec<f32>> =
        (0..8).map(|r| (0..VOCAB).map(|i| 20.0 * (uniform(r, i as u64) as f32).powi(6)).collect()).collect();
    let counts = TokenCounts::from_history(&(0..500).collect::<Vec<u32>>(), &[7; 20]);
    let mut mask = TokenMask::none(VOCAB);
    (0..VOCAB as u32).filter(|t| t % 3 == 0).for_each(|t| mask.allow(t));
    let default = SamplingParams::default;
    for (name, params, mask) in [
        ("top-k 64, top-p 0.95", default(), None),
        ("top-p 0.95", SamplingParams { top_k: 0, ..default() }, None),
        ("temperature 1", SamplingParams { top_k: 0, top_p: 1.0, ..default() }, None),
        ("penalties", SamplingParams { repetition_penalty: 1.1, ..default() }, None),
        ("mask", default(), Some(&mask)),
        ("20 logprobs", SamplingParams { logprobs: Some(20), ..default() }, None),
    ] {
        let mut sampler = Sampler::new(params, VOCAB).unwrap();
        let start = Instant::now();
        for turn in 0..64 {
            let limits = Limits { mask, ..Limits::default() };
            let row = &rows[turn % rows.len()];
            std::hint::black_box(sampler.sample_limited(row, None, turn as u64, &counts, limits).unwrap());
        }
        let each = start.elapsed() / 64;
        println!("{name}: {each:.0?} a token");
        assert!(each.as_millis() < 50, "{name}: {each:?}");
    }
}
