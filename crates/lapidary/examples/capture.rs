//! Reads activations: the norm of the residual stream after every layer, at the last token of a prompt.
//! `cargo run --release --example capture -- MODEL`

use lapidary::{Checkpoint, LoadOptions, TapPoint, load_stepper};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("usage: capture MODEL")?;
    let checkpoint = Checkpoint::open(&model)?;
    let mut stepper = load_stepper(&checkpoint, &LoadOptions::default(), &mut |_| {})?;
    let layers = stepper.model().layers.len();
    let points: Vec<TapPoint> = (0..layers).map(TapPoint::LayerOut).collect();
    stepper.set_capture(&points);
    stepper.prefill(&[2, 10, 11, 12])?;
    for layer in 0..layers {
        let tap = stepper.hidden(layer)?;
        let last = &tap.values[(tap.rows - 1) * tap.width..];
        let norm = last.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        println!("layer {layer}: {norm:.3}");
    }
    Ok(())
}
