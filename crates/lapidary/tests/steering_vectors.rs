//! Control vectors: their files, how they are asked for, and that one does on a trained model what it is for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lapidary::steering::{ControlVector, FitOptions, LayerRange, Mode, Positions, SteerSpec, Steering, fit};
use lapidary::{Gemma, LoadOptions};
use lapidary_text::Specials;
use lapidary_weights::gguf::{GgmlType, Version, Writer};
use lapidary_weights::safetensors::{Dtype, NewTensor, write};

fn gemma() -> Gemma {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/pebble-moe-q8_0.gguf");
    let options = LoadOptions { context: Some(256), threads: Some(2), ..LoadOptions::default() };
    Gemma::load(file, &options).expect("the model loads")
}

fn ramp(width: usize, by: f32) -> Vec<f32> {
    (0..width).map(|i| (i as f32 - 2.5) * by).collect()
}

fn vector(layers: &[usize], width: usize) -> ControlVector {
    let directions = layers.iter().map(|&l| (l, ramp(width, 0.1 + l as f32))).collect();
    let mut vector = ControlVector::new("a vector", directions).unwrap();
    vector.model_layers = Some(6);
    vector.model_hint = Some("gemma4".into());
    vector
}

#[test]
fn both_kinds_of_file_come_back_as_written() {
    let folder = tempfile::tempdir().unwrap();
    for (name, layers) in [("a.gguf", &[1, 2, 5][..]), ("a.safetensors", &[0, 3]), ("A.GGUF", &[4])] {
        let path = folder.path().join(name);
        let written = vector(layers, 256);
        written.write(&path).unwrap();
        let read = ControlVector::read(&path).unwrap();
        assert_eq!(read.directions, written.directions);
        assert_eq!((read.model_layers, read.model_hint), (Some(6), Some("gemma4".into())));
    }
    let error = vector(&[0, 1], 256).write(&folder.path().join("b.gguf")).unwrap_err();
    assert!(error.to_string().contains("layer 0"), "{error}");
    assert!(!folder.path().join("b.gguf").exists(), "nothing is written");
}

/// What llama.cpp's own generator writes: N is the block after which the direction applies.
#[test]
fn a_file_of_llama_cpps_kind_steers_the_block_of_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("llama.gguf");
    let mut w = Writer::new(Version::V3);
    w.set("general.architecture", "controlvector").unwrap();
    w.set("controlvector.model_hint", "gemma3").unwrap();
    w.set("controlvector.layer_count", 2i32).unwrap();
    w.tensor("direction.2", &[256], GgmlType(0)).unwrap();
    w.tensor("direction.4", &[256], GgmlType(0)).unwrap();
    let mut body = w.create(&path).unwrap();
    for (name, by) in [("direction.2", 1.0), ("direction.4", 2.0)] {
        let bytes: Vec<u8> = ramp(256, by).iter().flat_map(|v| v.to_le_bytes()).collect();
        body.write(name, &bytes).unwrap();
    }
    body.finish().unwrap();
    let steering = Steering::from_files(&[SteerSpec::new(path.to_str().unwrap())]).unwrap();
    let plan = steering.plan(gemma().config()).unwrap();
    assert_eq!(plan.edits, [(2, 0), (4, 0)]);
    let (layers, lengths): (Vec<_>, Vec<_>) = plan.set.edits.iter().map(|e| (e.layer, e.norm)).unzip();
    assert_eq!(layers, [2, 4]);
    assert!((lengths[1] / lengths[0] - 2.0).abs() < 1e-6);
}

