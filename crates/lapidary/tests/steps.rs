//! The single sequence of the step API: every way of feeding the same tokens is the same, and every refused
//! call leaves everything as it was.

mod common;

use std::path::Path;

use common::drive::{TINY, assert_bits, every_folder, logits, name, same_bits, score, tiny_folder, tokens};
use common::spy::{Hooks, hooked};
use common::{EVERY, Setup, stepper};
use lapidary_engine::{Error, Heads, Prompt, Stepper};
use lapidary_model::kv_plan::sequence_pages;
use lapidary_model::model::Mlp;
use lapidary_ops::{Group, PAGE_TOKENS, TapPoint};
use lapidary_reference::Golden;
use lapidary_reference::tiny::Variant;
use lapidary_weights::{Checkpoint, Role};

const PROMPT: usize = 70;

/// Rows of each call that feed the same prompt.
const SPLITS: [&[usize]; 5] = [&[70], &[35, 35], &[1; 70], &[3, 1, 17, 32, 5, 11, 1], &[31, 1, 1, 37]];

fn wide() -> Setup {
    Setup { rows: 96, head_rows: 96, context: 200, ..Setup::default() }
}

#[test]
fn every_split_of_a_prompt_gives_the_same_logits_in_every_row() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, wide());
            let prompt = tokens(&s, 1, PROMPT);
            let (whole, _) = score(&mut s, &Prompt::from(&prompt[..]));
            for split in &SPLITS[1..] {
                s.reset();
                let (mut at, mut rows) = (0, Vec::new());
                for n in *split {
                    rows.extend(score(&mut s, &Prompt::from(&prompt[at..at + n])).0);
                    at += n;
                }
                assert_eq!(at, PROMPT);
                assert_bits(&format!("{} {on:?} {split:?}", name(&folder)), &rows, &whole);
            }
        }
    }
}

#[test]
fn prefill_equals_single_steps_from_any_start() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, wide());
            let prompt = tokens(&s, 2, PROMPT);
            let mut expected = None;
            for start in [0, 1, 7, 32, 33, 69] {
                for single_steps in [false, true] {
                    s.reset();
                    if start > 0 {
                        s.prefill(&prompt[..start]).unwrap();
                    }
                    let token = match single_steps {
                        false => s.prefill(&prompt[start..]).unwrap(),
                        true => {
                            for (p, &t) in prompt.iter().enumerate().take(PROMPT - 1).skip(start) {
                                s.prefill_step(t, p).unwrap();
                            }
                            s.decode_step(prompt[PROMPT - 1], PROMPT - 1).unwrap()
                        }
                    };
                    assert_eq!(s.cursor(), PROMPT);
                    let found = (token, logits(&mut s));
                    let (t, l) = expected.get_or_insert_with(|| found.clone());
                    let what = format!("{} {on:?} from {start}, steps {single_steps}", name(&folder));
                    assert_eq!(found.0, *t, "{what}");
                    assert_bits(&what, &found.1, l);
                }
            }
        }
    }
}

/// Prompts one row short of, as long as, and longer than the largest batch.
#[test]
fn a_prompt_longer_than_a_batch_runs_as_several_with_the_same_result() {
    for folder in every_folder() {
        for on in EVERY {
            for chunk in [1, 5, 16, 33] {
                let setup = Setup { rows: chunk, head_rows: 3, context: 160, ..Setup::default() };
                let mut cut = stepper(&folder, on, setup);
                let mut whole = stepper(&folder, on, Setup { rows: 96, ..setup });
                for len in [chunk - 1, chunk, chunk + 1, 2 * chunk + 1] {
                    let prompt = tokens(&cut, len as u64, len);
                    if len == 0 {
                        assert!(matches!(cut.prefill(&prompt), Err(Error::EmptyPrompt)));
                        continue;
                    }
                    cut.reset();
                    whole.reset();
                    let token = cut.prefill(&prompt).unwrap();
                    assert_eq!(token, whole.prefill(&prompt).unwrap());
                    let what = format!("{} {on:?} chunk {chunk} prompt {len}", name(&folder));
                    assert_bits(&what, &logits(&mut cut), &logits(&mut whole));
                }
            }
        }
    }
}

