//! How fast this machine reads memory: the ceiling of decoding, which reads every weight once for each token.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use crate::host;

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadBandwidth {
    /// Threads that read.
    pub threads: usize,
    /// Bytes that each pass read, more than caches hold.
    pub bytes: usize,
    /// Bytes a second of the middle pass.
    pub bytes_per_second: f64,
}

/// Passes over the data. The middle one counts: the machine does other things too, and the memory of a virtual one is
/// faster at some moments than it is for as long as a token takes.
const PASSES: usize = 21;

/// Places that each thread reads side by side: one alone does not keep the memory busy.
const STREAMS: usize = 4;

/// Smallest amount of data.
const LEAST_BYTES: usize = 256 << 20;

/// Reads data of four times the largest cache (at least 256 MiB, at most a quarter of the free memory) with `threads`
/// threads, each its own stripe, which it has also written first.
pub fn read_bandwidth(threads: usize) -> ReadBandwidth {
    let threads = threads.max(1);
    let wanted = host::largest_cache().map_or(0, |c| 4 * c as usize).max(LEAST_BYTES);
    let most = host::memory().available.map_or(usize::MAX, |a| a as usize / 4);
    let words = (wanted.min(most) / threads / size_of::<u64>()).max(1 << 17);
    let barrier = Barrier::new(threads);
    let times: Vec<Vec<(Instant, Instant)>> = std::thread::scope(|scope| {
        let reader = || {
            let stripe: Vec<u64> = (0..words as u64).collect();
            let pass = |_| {
                barrier.wait();
                let start = Instant::now();
                black_box(sum(black_box(&stripe)));
                (start, Instant::now())
            };
            (0..PASSES).map(pass).collect()
        };
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(reader)).collect();
        readers.into_iter().map(|r| r.join().expect("reading memory cannot panic")).collect()
    });
    // A pass lasts from the first thread's start to the last one's end.
    let seconds = |pass: usize| {
        let first = times.iter().map(|t| t[pass].0).min().expect("there is a thread");
        let last = times.iter().map(|t| t[pass].1).max().expect("there is a thread");
        (last - first).as_secs_f64()
    };
    let mut all: Vec<f64> = (0..PASSES).map(seconds).collect();
    all.sort_by(f64::total_cmp);
    let bytes = words * size_of::<u64>() * threads;
    ReadBandwidth { threads, bytes, bytes_per_second: bytes as f64 / all[PASSES / 2] }
}

/// Sums in lanes, so that the loop is limited by memory and not by one chain of additions.
fn sum(words: &[u64]) -> u64 {
    let mut lanes = [0u64; 16];
    let (chunks, rest) = words.as_chunks::<16>();
    let (streams, last) = chunks.split_at(chunks.len() / STREAMS * STREAMS);
    let each = streams.len() / STREAMS;
    let mut add = |chunk: &[u64; 16]| {
        for (lane, word) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(*word);
        }
    };
    let (front, back) = streams.split_at(2 * each);
    let ((a, b), (c, d)) = (front.split_at(each), back.split_at(each));
    for ((a, b), (c, d)) in a.iter().zip(b).zip(c.iter().zip(d)) {
        [a, b, c, d].into_iter().for_each(&mut add);
    }
    last.iter().for_each(&mut add);
    lanes.iter().chain(rest).fold(0, |s, w| s.wrapping_add(*w))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_every_word() {
        let words: Vec<u64> = (1..=1003).collect();
        assert_eq!(sum(&words), 1003 * 1004 / 2);
    }

    #[test]
    fn a_measurement_is_plausible() {
        let found = read_bandwidth(1);
        assert_eq!(found.threads, 1);
        assert!(found.bytes >= 1 << 20);
        // Slower than any memory of this century, or faster than any, would be a fault of the clock or the loop.
        assert!(found.bytes_per_second > 1e8 && found.bytes_per_second < 1e13, "{found:?}");
    }
}
