//! Any bytes as the text of a tool call.
#![no_main]

#[path = "../exercise/tool_args.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| exercise::tool_args(bytes));
