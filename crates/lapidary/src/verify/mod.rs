//! Holding a model against what another one, or another program, made of the same prompt.
//!
//! Each layer is checked by itself: it is given the residual stream that the dump's layer was given, so that an error
//! does not travel, and its output is held against the dump's. What a sound layer may differ by follows from the formats
//! of both sides ([`typical_loss`], measured) and from float32. The first layer that differs by more is where to look.
//!
//! The same is shown for the model run as a whole, where errors add up, and for its logits.

mod dump;

use std::path::PathBuf;

use lapidary_engine::Stepper;

use crate::convert::EncodingError;
use crate::eval::distance;

pub use dump::{Dump, Formats, made_by, metadata, typical_loss};

/// What can go wrong.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
pub enum VerifyError {
    #[error(transparent)]
    Weights(#[from] lapidary_weights::Error),
    #[error(transparent)]
    Engine(#[from] lapidary_engine::Error),
    #[error(transparent)]
    Eval(#[from] crate::eval::EvalError),
    #[error("{tensor} in {}: {problem}", path.display())]
    Dump { path: PathBuf, tensor: String, problem: String },
}

/// What float32 arithmetic may differ by: ten times what the published implementation differs by from float64.
const FLOAT32: f64 = 5e-5;
/// A value passes five products on its longest way through a layer (queries and keys, values, output, gate and up, down),
/// each of which adds an error of its own; independent ones add up in squares. What is measured is a third of it, since
/// much of a layer's output is its input.
const PRODUCTS: f64 = 2.24;
/// By how much more than the median row any row may differ.
const WORST_ROW: f64 = 5.0;
/// Rounding activations to blocks of 32 signed bytes, as the fast arithmetic does, by one product.
const INT8_ACTIVATIONS: f64 = 0.008;

/// The difference between rows of two models.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Check {
    /// Root mean square of the difference over that of the dump's values, of the median row.
    pub median: f64,
    /// The same of the worst row.
    pub worst: f64,
    /// What arithmetic and formats explain for the median row.
    pub allowed: f64,
    /// The same for the worst row. Infinite where experts are chosen: a choice between two that are nearly equal can go
    /// either way, and changes the whole row.
    pub allowed_worst: f64,
}

impl Check {
    /// Whether the difference is more than what is explained.
    pub fn departs(&self) -> bool {
        // A difference that is not a number is one.
        !(self.median <= self.allowed && self.worst <= self.allowed_worst)
    }
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The scaled embeddings.
    pub embed: Check,
    /// Each layer by itself.
    pub layers: Vec<Check>,
    /// The logits from the dump's last layer: final norm and output head by themselves.
    pub head: Check,
    /// The model run as a whole; `None` where that gave logits that are not finite.
    pub whole: Option<Whole>,
    /// Formats of the model.
    pub formats: Formats,
    /// Whether both sides have the same formats, so that they explain nothing.
    pub same_formats: bool,
    /// Whether the dump was made by this program in this arithmetic too, so that nothing is explained.
    pub same_program: bool,
}

impl Report {
    /// The first part that departs: `embed`, `layer N` or `head`.
    pub fn first_departure(&self) -> Option<String> {
        if self.embed.departs() {
            return Some("embed".to_owned());
        }
        if let Some(layer) = self.layers.iter().position(Check::departs) {
            return Some(format!("layer {layer}"));
        }
        self.head.departs().then(|| "head".to_owned())
    }
}

/// The model run as a whole, where errors add up.
#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    /// Each layer's output, relative, of the median row.
    pub layers: Vec<f64>,
    /// Its logits.
    pub logits: LogitsDistance,
}

/// How far two distributions over the vocabulary are apart, over all positions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogitsDistance {
    /// Positions.
    pub positions: usize,
    /// Mean Kullback-Leibler divergence from the reference, in nats.
    pub kl: f64,
    /// The largest.
    pub kl_max: f64,
    /// Share of positions with the same likeliest token.
    pub top1: f64,
    /// Root mean square of the difference of logits.
    pub rms: f64,
    /// The largest difference of logits.
    pub largest: f64,
}

/// What the arithmetic of a run adds to what formats explain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// True float32.
    F32,
    /// Activations in int8 blocks.
    Fast,
}

