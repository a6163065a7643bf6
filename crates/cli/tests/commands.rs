//! What the commands print.

mod common;

use std::time::Instant;

use clap_words::every_flag;
use common::{command, finish, golden, json, lapidary, lapidary_with_input, pebble, root};

const COMMANDS: &[&str] = &[
    "run",
    "chat",
    "inspect",
    "check",
    "dump",
    "convert",
    "eval",
    "tokenize",
    "pull",
    "list",
    "rm",
    "bench",
    "steer",
    "verify",
    "synth",
    "completions",
];

/// The flags that a command promises.
mod clap_words {
    pub fn every_flag(command: &str) -> &'static [&'static str] {
        match command {
            "run" => &[
                "--model",
                "--raw",
                "--system",
                "--think",
                "--tokens",
                "-n",
                "--temperature",
                "--top-k",
                "--top-p",
                "--min-p",
                "--seed",
                "--greedy",
                "--ctx",
                "--threads",
                "--device",
                "--compute",
                "--kv",
                "--stats",
                "--json",
                "--offline",
            ],
            "chat" => &[
                "--model",
                "--system",
                "--think",
                "--temperature",
                "/reset",
                "/system",
                "/save",
                "/load",
                "/stats",
            ],
            "inspect" => &["--ctx", "--kv", "--json", "--chunk"],
            "check" => &["--model", "--full", "--json"],
            "dump" => &[
                "--tokens",
                "--output",
                "--layers",
                "--dtype",
                "--embed-scale",
                "--soft",
                "--also",
                "hidden.N",
            ],
            "eval" => &["ppl", "kl", "choice", "--record"],
            "convert" => &["FORMAT", "--model", "--output", "-o", "--pure", "--name", "--json", "q4_k_m"],
            "tokenize" => &["--ids", "--special", "--no-bos", "--json"],
            "pull" => &["REPO", "--offline", "--json", "HF_TOKEN", "HF_HOME", "HF_ENDPOINT"],
            "list" => &["--json"],
            "rm" => &["REPO"],
            "bench" => {
                &["--prompt", "-p", "--generate", "-n", "--threads", "-t", "--repetitions", "-r", "--json"]
            }
            "steer" => &["fit", "show"],
            "verify" => &["--model", "--against", "--write", "--tokens", "--json"],
            "synth" => {
                &["MODEL", "FORMAT", "--output", "-o", "--layers", "--seed", "--sparse", "--tokenizer"]
            }
            _ => &["SHELL"],
        }
    }
}

#[test]
fn help_names_every_command_and_flag() {
    let top = lapidary(["--help"]).ok();
    for name in COMMANDS {
        assert!(top.contains(&format!("\n  {name} ")), "{name}");
        let help = lapidary([name, "--help"]).ok();
        for flag in every_flag(name) {
            assert!(help.contains(flag), "{name} {flag}: {help}");
        }
    }
    for name in ["run", "inspect", "check", "dump", "pull", "bench", "synth", "tokenize"] {
        assert!(lapidary([name, "--help"]).ok().contains("Example"), "{name} shows how it is used");
    }
}

#[test]
fn version_tells_features_and_level() {
    let text = lapidary(["--version"]).ok();
    assert!(text.starts_with(&format!("lapidary {}", env!("CARGO_PKG_VERSION"))), "{text}");
    assert!(text.contains("features: hub, pebble"), "{text}");
    assert!(text.contains(lapidary_cpu::Level::detect().name()), "{text}");
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = lapidary(["completions", shell]).ok();
        assert!(script.contains("inspect") && script.contains("temperature"), "{shell}");
    }
}

#[test]
fn the_built_in_model_answers_without_any_file() {
    let folder = tempfile::tempdir().unwrap();
    let ran = finish(
        command()
            .args(["run", "--compute", "f32", "--greedy", "--stats", "Once upon a time"])
            .current_dir(folder.path())
            .output()
            .unwrap(),
    );
    assert!(ran.err.contains("prompt") && ran.err.contains("t/s") && ran.err.contains("load"), "{ran:?}");
    let text = ran.ok();
    assert!(text.split_whitespace().count() > 20 && text.ends_with('\n'), "{text}");
    assert!(!text.contains('<') && !text.contains('\u{FFFD}'), "no control tokens: {text}");
}

