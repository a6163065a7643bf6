//! Slots: sequences beside the single one, alone or decoded together.

mod common;

use common::drive::{assert_bits, every_folder, logits, name, tiny_folder, tokens};
use common::{EVERY, On, Setup, stepper};
use lapidary_engine::{Error, Stepper};
use lapidary_ops::{Group, PAGE_TOKENS};
use lapidary_reference::tiny::Variant;

fn setup() -> Setup {
    Setup { rows: 16, head_rows: 9, context: 90, ..Setup::default() }
}

/// Tokens and the logits that each came from.
type Run = Vec<(u32, Vec<f32>)>;

/// A sequence run alone, greedily, by single steps after its prompt.
fn alone(folder: &std::path::Path, on: On, prompt: &[u32], steps: usize) -> Run {
    let mut s = stepper(folder, on, Setup { context: 160, ..setup() });
    let mut token = s.prefill(prompt).unwrap();
    let mut run = vec![(token, logits(&mut s))];
    for _ in 0..steps {
        token = s.decode_step(token, s.cursor()).unwrap();
        run.push((token, logits(&mut s)));
    }
    run
}

/// Lengths that end in, at and behind page borders and windows, and one that is a single token.
const LENGTHS: [usize; 7] = [1, 5, 31, 32, 33, 64, 97];

#[test]
fn a_batch_of_mixed_positions_is_bit_identical_to_each_alone() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, setup());
            let prompts: Vec<_> = LENGTHS.iter().map(|&n| tokens(&s, n as u64, n)).collect();
            let steps = 40;
            s.alloc_slots(LENGTHS.len(), 160).unwrap();
            let vocab = s.model().config.vocab;
            let mut runs: Vec<Run> = Vec::new();
            for (slot, prompt) in prompts.iter().enumerate() {
                let token = s.prefill_slot(slot, prompt).unwrap();
                runs.push(vec![(token, logits(&mut s))]);
            }
            for step in 0..steps {
                // The order of the rows changes, and slots leave and come back.
                let mut slots: Vec<usize> = (0..LENGTHS.len()).filter(|i| (step + i) % 5 != 0).collect();
                let turn = step % slots.len();
                slots.rotate_left(turn);
                let fed: Vec<u32> = slots.iter().map(|&i| runs[i].last().unwrap().0).collect();
                let positions: Vec<usize> = slots.iter().map(|&i| s.slot_cursor(i).unwrap()).collect();
                let mut out = vec![0; slots.len()];
                s.decode_batch(&fed, &positions, &slots, &mut out).unwrap();
                assert_eq!(s.logit_rows(), slots.len());
                for (row, &slot) in slots.iter().enumerate() {
                    let mut l = vec![0.0; vocab];
                    s.logits_row_into(row, &mut l).unwrap();
                    runs[slot].push((out[row], l));
                    assert_eq!(s.slot_cursor(slot).unwrap(), positions[row] + 1);
                }
            }
            for (slot, run) in runs.iter().enumerate() {
                let expected = alone(&folder, on, &prompts[slot], run.len() - 1);
                for (step, (found, expected)) in run.iter().zip(&expected).enumerate() {
                    let what = format!("{} {on:?} slot {slot} step {step}", name(&folder));
                    assert_eq!(found.0, expected.0, "{what}");
                    assert_bits(&what, &found.1, &expected.1);
                }
            }
        }
    }
}

#[test]
fn the_single_sequence_survives_slots_that_come_and_go() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, setup());
            let mut undisturbed = stepper(&folder, on, setup());
            let prompt = tokens(&s, 1, 71);
            for (i, n_slots) in [3, 1, 5, 2].into_iter().enumerate() {
                let part = &prompt[i * 15..(i + 1) * 15];
                assert_eq!(s.prefill(part).unwrap(), undisturbed.prefill(part).unwrap());
                s.alloc_slots(n_slots, 40 + 33 * i).unwrap();
                assert_eq!(s.slots(), n_slots);
                for slot in 0..n_slots {
                    assert_eq!(s.slot_cursor(slot).unwrap(), 0);
                    s.prefill_slot(slot, &tokens(&s, 2 + slot as u64, 40)).unwrap();
                }
                assert_eq!(s.cursor(), (i + 1) * 15);
            }
            let token = s.prefill(&prompt[60..]).unwrap();
            assert_eq!(token, undisturbed.prefill(&prompt[60..]).unwrap());
            assert_bits(&name(&folder), &logits(&mut s), &logits(&mut undisturbed));
        }
    }
}

