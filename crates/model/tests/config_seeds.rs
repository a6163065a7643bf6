//! Replays the seeds of the fuzz target `config_json`.

#[path = "../../../fuzz/exercise/config_json.rs"]
mod exercise;

use std::path::Path;

use lapidary_model::Config;

#[test]
fn the_seeds_of_the_fuzz_target_hold() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/config_json");
    let mut accepted = 0;
    for entry in std::fs::read_dir(seeds).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        exercise::config_json(&bytes);
        let json = serde_json::from_slice(&bytes);
        accepted += usize::from(json.is_ok_and(|json| Config::from_json(&json).is_ok()));
        // Whatever is cut out of a config, reading ends.
        for at in (0..bytes.len()).step_by(7) {
            let end = bytes.len().min(at + 13);
            exercise::config_json(&[&bytes[..at], &bytes[end..]].concat());
            exercise::config_json(&[&bytes[..at], b"9", &bytes[at..]].concat());
        }
    }
    assert_eq!(accepted, 5, "one seed for each published variant is a config");
}
