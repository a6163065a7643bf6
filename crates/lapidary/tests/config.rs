//! Configs together with their checkpoints: both spellings run the same, and what cannot run is refused by
//! name before a tensor is touched.

mod common;

use common::drive::{assert_bits, score, tiny_folder, tokens};
use common::{EVERY, Setup, config, stepper};
use lapidary_engine::Prompt;
use lapidary_model::{BuildOptions, Config, EmbedScale, Error, Limits, Model};
use lapidary_reference::Golden;
use lapidary_reference::tiny::Variant;
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
            let options = BuildOptions { limits, embed_scale: EmbedScale::Auto };
            let error = Model::build(config, &checkpoint, backend.as_mut(), &options, &mut |_| {})
                .expect_err(&format!("{variant} {tensor}"))
                .to_string();
            assert!(error.contains(tensor), "{variant} {tensor}: {error}");
        }
    }
}

#[test]
fn progress_reaches_the_whole_and_never_goes_back() {
    for on in EVERY {
        let golden = Golden::variant("moe26b").unwrap();
        let checkpoint = Checkpoint::open(golden.folder()).unwrap();
        let config = config(&checkpoint);
        let limits = Limits { rows: 4, head_rows: 4 };
        let options = BuildOptions { limits, embed_scale: EmbedScale::Auto };
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
