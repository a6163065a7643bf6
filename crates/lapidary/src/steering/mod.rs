//! Steering: control vectors, their files, and what requests ask of them.
//!
//! A [`ControlVector`] has a direction for some layers. A [`SteerSpec`] says, as plain data that serde reads and
//! writes, how one vector is to be used; [`Steering::resolve`] joins the two, and [`Steering::plan`] turns them into
//! the edits that a model's rows get. [`AnswerOptions::steering`](crate::AnswerOptions::steering) takes a
//! `Steering`; [`Stepper::set_steering`](crate::Stepper::set_steering) takes the plan's set.

mod error;
mod fit;
mod spec;
mod vector;

use std::sync::Arc;

use lapidary_model::Config;
use lapidary_ops::{SteerEdit, SteerSet};

pub use error::{Result, SteeringError};
pub use fit::{Fit, FitOptions, Positions, fit};
pub use lapidary_ops::{Projections, SteerMode};
pub use spec::{LayerRange, Mode, SteerSpec};
pub use vector::ControlVector;

/// Vectors with their settings, in the order in which they apply within a layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steering {
    /// Each vector with what is asked of it.
    pub vectors: Vec<(Arc<ControlVector>, SteerSpec)>,
}

/// The edits of a [`Steering`] on one model.
#[derive(Clone, Debug, PartialEq)]
pub struct SteerPlan {
    /// What rows are given.
    pub set: SteerSet,
    /// For each edit of the set, and so for each of a row's projections: the layer and the index of the vector.
    pub edits: Vec<(usize, usize)>,
}

impl Steering {
    /// Joins each spec with the vector that `find` has for its name: a file, or an entry of a server's list.
    ///
    /// # Errors
    /// What `find` refuses; a spec whose numbers are wrong.
    pub fn resolve(
        specs: &[SteerSpec],
        find: &mut dyn FnMut(&str) -> Result<Arc<ControlVector>>,
    ) -> Result<Steering> {
        let mut vectors = Vec::with_capacity(specs.len());
        for spec in specs {
            spec.check()?;
            vectors.push((find(&spec.vector)?, spec.clone()));
        }
        Ok(Steering { vectors })
    }

    /// [`Steering::resolve`] with files, each read once.
    ///
    /// # Errors
    /// As [`ControlVector::read`].
    pub fn from_files(specs: &[SteerSpec]) -> Result<Steering> {
        let mut read: Vec<Arc<ControlVector>> = Vec::new();
        Steering::resolve(specs, &mut |path| {
            if let Some(found) = read.iter().find(|v| v.name == path) {
                return Ok(found.clone());
            }
            let mut vector = ControlVector::read(path.as_ref())?;
            vector.name = path.to_owned();
            let vector = Arc::new(vector);
            read.push(vector.clone());
            Ok(vector)
        })
    }

    /// The edits for the model that `config` describes.
    ///
    /// # Errors
    /// A vector of another width or for another number of layers, a layer that the model does not have, a range in
    /// which the vector has no direction.
    pub fn plan(&self, config: &Config) -> Result<SteerPlan> {
        let last = config.layers.len() - 1;
        let mut edits: Vec<(usize, usize, SteerEdit)> = Vec::new();
        for (index, (vector, spec)) in self.vectors.iter().enumerate() {
            spec.check()?;
            vector.check(config)?;
            if let Some(range) = spec.layers.filter(|range| range.last > last) {
                let (vector, range) = (vector.name.clone(), range.to_string());
                return Err(SteeringError::Range { vector, range, last });
            }
            let before = edits.len();
            for (&layer, direction) in &vector.directions {
                if spec.layers.is_some_and(|range| !range.contains(layer)) {
                    continue;
                }
                let mut edit = SteerEdit::new(layer, spec.mode.mode(), spec.strength, direction)?;
                edit.to = spec.to.unwrap_or(0.0);
                edit.gate = spec.gate;
                edits.push((layer, index, edit));
            }
            if edits.len() == before {
                let layers: Vec<String> = vector.directions.keys().map(usize::to_string).collect();
                return Err(SteeringError::NoDirection {
                    vector: vector.name.clone(),
                    range: spec.layers.map_or("all".to_owned(), |r| r.to_string()),
                    available: layers.join(", "),
                });
            }
        }
        // Stable: within a layer the vectors stay in their order.
        edits.sort_by_key(|(layer, ..)| *layer);
        let labels = edits.iter().map(|(layer, index, _)| (*layer, *index)).collect();
        let set = SteerSet { edits: edits.into_iter().map(|(.., edit)| edit).collect() };
        set.check(config.layers.len(), config.hidden)?;
        Ok(SteerPlan { set, edits: labels })
    }
}
