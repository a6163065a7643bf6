//! `eval`: figures against those computed from dumped logits and from the stored values of the published implementation.

mod common;

use std::path::Path;

use common::{golden, json, lapidary, pebble};
use lapidary_weights::safetensors::{Dtype, File, NewTensor, write};
use serde_json::Value;

const STORY: &str = "Once upon a time there was a fox named Ben. Every morning Ben walked to the river to look for a \
shell. One rainy day he met a shy owl, and both were calm. The end.";

/// `-ln p` of token `t + 1` by row `t` of a dump of these tokens.
fn nats(ids: &[u64], folder: &Path) -> Vec<f64> {
    let out = folder.join("rows.safetensors");
    let list = ids.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    lapidary(["dump", "--tokens", &list, "--dtype", "f32", "-o", out.to_str().unwrap()]).ok();
    let file = File::open(&out).unwrap();
    let entry = file.find("logits").unwrap();
    let values: Vec<f64> =
        file.bytes(entry).as_chunks().0.iter().map(|&b| f64::from(f32::from_le_bytes(b))).collect();
    let rows = values.chunks_exact(entry.shape[1]).zip(&ids[1..]);
    rows.map(|(row, &next)| row.iter().map(|z| z.exp()).sum::<f64>().ln() - row[next as usize]).collect()
}

fn ids(text: &str) -> Vec<u64> {
    let ids = json(&lapidary(["tokenize", text, "--json"]).ok())["ids"].clone();
    serde_json::from_value(ids).unwrap()
}

/// Windows of 17, moved by 7: what each adds is scored behind the ten tokens before it, and BOS.
#[test]
fn perplexity_is_that_of_the_logits() {
    let folder = tempfile::tempdir().unwrap();
    let (text, record) = (folder.path().join("t.txt"), folder.path().join("record"));
    std::fs::write(&text, STORY).unwrap();
    let (text, kept) = (text.to_str().unwrap(), record.to_str().unwrap());
    let args =
        ["eval", "ppl", "--text", text, "--compute", "f32", "--json", "--window", "17", "--stride", "7"];
    let run = |more: &[&str]| json(&lapidary(args.iter().chain(more)).ok());
    let report = run(&["--record", kept]);

    let ids = ids(STORY);
    let (bos, ids) = (ids[0], &ids[1..]);
    let (mut expected, mut begin, mut scored) = (0.0, 0, 0);
    while scored < ids.len() {
        let end = ids.len().min(begin + 16);
        let window: Vec<u64> = std::iter::once(bos).chain(ids[begin..end].iter().copied()).collect();
        expected += nats(&window, folder.path())[scored - begin..].iter().sum::<f64>();
        (begin, scored) = (begin + 7, end);
    }
    assert_eq!(report["tokens"].as_u64().unwrap() as usize, ids.len());
    let mean = report["nats"].as_f64().unwrap();
    assert!(
        (mean - expected / ids.len() as f64).abs() < 1e-6,
        "{mean}, expected {}",
        expected / ids.len() as f64
    );
    assert!((report["perplexity"].as_f64().unwrap() - mean.exp()).abs() < 1e-9);
    assert!(mean < 4096f64.ln(), "the model knows more than nothing: {mean}");

    // Broken off after two windows and in the middle of the third's line: the same figures.
    let lines = std::fs::read_to_string(&record).unwrap();
    let cut: usize = lines.split_inclusive('\n').take(3).map(str::len).sum();
    std::fs::write(&record, &lines[..cut + 5]).unwrap();
    assert_eq!(run(&["--record", kept]), report);
    assert_eq!(std::fs::read_to_string(&record).unwrap(), lines);
    let failure = lapidary(args.iter().chain(&["--record", kept, "--limit", "20"])).failure();
    assert!(failure.contains("another evaluation") && failure.contains("input"), "{failure}");
}

