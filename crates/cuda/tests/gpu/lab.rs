//! What kernel tests share: memory with known contents, random numbers, comparison with bounds, times.

use std::sync::Arc;

use half::bf16;
use lapidary_cuda::driver::{Block, Context, DevPtr, Event, Graph, Kernels, Stream};
use lapidary_cuda::kernels::skinny_gemm::Weights;
use lapidary_cuda::launch::Queue;
use lapidary_cuda::pack::{PackedShape, pack_strips, row_scales};
use lapidary_formats::{Encoded, Format, Scaling, TensorView, encode_rows_scaled};

use crate::gpu;

/// A device, a stream and kernels.
pub struct Lab {
    context: Arc<Context>,
    pub stream: Stream,
    kernels: Kernels,
}

impl Lab {
    /// `None` where there is no GPU and none is required.
    pub fn new() -> Option<Lab> {
        let context = gpu()?;
        Some(Lab { stream: Stream::new(&context).unwrap(), kernels: Kernels::new(&context), context })
    }

    pub fn queue(&self) -> Queue<'_> {
        Queue { stream: &self.stream, kernels: &self.kernels }
    }

    pub fn bytes(&self, bytes: &[u8]) -> Block {
        let block = Block::new(&self.context, "a test", bytes.len().max(16)).unwrap();
        // SAFETY: the block is as long; the driver has read unpinned memory when this returns.
        unsafe { self.stream.upload(block.ptr(), bytes).unwrap() };
        block
    }

    pub fn f32(&self, values: &[f32]) -> Block {
        self.bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn bf16(&self, values: &[f32]) -> Block {
        self.bytes(&values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn i32(&self, values: &[i32]) -> Block {
        self.bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Memory full of 0xFF: NaN in every float, -1 in every integer.
    pub fn poisoned(&self, bytes: usize) -> Block {
        let block = Block::new(&self.context, "a test", bytes.max(16)).unwrap();
        self.poison(&block);
        block
    }

    pub fn poison(&self, block: &Block) {
        // SAFETY: the block's own length.
        unsafe { self.stream.fill(block.ptr(), 0xFF, block.len()).unwrap() };
    }

    /// What is there once everything queued is done.
    pub fn read(&self, block: &Block, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        assert!(bytes <= block.len());
        // SAFETY: the block has the bytes; the wait comes before `out` is used.
        unsafe { self.stream.download(&mut out, block.ptr()).unwrap() };
        self.stream.wait().unwrap();
        out
    }

    pub fn read_f32(&self, block: &Block, n: usize) -> Vec<f32> {
        self.read(block, 4 * n).as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
    }

    pub fn read_i32(&self, block: &Block, n: usize) -> Vec<i32> {
        self.read(block, 4 * n).as_chunks::<4>().0.iter().map(|&b| i32::from_le_bytes(b)).collect()
    }

    pub fn read_bf16(&self, block: &Block, n: usize) -> Vec<f32> {
        self.read(block, 2 * n).as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect()
    }

    /// Runs `work` twice over poisoned `out` and wants equal bits both times; hands the bytes over.
    pub fn twice(&self, out: &Block, mut work: impl FnMut()) -> Vec<u8> {
        let mut once = || {
            self.poison(out);
            work();
            self.read(out, out.len())
        };
        let first = once();
        assert!(first == once(), "two runs differ");
        first
    }

    /// Microseconds of one `work(i)` in a graph of `n`, the median of five launches.
    #[allow(dead_code, reason = "only the bench takes times")]
    pub fn time(&self, n: usize, mut work: impl FnMut(usize)) -> f64 {
        work(0); // loads the kernel
        self.stream.wait().unwrap();
        let graph = Graph::record(&self.stream, || {
            (0..n).for_each(&mut work);
            Ok(())
        })
        .unwrap();
        let (start, end) = (Event::timed(&self.context).unwrap(), Event::timed(&self.context).unwrap());
        let mut times: Vec<f64> = (0..6)
            .map(|_| {
                start.record(&self.stream).unwrap();
                // SAFETY: what `work` uses outlives this call.
                unsafe { graph.launch(&self.stream).unwrap() };
                end.record(&self.stream).unwrap();
                end.wait().unwrap();
                end.micros_since(&start).unwrap() / n as f64
            })
            .skip(1)
            .collect();
        times.sort_by(f64::total_cmp);
        times[2]
    }
}

/// Numbers in -1..1 that depend on place and seed alone.
pub fn random(n: usize, seed: u64) -> Vec<f32> {
    (0..n as u64)
        .map(|i| {
            let mut z =
                i.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed.wrapping_mul(0xD134_2543_DE82_EF95));
            z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// The same through bf16, as inputs of a product are.
pub fn random_bf16(n: usize, seed: u64) -> Vec<f32> {
    random(n, seed).into_iter().map(|v| bf16::from_f32(v).to_f32()).collect()
}

/// A random matrix in a format. Neighbouring rows and columns differ in size.
pub fn matrix(format: Format, scaling: Scaling, rows: usize, cols: usize, seed: u64) -> Encoded {
    let mut values = random(rows * cols, seed);
    for (i, v) in values.iter_mut().enumerate() {
        *v *= 0.02 * (1.0 + (i / cols % 5) as f32) * (1.0 + (i % cols / 48 % 3) as f32);
    }
    encode_rows_scaled(format, scaling, &values, rows, cols).unwrap()
}

/// A packed matrix on the device.
pub struct Packed {
    pub shape: PackedShape,
    strips: Block,
    scales: Option<Block>,
}

impl Packed {
    /// Packs `views` one after the other: equal shapes, experts of one stack.
    pub fn stack(lab: &Lab, views: &[TensorView]) -> Packed {
        let shape = PackedShape::of(&views[0]);
        let mut strips = vec![0; shape.bytes() * views.len()];
        for (view, out) in views.iter().zip(strips.chunks_exact_mut(shape.bytes())) {
            pack_strips(view, 0..shape.strips(), out);
        }
        let scales: Vec<f32> = views.iter().filter_map(row_scales).flatten().collect();
        let scales = (!scales.is_empty()).then(|| lab.f32(&scales));
        Packed { shape, strips: lab.bytes(&strips), scales }
    }

    pub fn weights(&self) -> Weights {
        let row_scales = self.scales.as_ref().map_or(DevPtr::NULL, Block::ptr);
        Weights { shape: self.shape, strips: self.strips.ptr(), row_scales }
    }
}

/// Rows of a matrix as float32, those of `pick`, and for each input the magnitude of what the kernel multiplies and
/// takes away again (codes are stored with an offset): a bound of what rounding can refer to.
pub fn decode(view: &TensorView, pick: &[usize]) -> Vec<(Vec<f32>, Vec<f32>)> {
    // Offset times scale, in units of the block's largest magnitude.
    let offset = match view.format {
        Format::Q8_0 | Format::Iq4Nl | Format::Iq4Xs | Format::Q4_0 | Format::Int4G32 => 1.02,
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => 1.1,
        Format::Q5_0 => 8.1,
        Format::Q6K => 4.1,
        Format::Q3K => 33.0,
        _ => 0.0,
    };
    pick.iter()
        .map(|&row| {
            let mut values = vec![0.0; view.cols];
            lapidary_formats::decode_row(view, row, &mut values);
            if !lapidary_cuda::pack::Form::is_exact(view.format) {
                values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
            }
            let block = view.format.block_len().clamp(32, 256);
            let sizes = values.chunks(block).flat_map(|b| {
                let most = b.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                b.iter().map(move |v| v.abs() + 2.0 * offset * most)
            });
            let sizes = sizes.collect();
            (values, sizes)
        })
        .collect()
}

/// The exact product of two rows and the sum of the magnitudes in it.
pub fn dot(w: &[f32], sizes: &[f32], x: &[f32]) -> (f64, f64) {
    w.iter().zip(sizes).zip(x).fold((0.0, 0.0), |(sum, size), ((&w, &s), &x)| {
        (sum + f64::from(w) * f64::from(x), size + f64::from(s) * f64::from(x).abs())
    })
}

/// Holds results to `(value, allowed)` and to a relative error of all together.
pub struct Judge {
    what: String,
    error: f64,
    size: f64,
    worst: f64,
}

impl Judge {
    pub fn new(what: impl Into<String>) -> Judge {
        Judge { what: what.into(), error: 0.0, size: 0.0, worst: 0.0 }
    }

    pub fn see(&mut self, at: impl std::fmt::Debug, found: f32, expected: f64, allowed: f64) {
        assert!(found.is_finite(), "{} {at:?}: {found} for {expected}", self.what);
        let error = (f64::from(found) - expected).abs();
        assert!(error <= allowed, "{} {at:?}: {found} for {expected}, {allowed:e} is allowed", self.what);
        self.error += error * error;
        self.size += expected * expected;
        self.worst = self.worst.max(error / allowed);
    }

    /// The relative error of all values seen is at most `allowed`.
    pub fn finish(self, allowed: f64) -> f64 {
        let relative = (self.error / self.size).sqrt();
        assert!(relative <= allowed, "{}: relative error {relative:e}, {allowed:e} is allowed", self.what);
        relative
    }
}
