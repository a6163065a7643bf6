//! Steering and captures of a service's requests: vectors by name, activations and projections in the reply.

#[allow(dead_code, reason = "each file uses some of it")]
#[path = "common/served.rs"]
mod served;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use lapidary::Checkpoint;
use lapidary::capture::{Captured, Values};
use lapidary::service::{ChatRequest, RequestError, Service, ServiceOptions};
use lapidary::steering::{ControlVector, SteerSpec};
use served::{HIDDEN, ask, load, one, start, wave};

#[test]
fn vectors_of_a_folder_are_named_in_requests_and_what_cannot_be_is_refused_by_its_field() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, layer: usize, width: usize| {
        let vector = ControlVector::new(name, BTreeMap::from([(layer, wave(0)[..width].to_vec())])).unwrap();
        vector.write(&folder.path().join(name)).unwrap();
    };
    write("owls.safetensors", 2, HIDDEN);
    write("foxes.gguf", 1, HIDDEN);
    std::fs::write(folder.path().join("notes.txt"), "no vector").unwrap();
    let vectors = Some(folder.path().to_owned());
    let options = || ServiceOptions {
        vectors: vectors.clone(),
        max_capture_bytes: 40_000,
        ..ServiceOptions::default()
    };
    let service = start(load(), options());
    assert_eq!(service.vector_names(), ["foxes", "owls"]);

    let story = || {
        let mut request = ask("Tell me a story about Zoe.");
        request.generation.max_tokens = Some(30);
        request
    };
    let plain = one(&service, story());
    let steered = |spec: SteerSpec| {
        let mut request = story();
        request.generation.steering = vec![spec];
        request
    };
    let owls = one(&service, steered(SteerSpec { strength: 3.0, ..SteerSpec::new("owls") }));
    assert_ne!(owls.text, plain.text);
    let off = one(&service, steered(SteerSpec { strength: 0.0, ..SteerSpec::new("owls") }));
    assert_eq!(off.text, plain.text);

    let refused = |request: ChatRequest| match service.chat(request).unwrap_err() {
        RequestError::BadRequest { field, message } => format!("{field}: {message}"),
        other => panic!("{other}"),
    };
    for (spec, expected) in [
        (SteerSpec::new("bears"), "steering[0].vector: no vector is named \"bears\"; there are foxes, owls"),
        (SteerSpec { layers: Some("0".parse().unwrap()), ..SteerSpec::new("owls") }, "steering[0]: "),
        (SteerSpec { layers: Some("77".parse().unwrap()), ..SteerSpec::new("owls") }, "steering[0]: "),
        (SteerSpec { strength: f32::NAN, ..SteerSpec::new("owls") }, "steering[0]: steering strength is NaN"),
        (SteerSpec { to: Some(1.0), ..SteerSpec::new("owls") }, "steering[0]: steering to is 1"),
    ] {
        let found = refused(steered(spec));
        assert!(found.starts_with(expected), "{found}");
    }
    let mut own = steered(SteerSpec::new("mine"));
    own.generation.vectors =
        vec![Arc::new(ControlVector::new("mine", BTreeMap::from([(1, wave(0))])).unwrap())];
    assert!(refused(own).starts_with("steering[0].vector: vectors inside requests are not taken"));
    let mut many = story();
    many.generation.steering = vec![SteerSpec::new("owls"); 65];
    assert!(refused(many).starts_with("steering: 65 vectors"));

    let capturing = |spec: &str, n: usize| {
        let mut request = story();
        request.generation.capture = Some(spec.parse().unwrap());
        request.generation.n = n;
        request
    };
    for (spec, n, expected) in [
        ("layers=99", 1, "capture: capture names layer 99"),
        ("positions=900-1000", 1, "capture.positions: 900-1000 are no positions"),
        (
            "layers=0,positions=generated",
            2,
            "capture: 30 positions of 1024 bytes in 2 replies make 61440 bytes, at most 40000",
        ),
    ] {
        let found = refused(capturing(spec, n));
        assert!(found.starts_with(expected), "{found}");
    }
    let whole = one(&service, capturing("layers=0,positions=generated", 1));
    assert_eq!(whole.text, plain.text, "a capture changes nothing");
    // The last token is never run.
    assert_eq!((whole.captured[0].name.as_str(), &whole.captured[0].shape), ("positions", &vec![29]));
    assert_eq!((whole.captured[1].name.as_str(), &whole.captured[1].shape), ("hidden.0", &vec![29, HIDDEN]));
    let Values::F32(values) = &whole.captured[1].values else { panic!("activations are float32") };
    assert!(values.iter().all(|v| v.is_finite()));

    // A folder that does not do is told at the start.
    write("short.safetensors", 1, HIDDEN - 1);
    let checkpoint =
        Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/pebble-moe-q8_0.gguf"))
            .unwrap();
    let error = Service::start(&checkpoint, &load(), options(), &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("255") && error.contains("256"), "{error}");
}