#[test]
fn allocating_again_gives_the_same_slots_empty() {
    for on in EVERY {
        let mut s = stepper(&tiny_folder(Variant::PerLayerInputs), on, setup());
        s.alloc_slots(3, 50).unwrap();
        let (memory, plan) = (s.runner().memory(), s.runner().plan().clone());
        let offsets = |s: &Stepper| {
            let all = (0..3).flat_map(|slot| (0..50).map(move |p| (slot, p)));
            let layers = s.model().layers.len();
            all.flat_map(|(slot, p)| (0..layers).map(move |l| (l, slot, p)))
                .map(|(l, slot, p)| s.slot_offset(l, slot, p).unwrap())
                .collect::<Vec<_>>()
        };
        let before = offsets(&s);
        let prompt = tokens(&s, 1, 50);
        let first = s.prefill_slot(1, &prompt).unwrap();
        let l = logits(&mut s);
        s.alloc_slots(3, 50).unwrap();
        assert_eq!(s.slot_cursor(1).unwrap(), 0);
        assert_eq!(offsets(&s), before);
        assert_eq!((s.runner().memory().kv, s.runner().plan().clone()), (memory.kv, plan));
        assert_eq!(s.prefill_slot(1, &prompt).unwrap(), first);
        assert_bits("again", &logits(&mut s), &l);
    }
}

/// Offsets against the layout written out: pools are `[page][K, V][kv_head][place][head_dim]`, page 0 is
/// nobody's, then come the single sequence's pages, then each slot's.
#[test]
fn offsets_are_exact_bytes() {
    for on in EVERY {
        for variant in [Variant::Dense, Variant::Moe, Variant::PerLayerInputs, Variant::Gemma3] {
            let mut s = stepper(&tiny_folder(variant), on, setup());
            let (slot_ctx, chunk, window) = (160, 16, 7);
            s.alloc_slots(3, slot_ctx).unwrap();
            let sizes = variant.sizes();
            let ceil = |n: usize| n.div_ceil(32);
            // Window 7 and chunk 16 are one page, and one more for the borders.
            let sliding_pages = ceil(window + chunk) + 1;
            assert_eq!(sliding_pages, 2);
            let single_pages = [sliding_pages, ceil(90)];
            let slot_pages = [sliding_pages, ceil(slot_ctx)];
            let first_shared = sizes.full_layers.len() - sizes.shared_layers;
            for (layer, &full) in sizes.full_layers.iter().enumerate() {
                let g = full as usize;
                let donor = match layer < first_shared {
                    true => layer,
                    false => (0..first_shared).rev().find(|&l| sizes.full_layers[l] == full).unwrap(),
                };
                assert_eq!(sizes.full_layers[donor], full);
                let page_bytes = 2 * sizes.kv_heads[g] * 32 * sizes.head_dim[g] * 4;
                for slot in 0..3 {
                    for position in 0..slot_ctx {
                        let block = position / 32;
                        let page = 1 + single_pages[g] + slot * slot_pages[g] + block % slot_pages[g];
                        let expected = page * page_bytes + (position % 32) * sizes.head_dim[g] * 4;
                        let found = s.slot_offset(layer, slot, position).unwrap();
                        assert_eq!(found, expected, "{variant:?} layer {layer} slot {slot} at {position}");
                        assert_eq!(found, s.slot_offset(donor, slot, position).unwrap());
                    }
                }
            }
        }
    }
}

