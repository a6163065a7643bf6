//! Tokens that the device draws, against the host's sampler.

use lapidary_cuda::kernels::draw::{DrawCall, draw, parameters, workspace_bytes};
use lapidary_engine::sampling::{Sampler, SamplingParams, TokenCounts, uniform};

use crate::lab::Lab;

/// Rows on which selection can go wrong: ties everywhere, both zeros, order against ids, few survivors.
fn row(kind: usize, seed: usize, vocab: usize) -> Vec<f32> {
    let noise = |i: usize| uniform((kind + 10 * seed) as u64, i as u64) as f32;
    let value = |i: usize| match kind {
        0 => 12.0 * noise(i) - 9.0,
        1 => i as f32 * 1e-4 - 7.0,
        2 => i as f32 * -1e-4,
        3 => -1.5,
        4 if noise(i) < 0.5 => 0.0,
        4 => -0.0,
        5 => (noise(i) * 5.0).floor() - 2.0,
        6 if i % 4099 == 17 => 29.0 + noise(i),
        6 => -30.0 * noise(i),
        _ => 30.0 * (6.0 * noise(i) - 3.0).tanh(),
    };
    (0..vocab).map(value).collect()
}

fn settings() -> Vec<SamplingParams> {
    let default = SamplingParams::default();
    let suppress: Vec<u32> = vec![0, 1, 17, 4096, 4116, 8215, 30_001, 999];
    vec![
        default.clone(),
        SamplingParams { temperature: 4.0, top_p: 1.0, ..default.clone() },
        SamplingParams { temperature: 0.0, suppress: suppress[..3].to_vec(), ..default.clone() },
        SamplingParams { top_k: 1, ..default.clone() },
        SamplingParams { temperature: 2.5, top_k: 7, min_p: 0.2, ..default.clone() },
        SamplingParams { temperature: 0.05, top_k: 33, top_p: 0.999, ..default.clone() },
        SamplingParams { temperature: 9.0, top_k: 63, top_p: 0.3, suppress, ..default.clone() },
        SamplingParams { top_p: 0.0, min_p: 1.0, ..default },
    ]
}

#[test]
fn tokens_are_those_that_the_host_draws() {
    let Some(lab) = Lab::new() else { return };
    const MOST: usize = 7;
    for vocab in [262_144, 262_208, 4097, 70, 300_001] {
        let workspace = lab.bytes(&vec![0; workspace_bytes(MOST, vocab)]);
        for (kind, rows) in [(0, 1), (1, 3), (2, 2), (3, 5), (4, 2), (5, 4), (6, MOST), (7, MOST)] {
            let stride = vocab + 3;
            let (mut logits, mut given) = (Vec::new(), Vec::new());
            for r in 0..rows {
                let row = row(kind, r, vocab);
                let best = (0..vocab).fold(0, |b, i| if row[i] > row[b] { i } else { b });
                logits.extend(&row);
                // Beyond the row lies something larger.
                logits.extend([99.0; 3]);
                given.push(best as i32);
            }
            let device = lab.f32(&logits);
            let known: Vec<SamplingParams> =
                settings().into_iter().filter(|p| p.validate(vocab).is_ok()).collect();
            for round in 0..known.len() {
                let (mut expected, mut words) = (given.clone(), Vec::new());
                for r in 0..rows {
                    let params = SamplingParams {
                        seed: 1 << (r + 30) | 5,
                        ..known[(round + r) % known.len()].clone()
                    };
                    let position = (1u64 << 33) + (round * 31 + r) as u64;
                    let call = params.draw(position).filter(|_| r % 5 != 4);
                    words.extend(parameters(call.as_ref()).into_iter().flat_map(i32::to_le_bytes));
                    if call.is_some() {
                        let row = &logits[r * stride..r * stride + vocab];
                        let mut sampler = Sampler::new(params, vocab).unwrap();
                        expected[r] =
                            sampler.sample(row, position, &TokenCounts::new()).unwrap().token as i32;
                    }
                }
                if rows > 3 {
                    (given[3], expected[3]) = (-1, -1);
                }
                let draws = lab.bytes(&words);
                for run in 0..2 {
                    let out = lab.bytes(&given.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>());
                    let call = DrawCall {
                        logits: device.ptr(),
                        stride,
                        vocab,
                        rows,
                        draws: draws.ptr(),
                        out: out.ptr(),
                        workspace: workspace.ptr(),
                        told: None,
                    };
                    // SAFETY: the buffers are as large as the call says.
                    unsafe { draw(lab.queue(), &call).unwrap() };
                    let found = lab.read_i32(&out, rows);
                    assert_eq!(found, expected, "{vocab} logits of kind {kind}, round {round}, run {run}");
                }
            }
        }
    }
}