fn floats<'a>(tensors: &'a [Captured], name: &str) -> (&'a [usize], &'a [f32]) {
    let found = tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"));
    match &found.values {
        Values::F32(values) => (&found.shape, values),
        Values::I64(_) => panic!("{name} holds ids"),
    }
}

#[test]
fn projections_of_steered_rows_are_told_by_layer_vector_and_position() {
    let folder = tempfile::tempdir().unwrap();
    // The built-in model has layers 0 to 5; rows of a prompt end early in the last one unless it is captured.
    for (name, layers) in [("owls", &[1, 5][..]), ("foxes", &[2, 5])] {
        let directions = layers.iter().map(|&l| (l, wave(l + name.len()))).collect();
        let vector = ControlVector::new(name, directions).unwrap();
        vector.write(&folder.path().join(format!("{name}.safetensors"))).unwrap();
    }
    let options = ServiceOptions { vectors: Some(folder.path().to_owned()), ..ServiceOptions::default() };
    let service = start(load(), options);
    let story = |strength: f32, capture: Option<&str>| {
        let mut request = ask("Tell me a story about Zoe.");
        request.generation.max_tokens = Some(30);
        request.generation.steering =
            ["foxes", "owls"].map(|name| SteerSpec { strength, ..SteerSpec::new(name) }).to_vec();
        request.generation.capture = capture.map(|spec| spec.parse().unwrap());
        request
    };
    // At strength 0 a row that is projected is the row that is captured.
    let whole = one(&service, story(0.0, Some("what=projections+hidden,positions=all")));
    let rows = whole.captured[0].shape[0];
    assert_eq!(rows, whole.usage.prompt_tokens + whole.usage.completion_tokens - 1);
    let named: Vec<&str> =
        whole.captured.iter().map(|t| t.name.as_str()).filter(|name| name.starts_with("proj")).collect();
    assert_eq!(named, ["projections.1", "projections.2", "projections.5"]);
    for (layer, steered) in [(1, [false, true]), (2, [true, false]), (5, [true, true])] {
        let (shape, found) = floats(&whole.captured, &format!("projections.{layer}"));
        assert_eq!(shape, [rows, 2]);
        let (_, hidden) = floats(&whole.captured, &format!("hidden.{layer}"));
        for (row, found) in found.chunks_exact(2).enumerate() {
            let x = &hidden[row * HIDDEN..(row + 1) * HIDDEN];
            for (vector, found) in found.iter().enumerate() {
                if !steered[vector] {
                    assert!(found.is_nan(), "layer {layer} row {row}: {found}");
                    continue;
                }
                let u: Vec<f64> =
                    wave(layer + ["foxes", "owls"][vector].len()).into_iter().map(f64::from).collect();
                let length = u.iter().map(|v| v * v).sum::<f64>().sqrt();
                let terms = x.iter().zip(&u).map(|(x, u)| f64::from(*x) * u / length);
                let (expected, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
                // A sum of as many float32 products as a row is wide, of unit components rounded once.
                let bound = size * (HIDDEN + 1) as f64 * f64::from(f32::EPSILON);
                let off = (f64::from(*found) - expected).abs();
                assert!(off <= bound, "layer {layer} row {row} vector {vector}: {found}, not {expected}");
            }
        }
    }

    // Without a copy of the last layer beside them, rows must run that far all the same.
    let bits = |tensors: &[Captured], name: &str| -> Vec<u32> {
        floats(tensors, name).1.iter().map(|v| v.to_bits()).collect()
    };
    let alone = one(&service, story(0.0, Some("what=projections,positions=all")));
    assert_eq!(alone.captured.len(), 1 + named.len());
    for name in named {
        assert_eq!(bits(&alone.captured, name), bits(&whole.captured, name), "{name}");
    }

    // Steered in earnest, a second time over a kept beginning and in company, and without asking.
    let spec = "what=projections,positions=generated,layers=2+5";
    let first = one(&service, story(0.5, Some(spec)));
    let company: Vec<_> = (0..3).map(|_| service.chat(story(0.25, None)).unwrap()).collect();
    let again = one(&service, story(0.5, Some(spec)));
    drop(company);
    assert_eq!(first.captured.len(), 3);
    for name in ["projections.2", "projections.5"] {
        assert_eq!(bits(&again.captured, name), bits(&first.captured, name), "{name}");
    }
    assert_eq!(one(&service, story(0.5, None)).text, first.text, "asking changes nothing");

    let refused = |request: ChatRequest| match service.chat(request).unwrap_err() {
        RequestError::BadRequest { field, message } => format!("{field}: {message}"),
        other => panic!("{other}"),
    };
    let wrong = refused(story(0.5, Some("what=projections,layers=3-4")));
    assert_eq!(wrong, "capture: capture of projections: no vector steers at layers 3-4");
    let mut plain = story(0.5, Some("what=projections"));
    plain.generation.steering.clear();
    assert_eq!(refused(plain), "capture: capture of projections: no vector steers at layers all");
}
