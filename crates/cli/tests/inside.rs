//! The commands that look inside: steering, captures, traces, times, verification. On the built-in model, as
//! `docs/inside.md` shows them.

mod common;

use std::path::Path;

use common::{Ran, golden, json, lapidary, pebble};
use lapidary_weights::safetensors::{Dtype, File};

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn run(args: &[&str]) -> Ran {
    lapidary(args.iter().copied())
}

/// A story from the built-in model, always the same.
fn story(more: &[&str]) -> Ran {
    let plain = ["run", "--raw", "Once upon a time there was a", "-n", "12", "--greedy", "-t", "2"];
    run(&[&plain[..], more].concat())
}

#[test]
fn a_vector_is_fitted_shown_and_used() {
    let folder = tempfile::tempdir().unwrap();
    let [owl, fox, gguf, st] =
        ["owl.txt", "fox.txt", "v.gguf", "v.safetensors"].map(|f| folder.path().join(f));
    let prompts = |animal: &str| {
        let starts =
            ["Once upon a time there was a", "One sunny day, a little", "Ivy was a brave", "Dan was a happy"];
        starts.map(|s| format!("{s} {animal}\n")).concat()
    };
    std::fs::write(&owl, prompts("owl")).unwrap();
    std::fs::write(&fox, prompts("fox")).unwrap();
    let fit = [
        "steer",
        "fit",
        "--raw",
        "--with",
        text(&owl),
        "--without",
        text(&fox),
        "--layers",
        "1-4",
        "-o",
        text(&gguf),
    ];
    let table = run(&[&fit[..], &["-o", text(&st)]].concat()).ok();
    assert!(table.lines().count() == 5 && table.contains("100.0 %"), "{table}");
    let figures = json(&run(&[&fit[..], &["--pca", "--json"]].concat()).ok());
    assert_eq!(figures["layers"].as_array().unwrap().len(), 4);
    run(&[&fit[..], &["-o", text(&st)]].concat()).ok();

    for file in [&gguf, &st] {
        let shown = json(&run(&["steer", "show", text(file), "--json"]).ok());
        assert_eq!((shown["width"].as_u64(), shown["model_layers"].as_u64()), (Some(256), Some(6)));
        assert_eq!(shown["directions"][3]["layer"], 4);
        let plain = run(&["steer", "show", text(file)]).ok();
        assert!(plain.contains("direction.1") && plain.contains("6 layers"), "{plain}");
    }
    let plain = story(&[]).ok();
    let spec = |rest: &str| format!("file={}{rest}", text(&gguf));
    assert_eq!(story(&["--steer", &spec(",strength=0")]).ok(), plain, "strength 0 changes nothing");
    let strong = story(&["--steer", &spec(",strength=1")]).ok();
    assert!(strong.matches("owl").count() > 3, "{strong}");
    assert_eq!(
        story(&["--steer", &format!("file={},strength=1", text(&st))]).ok(),
        strong,
        "both files are one vector"
    );
    let both = story(&["--steer", &spec(",strength=1"), "--steer", &spec(",mode=ablate")]).ok();
    assert!(!both.contains("owl"), "{both}");
    let out = folder.path().join("dump.safetensors");
    run(&["dump", "--tokens", "2,5,7", "-o", text(&out), "--steer", &spec("")]).ok();

    // What cannot be is refused in a line, before or after the model is there.
    for (spec, message) in [
        (spec(",layers=5"), "it has 1, 2, 3, 4"),
        (spec(",layers=4-6"), "layers 0 to 5"),
        ("file=/nonexistent.gguf".to_owned(), "nonexistent"),
        (format!("file={}", text(&pebble())), "architecture is \"gemma4\""),
    ] {
        let error = story(&["--steer", &spec]).failure();
        assert!(error.contains(message), "{spec}: {error}");
    }
    for bad in ["", "x,strength=much", "x,mode=push", "x,mode=clamp"] {
        assert_eq!(story(&["--steer", bad]).code, Some(2), "{bad:?}");
    }
    let other = golden("moe26b");
    let error = run(&["dump", "-m", text(&other), "--tokens", "2,5", "-o", text(&out), "--steer", &spec("")])
        .failure();
    assert!(error.contains("256 values wide"), "{error}");
    let mut same = fit.to_vec();
    same[6] = text(&owl);
    assert!(run(&same).failure().contains("do not differ"));
    same[6] = "/nonexistent.txt";
    assert!(run(&same).failure().contains("nonexistent"));
    let first = [&fit[..7], &["--layers", "0-1", "-o", text(&gguf)]].concat();
    assert!(run(&first).failure().contains("layer 0"));
}

