//! The single sequence of the step API: every way of feeding the same tokens is the same, and every refused
//! call leaves everything as it was.

mod common;

use std::path::Path;

use common::drive::{
    TINY, assert_bits, every_folder, golden_ids, logits, name, same_bits, score, tiny_folder, tokens, values,
};
use common::spy::{Hooks, hooked};
use common::{EVERY, Setup, stepper};
use lapidary_engine::{Error, Heads, Prompt, SoftKind, SoftSpan, Stepper};
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

/// A call that must be refused, and whether the error is the right one.
type Refused = (&'static str, fn(&mut Stepper) -> Option<Error>, fn(&Error) -> bool);

fn soft(start: usize, values: Vec<f32>) -> Prompt {
    let soft = vec![SoftSpan { start, values, kind: SoftKind::Vision }];
    Prompt { tokens: vec![5; 4], soft }
}

fn hidden(s: &Stepper) -> usize {
    s.model().config.hidden
}

/// On a single sequence that stands at 21, in a context of 120, with batches of at most 8 rows.
const REFUSED: &[Refused] = &[
    (
        "a position behind",
        |s| s.decode_step(5, 20).err(),
        |e| matches!(e, Error::Position { expected: 21, found: 20 }),
    ),
    (
        "a position ahead",
        |s| s.decode_step(5, 22).err(),
        |e| matches!(e, Error::Position { expected: 21, found: 22 }),
    ),
    (
        "the largest position",
        |s| s.prefill_step(5, usize::MAX).err(),
        |e| matches!(e, Error::Position { found: usize::MAX, .. }),
    ),
    (
        "a position of part of the model",
        |s| s.decode_step_with(5, 0, 0..0).err(),
        |e| matches!(e, Error::Position { .. }),
    ),
    (
        "the first token outside",
        |s| s.decode_step(s.model().config.vocab as u32, 21).err(),
        |e| matches!(e, Error::Token { .. }),
    ),
    (
        "the largest token",
        |s| s.prefill_step(u32::MAX, 21).err(),
        |e| matches!(e, Error::Token { token: u32::MAX, .. }),
    ),
    (
        "a token of part of the model",
        |s| s.decode_step_with(u32::MAX, 21, 0..1).err(),
        |e| matches!(e, Error::Token { .. }),
    ),
    (
        "a bad token in the last batch of a prompt",
        |s| {
            let mut prompt = vec![7; 29];
            prompt.push(u32::MAX);
            s.prefill(&prompt).err()
        },
        |e| matches!(e, Error::Token { .. }),
    ),
    ("an empty prompt", |s| s.prefill(&[]).err(), |e| matches!(e, Error::EmptyPrompt)),
    (
        "a prompt beyond the context",
        |s| s.prefill(&[7; 100]).err(),
        |e| matches!(e, Error::ContextFull { context: 120, needed: 120 }),
    ),
    (
        "scoring beyond the context",
        |s| s.score(&Prompt::from(&[7; 100][..]), &mut |_, _| panic!("nothing ran"), &mut |_, _| {}).err(),
        |e| matches!(e, Error::ContextFull { .. }),
    ),
    (
        "a layer range beyond the model",
        |s| {
            let n = s.model().layers.len();
            s.decode_step_with(5, 21, 0..n + 1).err()
        },
        |e| matches!(e, Error::Layer { .. }),
    ),
    (
        "a layer range beyond the model, empty",
        |s| s.decode_step_with(5, 21, 99..99).err(),
        |e| matches!(e, Error::Layer { layer: 99, .. }),
    ),
    #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    (
        "a reversed layer range",
        |s| s.decode_step_with(5, 21, 2..1).err(),
        |e| matches!(e, Error::Layer { .. }),
    ),
    (
        "a soft row that is not a number",
        |s| {
            let mut v = vec![0.5; 2 * hidden(s)];
            let last = v.len() - 1;
            v[last] = f32::NAN;
            s.prefill_prompt(&soft(1, v)).err()
        },
        |e| matches!(e, Error::SoftNotFinite { index: 2 }),
    ),
    (
        "an infinite soft row",
        |s| s.prefill_prompt(&soft(0, vec![f32::INFINITY; hidden(s)])).err(),
        |e| matches!(e, Error::SoftNotFinite { index: 0 }),
    ),
    (
        "a soft row cut short",
        |s| s.prefill_prompt(&soft(0, vec![0.5; hidden(s) - 1])).err(),
        |e| matches!(e, Error::Length { what: "soft values", .. }),
    ),
    (
        "a soft row and a half",
        |s| s.prefill_prompt(&soft(0, vec![0.5; hidden(s) + 1])).err(),
        |e| matches!(e, Error::Length { what: "soft values", .. }),
    ),
    (
        "soft tokens without values",
        |s| s.prefill_prompt(&soft(0, Vec::new())).err(),
        |e| matches!(e, Error::Length { what: "soft values", found: 0, .. }),
    ),
    (
        "soft rows behind the prompt",
        |s| s.prefill_prompt(&soft(4, vec![0.5; hidden(s)])).err(),
        |e| matches!(e, Error::SoftRange { start: 4, len: 4 }),
    ),
    (
        "soft rows across the end",
        |s| s.prefill_prompt(&soft(3, vec![0.5; 2 * hidden(s)])).err(),
        |e| matches!(e, Error::SoftRange { start: 3, len: 4 }),
    ),
    (
        "soft rows at the largest place",
        |s| s.prefill_prompt(&soft(usize::MAX, vec![0.5; hidden(s)])).err(),
        |e| matches!(e, Error::SoftRange { start: usize::MAX, .. }),
    ),
    (
        "soft rows twice",
        |s| {
            let mut prompt = soft(1, vec![0.5; 2 * hidden(s)]);
            prompt.soft.push(SoftSpan { start: 2, values: vec![0.5; hidden(s)], kind: SoftKind::Audio });
            s.prefill_prompt(&prompt).err()
        },
        |e| matches!(e, Error::SoftRange { start: 2, .. }),
    ),
    (
        "rewinding forward",
        |s| s.rewind(22).err(),
        |e| matches!(e, Error::RewindForward { position: 22, cursor: 21 }),
    ),
    (
        "logits into too little",
        |s| {
            let n = s.model().config.vocab;
            s.logits_into(&mut vec![0.0; n - 1]).err()
        },
        |e| matches!(e, Error::Length { what: "logits", .. }),
    ),
    (
        "logits into too much",
        |s| {
            let n = s.model().config.vocab;
            s.logits_into(&mut vec![0.0; n + 1]).err()
        },
        |e| matches!(e, Error::Length { what: "logits", .. }),
    ),
    (
        "logits of a row that was not run",
        |s| {
            let n = s.model().config.vocab;
            s.logits_row_into(1, &mut vec![0.0; n]).err()
        },
        |e| matches!(e, Error::NoLogits),
    ),
    ("a capture that was not asked for", |s| s.hidden(0).err(), |e| matches!(e, Error::NotCaptured { .. })),
    ("a capture of no layer", |s| s.hidden(99).err(), |e| matches!(e, Error::Layer { layer: 99, .. })),
    (
        "a final norm that was not asked for",
        |s| s.final_norm().err(),
        |e| matches!(e, Error::NotCaptured { .. }),
    ),
    (
        "attention at a wrong position",
        |s| s.layer_attention(0, &vec![0.5; hidden(s)], 20).err(),
        |e| matches!(e, Error::Position { expected: 21, found: 20 }),
    ),
    (
        "attention of no layer",
        |s| s.layer_attention(99, &vec![0.5; hidden(s)], 21).err(),
        |e| matches!(e, Error::Layer { .. }),
    ),
    (
        "attention of a short row",
        |s| s.layer_attention(0, &vec![0.5; hidden(s) - 1], 21).err(),
        |e| matches!(e, Error::Length { what: "residual row", .. }),
    ),
    (
        "attention of what is no number",
        |s| s.layer_attention(0, &vec![f32::NAN; hidden(s)], 21).err(),
        |e| matches!(e, Error::SoftNotFinite { .. }),
    ),
    (
        "an mlp of no layer",
        |s| s.layer_ffn(99, &vec![0.5; hidden(s)]).err(),
        |e| matches!(e, Error::Layer { .. }),
    ),
    (
        "an mlp of a long row",
        |s| s.layer_ffn(0, &vec![0.5; hidden(s) + 1]).err(),
        |e| matches!(e, Error::Length { what: "residual row", .. }),
    ),
    ("a smoke test beside a live sequence", |s| s.slot_smoke().err(), |e| matches!(e, Error::SlotsBusy)),
    ("no slots", |s| s.alloc_slots(0, 8).err(), |e| matches!(e, Error::Zero { what: "n_slots" })),
    ("slots of no context", |s| s.alloc_slots(2, 0).err(), |e| matches!(e, Error::Zero { what: "slot_ctx" })),
    (
        "more slots than there are numbers",
        |s| s.alloc_slots(usize::MAX, 8).err(),
        |e| matches!(e, Error::TooLarge { .. }),
    ),
    (
        "a slot longer than there are positions",
        |s| s.alloc_slots(1, usize::MAX).err(),
        |e| matches!(e, Error::TooLarge { what: "slot_ctx", .. }),
    ),
    (
        "more memory than there is",
        |s| s.alloc_slots(1 << 16, 1 << 20).err(),
        |e| matches!(e, Error::TooLarge { .. } | Error::Backend(_)),
    ),
    (
        "a slot that does not exist",
        |s| s.prefill_slot(0, &[5]).err(),
        |e| matches!(e, Error::Slot { slot: 0, slots: 0 }),
    ),
];

