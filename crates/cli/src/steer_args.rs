//! The flag that steers.

use std::sync::Arc;

use clap::Args;
use lapidary::Config;
use lapidary::steering::{SteerSpec, Steering};

/// Edits of the residual stream.
#[derive(Clone, Debug, Args)]
pub struct SteerArgs {
    /// Steer along a control vector: file=FILE,mode=add|ablate|clamp|renorm,strength=S,layers=A-B,gate=T (to=P with
    /// clamp); may be given several times
    #[arg(long, value_name = "SPEC", value_parser = spec)]
    pub steer: Vec<SteerSpec>,
}

fn spec(text: &str) -> Result<SteerSpec, String> {
    text.parse().map_err(|e: lapidary::steering::SteeringError| e.to_string())
}

impl SteerArgs {
    /// The vectors, read and held against the model, or nothing when none was given.
    pub fn steering(&self, config: &Config) -> anyhow::Result<Option<Arc<Steering>>> {
        if self.steer.is_empty() {
            return Ok(None);
        }
        let steering = Steering::from_files(&self.steer)?;
        steering.plan(config)?;
        Ok(Some(Arc::new(steering)))
    }
}