#[test]
fn damaged_and_foreign_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let gguf =
        |name: &str, keys: &[(&str, &str)], count: Option<u32>, tensors: &[(&str, &[u64], u32, Vec<f32>)]| {
            let path = folder.path().join(name);
            let mut w = Writer::new(Version::V3);
            keys.iter().for_each(|(key, value)| w.set(key, *value).unwrap());
            if let Some(count) = count {
                w.set("controlvector.layer_count", count).unwrap();
            }
            for (name, dims, kind, _) in tensors {
                w.tensor(name, dims, GgmlType(*kind)).unwrap();
            }
            let mut body = w.create(&path).unwrap();
            for (name, _, kind, values) in tensors {
                let bytes: Vec<u8> = match kind {
                    0 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                    _ => values.iter().flat_map(|_| [0, 0]).collect(),
                };
                body.write(name, &bytes).unwrap();
            }
            body.finish().unwrap();
            path
        };
    let vector = [("general.architecture", "controlvector")];
    let good = || vec![1.0f32; 8];
    let with = |i: usize, v: f32| {
        let mut values = good();
        values[i] = v;
        values
    };
    let cases: Vec<(PathBuf, &str)> = vec![
        (
            gguf(
                "model.gguf",
                &[("general.architecture", "gemma3")],
                None,
                &[("direction.1", &[8], 0, good())],
            ),
            "gemma3",
        ),
        (gguf("none.gguf", &[], None, &[("direction.1", &[8], 0, good())]), "general.architecture"),
        (gguf("empty.gguf", &vector, None, &[]), "no tensor direction.N"),
        (gguf("zero.gguf", &vector, None, &[("direction.3", &[8], 0, vec![0.0; 8])]), "direction.3"),
        (gguf("nan.gguf", &vector, None, &[("direction.3", &[8], 0, with(5, f32::NAN))]), "value 5 is NaN"),
        (
            gguf("inf.gguf", &vector, None, &[("direction.3", &[8], 0, with(7, f32::INFINITY))]),
            "value 7 is inf",
        ),
        (gguf("first.gguf", &vector, None, &[("direction.0", &[8], 0, good())]), "direction.0"),
        (gguf("name.gguf", &vector, None, &[("direction.01", &[8], 0, good())]), "direction.01"),
        (gguf("name2.gguf", &vector, None, &[("blk.1.weight", &[8], 0, good())]), "blk.1.weight"),
        (gguf("type.gguf", &vector, None, &[("direction.1", &[8], 1, good())]), "F16"),
        (gguf("shape.gguf", &vector, None, &[("direction.1", &[4, 2], 0, good())]), "[4, 2]"),
        (
            gguf(
                "widths.gguf",
                &vector,
                None,
                &[("direction.1", &[8], 0, good()), ("direction.2", &[7], 0, vec![1.0; 7])],
            ),
            "others have 8",
        ),
        (
            gguf(
                "count.gguf",
                &vector,
                Some(1),
                &[("direction.1", &[8], 0, good()), ("direction.2", &[8], 0, good())],
            ),
            "layer_count is 1",
        ),
    ];
    for (path, message) in cases {
        let error = ControlVector::read(&path).unwrap_err().to_string();
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(error.contains(message) && error.contains(name), "{name}: {error}");
    }
    let safetensors =
        |name: &str, tensors: &[(&str, Dtype, Vec<usize>, usize)], metadata: &[(&str, &str)]| {
            let path = folder.path().join(name);
            let data: Vec<Vec<u8>> = tensors.iter().map(|t| vec![1; t.3]).collect();
            let tensors: Vec<_> = tensors
                .iter()
                .zip(&data)
                .map(|((name, dtype, shape, _), bytes)| NewTensor {
                    name: (*name).into(),
                    dtype: *dtype,
                    shape: shape.clone(),
                    bytes,
                })
                .collect();
            let metadata: BTreeMap<_, _> =
                metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            write(&path, &tensors, &metadata).unwrap();
            path
        };
    for (path, message) in [
        (safetensors("a.st", &[("direction.1", Dtype::I64, vec![2], 16)], &[]), "direction.1"),
        (safetensors("b.st", &[("direction.1", Dtype::F32, vec![2, 2], 16)], &[]), "[2, 2]"),
        (safetensors("c.st", &[("weight", Dtype::F32, vec![4], 16)], &[]), "weight"),
        (
            safetensors(
                "d.st",
                &[("direction.1", Dtype::F32, vec![4], 16)],
                &[("controlvector.model_layers", "six")],
            ),
            "six",
        ),
        (folder.path().join("absent.gguf"), "absent.gguf"),
    ] {
        let error = ControlVector::read(&path).unwrap_err().to_string();
        assert!(error.contains(message), "{}: {error}", path.display());
    }
    std::fs::write(folder.path().join("junk"), b"GGUFnonsense").unwrap();
    assert!(ControlVector::read(&folder.path().join("junk")).is_err());
    // Half precision is read.
    let half = safetensors("h.st", &[("direction.2", Dtype::Bf16, vec![4], 8)], &[]);
    assert_eq!(ControlVector::read(&half).unwrap().directions[&2].len(), 4);
}

