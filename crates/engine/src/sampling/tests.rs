//! The sampler against a plain implementation in float64 that sorts everything.

use super::*;

/// Odd sizes: none is a multiple of the lanes or blocks of the loops.
const VOCAB: usize = 1013;

fn noise(stream: u64, i: usize) -> f32 {
    // The sum of four uniforms less their mean, scaled: a bell-like shape with spread 3.
    let sum: f64 = (0..4).map(|j| uniform(1000 + stream, (i * 4 + j) as u64)).sum();
    ((sum - 2.0) * 5.2) as f32
}

fn row(stream: u64, n: usize) -> Vec<f32> {
    (0..n).map(|i| noise(stream, i)).collect()
}

fn sampler(params: SamplingParams) -> Sampler {
    Sampler::new(params, VOCAB).unwrap()
}

fn open() -> SamplingParams {
    SamplingParams { top_k: 0, top_p: 1.0, ..SamplingParams::default() }
}

fn pick(params: &SamplingParams, logits: &[f32], position: u64) -> u32 {
    let mut s = Sampler::new(params.clone(), logits.len()).unwrap();
    s.sample(logits, position, &TokenCounts::new()).unwrap().token
}

/// Temperature, top-k, top-p, min-p as Hugging Face transformers defines them, most likely first.
fn expected_distribution(logits: &[f32], p: &SamplingParams) -> Vec<(u32, f64)> {
    let scaled = |x: &f32| f64::from(*x) / f64::from(p.temperature);
    let mut all: Vec<(u32, f64)> =
        logits.iter().enumerate().map(|(i, x)| (i as u32, scaled(x))).filter(|e| e.1.is_finite()).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if p.top_k > 0 {
        all.truncate(p.top_k as usize);
    }
    let best = all[0].1;
    all.iter_mut().for_each(|e| e.1 = (e.1 - best).exp());
    if p.top_p < 1.0 {
        let total: f64 = all.iter().map(|e| e.1).sum();
        let mut before = 0.0;
        let n = all.iter().take_while(|e| {
            let keep = before < f64::from(p.top_p) * total;
            before += e.1;
            keep
        });
        let n = n.count().max(1);
        all.truncate(n);
    }
    all.retain(|e| e.1 >= f64::from(p.min_p));
    let total: f64 = all.iter().map(|e| e.1).sum();
    all.iter_mut().for_each(|e| e.1 /= total);
    all
}

fn settings() -> Vec<(&'static str, SamplingParams)> {
    vec![
        ("default", SamplingParams::default()),
        ("everything", open()),
        ("warm", SamplingParams { temperature: 1.7, ..open() }),
        ("cold top_p", SamplingParams { temperature: 0.6, top_p: 0.8, ..open() }),
        ("top_k", SamplingParams { top_k: 7, ..open() }),
        ("min_p", SamplingParams { min_p: 0.05, ..open() }),
        (
            "all filters",
            SamplingParams {
                temperature: 1.3,
                top_k: 40,
                top_p: 0.9,
                min_p: 0.1,
                ..SamplingParams::default()
            },
        ),
    ]
}

#[test]
fn the_distribution_is_the_plain_one() {
    for stream in 0..5 {
        let mut logits = row(stream, VOCAB);
        logits[5] = f32::NEG_INFINITY;
        for (name, params) in settings() {
            let expected = expected_distribution(&logits, &params);
            let got = sampler(params).distribution(&logits, 0, &TokenCounts::new()).unwrap();
            let ids = |d: &[(u32, f64)]| d.iter().map(|e| e.0).collect::<Vec<_>>();
            assert_eq!(ids(&got), ids(&expected), "{name}, row {stream}");
            for (g, e) in got.iter().zip(&expected) {
                // Two weights, one over a sum of such: each off by at most 2.4e-7.
                assert!((g.1 / e.1 - 1.0).abs() < 5e-7, "{name}: token {} has {} not {}", g.0, g.1, e.1);
            }
        }
    }
}

