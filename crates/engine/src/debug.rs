//! Looking inside: logits, captured activations, and single sublayers.

use lapidary_model::Model;
use lapidary_ops::{BatchShape, Ops, Phase, RowSpan, TailRows, Tap, TapPoint};

use crate::error::{Error, Result};
use crate::stepper::Stepper;

impl Stepper {
    /// Copies the logits of the last head row of the last pass, after the softcap.
    ///
    /// # Errors
    /// `NoLogits` before the first step with a head, `Length` when `out` is not one vocabulary long.
    pub fn logits_into(&mut self, out: &mut [f32]) -> Result<()> {
        match self.logit_rows {
            0 => Err(Error::NoLogits),
            rows => self.logits_row_into(rows - 1, out),
        }
    }

    /// Head rows of the last pass that had any: one for each slot of a decoded batch, in its order.
    pub fn logit_rows(&self) -> usize {
        self.logit_rows
    }

    /// Copies the logits of head row `row` of the last pass, after the softcap.
    ///
    /// # Errors
    /// `NoLogits` when the last pass had no such head row, `Length` when `out` is not one vocabulary long.
    pub fn logits_row_into(&mut self, row: usize, out: &mut [f32]) -> Result<()> {
        if row >= self.logit_rows {
            return Err(Error::NoLogits);
        }
        let vocab = self.model().config.vocab;
        if out.len() != vocab {
            return Err(Error::Length { what: "logits", expected: vocab, found: out.len() });
        }
        let (act, rows) = (self.model().acts.logits, self.logit_rows);
        let mut values = Vec::new();
        self.runner.backend().read(act, rows, &mut values)?;
        out.copy_from_slice(&values[row * vocab..][..vocab]);
        Ok(())
    }

    /// Residual after `layer` for each row of the last batch, `[rows, hidden]`.
    ///
    /// # Errors
    /// `NotCaptured` unless [`Stepper::set_capture`] asked for it.
    pub fn hidden(&self, layer: usize) -> Result<&Tap> {
        let layers = self.model().layers.len();
        if layer >= layers {
            return Err(Error::Layer { layer, layers });
        }
        self.tap(TapPoint::LayerOut(layer))
    }

    /// The last batch's head rows after the final norm, `[head rows, hidden]`.
    ///
    /// # Errors
    /// `NotCaptured` unless [`Stepper::set_capture`] asked for it.
    pub fn final_norm(&self) -> Result<&Tap> {
        self.tap(TapPoint::FinalNorm)
    }

    /// Anything that the last batch captured.
    ///
    /// # Errors
    /// `NotCaptured` unless [`Stepper::set_capture`] asked for it and the pass reached it.
    pub fn tap(&self, point: TapPoint) -> Result<&Tap> {
        let found = self.outcome.taps.iter().find(|t| t.point == point);
        found.ok_or_else(|| Error::NotCaptured { what: format!("{point:?}") })
    }

    /// Microseconds that each phase of the last pass took on the device; empty where the device was not asked to
    /// measure, or does not.
    pub fn phases(&self) -> &[(Phase, f64)] {
        &self.outcome.phases
    }

    /// Bytes of weights that the last pass read; 0 where the device does not count them.
    pub fn weight_bytes(&self) -> u64 {
        self.outcome.weight_bytes
    }

    /// Runs the attention sublayer of `layer` on the residual row `x` at `position` of the single sequence, and
    /// returns the residual after it: `x + rms(Attention(rms(x)); post_attention_norm)`. Writes the layer's
    /// keys and values at `position`, which must be the cursor; the cursor stays. A KV-sharing layer reads what
    /// its donor wrote there, so the donor's turn comes first.
    ///
    /// # Errors
    /// `Layer`, `Length`, `SoftNotFinite`, `Position`, `ContextFull`.
    pub fn layer_attention(&mut self, layer: usize, x: &[f32], position: usize) -> Result<Vec<f32>> {
        if self.single.cursor() != position {
            return Err(Error::Position { expected: self.single.cursor(), found: position });
        }
        self.sublayer(layer, x, &move |s, m, _| lapidary_model::forward::attention_sublayer(s, m, layer))
    }

    /// Runs the feed-forward sublayer of `layer` on the residual row `x`: the routed block where the layer has
    /// a router, the dense one elsewhere. Returns `x + rms(f(x); post_feedforward_norm)`, without the
    /// per-layer embedding branch and the layer scalar.
    ///
    /// # Errors
    /// `Layer`, `Length`, `SoftNotFinite`, `ContextFull`.
    pub fn layer_ffn(&mut self, layer: usize, x: &[f32]) -> Result<Vec<f32>> {
        self.sublayer(layer, x, &move |s, m, _| lapidary_model::forward::ffn_sublayer(s, m, layer))
    }

    fn sublayer(
        &mut self,
        layer: usize,
        x: &[f32],
        program: &(dyn Fn(&mut dyn Ops, &Model, &BatchShape) + Sync),
    ) -> Result<Vec<f32>> {
        let config = &self.model().config;
        let (layers, hidden, pad) = (config.layers.len(), config.hidden, config.pad as i32);
        if layer >= layers {
            return Err(Error::Layer { layer, layers });
        }
        if x.len() != hidden {
            return Err(Error::Length { what: "residual row", expected: hidden, found: x.len() });
        }
        if x.iter().any(|v| !v.is_finite()) {
            return Err(Error::SoftNotFinite { index: 0 });
        }
        self.single.room(1)?;
        let mut b = std::mem::take(&mut self.batch);
        b.clear();
        b.tokens.push(pad);
        b.per_layer_tokens.push(pad);
        b.positions.push(self.single.cursor() as i32);
        b.visible_to.iter_mut().for_each(|v| v.push(self.single.cursor() as i32 + 1));
        b.soft_rows.push(0);
        b.soft_values.extend_from_slice(x);
        let tables = self.single.tables(&mut b, 1);
        b.spans.push(RowSpan { first_row: 0, rows: 1, tables });
        self.batch = b;
        self.single.touch(1);
        let shape = self.batch.shape(layers, TailRows::All);
        self.runner.run_program(&self.batch, &shape, program)?;
        let act = self.model().acts.x;
        let mut out = Vec::new();
        self.runner.backend().read(act, 1, &mut out)?;
        Ok(out)
    }
}