/// Holds the model of `stepper`, with weights in `formats`, against `dump`. The single sequence is reset.
///
/// # Errors
/// What the engine refuses: a dump with more tokens than one batch holds.
pub fn verify(
    stepper: &mut Stepper,
    formats: &Formats,
    arithmetic: Arithmetic,
    dump: &Dump,
) -> Result<Report, VerifyError> {
    let (layers, width, vocab) =
        (stepper.model().layers.len(), stepper.model().config.hidden, stepper.model().config.vocab);
    let same_formats = *formats == dump.formats;
    // The same program on the same weights gives the same bits; nothing explains any difference.
    let same_program = same_formats && dump.made_by.as_ref() == Some(&made_by(stepper));
    let activations = match arithmetic {
        Arithmetic::F32 => 0.0,
        Arithmetic::Fast => INT8_ACTIVATIONS,
    };
    let allowed = |ours, theirs, products: f64| {
        if same_program {
            return 0.0;
        }
        let weights = match same_formats {
            true => 0.0,
            false => typical_loss(ours).hypot(typical_loss(theirs)),
        };
        FLOAT32 + products * weights.hypot(activations)
    };
    let mut checks = Vec::with_capacity(layers);
    for layer in 0..layers {
        let before = if layer == 0 { &dump.embed } else { &dump.hidden[layer - 1] };
        let found = stepper.layer_rows(layer, &dump.tokens, before)?;
        let allowed = allowed(formats.layers[layer], dump.formats.layers[layer], PRODUCTS);
        let routed = stepper.model().config.moe.is_some() && !same_program;
        let mut check = check(&found, &dump.hidden[layer], width, allowed);
        if routed {
            check.allowed_worst = f64::INFINITY;
        }
        checks.push(check);
    }
    let mut head = Vec::with_capacity(dump.logits.len());
    stepper.lens(&dump.hidden[layers - 1], &mut |_, row| head.extend_from_slice(row))?;
    let own = match Dump::make(stepper, &dump.tokens, formats.clone()) {
        Ok(own) => Some(own),
        // Weights can be so wrong that nothing comes of them; which ones is what the layers tell.
        Err(VerifyError::Engine(lapidary_engine::Error::NonFiniteLogits { .. })) => None,
        Err(error) => return Err(error),
    };
    let embed = stepper.embedding(&dump.tokens)?;
    let whole = own.map(|own| Whole {
        layers: (0..layers).map(|n| check(&own.hidden[n], &dump.hidden[n], width, 0.0).median).collect(),
        logits: compare(&own.logits, &dump.logits, vocab),
    });
    // The embedding is scaled by a number that some round to bf16, a part in 500 at most.
    let rounded_scale = if same_program { 0.0 } else { 1.0 / 256.0 };
    Ok(Report {
        embed: check(
            &embed,
            &dump.embed,
            width,
            allowed(formats.embed, dump.formats.embed, 1.5) + rounded_scale,
        ),
        layers: checks,
        head: check(&head, &dump.logits, vocab, allowed(formats.head, dump.formats.head, 1.5)),
        whole,
        formats: formats.clone(),
        same_formats,
        same_program,
    })
}

/// Rows of `width` held against each other.
fn check(found: &[f32], expected: &[f32], width: usize, allowed: f64) -> Check {
    let mut rows: Vec<f64> = found
        .chunks_exact(width)
        .zip(expected.chunks_exact(width))
        .map(|(found, expected)| {
            let mut loss = EncodingError::default();
            loss.add(expected, found);
            loss.relative_rms()
        })
        .collect();
    rows.sort_by(f64::total_cmp);
    let (median, worst) = (rows[rows.len() / 2], rows[rows.len() - 1]);
    Check { median, worst, allowed, allowed_worst: WORST_ROW * allowed }
}

/// How far the rows of `found` are from those of `reference`, `vocab` logits each.
fn compare(found: &[f32], reference: &[f32], vocab: usize) -> LogitsDistance {
    let mut sum = LogitsDistance::default();
    let mut squares = 0.0;
    for (test, reference) in found.chunks_exact(vocab).zip(reference.chunks_exact(vocab)) {
        let d = distance(reference, test);
        sum.positions += 1;
        sum.kl += d.kl;
        sum.kl_max = sum.kl_max.max(d.kl);
        sum.top1 += f64::from(u8::from(d.same_top));
        squares += d.error_squares;
        sum.largest = sum.largest.max(d.max_error);
    }
    let n = sum.positions.max(1) as f64;
    LogitsDistance { kl: sum.kl / n, top1: sum.top1 / n, rms: (squares / (n * vocab as f64)).sqrt(), ..sum }
}

/// A prompt for models whose text nobody has: BOS and ids from all over the vocabulary.
pub fn default_tokens(stepper: &Stepper, count: usize) -> Vec<u32> {
    let config = &stepper.model().config;
    let vocab = config.vocab.min(config.per_layer.map_or(usize::MAX, |p| p.vocab));
    // Placeholders of pictures stand for other rows, and not every form of a model says which they are.
    let ids = (1..).map(|i: usize| ((i * 7919 + 13) % vocab) as u32).filter(|&id| config.lookup_id(id) == id);
    std::iter::once(config.bos).chain(ids).take(count).collect()
}
