//! Every failure at start, provoked once: one line with cause, numbers and what to do, exit code 1, no backtrace (M05);
//! and wrong usage, exit code 2.

mod common;

use std::fs;
use std::path::Path;

use common::{Ran, command, copy_golden, finish, golden, lapidary, pebble};

fn run(model: &Path) -> String {
    lapidary([
        "run".as_ref(),
        "-m".as_ref(),
        model.as_os_str(),
        "--compute".as_ref(),
        "f32".as_ref(),
        "Hi".as_ref(),
    ])
    .failure()
}

#[track_caller]
fn says(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "\"{word}\" is not in: {message}");
    }
}

fn edit_config(folder: &Path, from: &str, to: &str) {
    let path = folder.join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{from}");
    fs::write(&path, text.replace(from, to)).unwrap();
}

#[test]
fn nothing_there() {
    says(&run(Path::new("/no/such/model")), &["/no/such/model", "check the path"]);
    let folder = tempfile::tempdir().unwrap();
    says(&run(folder.path()), &["neither a config.json", ".gguf"]);
    // A name of the hub, which is off line here.
    let message = lapidary(["run", "-m", "owner/name:Q4_0", "--offline", "Hi"]).failure();
    says(&message, &["owner/name:Q4_0", "offline"]);
}

#[test]
fn a_truncated_file() {
    let folder = tempfile::tempdir().unwrap();
    copy_golden("dense31b", folder.path());
    let path = folder.path().join("model.safetensors");
    let length = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(length - 1000).unwrap();
    says(&run(folder.path()), &["truncated", "needs", &(length - 1000).to_string(), "fetch it again"]);

    let gguf = folder.path().join("short.gguf");
    let bytes = fs::read(pebble()).unwrap();
    fs::write(&gguf, &bytes[..bytes.len() / 2]).unwrap();
    says(&run(&gguf), &["short.gguf", "; "]);
    fs::write(&gguf, b"not a model at all").unwrap();
    says(&run(&gguf), &["short.gguf", "; "]);
}

#[test]
fn a_damaged_value() {
    let folder = tempfile::tempdir().unwrap();
    copy_golden("dense31b", folder.path());
    let path = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    // The last tensor's last value becomes a bf16 NaN.
    let end = bytes.len();
    bytes[end - 2..].copy_from_slice(&[0xC0, 0x7F]);
    fs::write(&path, bytes).unwrap();
    let model = folder.path().to_str().unwrap();
    let checked = lapidary(["check", "-m", model, "--full", "--compute", "f32"]);
    assert_eq!(checked.code, Some(1), "{checked:?}");
    assert!(checked.out.contains("FAIL tensor") && checked.out.ends_with("NOT READY\n"), "{checked:?}");
    assert!(checked.out.contains("NaN"), "{checked:?}");
}

#[test]
fn contradictions_between_config_and_weights() {
    let folder = tempfile::tempdir().unwrap();
    copy_golden("dense31b", folder.path());
    edit_config(folder.path(), "\"intermediate_size\": 288", "\"intermediate_size\": 320");
    says(&run(folder.path()), &["gate_proj", "[288, 160]", "[320, 160]", "belong together"]);
    let checked = lapidary(["check", "-m", folder.path().to_str().unwrap(), "--compute", "f32"]);
    assert_eq!(checked.code, Some(1), "{checked:?}");

    let folder = tempfile::tempdir().unwrap();
    copy_golden("dense31b", folder.path());
    fs::write(folder.path().join("config.json"), "{\"model_type\": ").unwrap();
    says(&run(folder.path()), &["config.json", "fetch the file again"]);
}

#[test]
fn variants_and_layouts_that_are_not_supported() {
    says(&run(&golden("assistant_e2b")), &["gemma4_assistant", "not yet supported", "open the model"]);
    let folder = tempfile::tempdir().unwrap();
    copy_golden("dense31b", folder.path());
    edit_config(
        folder.path(),
        "\"hidden_activation\": \"gelu_pytorch_tanh\"",
        "\"hidden_activation\": \"relu\"",
    );
    says(&run(folder.path()), &["relu", "hidden_activation", "; "]);

    let folder = tempfile::tempdir().unwrap();
    copy_golden("dense31b", folder.path());
    edit_config(
        folder.path(),
        "\"text_config\":",
        "\"quantization_config\": {\"quant_method\": \"gptq\"}, \"text_config\":",
    );
    says(&run(folder.path()), &["gptq", "; "]);

    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("adapter_config.json"), "{}").unwrap();
    says(&run(folder.path()), &["LoRA adapters", "merge"]);
}

