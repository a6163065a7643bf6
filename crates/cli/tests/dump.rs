//! `dump` against the stored values of the goldens.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::{golden, lapidary};
use lapidary_reference::{Golden, Limits, assert_close, compare};
use lapidary_weights::safetensors::{Dtype, File, NewTensor, write};

const VARIANTS: [&str; 5] = ["dense31b", "moe26b", "e2b", "unified12b", "gemma3"];

/// Ten times the float32 noise of the published implementation, as `tests/goldens/README.md` derives it.
const LOGITS: Limits = Limits { rel: 5e-5, max: 5e-3 };
const HIDDEN: Limits = Limits { rel: 5e-5, max: f64::INFINITY };

fn ids(golden: &Golden, name: &str) -> String {
    let ids = golden.tokens(name).expect("tokens");
    ids.iter().map(i32::to_string).collect::<Vec<_>>().join(",")
}

fn floats(file: &File, name: &str) -> (Vec<usize>, Vec<f32>) {
    let entry = file.find(name).unwrap_or_else(|| panic!("no tensor {name}"));
    assert_eq!(entry.dtype, Dtype::F32, "{name}");
    let values = file.bytes(entry).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    (entry.shape.clone(), values)
}

fn integers(file: &File, name: &str) -> (Vec<usize>, Vec<i64>) {
    let entry = file.find(name).unwrap_or_else(|| panic!("no tensor {name}"));
    assert_eq!(entry.dtype, Dtype::I64, "{name}");
    let values = file.bytes(entry).as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
    (entry.shape.clone(), values)
}

fn dump(variant: &str, tokens: &str, out: &Path, more: &[&str]) -> File {
    let model = golden(variant);
    let mut args =
        vec!["dump", "-m", model.to_str().unwrap(), "--tokens", tokens, "-o", out.to_str().unwrap()];
    args.extend(more);
    lapidary(args).ok();
    File::open(out).expect("a safetensors file")
}

#[test]
fn logits_and_every_activation() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    for variant in VARIANTS {
        let g = Golden::variant(variant).unwrap();
        let also = match variant {
            "moe26b" => "embed,final_norm,attn,router",
            "e2b" => "embed,final_norm,attn,per_layer",
            _ => "embed,final_norm,attn",
        };
        let flags =
            ["--layers", "all", "--dtype", "f32", "--embed-scale", "f32", "--also", also, "--threads", "2"];
        let file = dump(variant, &ids(&g, "input_ids"), &out, &flags);

        let (shape, logits) = floats(&file, "logits");
        let expected = g.f32("logits").unwrap();
        assert_eq!(shape, expected.shape);
        assert_close(variant, &compare(&logits, &expected.values), LOGITS);

        let hidden = g.f32("hidden").unwrap();
        let layers = hidden.shape[0] - 1;
        for n in 0..=layers {
            let name = n.checked_sub(1).map_or("embed".to_string(), |n| format!("hidden.{n}"));
            let (shape, values) = floats(&file, &name);
            assert_eq!(shape, hidden.shape[1..], "{variant} {name}");
            assert_close(&format!("{variant} {name}"), &compare(&values, hidden.at(n)), HIDDEN);
        }
        assert!(file.find(&format!("hidden.{layers}")).is_none());

        let mut compared = 0;
        for name in g.names() {
            let attention = name.starts_with("attn.") && (name.ends_with(".q") || name.ends_with(".o"));
            if attention || ["final_norm", "per_layer_inputs", "router_weight"].contains(&name.as_str()) {
                let expected = g.f32(&name).unwrap();
                let (shape, values) = floats(&file, &name);
                assert_eq!(shape, expected.shape, "{variant} {name}");
                assert_close(&format!("{variant} {name}"), &compare(&values, &expected.values), HIDDEN);
                compared += 1;
            }
        }
        assert!(compared >= 5, "{variant}: {compared}");
        if variant == "moe26b" {
            let expected = g.i64("router_idx").unwrap();
            assert_eq!(integers(&file, "router_idx"), (expected.shape, expected.values));
        }
    }
}

#[test]
fn the_scale_is_rounded_for_bf16_unless_asked_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    let g = Golden::variant("unified12b").unwrap();
    for (flags, name) in [
        (&[][..], "logits_rounded_scale"),
        (&["--embed-scale", "bf16"][..], "logits_rounded_scale"),
        (&["--embed-scale", "f32"][..], "logits"),
    ] {
        let file = dump("unified12b", &ids(&g, "input_ids"), &out, flags);
        let (_, logits) = floats(&file, "logits");
        assert_close(name, &compare(&logits, &g.f32(name).unwrap().values), LOGITS);
        assert_eq!(file.entries().len(), 2, "without --layers there are ids and logits only");
    }
}

