//! Steering and captures of requests: vectors by name become edits of rows, copies of activations become tensors of the
//! reply.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use lapidary_engine::Observer;
use lapidary_model::Config;
use lapidary_ops::{Batch, Outcome, TapPoint};

use super::{GenerationParams, Inner, RequestError};
use crate::capture::{CaptureError, CaptureSpec, Captured, Recording};
use crate::steering::{ControlVector, SteerPlan, Steering, SteeringError};

/// Most vectors that one request uses.
const MAX_VECTORS: usize = 64;

/// Vectors that requests may name.
#[derive(Debug, Default)]
pub(super) struct Vectors(BTreeMap<String, Arc<ControlVector>>);

impl Vectors {
    /// All control vectors of a folder, named by their files without the ending.
    ///
    /// # Errors
    /// A folder or a file that cannot be read, a vector that does not fit the model, two files of one name.
    pub fn read(folder: &Path, config: &Config) -> Result<Vectors, SteeringError> {
        let problem = |problem: String| SteeringError::NotAVector { path: folder.to_owned(), problem };
        let mut vectors = BTreeMap::new();
        let entries =
            std::fs::read_dir(folder).map_err(|e| problem(format!("the folder cannot be read: {e}")))?;
        for entry in entries {
            let path = entry.map_err(|e| problem(format!("the folder cannot be read: {e}")))?.path();
            if !path.extension().is_some_and(|end| end == "gguf" || end == "safetensors") {
                continue;
            }
            let Some(name) = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned) else {
                return Err(SteeringError::NotAVector {
                    path,
                    problem: "its name is no text that a request could spell".into(),
                });
            };
            let mut vector = ControlVector::read(&path)?;
            vector.check(config)?;
            vector.name.clone_from(&name);
            if vectors.insert(name.clone(), Arc::new(vector)).is_some() {
                return Err(problem(format!(
                    "two files are named {name}; requests could not tell them apart"
                )));
            }
        }
        Ok(Vectors(vectors))
    }

    /// Their names, in order.
    pub fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

/// The edits that a request asks for.
pub(super) fn steering(inner: &Inner, asked: &GenerationParams) -> Result<Option<SteerPlan>, RequestError> {
    if asked.steering.is_empty() {
        return Ok(None);
    }
    if asked.steering.len() > MAX_VECTORS {
        let text = format!("{} vectors, of which at most {MAX_VECTORS} are taken", asked.steering.len());
        return Err(RequestError::bad("steering", text));
    }
    let config = config(inner, "steering")?;
    let mut steering = Steering::default();
    for (i, spec) in asked.steering.iter().enumerate() {
        spec.check().map_err(|error| RequestError::bad(format!("steering[{i}]"), error.to_string()))?;
        let own = asked.vectors.iter().find(|vector| vector.name == spec.vector);
        if own.is_some() && !inner.options.inline_vectors {
            let text = "vectors inside requests are not taken here; name one of the server's";
            return Err(RequestError::bad(format!("steering[{i}].vector"), text));
        }
        let Some(vector) = own.or_else(|| inner.vectors.0.get(&spec.vector)) else {
            let text = match inner.vectors.0.is_empty() {
                true => "no vectors are here to be named; the service was started without a folder of them"
                    .to_owned(),
                false => format!(
                    "no vector is named {:?}; there are {}",
                    spec.vector,
                    inner.vectors.names().join(", ")
                ),
            };
            return Err(RequestError::bad(format!("steering[{i}].vector"), text));
        };
        let one = Steering { vectors: vec![(Arc::clone(vector), spec.clone())] };
        // Each by itself, so that what is wrong has a place.
        one.plan(config).map_err(|error| RequestError::bad(format!("steering[{i}]"), error.to_string()))?;
        steering.vectors.extend(one.vectors);
    }
    let plan = steering.plan(config).map_err(|error| RequestError::bad("steering", error.to_string()))?;
    Ok(Some(plan))
}

/// What a request's replies copy out, held against the most that may go into a response.
pub(super) fn recording(
    inner: &Inner,
    asked: &GenerationParams,
    edits: &[(usize, usize)],
    prompt: usize,
    max_tokens: usize,
) -> Result<Option<Recording>, RequestError> {
    let Some(spec) = &asked.capture else { return Ok(None) };
    let config = config(inner, "capture")?;
    let refuse = |error: CaptureError| RequestError::bad("capture", error.to_string());
    check_kinds(spec)?;
    let each = spec.bytes_per_position(config, edits).map_err(refuse)?;
    let positions = (0..prompt + max_tokens).filter(|p| spec.positions.wants(*p, prompt)).count();
    if positions == 0 {
        let text = format!(
            "{} are no positions of a prompt of {prompt} tokens with an answer of {max_tokens}",
            spec.positions
        );
        return Err(RequestError::bad("capture.positions", text));
    }
    let bytes = each.saturating_mul(positions).saturating_mul(asked.n);
    let most = inner.options.max_capture_bytes;
    if bytes > most {
        let text = format!(
            "{positions} positions of {each} bytes in {} replies make {bytes} bytes, at most {most} are given; ask for \
             fewer layers or positions, or set max_tokens",
            asked.n
        );
        return Err(RequestError::bad("capture", text));
    }
    Recording::new(spec, config, prompt, edits).map(Some).map_err(refuse)
}

fn check_kinds(spec: &CaptureSpec) -> Result<(), RequestError> {
    match spec.what.is_empty() {
        true => Err(RequestError::bad(
            "capture.what",
            "expected at least one of hidden, attn, mlp, routes, projections",
        )),
        false => Ok(()),
    }
}

fn config<'a>(inner: &'a Inner, what: &str) -> Result<&'a Config, RequestError> {
    inner.engine.config().ok_or_else(|| RequestError::Unsupported {
        what: format!("{what}: this engine has no model whose layers could be named"),
    })
}

/// A recording that the engine's thread fills and the reply's end takes.
#[derive(Clone, Debug)]
pub(super) struct SharedRecording(Arc<Mutex<Recording>>);

impl SharedRecording {
    pub fn new(recording: Recording) -> SharedRecording {
        SharedRecording(Arc::new(Mutex::new(recording)))
    }

    /// What was copied out so far.
    pub fn tensors(&self) -> Vec<Captured> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).tensors()
    }
}

impl Observer for SharedRecording {
    fn points(&self, positions: Range<usize>) -> Vec<TapPoint> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).points(positions).to_vec()
    }

    fn first(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).first_of_prompt()
    }

    fn take(&mut self, batch: &Batch, rows: Range<usize>, positions: Range<usize>, outcome: &Outcome) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take(batch, rows, positions, outcome);
    }
}
