//! Any bytes as a tokenizer file.
#![no_main]

#[path = "../exercise/tokenizer.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::tokenizer(bytes));
