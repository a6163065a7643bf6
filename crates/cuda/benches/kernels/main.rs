//! Times of the kernels that decode with, at Gemma's shapes: microseconds in a graph of dependent launches over
//! rotating weights, and the share of the device's read bandwidth.
//!
//! `cargo bench -p lapidary-cuda --features cuda --bench kernels [-- gemm|sweep|experts|attention|prefill|producers]`;
//! behind `sweep` the forms, the numbers of rows and the matrices, such as `sweep nvfp4,q4_k 1 31B,12B`.

#[cfg(feature = "cuda")]
mod attention;
#[cfg(feature = "cuda")]
mod bench;
#[cfg(feature = "cuda")]
#[path = "../../tests/gpu/lab.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod lab;
#[cfg(feature = "cuda")]
mod producers;
#[cfg(feature = "cuda")]
mod products;

#[cfg(feature = "cuda")]
use bench::gpu;

#[cfg(not(feature = "cuda"))]
fn main() {}

#[cfg(feature = "cuda")]
fn main() {
    bench::main();
}
