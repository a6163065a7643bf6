//! Runs the built binary.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// What a run left.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    /// Stdout of a run that must succeed.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.out
    }

    /// The one line of a run that must fail at run time.
    #[track_caller]
    pub fn failure(self) -> String {
        assert_eq!(self.code, Some(1), "{self:?}");
        let errors: Vec<&str> = self.err.lines().filter(|l| !l.starts_with("note: ")).collect();
        assert_eq!(errors.len(), 1, "one line: {self:?}");
        assert!(errors[0].starts_with("error: "), "{self:?}");
        assert!(!self.err.contains("panicked") && !self.err.contains("backtrace"), "{self:?}");
        errors[0].to_string()
    }
}

/// The binary, away from the user's own store and settings.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lapidary"));
    command.env_remove("RUST_BACKTRACE").env_remove("HF_TOKEN").env_remove("HF_HUB_CACHE");
    command.env("HF_HOME", "/nonexistent-hf-home").env("HF_HUB_OFFLINE", "1").env("COLUMNS", "100");
    command.stdin(Stdio::null());
    command
}

/// Runs with arguments.
pub fn lapidary<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    finish(command().args(args).output().expect("the binary runs"))
}

/// Runs with text on stdin.
pub fn lapidary_with_input<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>, input: &str) -> Ran {
    use std::io::Write;
    let mut command = command();
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    child.stdin.take().expect("it is piped").write_all(input.as_bytes()).expect("it reads");
    finish(child.wait_with_output().expect("the binary ends"))
}

pub fn finish(output: Output) -> Ran {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// The workspace's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A golden's folder.
pub fn golden(name: &str) -> PathBuf {
    root().join("tests/goldens").join(name)
}

/// The trained model with a tokenizer, as a file.
pub fn pebble() -> PathBuf {
    root().join("models/pebble-moe-q8_0.gguf")
}

/// Copies a golden's checkpoint to a folder, to be damaged there.
pub fn copy_golden(name: &str, folder: &Path) {
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden(name).join(file), folder.join(file)).expect("the golden is copied");
    }
}

pub fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e} in {text}"))
}
