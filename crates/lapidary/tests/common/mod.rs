//! Models for the tests of this folder, on either backend.
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod drive;
pub mod spy;

use std::path::Path;

use lapidary_engine::{Runner, Stepper};
use lapidary_model::{BuildOptions, Config, EmbedScale, Limits, Model};
use lapidary_ops::{Backend, KvFormat};
use lapidary_reference::ReferenceBackend;
use lapidary_weights::{Checkpoint, ConfigSource};

/// What the float32 tests run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    Reference,
}

/// Every backend that must give the reference's float32 results.
pub const EVERY: [On; 1] = [On::Reference];

impl On {
    pub fn backend(self) -> Box<dyn Backend> {
        match self {
            On::Reference => Box::new(ReferenceBackend::new()),
        }
    }
}

/// How a test wants its model.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub rows: usize,
    pub head_rows: usize,
    pub context: usize,
    pub scale: EmbedScale,
    pub kv: KvFormat,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup { rows: 64, head_rows: 64, context: 200, scale: EmbedScale::F32, kv: KvFormat::F32 }
    }
}

pub fn config(checkpoint: &Checkpoint) -> Config {
    match checkpoint.config() {
        ConfigSource::Json { config, .. } => Config::from_json(config).expect("config is read"),
        other => panic!("unexpected config source {other:?}"),
    }
}

pub fn stepper(folder: &Path, on: On, setup: Setup) -> Stepper {
    let checkpoint = Checkpoint::open(folder).expect("checkpoint opens");
    let mut backend = on.backend();
    let limits = Limits { rows: setup.rows, head_rows: setup.head_rows };
    let options = BuildOptions { limits, embed_scale: setup.scale };
    let model = Model::build(config(&checkpoint), &checkpoint, backend.as_mut(), &options, &mut |_| {})
        .expect("model builds");
    let runner = Runner::new(model, backend, [setup.kv; 2], setup.context).expect("pools fit");
    Stepper::new(runner, setup.context)
}
