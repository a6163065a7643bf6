//! The machine code of this build, loaded a family at a time when one of its kernels is first wanted.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};

use super::{Context, cu};
use crate::error::{Error, Result};

/// One file of `kernels/`, compiled.
pub(crate) struct Family {
    name: &'static str,
    image: &'static [u8],
}

/// The driver reads images as 64-bit words.
#[repr(C, align(16))]
struct Image<T>(T);

include!(concat!(env!("OUT_DIR"), "/images.rs"));

pub(super) use ARCHITECTURES as BUILT_FOR;

/// Architectures that this build has machine code for, such as `90a`.
pub fn built_architectures() -> &'static [&'static str] {
    ARCHITECTURES
}

/// Release of the nvcc that compiled the kernels, such as `13.0`.
pub fn toolkit() -> &'static str {
    TOOLKIT
}

/// The name of a kernel: its file without `.cu`, and the function in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// File.
    pub family: &'static str,
    /// Function.
    pub entry: &'static str,
}

impl Kernel {
    /// `entry` of `kernels/family.cu`.
    pub const fn new(family: &'static str, entry: &'static str) -> Kernel {
        Kernel { family, entry }
    }
}

/// A loaded kernel; lives as long as the [`Kernels`] it came from.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    pub(crate) raw: sys::CUfunction,
    /// Shared memory in bytes that a launch may ask for beside what the kernel declares.
    pub max_dynamic_shared: u32,
}

// SAFETY: a handle; the driver locks its own state.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// The kernels of this build on one device.
#[derive(Debug)]
pub struct Kernels {
    context: Arc<Context>,
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    modules: HashMap<&'static str, Module>,
    functions: HashMap<Kernel, Function>,
}

#[derive(Debug)]
struct Module(sys::CUmodule);

// SAFETY: a handle; the driver locks its own state.
unsafe impl Send for Module {}

impl Kernels {
    /// Nothing is loaded yet.
    pub fn new(context: &Arc<Context>) -> Kernels {
        Kernels { context: context.clone(), loaded: Mutex::default() }
    }

    /// The kernel, loading its file if this is the first one of it. Must not be the first while a graph is
    /// recorded.
    ///
    /// # Errors
    /// `NoKernel`, or what the driver says of the image.
    pub fn get(&self, kernel: Kernel) -> Result<Function> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&function) = loaded.functions.get(&kernel) {
            return Ok(function);
        }
        let missing =
            || Error::NoKernel { family: kernel.family.to_string(), entry: kernel.entry.to_string() };
        self.context.bind()?;
        if !loaded.modules.contains_key(kernel.family) {
            let family = FAMILIES.iter().find(|f| f.name == kernel.family && !f.image.is_empty());
            let family = family.ok_or_else(missing)?;
            let mut raw = std::ptr::null_mut();
            // SAFETY: the image is what nvcc wrote, aligned; the driver writes one handle.
            unsafe { cu!(cuModuleLoadData(&mut raw, family.image.as_ptr().cast()))? };
            loaded.modules.insert(family.name, Module(raw));
        }
        let module = loaded.modules[kernel.family].0;
        let entry = CString::new(kernel.entry).map_err(|_| missing())?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends in a zero; the driver writes one handle, one number.
        let function = unsafe {
            match sys::cuModuleGetFunction(&mut raw, module, entry.as_ptr()) {
                sys::CUresult::CUDA_ERROR_NOT_FOUND => return Err(missing()),
                code => super::check("cuModuleGetFunction", code)?,
            }
            let mut fixed = 0;
            cu!(cuFuncGetAttribute(&mut fixed, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, raw))?;
            let most = self.context.info.shared_per_block.saturating_sub(fixed as u32);
            let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            cu!(cuFuncSetAttribute(raw, dynamic, most as i32))?;
            if kernel.family.ends_with("_sm90") {
                // Clusters of 16 blocks, which only Hopper and later know.
                let large = Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
                cu!(cuFuncSetAttribute(raw, large, 1))?;
            }
            Function { raw, max_dynamic_shared: most }
        };
        loaded.functions.insert(kernel, function);
        Ok(function)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        for module in loaded.modules.values() {
            // SAFETY: loaded in `get`; the owner of this has waited for what it launched.
            unsafe {
                let _ = cu!(cuModuleUnload(module.0));
            }
        }
    }
}
