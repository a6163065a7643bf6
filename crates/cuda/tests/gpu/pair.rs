//! The same small program on the reference and on the GPU.

use lapidary_cuda::{Compute, CudaBackend, CudaOptions};
use lapidary_formats::{Format, encode_rows};
use lapidary_ops::{
    Act, ActKind, ActRows, ActSpec, Backend, Batch, BatchShape, Gain, KvFormat, KvGroupPlan, KvPlan, Mat,
    Ops, PAGE_TOKENS, PageTable, RowSpan, TailRows, TensorView,
};
use lapidary_reference::ReferenceBackend;

/// Both backends, given the same things in the same order, so that one handle stands for the same on both.
#[derive(Debug)]
pub struct Pair {
    pub reference: ReferenceBackend,
    pub gpu: CudaBackend,
}

/// Values of about unit size.
pub fn values(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| 1.7 * next()).collect()
}

impl Pair {
    /// Both, where there is a GPU; no layer has keys and values.
    pub fn new() -> Option<Pair> {
        let none =
            || KvGroupPlan { layers: Vec::new(), format: KvFormat::F32, pages: POOL_PAGES + 1, window: None };
        Pair::with(&KvPlan { groups: [none(), none()] })
    }

    /// Both with pools.
    pub fn with(plan: &KvPlan) -> Option<Pair> {
        crate::gpu()?;
        let options = CudaOptions { compute: Compute::F32, ..CudaOptions::default() };
        let gpu = CudaBackend::new(options).expect("a GPU was seen");
        let mut pair = Pair { reference: ReferenceBackend::new(), gpu };
        pair.reference.kv(plan).expect("the reference allocates");
        pair.gpu.kv(plan).expect("the GPU allocates");
        Some(pair)
    }

    pub fn pack(&mut self, parts: &[TensorView<'_>], group_rows: usize) -> Mat {
        let mat = self.reference.pack(parts, group_rows).expect("the reference packs");
        assert_eq!(self.gpu.pack(parts, group_rows).expect("the GPU packs"), mat);
        mat
    }

    /// A matrix of `values` in a format.
    pub fn encoded(&mut self, format: Format, values: &[f32], rows: usize, cols: usize) -> Mat {
        let encoded = encode_rows(format, values, rows, cols).expect("values encode");
        self.pack(&[encoded.view("w")], rows)
    }

    pub fn vector(&mut self, values: &[f32]) -> Gain {
        let gain = self.reference.vector("v", values).expect("the reference takes it");
        assert_eq!(self.gpu.vector("v", values).expect("the GPU takes it"), gain);
        gain
    }

    pub fn act(&mut self, width: usize, max_rows: usize) -> Act {
        let spec = ActSpec { name: "a", width, kind: ActKind::F32, rows: ActRows::Batch, max_rows };
        let act = self.reference.activation(spec.clone()).expect("the reference allocates");
        assert_eq!(self.gpu.activation(spec).expect("the GPU allocates"), act);
        act
    }

    /// Runs `program` over `batch` on both and returns the first `rows` rows of `out` from each; the GPU runs twice
    /// and must leave the same bits.
    pub fn run(
        &mut self,
        batch: &Batch,
        out: Act,
        rows: usize,
        program: &(dyn Fn(&mut dyn Ops) + Sync),
    ) -> [Vec<f32>; 2] {
        let shape = BatchShape { head_rows: batch.heads.len(), ..batch.shape(0, TailRows::All) };
        let once = |backend: &mut dyn Backend| {
            backend.upload(batch).expect("the batch is right");
            backend.run(&shape, program).expect("the program runs");
            backend.collect().expect("the program ends");
            let mut values = Vec::new();
            backend.read(out, rows, &mut values).expect("rows are there");
            values
        };
        let expected = once(&mut self.reference);
        let found = once(&mut self.gpu);
        let again = once(&mut self.gpu);
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&found) == bits(&again), "two runs differ");
        [found, expected]
    }
}

/// Pages that [`given`] uses, page 0 not counted.
pub const POOL_PAGES: usize = 39;

/// One sequence of `rows` rows from `position` on, each row given as soft values of `width`; its pages are 1, 2, ...
pub fn given(rows: usize, position: usize, soft: Vec<f32>) -> Batch {
    let pages = (position + rows).div_ceil(PAGE_TOKENS);
    let table = PageTable { start: 0, count: pages, first_block: 0 };
    let positions: Vec<i32> = (position..position + rows).map(|p| p as i32).collect();
    let visible: Vec<i32> = positions.iter().map(|p| p + 1).collect();
    // Pages in no particular order; the same for a block whatever follows it.
    let numbers: Vec<i32> = (0..pages).map(|b| 1 + (b * 7 % POOL_PAGES) as i32).collect();
    Batch {
        tokens: vec![0; rows],
        per_layer_tokens: vec![0; rows],
        positions,
        spans: vec![RowSpan { first_row: 0, rows, tables: [table; 2] }],
        visible_to: [visible.clone(), visible],
        pages: [numbers.clone(), numbers],
        soft_rows: (0..rows as i32).collect(),
        soft_values: soft,
        ..Batch::default()
    }
}
