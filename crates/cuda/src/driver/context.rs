//! A GPU and its primary context.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::cu;
use super::module::{BUILT_FOR, TOOLKIT};
use crate::error::{Error, Result};

/// What is known of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Which of the driver's devices.
    pub ordinal: usize,
    /// The device's own name.
    pub name: String,
    /// Compute capability, 90 for 9.0.
    pub arch: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that one block can have when it asks, in bytes.
    pub shared_per_block: u32,
    /// Second-level cache in bytes.
    pub l2_bytes: usize,
    /// Memory of the device in bytes.
    pub total_bytes: usize,
    /// The newest CUDA that the driver supports, 12080 for 12.8.
    pub driver: u32,
}

/// A GPU's primary context, retained. Work and memory belong to it.
pub struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    /// What the device is.
    pub info: DeviceInfo,
}

// SAFETY: a context may be used from any thread; `bind` makes it current where it is used.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Context {}

/// The newest CUDA that the installed driver supports, 12080 for 12.8.
///
/// # Errors
/// `NoDriver`.
pub fn driver_version() -> Result<u32> {
    // SAFETY: only looks for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the driver writes one integer. Allowed before `cuInit`.
    unsafe { cu!(cuDriverGetVersion(&mut version))? };
    Ok(version as u32)
}

/// The lowest CUDA level of a driver, and the driver branch that has it, for machine code of this build's nvcc:
/// within one major version newer compilers' code runs on the first driver of that version.
pub fn toolkit_needs() -> (u32, u32) {
    match TOOLKIT.split('.').next() {
        Some("12") => (12000, 525),
        _ => (13000, 580),
    }
}

impl Context {
    /// Retains the primary context of device `ordinal` and makes it current on this thread.
    ///
    /// # Errors
    /// `NoDriver`, `NoDevice`, `NoSuchDevice`, `DriverTooOld` for a driver that cannot load this build's kernels,
    /// `Architecture` for a device that none of them was compiled for.
    pub fn new(ordinal: usize) -> Result<Arc<Context>> {
        let driver = driver_version()?;
        let (needed, branch) = toolkit_needs();
        if driver < needed {
            let level = |v: u32| format!("{}.{}", v / 1000, v % 1000 / 10);
            return Err(Error::DriverTooOld { found: level(driver), needed: level(needed), branch });
        }
        // SAFETY: the driver is present; each call writes the one value that it is given a place for.
        unsafe {
            match sys::cuInit(0) {
                sys::CUresult::CUDA_ERROR_NO_DEVICE => return Err(Error::NoDevice),
                code => super::check("cuInit", code)?,
            }
            let mut count = 0;
            cu!(cuDeviceGetCount(&mut count))?;
            let count = count as usize;
            if count == 0 {
                return Err(Error::NoDevice);
            }
            if ordinal >= count {
                return Err(Error::NoSuchDevice { ordinal, count });
            }
            let mut device = 0;
            cu!(cuDeviceGet(&mut device, ordinal as i32))?;
            let info = info(device, ordinal, driver)?;
            if !BUILT_FOR.iter().any(|built| runs(built, info.arch)) {
                let built: Vec<_> = BUILT_FOR.iter().map(|a| format!("sm_{a}")).collect();
                return Err(Error::Architecture {
                    device: info.name,
                    arch: info.arch,
                    built: built.join(", "),
                });
            }
            let mut raw = std::ptr::null_mut();
            cu!(cuDevicePrimaryCtxRetain(&mut raw, device))?;
            let context = Context { device, raw, info };
            context.bind()?;
            Ok(Arc::new(context))
        }
    }

    /// Makes the context current on the calling thread. Cheap when it already is.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained.
        unsafe { cu!(cuCtxSetCurrent(self.raw)) }
    }

    /// Bytes free on the device.
    pub fn free_bytes(&self) -> Result<usize> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two numbers.
        unsafe { cu!(cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok(free)
    }
}

/// Whether code for architecture `built` runs on a device of `arch`: `90a` on 9.0 alone, `80` on every 8.x and,
/// by the PTX that goes with it, on everything newer; another plain number on its own major version from there up.
fn runs(built: &str, arch: u32) -> bool {
    let number: u32 = built.trim_end_matches('a').parse().unwrap_or(u32::MAX);
    match built {
        "80" => arch >= 80,
        _ if built.ends_with('a') => arch == number,
        _ => arch >= number && arch / 10 == number / 10,
    }
}

/// # Safety
/// The driver is initialised and has this device.
unsafe fn info(device: sys::CUdevice, ordinal: usize, driver: u32) -> Result<DeviceInfo> {
    let attribute = |which| -> Result<u32> {
        let mut value = 0;
        // SAFETY: the driver writes one integer.
        unsafe { cu!(cuDeviceGetAttribute(&mut value, which, device))? };
        Ok(value as u32)
    };
    let mut name = [0u8; 128];
    let mut total = 0;
    // SAFETY: the driver writes at most the length it is told, and one number.
    unsafe {
        cu!(cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device))?;
        cu!(cuDeviceTotalMem_v2(&mut total, device))?;
    }
    let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
    Ok(DeviceInfo {
        ordinal,
        name: String::from_utf8_lossy(&name[..end]).into_owned(),
        arch: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        total_bytes: total,
        driver,
    })
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `new`; everything that lives in it holds an `Arc` of it and is gone.
        unsafe {
            let _ = cu!(cuDevicePrimaryCtxRelease_v2(self.device));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_run_where_nvidia_says() {
        assert!(runs("90a", 90) && !runs("90a", 100) && !runs("90a", 89));
        assert!(runs("80", 80) && runs("80", 89) && runs("80", 120));
        assert!(runs("89", 89) && !runs("89", 86) && !runs("89", 90));
    }
}
