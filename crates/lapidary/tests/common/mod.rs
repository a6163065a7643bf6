//! Models for the tests of this folder, on either backend.
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod client;
pub mod drive;
pub mod files;
pub mod spy;

use std::path::Path;

use lapidary_cpu::{Compute, CpuBackend, CpuOptions};
use lapidary_engine::{Runner, Stepper};
use lapidary_model::{BuildOptions, Config, EmbedScale, Limits, Model};
use lapidary_ops::{Backend, KvFormat};
use lapidary_reference::ReferenceBackend;
use lapidary_weights::Checkpoint;

/// What the float32 tests run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    Reference,
    Cpu { threads: usize },
}

/// Every backend that must give the reference's float32 results.
pub const EVERY: [On; 3] = [On::Reference, On::Cpu { threads: 1 }, On::Cpu { threads: 2 }];

impl On {
    pub fn backend(self) -> Box<dyn Backend> {
        match self {
            On::Reference => Box::new(ReferenceBackend::new()),
            On::Cpu { threads } => {
                let options = CpuOptions { threads: Some(threads), compute: Compute::F32, level: None };
                Box::new(CpuBackend::new(options).expect("the CPU is a device"))
            }
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
    Config::from_checkpoint(checkpoint).expect("config is read")
}

pub fn stepper(folder: &Path, on: On, setup: Setup) -> Stepper {
    Stepper::new(runner(folder, on, setup), setup.context)
}

pub fn runner(folder: &Path, on: On, setup: Setup) -> Runner {
    let checkpoint = Checkpoint::open(folder).expect("checkpoint opens");
    let mut backend = on.backend();
    let limits = Limits { rows: setup.rows, head_rows: setup.head_rows };
    let options = BuildOptions { limits, embed_scale: setup.scale };
    let config = config(&checkpoint);
    let model =
        Model::build(config, &checkpoint, backend.as_mut(), &options, &mut |_| {}).expect("model builds");
    Runner::new(model, backend, [setup.kv; 2], setup.context).expect("pools fit")
}