fn small() -> Setup {
    Setup { rows: 8, head_rows: 8, context: 120, ..Setup::default() }
}

#[test]
fn a_refused_call_leaves_everything_as_it_was() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, small());
            let mut undisturbed = stepper(&folder, on, small());
            let prompt = tokens(&s, 16, 21);
            for s in [&mut s, &mut undisturbed] {
                s.prefill(&prompt).unwrap();
            }
            let before = logits(&mut s);
            for (what, call, right) in REFUSED {
                let what = format!("{} {on:?}: {what}", name(&folder));
                let error = call(&mut s).unwrap_or_else(|| panic!("{what} was not refused"));
                assert!(right(&error), "{what}: {error:?}");
                assert_eq!(s.cursor(), 21, "{what}");
                assert_bits(&what, &logits(&mut s), &before);
                // The right call succeeds, and gives what it gives in a run without the refused one. It reads
                // all keys and values that there are.
                let next = tokens(&s, 17, 1)[0];
                assert_eq!(s.decode_step(next, 21).unwrap(), undisturbed.decode_step(next, 21).unwrap());
                assert_bits(&what, &logits(&mut s), &logits(&mut undisturbed));
                for s in [&mut s, &mut undisturbed] {
                    s.rewind(20).unwrap();
                    s.decode_step(prompt[20], 20).unwrap();
                }
            }
            // And so it goes on.
            let mut token = 9;
            for position in 21..90 {
                let next = s.decode_step(token, position).unwrap();
                assert_eq!(next, undisturbed.decode_step(token, position).unwrap());
                token = next;
            }
            assert_bits(&name(&folder), &logits(&mut s), &logits(&mut undisturbed));
        }
    }
}

