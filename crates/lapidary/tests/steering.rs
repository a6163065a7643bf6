//! Steering of rows: its formulas on both backends, and that it touches no row but those it was asked for.

mod common;

use common::drive::{assert_bits, every_folder, logits, name, same_bits, score, tiny_folder, tokens, values};
use common::{EVERY, On, Setup, runner, stepper};
use lapidary_engine::{Error, Prompt, Stepper};
use lapidary_ops::{Batch, RowSpan, SteerEdit, SteerError, SteerMode, SteerSet, TapPoint};
use lapidary_reference::tiny::Variant;

/// A set with an edit of each mode, two of them in one layer, one gated.
fn mixed(stepper: &Stepper, seed: u64, scale: f32) -> SteerSet {
    let (layers, width) = (stepper.model().layers.len(), stepper.model().config.hidden);
    let edit = |layer: usize, mode, strength: f32, i: u64| {
        SteerEdit::new(layer.min(layers - 1), mode, strength, &values(seed * 10 + i, width)).unwrap()
    };
    let mut edits = vec![
        edit(0, SteerMode::Add, 0.03 * scale, 1),
        edit(0, SteerMode::Ablate, 1.0, 2),
        edit(1, SteerMode::Clamp, 0.5, 3),
        edit(layers - 1, SteerMode::Renorm, 1.0, 4),
        edit(layers - 1, SteerMode::Add, -0.02 * scale, 5),
    ];
    edits[2].to = 3.0 * scale;
    edits[3].gate = Some(0.0);
    SteerSet { edits }
}

/// The edits of one row in float64.
fn expected(row: &[f32], edits: &[SteerEdit]) -> Vec<f64> {
    let mut x: Vec<f64> = row.iter().map(|&v| f64::from(v)).collect();
    for edit in edits {
        let u: Vec<f64> = edit.unit.iter().map(|&v| f64::from(v)).collect();
        let p: f64 = x.iter().zip(&u).map(|(x, u)| x * u).sum();
        let (s, n, to) = (f64::from(edit.strength), f64::from(edit.norm), f64::from(edit.to));
        if edit.gate.is_some_and(|gate| p <= f64::from(gate)) {
            continue;
        }
        let before: f64 = x.iter().map(|v| v * v).sum();
        let by = match edit.mode {
            SteerMode::Add => s * n,
            SteerMode::Ablate | SteerMode::Renorm => -s * p,
            SteerMode::Clamp => s * (to - p),
        };
        x.iter_mut().zip(&u).for_each(|(x, u)| *x += by * u);
        if edit.mode == SteerMode::Renorm {
            let after: f64 = x.iter().map(|v| v * v).sum();
            x.iter_mut().for_each(|v| *v *= (before / after).sqrt());
        }
    }
    x
}

/// One layer alone, so that its steered output can be computed from its output without.
#[test]
fn every_mode_is_its_formula() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, Setup::default());
            let last = s.model().layers.len() - 1;
            let token = tokens(&s, 1, 1)[0];
            let mut of_layer = |layer: usize, set: Option<&SteerSet>| {
                s.reset();
                s.set_steering(set).unwrap();
                s.set_capture(&[TapPoint::LayerOut(layer)]);
                s.decode_step_with(token, 0, layer..layer + 1).unwrap();
                (s.hidden(layer).unwrap().values.clone(), s.projections().clone())
            };
            let width = of_layer(0, None).0.len();
            for layer in [0, last] {
                let (plain, none) = of_layer(layer, None);
                assert!(none.values.is_empty());
                for mode in SteerMode::ALL {
                    for (strength, gate) in [(1.0, None), (-0.7, None), (0.5, Some(-1e9)), (0.5, Some(1e9))] {
                        let mut edit = SteerEdit::new(layer, mode, strength, &values(3, width)).unwrap();
                        (edit.to, edit.gate) = (2.5, gate);
                        // Another direction first: each edit works on what the one before left.
                        let before =
                            SteerEdit::new(layer, SteerMode::Ablate, 0.9, &values(4, width)).unwrap();
                        let set = SteerSet { edits: vec![before, edit] };
                        let (found, p) = of_layer(layer, Some(&set));
                        let wanted = expected(&plain, &set.edits);
                        let what =
                            format!("{} {on:?} layer {layer} {mode:?} {strength} {gate:?}", name(&folder));
                        // A few roundings of the largest value, and of sums of `width` products.
                        let scale = plain.iter().fold(10.0f64, |m, v| m.max(f64::from(v.abs())));
                        let bound = scale * width as f64 * f64::from(f32::EPSILON);
                        for (i, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                            let off = (f64::from(*found) - wanted).abs();
                            assert!(off <= bound, "{what}: value {i} is {found}, not {wanted}");
                        }
                        let first: f64 =
                            plain.iter().zip(set.edits[0].unit.iter()).map(|(x, u)| f64::from(x * u)).sum();
                        assert_eq!(p.stride, 2);
                        assert!((f64::from(p.row(0)[0]) - first).abs() <= bound, "{what}: projection");
                        let gated = gate == Some(1e9);
                        let one = expected(&plain, &set.edits[..1]);
                        let moved =
                            found.iter().zip(&one).any(|(a, b)| (f64::from(*a) - b).abs() > 4.0 * bound);
                        assert_eq!(moved, !gated, "{what}: the gate decides");
                    }
                }
            }
        }
    }
}

