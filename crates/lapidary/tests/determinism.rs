//! Equal bits: however a prompt is cut, whatever ran before, and whether or not anything is captured.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::drive::{
    assert_bits, every_folder, golden_soft, logits, name, score, tiny_folder, tokens, values,
};
use common::spy::{Hooks, Verb, hooked};
use common::{EVERY, Setup, stepper};
use lapidary_engine::{Heads, Prompt, SoftKind, SoftSpan};
use lapidary_ops::{Outcome, TapPoint};
use lapidary_reference::Golden;
use lapidary_reference::tiny::Variant;

const PROMPT: usize = 75;

fn all_points(layers: usize) -> Vec<TapPoint> {
    let mut points = vec![TapPoint::Embed, TapPoint::PerLayer, TapPoint::FinalNorm];
    for l in 0..layers {
        points.extend([
            TapPoint::Qkv(l),
            TapPoint::Attn(l),
            TapPoint::Routes(l),
            TapPoint::Mlp(l),
            TapPoint::LayerOut(l),
        ]);
    }
    points
}

/// The values of a capture over all batches of a prompt; empty where the model has no such point.
fn captured(outcomes: &[Outcome], point: TapPoint) -> Vec<f32> {
    let taps = outcomes.iter().flat_map(|o| &o.taps).filter(|t| t.point == point);
    taps.inspect(|t| assert_eq!(t.values.len(), t.rows * t.width)).flat_map(|t| t.values.clone()).collect()
}

/// Whether a model reaches a point at all.
fn exists(s: &lapidary_engine::Stepper, point: TapPoint) -> bool {
    match point {
        TapPoint::PerLayer => s.model().per_layer.is_some(),
        TapPoint::Routes(_) => s.model().config.moe.is_some(),
        _ => true,
    }
}

#[test]
fn captures_are_the_same_in_every_cut_and_change_no_logit() {
    for folder in every_folder() {
        for on in EVERY {
            let setup = Setup { rows: 96, head_rows: 96, ..Setup::default() };
            let mut s = stepper(&folder, on, setup);
            let prompt = Prompt::from(&tokens(&s, 1, PROMPT)[..]);
            let layers = s.model().layers.len();
            let (plain, none) = score(&mut s, &prompt);
            assert!(none.iter().all(|o| o.taps.is_empty()));
            s.reset();
            s.set_capture(&all_points(layers));
            let (with, whole) = score(&mut s, &prompt);
            assert_bits(&format!("{} {on:?} with captures", name(&folder)), &with, &plain);
            for rows in [1, 13, 32] {
                let mut cut = stepper(&folder, on, Setup { rows, head_rows: rows, ..setup });
                cut.set_capture(&all_points(layers));
                let (found, parts) = score(&mut cut, &prompt);
                assert_bits(&name(&folder), &found, &plain);
                for point in all_points(layers) {
                    if !exists(&s, point) {
                        assert!(captured(&whole, point).is_empty(), "{point:?}");
                        continue;
                    }
                    let expected = captured(&whole, point);
                    assert_eq!(expected.len() % PROMPT, 0);
                    // Behind its queries the stacked projection holds keys and values as projected or as
                    // the device left them: the capture is of the queries.
                    let queries = |l: usize| {
                        s.model().layers[l].attn.spec.heads * s.model().layers[l].attn.spec.head_dim
                    };
                    let found = captured(&parts, point);
                    let what = format!("{} {on:?} {rows} rows {point:?}", name(&folder));
                    match point {
                        TapPoint::Qkv(l) => {
                            let head = |v: &[f32]| -> Vec<f32> {
                                v.chunks_exact(v.len() / PROMPT)
                                    .flat_map(|r| r[..queries(l)].to_vec())
                                    .collect()
                            };
                            assert_bits(&what, &head(&found), &head(&expected));
                        }
                        _ => assert_bits(&what, &found, &expected),
                    }
                }
            }
        }
    }
}

/// Which rows the last `keep_rows` compacted beside the residual: none when the tail ran for all rows.
fn watched(
    folder: &std::path::Path,
    on: common::On,
    setup: Setup,
) -> (lapidary_engine::Stepper, Arc<AtomicUsize>) {
    let kept = Arc::new(AtomicUsize::new(usize::MAX));
    let seen = kept.clone();
    let hooks = Hooks::verb(move |_, verb, s| {
        if let Verb::KeepRows(acts) = verb {
            seen.store(acts.len(), Ordering::SeqCst);
        }
        verb.run(s);
    });
    (hooked(folder, on, setup, &hooks), kept)
}

