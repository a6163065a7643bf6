//! `convert`: what it writes, prints and refuses.

mod common;

use common::{golden, json, lapidary};
use lapidary_reference::compare;
use lapidary_weights::safetensors::File;

const TOKENS: &str = "2,17,301,45,9,222,401,77,13,5,88";

fn logits(model: &str, out: &std::path::Path) -> Vec<f32> {
    lapidary(["dump", "-m", model, "--tokens", TOKENS, "--embed-scale", "f32", "-o", out.to_str().unwrap()])
        .ok();
    let file = File::open(out).unwrap();
    let bytes = file.bytes(file.find("logits").unwrap());
    bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

/// Plain values stay as they are to the bit; 8 bits cost a little and are said to.
#[test]
fn conversions_run_and_tell_what_they_cost() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let model = golden("dense31b");
    let model = model.to_str().unwrap();
    let original = logits(model, &folder.path().join("dump"));
    for (format, out, cost) in
        [("bf16", "a.gguf", 0.0..=0.0), ("q8_0", "b.gguf", 1e-3..=0.01), ("fp8", "c", 0.01..=0.05)]
    {
        let out = at(out);
        let report = json(&lapidary(["convert", "-m", model, format, "-o", &out, "--json"]).ok());
        let error = report["error"]["relative_rms"].as_f64().unwrap();
        assert!(cost.contains(&error), "{format}: {error}");
        let matrices = report["matrices"].as_array().unwrap();
        assert!(matrices.len() > 20, "{format}: {}", matrices.len());
        let part = matrices.iter().find(|m| m["tensor"].as_str().unwrap().contains("down")).unwrap();
        assert_eq!(part["from"], "BF16");
        let distance = compare(&logits(&out, &folder.path().join("dump")), &original);
        assert!(distance.finite, "{format}: {distance}");
        match cost.end() {
            0.0 => assert_eq!(distance.max_abs, 0.0, "{format}: {distance}"),
            // Errors of weights add up over a random model of few layers, to some times what one matrix has.
            _ => assert!(distance.rel_rms > 1e-4 && distance.rel_rms < 20.0 * error, "{format}: {distance}"),
        }
    }
    let table = lapidary(["convert", "-m", model, "q4_0", "-o", &at("d.gguf")]);
    assert!(table.err.contains("d.gguf: "), "{table:?}");
    let table = table.ok();
    assert!(table.contains("relative RMS error") && table.contains("blk.0.ffn_down.weight"), "{table}");
    assert!(table.lines().last().unwrap().trim_start().starts_with("all "), "{table}");
}

#[test]
fn nothing_is_overwritten_and_nothing_half_stays() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let model = golden("gemma3");
    let model = model.to_str().unwrap();
    let kept = at("kept.gguf");
    std::fs::write(&kept, "precious").unwrap();
    for format in ["q8_0", "fp8"] {
        let failure = lapidary(["convert", "-m", model, format, "-o", &kept]).failure();
        assert!(failure.contains("kept.gguf exists"), "{failure}");
    }
    assert_eq!(std::fs::read(&kept).unwrap(), b"precious");

    // What is quantised already, and what has no such number format.
    let q8 = common::pebble();
    let failure = lapidary(["convert", "-m", q8.to_str().unwrap(), "q4_0", "-o", &at("x.gguf")]).failure();
    assert!(failure.contains("safetensors"), "{failure}");
    let ran = lapidary(["convert", "-m", model, "q9", "-o", &at("x.gguf")]);
    assert_eq!(ran.code, Some(2));
    let ran = lapidary(["convert", "-m", model, "fp8", "--pure", "-o", &at("x")]);
    assert!(ran.code == Some(2) && ran.err.contains("--pure"), "{ran:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "only what was there");
}
