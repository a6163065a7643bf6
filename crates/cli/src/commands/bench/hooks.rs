//! What it costs to capture or to steer a layer of a model on the processor: steps with and without in turn.

use std::time::Instant;

use anyhow::bail;
use lapidary::{Stepper, TapPoint};
use lapidary_ops::{SteerEdit, SteerMode, SteerSet};
use serde_json::{Value, json};

use super::start_at;
use crate::report::median;

/// Medians of single steps, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Worker threads.
    pub threads: usize,
    /// Tokens before each step.
    pub depth: usize,
    /// Without hooks.
    pub plain: f64,
    /// With the layer captured at every position.
    pub captured: f64,
    /// With an edit of every row of the layer.
    pub steered: f64,
}

impl Cost {
    /// Times `steps` steps of each kind after `depth` tokens.
    ///
    /// # Errors
    /// The model has no such layer, or a pass fails.
    pub fn measure(
        stepper: &mut Stepper,
        (threads, depth): (usize, usize),
        steps: usize,
        layer: usize,
    ) -> anyhow::Result<Cost> {
        let layers = stepper.model().layers.len();
        if layer >= layers {
            bail!("--hooks {layer}: the model has layers 0 to {}", layers - 1);
        }
        let set = edit(stepper, layer)?;
        let layer_out = [TapPoint::LayerOut(layer)];
        let mut token = stepper.model().config.bos;
        let mut seconds = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..steps {
            for (kind, seconds) in seconds.iter_mut().enumerate() {
                // Always the same position, so that all kinds read the same.
                start_at(stepper, depth)?;
                stepper.set_capture(if kind == 1 { &layer_out } else { &[] });
                stepper.set_steering((kind == 2).then_some(&set))?;
                let clock = Instant::now();
                token = stepper.decode_step(token, depth)?;
                seconds.push(clock.elapsed().as_secs_f64());
            }
        }
        stepper.set_capture(&[]);
        stepper.set_steering(None)?;
        let [plain, captured, steered] = seconds.map(|s| median(&s));
        Ok(Cost { threads, depth, plain, captured, steered })
    }

    /// A line for people.
    pub fn text(&self, layer: u16) -> String {
        let over = |with: f64| 100.0 * (with / self.plain - 1.0);
        format!(
            "threads {}, depth {}, layer {layer}: {:.3} ms a step, captured {:.3} ms ({:+.2} %), steered {:.3} ms ({:+.2} %)\n",
            self.threads,
            self.depth,
            1e3 * self.plain,
            1e3 * self.captured,
            over(self.captured),
            1e3 * self.steered,
            over(self.steered)
        )
    }

    /// The same as JSON.
    pub fn json(&self, layer: u16) -> Value {
        json!({
            "threads": self.threads,
            "depth": self.depth,
            "layer": layer,
            "step_seconds": self.plain,
            "captured_seconds": self.captured,
            "steered_seconds": self.steered,
        })
    }
}

/// An edit that is made of every row.
pub fn edit(stepper: &Stepper, layer: usize) -> anyhow::Result<SteerSet> {
    let direction: Vec<f32> = (0..stepper.model().config.hidden).map(|i| (i % 7) as f32 - 3.0).collect();
    Ok(SteerSet { edits: vec![SteerEdit::new(layer, SteerMode::Ablate, 0.01, &direction)?] })
}
