//! Recorded work that is launched as a whole.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, Stream, cu};
use crate::error::Result;

/// Work that was recorded from a stream, ready to be launched any number of times.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    exec: sys::CUgraphExec,
    nodes: usize,
}

// SAFETY: the driver locks its own state; a graph is launched by its one owner.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `record` queues in `stream` (and in streams that join it) instead of doing it.
    ///
    /// Nothing may be allocated, loaded or waited for meanwhile. After an error of `record` the stream is as
    /// before.
    pub fn record(stream: &Stream, record: impl FnOnce() -> Result<()>) -> Result<Graph> {
        stream.context().bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        unsafe { cu!(cuStreamBeginCapture_v2(stream.raw(), mode))? };
        let recorded = record();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture began above; it ends whatever `record` said.
        let ended = unsafe { cu!(cuStreamEndCapture(stream.raw(), &mut graph)) };
        let result = recorded.and(ended).and_then(|()| {
            let (mut exec, mut nodes) = (std::ptr::null_mut(), 0);
            // SAFETY: the capture left a valid graph; the driver writes a handle and a number.
            unsafe {
                cu!(cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes))?;
                cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
                cu!(cuGraphUpload(exec, stream.raw()))?;
            }
            Ok(Graph { context: stream.context().clone(), exec, nodes })
        });
        if !graph.is_null() {
            // SAFETY: the executable graph is a copy.
            unsafe {
                let _ = cu!(cuGraphDestroy(graph));
            }
        }
        result
    }

    /// Nodes, most of them kernels.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Queues the work.
    ///
    /// # Safety
    /// Everything that the recorded work points to is alive until it is done.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { cu!(cuGraphLaunch(self.exec, stream.raw())) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: instantiated in `record`.
            unsafe {
                let _ = cu!(cuGraphExecDestroy(self.exec));
            }
        }
    }
}
