//! Everything that needs a GPU, in one binary that can be copied to a machine with one.
//!
//! Without a GPU each test prints that it was skipped; with `LAPIDARY_REQUIRE_GPU=1` that is a failure. Files are
//! looked for from the current directory, the repository's root, because the machine that built the binary need
//! not be the one that runs it.
#![cfg(feature = "cuda")]

mod attn_decode;
mod draw;
mod gemm_prefill;
mod lab;
mod ops;
mod pair;
mod per_layer;
mod probe;
mod producers;
mod prologue;
mod skinny_experts;
mod skinny_gemm;

use std::sync::Arc;

use lapidary_cuda::driver::Context;

/// The first GPU; `None`, with a line that says so, where there is none and none is required.
fn gpu() -> Option<Arc<Context>> {
    match Context::new(0) {
        Ok(context) => Some(context),
        Err(e) => {
            let required = std::env::var_os("LAPIDARY_REQUIRE_GPU").is_some_and(|v| v == "1");
            assert!(!required, "a GPU is required: {e}");
            println!("skipped: {e}");
            None
        }
    }
}
