//! [`ReferenceBackend`]: what the handles stand for, and the running of a pass.

use std::collections::VecDeque;

use lapidary_ops::{
    Act, ActRows, ActSpec, Backend, Batch, BatchError, BatchShape, DeviceReport, Error, Format, Gain,
    KernelReport, KvPlan, KvRef, Mat, MemoryUse, Ops, Outcome, Result, SteerSet, TensorView,
};

use crate::decode::decode;
use crate::kv::{KvStore, Side};
use crate::ops::Pass;

/// A matrix decoded to float32, `[rows, cols]` row after row.
#[derive(Debug)]
pub(crate) struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub values: Vec<f32>,
}

impl Matrix {
    /// Row `r`: the weights of one output, or one token's embedding.
    pub fn row(&self, r: usize) -> &[f32] {
        &self.values[r * self.cols..(r + 1) * self.cols]
    }
}

/// An activation, `[max_rows, width]` row after row.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub spec: ActSpec,
    pub values: Vec<f32>,
}

/// One model's weights and state, in plain vectors.
#[derive(Debug, Default)]
pub struct ReferenceBackend {
    pub(crate) mats: Vec<Matrix>,
    pub(crate) gains: Vec<Vec<f32>>,
    pub(crate) acts: Vec<Buffer>,
    pub(crate) kv: KvStore,
    pub(crate) batch: Batch,
    pub(crate) steer_sets: Vec<Option<SteerSet>>,
    outcomes: VecDeque<Outcome>,
}

impl ReferenceBackend {
    /// A backend without a model.
    pub fn new() -> Self {
        Self::default()
    }

    /// The decoded values of a packed matrix, `[rows, cols]`.
    pub fn matrix(&self, mat: Mat) -> &[f32] {
        &self.mats[mat.0 as usize].values
    }

    fn buffer(&self, act: Act, rows: usize) -> Result<&Buffer> {
        let buffer = self.acts.get(act.0 as usize);
        let buffer =
            buffer.ok_or_else(|| Error::Device(format!("activation {} was never allocated", act.0)))?;
        if rows > buffer.spec.max_rows {
            return Err(Error::TooManyRows { what: buffer.spec.name, rows, limit: buffer.spec.max_rows });
        }
        Ok(buffer)
    }
}

impl Backend for ReferenceBackend {
    fn report(&self) -> DeviceReport {
        let kernel = |&format: &Format| KernelReport {
            format,
            kernel: "decoded to float32, plain loops".into(),
            fallback: true,
        };
        DeviceReport {
            backend: "reference",
            device: "plain loops".into(),
            level: "float32 values, float64 sums".into(),
            units: 1,
            mode: "f32",
            kernels: Format::ALL.iter().map(kernel).collect(),
        }
    }