#[test]
fn no_tokenizer() {
    says(&run(&golden("dense31b")), &["no tokenizer", "tokenizer.json"]);
}

#[cfg(unix)]
#[test]
fn too_little_memory() {
    let binary = env!("CARGO_BIN_EXE_lapidary");
    let script = "ulimit -v 600000 && exec \"$0\" run -m \"$1\" --compute f32 --ctx 4000000 Hi".to_string();
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &script, binary]).arg(pebble()).env_remove("RUST_BACKTRACE");
    let ran = finish(shell.output().expect("there is a shell"));
    says(
        &ran.failure(),
        &[
            "does not fit",
            "GiB",
            "MiB are available",
            "the longest context that fits is",
            "--min-ctx",
            "--ignore-memory",
        ],
    );

    // Without the look ahead, the allocation itself is refused in one line.
    let script = script.replace("run", "run --ignore-memory");
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &script, binary]).arg(pebble()).env_remove("RUST_BACKTRACE");
    says(&finish(shell.output().unwrap()).failure(), &["KV cache", "needs", "bytes", "lower --ctx"]);
}

#[cfg(unix)]
#[test]
fn no_permission() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    copy_golden("dense31b", folder.path());
    let path = folder.path().join("model.safetensors");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    if fs::File::open(&path).is_ok() {
        println!("skipped: this user may read everything");
    } else {
        says(&run(folder.path()), &["model.safetensors", "ermission", "give this user permission"]);
    }
    // Writing where nobody can.
    let model = golden("dense31b");
    let out = "/proc/nowhere/out.safetensors";
    let message = lapidary(["dump", "-m", model.to_str().unwrap(), "--tokens", "2", "-o", out]).failure();
    says(&message, &[out, "; "]);
}

#[test]
fn what_this_processor_lacks() {
    let model = pebble();
    let base = ["run", "-m", model.to_str().unwrap(), "--compute", "f32", "Hi", "-n", "2"];
    if lapidary_cpu::Level::detect() == lapidary_cpu::Level::Avx512 {
        lapidary([&base[..], &["--level", "avx512"]].concat()).ok();
    } else {
        says(&lapidary([&base[..], &["--level", "avx512"]].concat()).failure(), &["avx512", "best is"]);
    }
}

#[test]
fn a_prompt_longer_than_the_context() {
    let model = pebble();
    let message = lapidary([
        "run",
        "-m",
        model.to_str().unwrap(),
        "--compute",
        "f32",
        "--ctx",
        "7",
        "a b c d e f g h i j k l m n",
    ])
    .failure();
    says(&message, &["context of 7", "raise --ctx or shorten the prompt"]);
    says(
        &lapidary(["run", "-m", model.to_str().unwrap(), "--compute", "f32", ""]).failure(),
        &["prompt is empty"],
    );
}

#[test]
fn wrong_usage_is_code_2() {
    for args in [
        &["frobnicate"][..],
        &["run", "--temperature", "-1", "x"],
        &["run", "--temperature", "nan", "x"],
        &["run", "--top-p", "1.5", "x"],
        &["run", "--greedy", "--seed", "1", "x"],
        &["run", "--ctx", "0", "x"],
        &["run", "--threads", "0", "x"],
        &["run", "--kv", "q4", "x"],
        &["run", "--device", "tpu", "x"],
        &["run", "--raw", "--system", "s", "x"],
        &["inspect"],
        &["bench", "-t", "0"],
        &["tokenize", "--ids", "-1"],
    ] {
        let ran = lapidary(args);
        assert_eq!(ran.code, Some(2), "{args:?}: {ran:?}");
        assert!(ran.err.starts_with("error: ") && ran.out.is_empty(), "{args:?}: {ran:?}");
    }
    let bare: Ran = lapidary([] as [&str; 0]);
    assert_eq!(bare.code, Some(2));
    assert!(bare.err.contains("Usage") && bare.err.contains("First steps"), "{bare:?}");
}

#[cfg(unix)]
#[test]
fn a_reader_that_goes_away_is_no_failure() {
    use std::process::Stdio;
    let mut child = command()
        .args(["run", "-m", pebble().to_str().unwrap(), "--compute", "f32", "--raw", "Once", "-n", "200"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ran = finish(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(!ran.err.contains("error"), "{ran:?}");
}
