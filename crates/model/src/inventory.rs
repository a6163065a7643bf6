//! Holds the tensors of a file against the config: what the pass would never read is no part of this model.
//!
//! A tensor without a place means that config and file describe different models, and the text would be wrong
//! without a word. Tensors that published files carry though no layer reads them are known by name here.

use lapidary_weights::{Checkpoint, LayerRole, Role};

use crate::config::{Config, LayerConfig};
use crate::error::Result;

impl Config {
    /// Checks that every text tensor of the checkpoint belongs to this model; touches headers only. Tensors that
    /// are missing are found by whoever asks for them.
    ///
    /// # Errors
    /// Names the first tensor that the config has no place for, and why.
    pub fn check_tensors(&self, checkpoint: &Checkpoint) -> Result<()> {
        for role in checkpoint.roles() {
            if let Err(why) = self.place(role) {
                return Err(checkpoint.refuse(role, &why).into());
            }
        }
        Ok(())
    }

    fn place(&self, role: Role) -> Result<(), String> {
        match role {
            // A head is honoured when the config ties it too; divisors take the place of the computed rotation.
            Role::Embed | Role::FinalNorm | Role::Head | Role::RopeFreqs => Ok(()),
            Role::PerLayerTable | Role::PerLayerModelProj | Role::PerLayerProjNorm => self.per_layer_place(),
            Role::Layer(index, role) => match self.layers.get(index as usize) {
                Some(layer) => self.place_in(layer, role),
                None => Err(format!("the configuration has {} layers", self.layers.len())),
            },
        }
    }

    fn place_in(&self, layer: &LayerConfig, role: LayerRole) -> Result<(), String> {
        use LayerRole::*;
        match role {
            InputNorm | PostAttnNorm | PreFfnNorm | PostFfnNorm | QProj | OProj | QNorm | Gate | Up
            | Down => Ok(()),
            // Files hold keys and values for layers that share another's: nobody reads them.
            KProj | KNorm => Ok(()),
            VProj if layer.values_are_keys => {
                Err("the configuration says that this layer's values are its keys".to_owned())
            }
            VProj => Ok(()),
            // Hints for a cache in FP8; ours scales what it stores by itself.
            KScale | VScale => Ok(()),
            LayerScalar if !self.layer_scalar => Err("layers of this family end without a scalar".to_owned()),
            LayerScalar => Ok(()),
            PerLayerGate | PerLayerProj | PostPerLayerNorm => self.per_layer_place(),
            Router
            | RouterScale
            | PerExpertScale
            | ExpertsGateUp
            | ExpertsGate
            | ExpertsUp
            | ExpertsDown
            | Expert { .. }
            | PreFfnNorm2
            | PostFfnNorm1
            | PostFfnNorm2 => match (self.moe, role) {
                (None, _) => Err("the configuration has no experts".to_owned()),
                (Some(moe), Expert { index, .. }) if index as usize >= moe.experts => {
                    Err(format!("the configuration has {} experts", moe.experts))
                }
                (Some(_), _) => Ok(()),
            },
        }
    }

    fn per_layer_place(&self) -> Result<(), String> {
        match self.per_layer {
            Some(_) => Ok(()),
            None => Err("the configuration has no per-layer inputs".to_owned()),
        }
    }
}