#[test]
fn strength_0_measures_and_changes_no_bit() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, Setup::default());
            let prompt = Prompt::from(&tokens(&s, 2, 40)[..]);
            let plain = score(&mut s, &prompt).0;
            let mut set = mixed(&s, 3, 1.0);
            set.edits.iter_mut().for_each(|e| (e.strength, e.gate) = (0.0, None));
            s.reset();
            s.set_steering(Some(&set)).unwrap();
            let (with, outcomes) = score(&mut s, &prompt);
            assert_bits(&format!("{} {on:?}", name(&folder)), &with, &plain);
            let p = &outcomes[0].projections;
            assert_eq!((p.stride, p.values.len()), (5, 40 * 5));
            assert!(p.values.iter().all(|v| v.is_finite() && *v != 0.0), "every row is measured everywhere");
            // And taking the set back leaves nothing behind.
            s.set_steering(None).unwrap();
            s.reset();
            let (without, outcomes) = score(&mut s, &prompt);
            assert_bits(&name(&folder), &without, &plain);
            assert!(outcomes.iter().all(|o| o.projections.values.is_empty()));
        }
    }
}

#[test]
fn steered_prompts_are_the_same_in_every_cut_and_captures_show_what_was_edited() {
    for folder in every_folder() {
        for on in EVERY {
            let setup = Setup { rows: 96, head_rows: 96, ..Setup::default() };
            let mut s = stepper(&folder, on, setup);
            let prompt = Prompt::from(&tokens(&s, 4, 75)[..]);
            let set = mixed(&s, 5, 1.0);
            s.set_capture(&[TapPoint::LayerOut(0)]);
            let (plain, unsteered) = score(&mut s, &prompt);
            s.reset();
            s.set_steering(Some(&set)).unwrap();
            let (whole, steered) = score(&mut s, &prompt);
            let what = format!("{} {on:?}", name(&folder));
            assert!(!same_bits(&whole, &plain), "{what}: it does something");
            // Layer 0 reads embeddings, which are not steered: each row of its output is the edit of its own.
            let width = s.model().config.hidden;
            let taps = [&unsteered, &steered].map(|o| &o[0].taps[0].values);
            for (row, found) in taps[0].chunks_exact(width).zip(taps[1].chunks_exact(width)) {
                let (_, edits) = set.at(0);
                let scale = row.iter().fold(1.0f64, |m, v| m.max(f64::from(v.abs())));
                for (found, wanted) in found.iter().zip(expected(row, edits)) {
                    let off = (f64::from(*found) - wanted).abs();
                    assert!(
                        off <= scale * width as f64 * f64::from(f32::EPSILON),
                        "{what}: {found} {wanted}"
                    );
                }
            }
            for rows in [1, 13, 32] {
                let mut cut = stepper(&folder, on, Setup { rows, head_rows: rows, ..setup });
                cut.set_steering(Some(&set)).unwrap();
                let (found, parts) = score(&mut cut, &prompt);
                assert_bits(&format!("{what} {rows} rows"), &found, &whole);
                let together = parts.iter().flat_map(|o| o.projections.values.clone()).collect::<Vec<_>>();
                assert_bits(&format!("{what} {rows} rows"), &together, &steered[0].projections.values);
            }
            // A prompt whose other rows end before the tail gives the same answer, and says what it left out.
            let mut last = stepper(&folder, on, setup);
            last.set_steering(Some(&set)).unwrap();
            last.prefill_prompt(&prompt).unwrap();
            let vocab = last.model().config.vocab;
            assert_bits(&what, &logits(&mut last), &whole[74 * vocab..]);
            let tail = |row: usize| last.projections().row(row)[4];
            assert!(tail(73).is_nan() && tail(74).is_finite(), "{what}");
        }
    }
}

