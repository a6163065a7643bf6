//! Required behaviours of windows and of stored keys and values (B01 to B07, single device).
//!
//! B02 (prefix reuse) and B03 (a full pool) are a scheduler's, which is not here. B08 is a timing.

mod common;

use common::drive::{assert_bits, every_folder, logits, name, same_bits, score, tiny_folder, tokens, values};
use common::spy::{Hooks, hooked};
use common::{EVERY, Setup, stepper};
use lapidary_engine::{Prompt, SoftKind, SoftSpan, Stepper};
use lapidary_model::Config;
use lapidary_model::kv_plan::kv_plan;
use lapidary_ops::{GROUPS, Group, KvFormat, KvPlan, TapPoint};
use lapidary_reference::Golden;
use lapidary_reference::tiny::Variant;

/// A prompt of soft rows only, so that a single one can be changed.
fn soft_rows(s: &Stepper, rows: usize, kind: SoftKind, changed: Option<usize>) -> Prompt {
    let width = s.model().config.hidden;
    let mut all = values(7, rows * width);
    if let Some(row) = changed {
        all[row * width..(row + 1) * width].copy_from_slice(&values(8, width));
    }
    Prompt { tokens: vec![5; rows], soft: vec![SoftSpan { start: 0, values: all, kind }] }
}

/// Output of the first layer for each row.
fn first_layer(s: &mut Stepper, prompt: &Prompt) -> Vec<Vec<f32>> {
    s.reset();
    s.set_capture(&[TapPoint::LayerOut(0)]);
    let (_, outcomes) = score(s, prompt);
    let taps: Vec<f32> = outcomes.iter().flat_map(|o| o.taps[0].values.clone()).collect();
    taps.chunks_exact(s.model().config.hidden).map(<[f32]>::to_vec).collect()
}

#[test]
fn b01_a_sliding_layer_sees_exactly_the_window() {
    for folder in every_folder() {
        for on in EVERY {
            // Batches of 9 rows, so that the window reaches across batches and round the ring.
            for rows in [96, 9] {
                let mut s = stepper(&folder, on, Setup { rows, head_rows: rows, ..Setup::default() });
                assert_eq!(s.model().config.layers[0].group, Group::Sliding);
                let w = s.model().config.window;
                let len = 90;
                let prompt = soft_rows(&s, len, SoftKind::Audio, None);
                let before = first_layer(&mut s, &prompt);
                for changed in [0, 1, 20, 31, 32, 50] {
                    let prompt = soft_rows(&s, len, SoftKind::Audio, Some(changed));
                    let after = first_layer(&mut s, &prompt);
                    for p in 0..len {
                        let same = same_bits(&before[p], &after[p]);
                        let sees = p >= changed && p - changed < w;
                        let what = format!("{} {on:?} {rows} rows: query {p}, key {changed}", name(&folder));
                        assert_eq!(same, !sees, "{what}, window {w}");
                    }
                }
            }
        }
    }
}

/// The window cuts the past side of a vision block, not its future.
#[test]
fn b01_a_vision_block_longer_than_the_window_sees_its_whole_future() {
    for on in EVERY {
        let mut s = stepper(&tiny_folder(Variant::Unified), on, Setup::default());
        let (w, len) = (s.model().config.window, 23);
        let full = s.model().config.layers.iter().position(|l| l.group == Group::Full).unwrap();
        assert!(len > 2 * w && full == 1);
        let prompt = soft_rows(&s, len, SoftKind::Vision, None);
        let before = first_layer(&mut s, &prompt);
        for changed in [0, 5, 11, 22] {
            let prompt = soft_rows(&s, len, SoftKind::Vision, Some(changed));
            let after = first_layer(&mut s, &prompt);
            for p in 0..len {
                let sees = changed >= p || p - changed < w;
                assert_eq!(same_bits(&before[p], &after[p]), !sees, "{on:?}: query {p}, key {changed}");
            }
        }
    }
}

#[test]
fn b04_a_request_does_not_depend_on_earlier_ones() {
    for folder in every_folder() {
        for on in EVERY {
            let setup = Setup { rows: 16, head_rows: 16, ..Setup::default() };
            let mut s = stepper(&folder, on, setup);
            let long = tokens(&s, 1, 3 * s.model().config.window + 40);
            let short = tokens(&s, 2, 5);
            let run = |s: &mut Stepper, prompt: &[u32]| {
                s.reset();
                let mut token = s.prefill(prompt).unwrap();
                let mut all = logits(s);
                for _ in 0..20 {
                    token = s.decode_step(token, s.cursor()).unwrap();
                    all.extend(logits(s));
                }
                all
            };
            let fresh = [&long, &short].map(|p| run(&mut stepper(&folder, on, setup), p));
            for turn in 0..4 {
                let (prompt, expected) = [(&long, &fresh[0]), (&short, &fresh[1])][turn % 2];
                let what = format!("{} {on:?} turn {turn}", name(&folder));
                assert_bits(&what, &run(&mut s, prompt), expected);
                // Slots have a history of their own.
                s.alloc_slots(1 + turn, 60).unwrap();
                s.prefill_slot(turn, &short).unwrap();
            }
        }
    }
}

