//! Calls on the single sequence that are refused or fail: a typed error, and everything as it was.

mod common;

use common::drive::{assert_bits, every_folder, golden_ids, logits, name, tiny_folder, tokens, values};
use common::spy::{Hooks, hooked};
use common::{EVERY, Setup, stepper};
use lapidary_engine::{Error, Prompt, SoftKind, SoftSpan, Stepper};
use lapidary_reference::Golden;
use lapidary_reference::tiny::Variant;
use lapidary_weights::Checkpoint;

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
            let checkpoint = Checkpoint::open(tiny_folder(Variant::Dense)).unwrap();
            let mut backend = on.backend();
            let limits = Limits { rows: 4, head_rows: 4 };
            let options =
                BuildOptions { limits, embed_scale: EmbedScale::F32, requantise: Default::default() };
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
