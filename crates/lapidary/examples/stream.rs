//! Loads a model and streams a completion: `cargo run --release --example stream -- MODEL "Once upon a time"`.

use std::io::Write;

use lapidary::{Gemma, LoadOptions, Piece};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(model), Some(prompt)) = (args.next(), args.next()) else {
        return Err("usage: stream MODEL PROMPT".into());
    };
    let mut gemma = Gemma::load(&model, &LoadOptions::default())?;
    let options = gemma.answer_options(200);
    for piece in gemma.complete(&prompt, &options)? {
        if let Piece::Text(text) = piece? {
            print!("{text}");
            std::io::stdout().flush()?;
        }
    }
    println!();
    Ok(())
}
