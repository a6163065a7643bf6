//! A backend with buffers, a batch and a way to put values in, for tests of single verbs.
#![allow(dead_code, reason = "each test file uses its own part")]

use lapidary_cpu::{CpuBackend, CpuOptions, Level};
use lapidary_ops::*;

/// Numbers in -1 .. 1, the same for the same seed.
pub fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

pub fn options(threads: usize) -> CpuOptions {
    CpuOptions { threads: Some(threads), ..CpuOptions::default() }
}

/// Levels of this processor.
pub fn levels() -> Vec<Level> {
    Level::here().collect()
}

pub struct Rig {
    pub cpu: CpuBackend,
    pub batch: Batch,
    pub tail: TailRows,
}

pub const MAX_ROWS: usize = 300;

impl Rig {
    pub fn new(options: CpuOptions) -> Rig {
        let cpu = CpuBackend::new(options).expect("the backend starts");
        Rig { cpu, batch: Batch::default(), tail: TailRows::Heads }
    }

    pub fn act(&mut self, width: usize) -> Act {
        self.make(width, ActKind::F32)
    }

    pub fn input(&mut self, width: usize) -> Act {
        self.make(width, ActKind::Input)
    }

    fn make(&mut self, width: usize, kind: ActKind) -> Act {
        let spec = ActSpec { name: "test", width, kind, rows: ActRows::Batch, max_rows: MAX_ROWS };
        self.cpu.activation(spec).expect("a small buffer")
    }

    pub fn gain(&mut self, values: &[f32]) -> Gain {
        self.cpu.vector("gain", values).expect("finite values")
    }

    /// A float32 matrix.
    pub fn matrix(&mut self, rows: usize, cols: usize, weights: &[f32]) -> Mat {
        let bytes: Vec<u8> = weights.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.cpu.pack(&[view(Format::F32, rows, cols, &bytes)], rows).expect("a valid matrix")
    }

    /// A batch of one sequence without KV whose rows all hold `soft`.
    pub fn rows(&mut self, rows: usize, soft: &[f32]) {
        self.sequence(rows, 0, &[[0; 0], [0; 0]]);
        self.batch.soft_rows = (0..rows as i32).collect();
        self.batch.soft_values = soft.to_vec();
    }

    /// A batch of one sequence of `rows` rows from `start` on, causal, with `pages` by group.
    pub fn sequence<P: AsRef<[i32]>>(&mut self, rows: usize, start: usize, pages: &[P; 2]) {
        self.batch.clear();
        self.add_sequence(rows, start, pages);
    }

    pub fn add_sequence<P: AsRef<[i32]>>(&mut self, rows: usize, start: usize, pages: &[P; 2]) {
        let b = &mut self.batch;
        let first_row = b.tokens.len();
        let mut tables = [PageTable::default(); 2];
        for g in 0..2 {
            let own = pages[g].as_ref();
            tables[g] = PageTable { start: b.pages[g].len(), count: own.len(), first_block: 0 };
            b.pages[g].extend(own);
            b.visible_to[g].extend((0..rows).map(|r| (start + r + 1) as i32));
        }
        b.tokens.extend((0..rows).map(|r| r as i32));
        b.per_layer_tokens.extend((0..rows).map(|r| r as i32));
        b.positions.extend((0..rows).map(|r| (start + r) as i32));
        b.spans.push(RowSpan { first_row, rows, tables });
    }

    pub fn try_run(&mut self, program: &(dyn Fn(&mut dyn Ops) + Sync)) -> Result<Outcome> {
        self.cpu.upload(&self.batch)?;
        let shape = self.batch.shape(1, self.tail);
        self.cpu.run(&shape, program)?;
        self.cpu.collect()
    }

    pub fn run(&mut self, program: &(dyn Fn(&mut dyn Ops) + Sync)) -> Outcome {
        self.try_run(program).expect("the pass runs")
    }

    pub fn read(&mut self, act: Act, rows: usize) -> Vec<f32> {
        let mut out = Vec::new();
        self.cpu.read(act, rows, &mut out).expect("a float32 activation");
        out
    }
}

pub fn view(format: Format, rows: usize, cols: usize, bytes: &[u8]) -> TensorView<'_> {
    TensorView { name: "matrix".into(), rows, cols, format, bytes, scales: Scales::None }
}

/// Fails where a value is not finite or further than its bound from the exact one.
pub fn assert_near(what: &str, found: &[f32], exact: impl IntoIterator<Item = (f64, f64)>) {
    let mut n = 0;
    for (i, (exact, bound)) in exact.into_iter().enumerate() {
        let x = f64::from(found[i]);
        assert!(x.is_finite() && (x - exact).abs() <= bound, "{what} [{i}]: {x}, exact {exact} +- {bound}");
        n += 1;
    }
    assert_eq!(n, found.len(), "{what}");
}

#[track_caller]
pub fn assert_bits(what: &str, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert!(x.to_bits() == y.to_bits(), "{what} [{i}]: {x} and {y}");
    }
}

pub const EPS: f64 = f32::EPSILON as f64 / 2.0;
