//! What a model can run on, and what is known of it before anything is loaded.

use std::fmt;
use std::str::FromStr;

use lapidary_cpu::{Compute, CpuBackend, CpuOptions, footprint};
use lapidary_formats::Format;
use lapidary_ops::{ActSpec, Backend};

use crate::check::Finding;
#[cfg(feature = "cuda")]
use crate::check::Level;
use crate::error::Result;
use crate::options::LoadOptions;

/// A device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by the number that the driver gives it. Builds without feature `cuda` refuse it by name.
    Cuda {
        /// From 0.
        ordinal: usize,
    },
}

/// `cpu`, `cuda`, `cuda:1`.
impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Device::Cpu),
            None if text == "cuda" => Ok(Device::Cuda { ordinal: 0 }),
            Some(("cuda", n)) if n.parse::<u16>().is_ok() => {
                Ok(Device::Cuda { ordinal: n.parse().expect("it is a smaller number") })
            }
            _ => Err(format!("`{text}` is no device: expected cpu, cuda or cuda:N")),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl Device {
    /// The backend that runs a model as `options` ask.
    ///
    /// # Errors
    /// A device that is not there, that this build knows nothing of, or that cannot do what is asked.
    pub(crate) fn backend(self, options: &LoadOptions) -> Result<Box<dyn Backend>> {
        match self {
            Device::Cpu => {
                let cpu = CpuOptions {
                    threads: options.threads,
                    compute: options.compute,
                    level: options.level,
                    packed_experts: options.packed_experts,
                    stay_in_file: options.stay_in_file,
                };
                Ok(Box::new(CpuBackend::new(cpu)?))
            }
            #[cfg(feature = "cuda")]
            Device::Cuda { ordinal } => {
                let compute = match options.compute {
                    Compute::F32 => lapidary_cuda::Compute::F32,
                    Compute::Fast => lapidary_cuda::Compute::Fast,
                };
                let cuda = lapidary_cuda::CudaOptions {
                    ordinal,
                    compute,
                    random_weights: options.random_weights,
                    tables_on_host: options.tables_on_host,
                    ..lapidary_cuda::CudaOptions::default()
                };
                Ok(Box::new(lapidary_cuda::CudaBackend::new(cuda)?))
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda { .. } => Err(lapidary_ops::Error::Unsupported {
                device: self.to_string(),
                what: "this program was built without CUDA (feature `cuda`)".into(),
            }
            .into()),
        }
    }

    /// Bytes that are free for a model; `None` where nobody can tell.
    pub fn available(self) -> Option<u64> {
        match self {
            Device::Cpu => crate::host::memory().available,
            #[cfg(feature = "cuda")]
            Device::Cuda { ordinal } => {
                let context = lapidary_cuda::driver::Context::new(ordinal).ok()?;
                context.free_bytes().ok().map(|b| b as u64)
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda { .. } => None,
        }
    }

    /// Bytes a second that the device reads of its own memory. The processor's is for
    /// [`read_bandwidth`](crate::bandwidth::read_bandwidth) to measure.
    ///
    /// # Errors
    /// `Unsupported` for the processor and for a device that is not there.
    pub fn read_bandwidth(self) -> Result<f64> {
        let unsupported = |what: String| lapidary_ops::Error::Unsupported { device: self.to_string(), what };
        match self {
            #[cfg(feature = "cuda")]
            Device::Cuda { ordinal } => {
                let context = lapidary_cuda::driver::Context::new(ordinal);
                let context = context.map_err(|e| unsupported(e.to_string()))?;
                let bytes = (context.free_bytes().map_err(lapidary_ops::Error::from)? / 2).min(4 << 30);
                let measured = lapidary_cuda::kernels::bandwidth::measure(&context, bytes);
                Ok(measured.map_err(lapidary_ops::Error::from)?)
            }
            _ => Err(unsupported("measuring the memory of a GPU".into()).into()),
        }
    }

    /// What `check` says of the device alone: nothing of the processor, whose findings are the host's.
    pub fn findings(self) -> Vec<Finding> {
        match self {
            Device::Cpu => Vec::new(),
            #[cfg(feature = "cuda")]
            Device::Cuda { ordinal } => cuda_findings(ordinal),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda { .. } => {
                let what = "this program was built without CUDA: take one that was, or --device cpu";
                vec![Finding::new(crate::check::Level::Fail, "gpu", what)]
            }
        }
    }

    /// Bytes of an activation buffer.
    pub(crate) fn activation_bytes(self, spec: &ActSpec, compute: Compute) -> usize {
        match self {
            Device::Cpu => footprint::activation_bytes(spec, compute),
            #[cfg(feature = "cuda")]
            Device::Cuda { .. } => lapidary_cuda::footprint::activation_bytes(spec, compute == Compute::Fast),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda { .. } => 0,
        }
    }

    /// Bytes of a matrix in packed form; `None` for one that stays in the bytes of its file.
    pub(crate) fn packed_bytes(
        self,
        format: Format,
        rows: usize,
        cols: usize,
        compute: Compute,
    ) -> Option<usize> {
        match self {
            Device::Cpu => footprint::packed_bytes(format, rows, cols, compute),
            #[cfg(feature = "cuda")]
            Device::Cuda { .. } => {
                (compute == Compute::Fast).then(|| lapidary_cuda::footprint::packed_bytes(format, rows, cols))
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda { .. } => None,
        }
    }

    /// Whether an embedding in `format` that is also the head is kept twice, for look-ups and for products: single rows
    /// are read from what is packed for products only in bf16 and FP8.
    pub(crate) fn keeps_tied_twice(self, compute: Compute, format: Format) -> bool {
        let packed = matches!(self, Device::Cuda { .. }) && compute == Compute::Fast;
        packed && !matches!(format, Format::Bf16 | Format::Fp8E4M3)
    }

    /// Bytes of a float32 copy of a matrix that is small enough to be a router, beside its packed form.
    pub(crate) fn float_copy_bytes(self, rows: usize, cols: usize, compute: Compute) -> usize {
        match self {
            #[cfg(feature = "cuda")]
            Device::Cuda { .. } if compute == Compute::Fast => {
                lapidary_cuda::footprint::float_copy_bytes(rows, cols)
            }
            _ => {
                let _ = (rows, cols, compute);
                0
            }
        }
    }

    /// Bytes that kernels keep between them, and the driver for them: for passes of `rows` whose queries and widest
    /// product are as wide as given.
    pub(crate) fn kernel_bytes(self, rows: usize, queries: usize, widest: usize) -> usize {
        match self {
            Device::Cpu => 0,
            #[cfg(feature = "cuda")]
            Device::Cuda { .. } => lapidary_cuda::footprint::kernel_bytes(rows, queries, widest),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda { .. } => rows.saturating_mul(queries + widest),
        }
    }

    /// Bytes of the intermediate values of routed experts.
    pub(crate) fn experts_bytes(
        self,
        rows: usize,
        top_k: usize,
        width: usize,
        hidden: usize,
        compute: Compute,
    ) -> usize {
        match self {
            Device::Cpu => footprint::experts_bytes(rows, top_k, width, hidden, compute),
            Device::Cuda { .. } => rows.saturating_mul(top_k).saturating_mul((3 * width + hidden) * 4 + 4),
        }
    }
}

/// The driver, the device, and a kernel that is really launched.
#[cfg(feature = "cuda")]
fn cuda_findings(ordinal: usize) -> Vec<Finding> {
    use lapidary_cuda::driver::{Context, built_architectures, driver_version, toolkit, toolkit_needs};

    let mut findings = Vec::new();
    let level = |v: u32| format!("{}.{}", v / 1000, v % 1000 / 10);
    let (needed, branch) = toolkit_needs();
    let archs: Vec<String> = built_architectures().iter().map(|a| format!("sm_{a}")).collect();
    let built = format!(
        "kernels were compiled by nvcc {} for {}: drivers from R{branch} (CUDA {}) run them, with no toolkit installed",
        toolkit(),
        archs.join(", "),
        level(needed)
    );
    match driver_version() {
        Ok(found) => {
            let ok = if found >= needed { Level::Ok } else { Level::Fail };
            findings.push(Finding::new(ok, "driver", format!("supports CUDA {}; {built}", level(found))));
        }
        Err(e) => {
            findings.push(Finding::new(Level::Fail, "driver", format!("{e}; {built}")));
            return findings;
        }
    }
    let context = match Context::new(ordinal) {
        Ok(context) => context,
        Err(e) => {
            findings.push(Finding::failed("gpu", &e));
            return findings;
        }
    };
    let info = &context.info;
    let gib = |bytes: usize| format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64);
    let free = context.free_bytes().map_or("unknown".into(), gib);
    findings.push(Finding::new(
        Level::Ok,
        "gpu",
        format!(
            "{}: {}, sm_{}, {} multiprocessors, {free} free of {}",
            info.ordinal,
            info.name,
            info.arch,
            info.multiprocessors,
            gib(info.total_bytes)
        ),
    ));
    findings.push(match lapidary_cuda::kernels::probe::probe(&context) {
        Ok(()) => Finding::new(Level::Ok, "launch", "a kernel ran and its results are right"),
        Err(e) => Finding::failed("launch", &e),
    });
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_by_name() {
        assert_eq!("cpu".parse(), Ok(Device::Cpu));
        assert_eq!("cuda".parse(), Ok(Device::Cuda { ordinal: 0 }));
        assert_eq!("cuda:3".parse(), Ok(Device::Cuda { ordinal: 3 }));
        for bad in ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", ""] {
            assert!(bad.parse::<Device>().unwrap_err().contains("cpu, cuda or cuda:N"), "{bad}");
        }
        for device in [Device::Cpu, Device::Cuda { ordinal: 2 }] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_without_cuda_says_so() {
        let device = Device::Cuda { ordinal: 0 };
        let error = device.backend(&LoadOptions::default()).unwrap_err().to_string();
        assert!(error.contains("built without CUDA"), "{error}");
        assert_eq!(device.findings()[0].level, crate::check::Level::Fail);
    }
}
