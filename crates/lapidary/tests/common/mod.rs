//! Models for the tests of this folder, on either backend.
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod client;
pub mod dense;
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
    Cpu {
        threads: usize,
    },
    #[cfg(feature = "cuda")]
    Cuda,
}

/// Every backend that must give the reference's float32 results, for `for on in EVERY`.
#[derive(Clone, Copy)]
pub struct Every;

/// See [`Every`].
pub const EVERY: Every = Every;

impl IntoIterator for Every {
    type Item = On;
    type IntoIter = std::vec::IntoIter<On>;

    fn into_iter(self) -> Self::IntoIter {
        let mut list = vec![On::Reference, On::Cpu { threads: 1 }, On::Cpu { threads: 2 }];
        #[cfg(feature = "cuda")]
        if gpu_required() {
            // A machine with a GPU is there for its GPU; the others are tested everywhere else.
            list.clear();
        }
        list.extend(gpu());
        list.into_iter()
    }
}

/// Whether `LAPIDARY_REQUIRE_GPU=1` asks for one.
#[cfg(feature = "cuda")]
fn gpu_required() -> bool {
    std::env::var_os("LAPIDARY_REQUIRE_GPU").is_some_and(|v| v == "1")
}

/// A model of published shape with random weights that the GPU makes for itself, cut to `layers`; `options` say of which
/// format.
#[cfg(feature = "cuda")]
pub fn random_on_gpu(
    size: lapidary::synth::Size,
    layers: Option<usize>,
    options: lapidary::LoadOptions,
) -> lapidary::Stepper {
    use lapidary::synth::{Mix, SynthOptions, write};
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("header.gguf");
    let header = SynthOptions { layers, sparse: true, ..SynthOptions::default() };
    write(size, Mix::Bf16, &path, &header, &mut |_, _| {}).expect("the header is written");
    let checkpoint = lapidary::Checkpoint::open(&path).expect("the file opens");
    let options = lapidary::LoadOptions { device: lapidary::Device::Cuda { ordinal: 0 }, ..options };
    lapidary::load_stepper(&checkpoint, &options, &mut |_| {}).expect("it loads")
}

/// The first GPU where there is one and this build can use it.
pub fn gpu() -> Option<On> {
    #[cfg(feature = "cuda")]
    {
        use lapidary_cuda::driver::Context;
        use std::sync::{Arc, LazyLock};
        // Kept for the whole run: the driver takes longer to open a device than most tests do.
        static CONTEXT: LazyLock<Option<Arc<Context>>> = LazyLock::new(|| match Context::new(0) {
            Ok(context) => Some(context),
            Err(e) => {
                assert!(!gpu_required(), "a GPU is required: {e}");
                println!("skipped: {e}");
                None
            }
        });
        if CONTEXT.is_some() {
            return Some(On::Cuda);
        }
    }
    None
}

impl On {
    pub fn backend(self) -> Box<dyn Backend> {
        match self {
            On::Reference => Box::new(ReferenceBackend::new()),
            On::Cpu { threads } => {
                let options = CpuOptions {
                    threads: Some(threads),
                    compute: Compute::F32,
                    level: None,
                    packed_experts: None,
                    stay_in_file: false,
                };
                Box::new(CpuBackend::new(options).expect("the CPU is a device"))
            }
            #[cfg(feature = "cuda")]
            On::Cuda => {
                let options = lapidary_cuda::CudaOptions::default();
                Box::new(lapidary_cuda::CudaBackend::new(options).expect("a GPU was seen"))
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
    let options = BuildOptions { limits, embed_scale: setup.scale, requantise: Default::default() };
    let config = config(&checkpoint);
    let model =
        Model::build(config, &checkpoint, backend.as_mut(), &options, &mut |_| {}).expect("model builds");
    Runner::new(model, backend, [setup.kv; 2], setup.context).expect("pools fit")
}