/// The published text configs, as far as keys and values go.
fn published(name: &str) -> Config {
    let (kind, layers, hidden, heads, kv, global_kv, window, every, shared, same, max) = match name {
        "E2B" => ("gemma4", 35, 1536, 8, 1, None, 512, 5, 20, false, 131_072),
        "E4B" => ("gemma4", 42, 2560, 8, 2, None, 512, 6, 18, false, 131_072),
        "12B" => ("gemma4_unified", 48, 3840, 16, 8, Some(1), 1024, 6, 0, true, 262_144),
        "26B-A4B" => ("gemma4", 30, 2816, 16, 8, Some(2), 1024, 6, 0, true, 262_144),
        "31B" => ("gemma4", 60, 5376, 32, 16, Some(4), 1024, 6, 0, true, 262_144),
        other => panic!("{other}"),
    };
    let types: Vec<&str> =
        (1..=layers).map(|l| if l % every == 0 { "full_attention" } else { "sliding_attention" }).collect();
    Config::from_json(&serde_json::json!({
        "model_type": kind,
        "text_config": {
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv, "num_global_key_value_heads": global_kv,
            "head_dim": 256, "global_head_dim": 512, "sliding_window": window, "layer_types": types,
            "num_kv_shared_layers": shared, "attention_k_eq_v": same, "max_position_embeddings": max,
            "hidden_size_per_layer_input": if shared > 0 { 256 } else { 0 },
        },
    }))
    .unwrap()
}

const PUBLISHED: [&str; 5] = ["E2B", "E4B", "12B", "26B-A4B", "31B"];

fn bytes(plan: &KvPlan) -> [usize; GROUPS] {
    [0, 1].map(|g| plan.groups[g].bytes())
}

/// Only full layers grow with the context; sliding ones hold window, chunk and a page for the borders.
#[test]
fn b05_sliding_layers_do_not_grow_with_the_context() {
    for name in PUBLISHED {
        let config = published(name);
        let plans = [8192, 131_072, config.max_positions]
            .map(|context| (context, kv_plan(&config, [KvFormat::Bf16; 2], 1, context, 512)));
        let window = config.window;
        for (context, plan) in &plans {
            assert_eq!(bytes(plan)[0], bytes(&plans[0].1)[0], "{name} at {context}");
            assert_eq!(plan.groups[0].pages, 1 + (window + 512) / 32 + 1);
            assert_eq!(plan.groups[1].pages, 1 + context / 32);
        }
        // A context shorter than the window needs no more than itself.
        let short = kv_plan(&config, [KvFormat::Bf16; 2], 1, 100, 512);
        assert_eq!([short.groups[0].pages, short.groups[1].pages], [1 + 4, 1 + 4]);
    }
}

#[test]
fn b05_what_is_planned_is_what_is_allocated() {
    for folder in every_folder() {
        for on in EVERY {
            for (rows, context) in [(8, 50), (16, 200), (40, 1000)] {
                let setup = Setup { rows, head_rows: 1, context, ..Setup::default() };
                let mut s = stepper(&folder, on, setup);
                s.alloc_slots(3, 77).unwrap();
                let (planned, held) = (s.runner().plan().bytes(), s.runner().memory().kv);
                let off = held.abs_diff(planned) as f64 / planned as f64;
                assert!(off <= 0.03, "{} {on:?}: {held} bytes held, {planned} planned", name(&folder));
                let single = kv_plan(&s.model().config, [KvFormat::F32; 2], 1, context, rows);
                let slots = kv_plan(&s.model().config, [KvFormat::F32; 2], 3, 77, rows);
                for g in 0..GROUPS {
                    // Page 0 is counted in both.
                    let pages = single.groups[g].pages + slots.groups[g].pages - 1;
                    assert_eq!(s.runner().plan().groups[g].pages, pages);
                }
            }
        }
    }
}

