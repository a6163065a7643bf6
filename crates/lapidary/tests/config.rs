//! Configs together with their checkpoints: both spellings run the same, and what cannot run is refused by
//! name before a tensor is touched.

mod common;

use common::drive::{assert_bits, score, tiny_folder, tokens};
use common::files::{Tensor, decoded_tensors, golden_gguf, rewritten, save};
use common::{EVERY, On, Setup, config, stepper};
use lapidary_engine::Prompt;
use lapidary_model::{BuildOptions, Config, EmbedScale, Error, Limits, Model};
use lapidary_reference::Golden;
use lapidary_reference::tiny::Variant;
use lapidary_weights::export::{Layout, export};
use lapidary_weights::{Checkpoint, ConfigSource};

/// `global_head_dim` under composite names, and `per_layer_config` under text-only names.
#[test]
fn both_forms_of_a_config_give_the_same_model() {
    let forms = [Variant::Dense, Variant::DensePerLayerConfig].map(tiny_folder);
    let configs = forms.each_ref().map(|f| config(&Checkpoint::open(f).unwrap()));
    let [mut a, b] = configs;
    assert_eq!((a.model_type.as_str(), b.model_type.as_str()), ("gemma4", "gemma4_text"));
    // Only the outer level of a composite config knows these.
    (a.model_type, a.placeholders, a.eos) = (b.model_type.clone(), b.placeholders.clone(), b.eos.clone());
    assert_eq!(a, b);
    for on in EVERY {
        let run = |folder| {
            let mut s = stepper(folder, on, Setup::default());
            let prompt = tokens(&s, 1, 50);
            score(&mut s, &Prompt::from(&prompt[..])).0
        };
        assert_bits(&format!("{on:?}"), &run(&forms[0]), &run(&forms[1]));
    }
}

#[test]
fn a_drafter_is_named_and_not_loaded() {
    let folder = Golden::root().join("assistant_e2b");
    let refused = match Checkpoint::open(&folder) {
        Err(error) => error.to_string(),
        Ok(checkpoint) => match checkpoint.config() {
            ConfigSource::Json { config, .. } => {
                let error = Config::from_json(config).unwrap_err();
                assert!(matches!(error, Error::NotSupported { .. }));
                error.to_string()
            }
            other => panic!("{other:?}"),
        },
    };
    assert!(refused.contains("gemma4_assistant") && refused.contains("not yet supported"), "{refused}");
}

/// A config that contradicts the tensors: the error names the tensor and the shape that was expected.
#[test]
fn a_config_that_contradicts_the_tensors_is_refused_by_the_tensors_name() {
    type Edit = (&'static str, fn(&mut Config), &'static str);
    let edits: &[Edit] = &[
        ("e2b", |c| c.vocab += 1, "embed_tokens"),
        ("e2b", |c| c.layers.iter_mut().for_each(|l| l.intermediate -= 1), "layers.0.mlp.gate_proj"),
        ("e2b", |c| c.layers[2].head_dim = 32, "layers.2.self_attn"),
        ("e2b", |c| c.layers[2].kv_heads = 2, "layers.2.self_attn.k_proj"),
        ("e2b", |c| c.per_layer.as_mut().unwrap().width = 16, "per_layer"),
        ("e2b", |c| c.per_layer.as_mut().unwrap().vocab = 511, "embed_tokens_per_layer"),
        ("e2b", |c| c.tied = false, "lm_head"),
        ("moe26b", |c| c.heads = 2, "layers.0.self_attn.q_proj"),
        ("moe26b", |c| c.layers[2].values_are_keys = false, "layers.2.self_attn.v_proj"),
        ("moe26b", |c| c.moe.as_mut().unwrap().experts = 9, "layers.0.router"),
        ("moe26b", |c| c.moe.as_mut().unwrap().width = 63, "layers.0.experts"),
        ("dense31b", |c| c.hidden = 159, "embed_tokens"),
    ];
    for on in EVERY {
        for (variant, edit, tensor) in edits {
            let golden = Golden::variant(variant).unwrap();
            let checkpoint = Checkpoint::open(golden.folder()).unwrap();
            let mut config = config(&checkpoint);
            edit(&mut config);
            let mut backend = on.backend();
            let limits = Limits { rows: 4, head_rows: 4 };
            let options =
                BuildOptions { limits, embed_scale: EmbedScale::Auto, requantise: Default::default() };
            let error = Model::build(config, &checkpoint, backend.as_mut(), &options, &mut |_| {})
                .expect_err(&format!("{variant} {tensor}"))
                .to_string();
            assert!(error.contains(tensor), "{variant} {tensor}: {error}");
        }
    }
}

fn build(config: Config, checkpoint: &Checkpoint, on: On) -> Result<Model, Error> {
    let limits = Limits { rows: 4, head_rows: 4 };
    let options = BuildOptions { limits, embed_scale: EmbedScale::Auto, requantise: Default::default() };
    Model::build(config, checkpoint, on.backend().as_mut(), &options, &mut |_| {})
}

