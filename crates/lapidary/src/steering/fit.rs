//! Making a control vector from two sets of prompts.
//!
//! The direction of a layer is the difference of the means of its output over both sets; or, on request, the first
//! principal component of all rows about the middle between the two means, signed and scaled like that difference.

use std::collections::BTreeMap;

use lapidary_engine::{Heads, Prompt, Stepper};
use lapidary_ops::TapPoint;

use super::error::{Result, SteeringError};
use super::vector::ControlVector;

/// Which positions of a prompt count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Positions {
    /// The last one.
    #[default]
    Last,
    /// All but the first, averaged to one row a prompt. (The first is BOS, whose rows are alike in every prompt and
    /// often far larger than others.)
    Mean,
    /// All but the first, each a row of its own: long prompts count for more.
    All,
}

/// How a vector is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FitOptions {
    /// The layers.
    pub layers: Vec<usize>,
    /// The rows.
    pub positions: Positions,
    /// The first principal component in place of the difference of means.
    pub pca: bool,
}

/// What a layer's direction is worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// The layer.
    pub layer: usize,
    /// Length of the direction.
    pub norm: f64,
    /// Mean length of the rows, which a strength can be measured by.
    pub row_norm: f64,
    /// Share of rows that fall on their set's side of the middle.
    pub accuracy: f64,
}

/// Makes a vector that points from the rows of `without` to those of `with`. The single sequence is reset.
///
/// `progress` is told the number of prompts that have run.
///
/// # Errors
/// An empty set, a prompt that is too long or, where the first position is left out, too short; sets without a
/// difference.
pub fn fit(
    stepper: &mut Stepper,
    with: &[Vec<u32>],
    without: &[Vec<u32>],
    options: &FitOptions,
    progress: &mut dyn FnMut(usize),
) -> Result<(ControlVector, Vec<Fit>)> {
    let count = stepper.model().layers.len();
    if let Some(&layer) = options.layers.iter().find(|&&l| l >= count) {
        return Err(lapidary_engine::Error::Layer { layer, layers: count }.into());
    }
    if options.layers.is_empty() {
        return Err(SteeringError::Prompts { set: "the layers".into(), problem: "there are none".into() });
    }
    for (set, prompts) in [("the first set", with), ("the second set", without)] {
        let shortest = if options.positions == Positions::Last { 1 } else { 2 };
        if prompts.is_empty() {
            return Err(SteeringError::Prompts {
                set: set.into(),
                problem: "there is no prompt in it".into(),
            });
        }
        if let Some(i) = prompts.iter().position(|p| p.len() < shortest) {
            let problem = format!("prompt {i} has fewer than {shortest} tokens");
            return Err(SteeringError::Prompts { set: set.into(), problem });
        }
    }
    let mut done = 0;
    let mut rows_of = |prompts: &[Vec<u32>]| -> Result<BTreeMap<usize, Vec<Vec<f64>>>> {
        let mut rows: BTreeMap<usize, Vec<Vec<f64>>> = BTreeMap::new();
        for prompt in prompts {
            for (layer, found) in rows_of_prompt(stepper, prompt, options)? {
                rows.entry(layer).or_default().extend(found);
            }
            done += 1;
            progress(done);
        }
        Ok(rows)
    };
    let (with, without) = (rows_of(with)?, rows_of(without)?);
    let mut directions = BTreeMap::new();
    let mut fits = Vec::new();
    for &layer in with.keys() {
        let (a, b) = (&with[&layer], &without[&layer]);
        let (direction, fit) = direction(layer, a, b, options.pca)?;
        directions.insert(layer, direction);
        fits.push(fit);
    }
    let mut vector = ControlVector::new("the fitted vector", directions)?;
    vector.model_layers = Some(count);
    vector.model_hint = Some(format!("{:?}", stepper.model().config.family).to_lowercase());
    Ok((vector, fits))
}

