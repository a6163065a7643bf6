//! Any bytes as the reply of a model.
#![no_main]

#[path = "../exercise/output.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::output(bytes));
