//! Launchers: for each file of `kernels/` the Rust file of the same name, the only one that launches it.

pub mod probe;
