//! The per-layer branch in the fast mode: one kernel where the matrices' shapes and the number of rows allow it.

use lapidary_ops::{Activation, Error, Mat, Result};

use super::emit::gate;
use super::fuse::{PerLayer, Step};
use crate::driver::DevPtr;
use crate::kernels::per_layer::{self, PerLayer as Call};
use crate::kernels::producers::NormOut;
use crate::kernels::skinny_gemm::Weights;
use crate::ops::CudaOps;

/// Shared memory that the kernel declares itself, rounded up.
const DECLARED: usize = 1024;

/// What the gate's step says.
struct GateStep {
    w: Mat,
    layer: usize,
    f: Activation,
}

impl PerLayer {
    fn gate_step(&self) -> Option<GateStep> {
        match self.gate {
            Step::GateTimes { w, layer, f, .. } => Some(GateStep { w, layer, f }),
            _ => None,
        }
    }
}

impl CudaOps<'_> {
    fn per_layer_weights(&self, p: &PerLayer) -> Option<(Weights, Weights)> {
        Some((self.one_run(p.gate_step()?.w)?, self.one_run(p.product.2)?))
    }

    pub(super) fn fuses_per_layer(&self, p: &PerLayer) -> bool {
        let most = (self.on.context().info.shared_per_block as usize).saturating_sub(DECLARED);
        self.rows == 1
            && self.act(p.first.x).width == self.act(p.product.0).width
            && self
                .per_layer_weights(p)
                .is_some_and(|(gate, w)| per_layer::refuses(gate.shape, w.shape, most).is_none())
    }

    /// The branch in one kernel, for what [`fuses_per_layer`](Self::fuses_per_layer) says yes to.
    pub(super) fn per_layer(&mut self, p: &PerLayer) -> Result<()> {
        let missing = || Error::Device("a per-layer branch without its parts".into());
        let Step::GateTimes { inputs, .. } = p.gate else { return Err(missing()) };
        let step = p.gate_step().ok_or_else(missing)?;
        let (gate_weights, projection) = self.per_layer_weights(p).ok_or_else(missing)?;
        let ((first, post), (_, close)) = (p.first.y.ok_or_else(missing)?, p.close.y.ok_or_else(missing)?);
        for w in [step.w, p.product.2] {
            self.left.weight_bytes += self.on.mats[w.0 as usize].bytes as u64;
        }
        let (x, all) = (self.act(p.first.x), self.act(inputs));
        let width = x.width as usize;
        if (step.layer + 1) * per_layer::WIDTH > all.width as usize {
            return Err(Error::Device(format!("per_layer_gate: no inputs of layer {}", step.layer)));
        }
        let (mut outs, mut out_eps) = ([NormOut::NONE; 2], 0.0);
        for (to, &(act, norm)) in outs.iter_mut().zip(&p.close.outs) {
            let a = self.act(act);
            crate::ops::same("rms_norm", a.width, x.width)?;
            let gain = norm.map_or(Ok(DevPtr::NULL), |n| self.gain(n.gain, width))?;
            *to = NormOut { p: a.ptr, gain, stride: a.stride, bf16: a.bf16 };
            out_eps = norm.map_or(0.0, |n| n.eps);
        }
        let call = Call {
            x: self.residual.take().unwrap_or(x.ptr),
            x_out: x.ptr,
            width,
            y: self.branch(first, DevPtr::NULL),
            post: (self.gain(post.gain, width)?, post.eps),
            gate: gate_weights,
            activation: gate(step.f),
            times: all.ptr.at(step.layer * per_layer::WIDTH * 4),
            projection,
            close: (self.gain(close.gain, width)?, close.eps),
            scalar: p.close.scalar,
            outs,
            out_eps,
        };
        // SAFETY: widths agree, every buffer holds the rows of every uploaded batch, and gains are as wide as the residual.
        unsafe { Ok(per_layer::per_layer(self.on.queue(), &call)?) }
    }
}
