//! Launchers: for each file of `kernels/` the Rust file of the same name, the only one that launches it.
//!
//! A launcher takes a [`Queue`](crate::launch::Queue) and the data by its places on the device. It is unsafe
//! because places are plain numbers: whoever calls it promises that they lead to what their names say, of the
//! sizes given, until the work is done.

pub mod attention;
pub mod attn_decode;
pub mod attn_prefill;
pub mod bandwidth;
pub mod draw;
pub mod gemm_prefill;
pub mod gemm_wide;
pub mod heads;
pub mod hooks;
pub mod per_layer;
pub mod probe;
pub mod producers;
pub mod product;
pub mod prologue;
pub mod route;
pub mod rows;
pub mod skinny_experts;
pub mod skinny_gemm;
mod skinny_shape;
pub mod step;
