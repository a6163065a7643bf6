//! The tests that ask for equal results on every backend, in one binary that can be copied to a machine with a GPU
//! and run there from the repository's root.
//!
//! `LAPIDARY_REQUIRE_GPU=1` runs them on the GPU alone, and fails where there is none.
#![cfg(feature = "cuda")]
#![allow(
    clippy::duplicate_mod,
    reason = "each file brings the module of models that it uses when it is built alone"
)]

#[path = "ahead.rs"]
mod ahead;
#[path = "capture.rs"]
mod capture;
#[path = "capture_bits.rs"]
mod capture_bits;
#[path = "config.rs"]
mod config;
#[path = "determinism.rs"]
mod determinism;
#[path = "engine_ahead.rs"]
mod engine_ahead;
#[path = "fast_gpu.rs"]
mod fast_gpu;
#[path = "fast_hooks.rs"]
mod fast_hooks;
#[path = "formats.rs"]
mod formats;
#[path = "fp8_kv.rs"]
mod fp8_kv;
#[path = "gguf_models.rs"]
mod gguf_models;
#[path = "goldens.rs"]
mod goldens;
#[path = "hard_cases_a.rs"]
mod hard_cases_a;
#[path = "hard_cases_b.rs"]
mod hard_cases_b;
#[path = "hard_cases_h.rs"]
mod hard_cases_h;
#[path = "pebble_gpu.rs"]
mod pebble_gpu;
#[path = "plan_gpu.rs"]
mod plan_gpu;
#[path = "refusals.rs"]
mod refusals;
#[path = "requantise.rs"]
mod requantise;
#[path = "slots.rs"]
mod slots;
#[path = "steering.rs"]
mod steering;
#[path = "steps.rs"]
mod steps;
#[path = "tiny_models.rs"]
mod tiny_models;
#[path = "traps.rs"]
mod traps;
