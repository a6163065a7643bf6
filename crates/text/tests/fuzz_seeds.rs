//! Replays the seeds of the fuzz targets, among them whatever a run once found.

#[path = "../../../fuzz/exercise/grammar.rs"]
mod grammar;
#[path = "../../../fuzz/exercise/output.rs"]
mod output;
#[path = "../../../fuzz/exercise/tokenizer.rs"]
mod tokenizer;
#[path = "../../../fuzz/exercise/tool_args.rs"]
mod tool_args;

fn replay(target: &str, exercise: fn(&[u8])) {
    let folder = format!("{}/../../fuzz/seeds/{target}", env!("CARGO_MANIFEST_DIR"));
    let mut seeds = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        exercise(&bytes);
        // Damage of the kinds that a disk or a download does.
        for at in 0..bytes.len() {
            exercise(&bytes[..at]);
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            exercise(&flipped);
        }
        seeds += 1;
    }
    assert!(seeds >= 8, "{seeds} seeds in {folder}");
}

#[test]
fn tokenizer_seeds() {
    replay("tokenizer", tokenizer::tokenizer);
}

#[test]
fn tool_args_seeds() {
    replay("tool_args", tool_args::tool_args);
}

#[test]
fn output_seeds() {
    replay("output", output::output);
}

#[test]
fn grammar_seeds() {
    replay("grammar", grammar::grammar);
}
