//! Streams and events: the order of work on the device, and copies.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{Context, DevPtr, cu};
use crate::error::Result;

/// A queue of work on the device.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: the driver locks its own state; any thread may queue work.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that waits for no other.
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes one handle.
        unsafe { cu!(cuStreamCreate(&mut raw, flags))? };
        Ok(Stream { context: context.clone(), raw })
    }

    /// The context that it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits until everything queued here is done; a failure of any of it is reported here.
    pub fn wait(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the stream is alive.
        unsafe { cu!(cuStreamSynchronize(self.raw)) }
    }

    /// Queues a copy to the device. From pinned memory it happens later; from any other memory the driver has
    /// read `from` when this returns.
    ///
    /// # Safety
    /// `to` has room for `from`. Pinned memory stays as it is until the copy is done.
    pub unsafe fn upload(&self, to: DevPtr, from: &[u8]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { cu!(cuMemcpyHtoDAsync_v2(to.0, from.as_ptr().cast(), from.len(), self.raw)) }
    }

    /// Queues a copy to the host.
    ///
    /// # Safety
    /// `from` has `to.len()` bytes; `to` is used by nobody, and lives, until the copy is done.
    pub unsafe fn download(&self, to: &mut [u8], from: DevPtr) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { cu!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.0, to.len(), self.raw)) }
    }

    /// Queues a copy on the device.
    ///
    /// # Safety
    /// Both places have `len` bytes and do not overlap.
    pub unsafe fn copy(&self, to: DevPtr, from: DevPtr, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { cu!(cuMemcpyDtoDAsync_v2(to.0, from.0, len, self.raw)) }
    }

    /// Queues `len` bytes of `value`.
    ///
    /// # Safety
    /// `at` has `len` bytes.
    pub unsafe fn fill(&self, at: DevPtr, value: u8, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { cu!(cuMemsetD8Async(at.0, value, len, self.raw)) }
    }

    /// What is queued here from now on starts after `event`.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: both are alive.
        unsafe { cu!(cuStreamWaitEvent(self.raw, event.raw, 0)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created in `new`; the driver finishes queued work first.
            unsafe {
                let _ = cu!(cuStreamDestroy_v2(self.raw));
            }
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: the driver locks its own state.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that orders streams only.
    pub fn new(context: &Arc<Context>) -> Result<Event> {
        Event::with(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// An event that also notes the time.
    pub fn timed(context: &Arc<Context>) -> Result<Event> {
        Event::with(context, 0)
    }

    fn with(context: &Arc<Context>, flags: u32) -> Result<Event> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { cu!(cuEventCreate(&mut raw, flags))? };
        Ok(Event { context: context.clone(), raw })
    }

    /// Marks the end of what is queued in `stream` so far.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are alive.
        unsafe { cu!(cuEventRecord(self.raw, stream.raw)) }
    }

    /// As [`record`](Event::record), for a stream whose work is being recorded: each launch of the recording
    /// notes the time anew.
    pub fn record_in_graph(&self, stream: &Stream) -> Result<()> {
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: both are alive.
        unsafe { cu!(cuEventRecordWithFlags(self.raw, stream.raw, flags)) }
    }

    /// Waits until the point is reached.
    pub fn wait(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        unsafe { cu!(cuEventSynchronize(self.raw)) }
    }

    /// Microseconds from `earlier` to this event; both timed, recorded and reached.
    pub fn micros_since(&self, earlier: &Event) -> Result<f64> {
        let mut ms = 0.0f32;
        // SAFETY: both are alive; the driver writes one number.
        unsafe { cu!(cuEventElapsedTime(&mut ms, earlier.raw, self.raw))? };
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created in `with` and not destroyed since.
            unsafe {
                let _ = cu!(cuEventDestroy_v2(self.raw));
            }
        }
    }
}