#[test]
fn a_position_that_left_the_window_has_no_offset() {
    for on in EVERY {
        let mut s = stepper(&tiny_folder(Variant::PerLayerInputs), on, setup());
        s.alloc_slots(2, 160).unwrap();
        let kinds: Vec<Group> = s.model().config.layers.iter().map(|l| l.group).collect();
        s.prefill_slot(1, &tokens(&s, 1, 97)).unwrap();
        // Two pages: block 3 took the page of block 1, so 64 is the first that is held.
        for (layer, kind) in kinds.iter().enumerate() {
            for position in [0, 31, 32, 63] {
                match (kind, s.slot_offset(layer, 1, position)) {
                    (Group::Full, found) => assert!(found.is_ok()),
                    (Group::Sliding, Err(Error::LeftWindow { position: p, earliest: 64 })) => {
                        assert_eq!(p, position);
                    }
                    (_, other) => panic!("layer {layer} at {position}: {other:?}"),
                }
            }
            s.slot_offset(layer, 1, 64).unwrap();
            s.slot_offset(layer, 1, 159).unwrap();
            s.slot_offset(layer, 0, 0).unwrap();
            assert!(matches!(s.slot_offset(layer, 1, 160), Err(Error::ContextFull { context: 160, .. })));
            assert!(matches!(s.slot_offset(layer, 2, 0), Err(Error::Slot { slot: 2, slots: 2 })));
        }
        assert!(matches!(s.slot_offset(kinds.len(), 0, 0), Err(Error::Layer { .. })));
        assert!(matches!(s.rewind_slot(1, 69), Err(Error::LeftWindow { position: 69, earliest: 70 })));
        s.rewind_slot(1, 70).unwrap();
        assert_eq!(s.slot_cursor(1).unwrap(), 70);
    }
}

#[test]
fn the_smoke_test_passes_in_every_format_and_counts_what_it_saw() {
    use lapidary_ops::KvFormat;
    for folder in every_folder() {
        for on in EVERY {
            for kv in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, KvFormat::Q8_0] {
                // Blocks of 32 need heads that are whole numbers of them: the goldens' are.
                if kv == KvFormat::Q8_0 && !folder.join("golden.safetensors").exists() {
                    continue;
                }
                let mut s = stepper(&folder, on, Setup { kv, ..setup() });
                s.alloc_slots(3, 161).unwrap();
                let report = s.slot_smoke().unwrap_or_else(|e| panic!("{} {kv:?}: {e}", name(&folder)));
                let owners: Vec<_> = s.model().config.layers.iter().filter(|l| l.donor.is_none()).collect();
                // Every cell of a ring can be live: from a page border to the end of the context.
                let pages = (s.model().config.window + 16).div_ceil(32) + 1;
                let ring = |context: usize| context - (context.div_ceil(32) - pages) * 32;
                let cells: usize = owners
                    .iter()
                    .map(|l| match l.group {
                        Group::Full => 90 + 3 * 161,
                        Group::Sliding => ring(90) + 3 * ring(161),
                    })
                    .sum();
                assert_eq!(report.layers, owners.len());
                assert_eq!(report.cells, cells);
                assert!(report.round_trips >= 4 * owners.len(), "{report:?}");
                // What it wrote is seen by nobody.
                let mut fresh = stepper(&folder, on, Setup { kv, ..setup() });
                let prompt = tokens(&s, 1, 40);
                assert_eq!(s.prefill(&prompt).unwrap(), fresh.prefill(&prompt).unwrap());
                assert_bits(&name(&folder), &logits(&mut s), &logits(&mut fresh));
                assert!(matches!(s.slot_smoke(), Err(Error::SlotsBusy)));
            }
        }
    }
}

