//! The flags that commands share: which model, how it is loaded, how tokens are chosen.

use std::ffi::OsString;

use clap::{Args, ValueEnum};
use lapidary::{Compute, Device, EmbedScale, KvFormat, Level, LoadOptions, Requantise};

/// Longest context that can be asked for; every byte count of it fits 64 bits.
const MAX_CONTEXT: i64 = 1 << 24;

/// Which model.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// The model: a folder, a .gguf file, or owner/name[:quant] from the hub; the built-in one when not given
    #[arg(short = 'm', long = "model", value_name = "MODEL")]
    pub model: Option<OsString>,
    #[command(flatten)]
    pub store: StoreArgs,
}

/// Where models by name come from.
#[derive(Clone, Copy, Debug, Args)]
pub struct StoreArgs {
    /// Use downloaded models only, never the network
    #[arg(long)]
    pub offline: bool,
}

/// How a model is loaded.
#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    /// Tokens of context; the model's own limit, at most 8192, when not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_CONTEXT as u64))]
    pub ctx: Option<u64>,
    /// Worker threads; as many as cores may be used when not given
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Most prompt tokens in one batch
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub chunk: u32,
}

/// What a model runs on, and in which number types.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// The device to run on: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t = Device::Cpu, value_parser = str::parse::<Device>)]
    pub device: Device,
    /// Element type of stored keys and values; when not given f32 with f32 arithmetic, otherwise bf16 on a GPU and on
    /// processors that multiply bf16, f16 on others
    #[arg(long, value_enum)]
    pub kv: Option<KvArg>,
    /// Instruction set to use at most, for comparisons; the best of this processor when not given
    #[arg(long, value_enum)]
    pub level: Option<LevelArg>,
    /// Replaces the model's final logit softcap
    #[arg(long, value_name = "CAP", value_parser = softcap)]
    pub final_softcap: Option<f32>,
    /// Quantise the layers' matrices of a plain (bf16, f16, f32) model while it is loaded, as `convert` would
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub weights: Option<WeightsArg>,
    /// Quantise embedding and output head of a plain model while it is loaded
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub head: Option<HeadArg>,
    /// Most memory of a GPU to plan with, such as 20GiB; what is free when not given
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_vram: Option<u64>,
    /// Take the longest context that fits where the wanted one does not, but none shorter than this
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_CONTEXT))]
    pub min_ctx: Option<u32>,
    /// Load even if the memory plan exceeds the free memory
    #[arg(long)]
    pub ignore_memory: bool,
    /// Most memory of the processor to plan with, such as 20GiB; what is free when not given. Experts that are too many for
    /// it stay in the file and are read from it as they are chosen
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with = "ignore_memory")]
    pub max_memory: Option<u64>,
}

/// Bytes, or a number with one of the units that reports use.
fn size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let unit: u64 = match text[split..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        _ => return Err("expected bytes, or a number with KiB, MiB or GiB".into()),
    };
    match text[..split].trim().parse::<f64>() {
        Ok(n) if n > 0.0 && n * unit as f64 <= 1e18 => Ok((n * unit as f64) as u64),
        _ => Err("expected a number above 0, such as 20GiB".into()),
    }
}

fn softcap(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(cap) if cap.is_finite() && cap > 0.0 => Ok(cap),
        _ => Err("expected a finite number above 0".into()),
    }
}

/// Which arithmetic, where a command leaves the choice to its user.
#[derive(Clone, Copy, Debug, Args)]
pub struct ComputeFlag {
    /// Arithmetic: f32 is exact, fast multiplies with quantised activations
    #[arg(long, value_enum, default_value_t = ComputeArg::of(LoadOptions::default().compute))]
    pub compute: ComputeArg,
}

/// Arithmetic modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ComputeArg {
    /// True float32
    F32,
    /// Quantised activations
    Fast,
}

impl ComputeArg {
    /// The flag's name for it.
    pub fn of(compute: Compute) -> ComputeArg {
        match compute {
            Compute::F32 => ComputeArg::F32,
            Compute::Fast => ComputeArg::Fast,
        }
    }