    fn pack(&mut self, parts: &[TensorView<'_>], group_rows: usize) -> Result<Mat> {
        let Some(first) = parts.first() else {
            return Err(Error::Tensor { tensor: "matrix".into(), reason: "has no parts".into() });
        };
        let cols = first.cols;
        let mut matrix = Matrix { rows: 0, cols, values: Vec::new() };
        for part in parts {
            if part.cols != cols {
                let reason =
                    format!("{} columns, {} above it has {cols}: they cannot stack", part.cols, first.name);
                return Err(Error::Tensor { tensor: part.name.clone(), reason });
            }
            let mut values = decode(part)?;
            matrix.rows += part.rows;
            // Most matrices have one part, which needs no second copy.
            if matrix.values.is_empty() {
                matrix.values = values;
            } else {
                matrix.values.append(&mut values);
            }
        }
        if group_rows == 0 || !matrix.rows.is_multiple_of(group_rows) {
            let reason = format!("{} rows are no whole number of groups of {group_rows}", matrix.rows);
            return Err(Error::Tensor { tensor: first.name.clone(), reason });
        }
        self.mats.push(matrix);
        Ok(Mat(self.mats.len() as u32 - 1))
    }

    fn vector(&mut self, _name: &str, values: &[f32]) -> Result<Gain> {
        self.gains.push(values.to_vec());
        Ok(Gain(self.gains.len() as u32 - 1))
    }

    fn activation(&mut self, spec: ActSpec) -> Result<Act> {
        let handle = u16::try_from(self.acts.len())
            .map_err(|_| Error::Device(format!("{} is one activation too many", spec.name)))?;
        let values = vec![0.0; spec.width * spec.max_rows];
        self.acts.push(Buffer { spec, values });
        Ok(Act(handle))
    }

    fn kv(&mut self, plan: &KvPlan) -> Result<()> {
        self.kv.resize(plan)
    }

    fn steer_set(&mut self, index: usize, set: Option<&SteerSet>) -> Result<()> {
        if index >= self.steer_sets.len() {
            self.steer_sets.resize(index + 1, None);
        }
        self.steer_sets[index] = set.cloned();
        Ok(())
    }

    fn upload(&mut self, batch: &Batch) -> Result<()> {
        batch.check_steer(&|set| self.steer_sets.get(set).is_some_and(Option::is_some))?;
        for Buffer { spec, .. } in &self.acts {
            let rows = match spec.rows {
                ActRows::Batch => batch.tokens.len(),
                ActRows::Heads => batch.heads.len(),
            };
            if rows > spec.max_rows {
                return Err(Error::TooManyRows { what: spec.name, rows, limit: spec.max_rows });
            }
        }
        self.batch = batch.clone();
        Ok(())
    }

    fn run(&mut self, _shape: &BatchShape, program: &(dyn Fn(&mut dyn Ops) + Sync)) -> Result<()> {
        if self.batch.tokens.is_empty() {
            return Err(Error::Batch(BatchError::Empty));
        }
        let mut pass = Pass::new(self);
        program(&mut pass);
        let outcome = pass.finish();
        self.outcomes.push_back(outcome);
        Ok(())
    }

    fn collect(&mut self) -> Result<Outcome> {
        self.outcomes.pop_front().ok_or_else(|| Error::Device("no pass is waiting to be collected".into()))
    }

    fn read(&mut self, act: Act, rows: usize, out: &mut Vec<f32>) -> Result<()> {
        let buffer = self.buffer(act, rows)?;
        out.clear();
        out.extend_from_slice(&buffer.values[..rows * buffer.spec.width]);
        Ok(())
    }

    fn kv_store(&mut self, cache: KvRef, page: usize, in_page: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let shape = self.kv.check_cell(cache, page, in_page)?;
        check_kv_len(shape.kv_heads * shape.head_dim, k.len(), v.len())?;
        for (side, values) in [(Side::Keys, k), (Side::Values, v)] {
            for (head, values) in values.chunks_exact(shape.head_dim).enumerate() {
                self.kv.store(cache, side, (page, in_page), head, values);
            }
        }
        Ok(())
    }

    fn kv_load(
        &mut self,
        cache: KvRef,
        page: usize,
        in_page: usize,
        k: &mut [f32],
        v: &mut [f32],
    ) -> Result<()> {
        let shape = self.kv.check_cell(cache, page, in_page)?;
        check_kv_len(shape.kv_heads * shape.head_dim, k.len(), v.len())?;
        for (side, out) in [(Side::Keys, k), (Side::Values, v)] {
            for (head, out) in out.chunks_exact_mut(shape.head_dim).enumerate() {
                out.copy_from_slice(self.kv.head(cache, side, (page, in_page), head));
            }
        }
        Ok(())
    }

    fn memory(&self) -> MemoryUse {
        let floats = |n: usize| n * 4;
        MemoryUse {
            weights: floats(self.mats.iter().map(|m| m.values.len()).sum::<usize>())
                + floats(self.gains.iter().map(Vec::len).sum()),
            mapped: 0,
            host: 0,
            activations: floats(self.acts.iter().map(|a| a.values.len()).sum()),
            kv: self.kv.bytes(),
        }
    }
}

fn check_kv_len(width: usize, k: usize, v: usize) -> Result<()> {
    if (k, v) == (width, width) {
        return Ok(());
    }
    Err(Error::Device(format!("keys and values of {k} and {v} numbers, the layer has {width} of each")))
}