#[test]
fn prefill_each_reports_every_row_once_with_the_heads_that_were_asked_for() {
    for on in EVERY {
        let setup = Setup { rows: 16, head_rows: 7, context: 100, ..Setup::default() };
        let mut s = stepper(&tiny_folder(Variant::Moe), on, setup);
        let prompt = Prompt::from(&tokens(&s, 4, 40)[..]);
        for (heads, rows) in [(Heads::None, 0), (Heads::Last, 1), (Heads::All, 40)] {
            s.reset();
            let (mut next, mut head_rows) = (0, Vec::new());
            s.prefill_each(&prompt, heads, &mut |chunk| {
                assert_eq!(chunk.positions.start, next);
                next = chunk.positions.end;
                assert_eq!(chunk.outcome.argmax.len(), chunk.heads.len());
                head_rows.extend(chunk.heads);
            })
            .unwrap();
            assert_eq!(next, 40);
            assert_eq!(head_rows, (40 - rows..40).collect::<Vec<_>>());
        }
    }
}

#[test]
fn prefill_step_runs_no_head_and_no_tail_unless_a_capture_asks() {
    for variant in [Variant::Dense, Variant::PerLayerInputs] {
        for on in EVERY {
            let hooks = Hooks::default();
            let mut s = hooked(&tiny_folder(variant), on, Setup::default(), &hooks);
            let layers = s.model().layers.len();
            let last = s.model().last_writer;
            let t = tokens(&s, 3, 3);
            hooks.take_seen();
            s.prefill_step(t[0], 0).unwrap();
            let seen = hooks.take_seen();
            assert!(seen.contains(&"qkv_finish"), "{seen:?}");
            for verb in ["logits", "argmax", "keep_rows"] {
                assert!(!seen.contains(&verb), "{variant:?}: {verb} in {seen:?}");
            }
            assert!(matches!(s.logits_into(&mut [0.0]), Err(Error::NoLogits)));

            // What runs is counted by the layers whose MLP is reached: those before the last KV write.
            let shape = lapidary_ops::BatchShape { head_rows: 0, ..s.model().check_shape() };
            let listing = s.model().listing(&shape).unwrap();
            let mlps = listing.iter().filter(|l| l.starts_with("attention")).count();
            assert_eq!(mlps, last, "{variant:?}");

            s.set_capture(&[TapPoint::LayerOut(layers - 1)]);
            s.prefill_step(t[1], 1).unwrap();
            let seen = hooks.take_seen();
            assert!(!seen.contains(&"logits"), "{seen:?}");
            assert_eq!(s.hidden(layers - 1).unwrap().rows, 1);
            s.set_capture(&[]);
            s.decode_step(t[2], 2).unwrap();
            assert!(matches!(s.hidden(layers - 1), Err(Error::NotCaptured { .. })));
        }
    }
}

/// Logits of a residual row by the head's formula in float64, with the bound of float32 rounding.
fn head_by_hand(folder: &Path, s: &Stepper, x: &[f32]) -> Vec<(f64, f64)> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let c = &s.model().config;
    let table = checkpoint.expect(Role::Embed, c.vocab, c.hidden).unwrap();
    let table: Vec<f64> = table
        .bytes
        .chunks_exact(2)
        .map(|b| f32::from_bits((u16::from_le_bytes([b[0], b[1]]) as u32) << 16) as f64)
        .collect();
    let gain = checkpoint.expect_vector(Role::FinalNorm, c.hidden).unwrap();
    let square = x.iter().map(|&v| v as f64 * v as f64).sum::<f64>() / c.hidden as f64;
    let factor = (square + c.eps as f64).powf(-0.5);
    let plus = if c.norm_plus_one { 1.0 } else { 0.0 };
    let h: Vec<f64> = x.iter().zip(&gain).map(|(&v, &g)| v as f64 * factor * (g as f64 + plus)).collect();
    table
        .chunks_exact(c.hidden)
        .map(|row| {
            let z: f64 = row.iter().zip(&h).map(|(e, h)| e * h).sum();
            let size: f64 = row.iter().zip(&h).map(|(e, h)| (e * h).abs()).sum();
            // Each term meets at most `hidden` additions and a few roundings before them.
            let bound = (c.hidden as f64 + 8.0) * 2f64.powi(-24) * size;
            let capped = c.final_softcap.map_or(z, |cap| cap as f64 * (z / cap as f64).tanh());
            (capped, bound + capped.abs() * 2f64.powi(-21))
        })
        .collect()
}