/// Requests with different vectors, with none and with a taken one, in one batch.
#[test]
fn sequences_of_one_batch_are_steered_each_by_its_own_set() {
    for folder in every_folder() {
        for on in EVERY {
            let setup = Setup { rows: 40, head_rows: 40, ..Setup::default() };
            let mut s = stepper(&folder, on, setup);
            s.alloc_slots(4, 70).unwrap();
            let sets = [Some(mixed(&s, 6, 1.0)), None, Some(mixed(&s, 7, 2.0)), Some(mixed(&s, 6, 1.0))];
            let prompts: Vec<Vec<u32>> = (0..4).map(|i| tokens(&s, 8 + i, 17 + 5 * i as usize)).collect();
            let mut next = [0; 4];
            for slot in 0..4 {
                s.set_slot_steering(slot, sets[slot].as_ref()).unwrap();
                next[slot] = s.prefill_slot(slot, &prompts[slot]).unwrap();
            }
            let vocab = s.model().config.vocab;
            let mut found: Vec<Vec<f32>> = vec![Vec::new(); 4];
            let mut projected: Vec<Vec<f32>> = vec![Vec::new(); 4];
            let order = [2, 0, 3, 1];
            let mut histories = next.map(|t| vec![t]);
            for _ in 0..6 {
                let positions = order.map(|slot| s.slot_cursor(slot).unwrap());
                let mut out = [0; 4];
                s.decode_batch(&order.map(|slot| next[slot]), &positions, &order, &mut out).unwrap();
                for (row, &slot) in order.iter().enumerate() {
                    let mut logits = vec![0.0; vocab];
                    s.logits_row_into(row, &mut logits).unwrap();
                    found[slot].extend(logits);
                    let p = s.projections().row(row);
                    assert_eq!(p.iter().all(|v| v.is_nan()), sets[slot].is_none());
                    projected[slot].extend(p.iter().filter(|v| !v.is_nan()));
                    next[slot] = out[row];
                    histories[slot].push(out[row]);
                }
            }
            for slot in 0..4 {
                let mut alone = stepper(&folder, on, setup);
                alone.set_steering(sets[slot].as_ref()).unwrap();
                let what = format!("{} {on:?} slot {slot}", name(&folder));
                assert_eq!(alone.prefill(&prompts[slot]).unwrap(), histories[slot][0], "{what}");
                let (mut expected, mut p) = (Vec::new(), Vec::new());
                for i in 0..6 {
                    let token = alone.decode_step(histories[slot][i], alone.cursor()).unwrap();
                    assert_eq!(token, histories[slot][i + 1], "{what}");
                    expected.extend(logits(&mut alone));
                    p.extend_from_slice(alone.projections().row(0));
                }
                assert_bits(&what, &found[slot], &expected);
                if !p.is_empty() {
                    assert_bits(&what, &projected[slot], &p);
                }
            }
            // Slots are forgotten with their steering.
            s.alloc_slots(2, 70).unwrap();
            s.prefill_slot(0, &prompts[0]).unwrap();
            let fresh = logits(&mut s);
            let mut alone = stepper(&folder, on, setup);
            alone.prefill(&prompts[0]).unwrap();
            assert_bits(&name(&folder), &fresh, &logits(&mut alone));
        }
    }
}