#[test]
fn greedy_answers_are_the_stored_ones() {
    let samples = std::fs::read_to_string(root().join("tests/pebble/moe/samples.json")).unwrap();
    let mut compared = 0;
    for sample in json(&samples).as_array().unwrap() {
        // Stored replies are those of bf16 weights; the Q8_0 file agrees where no choice was close.
        if sample["min_margin"].as_f64().unwrap() < 0.5 || sample.get("tools").is_some() {
            continue;
        }
        let said = |i: usize| sample["messages"][i]["content"].as_str().unwrap();
        let mut args = vec!["run", "--compute", "f32", "--greedy", "--json"];
        match sample["messages"].as_array().unwrap().len() {
            1 => args.push(said(0)),
            2 => args.extend(["--system", said(0), said(1)]),
            _ => continue,
        }
        if sample["enable_thinking"] == true {
            args.push("--think");
        }
        let result = json(&lapidary(args).ok());
        let reply = sample["reply"].as_str().unwrap().replace("<turn|>", "");
        let (thought, text) = reply.split_once("<channel|>").unwrap_or(("", &reply));
        assert_eq!(result["text"], text);
        let thought = thought.strip_prefix("<|channel>thought\n").unwrap_or(thought);
        assert_eq!(result["thought"].as_str().unwrap().trim_end(), thought.trim_end());
        assert_eq!((&result["mode"], &result["finish_reason"]), (&"chat".into(), &"stop".into()));
        compared += 1;
    }
    assert!(compared >= 10, "{compared}");
}

#[test]
fn seeds_reproduce_and_json_tells_them() {
    let model = pebble();
    let base = [
        "run",
        "-m",
        model.to_str().unwrap(),
        "--compute",
        "f32",
        "--json",
        "-n",
        "12",
        "--temperature",
        "1.5",
    ];
    let text = |seed: &[&str]| json(&lapidary([&base[..], seed, &["Tell me a story."]].concat()).ok());
    let first = text(&[]);
    let again = text(&["--seed", &first["seed"].to_string()]);
    assert_eq!(first["text"], again["text"]);
    assert_ne!(text(&["--seed", "1"])["text"], text(&["--seed", "2"])["text"]);
    assert_eq!(first["finish_reason"], "length");
    assert_eq!(first["usage"]["answer_tokens"], 12);
    assert!(first["stats"]["decode_tokens_per_second"].as_f64().unwrap() > 0.0);
}

#[test]
fn stdin_is_the_prompt_when_there_is_none() {
    let model = pebble();
    let base = ["run", "-m", model.to_str().unwrap(), "--compute", "f32", "--greedy", "-n", "9"];
    let given = lapidary([&base[..], &["Tell me a story."]].concat()).ok();
    assert_eq!(lapidary_with_input(base, "Tell me a story.\n").ok(), given);
}

#[test]
fn a_chat_goes_on_from_turn_to_turn() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("a chat.json");
    let model = pebble();
    let args = [
        "chat",
        "-m",
        model.to_str().unwrap(),
        "--compute",
        "f32",
        "--greedy",
        "-n",
        "30",
        "--system",
        "Be kind.",
    ];
    let script = format!(
        "Tell me a story about a fox.\n\n/stats\nWhat happened then?\n/stats\n/save {0}\n/nonsense\n/reset\n/load {0}\n/help\n/quit\nnever read\n",
        saved.display()
    );
    let ran = lapidary_with_input(args, &script);
    assert!(ran.err.contains("there is no command /nonsense"), "{ran:?}");
    assert!(ran.err.contains("more were held already"), "the second turn reads its own tokens only: {ran:?}");
    assert!(ran.err.contains("5 messages from"), "{ran:?}");
    assert!(ran.err.contains("/reset         forget"), "{ran:?}");
    let out = ran.ok();
    assert_eq!(out.lines().filter(|l| !l.is_empty()).count(), 2, "two answers and nothing else: {out}");
    let chat = json(&std::fs::read_to_string(&saved).unwrap());
    let roles: Vec<_> =
        chat["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(chat["messages"][2]["content"].as_str().unwrap(), out.lines().next().unwrap());
}

