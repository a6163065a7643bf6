//! One model in every layout: what is read back decodes to what the format makes of the plain weights.

mod support;

use lapidary_formats::{Format, Scaling, TensorView, decode_row, encode_rows_scaled};
use lapidary_weights::LayerRole::*;
use lapidary_weights::export::{Layout, export};
use lapidary_weights::{Checkpoint, ExpertPart, Role};
use support::golden;

fn decode(view: &TensorView) -> Vec<f32> {
    let mut values = vec![0.0; view.rows * view.cols];
    for (row, out) in values.chunks_exact_mut(view.cols).enumerate() {
        decode_row(view, row, out);
    }
    values
}

/// The matrices and some vectors of the five layers, and the embedding: a name, the columns, the values.
fn all(c: &Checkpoint) -> Vec<(String, usize, Vec<f32>)> {
    let mut list = Vec::new();
    let mut add = |name: String, view: &TensorView| list.push((name, view.cols, decode(view)));
    add("embed".to_owned(), &c.tensor(Role::Embed).unwrap().unwrap());
    for layer in 0..5 {
        for role in [QProj, KProj, VProj, OProj, Gate, Up, Down, Router, InputNorm, PerExpertScale] {
            if let Some(view) = c.tensor(Role::Layer(layer, role)).unwrap() {
                add(format!("{layer} {role:?}"), &view);
            }
        }
        for e in 0..c.experts_in_file(layer) as u32 {
            for part in ExpertPart::ALL {
                let view = c.expert(layer, e, part).unwrap().unwrap();
                add(format!("{layer} {part:?} {e}"), &view);
            }
        }
    }
    list
}

fn is_quantised(name: &str) -> bool {
    !["embed", "Router", "Norm", "PerExpertScale"].iter().any(|plain| name.contains(plain))
}

#[test]
fn every_layout_gives_what_its_format_makes_of_the_weights() {
    let source = Checkpoint::open(golden("moe26b")).unwrap();
    let plain = all(&source);
    assert_eq!(plain.len(), 1 + 5 * (9 + 24) + 3, "five layers, three of which have a v_proj");
    for layout in Layout::ALL {
        let dir = tempfile::tempdir().unwrap();
        export(&source, dir.path(), layout).unwrap();
        let c = Checkpoint::open(dir.path()).unwrap();
        assert!(c.notes().is_empty());
        assert_eq!(c.parameters(), source.parameters(), "{layout:?}");
        let encoding = match layout {
            Layout::PerExpert | Layout::MoeStacks => (Format::Bf16, Scaling::Usual),
            Layout::Fp8Tensor => (Format::Fp8E4M3, Scaling::Tensor),
            Layout::Fp8Row => (Format::Fp8E4M3, Scaling::Row),
            Layout::Fp8Block => (Format::Fp8E4M3, Scaling::Block128),
            Layout::Nvfp4Divisor | Layout::Nvfp4Multiplier => (Format::Nvfp4, Scaling::Usual),
            Layout::Int4 => (Format::Int4G32, Scaling::Usual),
        };
        let q_proj = c.stored(Role::Layer(0, QProj)).unwrap();
        assert_eq!((q_proj.format, q_proj.shape), (encoding.0, &[128, 96][..]));
        let read = all(&c);
        assert_eq!(read.len(), plain.len());
        for ((name, cols, values), (other, _, found)) in plain.iter().zip(&read) {
            assert_eq!(name, other);
            let expected = match is_quantised(name) {
                false => values.clone(),
                true => {
                    let (rows, cols) = (values.len() / cols, *cols);
                    let encoded = encode_rows_scaled(encoding.0, encoding.1, values, rows, cols).unwrap();
                    decode(&encoded.view("expected"))
                }
            };
            // The divisor is rounded twice, once when written and once when read, and the product once more.
            let relative = if layout == Layout::Nvfp4Divisor { 2.0 * f32::EPSILON } else { 0.0 };
            for (i, (e, f)) in expected.iter().zip(found).enumerate() {
                assert!((e - f).abs() <= relative * e.abs(), "{layout:?} {name} {i}: {f}, expected {e}");
            }
        }
    }
}

#[test]
fn a_quantised_checkpoint_is_not_exported_again() {
    let source = Checkpoint::open(golden("moe26b")).unwrap();
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    export(&source, a.path(), Layout::Fp8Row).unwrap();
    let quantised = Checkpoint::open(a.path()).unwrap();
    support::message(export(&quantised, b.path(), Layout::Int4), &["q_proj.weight", "FP8_E4M3", "plain"]);
}
