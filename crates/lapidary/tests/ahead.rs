//! Greedy decoding in one go gives what single steps give, wherever it stops.

mod common;

use std::ops::ControlFlow::{Break, Continue};

use common::drive::{assert_bits, every_folder, logits, name, tiny_folder, tokens};
use common::{EVERY, Setup, stepper};
use lapidary_engine::{Error, Stepper};
use lapidary_reference::tiny::Variant;

fn setup() -> Setup {
    Setup { rows: 16, head_rows: 9, context: 90, ..Setup::default() }
}

/// Tokens of single steps, and the logits behind the last.
fn by_steps(s: &mut Stepper, prompt: &[u32], steps: usize) -> (Vec<u32>, Vec<f32>) {
    s.reset();
    let mut run = vec![s.prefill(prompt).unwrap()];
    for _ in 0..steps {
        run.push(s.decode_step(run[run.len() - 1], s.cursor()).unwrap());
    }
    (run, logits(s))
}

#[test]
fn many_steps_in_one_go_equal_single_steps() {
    for folder in every_folder() {
        for on in EVERY {
            let what = format!("{} {on:?}", name(&folder));
            let mut s = stepper(&folder, on, setup());
            // Over page borders and far beyond the window.
            let (prompt, steps) = (tokens(&s, 3, 21), 61);
            let (expected, last) = by_steps(&mut s, &prompt, steps);
            s.reset();
            let mut run = vec![s.prefill(&prompt).unwrap()];
            let done = s.decode_many(run[0], steps, &mut |t| {
                run.push(t[0]);
                Continue(())
            });
            assert_eq!((done.unwrap(), s.cursor()), (steps, prompt.len() + steps), "{what}");
            assert_eq!(run, expected, "{what}");
            assert_bits(&what, &logits(&mut s), &last);
            // What stands in the pages is the same too: the sequence goes on alike.
            let next = s.decode_step(run[steps], s.cursor()).unwrap();
            let found = logits(&mut s);
            let (longer, last) = by_steps(&mut s, &prompt, steps + 1);
            assert_eq!(next, longer[steps + 1], "{what}");
            assert_bits(&what, &found, &last);
        }
    }
}

#[test]
fn stopping_anywhere_loses_nothing() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, setup());
            let (prompt, steps) = (tokens(&s, 5, 17), 40);
            let (expected, last) = by_steps(&mut s, &prompt, steps);
            // In the middle of a page, at its end and behind it, and after the first step.
            for stop in [1, 7, 14, 15, 16, 39, 40] {
                let what = format!("{} {on:?} stop {stop}", name(&folder));
                s.reset();
                let mut run = vec![s.prefill(&prompt).unwrap()];
                let done = s.decode_many(run[0], steps, &mut |t| {
                    run.push(t[0]);
                    if run.len() > stop { Break(()) } else { Continue(()) }
                });
                assert_eq!((done.unwrap(), s.cursor()), (stop, prompt.len() + stop), "{what}");
                // The rest by single steps.
                while run.len() <= steps {
                    run.push(s.decode_step(run[run.len() - 1], s.cursor()).unwrap());
                }
                assert_eq!(run, expected, "{what}");
                if stop < steps {
                    assert_bits(&what, &logits(&mut s), &last);
                }
            }
        }
    }
}

#[test]
fn slots_of_different_lengths_run_together() {
    for folder in every_folder() {
        for on in EVERY {
            let what = format!("{} {on:?}", name(&folder));
            let mut s = stepper(&folder, on, setup());
            let (lengths, steps) = ([5, 33, 1, 31], 35);
            let prompts: Vec<_> = lengths.iter().map(|&n| tokens(&s, n as u64, n)).collect();
            // Rows are not in the order of the slots.
            let slots = [2, 0, 3, 1];
            let mut runs = Vec::new();
            for together in [true, false] {
                s.alloc_slots(4, 80).unwrap();
                let mut fed: Vec<u32> =
                    slots.iter().map(|&slot| s.prefill_slot(slot, &prompts[slot]).unwrap()).collect();
                let mut all = vec![fed.clone()];
                if together {
                    let first = fed.clone();
                    let done = s.decode_batch_many(&first, &slots, steps, &mut |t| {
                        all.push(t.to_vec());
                        Continue(())
                    });
                    assert_eq!(done.unwrap(), steps, "{what}");
                } else {
                    for _ in 0..steps {
                        let at: Vec<usize> = slots.iter().map(|&slot| s.slot_cursor(slot).unwrap()).collect();
                        let before = fed.clone();
                        s.decode_batch(&before, &at, &slots, &mut fed).unwrap();
                        all.push(fed.clone());
                    }
                }
                let mut values = vec![0.0; s.model().config.vocab];
                let mut bits = Vec::new();
                for row in 0..slots.len() {
                    s.logits_row_into(row, &mut values).unwrap();
                    bits.extend(values.iter().map(|v| v.to_bits()));
                }
                runs.push((all, bits));
            }
            assert!(runs[0] == runs[1], "{what}: {:?} {:?}", runs[0].0, runs[1].0);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_runs() {
    for on in EVERY {
        let mut s = stepper(&tiny_folder(Variant::Moe), on, setup());
        let prompt = tokens(&s, 1, 12);
        let token = s.prefill(&prompt).unwrap();
        let before = logits(&mut s);
        let sink = &mut |_: &[u32]| -> std::ops::ControlFlow<()> { panic!("nothing may run") };
        assert!(matches!(s.decode_many(token, 79, sink), Err(Error::ContextFull { needed: 90, .. })));
        assert!(matches!(s.decode_many(1 << 30, 3, sink), Err(Error::Token { .. })));
        assert!(matches!(s.decode_batch_many(&[1], &[0], 3, sink), Err(Error::Slot { .. })));
        s.alloc_slots(2, 20).unwrap();
        let twice = s.decode_batch_many(&[1, 1], &[1, 1], 3, sink);
        assert!(matches!(twice, Err(Error::SlotTwice { slot: 1 })));
        assert_eq!(s.cursor(), 12);
        assert_bits("refusals", &logits(&mut s), &before);
        assert_eq!(s.decode_many(token, 78, &mut |_| Continue(())).unwrap(), 78);
    }
}
