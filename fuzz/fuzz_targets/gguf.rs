//! Any bytes as a GGUF file.
#![no_main]

#[path = "../exercise/gguf.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::gguf(bytes));