#[test]
fn a_slot_is_rewound_and_reset_like_the_single_sequence() {
    for on in EVERY {
        let folder = tiny_folder(Variant::Moe);
        let mut s = stepper(&folder, on, setup());
        s.alloc_slots(2, 120).unwrap();
        let (a, b) = (tokens(&s, 1, 60), tokens(&s, 2, 9));
        s.prefill_slot(0, &a).unwrap();
        s.prefill_slot(1, &a).unwrap();
        s.rewind_slot(1, 51).unwrap();
        let token = s.prefill_slot(1, &b).unwrap();
        let whole: Vec<u32> = a[..51].iter().chain(&b).copied().collect();
        s.reset_slot(0).unwrap();
        let found = logits(&mut s);
        assert_eq!(s.prefill_slot(0, &whole).unwrap(), token);
        assert_bits("rewound", &found, &logits(&mut s));
        assert!(matches!(s.rewind_slot(1, 61), Err(Error::RewindForward { position: 61, cursor: 60 })));
        for error in [s.reset_slot(2), s.rewind_slot(2, 0), s.slot_cursor(2).map(|_| ())] {
            assert!(matches!(error, Err(Error::Slot { slot: 2, slots: 2 })));
        }
    }
}

/// A call, and whether its error is the right one. Slots 0, 1, 2 stand at 20, 33 and 40 of 40.
type Refused = (&'static str, fn(&mut Stepper) -> Option<Error>, fn(&Error) -> bool);

fn batch(s: &mut Stepper, tokens: &[u32], positions: &[usize], slots: &[usize], out: usize) -> Option<Error> {
    let mut out = vec![77; out];
    let error = s.decode_batch(tokens, positions, slots, &mut out).err();
    assert!(error.is_none() || out.iter().all(|&t| t == 77), "nothing is written");
    error
}

const REFUSED: &[Refused] = &[
    (
        "too few positions",
        |s| batch(s, &[5, 6], &[20], &[0, 1], 2),
        |e| matches!(e, Error::Length { what: "positions", expected: 2, found: 1 }),
    ),
    (
        "too many slots",
        |s| batch(s, &[5, 6], &[20, 33], &[0, 1, 2], 2),
        |e| matches!(e, Error::Length { what: "slots", expected: 2, found: 3 }),
    ),
    (
        "no room for results",
        |s| batch(s, &[5, 6], &[20, 33], &[0, 1], 1),
        |e| matches!(e, Error::Length { what: "out", expected: 2, found: 1 }),
    ),
    ("too few tokens", |s| batch(s, &[5], &[20, 33], &[0, 1], 2), |e| matches!(e, Error::Length { .. })),
    ("no rows", |s| batch(s, &[], &[], &[], 0), |e| matches!(e, Error::EmptyPrompt)),
    (
        "more rows than fit",
        |s| batch(s, &[5; 10], &[20; 10], &[0; 10], 10),
        |e| matches!(e, Error::TooManyRows { rows: 10, limit: 9 }),
    ),
    (
        "a slot that does not exist",
        |s| batch(s, &[5, 6], &[20, 0], &[0, 3], 2),
        |e| matches!(e, Error::Slot { slot: 3, slots: 3 }),
    ),
    ("the largest slot", |s| batch(s, &[5], &[0], &[usize::MAX], 1), |e| matches!(e, Error::Slot { .. })),
    (
        "a slot twice",
        |s| batch(s, &[5, 6, 7], &[20, 33, 20], &[0, 1, 0], 3),
        |e| matches!(e, Error::SlotTwice { slot: 0 }),
    ),
    (
        "a wrong position",
        |s| batch(s, &[5, 6], &[20, 32], &[0, 1], 2),
        |e| matches!(e, Error::Position { expected: 33, found: 32 }),
    ),
    (
        "positions of one another",
        |s| batch(s, &[5, 6], &[33, 20], &[0, 1], 2),
        |e| matches!(e, Error::Position { expected: 20, found: 33 }),
    ),
    (
        "a token outside in the last row",
        |s| batch(s, &[5, u32::MAX], &[20, 33], &[0, 1], 2),
        |e| matches!(e, Error::Token { token: u32::MAX, .. }),
    ),
    (
        "a full slot",
        |s| batch(s, &[5, 6], &[20, 40], &[0, 2], 2),
        |e| matches!(e, Error::ContextFull { context: 40, needed: 40 }),
    ),
    (
        "a prompt for a full slot",
        |s| s.prefill_slot(2, &[5]).err(),
        |e| matches!(e, Error::ContextFull { .. }),
    ),
    ("a prompt for no slot", |s| s.prefill_slot(3, &[5]).err(), |e| matches!(e, Error::Slot { .. })),
    ("an empty prompt for a slot", |s| s.prefill_slot(0, &[]).err(), |e| matches!(e, Error::EmptyPrompt)),
    (
        "a prompt beyond a slot",
        |s| s.prefill_slot(0, &[5; 21]).err(),
        |e| matches!(e, Error::ContextFull { context: 40, needed: 40 }),
    ),
    (
        "more slots than fit memory",
        |s| s.alloc_slots(1 << 40, 1 << 20).err(),
        |e| matches!(e, Error::TooLarge { .. }),
    ),
];

#[test]
fn a_refused_batch_moves_no_slot() {
    for folder in every_folder() {
        for on in EVERY {
            let mut s = stepper(&folder, on, setup());
            let mut undisturbed = stepper(&folder, on, setup());
            let lengths = [20, 33, 40];
            for s in [&mut s, &mut undisturbed] {
                s.alloc_slots(3, 40).unwrap();
                for (slot, n) in lengths.into_iter().enumerate() {
                    s.prefill_slot(slot, &tokens(s, slot as u64, n)).unwrap();
                }
            }
            let before = logits(&mut s);
            for (what, call, right) in REFUSED {
                let what = format!("{} {on:?}: {what}", name(&folder));
                let error = call(&mut s).unwrap_or_else(|| panic!("{what} was not refused"));
                assert!(right(&error), "{what}: {error:?}");
                for (slot, n) in lengths.into_iter().enumerate() {
                    assert_eq!(s.slot_cursor(slot).unwrap(), n, "{what}");
                }
                assert_bits(&what, &logits(&mut s), &before);
                let (mut found, mut expected) = ([0; 2], [0; 2]);
                s.decode_batch(&[5, 6], &[33, 20], &[1, 0], &mut found).unwrap();
                undisturbed.decode_batch(&[5, 6], &[33, 20], &[1, 0], &mut expected).unwrap();
                assert_eq!(found, expected, "{what}");
                let vocab = s.model().config.vocab;
                let (mut a, mut b) = (vec![0.0; vocab], vec![0.0; vocab]);
                for row in 0..2 {
                    s.logits_row_into(row, &mut a).unwrap();
                    undisturbed.logits_row_into(row, &mut b).unwrap();
                    assert_bits(&what, &a, &b);
                }
                // Back to where the next case starts.
                for s in [&mut s, &mut undisturbed] {
                    s.rewind_slot(0, 20).unwrap();
                    s.rewind_slot(1, 33).unwrap();
                    s.rewind_slot(2, 39).unwrap();
                    let last = tokens(s, 2, 40)[39];
                    s.prefill_slot(2, &[last]).unwrap();
                }
            }
        }
    }
}

/// Pages of the sequences, by what the offsets say: none is shared, none is page 0.
#[test]
fn no_two_slots_share_a_cell() {
    for on in EVERY {
        let mut s = stepper(&tiny_folder(Variant::Dense), on, setup());
        s.alloc_slots(4, 100).unwrap();
        for layer in 0..s.model().layers.len() {
            let group = s.model().config.layers[layer].group;
            let mut seen = std::collections::HashMap::new();
            let bytes = s.runner().plan().groups[group.index()].page_bytes(0);
            for slot in 0..4 {
                for p in 0..100 {
                    let offset = s.slot_offset(layer, slot, p).unwrap();
                    assert!(offset >= bytes, "page 0 is nobody's");
                    if let Some((other, q)) = seen.insert(offset, (slot, p)) {
                        // Only a ring meets itself, a whole number of rounds later.
                        assert_eq!((other, group), (slot, Group::Sliding));
                        assert_eq!((p - q) % (2 * PAGE_TOKENS), 0);
                    }
                }
            }
        }
    }
}
