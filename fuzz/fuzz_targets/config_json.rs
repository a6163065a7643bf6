//! Any bytes as a `config.json`.
#![no_main]

#[path = "../exercise/config_json.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::config_json(bytes));