fn assert_within(what: &str, found: &[f32], expected: &[(f64, f64)]) {
    for (i, (&f, &(e, bound))) in found.iter().zip(expected).enumerate() {
        assert!(f.is_finite() && (f as f64 - e).abs() <= bound, "{what}: {i} is {f}, not {e} +- {bound}");
    }
}

#[test]
fn a_step_through_a_part_of_the_model() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, Setup::default());
            let what = format!("{} {on:?}", name(&folder));
            let layers = s.model().layers.len();
            let token = tokens(&s, 5, 1)[0];
            let points: Vec<_> = (0..layers).map(TapPoint::LayerOut).chain([TapPoint::Embed]).collect();
            s.set_capture(&points);
            let full_token = s.decode_step(token, 0).unwrap();
            let full = logits(&mut s);
            let embed = s.tap(TapPoint::Embed).unwrap().values.clone();
            let hidden: Vec<Vec<f32>> = (0..layers).map(|l| s.hidden(l).unwrap().values.clone()).collect();
            s.set_capture(&[]);

            // No layer at all: embedding, norm, head.
            for empty in [0..0, 2..2, layers..layers] {
                s.reset();
                s.decode_step_with(token, 0, empty).unwrap();
                assert_within(
                    &format!("{what} no layer"),
                    &logits(&mut s),
                    &head_by_hand(&folder, &s, &embed),
                );
                assert_eq!(s.cursor(), 1);
            }
            // The first few: the head of the residual behind them.
            for end in 1..=layers {
                s.reset();
                s.decode_step_with(token, 0, 0..end).unwrap();
                let expected = head_by_hand(&folder, &s, &hidden[end - 1]);
                assert_within(&format!("{what} 0..{end}"), &logits(&mut s), &expected);
            }
            s.reset();
            assert_eq!(s.decode_step_with(token, 0, 0..layers).unwrap(), full_token);
            assert_bits(&what, &logits(&mut s), &full);
            // Without the first: something else.
            s.reset();
            s.decode_step_with(token, 0, 1..layers).unwrap();
            assert!(!same_bits(&logits(&mut s), &full), "{what}: leaving out a layer changes the logits");
        }
    }
}

/// A layer that was left out holds zeros at that position, not what an earlier sequence left there.
#[test]
fn a_layer_left_out_leaves_no_keys_of_an_earlier_sequence() {
    for variant in [Variant::Dense, Variant::PerLayerInputs] {
        for on in EVERY {
            let mut fresh = stepper(&tiny_folder(variant), on, Setup::default());
            let mut used = stepper(&tiny_folder(variant), on, Setup::default());
            used.prefill(&tokens(&used, 9, 50)).unwrap();
            used.reset();
            let t = tokens(&used, 10, 4);
            for s in [&mut fresh, &mut used] {
                s.decode_step(t[0], 0).unwrap();
                s.decode_step_with(t[1], 1, 0..1).unwrap();
                s.decode_step_with(t[2], 2, 3..4).unwrap();
                s.decode_step(t[3], 3).unwrap();
            }
            assert_bits(&format!("{variant:?} {on:?}"), &logits(&mut used), &logits(&mut fresh));
        }
    }
}