/// Bytes of a token's keys and values in bf16 over all layers of a kind: layers that own any, times heads and
/// head width of that kind, times two for keys and values, times two bytes.
#[test]
fn b06_bytes_of_a_token_are_exact() {
    let expected = [
        // 12 sliding layers of 15 below the shared ones, 3 full: every 5th of 15.
        ("E2B", 12 * 256 * 2 * 2, 3 * 512 * 2 * 2, [12_288, 6_144]),
        // 20 and 4 of 24.
        ("E4B", 20 * 2 * 256 * 2 * 2, 4 * 2 * 512 * 2 * 2, [40_960, 16_384]),
        ("12B", 40 * 8 * 256 * 2 * 2, 8 * 512 * 2 * 2, [327_680, 16_384]),
        ("26B-A4B", 25 * 8 * 256 * 2 * 2, 5 * 2 * 512 * 2 * 2, [204_800, 20_480]),
        ("31B", 50 * 16 * 256 * 2 * 2, 10 * 4 * 512 * 2 * 2, [819_200, 81_920]),
    ];
    for (name, sliding, full, literal) in expected {
        assert_eq!([sliding, full], literal, "{name}");
        let config = published(name);
        let plan = kv_plan(&config, [KvFormat::Bf16; 2], 1, 8192, 512);
        for (group, token) in plan.groups.iter().zip(literal) {
            let page: usize = (0..group.layers.len()).map(|l| group.page_bytes(l)).sum();
            assert_eq!(page, 32 * token, "{name}");
        }
    }
}

/// The plan of a whole sequence at 8192 tokens in bf16, batches of 512: pages of 32 tokens, one page more that
/// is nobody's, and for sliding layers one more for the borders.
#[test]
fn b06_bytes_of_a_sequence_are_exact() {
    let expected = [
        // (512 + 512) / 32 + 1 + 1 = 34 pages of 32 tokens; 8192 / 32 + 1 = 257.
        ("E2B", [34 * 32 * 12_288, 257 * 32 * 6_144], [13_369_344, 50_528_256]),
        ("E4B", [34 * 32 * 40_960, 257 * 32 * 16_384], [44_564_480, 134_742_016]),
        // (1024 + 512) / 32 + 1 + 1 = 50.
        ("12B", [50 * 32 * 327_680, 257 * 32 * 16_384], [524_288_000, 134_742_016]),
        ("26B-A4B", [50 * 32 * 204_800, 257 * 32 * 20_480], [327_680_000, 168_427_520]),
        ("31B", [50 * 32 * 819_200, 257 * 32 * 81_920], [1_310_720_000, 673_710_080]),
    ];
    for (name, products, literal) in expected {
        assert_eq!(products, literal, "{name}");
        let config = published(name);
        assert_eq!(bytes(&kv_plan(&config, [KvFormat::Bf16; 2], 1, 8192, 512)), literal, "{name}");
        // f16 is as large, f32 twice; q8_0 has 34 bytes for 32 values.
        assert_eq!(bytes(&kv_plan(&config, [KvFormat::F16; 2], 1, 8192, 512)), literal, "{name}");
        let f32 = kv_plan(&config, [KvFormat::F32; 2], 1, 8192, 512);
        assert_eq!(bytes(&f32), literal.map(|b| 2 * b), "{name}");
        let mixed = kv_plan(&config, [KvFormat::Q8_0, KvFormat::Bf16], 1, 8192, 512);
        assert_eq!(bytes(&mixed), [literal[0] / 64 * 34, literal[1]], "{name}");
    }
}

/// Blocks are scaled by what is stored in them and by nothing else: pages full of junk change no bit.
#[test]
fn b07_scales_look_at_live_elements_only() {
    for variant in Golden::VARIANTS {
        let golden = Golden::variant(variant).unwrap();
        for on in EVERY {
            for kv in [KvFormat::Q8_0, KvFormat::F32] {
                let setup = Setup { kv, rows: 16, head_rows: 16, context: 100, ..Setup::default() };
                let junk = Hooks::after(|model, batch, backend| {
                    // Once, before anything is live: the first batch runs twice.
                    if batch.positions != [0] {
                        return;
                    }
                    let writers = model.layers.iter().filter(|l| l.attn.finish.kv.is_some());
                    for l in writers {
                        let width = l.attn.spec.kv_heads * l.attn.spec.head_dim;
                        for page in 0..3 {
                            for place in 0..32 {
                                let junk = vec![1e30; width];
                                backend.kv_store(l.attn.spec.cache, page, place, &junk, &junk).unwrap();
                            }
                        }
                    }
                });
                let mut s = hooked(golden.folder(), on, setup, &junk);
                s.prefill_step(5, 0).unwrap();
                s.reset();
                let prompt = Prompt::from(&tokens(&s, 3, 60)[..]);
                let found = score(&mut s, &prompt).0;
                let expected = score(&mut stepper(golden.folder(), on, setup), &prompt).0;
                assert_bits(&format!("{variant} {on:?} {kv:?}"), &found, &expected);
            }
        }
    }
}