/// The goldens hold what dumps hold: tokens and float32 logits.
#[test]
fn divergence_from_stored_logits() {
    for variant in ["dense31b", "e2b", "gemma3"] {
        let folder = golden(variant);
        let (model, dump) = (folder.to_str().unwrap(), folder.join("golden.safetensors"));
        let run = |more: &[&str]| {
            let args = [
                "eval",
                "kl",
                "-m",
                model,
                "--embed-scale",
                "f32",
                "--json",
                "--against",
                dump.to_str().unwrap(),
            ];
            json(&lapidary(args.iter().chain(more)).ok())
        };
        let figure = |report: &Value, run: &str, name: &str| report[run][name].as_f64().unwrap();
        let exact = run(&["--compute", "f32"]);
        assert_eq!(exact["distance"]["positions"], 39, "{variant}");
        // The limits of float32 engines against these values; a divergence goes with the square of the error.
        assert!(figure(&exact, "distance", "logit_relative") < 5e-5, "{variant}: {exact}");
        assert!(figure(&exact, "distance", "mean_kl").abs() < 1e-7, "{variant}: {exact}");
        assert_eq!(figure(&exact, "distance", "same_top"), 1.0);
        let fast = run(&["--compute", "fast"]);
        assert!(fast["floor"].is_null(), "these have no run in bfloat16: {fast}");
        assert!(
            figure(&fast, "distance", "mean_kl") > figure(&exact, "distance", "mean_kl").abs(),
            "{variant}: {fast}"
        );
    }
}

/// A reference's run in bfloat16 beside its logits is the floor. Rounding logits of this size moves each by up to 1/16.
#[test]
fn a_bfloat16_run_is_the_floor() {
    let stored = File::open(&golden("dense31b").join("golden.safetensors")).unwrap();
    let (ids, logits) = (stored.find("input_ids").unwrap(), stored.find("logits").unwrap());
    let rounded: Vec<u8> =
        stored.bytes(logits).as_chunks::<4>().0.iter().flat_map(|b| [b[2], b[3]]).collect();
    let tensor = |name: &str, dtype, shape: &[usize], bytes| NewTensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes,
    };
    let list = [
        tensor("input_ids", Dtype::I64, &ids.shape, stored.bytes(ids)),
        tensor("logits", Dtype::F32, &logits.shape, stored.bytes(logits)),
        tensor("logits_bf16", Dtype::Bf16, &logits.shape, &rounded),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dump");
    write(&path, &list, &Default::default()).unwrap();
    let model = golden("dense31b");
    let args =
        ["eval", "kl", "-m", model.to_str().unwrap(), "--compute", "f32", "--embed-scale", "f32", "--json"];
    let report = json(&lapidary(args.iter().chain(&["--against", path.to_str().unwrap()])).ok());
    let figure = |name: &str| report["floor"][name].as_f64().unwrap();
    assert!(figure("logit_max") > 1e-3 && figure("logit_max") <= 0.0625 * 2.0, "{report}");
    assert!(figure("mean_kl") > 10.0 * report["distance"]["mean_kl"].as_f64().unwrap().abs(), "{report}");
    let report =
        json(&lapidary(args.iter().chain(&["--against", path.to_str().unwrap(), "--no-floor"])).ok());
    assert!(report["floor"].is_null() && report["floor_is"].is_null(), "{report}");
}

#[test]
fn divergence_between_models_and_from_oneself() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("t.txt");
    std::fs::write(&text, STORY).unwrap();
    let text = text.to_str().unwrap();
    let run = |more: &[&str]| {
        json(
            &lapidary(
                ["eval", "kl", "--json", "--text", text, "--window", "32", "--stride", "20"]
                    .iter()
                    .chain(more),
            )
            .ok(),
        )
    };
    let same = run(&["--compute", "f32"]);
    assert_eq!(same["distance"]["mean_kl"], 0.0, "{same}");
    assert_eq!(same["distance"]["logit_max"], 0.0, "{same}");
    let fast = run(&["--compute", "fast"]);
    let kl = |report: &Value, run: &str| report[run]["mean_kl"].as_f64().unwrap();
    assert!(kl(&fast, "distance") > 1e-6 && kl(&fast, "distance") < 0.1, "{fast}");
    if !fast["floor"].is_null() {
        assert!(kl(&fast, "floor").abs() < 1e-3 * kl(&fast, "distance"), "{fast}");
    }
    // The other pebble knows the same language, and is another model.
    let e = pebble().with_file_name("pebble-e-q8_0.gguf");
    let other = run(&[
        "--compute",
        "f32",
        "-m",
        e.to_str().unwrap(),
        "--reference",
        pebble().to_str().unwrap(),
        "--no-floor",
    ]);
    assert!(kl(&other, "distance") > 10.0 * kl(&fast, "distance"), "{other}");
    assert!(other["floor"].is_null());
}

