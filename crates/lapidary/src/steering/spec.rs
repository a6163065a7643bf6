//! How a vector is to be used, as people write it: in a flag, in a request.

use std::fmt;
use std::str::FromStr;

use lapidary_ops::SteerMode;
use serde::{Deserialize, Serialize};

use super::error::{Result, SteeringError};

/// What is done along a direction; [`SteerMode`] has the formulas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The direction times the strength is added.
    #[default]
    Add,
    /// The projection is removed.
    Ablate,
    /// The projection is set.
    Clamp,
    /// The projection is removed and the old length restored.
    Renorm,
}

impl Mode {
    /// The verb's name for it.
    pub fn mode(self) -> SteerMode {
        match self {
            Mode::Add => SteerMode::Add,
            Mode::Ablate => SteerMode::Ablate,
            Mode::Clamp => SteerMode::Clamp,
            Mode::Renorm => SteerMode::Renorm,
        }
    }
}

/// Layers from `first` to `last`, both included: `"3-9"`, `"5"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LayerRange {
    /// The first.
    pub first: usize,
    /// The last.
    pub last: usize,
}

impl LayerRange {
    /// Whether `layer` is one of them.
    pub fn contains(&self, layer: usize) -> bool {
        (self.first..=self.last).contains(&layer)
    }
}

impl fmt::Display for LayerRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first),
            false => write!(f, "{}-{}", self.first, self.last),
        }
    }
}

impl FromStr for LayerRange {
    type Err = SteeringError;

    fn from_str(text: &str) -> Result<LayerRange> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let bad = || SteeringError::Field {
            field: "layers",
            found: format!("{text:?}"),
            expected: "a layer's number, or a first and a last one as in 3-9",
        };
        let number = |t: &str| t.trim().parse::<usize>().map_err(|_| bad());
        let range = LayerRange { first: number(first)?, last: number(last)? };
        if range.first > range.last { Err(bad()) } else { Ok(range) }
    }
}

impl TryFrom<String> for LayerRange {
    type Error = SteeringError;

    fn try_from(text: String) -> Result<LayerRange> {
        text.parse()
    }
}

impl From<LayerRange> for String {
    fn from(range: LayerRange) -> String {
        range.to_string()
    }
}

/// One vector's part in steering. In JSON `{"vector": "owls", "mode": "add", "strength": 2, "layers": "3-9"}`; as a
/// flag `file=owls.gguf,mode=add,strength=2,layers=3-9`. All but the vector can be left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SteerSpec {
    /// The vector's name or path; who resolves it decides which.
    pub vector: String,
    /// What is done.
    #[serde(default)]
    pub mode: Mode,
    /// How much of it; 0 changes nothing and still measures projections.
    #[serde(default = "one")]
    pub strength: f32,
    /// The layers, among those that the vector has; all of these when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayerRange>,
    /// The projection that `clamp` sets, in units of the residual stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<f32>,
    /// Only rows whose projection exceeds this are edited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<f32>,
}

fn one() -> f32 {
    1.0
}

impl SteerSpec {
    /// Adds `vector` once, at all of its layers.
    pub fn new(vector: impl Into<String>) -> SteerSpec {
        SteerSpec {
            vector: vector.into(),
            mode: Mode::Add,
            strength: 1.0,
            layers: None,
            to: None,
            gate: None,
        }
    }

    /// Checks the numbers, and that `to` is there with `clamp` and only then.
    ///
    /// # Errors
    /// `Field` with the one that is wrong.
    pub fn check(&self) -> Result<()> {
        let finite = "a finite number";
        let numbers = [("strength", Some(self.strength)), ("to", self.to), ("gate", self.gate)];
        for (field, value) in numbers {
            if let Some(v) = value.filter(|v| !v.is_finite()) {
                return Err(SteeringError::Field { field, found: v.to_string(), expected: finite });
            }
        }
        match (self.mode, self.to) {
            (Mode::Clamp, None) => Err(SteeringError::Field {
                field: "to",
                found: "absent".into(),
                expected: "the projection that clamp sets",
            }),
            (Mode::Clamp, Some(_)) | (_, None) => Ok(()),
            (_, Some(v)) => Err(SteeringError::Field {
                field: "to",
                found: v.to_string(),
                expected: "none but with clamp",
            }),
        }
    }
}

impl FromStr for SteerSpec {
    type Err = SteeringError;

    fn from_str(text: &str) -> Result<SteerSpec> {
        let mut spec = SteerSpec::new("");
        for (i, part) in text.split(',').enumerate() {
            let (key, value) = match part.split_once('=') {
                Some((key, value)) => (key.trim(), value.trim()),
                // A path alone is the whole of the simplest flag.
                None if i == 0 => ("file", part.trim()),
                None => {
                    let problem = format!("{part:?} is no setting; expected one like strength=2");
                    return Err(SteeringError::Spec { problem });
                }
            };
            let number = |field| {
                let expected = "a number";
                value.parse::<f32>().map_err(|_| SteeringError::Field {
                    field,
                    found: format!("{value:?}"),
                    expected,
                })
            };
            match key {
                "file" => spec.vector = value.to_owned(),
                "mode" => {
                    let names = SteerMode::ALL.map(SteerMode::name);
                    let modes = [Mode::Add, Mode::Ablate, Mode::Clamp, Mode::Renorm];
                    let place = names.iter().position(|name| *name == value);
                    let expected = "add, ablate, clamp or renorm";
                    spec.mode = place.map(|i| modes[i]).ok_or_else(|| SteeringError::Field {
                        field: "mode",
                        found: format!("{value:?}"),
                        expected,
                    })?;
                }
                "strength" => spec.strength = number("strength")?,
                "layers" => spec.layers = Some(value.parse()?),
                "to" => spec.to = Some(number("to")?),
                "gate" => spec.gate = Some(number("gate")?),
                _ => {
                    let problem = format!(
                        "there is no setting {key:?}; expected file, mode, strength, layers, to or gate"
                    );
                    return Err(SteeringError::Spec { problem });
                }
            }
        }
        if spec.vector.is_empty() {
            return Err(SteeringError::Spec { problem: "file=PATH is missing".into() });
        }
        spec.check()?;
        Ok(spec)
    }
}