/// The sublayer calls, put together by hand, are the layer.
#[test]
fn sublayers_compose_to_the_layer() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, Setup::default());
            let layers = s.model().layers.len();
            let prompt = tokens(&s, 6, 39);
            s.prefill(&prompt[..38]).unwrap();
            let mut points: Vec<_> = (0..layers).map(TapPoint::LayerOut).collect();
            points.push(TapPoint::Embed);
            s.set_capture(&points);
            s.decode_step(prompt[38], 38).unwrap();
            let mut x = s.tap(TapPoint::Embed).unwrap().values.clone();
            let hidden: Vec<Vec<f32>> = (0..layers).map(|l| s.hidden(l).unwrap().values.clone()).collect();
            s.set_capture(&[]);
            s.rewind(38).unwrap();
            for (l, expected) in hidden.iter().enumerate() {
                x = s.layer_attention(l, &x, 38).unwrap();
                x = s.layer_ffn(l, &x).unwrap();
                let layer = &s.model().layers[l];
                // The branch of per-layer inputs has no call of its own: go on from the stored value.
                if layer.per_layer.is_none() {
                    let by = layer.scalar.unwrap_or(1.0);
                    x.iter_mut().for_each(|v| *v *= by);
                    assert_bits(&format!("{} {on:?} layer {l}", name(&folder)), &x, expected);
                }
                x.clone_from(expected);
            }
            assert_eq!(s.cursor(), 38);
            let routed = s.model().layers.iter().any(|l| matches!(l.mlp, Mlp::Moe(_)));
            assert_eq!(routed, s.model().config.moe.is_some());
        }
    }
}

#[test]
fn reset_is_a_fresh_start() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, Setup::default());
            let (a, b) = (tokens(&s, 7, 41), tokens(&s, 8, 20));
            let token = s.prefill(&b).unwrap();
            let expected = logits(&mut s);
            s.reset();
            s.prefill(&a).unwrap();
            s.reset();
            assert_eq!(s.cursor(), 0);
            assert_eq!(s.prefill(&b).unwrap(), token);
            assert_bits(&name(&folder), &logits(&mut s), &expected);
        }
    }
}

/// The earliest position that may be rewound to (beside 0), from the ring's size written out.
fn earliest(s: &Stepper, high: usize, chunk: usize) -> usize {
    let config = &s.model().config;
    let pages = sequence_pages(config, Group::Sliding, s.context(), chunk);
    let newest = (high - 1) / PAGE_TOKENS;
    match (newest + 1).checked_sub(pages) {
        None | Some(0) => 0,
        Some(block) => block * PAGE_TOKENS + config.window - 1,
    }
}

#[test]
fn rewinding_to_the_exact_border_and_not_beyond() {
    let golden = Golden::variant("e2b").unwrap().folder().to_path_buf();
    for folder in TINY.map(tiny_folder).into_iter().chain([golden]) {
        for on in EVERY {
            for chunk in [4, 16, 40] {
                let setup = Setup { rows: chunk, head_rows: 1, context: 230, ..Setup::default() };
                let mut s = stepper(&folder, on, setup);
                let mut fresh = stepper(&folder, on, setup);
                let prompt = tokens(&s, 11, 230);
                for high in [33, 96, 97, 160, 161, 230] {
                    let what = format!("{} {on:?} chunk {chunk} high {high}", name(&folder));
                    let border = earliest(&s, high, chunk);
                    assert!(
                        border + chunk.max(16) <= high || border == 0,
                        "{what}: the promised rollback, border {border}"
                    );
                    s.reset();
                    s.prefill(&prompt[..high]).unwrap();
                    let before = logits(&mut s);
                    if border > 1 {
                        match s.rewind(border - 1) {
                            Err(Error::LeftWindow { position, earliest }) => {
                                assert_eq!((position, earliest), (border - 1, border), "{what}");
                            }
                            other => panic!("{what}: {other:?}"),
                        }
                    }
                    assert!(matches!(s.rewind(high + 1), Err(Error::RewindForward { .. })));
                    assert_eq!(s.cursor(), high);
                    assert_bits(&what, &logits(&mut s), &before);

                    // From the border on with other tokens: as if the first ones had never been.
                    s.rewind(border).unwrap();
                    assert_eq!(s.cursor(), border);
                    let other = tokens(&s, 12 + high as u64, 9);
                    let token = s.prefill(&other).unwrap();
                    fresh.reset();
                    if border > 0 {
                        fresh.prefill(&prompt[..border]).unwrap();
                    }
                    assert_eq!(fresh.prefill(&other).unwrap(), token, "{what}");
                    assert_bits(&what, &logits(&mut s), &logits(&mut fresh));
                }
            }
        }
    }
}