#[test]
fn a_vision_block_larger_than_a_batch_is_refused_where_blocks_stay_whole() {
    for on in EVERY {
        for (variant, whole) in [(Variant::Unified, true), (Variant::PerLayerInputs, false)] {
            let mut s = stepper(&tiny_folder(variant), on, small());
            let width = hidden(&s);
            let prompt = Prompt {
                tokens: vec![5; 12],
                soft: vec![SoftSpan { start: 2, values: values(1, 9 * width), kind: SoftKind::Vision }],
            };
            let result = s.prefill_prompt(&prompt);
            match whole {
                true => {
                    assert!(matches!(result, Err(Error::VisionBlock { rows: 9, limit: 8 })), "{result:?}");
                    assert_eq!(s.cursor(), 0);
                }
                false => {
                    result.unwrap();
                }
            }
            // Two spans that touch are one block, two that don't are two.
            let span = |start| SoftSpan { start, values: values(2, 5 * width), kind: SoftKind::Vision };
            s.reset();
            let touching = Prompt { tokens: vec![5; 12], soft: vec![span(1), span(6)] };
            assert_eq!(s.prefill_prompt(&touching).is_err(), whole);
            s.reset();
            let apart = Prompt { tokens: vec![5; 12], soft: vec![span(1), span(7)] };
            s.prefill_prompt(&apart).unwrap();
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

/// A failure in a later batch of a prompt takes the earlier ones back.
#[test]
fn a_prompt_that_fails_half_way_has_not_begun() {
    for on in EVERY {
        let golden = Golden::variant("dense31b").unwrap();
        // A batch with a soft row is poisoned; the prompt has one in its last row.
        let hooks = Hooks::verb(|_, verb, s| match verb {
            common::spy::Verb::InjectSoft(x) => {
                verb.run(s);
                s.scale(x, f32::INFINITY);
            }
            other => other.run(s),
        });
        let setup = Setup { rows: 8, head_rows: 8, context: 120, ..Setup::default() };
        let mut s = hooked(golden.folder(), on, setup, &hooks);
        let mut undisturbed = stepper(golden.folder(), on, setup);
        let ids = golden_ids(&golden, "input_ids");
        for s in [&mut s, &mut undisturbed] {
            s.prefill(&ids[..10]).unwrap();
        }
        let width = hidden(&s);
        let poisoned = Prompt {
            tokens: ids.clone(),
            soft: vec![SoftSpan { start: 39, values: values(3, width), kind: SoftKind::Audio }],
        };
        let error = s.prefill_prompt(&poisoned).unwrap_err();
        assert!(matches!(error, Error::NonFiniteLogits { position: 49 }), "{error:?}");
        assert_eq!(s.cursor(), 10);
        let error = s.score(&poisoned, &mut |_, _| {}, &mut |_, _| {}).unwrap_err();
        assert!(matches!(error, Error::NonFiniteLogits { position: 42 }), "{error:?}");
        assert_eq!(s.cursor(), 10);
        for s in [&mut s, &mut undisturbed] {
            s.prefill(&ids).unwrap();
        }
        assert_bits("after a failure", &logits(&mut s), &logits(&mut undisturbed));
    }
}

/// What a failed pass wrote over is gone, although the cursor stands where it stood.
#[test]
fn pages_that_a_failed_pass_took_cannot_be_rewound_to() {
    for on in EVERY {
        let hooks = Hooks::verb(|_, verb, s| {
            verb.run(s);
            if let common::spy::Verb::InjectSoft(x) = verb {
                s.scale(x, f32::INFINITY);
            }
        });
        let setup = Setup { rows: 16, head_rows: 1, context: 230, ..Setup::default() };
        let mut s = hooked(&tiny_folder(Variant::Dense), on, setup, &hooks);
        let mut fresh = stepper(&tiny_folder(Variant::Dense), on, setup);
        let prompt = tokens(&s, 18, 95);
        s.prefill(&prompt).unwrap();
        // Two pages hold blocks 1 and 2; rows 95 to 102 need block 3, which takes the page of block 1.
        assert_eq!((earliest(&s, 95, 16), earliest(&s, 103, 16)), (38, 70));
        let width = hidden(&s);
        let soft = vec![SoftSpan { start: 7, values: values(4, width), kind: SoftKind::Audio }];
        let failing = Prompt { tokens: vec![5; 8], soft };
        assert!(matches!(s.prefill_prompt(&failing), Err(Error::NonFiniteLogits { position: 102 })));
        assert_eq!(s.cursor(), 95);
        match s.rewind(69) {
            Err(Error::LeftWindow { position: 69, earliest: 70 }) => {}
            other => panic!("{on:?}: {other:?}"),
        }
        s.rewind(70).unwrap();
        let token = s.prefill(&[9, 8, 7]).unwrap();
        fresh.prefill(&prompt[..70]).unwrap();
        assert_eq!(fresh.prefill(&[9, 8, 7]).unwrap(), token);
        assert_bits(&format!("{on:?}"), &logits(&mut s), &logits(&mut fresh));
    }
}

#[test]
fn a_context_of_nothing_or_beyond_all_positions_is_refused() {
    use lapidary_engine::Runner;
    use lapidary_model::{BuildOptions, EmbedScale, Limits, Model};
    for on in EVERY {
        for context in [0, usize::MAX, i32::MAX as usize] {
            let checkpoint = Checkpoint::open(&tiny_folder(Variant::Dense)).unwrap();
            let mut backend = on.backend();
            let limits = Limits { rows: 4, head_rows: 4 };
            let options = BuildOptions { limits, embed_scale: EmbedScale::F32 };
            let config = common::config(&checkpoint);
            let model = Model::build(config, &checkpoint, backend.as_mut(), &options, &mut |_| {}).unwrap();
            let error = Runner::new(model, backend, [lapidary_ops::KvFormat::F32; 2], context).unwrap_err();
            match context {
                0 => assert!(matches!(error, Error::Zero { what: "context" })),
                _ => assert!(matches!(error, Error::TooLarge { what: "context", .. }), "{error:?}"),
            }
        }
    }
}