/// Ctrl-C ends the answer; the chat goes on with what was said until then.
#[cfg(unix)]
#[test]
fn an_interrupt_stops_the_answer_and_not_the_chat() {
    use std::io::{Read, Write};
    use std::process::Stdio;
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("chat.json");
    // So hot that the model rambles until the context is full.
    let flags =
        ["--temperature", "9", "--top-k", "0", "--top-p", "1", "--seed", "7", "--level", "scalar", "--stats"];
    let mut child = command()
        .args(["chat", "--compute", "f32"])
        .args(flags)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    writeln!(input, "Tell me a story.").unwrap();
    let mut first = [0];
    output.read_exact(&mut first).unwrap();
    let killed = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    writeln!(input, "/save {}\n/quit", saved.display()).unwrap();
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    let ran = finish(child.wait_with_output().unwrap());
    assert!(ran.err.contains("[stopped]") && ran.err.contains("2 messages are in"), "{ran:?}");
    ran.ok();
    let chat = json(&std::fs::read_to_string(&saved).unwrap());
    let said = format!("{}{rest}", first[0] as char);
    assert_eq!(chat["messages"][1]["content"].as_str().unwrap().trim_end(), said.trim_end());
}

#[test]
fn a_chat_survives_its_errors() {
    let model = pebble();
    let args =
        ["chat", "-m", model.to_str().unwrap(), "--compute", "f32", "--greedy", "-n", "4", "--ctx", "40"];
    let long = "a fox ".repeat(60);
    let ran = lapidary_with_input(args, &format!("{long}\n/load /no/such/file\n/save\nHi\n"));
    assert!(ran.err.contains("raise --ctx or shorten the prompt"), "{ran:?}");
    assert!(ran.err.contains("/no/such/file") && ran.err.contains("write /save FILE"), "{ran:?}");
    assert!(!ran.ok().trim().is_empty(), "the turn after the errors is answered");
}

#[test]
fn tokens_and_pieces_go_both_ways() {
    let model = pebble();
    let m = model.to_str().unwrap();
    let text = "Hello  there,\n\n\tünï <bos> 27";
    let result = json(&lapidary_with_input(["tokenize", "-m", m, "--json"], text).ok());
    let ids: Vec<String> = result["ids"].as_array().unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(ids[0], "2");
    assert_eq!(ids.iter().filter(|id| *id == "2").count(), 1, "a marker in a text is text");
    let back = lapidary(["tokenize", "-m", m, "--no-bos", "--ids", &ids[1..].join(",")]).ok();
    assert_eq!(back, format!("{text}\n"));
    let special = json(&lapidary(["tokenize", "-m", m, "--json", "--special", "--no-bos", "a<bos>"]).ok());
    assert_eq!(special["ids"].as_array().unwrap().last().unwrap(), 2);
    let message = lapidary(["tokenize", "-m", m, "--ids", "999999"]).failure();
    assert!(message.contains("999999"), "{message}");
}

#[test]
fn inspect_tells_the_same_in_both_forms() {
    for name in ["dense31b", "moe26b", "e2b", "unified12b", "gemma3"] {
        let model = golden(name);
        let m = model.to_str().unwrap();
        let text = lapidary(["inspect", m, "--ctx", "100"]).ok();
        let report = json(&lapidary(["inspect", m, "--ctx", "100", "--json"]).ok());
        assert_eq!(report["memory"]["context"], 100);
        let kv = report["memory"]["kv_bytes"].as_u64().unwrap();
        assert_eq!(
            kv,
            report["memory"]["kv_sliding"].as_u64().unwrap() + report["memory"]["kv_full"].as_u64().unwrap()
        );
        let layers = report["layers"].as_array().unwrap();
        assert_eq!(report["config"]["layers"], layers.len());
        assert!(text.contains("memory for a context of 100 tokens") && text.contains("BF16"), "{text}");
        let shared = layers.iter().filter(|l| !l["kv_of_layer"].is_null()).count();
        assert_eq!(shared, if name == "e2b" { 4 } else { 0 });
        assert_eq!(text.contains("of layer"), shared > 0);
        assert_eq!(text.contains("experts"), name == "moe26b");
    }
}

#[path = "../../lapidary/tests/sparse/mod.rs"]
mod sparse;

#[test]
fn inspect_is_instant_on_large_files() {
    let folder = tempfile::tempdir().unwrap();
    for (real, name) in [(sparse::Real::A4b, "a4b"), (sparse::Real::Dense31b, "31b")] {
        let model = folder.path().join(name);
        std::fs::create_dir(&model).unwrap();
        real.write_safetensors(&model);
        for context in ["8192", "262144"] {
            let start = Instant::now();
            let text =
                lapidary(["inspect".as_ref(), model.as_os_str(), "--ctx".as_ref(), context.as_ref()]).ok();
            assert!(start.elapsed().as_secs_f64() < 1.0, "{:?}", start.elapsed());
            assert!(text.contains(&format!("context of {context}")) && text.contains("GiB"), "{text}");
        }
    }
}