#[test]
fn captures_traces_and_times_change_no_word_of_an_answer() {
    let folder = tempfile::tempdir().unwrap();
    let [out, page, trace] = ["out.safetensors", "trace.html", "trace.json"].map(|f| folder.path().join(f));
    let plain = story(&[]).ok();
    let capture = format!("file={},layers=0+3-4,what=hidden+attn+mlp+routes,positions=generated", text(&out));
    let look = [
        "--capture",
        &capture,
        "--trace",
        "--trace-html",
        text(&page),
        "--trace-file",
        text(&trace),
        "--timings",
    ];
    let ran = story(&look);
    assert_eq!(ran.out, plain, "{ran:?}");
    let file = File::open(&out).unwrap();
    let shape = |name: &str| file.find(name).unwrap_or_else(|| panic!("no {name}")).shape.clone();
    assert_eq!(shape("positions"), [12]);
    for layer in [0, 3, 4] {
        assert_eq!(shape(&format!("hidden.{layer}")), [12, 256]);
        assert_eq!(shape(&format!("mlp.{layer}")), [12, 256]);
        assert_eq!(shape(&format!("attn.{layer}.o"))[..2], [12, 4]);
        assert_eq!(shape(&format!("router_idx.{layer}")), [12, 2]);
        assert_eq!(file.find(&format!("router_idx.{layer}")).unwrap().dtype, Dtype::I64);
    }
    assert!(file.find("hidden.1").is_none());
    let rows = ran.err.lines().filter(|l| l.contains(" %  ")).count();
    assert_eq!(rows, 12, "a row for each token: {}", ran.err);
    assert!(
        ran.err.contains("decode: 12 steps of 1.0 rows") && ran.err.contains("not accounted for"),
        "{}",
        ran.err
    );
    assert!(std::fs::read_to_string(&page).unwrap().contains("Trace of"));
    let events = json(&std::fs::read_to_string(&trace).unwrap());
    let events = events["traceEvents"].as_array().unwrap();
    assert!(events.iter().any(|e| e["name"] == "experts" && e["cat"] == "decode"), "phases are drawn");

    let value = json(&story(&["--json", "--trace", "--timings"]).ok());
    assert_eq!(value["trace"].as_array().unwrap().len(), 12);
    assert!(value["trace"][0]["entropy"].as_f64().unwrap() > 0.0);
    assert!(value["timings"]["unaccounted"].as_f64().unwrap().abs() < 0.03, "{}", value["timings"]);
    assert_eq!(story(&["--capture", "file=x,layers=9-1"]).code, Some(2));
    let missing = format!("file={},layers=7", text(&out));
    assert!(story(&["--capture", &missing]).failure().contains("layers 0 to 5"));

    let profile =
        json(&run(&["bench", "-p", "16", "-n", "8", "-r", "2", "-t", "2", "--profile", "--json"]).ok());
    for (test, class) in [(0, "prefill"), (1, "decode")] {
        let report = &profile["tests"][test]["profile"];
        assert_eq!(report["classes"][0]["class"], class, "{report}");
        assert!(report["unaccounted"].as_f64().unwrap().abs() < 0.03, "{report}");
    }
}

#[test]
fn the_lens_of_a_dump_ends_with_the_likeliest_token() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("dump.safetensors");
    run(&["dump", "--tokens", "2,301,17,99", "-o", text(&out), "--lens", "3", "--also", "mlp"]).ok();
    let file = File::open(&out).unwrap();
    let entry = |name: &str| file.find(name).unwrap_or_else(|| panic!("no {name}"));
    assert_eq!((&entry("lens.ids").shape[..], &entry("mlp.2").shape[..]), (&[6, 4, 3][..], &[4, 256][..]));
    let ids: Vec<i64> =
        file.bytes(entry("lens.ids")).as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
    let logits: Vec<f32> =
        file.bytes(entry("logits")).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let vocab = logits.len() / 4;
    for (row, logits) in logits.chunks_exact(vocab).enumerate() {
        let best = (1..vocab).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        assert_eq!(ids[(5 * 4 + row) * 3], best as i64, "row {row}");
    }
}

#[test]
fn verify_passes_what_is_sound_and_names_what_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let good = folder.path().join("good.safetensors");
    let dump = ["verify", "--write", text(&good)];
    run(&dump).ok();
    let same = run(&["verify", "--against", text(&good)]).ok();
    assert!(same.contains("every part is as in the dump"), "{same}");
    let fast = run(&["verify", "--against", text(&good), "--compute", "fast"]).ok();
    assert!(fast.contains("no part departs"), "{fast}");
    let alone = json(&run(&["verify", "--json"]).ok());
    assert_eq!((alone["first_departure"].is_null(), alone["parts"].as_array().unwrap().len()), (true, 8));
    // What layer 3 gave is half as large again: that layer is named, though the next one was given it.
    let mut bytes = std::fs::read(&good).unwrap();
    let (at, end) = {
        let file = File::open(&good).unwrap();
        let entry = file.find("hidden.3").unwrap();
        let header = bytes.len() as u64 - file.entries().iter().map(|e| e.end).max().unwrap();
        ((header + entry.begin) as usize, (header + entry.end) as usize)
    };
    for value in bytes[at..end].chunks_exact_mut(4) {
        let v = f32::from_le_bytes(value.try_into().unwrap());
        value.copy_from_slice(&(v * 1.5).to_le_bytes());
    }
    let bad = folder.path().join("bad.safetensors");
    std::fs::write(&bad, bytes).unwrap();
    let found = run(&["verify", "--against", text(&bad), "--json"]);
    assert_eq!(found.code, Some(1), "{found:?}");
    let found = json(&found.out);
    assert_eq!(found["first_departure"], "layer 3", "{found}");
    // A dump of another model, and no dump at all.
    let other = golden("dense31b");
    let error = run(&["verify", "-m", text(&other), "--against", text(&good)]).failure();
    assert!(error.contains("hidden") || error.contains("vocabulary"), "{error}");
    assert!(run(&["verify", "--against", "/nonexistent.safetensors"]).failure().contains("nonexistent"));
    assert!(run(&["verify", "--against", text(&pebble())]).code == Some(1));
}
