//! Steering and captures on the wire, and probabilities of a prompt: what only researchers ask for.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lapidary::capture::{Captured, Values};
use lapidary::service::PromptToken;
use lapidary::steering::{ControlVector, LayerRange, Mode, SteerSpec};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// `steering`: one vector's part, or a list of them.
#[derive(Debug, Clone, Default)]
pub struct Steers(Vec<Steer>);

/// One vector's part; the names are those of [`SteerSpec`].
#[derive(Debug, Clone, serde::Deserialize)]
struct Steer {
    vector: Vector,
    mode: Option<Mode>,
    strength: Option<f32>,
    layers: Option<LayerRange>,
    to: Option<f32>,
    gate: Option<f32>,
}

/// A vector of the server's by its name, or directions by layer.
#[derive(Debug, Clone)]
enum Vector {
    Name(String),
    Directions(BTreeMap<usize, Vec<f32>>),
}

impl<'de> Deserialize<'de> for Steers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Steers;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with a vector, or a list of such")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Steers, A::Error> {
                Steer::deserialize(MapAccessDeserializer::new(map)).map(|one| Steers(vec![one]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Steers, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(Steers)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

impl<'de> Deserialize<'de> for Vector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Vector;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vector's name, or an object of directions by layer")
            }
            fn visit_str<E: Error>(self, name: &str) -> Result<Vector, E> {
                Ok(Vector::Name(name.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vector, A::Error> {
                let mut directions = BTreeMap::new();
                while let Some((layer, values)) = map.next_entry::<String, Vec<f32>>()? {
                    let number = layer.parse();
                    let number =
                        number.map_err(|_| A::Error::custom(format!("{layer:?} is no layer's number")))?;
                    directions.insert(number, values);
                }
                Ok(Vector::Directions(directions))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

impl Steers {
    /// Specs, and the vectors that came with the request, named so that no file is.
    ///
    /// # Errors
    /// A vector of the request's own that is none.
    pub fn parts(self) -> Result<(Vec<SteerSpec>, Vec<Arc<ControlVector>>), ApiError> {
        let (mut specs, mut vectors) = (Vec::new(), Vec::new());
        for (i, steer) in self.0.into_iter().enumerate() {
            let vector = match steer.vector {
                Vector::Name(name) => name,
                Vector::Directions(directions) => {
                    let name = format!("steering[{i}].vector");
                    let vector = ControlVector::new(&name, directions);
                    let vector =
                        vector.map_err(|error| ApiError::bad_request(Some(&name), &error.to_string()))?;
                    vectors.push(Arc::new(vector));
                    name
                }
            };
            specs.push(SteerSpec {
                mode: steer.mode.unwrap_or_default(),
                strength: steer.strength.unwrap_or(1.0),
                layers: steer.layers,
                to: steer.to,
                gate: steer.gate,
                ..SteerSpec::new(vector)
            });
        }
        Ok((specs, vectors))
    }
}

/// Captured activations: positions as numbers, tensors as little-endian bytes in base64.
pub fn captured(tensors: &[Captured]) -> Value {
    let (mut positions, mut named) = (Value::Null, Map::new());
    for tensor in tensors {
        let (dtype, bytes): (_, Vec<u8>) = match &tensor.values {
            Values::I64(values) if tensor.name == "positions" => {
                positions = json!(values);
                continue;
            }
            Values::I64(values) => ("I64", values.iter().flat_map(|v| v.to_le_bytes()).collect()),
            Values::F32(values) => ("F32", values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        };
        let value = json!({ "dtype": dtype, "shape": tensor.shape, "data": STANDARD.encode(bytes) });
        named.insert(tensor.name.clone(), value);
    }
    json!({ "positions": positions, "tensors": named })
}

/// Probabilities of a prompt's tokens as vLLM writes them: null for the first, then by id the token itself and the
/// likeliest ones.
pub fn prompt_logprobs(tokens: &[PromptToken]) -> Value {
    let each = tokens.iter().map(|token| {
        let Some(logprob) = token.logprob else { return Value::Null };
        let mut by_id = Map::new();
        let own = json!({ "logprob": logprob, "decoded_token": token.text });
        by_id.insert(token.token.to_string(), own);
        for (i, top) in token.top.iter().enumerate() {
            let ranked = json!({ "logprob": top.logprob, "rank": i + 1, "decoded_token": top.text });
            by_id.insert(top.token.to_string(), ranked);
        }
        Value::Object(by_id)
    });
    each.collect()
}

/// The tokens of a prompt, collected until they are all there.
#[derive(Debug, Default)]
pub struct PromptTokens {
    tokens: Vec<PromptToken>,
    expected: usize,
}

impl PromptTokens {
    /// The prompt has so many.
    pub fn expect(&mut self, tokens: usize) {
        self.expected = tokens;
    }

    /// Adds some; all of them once the last has come.
    pub fn add(&mut self, tokens: Vec<PromptToken>) -> Option<Vec<PromptToken>> {
        self.tokens.extend(tokens);
        let whole = !self.tokens.is_empty() && self.tokens.len() >= self.expected;
        whole.then(|| std::mem::take(&mut self.tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steering_in_every_form() {
        let read = |text: &str| serde_json::from_str::<Steers>(text).map(|s| s.parts().unwrap());
        let (specs, vectors) =
            read(r#"{"vector": "owls", "mode": "clamp", "to": 2, "layers": "3-9"}"#).unwrap();
        assert_eq!((specs.len(), specs[0].vector.as_str(), specs[0].to), (1, "owls", Some(2.0)));
        assert!(vectors.is_empty());
        let (specs, vectors) = read(r#"[{"vector": "a"}, {"vector": {"2": [1, 0]}, "gate": 0.5}]"#).unwrap();
        assert_eq!((specs[1].vector.as_str(), specs[1].gate), ("steering[1].vector", Some(0.5)));
        assert_eq!(
            (vectors[0].name.as_str(), &vectors[0].directions[&2]),
            ("steering[1].vector", &vec![1.0, 0.0])
        );
        for wrong in
            ["3", "{}", r#"{"vector": 1}"#, r#"{"vector": {"x": [1]}}"#, r#"[{"vector": "a", "mode": "no"}]"#]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        let zero = serde_json::from_str::<Steers>(r#"{"vector": {"2": [0, 0]}}"#).unwrap();
        assert!(zero.parts().unwrap_err().to_string().contains("points nowhere"));
    }
}
