//! Any bytes as the format of an answer.
#![no_main]

#[path = "../exercise/grammar.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::grammar(bytes));