#[test]
fn sets_that_do_not_fit_are_refused_by_name_and_change_nothing() {
    let folder = tiny_folder(Variant::Moe);
    for on in EVERY {
        let mut s = stepper(&folder, on, Setup::default());
        let prompt = tokens(&s, 12, 9);
        let good = mixed(&s, 13, 1.0);
        s.set_steering(Some(&good)).unwrap();
        s.prefill(&prompt).unwrap();
        let before = logits(&mut s);
        type Break = Box<dyn Fn(&mut SteerSet)>;
        let broken: Vec<(&str, Break)> = vec![
            ("names layer 99", Box::new(|set| set.edits[4].layer = 99)),
            ("ascend by layer", Box::new(|set| set.edits.reverse())),
            ("values, the model is", Box::new(|set| set.edits[0].unit = vec![1.0; 3].into())),
            ("zero or holds", Box::new(|set| set.edits[1].unit = vec![0.0; set.edits[1].unit.len()].into())),
            (
                "zero or holds",
                Box::new(|set| set.edits[1].unit = vec![f32::NAN; set.edits[1].unit.len()].into()),
            ),
            ("strength for layer 0", Box::new(|set| set.edits[0].strength = f32::NAN)),
            ("to for layer 1", Box::new(|set| set.edits[2].to = f32::INFINITY)),
            ("gate for layer", Box::new(|set| set.edits[3].gate = Some(f32::NAN))),
            (
                "the limit is",
                Box::new(|set| set.edits = vec![set.edits[0].clone(); SteerSet::MOST_EDITS + 1]),
            ),
        ];
        for (message, change) in broken {
            let mut set = good.clone();
            change(&mut set);
            let error = s.set_steering(Some(&set)).unwrap_err();
            assert!(matches!(error, Error::Steering(_)) && error.to_string().contains(message), "{error}");
        }
        assert!(matches!(s.set_slot_steering(0, Some(&good)), Err(Error::Slot { .. })));
        s.reset();
        s.prefill(&prompt).unwrap();
        assert_bits("steered as before", &logits(&mut s), &before);
    }
    assert!(matches!(
        SteerEdit::new(0, SteerMode::Add, 1.0, &[0.0, 0.0]),
        Err(SteerError::Direction { layer: 0 })
    ));
    assert!(SteerEdit::new(0, SteerMode::Add, 1.0, &[f32::MAX, f32::MAX]).is_err(), "its length is infinite");
}

/// A batch made by hand cannot name a set that the device does not hold.
#[test]
fn rows_of_a_batch_name_sets_that_are_there() {
    for on in [On::Reference, On::Cpu { threads: 2 }] {
        let mut r = runner(&tiny_folder(Variant::Dense), on, Setup::default());
        let width = r.model().config.hidden;
        let edit = SteerEdit::new(0, SteerMode::Add, 1.0, &values(1, width)).unwrap();
        r.steer_set(3, Some(&SteerSet { edits: vec![edit] })).unwrap();
        let mut b = Batch {
            tokens: vec![5],
            per_layer_tokens: vec![5],
            positions: vec![0],
            visible_to: [vec![1], vec![1]],
            pages: [vec![1], vec![1]],
            heads: vec![0],
            ..Batch::default()
        };
        let table = lapidary_ops::PageTable { start: 0, count: 1, first_block: 0 };
        b.spans.push(RowSpan { first_row: 0, rows: 1, tables: [table; 2] });
        let layers = r.model().layers.len();
        let mut run = |steer: Vec<i32>| {
            b.steer = steer;
            r.run(&b, &b.shape(layers, lapidary_ops::TailRows::Heads)).map(|o| o.projections.values.len())
        };
        assert_eq!(run(vec![]).unwrap(), 0);
        assert_eq!(run(vec![-1]).unwrap(), 0);
        assert_eq!(run(vec![3]).unwrap(), 1);
        for bad in [vec![2], vec![4], vec![-2], vec![i32::MAX], vec![3, 3]] {
            let error = run(bad.clone()).unwrap_err().to_string();
            assert!(error.contains("steer"), "{bad:?}: {error}");
        }
        assert_eq!(run(vec![3]).unwrap(), 1);
    }
}
