//! The determinism rule in the fast mode: integer blocks, quantised activations, rounded keys and values.

use std::path::Path;

use lapidary::{Checkpoint, Compute, KvFormat, LoadOptions, Prompt, Stepper, load_stepper};

fn stepper(model: &str, threads: usize, chunk: usize, kv: KvFormat) -> Stepper {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../models/pebble-{model}-q8_0.gguf"));
    let options = LoadOptions {
        compute: Compute::Fast,
        threads: Some(threads),
        chunk,
        head_rows: chunk,
        context: Some(300),
        kv: Some(kv),
        ..LoadOptions::default()
    };
    load_stepper(&Checkpoint::open(path).expect("opens"), &options, &mut |_| {}).expect("loads")
}

/// A prompt beyond the window of 128, of ordinary ids.
fn prompt(seed: usize, len: usize) -> Vec<u32> {
    std::iter::once(2)
        .chain((1..len).map(|i| (100 + (i * i * 31 + i * 7 + seed * 977) % 3900) as u32))
        .collect()
}

fn logit_bits(stepper: &mut Stepper, ids: &[u32]) -> Vec<u32> {
    let mut bits = Vec::new();
    stepper.reset();
    let mut each = |_: usize, row: &[f32]| {
        assert!(row.iter().all(|v| v.is_finite()));
        bits.extend(row.iter().map(|v| v.to_bits()));
    };
    stepper.score(&Prompt::from(ids), &mut each, &mut |_, _| {}).expect("runs");
    bits
}

#[test]
fn bits_do_not_depend_on_workers_or_on_how_a_prompt_is_cut() {
    let ids = prompt(1, 181);
    for model in ["moe", "e"] {
        for kv in [KvFormat::F16, KvFormat::Bf16, KvFormat::Q8_0] {
            let expected = logit_bits(&mut stepper(model, 1, 181, kv), &ids);
            for (threads, chunk) in [(1, 1), (1, 33), (2, 181), (2, 7), (3, 50), (3, 16)] {
                let mut other = stepper(model, threads, chunk, kv);
                for round in 0..2 {
                    let found = logit_bits(&mut other, &ids);
                    let same = found == expected;
                    assert!(same, "{model} {kv:?}: {threads} workers, chunks of {chunk}, round {round}");
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_a_batch() {
    for (model, kv) in [("moe", KvFormat::F16), ("moe", KvFormat::Bf16), ("e", KvFormat::Bf16)] {
        let prompts: Vec<Vec<u32>> = [5, 150, 37].iter().enumerate().map(|(i, &n)| prompt(i, n)).collect();
        let steps = 6;
        let mut solo = stepper(model, 1, 64, kv);
        let alone: Vec<Vec<u32>> = prompts
            .iter()
            .map(|ids| {
                solo.reset();
                let mut tokens = vec![solo.prefill(ids).expect("prefill")];
                while tokens.len() < steps {
                    let last = *tokens.last().expect("there is one");
                    tokens.push(solo.decode_step(last, solo.cursor()).expect("step"));
                }
                tokens
            })
            .collect();
        let mut batched = stepper(model, 2, 64, kv);
        batched.alloc_slots(3, 200).expect("slots");
        let mut found: Vec<Vec<u32>> = prompts
            .iter()
            .enumerate()
            .map(|(slot, ids)| vec![batched.prefill_slot(slot, ids).expect("prefill")])
            .collect();
        let vocab = batched.model().config.vocab;
        for step in 1..steps {
            let last: Vec<u32> = found.iter().map(|t| t[step - 1]).collect();
            let positions: Vec<usize> = (0..3).map(|s| batched.slot_cursor(s).expect("a slot")).collect();
            let mut next = [0; 3];
            batched.decode_batch(&last, &positions, &[0, 1, 2], &mut next).expect("a batch");
            found.iter_mut().zip(next).for_each(|(tokens, t)| tokens.push(t));
        }
        assert_eq!(found, alone, "{model}");
        // The last row's logits, bit for bit, against the same sequence fed alone.
        let (mut in_batch, mut by_itself) = (vec![0.0; vocab], vec![0.0; vocab]);
        batched.logits_into(&mut in_batch).expect("logits");
        solo.logits_into(&mut by_itself).expect("logits");
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&in_batch) == bits(&by_itself), "{model}");
    }
}
