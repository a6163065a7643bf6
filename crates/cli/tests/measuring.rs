//! What measurements are made with: bench's depth and tail, and models with random weights.

mod common;

use common::{golden, json, lapidary};

#[test]
fn bench_starts_tests_at_a_depth_and_runs_every_layer_when_asked() {
    let model = golden("e2b");
    let mut args = vec!["bench", "-m", model.to_str().unwrap(), "--compute", "f32", "--json"];
    args.extend(["-p", "33", "-n", "5", "-d", "0,71", "-t", "1", "-r", "2"]);
    let report = json(&lapidary(&args).ok());
    let tests = report["tests"].as_array().unwrap();
    let names: Vec<_> = tests.iter().map(|t| t["test"].as_str().unwrap()).collect();
    assert_eq!(names, ["pp33", "tg5", "pp33 @ d71", "tg5 @ d71"]);
    assert_eq!(report["tail_skip"], true);
    let read = |test: usize| tests[test]["bytes_per_token"].as_u64().unwrap();
    assert!(read(3) > read(1), "keys and values of the depth are read too");
    args.push("--no-tail-skip");
    let report = json(&lapidary(&args).ok());
    assert_eq!(report["tail_skip"], false);
    assert!(report["tests"][0]["tokens_per_second"].as_f64().unwrap() > 0.0);
}

#[test]
fn bench_lets_sequences_write_side_by_side() {
    let model = golden("e2b");
    let mut args = vec!["bench", "-m", model.to_str().unwrap(), "--compute", "f32", "--json"];
    // More sequences than tokens, and after a depth.
    args.extend(["-p", "0", "-n", "3", "-d", "0,37", "--batch", "1,5", "-t", "1", "-r", "1"]);
    let report = json(&lapidary(&args).ok());
    let tests = report["tests"].as_array().unwrap();
    let names: Vec<_> = tests.iter().map(|t| t["test"].as_str().unwrap()).collect();
    assert_eq!(names, ["tg3", "tg3 x5", "tg3 @ d37", "tg3 x5 @ d37"]);
    assert!(tests.iter().all(|t| t["tokens_per_second"].as_f64().unwrap() > 0.0));
    assert!(tests[1].get("share_of_limit").is_none(), "one sequence's limit is not that of five");
}

#[test]
fn synth_writes_headers_that_inspect_reads_and_refuses_what_no_model_has() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("cut.gguf");
    let path = out.to_str().unwrap();
    let ran = lapidary(["synth", "26b-a4b", "q4_k_m", "-o", path, "--layers", "6", "--sparse"]);
    assert!(ran.err.contains("Q6_K"), "{ran:?}");
    ran.ok();
    let report = lapidary(["inspect", path, "--ctx", "1024"]).ok();
    assert!(report.contains("6") && report.contains("128"), "{report}");

    let refused = folder.path().join("no.gguf");
    let no = refused.to_str().unwrap();
    let failure = lapidary(["synth", "e2b", "q4_0", "-o", no, "--layers", "24"]).failure();
    assert!(failure.contains("e2b can't have 24 layers: take 25 to 512"), "{failure}");
    let failure = lapidary(["synth", "e2b", "q4_0", "-o", no, "--tokenizer", "/nonexistent.gguf"]).failure();
    assert!(failure.contains("/nonexistent.gguf"), "{failure}");
    assert!(!refused.exists());
    assert_eq!(lapidary(["synth", "e3b", "q4_0", "-o", no]).code, Some(2));
    assert_eq!(lapidary(["synth", "e2b", "q9", "-o", no]).code, Some(2));
}