/// Upper quantile of the chi-square distribution by Wilson and Hilferty's approximation.
fn chi_square_quantile(degrees: usize, z: f64) -> f64 {
    let d = degrees as f64;
    d * (1.0 - 2.0 / (9.0 * d) + z * (2.0 / (9.0 * d)).sqrt()).powi(3)
}

/// With fixed seeds the outcome is fixed; the bound is the 1 - 1e-4 quantile (z = 3.72), which a right
/// sampler exceeds once in ten thousand settings.
#[test]
fn draws_follow_the_printed_probabilities() {
    const DRAWS: u64 = 20_000;
    let logits = row(1, VOCAB);
    for (n, (name, params)) in settings().into_iter().enumerate() {
        let mut s = sampler(SamplingParams { seed: 77 + n as u64, ..params });
        let probabilities = s.distribution(&logits, 0, &TokenCounts::new()).unwrap();
        let mut seen = vec![0u32; VOCAB];
        for position in 0..DRAWS {
            seen[s.sample(&logits, position, &TokenCounts::new()).unwrap().token as usize] += 1;
        }
        // Cells that expect fewer than five draws are merged.
        let (mut statistic, mut cells, mut rest) = (0.0, 0usize, (0.0, 0u32));
        let mut cell = |expected: f64, got: u32| {
            statistic += (f64::from(got) - expected).powi(2) / expected;
            cells += 1;
        };
        for (token, p) in &probabilities {
            let (expected, got) = (p * DRAWS as f64, seen[*token as usize]);
            if expected >= 5.0 {
                cell(expected, got);
            } else {
                rest = (rest.0 + expected, rest.1 + got);
            }
            seen[*token as usize] = 0;
        }
        if rest.0 > 0.0 {
            cell(rest.0, rest.1);
        }
        assert_eq!(seen.iter().sum::<u32>(), 0, "{name}: tokens outside the distribution were drawn");
        let bound = chi_square_quantile(cells - 1, 3.72);
        assert!(statistic < bound, "{name}: chi-square {statistic:.1} over {cells} cells, bound {bound:.1}");
        // Far too good a fit is as wrong as a bad one.
        let low = chi_square_quantile(cells - 1, -3.72);
        assert!(statistic > low, "{name}: chi-square {statistic:.1} over {cells} cells, at least {low:.1}");
    }
}

#[test]
fn a_draw_is_where_the_running_sum_passes_the_uniform_number() {
    let weights = [1.0, 2.0, 0.0, 1.0, 0.0];
    let below_one = 1.0 - f64::EPSILON / 2.0;
    for (u, index) in [(0.0, 0), (0.2499, 0), (0.25, 1), (0.7499, 1), (0.75, 3), (below_one, 3)] {
        assert_eq!(draw(&weights, u), index, "u = {u}");
    }
    // Over several blocks.
    let even = vec![0.5; 1537];
    for i in 0..even.len() {
        assert_eq!(draw(&even, (i as f64 + 0.01) / even.len() as f64), i);
        assert_eq!(draw(&even, (i as f64 + 0.99) / even.len() as f64), i);
    }
    let mut lonely = vec![0.0; 1537];
    lonely[600] = 1e-30;
    assert_eq!(draw(&lonely, 0.0), 600);
    assert_eq!(draw(&lonely, below_one), 600);
}

#[test]
fn a_token_depends_on_seed_and_position_only() {
    let logits = row(2, VOCAB);
    let draw = |seed, positions: &[u64]| {
        let mut s = sampler(SamplingParams { seed, ..open() });
        positions
            .iter()
            .map(|p| s.sample(&logits, *p, &TokenCounts::new()).unwrap().token)
            .collect::<Vec<_>>()
    };
    let forward = draw(7, &[0, 1, 2, 3, 4, 5, 6, 7]);
    let mut backward = draw(7, &[7, 6, 5, 4, 3, 2, 1, 0]);
    backward.reverse();
    assert_eq!(forward, backward, "the order of draws changed tokens");
    assert_eq!(forward[5], draw(7, &[5])[0]);
    assert_ne!(forward, draw(8, &[0, 1, 2, 3, 4, 5, 6, 7]), "another seed, the same tokens");
    assert!(forward.iter().any(|t| *t != forward[0]), "all positions got the same token");
}

