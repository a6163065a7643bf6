//! Filling device memory from the host at the speed of the bus: while one half of a pinned buffer is copied, the other is
//! written.

use std::sync::Arc;

use super::{Context, DevPtr, Event, Pinned, Stream};
use crate::error::Result;

/// Bytes of a half. A copy of so many takes half a millisecond and more, beside which its start is nothing.
const HALF: usize = 32 << 20;

/// A pinned buffer in two halves, made when it is first used.
#[derive(Debug)]
pub struct Staging {
    context: Arc<Context>,
    stream: Arc<Stream>,
    halves: [Option<(Pinned, Event)>; 2],
    next: usize,
}

impl Staging {
    /// For copies in `stream`.
    pub fn new(context: &Arc<Context>, stream: &Arc<Stream>) -> Staging {
        Staging { context: context.clone(), stream: stream.clone(), halves: [None, None], next: 0 }
    }

    /// Where copies go.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Queues the filling of `len` bytes at `to`. `write` is told which of them it is to write, a piece at a time; but for
    /// the last, pieces are multiples of `unit` bytes.
    ///
    /// # Safety
    /// `to` has room for `len` bytes, which nothing that is queued reads.
    pub unsafe fn fill(
        &mut self,
        to: DevPtr,
        len: usize,
        unit: usize,
        write: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<()> {
        let piece = (HALF / unit).max(1) * unit;
        let mut at = 0;
        while at < len {
            let bytes = piece.min(len - at);
            // SAFETY: the caller's, for a part of it.
            unsafe { self.piece(to.at(at), bytes, &mut |out| write(at, out))? };
            at += bytes;
        }
        Ok(())
    }

    /// Queues the copy of `from` to `to`.
    ///
    /// # Safety
    /// As [`Staging::fill`].
    pub unsafe fn copy(&mut self, to: DevPtr, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's.
        unsafe {
            self.fill(to, from.len(), 1, &mut |at, out| copy_in_parallel(&from[at..][..out.len()], out))
        }
    }

    unsafe fn piece(&mut self, to: DevPtr, bytes: usize, write: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let half = &mut self.halves[self.next];
        self.next = 1 - self.next;
        if half.as_ref().is_none_or(|(pinned, _)| pinned.bytes().len() < bytes) {
            if let Some((_, event)) = half {
                event.wait()?;
            }
            *half = Some((Pinned::new(&self.context, bytes.max(HALF))?, Event::new(&self.context)?));
        } else if let Some((_, event)) = half {
            event.wait()?;
        }
        let (pinned, event) = half.as_mut().expect("made above");
        write(&mut pinned.bytes_mut()[..bytes]);
        // SAFETY: the caller's; the half is left alone until the event, which the next use waits for.
        unsafe { self.stream.upload(to, &pinned.bytes()[..bytes])? };
        event.record(&self.stream)
    }

    /// Gives the buffer back; waits for what it still feeds.
    pub fn release(&mut self) -> Result<()> {
        for (_, event) in self.halves.iter().flatten() {
            event.wait()?;
        }
        self.halves = [None, None];
        Ok(())
    }
}

/// One core copies from a file's pages at a fraction of the bus.
pub(crate) fn copy_in_parallel(from: &[u8], to: &mut [u8]) {
    const WORTH_A_THREAD: usize = 2 << 20;
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = (from.len() / WORTH_A_THREAD).clamp(1, cores);
    let each = from.len().div_ceil(threads).max(1);
    if threads == 1 {
        return to.copy_from_slice(from);
    }
    std::thread::scope(|s| {
        for (from, to) in from.chunks(each).zip(to.chunks_mut(each)) {
            s.spawn(move || to.copy_from_slice(from));
        }
    });
}
