//! A request's captured rows, collected batch by batch.

use std::ops::Range;

use lapidary_model::Config;
use lapidary_ops::{Batch, Outcome, Tap, TapPoint};

use super::error::Result;
use super::spec::{CapturePositions, CaptureSpec, What, vectors};
use super::{Captured, Values};

/// What one request captures and has captured.
#[derive(Clone, Debug)]
pub struct Recording {
    positions: CapturePositions,
    prompt: usize,
    /// What batches must copy out.
    points: Vec<TapPoint>,
    series: Vec<Series>,
}

#[derive(Clone, Debug)]
struct Series {
    what: What,
    layer: usize,
    from: Source,
    /// Sides of one position's values.
    sides: Vec<usize>,
    positions: Vec<usize>,
    values: Vec<f32>,
}

/// Where a batch has a row's values.
#[derive(Clone, Debug, PartialEq)]
enum Source {
    /// In a copy.
    Tap(TapPoint),
    /// Among its projections: for each vector, which one, if there is one.
    Edits(Vec<Option<usize>>),
}

impl Recording {
    /// Nothing yet, for a request whose prompt has `prompt` tokens and whose rows get the edits of a
    /// [`SteerPlan`](crate::steering::SteerPlan), if any.
    ///
    /// # Errors
    /// What [`CaptureSpec::bytes_per_position`] refuses.
    pub fn new(
        spec: &CaptureSpec,
        config: &Config,
        prompt: usize,
        edits: &[(usize, usize)],
    ) -> Result<Recording> {
        spec.bytes_per_position(config, edits)?;
        let (mut points, mut series): (Vec<TapPoint>, Vec<Series>) = (Vec::new(), Vec::new());
        for layer in spec.layers.list(config.layers.len())? {
            for &what in &spec.what {
                let tap = |point| Source::Tap(point);
                let (from, sides) = match what {
                    What::Hidden => (tap(TapPoint::LayerOut(layer)), vec![config.hidden]),
                    What::Mlp => (tap(TapPoint::Mlp(layer)), vec![config.hidden]),
                    What::Attn => {
                        (tap(TapPoint::Attn(layer)), vec![config.heads, config.layers[layer].head_dim])
                    }
                    What::Routes => (tap(TapPoint::Routes(layer)), vec![config.moe.map_or(0, |m| m.top_k)]),
                    What::Projections => {
                        let of = |vector| edits.iter().position(|&edit| edit == (layer, vector));
                        let places: Vec<Option<usize>> = (0..vectors(edits)).map(of).collect();
                        if places.iter().all(Option::is_none) {
                            continue;
                        }
                        let sides = vec![places.len()];
                        (Source::Edits(places), sides)
                    }
                };
                if series.iter().any(|s| s.from == from && s.layer == layer) {
                    continue;
                }
                // A copy at the layer's end makes rows run so far whose logits nobody wants.
                let point = if let Source::Tap(point) = from { point } else { TapPoint::LayerOut(layer) };
                if !points.contains(&point) {
                    points.push(point);
                }
                series.push(Series { what, layer, from, sides, positions: Vec::new(), values: Vec::new() });
            }
        }
        Ok(Recording { positions: spec.positions.clone(), prompt, points, series })
    }

    /// What a batch with positions `positions` of the request must copy out: nothing where none is wanted.
    pub fn points(&self, mut positions: Range<usize>) -> &[TapPoint] {
        let wanted = positions.any(|p| self.positions.wants(p, self.prompt));
        if wanted { &self.points } else { &[] }
    }

    /// The first position that is wanted of a prompt: what was run before and kept must be run again from here.
    pub fn first_of_prompt(&self) -> usize {
        (0..self.prompt).find(|&p| self.positions.wants(p, self.prompt)).unwrap_or(self.prompt)
    }

    /// Takes the request's rows out of a batch that ran: `rows` of the batch hold `positions` of the request. The
    /// batch may hold other requests' rows too, and have copied out more.
    pub fn take(&mut self, batch: &Batch, rows: Range<usize>, positions: Range<usize>, outcome: &Outcome) {
        for series in &mut self.series {
            let point = match &series.from {
                Source::Tap(point) => *point,
                Source::Edits(places) => {
                    for (batch_row, position) in rows.clone().zip(positions.clone()) {
                        if self.positions.wants(position, self.prompt) {
                            let row = outcome.projections.row(batch_row);
                            let of = |place: &Option<usize>| place.and_then(|place| row.get(place).copied());
                            series.positions.push(position);
                            series.values.extend(places.iter().map(|place| of(place).unwrap_or(f32::NAN)));
                        }
                    }
                    continue;
                }
            };
            let Some(tap) = outcome.taps.iter().find(|tap| tap.point == point) else { continue };
            for (row, values) in tap.values.chunks_exact(tap.width).enumerate() {
                let batch_row = batch.row_of(tap, row);
                if !rows.contains(&batch_row) {
                    continue;
                }
                let position = positions.start + batch_row - rows.start;
                if self.positions.wants(position, self.prompt) {
                    series.positions.push(position);
                    series.values.extend_from_slice(values);
                }
            }
        }
    }

    /// The rows as tensors, with `positions [P]` beside them.
    pub fn tensors(&self) -> Vec<Captured> {
        let mut out = Vec::new();
        // A sequence that went back runs positions again; every point then has the same ones.
        if let Some(series) = self.series.first() {
            let positions: Vec<i64> = series.positions.iter().map(|&p| p as i64).collect();
            out.push(Captured {
                name: "positions".into(),
                shape: vec![positions.len()],
                values: Values::I64(positions),
            });
        }
        for s in &self.series {
            let shape = [&[s.positions.len()][..], &s.sides].concat();
            let f32s =
                |name: String| Captured { name, shape: shape.clone(), values: Values::F32(s.values.clone()) };
            let layer = s.layer;
            match s.what {
                What::Hidden => out.push(f32s(format!("hidden.{layer}"))),
                What::Attn => out.push(f32s(format!("attn.{layer}.o"))),
                What::Mlp => out.push(f32s(format!("mlp.{layer}"))),
                What::Projections => out.push(f32s(format!("projections.{layer}"))),
                What::Routes => {
                    let (ids, weights) = routes(&s.values, s.sides[0]);
                    let named = |name: String, values| Captured { name, shape: shape.clone(), values };
                    out.push(named(format!("router_idx.{layer}"), Values::I64(ids)));
                    out.push(named(format!("router_weight.{layer}"), Values::F32(weights)));
                }
            }
        }
        out
    }
}

/// Experts and weights of rows of `TapPoint::Routes`.
pub(crate) fn routes(values: &[f32], top_k: usize) -> (Vec<i64>, Vec<f32>) {
    let rows = values.chunks_exact(2 * top_k);
    let ids = rows.clone().flat_map(|row| row[..top_k].iter().map(|&id| id as i64)).collect();
    (ids, rows.flat_map(|row| row[top_k..].iter().copied()).collect())
}

/// The values of `row` in a capture.
pub(crate) fn row_of(tap: &Tap, row: usize) -> &[f32] {
    &tap.values[row * tap.width..(row + 1) * tap.width]
}
