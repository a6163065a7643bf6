//! Launchers: for each file of `kernels/` the Rust file of the same name, the only one that launches it.

pub mod attn_decode;
pub mod attn_prefill;
pub mod bandwidth;
pub mod gemm_prefill;
pub mod probe;
pub mod producers;
pub mod skinny_gemm;
