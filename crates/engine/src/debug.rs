//! Looking inside: logits, captured activations, and single sublayers.

use lapidary_model::Model;
use lapidary_ops::{Batch, BatchShape, Ops, PageTable, RowSpan, TailRows, Tap, TapPoint};

use crate::error::{Error, Result};
use crate::prompt::{check_token, push_token};
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

    /// Bytes of weights that the last pass read; 0 where the device does not count them.
    pub fn weight_bytes(&self) -> u64 {
        self.outcome.weight_bytes
    }

    /// The head applied to residual rows, `[rows, hidden]`, that any layer left: final norm, output head and softcap,
    /// which on the last layer's rows gives the logits themselves, bit for bit. Hands `(row, logits)` to `sink` in
    /// order. No sequence moves; the logits of the last step are gone.
    ///
    /// # Errors
    /// `Length` for values that are no whole rows, `SoftNotFinite` for a row that is not finite.
    pub fn lens(&mut self, hidden: &[f32], sink: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let config = &self.model().config;
        let (width, vocab, pad, layers) =
            (config.hidden, config.vocab, config.pad as i32, config.layers.len());
        if hidden.is_empty() || !hidden.len().is_multiple_of(width) {
            let expected = hidden.len().next_multiple_of(width).max(width);
            return Err(Error::Length { what: "residual rows", expected, found: hidden.len() });
        }
        if let Some(i) = hidden.iter().position(|v| !v.is_finite()) {
            return Err(Error::SoftNotFinite { index: i / width });
        }
        let limits = self.model().limits;
        let act = self.model().acts.logits;
        let mut values = Vec::new();
        let mut first = 0;
        for part in hidden.chunks(width * limits.rows.min(limits.head_rows)) {
            let rows = part.len() / width;
            let mut b = Batch {
                tokens: vec![pad; rows],
                per_layer_tokens: vec![pad; rows],
                positions: vec![0; rows],
                visible_to: [vec![1; rows], vec![1; rows]],
                // Page 0 is nobody's, and no layer runs.
                pages: [vec![0], vec![0]],
                soft_rows: (0..rows as i32).collect(),
                soft_values: part.to_vec(),
                heads: (0..rows as i32).collect(),
                ..Batch::default()
            };
            let table = PageTable { start: 0, count: 1, first_block: 0 };
            b.spans.extend((0..rows).map(|row| RowSpan { first_row: row, rows: 1, tables: [table; 2] }));
            let shape = BatchShape { layers: (0, 0), ..b.shape(layers, TailRows::All) };
            self.logit_rows = 0;
            self.runner.run(&b, &shape)?;
            self.runner.backend().read(act, rows, &mut values)?;
            values.chunks_exact(vocab).enumerate().for_each(|(i, row)| sink(first + i, row));
            first += rows;
        }
        Ok(())
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

    /// The scaled embeddings of `tokens`, `[tokens, hidden]`. No sequence moves.
    ///
    /// # Errors
    /// `EmptyPrompt`, `Token`, `TooManyRows`.
    pub fn embedding(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let config = &self.model().config;
        tokens.iter().try_for_each(|&token| check_token(config, token))?;
        let ids: Vec<i32> = tokens.iter().map(|&token| config.lookup_id(token) as i32).collect();
        if ids.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let rows = ids.len();
        let layers = config.layers.len();
        let table = PageTable { start: 0, count: 1, first_block: 0 };
        let b = Batch {
            per_layer_tokens: ids.clone(),
            tokens: ids,
            positions: vec![0; rows],
            visible_to: [vec![1; rows], vec![1; rows]],
            // Page 0 is nobody's, and no layer runs.
            pages: [vec![0], vec![0]],
            spans: (0..rows).map(|row| RowSpan { first_row: row, rows: 1, tables: [table; 2] }).collect(),
            ..Batch::default()
        };
        let shape = BatchShape { layers: (0, 0), ..b.shape(layers, TailRows::All) };
        let program = |s: &mut dyn Ops, m: &Model, _: &BatchShape| s.embed(m.acts.x, m.embed, m.embed_scale);
        self.runner.run_program(&b, &shape, &program)?;
        let act = self.model().acts.x;
        let mut out = Vec::new();
        self.runner.backend().read(act, rows, &mut out)?;
        Ok(out)
    }

    /// Runs `layer` alone on the residual rows `hidden`, `[tokens, hidden]`, at positions 0 on, and returns the rows
    /// after it, its scalar included. What a layer of another model, or of another arithmetic, was given can thus be
    /// given to this one. The single sequence is reset; a KV-sharing layer reads what its donor's last such run wrote,
    /// so layers run in order.
    ///
    /// # Errors
    /// `Layer`, `Token`, `EmptyPrompt`, `Length`, `SoftNotFinite`, `TooManyRows` for more tokens than one batch holds,
    /// `ContextFull`.
    pub fn layer_rows(&mut self, layer: usize, tokens: &[u32], hidden: &[f32]) -> Result<Vec<f32>> {
        let config = &self.model().config;
        let (layers, width, limit) = (config.layers.len(), config.hidden, self.model().limits.rows);
        if layer >= layers {
            return Err(Error::Layer { layer, layers });
        }
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        tokens.iter().try_for_each(|&token| check_token(config, token))?;
        if hidden.len() != tokens.len() * width {
            let expected = tokens.len() * width;
            return Err(Error::Length { what: "residual rows", expected, found: hidden.len() });
        }
        if let Some(i) = hidden.iter().position(|v| !v.is_finite()) {
            return Err(Error::SoftNotFinite { index: i / width });
        }
        if tokens.len() > limit {
            return Err(Error::TooManyRows { rows: tokens.len(), limit });
        }
        self.single.reset();
        self.single.room(tokens.len())?;
        let mut b = std::mem::take(&mut self.batch);
        b.clear();
        for (position, &token) in tokens.iter().enumerate() {
            push_token(&mut b, &self.runner.model().config, token, position);
        }
        b.soft_rows.extend(0..tokens.len() as i32);
        b.soft_values.extend_from_slice(hidden);
        let tables = self.single.tables(&mut b, tokens.len());
        b.spans.push(RowSpan { first_row: 0, rows: tokens.len(), tables });
        self.batch = b;
        let shape = self.batch.shape(layers, TailRows::All);
        let program = move |s: &mut dyn Ops, m: &Model, _: &BatchShape| {
            lapidary_model::forward::layer_alone(s, m, layer);
        };
        self.runner.run_program(&self.batch, &shape, &program)?;
        let act = self.model().acts.x;
        let mut out = Vec::new();
        self.runner.backend().read(act, tokens.len(), &mut out)?;
        Ok(out)
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
