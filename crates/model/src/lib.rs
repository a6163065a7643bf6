//! What Gemma computes.
//!
//! [`Config`] is read from `config.json` or GGUF metadata and validated; [`Model::build`] asks a checkpoint
//! for its tensors, hands them to a backend and keeps handles; [`forward()`] is the one pass, over the verbs of
//! [`lapidary_ops::Ops`]. [`kv_plan`](mod@kv_plan) decides which layers keep keys and values.
//!
//! Deliberately absent: any device (backends never appear here), any file format, tokens as text, scheduling.

mod build;
mod config;
mod config_gguf;
mod config_json;
mod error;
pub mod forward;
mod inventory;
pub mod kv_plan;
mod layer;
pub mod model;
mod moe;
mod per_layer;
mod requantise;

pub use build::{BuildOptions, EmbedScale, Progress};
pub use config::{Config, Family, LayerConfig, MoeConfig, PerLayerConfig, Rope, VisionBlocks};
pub use error::{Error, Result};
pub use forward::forward;
pub use model::{Limits, Model};
pub use requantise::{Encoding, Requantise};