#[test]
fn check_is_ready_and_says_why() {
    let ran = lapidary(["check", "--full", "--compute", "f32", "--threads", "2"]);
    for what in [
        "host",
        "cores",
        "memory",
        "files",
        "inventory",
        "fit",
        "tensors",
        "device",
        "kernel",
        "forward",
        "slots",
    ] {
        assert!(ran.out.contains(&format!("OK   {what}")), "{what}: {ran:?}");
    }
    assert!(ran.ok().ends_with("\nREADY\n"));
    for name in ["e2b", "moe26b", "gemma3"] {
        let report = json(
            &lapidary(["check", "-m", golden(name).to_str().unwrap(), "--json", "--compute", "f32"]).ok(),
        );
        assert_eq!((&report["ready"], &report["verdict"]), (&true.into(), &"READY".into()), "{name}");
    }
}

/// The slowest level runs everywhere, and each level that this processor has gives a ready machine (M01).
#[test]
fn check_at_every_level() {
    let best = lapidary_cpu::Level::detect();
    for level in lapidary_cpu::Level::ALL {
        let ran = lapidary(["check", "--compute", "f32", "--level", level.name()]);
        if level.is_here() {
            assert!(ran.out.contains(&format!("level {level}")), "{ran:?}");
            let slow = ran.out.lines().any(|l| l.starts_with("WARN kernel"));
            assert_eq!(slow, level == lapidary_cpu::Level::Scalar, "a fallback is said: {ran:?}");
            assert!(ran.ok().ends_with("\nREADY\n"));
        } else {
            assert_eq!(ran.code, Some(1));
            assert!(ran.out.contains("FAIL") && ran.out.contains(best.name()), "{ran:?}");
        }
    }
}

/// The binary on processors without AVX, with AVX only, and with AVX2, emulated: it runs, slowly, and never dies of an
/// illegal instruction (M01).
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn check_on_emulated_processors() {
    let binary = env!("CARGO_BIN_EXE_lapidary");
    for (cpu, level) in
        [("qemu64", "scalar"), ("Nehalem", "scalar"), ("SandyBridge", "scalar"), ("Haswell", "avx2")]
    {
        let mut emulator = std::process::Command::new("qemu-x86_64");
        emulator.args(["-cpu", cpu, binary, "check", "--compute", "f32", "--threads", "1"]);
        let ran = match emulator.output() {
            Ok(output) => finish(output),
            Err(e) => return println!("skipped: qemu-x86_64 of the package qemu-user: {e}"),
        };
        assert!(ran.out.contains(&format!("level {level}")), "{cpu}: {ran:?}");
        assert!(ran.ok().ends_with("\nREADY\n"));
    }
}

#[test]
fn bench_measures_each_test_with_each_thread_count() {
    let model = golden("moe26b");
    let args = [
        "bench",
        "-m",
        model.to_str().unwrap(),
        "--compute",
        "f32",
        "-p",
        "33,7",
        "-n",
        "5",
        "-t",
        "1,2",
        "-r",
        "2",
    ];
    let report = json(&lapidary([&args[..], &["--json"]].concat()).ok());
    let tests = report["tests"].as_array().unwrap();
    let names: Vec<_> =
        tests.iter().map(|t| (t["threads"].as_u64().unwrap(), t["test"].as_str().unwrap())).collect();
    assert_eq!(names, [(1, "pp33"), (1, "pp7"), (1, "tg5"), (2, "pp33"), (2, "pp7"), (2, "tg5")]);
    for t in tests {
        let rate = |name: &str| t[name].as_f64().unwrap();
        assert_eq!(t["rates"].as_array().unwrap().len(), 2);
        assert!(rate("slowest") <= rate("tokens_per_second") && rate("tokens_per_second") <= rate("fastest"));
        assert_eq!(t["test"].as_str().unwrap().starts_with("tg"), t["limit_tokens_per_second"].is_f64());
    }
    assert_eq!(report["read_bandwidth"].as_array().unwrap().len(), 2);
    let text = lapidary([&args[..], &["-r", "1"]].concat());
    assert_eq!(text.code, Some(2), "a flag that is given twice is refused");
    let text = lapidary(&args[..args.len() - 2]).ok();
    assert!(text.contains("pp33") && text.contains("share") && text.contains("GB/s"), "{text}");
}
