//! placeholder
pub mod gguf;
