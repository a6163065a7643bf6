//! The CUDA backend: Gemma's verbs on an NVIDIA GPU.
//!
//! Compiled with feature `cuda`; without it this crate is empty and needs neither nvcc nor a driver. With it,
//! `build.rs` compiles `kernels/*.cu` ahead of time, and the driver's library is loaded when the program runs:
//! a binary starts anywhere, and a machine without a GPU gets a typed [`Error`].
//!
//! # How it is put together
//!
//! - [`driver`]: contexts, streams, events, arenas, pinned memory, graphs. Nothing about models.
//! - [`launch`]: the only caller of the launch function. A kernel takes one struct by value
//!   ([`Args`](launch::Args)); a [`Shape`](launch::Shape) says grid, threads, shared memory, cluster and
//!   programmatic dependent launch; a [`Queue`](launch::Queue) is a stream and the kernels for it.
//! - [`kernels`] holds the launchers.
//!
//! # A kernel family
//!
//! One family is files of one name:
//!
//! | file | content |
//! | --- | --- |
//! | `kernels/NAME.cu` | `extern "C" __global__` functions; the header says formula, layouts, memory traffic, versions tried with times |
//! | `kernels/common/*.cuh` | what families share: number formats, reductions, one-instruction PTX wrappers |
//! | `src/kernels/NAME.rs` | the only launcher: the argument struct, the choice of shape, the safety conditions |
//! | `tests/NAME.rs` | shapes and formats against the reference |
//!
//! A name that ends in `_sm90` is compiled for that architecture alone; every other file for the whole list.
//! Adding a family is adding these files and a `pub mod` line in `src/kernels/mod.rs`: the build finds `.cu`
//! files by itself. Includes are relative to `kernels/` (`#include "common/args.cuh"`). Nothing in a kernel
//! file may need the CUDA runtime library.
//!
//! Kernels never allocate, and launchers never wait: memory comes from the caller, and the caller says when to
//! wait. Sums run in an order that does not depend on timing, so two runs give equal bits.

#[cfg(feature = "cuda")]
pub mod args;
#[cfg(feature = "cuda")]
mod backend;
#[cfg(feature = "cuda")]
mod buffers;
#[cfg(feature = "cuda")]
mod draw;
#[cfg(feature = "cuda")]
pub mod driver;
#[cfg(feature = "cuda")]
mod error;
#[cfg(feature = "cuda")]
mod fast;
#[cfg(feature = "cuda")]
mod flight;
#[cfg(feature = "cuda")]
pub mod footprint;
#[cfg(feature = "cuda")]
mod graphs;
#[cfg(feature = "cuda")]
mod hooks;
#[cfg(feature = "cuda")]
pub mod kernels;
#[cfg(feature = "cuda")]
mod kv;
#[cfg(feature = "cuda")]
pub mod launch;
#[cfg(feature = "cuda")]
mod matrix;
#[cfg(feature = "cuda")]
mod ops;
pub mod pack;
#[cfg(feature = "cuda")]
mod upload;
#[cfg(feature = "cuda")]
mod workspace;

#[cfg(feature = "cuda")]
pub use backend::{Compute, CudaBackend, CudaOptions};
#[cfg(feature = "cuda")]
pub use error::{Error, Result};
