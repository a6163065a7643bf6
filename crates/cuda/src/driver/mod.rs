//! A thin typed layer over the CUDA driver: what owns what, and nothing about models.
//!
//! Every object keeps the [`Context`] alive that it lives in. Nothing here waits unless its name says so, and
//! everything that fails names the driver call. The driver's library is loaded at the first
//! [`Context::new`]; a machine without one gets [`Error::NoDriver`](crate::Error::NoDriver).

mod context;
mod graph;
mod memory;
mod module;
mod staging;
mod stream;

pub use context::{Context, DeviceInfo, driver_version, toolkit_needs};
pub use graph::Graph;
pub use memory::{Arena, Block, DevPtr, Pinned};
pub use module::{Function, Kernel, Kernels, built_architectures, toolkit};
pub use staging::Staging;
pub(crate) use staging::copy_in_parallel;
pub use stream::{Event, Stream};

use std::ffi::CStr;

use cudarc::driver::sys;

use crate::error::{Error, Result};

/// Calls a driver function and names it in the error.
macro_rules! cu {
    ($f:ident ( $($arg:expr),* $(,)? )) => {
        $crate::driver::check(stringify!($f), cudarc::driver::sys::$f($($arg),*))
    };
}
pub(crate) use cu;

/// `Ok` for success, otherwise what the driver says about the code.
pub(crate) fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |of: unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver stores a pointer to a static string, or null for a code that it does not know.
        unsafe {
            of(code, &mut text);
            match text.is_null() {
                true => format!("code {}", code as u32),
                false => CStr::from_ptr(text).to_string_lossy().into_owned(),
            }
        }
    };
    Err(Error::Driver { call, name: text(sys::cuGetErrorName), text: text(sys::cuGetErrorString) })
}
