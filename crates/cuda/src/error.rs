//! What the driver layer can fail with.

/// A failure of the driver or of what was asked of it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    #[error("no NVIDIA driver: its library (libcuda.so.1 or nvcuda.dll) is not on this machine")]
    NoDriver,
    #[error("the NVIDIA driver found no GPU")]
    NoDevice,
    #[error("there is no GPU {ordinal}, the driver lists {count} (0 to {})", count - 1)]
    NoSuchDevice { ordinal: usize, count: usize },
    #[error(
        "the NVIDIA driver supports CUDA {found}, this build needs {needed}: install driver R{branch} or newer"
    )]
    DriverTooOld { found: String, needed: String, branch: u32 },
    #[error("{device} is sm_{arch}, this build has kernels for {built}")]
    Architecture { device: String, arch: u32, built: String },
    #[error("{what} needs {needed} bytes, the device has {available} left")]
    OutOfMemory { what: String, needed: usize, available: usize },
    #[error("{call}: {name}, {text}")]
    Driver { call: &'static str, name: String, text: String },
    #[error("there is no kernel {family}::{entry} in this build")]
    NoKernel { family: String, entry: String },
    #[error("{kernel} does not take this: {what}")]
    Shape { kernel: &'static str, what: String },
}

/// Result of a driver call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<Error> for lapidary_ops::Error {
    fn from(e: Error) -> Self {
        match e {
            Error::OutOfMemory { what, needed, available } => {
                lapidary_ops::Error::OutOfMemory { what, needed, available }
            }
            other => lapidary_ops::Error::Device(other.to_string()),
        }
    }
}