    /// The library's name for it.
    pub fn compute(self) -> Compute {
        match self {
            ComputeArg::F32 => Compute::F32,
            ComputeArg::Fast => Compute::Fast,
        }
    }

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            ComputeArg::F32 => "f32",
            ComputeArg::Fast => "fast",
        }
    }
}

/// Element types of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvArg {
    /// float32
    F32,
    /// bfloat16
    Bf16,
    /// float16
    F16,
    /// Blocks of 32 signed bytes with a scale
    #[value(name = "q8_0")]
    Q8_0,
    /// FP8 E4M3 under scales of each layer's own; on a GPU
    Fp8,
}

impl KvArg {
    /// The library's name for it.
    pub fn format(self) -> KvFormat {
        match self {
            KvArg::F32 => KvFormat::F32,
            KvArg::Bf16 => KvFormat::Bf16,
            KvArg::F16 => KvFormat::F16,
            KvArg::Q8_0 => KvFormat::Q8_0,
            KvArg::Fp8 => KvFormat::Fp8,
        }
    }
}

/// Formats that weights can be quantised to at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WeightsArg {
    /// FP8 E4M3 with a scale a row
    Fp8,
    /// NVFP4
    Nvfp4,
    /// Q8_0, the embedding included
    #[value(name = "q8_0")]
    Q8_0,
}

/// Formats that embedding and head can be quantised to at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HeadArg {
    /// FP8 E4M3 with a scale a row
    Fp8,
}

/// Instruction sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LevelArg {
    /// Plain code for any processor
    Scalar,
    /// Any aarch64
    Neon,
    /// aarch64 with dot products of bytes
    NeonDotprod,
    /// aarch64 with products of matrices of bytes
    NeonI8mm,
    /// AVX2 with FMA
    Avx2,
    /// AVX2 with AVX-VNNI
    AvxVnni,
    /// AVX-512
    Avx512,
}

impl LevelArg {
    /// The library's name for it.
    pub fn level(self) -> Level {
        match self {
            LevelArg::Scalar => Level::Scalar,
            LevelArg::Neon => Level::Neon,
            LevelArg::NeonDotprod => Level::NeonDot,
            LevelArg::NeonI8mm => Level::NeonI8mm,
            LevelArg::Avx2 => Level::Avx2,
            LevelArg::AvxVnni => Level::AvxVnni,
            LevelArg::Avx512 => Level::Avx512,
        }
    }
}

/// Embedding scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScaleArg {
    /// Rounded to bfloat16, as the reference serves bf16 weights
    Bf16,
    /// Unrounded
    F32,
}

impl ScaleArg {
    /// The library's name for it.
    pub fn scale(self) -> EmbedScale {
        match self {
            ScaleArg::Bf16 => EmbedScale::Bf16,
            ScaleArg::F32 => EmbedScale::F32,
        }
    }
}

impl DeviceArgs {
    fn requantise(&self) -> Requantise {
        let weights = match self.weights {
            None => Requantise::default(),
            Some(WeightsArg::Fp8) => Requantise::fp8(),
            Some(WeightsArg::Nvfp4) => Requantise::nvfp4(),
            Some(WeightsArg::Q8_0) => Requantise::q8_0(),
        };
        match self.head {
            None => weights,
            Some(HeadArg::Fp8) => weights.with_fp8_head(),
        }
    }

    /// The choices as the library takes them.
    pub fn options(&self, compute: ComputeArg) -> LoadOptions {
        LoadOptions {
            device: self.device,
            compute: compute.compute(),
            kv: self.kv.map(KvArg::format),
            level: self.level.map(LevelArg::level),
            final_softcap: self.final_softcap,
            requantise: self.requantise(),
            ..LoadOptions::default()
        }
    }
}

impl LoadArgs {
    /// The choices as the library takes them.
    pub fn options(&self, compute: ComputeArg) -> LoadOptions {
        LoadOptions {
            context: self.ctx.map(|c| c as usize),
            chunk: self.chunk as usize,
            threads: self.threads.map(usize::from),
            ..self.device.options(compute)
        }
    }
}