#[test]
fn equal_logits_go_to_the_lowest_id() {
    let mut logits = vec![-1.0; VOCAB];
    for t in [900, 30, 417] {
        logits[t] = 2.5;
    }
    assert_eq!(pick(&SamplingParams::greedy(), &logits, 3), 30);
    let two = SamplingParams { top_k: 2, ..open() };
    let kept = sampler(two).distribution(&logits, 0, &TokenCounts::new()).unwrap();
    assert_eq!(kept, [(30, 0.5), (417, 0.5)]);
    // 0.34 of the three is reached by the second.
    let top_p = SamplingParams { top_p: 0.34, temperature: 0.05, ..open() };
    let kept = sampler(top_p).distribution(&logits, 0, &TokenCounts::new()).unwrap();
    assert_eq!(kept, [(30, 0.5), (417, 0.5)]);
    let top = top_logprobs(&logits, 0, 4).unwrap();
    assert_eq!(top.iter().map(|e| e.0).collect::<Vec<_>>(), [30, 417, 900, 0]);
}

#[test]
fn narrowest_filters_are_greedy() {
    for stream in 0..20 {
        let logits = row(10 + stream, VOCAB);
        let best = pick(&SamplingParams::greedy(), &logits, stream);
        for params in [
            SamplingParams { top_k: 1, ..open() },
            SamplingParams { top_p: 0.0, ..open() },
            SamplingParams { top_p: 1e-9, ..open() },
            SamplingParams { top_p: 1e-9, ..SamplingParams::default() },
            SamplingParams { min_p: 1.0, ..open() },
            SamplingParams { temperature: f32::MIN_POSITIVE, ..open() },
            SamplingParams { temperature: 1e-45, ..SamplingParams::default() },
        ] {
            assert_eq!(pick(&params, &logits, stream), best, "{params:?}");
        }
    }
}

#[test]
fn suppressed_tokens_are_never_chosen() {
    let logits = row(3, VOCAB);
    let order: Vec<u32> = top_logprobs(&logits, 0, 3).unwrap().iter().map(|e| e.0).collect();
    let suppress = vec![order[0], order[1]];
    let greedy = SamplingParams { suppress: suppress.clone(), ..SamplingParams::greedy() };
    assert_eq!(pick(&greedy, &logits, 0), order[2]);
    // Neither a bias nor a penalty brings a token back.
    let bias = vec![(order[0], 1e30)];
    let biased = SamplingParams { logit_bias: bias, repetition_penalty: 0.5, ..greedy };
    let mut s = sampler(biased);
    let counts = TokenCounts::from_history(&[order[0]], &[order[1]]);
    assert_eq!(s.sample(&logits, 0, &counts).unwrap().token, order[2]);
    let mut s = sampler(SamplingParams { suppress, ..open() });
    for position in 0..2000 {
        let token = s.sample(&logits, position, &TokenCounts::new()).unwrap().token;
        assert!(token != order[0] && token != order[1]);
    }
}