/// Running the tail for all rows and for head rows only is the same; captures of the tail get all rows.
#[test]
fn a_capture_of_the_tail_runs_it_for_all_rows_and_changes_nothing() {
    for folder in every_folder() {
        for on in EVERY {
            let setup = Setup { rows: 96, head_rows: 96, ..Setup::default() };
            let (mut s, kept) = watched(&folder, on, setup);
            let what = format!("{} {on:?}", name(&folder));
            let prompt = tokens(&s, 2, 41);
            let last = s.model().last_writer;
            let layers = s.model().layers.len();
            let token = s.prefill(&prompt).unwrap();
            let heads_only = logits(&mut s);
            assert!(kept.load(Ordering::SeqCst) >= 4, "{what}: the tail ran for the head row only");

            // Points before the tail leave it as it is.
            let mut early = vec![TapPoint::Embed, TapPoint::FinalNorm, TapPoint::Qkv(last)];
            early.extend((0..last).map(TapPoint::LayerOut));
            s.reset();
            s.set_capture(&early);
            assert_eq!(s.prefill(&prompt).unwrap(), token);
            assert!(kept.load(Ordering::SeqCst) >= 4, "{what}");
            assert_bits(&what, &logits(&mut s), &heads_only);
            assert_eq!(s.final_norm().unwrap().rows, 1);
            assert_eq!(s.tap(TapPoint::Qkv(last)).unwrap().rows, 41);
            (0..last).for_each(|l| assert_eq!(s.hidden(l).unwrap().rows, 41));

            for point in [
                TapPoint::Attn(last),
                TapPoint::Mlp(last),
                TapPoint::LayerOut(last),
                TapPoint::LayerOut(layers - 1),
            ] {
                s.reset();
                s.set_capture(&[point]);
                assert_eq!(s.prefill(&prompt).unwrap(), token);
                assert_eq!(kept.load(Ordering::SeqCst), 1, "{what} {point:?}: the tail ran for all rows");
                assert_bits(&what, &logits(&mut s), &heads_only);
                assert_eq!(s.tap(point).unwrap().rows, 41);
            }
            // The captured tail of a prefill is that of scoring.
            let tail = s.hidden(layers - 1).unwrap().values.clone();
            s.reset();
            let (_, outcomes) = score(&mut s, &Prompt::from(&prompt[..]));
            assert_bits(&what, &tail, &captured(&outcomes, TapPoint::LayerOut(layers - 1)));
        }
    }
}

#[test]
fn running_again_gives_the_same_bits() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, Setup::default());
            let prompt = Prompt::from(&tokens(&s, 3, 50)[..]);
            let first = score(&mut s, &prompt).0;
            for again in 0..4 {
                s.reset();
                assert_bits(&format!("{} {on:?} {again}", name(&folder)), &score(&mut s, &prompt).0, &first);
            }
            let fresh = score(&mut stepper(&folder, on, Setup::default()), &prompt).0;
            assert_bits(&name(&folder), &fresh, &first);
        }
    }
}

#[test]
fn a_prompt_mixed_of_text_image_and_sound_is_the_same_in_every_cut_and_slot() {
    for variant in ["moe26b", "e2b", "unified12b"] {
        let golden = Golden::variant(variant).unwrap();
        let prompt = golden_soft(&golden);
        for on in EVERY {
            let mut s = stepper(golden.folder(), on, Setup::default());
            let token = s.prefill_prompt(&prompt).unwrap();
            let expected = logits(&mut s);
            for rows in [4, 7, 12] {
                let setup = Setup { rows, head_rows: 1, ..Setup::default() };
                let mut cut = stepper(golden.folder(), on, setup);
                cut.alloc_slots(3, 90).unwrap();
                cut.prefill_slot(0, &tokens(&cut, 4, 30)).unwrap();
                assert_eq!(cut.prefill_slot_prompt(2, &prompt).unwrap(), token);
                assert_bits(variant, &logits(&mut cut), &expected);
                assert_eq!(cut.prefill_prompt(&prompt).unwrap(), token);
                assert_bits(variant, &logits(&mut cut), &expected);
            }
        }
    }
}

/// Soft rows that hold what the table holds are the tokens themselves.
#[test]
fn a_soft_row_with_a_tokens_embedding_is_that_token() {
    for variant in [Variant::Dense, Variant::Moe, Variant::Gemma3] {
        for on in EVERY {
            let mut s = stepper(&tiny_folder(variant), on, Setup::default());
            let prompt = tokens(&s, 5, 30);
            s.set_capture(&[TapPoint::Embed]);
            let (expected, outcomes) = score(&mut s, &Prompt::from(&prompt[..]));
            let embed = captured(&outcomes, TapPoint::Embed);
            let width = embed.len() / 30;
            let span = |start: usize, end: usize| SoftSpan {
                start,
                values: embed[start * width..end * width].to_vec(),
                kind: SoftKind::Audio,
            };
            s.reset();
            let soft = Prompt { tokens: prompt, soft: vec![span(3, 9), span(17, 18)] };
            assert_bits(&format!("{variant:?} {on:?}"), &score(&mut s, &soft).0, &expected);
            // And a row with anything else is not.
            s.reset();
            let soft = Prompt {
                soft: vec![SoftSpan { start: 3, values: values(1, width), kind: SoftKind::Audio }],
                ..soft
            };
            assert!(!common::drive::same_bits(&score(&mut s, &soft).0, &expected));
        }
    }
}

/// Prefill without logits leaves the same keys and values as prefill with all of them.
#[test]
fn what_is_asked_of_a_batch_does_not_change_its_keys_and_values() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, Setup::default());
            let prompt = Prompt::from(&tokens(&s, 6, 60)[..]);
            let mut expected: Option<Vec<f32>> = None;
            for heads in [Heads::None, Heads::Last, Heads::All] {
                s.reset();
                s.prefill_each(&prompt, heads, &mut |_| {}).unwrap();
                s.decode_step(9, 60).unwrap();
                let found = logits(&mut s);
                assert_bits(&name(&folder), &found, expected.get_or_insert_with(|| found.clone()));
            }
        }
    }
}