#[test]
fn vectors_of_another_model_are_refused_before_anything_runs() {
    let mut gemma = gemma();
    let config = gemma.config().clone();
    let plan = |vector: ControlVector, spec: SteerSpec| {
        Steering { vectors: vec![(Arc::new(vector), spec)] }.plan(&config).map(|p| p.set.edits.len())
    };
    let spec = || SteerSpec::new("v");
    let range = |first, last| SteerSpec { layers: Some(LayerRange { first, last }), ..spec() };
    assert_eq!(plan(vector(&[1, 2, 5], 256), spec()).unwrap(), 3);
    assert_eq!(plan(vector(&[1, 2, 5], 256), range(2, 5)).unwrap(), 2);
    let other_model = ControlVector { model_layers: Some(30), ..vector(&[1], 256) };
    let unknown_layer = ControlVector { model_layers: None, ..vector(&[1, 6], 256) };
    for (result, message) in [
        (plan(vector(&[1], 255), spec()), "255 values wide, the model 256"),
        (plan(other_model, spec()), "30 layers, this one has 6"),
        (plan(unknown_layer, spec()), "layer 6, the model has layers 0 to 5"),
        (plan(vector(&[1, 5], 256), range(4, 6)), "layers 4-6"),
        (plan(vector(&[1, 5], 256), range(2, 4)), "it has 1, 5"),
        (plan(vector(&[1], 256), SteerSpec { mode: Mode::Clamp, ..spec() }), "to is absent"),
        (plan(vector(&[1], 256), SteerSpec { to: Some(1.0), ..spec() }), "none but with clamp"),
        (plan(vector(&[1], 256), SteerSpec { gate: Some(f32::NAN), ..spec() }), "gate is NaN"),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    // And so on the way to an answer, after which the model answers as before.
    let mut options = gemma.answer_options(5);
    options.sampling.temperature = 0.0;
    let text = |gemma: &mut Gemma, options| {
        gemma.complete("One day", options).map(|a| a.map(|p| format!("{p:?}\n")).collect::<String>())
    };
    let plain = text(&mut gemma, &options).unwrap();
    let bad = Steering { vectors: vec![(Arc::new(vector(&[1], 9)), spec())] };
    let mut steered = options.clone();
    steered.steering = Some(Arc::new(bad));
    assert!(text(&mut gemma, &steered).is_err());
    assert_eq!(text(&mut gemma, &options).unwrap(), plain);
}

#[test]
fn specs_are_flags_and_json_alike() {
    let spec: SteerSpec = "file=a b.gguf,mode=clamp,strength=0.5,layers=3-9,to=-2,gate=1.5".parse().unwrap();
    let expected = SteerSpec {
        vector: "a b.gguf".into(),
        mode: Mode::Clamp,
        strength: 0.5,
        layers: Some(LayerRange { first: 3, last: 9 }),
        to: Some(-2.0),
        gate: Some(1.5),
    };
    assert_eq!(spec, expected);
    let json = serde_json::to_string(&spec).unwrap();
    assert_eq!(serde_json::from_str::<SteerSpec>(&json).unwrap(), spec);
    assert_eq!("x.gguf".parse::<SteerSpec>().unwrap(), SteerSpec::new("x.gguf"));
    let short = r#"{"vector": "x", "layers": "4"}"#;
    let read: SteerSpec = serde_json::from_str(short).unwrap();
    assert_eq!(
        (read.mode, read.strength, read.layers),
        (Mode::Add, 1.0, Some(LayerRange { first: 4, last: 4 }))
    );
    for bad in [
        "",
        "mode=add",
        "file=",
        "x,strength",
        "x,strength=much",
        "x,strength=inf",
        "x,mode=push",
        "x,layers=9-3",
        "x,layers=all",
        "x,layers=-1",
        "x,loud=1",
        "x,mode=clamp",
        "x,to=1",
        "x,gate=nan",
    ] {
        assert!(bad.parse::<SteerSpec>().is_err(), "{bad:?}");
    }
    for bad in [
        r#"{}"#,
        r#"{"vector": "x", "mode": "push"}"#,
        r#"{"vector": "x", "layers": [1]}"#,
        r#"{"vector": "x", "file": "y"}"#,
    ] {
        assert!(serde_json::from_str::<SteerSpec>(bad).is_err(), "{bad}");
    }
}

/// Beginnings of stories up to the animal, and 50 others to be gone on with.
const BEGINNINGS: [&str; 6] = [
    "Once upon a time there was a",
    "One sunny day, a little",
    "Long ago, in a quiet forest, there lived a",
    "Ivy was a brave",
    "One cold day, a little",
    "Dan was a sleepy",
];

/// The share of 50 stories in which `word` occurs.
fn rate(gemma: &mut Gemma, steering: Option<Steering>, word: &str) -> f64 {
    let names = ["Ada", "Ben", "Cleo", "Eva", "Finn", "Hugo", "Jack", "Kira", "Leo", "Mia"];
    let weather = ["rainy", "windy", "foggy", "snowy", "warm"];
    let mut found = 0;
    for i in 0..50 {
        let prompt = match i % 2 {
            0 => format!("One {} day, a little", weather[i / 2 % 5]),
            _ => format!("{} was a happy", names[i / 2 % 10]),
        };
        let mut options = gemma.answer_options(30);
        (options.sampling.temperature, options.sampling.top_k, options.sampling.top_p) = (1.0, 0, 1.0);
        options.sampling.seed = i as u64;
        options.steering = steering.clone().map(Arc::new);
        let mut text = String::new();
        for piece in gemma.complete(&prompt, &options).unwrap() {
            if let lapidary::Piece::Text(t) = piece.unwrap() {
                text += &t;
            }
        }
        let mut words = text.split(|c: char| !c.is_alphabetic());
        found += usize::from(words.any(|w| w == word));
    }
    found as f64 / 50.0
}

#[test]
fn a_fitted_vector_makes_stories_about_owls() {
    let mut gemma = gemma();
    let prompts = |gemma: &Gemma, animal: &str| -> Vec<Vec<u32>> {
        let ids =
            |b: &&str| gemma.tokenizer().encode_prompt(&format!("{b} {animal}"), Specials::Parse).unwrap();
        BEGINNINGS.iter().map(ids).collect()
    };
    let (owls, foxes) = (prompts(&gemma, "owl"), prompts(&gemma, "fox"));
    let options = FitOptions { layers: (1..5).collect(), ..FitOptions::default() };
    let (vector, fits) = fit(gemma.stepper(), &owls, &foxes, &options, &mut |_| {}).unwrap();
    assert_eq!(fits.len(), 4);
    assert!(fits.iter().all(|f| f.accuracy == 1.0 && f.norm > 0.0 && f.row_norm > f.norm), "{fits:?}");
    let vector = Arc::new(vector);
    let one = |v: &Arc<ControlVector>, mode, strength| {
        (v.clone(), SteerSpec { mode, strength, ..SteerSpec::new("v") })
    };
    let strength = 0.25;
    let owl = |extra: Option<Mode>| {
        let mut vectors = vec![one(&vector, Mode::Add, strength)];
        vectors.extend(extra.map(|mode| one(&vector, mode, 1.0)));
        Some(Steering { vectors })
    };
    // Directions of the same lengths that stand for nothing.
    let mut seed = 1u64;
    let mut random = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 40) as f64 / f64::from(1 << 24) - 0.5
    };
    let directions = vector.directions.iter().map(|(&layer, v)| {
        let raw: Vec<f64> = v.iter().map(|_| random()).collect();
        let length = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        let by = length(&mut v.iter().map(|&x| f64::from(x))) / length(&mut raw.iter().copied());
        (layer, raw.iter().map(|x| (x * by) as f32).collect())
    });
    let noise = Arc::new(ControlVector::new("noise", directions.collect()).unwrap());

    let plain = rate(&mut gemma, None, "owl");
    let steered = rate(&mut gemma, owl(None), "owl");
    let ablated = rate(&mut gemma, owl(Some(Mode::Ablate)), "owl");
    let random = rate(&mut gemma, Some(Steering { vectors: vec![one(&noise, Mode::Add, strength)] }), "owl");
    eprintln!("owls: plain {plain}, steered {steered}, ablated {ablated}, random direction {random}");
    assert!(steered > 0.3 && steered >= 3.0 * plain, "{steered} of stories are about owls, {plain} without");
    assert!((ablated - plain).abs() <= 0.05 + 1e-9, "{ablated} after taking it out again, {plain} without");
    assert!(random <= 0.3 && random < 3.0 * plain.max(0.05), "{random} along a random direction");
    // Strength 0 tells the same stories.
    let zero = Some(Steering { vectors: vec![one(&vector, Mode::Add, 0.0)] });
    assert_eq!(rate(&mut gemma, zero, "owl"), plain);
}