#[test]
fn bias_and_penalties_follow_their_formulas() {
    let counts = TokenCounts::from_history(&[0, 1, 5], &[1, 2, 2, 2, 6]);
    let params = SamplingParams {
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        logit_bias: vec![(2, 1.0), (4, -3.0)],
        ..open()
    };
    let mut logits = [4.0, -4.0, 3.0, 7.0, 7.0, 0.0, f32::NEG_INFINITY];
    penalty::edit(&mut logits, &params, &counts).unwrap();
    let expected = [
        2.0,               // prompt only: 4 / 2
        -8.0 - 0.5 - 0.25, // negative, once in the answer
        2.0 - 0.5 - 0.75,  // (3 + 1) / 2, three times in the answer
        7.0,               // not seen
        4.0,               // bias
        0.0,               // zero is neither
        f32::NEG_INFINITY, // masked stays masked
    ];
    assert_eq!(logits, expected);

    // The sampler goes by the edited logits, the logprobs by the model's.
    let raw = [4.0, -4.0, 3.0, 7.0, 7.0, 0.0, f32::NEG_INFINITY];
    let mut s =
        Sampler::new(SamplingParams { temperature: 0.0, logprobs: Some(2), ..params }, raw.len()).unwrap();
    let got = s.sample(&raw, 0, &counts).unwrap();
    assert_eq!(got.token, 3);
    assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(got.logprob, Some(got.top[0].1));
    let sum: f64 = raw.iter().map(|x| f64::from(*x).exp()).sum();
    // The float32 result near -0.75 is spaced 6e-8; the weights are good to 2.4e-7.
    assert!((f64::from(got.logprob.unwrap()) - (7.0 - sum.ln())).abs() < 4e-7);
}

#[test]
fn extreme_edits_stay_finite() {
    let logits = [30.0, -30.0, 1.0];
    let counts = TokenCounts::from_history(&[0, 1], &[]);
    for r in [f32::MIN_POSITIVE, f32::MAX] {
        let p = SamplingParams { repetition_penalty: r, logit_bias: vec![(2, f32::MAX)], ..open() };
        let mut s = Sampler::new(p, 3).unwrap();
        for (_, p) in s.distribution(&logits, 0, &counts).unwrap() {
            assert!(p.is_finite() && p > 0.0);
        }
    }
}

#[test]
fn smallest_vocabularies_and_masks() {
    for params in [SamplingParams::greedy(), SamplingParams::default(), open()] {
        assert_eq!(pick(&params, &[-7.0], 9), 0);
        let mut logits = vec![f32::NEG_INFINITY; VOCAB];
        logits[700] = -1e30;
        assert_eq!(pick(&params, &logits, 9), 700);
        let mut s = sampler(SamplingParams { suppress: vec![700], ..params.clone() });
        let e = s.sample(&logits, 9, &TokenCounts::new()).unwrap_err();
        assert_eq!(e, SamplingError::NothingLeft { position: 9 });
        logits[700] = f32::NEG_INFINITY;
        let e = sampler(params).sample(&logits, 4, &TokenCounts::new()).unwrap_err();
        assert_eq!(e, SamplingError::NothingLeft { position: 4 });
    }
    assert_eq!(top_logprobs(&[f32::NEG_INFINITY, 2.0], 0, 9).unwrap(), [(1, 0.0)]);
    assert!(Sampler::new(SamplingParams::default(), 0).unwrap().sample(&[], 0, &TokenCounts::new()).is_err());
}

