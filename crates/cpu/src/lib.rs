//! The CPU backend: a team of workers that all carry out the same pass.
//!
//! [`CpuBackend`] owns weights, activations, keys and values. `run` wakes the [team](team::Team); every worker
//! executes the whole program over its own `CpuOps`, does its share of each verb and meets the others where
//! data crosses workers. [`Level`] is the instruction set that kernels were chosen for, detected at start, so
//! that one binary runs on any x86-64.
//!
//! The rule that everything here keeps: each output value is computed by one worker, in an order of sums that
//! depends on the matrix (or on absolute positions, for sums over keys) and on the level, and on nothing else.
//! Bits do not depend on the number of workers, on the other rows of a batch, or on how a prompt was cut.
//!
//! Deliberately absent: any model, any file, any scheduling, sampling beyond the largest logit.

mod ahead;
mod attention;
mod attention_bf16;
mod backend;
mod buffers;
mod cores;
mod crowd;
mod decode;
mod file_rows;
pub mod footprint;
mod int8;
mod kv;
mod late;
mod level;
mod linear;
mod math;
mod matrix;
mod memory;
mod moe;
mod norm;
mod ops;
mod pass;
mod rows;
mod steer;
mod team;
mod topology;
mod weigh;

pub use backend::{Compute, CpuBackend, CpuOptions};
pub use kv::native_kv;
pub use level::Level;
pub use topology::available_cores;