/// The rows of one prompt, by layer.
fn rows_of_prompt(
    stepper: &mut Stepper,
    prompt: &[u32],
    options: &FitOptions,
) -> Result<Vec<(usize, Vec<Vec<f64>>)>> {
    let width = stepper.model().config.hidden;
    let points: Vec<TapPoint> = options.layers.iter().map(|&l| TapPoint::LayerOut(l)).collect();
    stepper.reset();
    stepper.set_capture(&points);
    let mut values: Vec<Vec<f32>> = vec![Vec::new(); points.len()];
    let ran = stepper.prefill_each(&Prompt::from(prompt), Heads::None, &mut |chunk| {
        for tap in &chunk.outcome.taps {
            if let Some(i) = points.iter().position(|p| *p == tap.point) {
                values[i].extend_from_slice(&tap.values);
            }
        }
    });
    stepper.set_capture(&[]);
    stepper.reset();
    ran?;
    let wide = |row: &[f32]| row.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
    let rows = options.layers.iter().zip(&values).map(|(&layer, values)| {
        let mut rows = values.chunks_exact(width);
        let kept = match options.positions {
            Positions::Last => rows.next_back().map(wide).into_iter().collect(),
            Positions::All => rows.skip(1).map(wide).collect(),
            Positions::Mean => vec![mean(&rows.skip(1).map(wide).collect::<Vec<_>>())],
        };
        (layer, kept)
    });
    Ok(rows.collect())
}

fn direction(layer: usize, with: &[Vec<f64>], without: &[Vec<f64>], pca: bool) -> Result<(Vec<f32>, Fit)> {
    let (a, b) = (mean(with), mean(without));
    let difference: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
    let middle: Vec<f64> = a.iter().zip(&b).map(|(a, b)| (a + b) / 2.0).collect();
    let length = norm(&difference);
    if length == 0.0 || !length.is_finite() {
        return Err(SteeringError::NoDifference { layer });
    }
    let direction = match pca {
        false => difference,
        true => {
            let rows: Vec<Vec<f64>> = with
                .iter()
                .chain(without)
                .map(|row| row.iter().zip(&middle).map(|(v, m)| v - m).collect())
                .collect();
            let component = first_component(&rows, &difference);
            let by = length * dot(&component, &difference).signum();
            component.iter().map(|v| v * by).collect()
        }
    };
    let side =
        |row: &Vec<f64>| row.iter().zip(&middle).zip(&direction).map(|((v, m), d)| (v - m) * d).sum::<f64>();
    let right =
        with.iter().filter(|r| side(r) > 0.0).count() + without.iter().filter(|r| side(r) < 0.0).count();
    let rows = with.len() + without.len();
    let row_norm = with.iter().chain(without).map(|r| norm(r)).sum::<f64>() / rows as f64;
    let fit = Fit { layer, norm: norm(&direction), row_norm, accuracy: right as f64 / rows as f64 };
    Ok((direction.iter().map(|&v| v as f32).collect(), fit))
}

/// The direction of the largest variance, by power iteration from `start`; of length 1.
fn first_component(rows: &[Vec<f64>], start: &[f64]) -> Vec<f64> {
    /// More than enough for any gap between the first two components that a direction could be told by.
    const STEPS: usize = 200;
    let mut v = scaled(start, 1.0 / norm(start));
    for _ in 0..STEPS {
        let mut next = vec![0.0; v.len()];
        for row in rows {
            let p = dot(row, &v);
            next.iter_mut().zip(row).for_each(|(n, r)| *n += p * r);
        }
        let length = norm(&next);
        if length == 0.0 {
            return v;
        }
        let next = scaled(&next, 1.0 / length);
        let moved = next.iter().zip(&v).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        v = next;
        if moved < 1e-12 {
            break;
        }
    }
    v
}

fn mean(rows: &[Vec<f64>]) -> Vec<f64> {
    let mut sum = vec![0.0; rows[0].len()];
    for row in rows {
        sum.iter_mut().zip(row).for_each(|(s, v)| *s += v);
    }
    scaled(&sum, 1.0 / rows.len() as f64)
}

fn scaled(v: &[f64], by: f64) -> Vec<f64> {
    v.iter().map(|v| v * by).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(v: &[f64]) -> f64 {
    dot(v, v).sqrt()
}
