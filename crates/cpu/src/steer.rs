//! Steering: edits of a row along directions.
//!
//! Sums run in 16 lanes by position and one fixed tree, so that a row's bits depend on nothing but the row and its
//! set. A row belongs to one worker, which notes its projections in its own list.

use lapidary_ops::{Act, SteerEdit, SteerMode};

use crate::level::{Isa, for_level};
use crate::math;
use crate::ops::{CpuOps, Scope};

impl CpuOps<'_> {
    /// The edits of each row's set at the end of `layer`.
    pub(crate) fn steer_rows(&mut self, x: Act, layer: usize) {
        self.enter(Scope::Rows);
        let (pass, buffer) = (self.pass, self.act(x));
        let upload = pass.upload;
        let mut noted =
            pass.projections[self.worker].lock().expect("a worker that panics here ends the pass");
        for r in self.own_rows() {
            let batch_row = self.batch_row(r);
            let Ok(set) = usize::try_from(upload.batch.steer[batch_row]) else { continue };
            let set = pass.steer_sets[set].as_ref().expect("the batch was checked on upload");
            let (first, edits) = set.at(layer);
            for (i, edit) in (first..).zip(edits) {
                assert_eq!(edit.unit.len(), buffer.width(), "steering of {}", buffer.spec.name);
                // SAFETY: the row is this worker's.
                let p = edit_row(self.isa(), unsafe { buffer.row_mut(r) }, edit);
                noted.push((batch_row, i, p));
            }
        }
    }
}

/// Makes one edit of one row and returns the projection that it had before.
fn edit_row(isa: Isa, x: &mut [f32], edit: &SteerEdit) -> f32 {
    let p = dot(isa, x, &edit.unit);
    // A projection that is not a number exceeds no gate.
    let open = edit.gate.is_none_or(|gate| p > gate);
    if edit.strength == 0.0 || !open {
        return p;
    }
    let s = edit.strength;
    let along = match edit.mode {
        SteerMode::Add => s * edit.norm,
        SteerMode::Ablate | SteerMode::Renorm => -(s * p),
        SteerMode::Clamp => s * (edit.to - p),
    };
    if edit.mode == SteerMode::Renorm {
        let before = dot(isa, x, x);
        add_scaled(isa, x, along, &edit.unit);
        let after = dot(isa, x, x);
        if after > 0.0 {
            math::scale(isa, x, (before / after).sqrt());
        }
    } else {
        add_scaled(isa, x, along, &edit.unit);
    }
    p
}

for_level! {
    /// `x . y`.
    pub fn dot(x: &[f32], y: &[f32]) -> f32 {
        let mut lanes = [0.0f32; 16];
        let (xs, x_rest) = x.as_chunks::<16>();
        let (ys, y_rest) = y.as_chunks::<16>();
        for (x, y) in xs.iter().zip(ys) {
            for l in 0..16 {
                lanes[l] += x[l] * y[l];
            }
        }
        for (l, (x, y)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest)) {
            *l += x * y;
        }
        let mut half = 8;
        while half > 0 {
            for l in 0..half {
                lanes[l] += lanes[l + half];
            }
            half /= 2;
        }
        lanes[0]
    }
}

for_level! {
    /// `x = x + by * y`.
    pub fn add_scaled(x: &mut [f32], by: f32, y: &[f32]) {
        for (a, &b) in x.iter_mut().zip(y) {
            *a += by * b;
        }
    }
}
