//! What a caller chooses at load and per answer.

use std::sync::Arc;

pub use lapidary_cpu::{Compute, Level};
use lapidary_engine::sampling::SamplingParams;
use lapidary_model::{Config, EmbedScale, Requantise};
use lapidary_ops::{Format, KvFormat};

use crate::device::Device;

use crate::capture::CaptureSpec;
use crate::steering::Steering;
use crate::trace::TraceOptions;

/// Choices at load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Positions of the single sequence; the model's own limit, at most 8192, when not given.
    pub context: Option<usize>,
    /// Rows of one batch: the largest prefill chunk.
    pub chunk: usize,
    /// Rows of one batch whose logits may be wanted.
    pub head_rows: usize,
    /// Workers; the cores that the process may really use when not given.
    pub threads: Option<usize>,
    /// Arithmetic: true float32, or quantised activations.
    pub compute: Compute,
    /// Element type of keys and values; float32 in the float32 mode when not given, otherwise bf16 on a GPU and on
    /// processors that multiply bf16, f16 on others.
    pub kv: Option<KvFormat>,
    /// How embeddings are scaled.
    pub embed_scale: EmbedScale,
    /// Replaces the checkpoint's final softcap.
    pub final_softcap: Option<f32>,
    /// Forces the instruction set down, for tests and emergencies.
    pub level: Option<Level>,
    /// Matrices of experts that are packed and resident on the processor, two a layer from the first layer on; the later
    /// ones stay in the file, and what a token chooses of them is paged in.
    /// [`MemoryPlan::packed_experts`](crate::plan::MemoryPlan::packed_experts) knows how many fit; all when not given.
    pub packed_experts: Option<usize>,
    /// Leaves F32, F16, BF16 and FP8 weights in the file's pages, which the system can take back and read again, on the
    /// processor. In memory of their own they are read faster, but a model that is larger than memory has no room there.
    pub stay_in_file: bool,
    /// Keeps tables of which a token reads one row in the host's memory, where a GPU fetches the rows.
    /// [`MemoryPlan::host_tables`](crate::plan::MemoryPlan::host_tables) is set where its own memory is too small.
    pub tables_on_host: bool,
    /// What the model runs on.
    pub device: Device,
    /// Formats that plain matrices get while they are loaded.
    pub requantise: Requantise,
    /// Puts random values of this format in the place of every matrix, so that speed can be measured without a
    /// checkpoint; on a GPU only.
    pub random_weights: Option<Format>,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            context: None,
            chunk: 512,
            head_rows: 16,
            threads: None,
            compute: Compute::Fast,
            kv: None,
            embed_scale: EmbedScale::Auto,
            final_softcap: None,
            level: None,
            packed_experts: None,
            stay_in_file: false,
            tables_on_host: false,
            device: Device::Cpu,
            requantise: Requantise::default(),
            random_weights: None,
        }
    }
}

/// Context when none is asked for: the model's own limit, but no more than this.
pub const DEFAULT_CONTEXT: usize = 8192;

impl LoadOptions {
    /// The context for a model.
    pub fn context_for(&self, config: &Config) -> usize {
        self.context.unwrap_or(config.max_positions.min(DEFAULT_CONTEXT))
    }

    /// The element type of keys and values.
    pub fn kv_format(&self) -> KvFormat {
        self.kv.unwrap_or(match (self.compute, self.device) {
            (Compute::F32, _) => KvFormat::F32,
            (Compute::Fast, Device::Cpu) => lapidary_cpu::native_kv(self.level),
            (Compute::Fast, Device::Cuda { .. }) => KvFormat::Bf16,
        })
    }
}

/// Choices per answer.
#[derive(Clone, Debug)]
pub struct AnswerOptions {
    /// How tokens are chosen; [`Gemma::defaults`](crate::Gemma::defaults) has the checkpoint's own choice.
    pub sampling: SamplingParams,
    /// Most tokens.
    pub max_tokens: usize,
    /// Goes on after a token that would end the answer.
    pub ignore_eos: bool,
    /// Edits of the residual stream, for all rows of prompt and answer.
    pub steering: Option<Arc<Steering>>,
    /// Activations to copy out; [`Answer::recording`](crate::Answer::recording) has them.
    pub capture: Option<CaptureSpec>,
    /// What to note of each token; [`Answer::traces`](crate::Answer::traces) has it.
    pub trace: Option<TraceOptions>,
}
