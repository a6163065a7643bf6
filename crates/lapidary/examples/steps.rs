//! The step API: one sequence by hand, then two slots in one batch.
//! `cargo run --release --example steps -- MODEL`

use lapidary::{Checkpoint, LoadOptions, load_stepper};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("usage: steps MODEL")?;
    let checkpoint = Checkpoint::open(&model)?;
    let mut stepper = load_stepper(&checkpoint, &LoadOptions::default(), &mut |_| {})?;

    let prompt = [2, 10, 11, 12];
    let mut token = stepper.prefill(&prompt)?;
    for _ in 0..8 {
        token = stepper.decode_step(token, stepper.cursor())?;
        println!("{token}");
    }

    // Two sequences of different length, one token each per call.
    stepper.alloc_slots(2, 256)?;
    let mut tokens = [stepper.prefill_slot(0, &prompt)?, stepper.prefill_slot(1, &prompt[..2])?];
    for _ in 0..8 {
        let positions = [stepper.slot_cursor(0)?, stepper.slot_cursor(1)?];
        let mut next = [0; 2];
        stepper.decode_batch(&tokens, &positions, &[0, 1], &mut next)?;
        tokens = next;
        println!("{tokens:?}");
    }
    Ok(())
}
