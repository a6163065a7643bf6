//! The one place that launches kernels, and what a launch is made of.

use cudarc::driver::sys::{self, CUlaunchAttributeID as Id};

use crate::driver::{self, Kernel, Kernels, Stream};
use crate::error::{Error, Result};

/// The one argument of a kernel, passed by value.
///
/// # Safety
/// The type is `#[repr(C)]` and equals the struct in the `.cu` file field by field: order, width, signedness.
/// `DevPtr` stands for a pointer.
pub unsafe trait Args: Copy {}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Shared memory of a block in bytes, beside what the kernel declares itself.
    pub shared: u32,
    /// Blocks of a cluster, along x; 1 for none.
    pub cluster: u32,
    /// Whether the kernel may start while the one before it finishes. Such a kernel calls
    /// `griddepcontrol.wait` before it reads or writes anything that an earlier kernel touches.
    pub dependent: bool,
}

impl Shape {
    /// `blocks` blocks of `threads`.
    pub const fn new(blocks: u32, threads: u32) -> Shape {
        Shape::grid([blocks, 1, 1], threads)
    }

    /// A grid of blocks of `threads`.
    pub const fn grid(grid: [u32; 3], threads: u32) -> Shape {
        Shape { grid, threads, shared: 0, cluster: 1, dependent: false }
    }

    /// With `bytes` of shared memory.
    pub const fn shared(self, bytes: u32) -> Shape {
        Shape { shared: bytes, ..self }
    }

    /// In clusters of `blocks`.
    pub const fn cluster(self, blocks: u32) -> Shape {
        Shape { cluster: blocks, ..self }
    }

    /// With programmatic dependent launch.
    pub const fn dependent(self) -> Shape {
        Shape { dependent: true, ..self }
    }
}

/// A stream and the kernels to launch in it: what every launcher takes first.
#[derive(Clone, Copy, Debug)]
pub struct Queue<'a> {
    /// Where work goes.
    pub stream: &'a Stream,
    /// Where kernels come from.
    pub kernels: &'a Kernels,
}

impl Queue<'_> {
    /// Queues one kernel. An empty grid is nothing to do.
    ///
    /// # Errors
    /// `NoKernel`; the driver refuses the shape or reports an earlier failure.
    ///
    /// # Safety
    /// `A` is the kernel's argument; every pointer in `args` is what the kernel expects, and stays so until the
    /// work is done; the shape is one that the kernel was written for.
    pub unsafe fn launch<A: Args>(self, kernel: Kernel, shape: Shape, args: &A) -> Result<()> {
        if shape.grid.contains(&0) {
            return Ok(());
        }
        let function = self.kernels.get(kernel)?;
        if shape.shared > function.max_dynamic_shared {
            return Err(Error::Driver {
                call: "cuLaunchKernelEx",
                name: format!("{}::{}", kernel.family, kernel.entry),
                text: format!(
                    "{} bytes of shared memory are wanted, {} are there",
                    shape.shared, function.max_dynamic_shared
                ),
            });
        }
        // SAFETY: all fields of these are plain integers, for which zero is a value.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        if shape.cluster > 1 {
            attributes[count].id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim.x = shape.cluster;
            attributes[count].value.clusterDim.y = 1;
            attributes[count].value.clusterDim.z = 1;
            count += 1;
        }
        if shape.dependent {
            attributes[count].id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid[0],
            gridDimY: shape.grid[1],
            gridDimZ: shape.grid[2],
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared,
            hStream: self.stream.raw(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<std::ffi::c_void>()];
        // SAFETY: the kernel has one parameter of type `A`, which the driver copies; the rest is the caller's.
        unsafe {
            driver::cu!(cuLaunchKernelEx(&config, function.raw, params.as_mut_ptr(), std::ptr::null_mut()))
        }
    }
}
