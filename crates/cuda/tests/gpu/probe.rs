//! The device runs this build's machine code at all.

use lapidary_cuda::driver::{Context, DevPtr, Graph, Kernel, Kernels, Stream};
use lapidary_cuda::kernels::probe::probe;
use lapidary_cuda::{Error, launch};

use crate::gpu;

#[test]
fn the_probe_runs() {
    let Some(context) = gpu() else { return };
    println!("{:?}", context.info);
    probe(&context).unwrap();
}

#[test]
fn what_is_not_there_fails_by_name() {
    let Some(context) = gpu() else { return };
    assert!(matches!(Context::new(4711), Err(Error::NoSuchDevice { ordinal: 4711, .. })));
    let kernels = Kernels::new(&context);
    let missing = kernels.get(Kernel::new("probe", "nothing")).unwrap_err();
    assert_eq!(missing.to_string(), "there is no kernel probe::nothing in this build");
    let huge = lapidary_cuda::driver::Block::new(&context, "a test of the limit", 1 << 50).unwrap_err();
    assert!(matches!(huge, Error::OutOfMemory { needed, .. } if needed == 1 << 50), "{huge}");
}

#[test]
fn a_recording_that_fails_leaves_the_stream_usable() {
    let Some(context) = gpu() else { return };
    let (stream, kernels) = (Stream::new(&context).unwrap(), Kernels::new(&context));
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Nothing(DevPtr);
    // SAFETY: never launched, its kernel does not exist.
    unsafe impl launch::Args for Nothing {}
    let failed = Graph::record(&stream, || {
        let queue = launch::Queue { stream: &stream, kernels: &kernels };
        let shape = launch::Shape::new(1, 32);
        // SAFETY: there is no such kernel.
        unsafe { queue.launch(Kernel::new("none", "none"), shape, &Nothing(DevPtr::NULL)) }
    });
    assert!(matches!(failed, Err(Error::NoKernel { .. })));
    stream.wait().unwrap();
    probe(&context).unwrap();
}