/// A variant, what its config loses, the tensor that is without a place then (in safetensors and in GGUF), and why.
type Loss = (&'static str, fn(&mut Config), [&'static str; 2], &'static str);

/// The other direction, in both kinds of file: the tensors are sound, and the config has no place for one.
#[test]
fn tensors_without_a_place_in_the_config_are_refused_by_name() {
    let edits: &[Loss] = &[
        ("dense31b", |c| c.layers.truncate(5), ["layers.5.input_layernorm", "blk.5.attn_norm"], "5 layers"),
        (
            "dense31b",
            |c| c.layer_scalar = false,
            ["layers.0.layer_scalar", "blk.0.layer_output_scale"],
            "scalar",
        ),
        ("moe26b", |c| c.moe = None, ["layers.0.router.proj", "blk.0.ffn_gate_inp.weight"], "no experts"),
        ("e2b", |c| c.per_layer = None, ["embed_tokens_per_layer", "per_layer_token_embd"], "per-layer"),
        (
            "e2b",
            |c| c.layers[0].values_are_keys = true,
            ["layers.0.self_attn.v_proj", "blk.0.attn_v"],
            "values are its keys",
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (variant, edit, names, why) in edits {
        let files = [Golden::root().join(variant), golden_gguf(variant, folder.path())];
        for (file, name) in files.iter().zip(names) {
            let checkpoint = Checkpoint::open(file).unwrap();
            let mut config = config(&checkpoint);
            config.check_tensors(&checkpoint).unwrap_or_else(|e| panic!("{variant} as it is: {e}"));
            edit(&mut config);
            let error = build(config, &checkpoint, On::Reference).map(drop).expect_err(name).to_string();
            assert!(error.contains(name) && error.contains(why), "{variant} {name}: {error}");
        }
    }
}

/// An expert beyond the config's, and tensors that a file adds, in checkpoints as they stand on disk.
#[test]
fn an_added_tensor_is_refused_unless_it_is_known_to_be_idle() {
    let folder = tempfile::tempdir().unwrap();
    export(&Checkpoint::open(Golden::root().join("moe26b")).unwrap(), folder.path(), Layout::PerExpert)
        .unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let mut fewer = config(&checkpoint);
    let last = fewer.moe.unwrap().experts - 1;
    fewer.moe.as_mut().unwrap().experts = last;
    let error = build(fewer, &checkpoint, On::Reference).map(drop).unwrap_err().to_string();
    assert!(error.contains(&format!("layers.0.experts.{last}.")), "{error}");

    let source = Golden::root().join("dense31b");
    let tensors = decoded_tensors(&Checkpoint::open(&source).unwrap());
    let full =
        config(&Checkpoint::open(&source).unwrap()).layers.iter().position(|l| l.values_are_keys).unwrap();
    let at = |name: &str| format!("model.language_model.layers.{full}.self_attn.{name}");
    let scale = Tensor::f32s(&[1], &[0.5]);
    for (name, tensor, idle) in [
        (at("k_scale"), scale.clone(), true),
        (at("v_scale"), scale, true),
        (at("v_proj.weight"), tensors[&at("k_proj.weight")].clone(), false),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut more = tensors.clone();
        more.insert(name.clone(), tensor);
        save(folder.path(), &source.join("config.json"), &more);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        match build(config(&checkpoint), &checkpoint, On::Reference) {
            Ok(_) => assert!(idle, "{name} was taken"),
            Err(error) => assert!(!idle && error.to_string().contains(&name), "{name}: {error}"),
        }
    }

    // A GGUF file says by the tensor itself that the layer has values of its own.
    let plain = golden_gguf("dense31b", folder.path());
    let more = folder.path().join("more.gguf");
    let (k, v) = (format!("blk.{full}.attn_k.weight"), format!("blk.{full}.attn_v.weight"));
    rewritten(&plain, &more, |_, b| Some(b.to_vec()), &[(&v, &k)], &[]);
    let checkpoint = Checkpoint::open(&more).unwrap();
    let config = config(&checkpoint);
    assert!(!config.layers[full].values_are_keys);
    build(config, &checkpoint, On::Reference).unwrap();
}

#[test]
fn progress_reaches_the_whole_and_never_goes_back() {
    for on in EVERY {
        let golden = Golden::variant("moe26b").unwrap();
        let checkpoint = Checkpoint::open(golden.folder()).unwrap();
        let config = config(&checkpoint);
        let limits = Limits { rows: 4, head_rows: 4 };
        let options = BuildOptions { limits, embed_scale: EmbedScale::Auto, requantise: Default::default() };
        let mut last = 0;
        let mut backend = on.backend();
        Model::build(config, &checkpoint, backend.as_mut(), &options, &mut |p| {
            assert!(p.done > last && p.done <= p.total, "{p:?} after {last}");
            last = p.done;
        })
        .unwrap();
        // Vectors are read beside it: they are a small part.
        assert!(last * 100 >= checkpoint.total_bytes() as usize * 95, "{last}");
    }
}