#[test]
fn only_answers_of_conversations_count() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.jsonl");
    let answer = "The capital of Peru is Lima.";
    let line = |answer: &str| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is the capital of Peru?\"}}, \
             {{\"role\": \"assistant\", \"content\": \"{answer}\"}}]}}\n"
        )
    };
    std::fs::write(&path, line(answer) + "\n" + &line(answer)).unwrap();
    let run = || json(&lapidary(["eval", "ppl", "--chat", path.to_str().unwrap(), "--json"]).ok());
    let report = run();
    // BOS leaves the answer's ids, the end of the turn joins them.
    assert_eq!(report["tokens"].as_u64().unwrap() as usize, 2 * ids(answer).len());
    assert!(report["nats"].as_f64().unwrap() < 0.05, "it knows: {report}");
    assert!(report["bits_per_byte"].is_null());
    std::fs::write(&path, line("The capital of Peru is Oslo.")).unwrap();
    assert!(run()["nats"].as_f64().unwrap() > 0.5, "and knows better");

    std::fs::write(&path, line(answer) + "{\"messages\": 3}").unwrap();
    let failure = lapidary(["eval", "ppl", "--chat", path.to_str().unwrap()]).failure();
    assert!(failure.contains("chat.jsonl, line 2"), "{failure}");
}

#[test]
fn choices_are_scored_by_all_three_counts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("q.jsonl");
    let question = |country: &str, right: usize| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is the capital of {country}?\"}}], \"choices\": \
             [\"The capital of {country} is Lima.\", \"The capital of {country} is Oslo.\", \"The capital of {country} is \
             Paris.\"], \"answer\": {right}}}\n"
        )
    };
    let prompt = "{\"prompt\": \"Once upon a time there was a\", \"choices\": [\" lamp key\", \" fox named\"], \"answer\": \" fox named\"}\n";
    let all = [question("Peru", 0), question("Norway", 1), question("France", 2), prompt.to_owned()].concat();
    std::fs::write(&path, &all).unwrap();
    let questions = path.to_str().unwrap();
    let report = json(&lapidary(["eval", "choice", "--questions", questions, "--json"]).ok());
    for count in ["sum", "per_token", "per_byte"] {
        assert_eq!(report["accuracy"][count]["accuracy"], 1.0, "{report}");
    }
    // A shared prompt run once gives what each choice alone gives.
    let results = report["results"].as_array().unwrap();
    let (whole, alone) =
        (ids("Once upon a time there was a fox named"), ids("Once upon a time there was a").len());
    let ln_p: f64 = nats(&whole, folder.path())[alone - 1..].iter().sum();
    let exact =
        json(&lapidary(["eval", "choice", "--questions", questions, "--json", "--compute", "f32"]).ok());
    let found = exact["results"][3]["log_p"][1].as_f64().unwrap();
    assert!((found + ln_p).abs() < 1e-5, "{found}, expected {}", -ln_p);
    assert_eq!(results[3]["tokens"][1].as_u64().unwrap() as usize, whole.len() - alone);

    std::fs::write(&path, all + "{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 7}").unwrap();
    let failure = lapidary(["eval", "choice", "--questions", questions]).failure();
    assert!(failure.contains("q.jsonl, line 5") && failure.contains("0 to 1"), "{failure}");
}

#[test]
fn what_cannot_be_scored_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("t.txt");
    std::fs::write(&text, STORY).unwrap();
    let text = text.to_str().unwrap();
    let refused = |args: &[&str], said: &str| {
        let failure = lapidary(args).failure();
        assert!(failure.contains(said), "{failure}");
    };
    refused(&["eval", "ppl", "--text", text, "--window", "8", "--stride", "8"], "stride of 1 to 7");
    refused(&["eval", "ppl", "--text", "/nonexistent"], "/nonexistent");
    // Nothing on stdin.
    refused(&["eval", "ppl"], "nothing to score");
    refused(&["eval", "ppl", "--text", text, "--ctx", "16"], "context of 16");
    refused(&["eval", "kl", "--text", text, "--reference", golden("e2b").to_str().unwrap()], "tokenizer");
    let dump = golden("e2b").join("model.safetensors");
    refused(&["eval", "kl", "--against", dump.to_str().unwrap()], "input_ids");
    let dump = golden("e2b").join("golden.safetensors");
    refused(&["eval", "kl", "--against", dump.to_str().unwrap()], "vocabular");
    refused(&["eval", "kl", "--against", dump.to_str().unwrap(), "--tokens", "2,5"], "other tokens");
}
