//! Launchers: for each file of `kernels/` the Rust file of the same name, the only one that launches it.

pub mod attn_decode;
pub mod bandwidth;
pub mod probe;
pub mod producers;
pub mod skinny_gemm;