#[test]
fn soft_tokens_take_the_place_of_embeddings() {
    let folder = tempfile::tempdir().unwrap();
    let (out, soft) = (folder.path().join("out.safetensors"), folder.path().join("soft.safetensors"));
    for variant in VARIANTS {
        let g = Golden::variant(variant).unwrap();
        if !g.has("soft.input_ids") {
            continue;
        }
        let positions = g.i64("soft.positions").unwrap();
        let embeds = g.f32("soft.embeds").unwrap();
        let of_tokens = g.i64("soft.token_types").unwrap().values;
        let types: Vec<i64> = positions.values.iter().map(|&p| of_tokens[p as usize]).collect();
        write_soft(&soft, &positions.values, &embeds.shape, &embeds.values, Some(&types));
        let flags = ["--soft", soft.to_str().unwrap(), "--embed-scale", "f32", "--layers", "0"];
        // A chunk smaller than the blocks is raised to hold one whole.
        let flags = [&flags[..], &["--chunk", "3"]].concat();
        let file = dump(variant, &ids(&g, "soft.input_ids"), &out, &flags);
        let (_, logits) = floats(&file, "logits");
        assert_close(variant, &compare(&logits, &g.f32("soft.logits").unwrap().values), LOGITS);
        let (_, hidden) = floats(&file, "hidden.0");
        assert_close(variant, &compare(&hidden, g.f32("soft.hidden").unwrap().at(1)), HIDDEN);
    }
}

#[test]
fn an_override_of_the_softcap_is_told_and_used() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    let model = golden("dense31b");
    let args = ["dump", "-m", model.to_str().unwrap(), "--tokens", "2,7,5", "-o", out.to_str().unwrap()];
    let ran = lapidary([&args[..], &["--final-softcap", "0.25"]].concat());
    assert!(ran.err.contains("note: final logit softcap 0.25"), "{ran:?}");
    ran.ok();
    let (_, logits) = floats(&File::open(&out).unwrap(), "logits");
    assert!(logits.iter().all(|x| x.abs() <= 0.25) && logits.iter().any(|x| x.abs() > 0.2));
}

fn write_soft(path: &Path, positions: &[i64], shape: &[usize], embeds: &[f32], types: Option<&[i64]>) {
    let i64s = |v: &[i64]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let (p, e) = (i64s(positions), embeds.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    let t = types.map(i64s);
    let tensor = |name: &str, dtype, shape: &[usize], bytes| NewTensor {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        bytes,
    };
    let mut tensors = vec![
        tensor("positions", Dtype::I64, &[positions.len()], &p[..]),
        tensor("embeds", Dtype::F32, shape, &e[..]),
    ];
    tensors.extend(t.as_ref().map(|t| tensor("types", Dtype::I64, &[t.len() / 8], &t[..])));
    write(path, &tensors, &BTreeMap::new()).unwrap();
}

#[test]
fn what_cannot_be_dumped_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.safetensors");
    let soft = folder.path().join("soft.safetensors");
    let model = golden("unified12b");
    let hidden = 96;
    let base = ["dump", "-m", model.to_str().unwrap(), "-o", out.to_str().unwrap()];
    let run = |more: &[&str]| lapidary([&base[..], more].concat());

    let message = run(&["--tokens", "2,512"]).failure();
    assert!(message.contains("token 512") && message.contains("vocabulary of 512"), "{message}");
    for (flags, words) in [
        (&["--tokens", "2", "--layers", "6"][..], "layers 0 to 5"),
        (&["--tokens", "2", "--also", "router"], "no experts"),
        (&["--tokens", "2", "--also", "per_layer"], "no per-layer inputs"),
        (&["--tokens", "2,x"], "invalid value 'x'"),
        (&["--tokens", ""], "invalid value ''"),
        (&["--tokens", "2", "--layers", "first"], "neither a layer's number nor all"),
        (&[], "--tokens"),
    ] {
        let ran = run(flags);
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.err.contains(words), "{words}: {ran:?}");
    }
    let row = vec![0.5; hidden];
    let with_soft = |positions: &[i64], shape: &[usize], values: &[f32], types: Option<&[i64]>| {
        write_soft(&soft, positions, shape, values, types);
        run(&["--tokens", "2,5,7", "--soft", soft.to_str().unwrap()]).failure()
    };
    let nan = [vec![0.5; hidden - 1], vec![f32::NAN]].concat();
    let cases = [
        (with_soft(&[3], &[1, hidden], &row, None), "entry 0 is 3"),
        (with_soft(&[-1], &[1, hidden], &row, None), "entry 0 is -1"),
        (with_soft(&[1], &[1, hidden - 1], &row[1..], None), "expected F32 of shape [1, 96]"),
        (with_soft(&[1], &[1, hidden], &row, Some(&[2])), "expected 1 (image) or 3 (audio)"),
        (with_soft(&[1], &[1, hidden], &row, Some(&[1, 1])), "types in"),
        (with_soft(&[1, 1], &[2, hidden], &row.repeat(2), None), "1 is there twice"),
        (with_soft(&[1], &[1, hidden], &nan, None), "not finite"),
    ];
    for (message, words) in cases {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert!(!out.exists(), "nothing is written after an error");
}
