//! A kernel that does next to nothing, to see that the device runs this build's code.

use crate::driver::{Block, Context, DevPtr, Kernel, Kernels, Stream};
use crate::error::{Error, Result};
use crate::launch::{Args, Queue, Shape};

const PROBE: Kernel = Kernel::new("probe", "probe");
const VALUES: usize = 1000;
const THREADS: u32 = 128;

#[derive(Clone, Copy)]
#[repr(C)]
struct ProbeArgs {
    x: DevPtr,
    y: DevPtr,
    n: i32,
}

// SAFETY: mirrors `ProbeArgs` in kernels/probe.cu.
unsafe impl Args for ProbeArgs {}

/// Computes `2 x + 1` for a thousand values on the device and compares.
///
/// # Errors
/// Whatever the driver says on the way; `Driver` when a value differs.
pub fn probe(context: &std::sync::Arc<Context>) -> Result<()> {
    let bytes = VALUES * size_of::<f32>();
    let memory = Block::new(context, "a test launch", 2 * bytes)?;
    let (stream, kernels) = (Stream::new(context)?, Kernels::new(context));
    let x: Vec<u8> = (0..VALUES).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let mut y = vec![0; bytes];
    let args = ProbeArgs { x: memory.ptr(), y: memory.ptr().at(bytes), n: VALUES as i32 };
    let queue = Queue { stream: &stream, kernels: &kernels };
    let blocks = (VALUES as u32).div_ceil(THREADS);
    // SAFETY: both halves of the memory are `bytes` long, and the wait comes before anything is dropped.
    unsafe {
        stream.upload(args.x, &x)?;
        queue.launch(PROBE, Shape::new(blocks, THREADS), &args)?;
        stream.download(&mut y, args.y)?;
    }
    stream.wait()?;
    let right =
        y.as_chunks::<4>().0.iter().enumerate().all(|(i, &v)| f32::from_le_bytes(v) == (2 * i + 1) as f32);
    match right {
        true => Ok(()),
        false => Err(Error::Driver {
            call: "probe",
            name: "wrong result".into(),
            text: "the device computes something else than the kernel says".into(),
        }),
    }
}