#[test]
fn bad_logits_are_named_and_leave_the_sampler_usable() {
    for (token, value) in [(0, f32::NAN), (517, f32::INFINITY), (VOCAB - 1, -f32::NAN)] {
        let good = row(4, VOCAB);
        let mut bad = good.clone();
        bad[token] = value;
        for params in [SamplingParams::greedy(), SamplingParams::default(), open()] {
            // Suppressing the token doesn't excuse a broken pass.
            let params = SamplingParams { suppress: vec![token as u32], ..params };
            let mut s = sampler(params.clone());
            match s.sample(&bad, 41, &TokenCounts::new()).unwrap_err() {
                SamplingError::NonFiniteLogit { token: t, position: 41, .. } => assert_eq!(t, token as u32),
                other => panic!("{other}"),
            }
            let after = s.sample(&good, 42, &TokenCounts::new()).unwrap().token;
            assert_eq!(after, pick(&params, &good, 42));
        }
        assert!(logprobs(&bad, 41, &[1]).is_err());
    }
    let short = sampler(open()).sample(&row(4, VOCAB - 1), 6, &TokenCounts::new()).unwrap_err();
    assert_eq!(short, SamplingError::LogitsLength { got: VOCAB - 1, vocab: VOCAB, position: 6 });
}

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let d = SamplingParams::default;
    let nan = f32::NAN;
    let cases = [
        ("temperature", SamplingParams { temperature: -0.1, ..d() }),
        ("temperature", SamplingParams { temperature: nan, ..d() }),
        ("temperature", SamplingParams { temperature: f32::INFINITY, ..d() }),
        ("top_p", SamplingParams { top_p: 1.01, ..d() }),
        ("top_p", SamplingParams { top_p: nan, ..d() }),
        ("min_p", SamplingParams { min_p: -1e-9, ..d() }),
        ("min_p", SamplingParams { min_p: nan, ..d() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..d() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: nan, ..d() }),
        ("presence_penalty", SamplingParams { presence_penalty: 2.5, ..d() }),
        ("frequency_penalty", SamplingParams { frequency_penalty: nan, ..d() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(VOCAB as u32, 1.0)], ..d() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(1, nan)], ..d() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(1, 1.0), (0, 0.0), (1, 2.0)], ..d() }),
        ("suppress", SamplingParams { suppress: vec![0, u32::MAX], ..d() }),
        ("logprobs", SamplingParams { logprobs: Some(VOCAB as u32 + 1), ..d() }),
    ];
    for (name, params) in cases {
        let message = Sampler::new(params.clone(), VOCAB).unwrap_err().to_string();
        assert!(message.starts_with(name), "{message} for {params:?}");
    }
    let beyond = TokenCounts::from_history(&[VOCAB as u32], &[]);
    let mut s = sampler(SamplingParams { repetition_penalty: 1.1, ..d() });
    let e = s.sample(&row(0, VOCAB), 0, &beyond).unwrap_err();
    assert!(matches!(e, SamplingError::TokenOutOfRange { name: "history", .. }), "{e}");
}

#[test]
fn the_exponential_is_within_two_units_in_the_last_place() {
    for i in 0..200_000 {
        let x = -87.0 * i as f32 / 200_000.0;
        let exact = f64::from(x).exp();
        let got = f64::from(softmax::weight(x, 0.0, 1.0));
        assert!((got / exact - 1.0).abs() < 2.4e-7, "exp({x}) gave {got}, expected {exact}");
    }
    assert_eq!(softmax::weight(3.25, 3.25, 1e30), 1.0);
    assert_eq!(softmax::weight(f32::NEG_INFINITY, f32::MAX, 1.0), 0.0);
    assert_eq!(softmax::weight(f32::MIN, f32::MAX, 1e45), 0.0);
}

#[test]
fn logprobs_of_a_whole_vocabulary_add_up_to_one() {
    const GEMMA: usize = 262_144;
    let peaked = |i: usize| if i == 77 { 29.5 } else { noise(5, i) };
    let rows: [Vec<f32>; 4] = [
        row(6, GEMMA),
        (0..GEMMA).map(peaked).collect(),
        vec![-11.3; GEMMA],
        // One logit 12.1 above an even tail: the tail carries most of the mass through one rounding.
        (0..GEMMA).map(|i| if i == 0 { 2.7 } else { -9.4 }).collect(),
    ];
    let all: Vec<u32> = (0..GEMMA as u32).collect();
    for (n, logits) in rows.iter().enumerate() {
        let sum: f64 = logprobs(logits, 0, &all).unwrap().iter().map(|l| l.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "row {n}: {sum}");
    }
    assert!(matches!(
        logprobs(&[1.0, 2.0], 0, &[2]).unwrap_err(),
        SamplingError::TokenOutOfRange { token: 2, vocab: 2, .. }
    ));
}