#[test]
fn the_last_positions_can_always_be_rolled_back() {
    for variant in [Variant::Dense, Variant::PerLayerInputs] {
        for on in EVERY {
            for chunk in [1, 16, 21] {
                let setup = Setup { rows: chunk, head_rows: 1, context: 150, ..Setup::default() };
                let mut s = stepper(&tiny_folder(variant), on, setup);
                let prompt = tokens(&s, 13, 150);
                for high in 1..=150 {
                    s.prefill_each(&Prompt::from(&prompt[high - 1..high]), Heads::None, &mut |_| {}).unwrap();
                    let back = high.saturating_sub(chunk.max(16));
                    s.rewind(back).unwrap_or_else(|e| panic!("{variant:?} {chunk} {high}: {e}"));
                    s.prefill_each(&Prompt::from(&prompt[back..high]), Heads::None, &mut |_| {}).unwrap();
                }
            }
        }
    }
}

/// After a rewind the ring's oldest pages stay lost, however far the cursor went back.
#[test]
fn rewinding_twice_does_not_bring_back_what_was_overwritten() {
    for on in EVERY {
        let setup = Setup { rows: 16, head_rows: 1, context: 230, ..Setup::default() };
        let mut s = stepper(&tiny_folder(Variant::Dense), on, setup);
        let prompt = tokens(&s, 14, 230);
        s.prefill(&prompt[..200]).unwrap();
        let border = earliest(&s, 200, 16);
        s.rewind(border).unwrap();
        assert!(matches!(s.rewind(border - 1), Err(Error::LeftWindow { .. })));
        s.prefill(&prompt[border..border + 3]).unwrap();
        assert!(matches!(s.rewind(border - 1), Err(Error::LeftWindow { .. })));
        // The first position sees no earlier one, so it can always be gone back to.
        s.rewind(0).unwrap();
        let token = s.prefill(&prompt[..60]).unwrap();
        s.rewind(50).unwrap();
        assert_eq!(s.prefill(&prompt[50..60]).unwrap(), token);
    }
}

#[test]
fn a_full_context_is_refused_and_can_be_left() {
    for folder in every_folder() {
        for on in EVERY {
            let setup = Setup { rows: 16, head_rows: 16, context: 45, ..Setup::default() };
            let mut s = stepper(&folder, on, setup);
            let prompt = tokens(&s, 15, 46);
            assert!(matches!(s.prefill(&prompt), Err(Error::ContextFull { context: 45, needed: 45 })));
            assert_eq!(s.cursor(), 0);
            s.prefill(&prompt[..44]).unwrap();
            assert!(matches!(s.prefill(&prompt[..2]), Err(Error::ContextFull { context: 45, needed: 45 })));
            let token = s.decode_step(prompt[44], 44).unwrap();
            let before = logits(&mut s);
            assert!(matches!(s.decode_step(3, 45), Err(Error::ContextFull { context: 45, needed: 45 })));
            assert!(matches!(s.prefill_step(3, 45), Err(Error::ContextFull { .. })));
            assert!(matches!(s.decode_step_with(3, 45, 0..0), Err(Error::ContextFull { .. })));
            assert_bits(&name(&folder), &logits(&mut s), &before);
            s.rewind(44).unwrap();
            assert_eq!(s.decode_step(prompt[44], 44).unwrap(), token);
            assert_bits(&name(&folder), &logits(&mut s), &before);
        }
    }
}

/// Soft prompts too may be cut anywhere outside a block.
#[test]
fn a_soft_prompt_gives_the_same_logits_in_every_cut() {
    for variant in ["moe26b", "unified12b", "e2b"] {
        let golden = Golden::variant(variant).unwrap();
        let prompt = common::drive::golden_soft(&golden);
        for on in EVERY {
            let whole = score(&mut stepper(golden.folder(), on, Setup::default()), &prompt).0;
            for rows in [9, 11, 17] {
                let setup = Setup { rows, head_rows: rows, ..Setup::default() };
                let mut s = stepper(golden.folder(), on, setup);
                assert_bits(&format!("{variant} {on:?} {rows}"), &score(&mut s, &prompt).0, &whole);
            }
        }
    }
}