#[test]
fn a_principal_component_points_where_the_means_do() {
    let mut gemma = gemma();
    let prompts = |gemma: &Gemma, animal: &str| -> Vec<Vec<u32>> {
        let ids =
            |b: &&str| gemma.tokenizer().encode_prompt(&format!("{b} {animal}"), Specials::Parse).unwrap();
        BEGINNINGS.iter().map(ids).collect()
    };
    let (owls, foxes) = (prompts(&gemma, "owl"), prompts(&gemma, "fox"));
    let cosine = |a: &[f32], b: &[f32]| {
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    for positions in [Positions::Last, Positions::Mean, Positions::All] {
        let options = FitOptions { layers: vec![0, 3], positions, pca: false };
        let run = |gemma: &mut Gemma, options: &FitOptions| {
            fit(gemma.stepper(), &owls, &foxes, options, &mut |_| {}).unwrap()
        };
        let (means, fits) = run(&mut gemma, &options);
        let (component, same) = run(&mut gemma, &FitOptions { pca: true, ..options });
        for layer in [0, 3] {
            let c = cosine(&means.directions[&layer], &component.directions[&layer]);
            assert!(c > 0.0, "{positions:?}: they share a sign, cosine {c}");
            if positions == Positions::Last && layer == 0 {
                assert!(c > 0.9, "the word is the largest difference between the rows: {c}");
            }
        }
        assert!((fits[0].norm - same[0].norm).abs() < 1e-6 * fits[0].norm, "and a length");
    }
    let refused = |with: &[Vec<u32>], without: &[Vec<u32>], options: &FitOptions, gemma: &mut Gemma| {
        fit(gemma.stepper(), with, without, options, &mut |_| {}).unwrap_err().to_string()
    };
    let options = FitOptions { layers: vec![1], ..FitOptions::default() };
    let mean = FitOptions { positions: Positions::Mean, ..options.clone() };
    assert!(refused(&[], &owls, &options, &mut gemma).contains("first set"));
    assert!(refused(&owls, &[], &options, &mut gemma).contains("second set"));
    assert!(refused(&owls, &[vec![2]], &mean, &mut gemma).contains("fewer than 2"));
    assert!(refused(&owls, &owls, &options, &mut gemma).contains("do not differ at layer 1"));
    assert!(
        refused(&owls, &foxes, &FitOptions { layers: vec![6], ..options.clone() }, &mut gemma)
            .contains("layer 6")
    );
    assert!(refused(&owls, &foxes, &FitOptions::default(), &mut gemma).contains("the layers"));
}
