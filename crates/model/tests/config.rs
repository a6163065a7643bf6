//! `config.json`: what is read, what is assumed, and what is refused by the name of its field.

use lapidary_model::kv_plan::{kv_plan, kv_refs, sequence_pages};
use lapidary_model::{Config, Error, Family, MoeConfig, PerLayerConfig, Rope, VisionBlocks};
use lapidary_ops::{Activation, Group, KvFormat};
use proptest::prelude::*;
use serde_json::{Value, json};

fn read(v: Value) -> Config {
    Config::from_json(&v).unwrap_or_else(|e| panic!("{e}"))
}

/// The published configs, in the fields that a text model reads.
fn published(name: &str) -> Value {
    let row = |kind, layers, hidden, inner, heads, kv, global: Option<u32>, window, max: u32, every| {
        let types: Vec<&str> = (1..=layers)
            .map(|l| if l % every == 0 { "full_attention" } else { "sliding_attention" })
            .collect();
        json!({
            "model_type": kind,
            "image_token_id": 258_880, "audio_token_id": 258_881, "video_token_id": 258_884,
            "eos_token_id": [1, 106],
            "text_config": {
                "model_type": format!("{kind}_text"),
                "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner,
                "num_attention_heads": heads, "num_key_value_heads": kv,
                "num_global_key_value_heads": global, "head_dim": 256, "global_head_dim": 512,
                "attention_k_eq_v": global.is_some(), "sliding_window": window,
                "max_position_embeddings": max, "layer_types": types, "vocab_size": 262_144,
                "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0,
                "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false,
                "hidden_size_per_layer_input": 0, "pad_token_id": 0, "bos_token_id": 2,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {
                        "rope_type": "proportional", "rope_theta": 1000000.0,
                        "partial_rotary_factor": 0.25,
                    },
                },
            },
        })
    };
    let mut v = match name {
        "E2B" => row("gemma4", 35, 1536, 6144, 8, 1, None, 512, 131_072, 5),
        "E4B" => row("gemma4", 42, 2560, 10_240, 8, 2, None, 512, 131_072, 6),
        "12B" => row("gemma4_unified", 48, 3840, 15_360, 16, 8, Some(1), 1024, 262_144, 6),
        "26B-A4B" => row("gemma4", 30, 2816, 2112, 16, 8, Some(2), 1024, 262_144, 6),
        "31B" => row("gemma4", 60, 5376, 21_504, 32, 16, Some(4), 1024, 262_144, 6),
        other => panic!("{other}"),
    };
    let text = &mut v["text_config"];
    match name {
        "E2B" | "E4B" => {
            text["hidden_size_per_layer_input"] = 256.into();
            text["vocab_size_per_layer_input"] = 262_144.into();
            text["num_kv_shared_layers"] = if name == "E2B" { 20 } else { 18 }.into();
            text["use_double_wide_mlp"] = (name == "E2B").into();
        }
        _ => text["use_bidirectional_attention"] = "vision".into(),
    }
    if name == "26B-A4B" {
        text["enable_moe_block"] = true.into();
        text["num_experts"] = 128.into();
        text["top_k_experts"] = 8.into();
        text["moe_intermediate_size"] = 704.into();
    }
    v
}

#[test]
fn published_configs_are_read_whole() {
    for (name, vision, full, donors) in [
        ("E2B", VisionBlocks::Causal, vec![4, 9, 14, 19, 24, 29, 34], Some((15, 13, 14))),
        ("E4B", VisionBlocks::Causal, vec![5, 11, 17, 23, 29, 35, 41], Some((24, 22, 23))),
        ("12B", VisionBlocks::Sliding, (0..8).map(|i| 6 * i + 5).collect(), None),
        ("26B-A4B", VisionBlocks::Sliding, (0..5).map(|i| 6 * i + 5).collect(), None),
        ("31B", VisionBlocks::Sliding, (0..10).map(|i| 6 * i + 5).collect(), None),
    ] {
        let v = published(name);
        let c = read(v.clone());
        let t = &v["text_config"];
        let n = |field: &str| t[field].as_u64().unwrap() as usize;
        assert_eq!(c.family, Family::Gemma4);
        assert_eq!((c.vocab, c.pad, c.bos), (262_144, 0, 2));
        assert_eq!(
            (c.hidden, c.heads, c.window),
            (n("hidden_size"), n("num_attention_heads"), n("sliding_window"))
        );
        assert_eq!((c.max_positions, c.layers.len()), (n("max_position_embeddings"), n("num_hidden_layers")));
        assert_eq!(
            (c.eos.as_slice(), c.placeholders.as_slice()),
            (&[1, 106][..], &[258_880, 258_881, 258_884][..])
        );
        assert_eq!((c.eps, c.final_softcap, c.attn_softcap, c.score_scale), (1e-6, Some(30.0), None, 1.0));
        assert_eq!((c.activation, c.vision), (Activation::GeluTanh, vision));
        let rope =
            [Rope { theta: 1e4, rotated: 1.0, factor: 1.0 }, Rope { theta: 1e6, rotated: 0.25, factor: 1.0 }];
        assert_eq!(c.rope, rope);
        assert!(c.value_norm && c.layer_scalar && c.tied && !c.norm_plus_one && c.notes.is_empty());
        let moe = (name == "26B-A4B").then_some(MoeConfig { experts: 128, top_k: 8, width: 704 });
        assert_eq!(c.moe, moe);
        let e = name.starts_with('E');
        assert_eq!(c.per_layer, e.then_some(PerLayerConfig { width: 256, vocab: 262_144 }));
        let first = donors.map_or(c.layers.len(), |d| d.0);
        assert_eq!(c.first_shared(), first);
        for (i, l) in c.layers.iter().enumerate() {
            let is_full = full.contains(&i);
            assert_eq!(l.group == Group::Full, is_full, "{name} layer {i}");
            assert_eq!(l.head_dim, if is_full { 512 } else { 256 });
            let global = t["num_global_key_value_heads"].as_u64();
            let kv = global.filter(|_| is_full).unwrap_or(n("num_key_value_heads") as u64);
            assert_eq!(l.kv_heads as u64, kv, "{name} layer {i}");
            assert_eq!(l.values_are_keys, !e && is_full);
            let wide = if name == "E2B" && i >= first { 2 } else { 1 };
            assert_eq!(l.intermediate, wide * n("intermediate_size"));
            let donor = donors.filter(|_| i >= first).map(|(_, s, f)| if is_full { f } else { s });
            assert_eq!(l.donor, donor, "{name} layer {i}");
        }
    }
}

#[test]
fn frequencies_of_the_published_rotation() {
    let c = read(published("31B"));
    let full = c.rope[1].inv_freq(512);
    assert_eq!((full.len(), full.iter().filter(|f| **f != 0.0).count()), (256, 64));
    assert_eq!((full[0], full[63], full[64]), (1.0, 1e6f64.powf(-126.0 / 512.0) as f32, 0.0));
    let sliding = c.rope[0].inv_freq(256);
    assert_eq!((sliding[0], sliding[127]), (1.0, 1e4f64.powf(-254.0 / 256.0) as f32));
    let linear = Rope { theta: 1e6, rotated: 1.0, factor: 8.0 };
    assert_eq!(linear.inv_freq(4), [0.125, (1e6f64.powf(-0.5) / 8.0) as f32]);
    // An odd share is floored: 0.3 of 5 pairs is 1.
    assert_eq!(Rope { theta: 10.0, rotated: 0.3, factor: 1.0 }.inv_freq(10)[1..], [0.0; 4]);
}

#[test]
fn both_spellings_of_head_shapes_are_the_same_config() {
    for name in ["12B", "26B-A4B", "31B"] {
        let old = published(name);
        let mut new = old.clone();
        let text = new["text_config"].as_object_mut().unwrap();
        text.remove("global_head_dim");
        let global = text.remove("num_global_key_value_heads").unwrap();
        let full = (0..read(old.clone()).layers.len()).filter(|i| i % 6 == 5);
        let shape = |i: usize| (i.to_string(), json!({"head_dim": 512, "num_key_value_heads": global}));
        let shapes: serde_json::Map<String, Value> = full.map(shape).collect();
        text.insert("per_layer_config".into(), Value::Object(shapes));
        assert_eq!(read(new), read(old), "{name}");
    }
}

#[test]
fn a_text_config_may_stand_alone() {
    let composite = published("26B-A4B");
    let mut alone = composite["text_config"].clone();
    let (mut a, b) = (read(alone.clone()), read(composite));
    // What only the outer level knows: its own name, placeholders, and further stop tokens.
    assert_eq!((a.model_type.as_str(), a.placeholders.len(), a.eos.as_slice()), ("gemma4_text", 0, &[1][..]));
    (a.model_type, a.placeholders, a.eos) = (b.model_type.clone(), b.placeholders.clone(), b.eos.clone());
    assert_eq!(a, b);
    alone["text_config"] = Value::Null;
    read(alone);
}

#[test]
fn missing_fields_take_the_defaults_of_the_class() {
    let c = read(json!({"model_type": "gemma4"}));
    assert_eq!((c.vocab, c.hidden, c.layers.len(), c.heads), (262_144, 2304, 30, 8));
    assert_eq!((c.window, c.max_positions, c.eps), (512, 131_072, 1e-6));
    assert_eq!((c.final_softcap, c.attn_softcap, c.vision), (None, None, VisionBlocks::Causal));
    assert_eq!(c.per_layer, Some(PerLayerConfig { width: 256, vocab: 262_144 }));
    assert_eq!((c.moe, c.tied, c.pad, c.bos, c.eos.as_slice()), (None, true, 0, 2, &[1][..]));
    for (i, l) in c.layers.iter().enumerate() {
        let full = i % 6 == 5;
        let shape = (l.group == Group::Full, l.kv_heads, l.head_dim, l.intermediate, l.values_are_keys);
        assert_eq!(shape, (full, 4, if full { 512 } else { 256 }, 9216, false));
    }
    let c = read(json!({"model_type": "gemma4_unified"}));
    assert_eq!((c.window, c.max_positions, c.vision), (1024, 262_144, VisionBlocks::Sliding));
    assert_eq!(c.per_layer, None);

    // The last layer is full, whatever the period or the list says, and that is told.
    let c = read(json!({"model_type": "gemma4", "num_hidden_layers": 8}));
    assert_eq!(c.layers.iter().filter(|l| l.group == Group::Full).count(), 2);
    assert_eq!((c.layers[7].group, c.notes.len()), (Group::Full, 1));

    let c = read(json!({"model_type": "gemma3_text", "query_pre_attn_scalar": 16}));
    assert_eq!((c.family, c.window, c.score_scale), (Family::Gemma3, 4096, 0.25));
    assert_eq!((c.rope[0].theta, c.rope[1].theta, c.rope[1].rotated), (1e4, 1e6, 1.0));
    assert!(c.norm_plus_one && !c.value_norm && !c.layer_scalar && c.per_layer.is_none());
    assert_eq!(c.vision, VisionBlocks::Causal);
    assert_eq!(c.layers.iter().map(|l| (l.group == Group::Full) as usize).sum::<usize>(), 4);
    assert_eq!(c.layers[25].group, Group::Sliding);
    let c = read(json!({"model_type": "gemma3", "text_config": {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2,
    }}));
    assert_eq!((c.vision, c.rope[0].factor, c.rope[1].factor), (VisionBlocks::Both, 1.0, 8.0));
    assert_eq!(c.layers.iter().filter(|l| l.group == Group::Full).count(), 13);
}

#[test]
fn accepted_alternatives() {
    let with = |field: &str, value: Value| {
        let mut v = published("26B-A4B");
        v["text_config"][field] = value;
        v
    };
    assert_eq!(read(with("hidden_activation", "silu".into())).activation, Activation::Silu);
    let mut v = with("expert_intermediate_size", 704.into());
    v["text_config"].as_object_mut().unwrap().remove("moe_intermediate_size");
    assert_eq!(read(v), read(published("26B-A4B")));
    for none in [Value::Null, 0.into()] {
        assert_eq!(read(with("hidden_size_per_layer_input", none)).per_layer, None);
    }
    for causal in [Value::Null, false.into()] {
        assert_eq!(read(with("use_bidirectional_attention", causal)).vision, VisionBlocks::Causal);
    }
    assert_eq!(read(with("attn_logit_softcapping", 50.into())).attn_softcap, Some(50.0));
    assert!(!read(with("tie_word_embeddings", false.into())).tied);
}

/// A field, a value that is refused, and what the message names.
#[test]
fn every_refusal_names_its_field() {
    let text: &[(&str, Value, &str)] = &[
        ("hidden_activation", json!("gelu"), "gelu"),
        ("hidden_activation", json!("relu"), "relu"),
        ("hidden_activation", json!(3), "hidden_activation"),
        ("use_bidirectional_attention", json!("all"), "use_bidirectional_attention"),
        ("use_bidirectional_attention", json!(true), "use_bidirectional_attention"),
        ("attention_bias", json!(true), "attention_bias"),
        ("rope_parameters", json!(7), "rope_parameters"),
        ("rope_parameters", json!({"rope_type": "default", "rope_theta": 1e4}), "rope_parameters.rope_type"),
        ("rope_parameters", json!({"full_attention": {"rope_type": "yarn"}}), "yarn"),
        ("rope_parameters", json!({"full_attention": 1}), "full_attention"),
        ("rope_parameters", json!({"full_attention": {"rope_theta": 0}}), "rope_parameters"),
        ("rope_parameters", json!({"full_attention": {"rope_theta": "x"}}), "rope_theta"),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}),
            "rope_parameters",
        ),
        ("rope_parameters", json!({"full_attention": {"rope_theta": 1e-300}}), "rope_parameters"),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_type": "linear", "factor": 1e-60}}),
            "rope_parameters",
        ),
        ("per_layer_config", json!([]), "per_layer_config"),
        ("per_layer_config", json!({"99": {"head_dim": 512}}), "per_layer_config.99"),
        ("per_layer_config", json!({"5": {"sliding_window": 9}}), "per_layer_config.5.sliding_window"),
        ("per_layer_config", json!({"5": 512}), "per_layer_config.5"),
        ("per_layer_config", json!({"5": {"head_dim": 511}}), "head_dim"),
        ("layer_types", json!(["sliding_attention"]), "layer_types"),
        ("layer_types", json!("sliding_attention"), "layer_types"),
        ("layer_types", json!(vec!["linear_attention"; 30]), "linear_attention"),
        ("num_hidden_layers", json!(0), "30 entries for 0 layers"),
        ("num_hidden_layers", json!(1_000_000), "num_hidden_layers"),
        ("num_hidden_layers", json!(-1), "num_hidden_layers"),
        ("hidden_size", json!(0), "hidden_size"),
        ("hidden_size", json!(2.5), "hidden_size"),
        ("hidden_size", json!(1e300), "hidden_size"),
        ("hidden_size", json!(u64::MAX), "hidden_size"),
        ("vocab_size", json!(0), "vocab_size"),
        ("num_attention_heads", json!(0), "num_attention_heads"),
        ("num_attention_heads", json!(15), "num_key_value_heads"),
        ("num_key_value_heads", json!(0), "num_key_value_heads"),
        ("num_key_value_heads", json!(3), "num_key_value_heads"),
        ("num_global_key_value_heads", json!(5), "num_key_value_heads"),
        ("head_dim", json!(0), "head_dim"),
        ("head_dim", json!(255), "head_dim"),
        ("global_head_dim", json!("512"), "global_head_dim"),
        ("intermediate_size", json!(0), "intermediate_size"),
        ("sliding_window", json!(0), "sliding_window"),
        ("sliding_window", json!(null), "sliding_window"),
        ("max_position_embeddings", json!(0), "max_position_embeddings"),
        ("rms_norm_eps", json!(-1.0), "rms_norm_eps"),
        ("rms_norm_eps", json!("small"), "rms_norm_eps"),
        ("rms_norm_eps", json!(1e300), "rms_norm_eps"),
        ("final_logit_softcapping", json!(0), "softcapping"),
        ("final_logit_softcapping", json!(-30), "softcapping"),
        ("attn_logit_softcapping", json!(1e-60), "softcapping"),
        ("num_kv_shared_layers", json!(30), "num_kv_shared_layers"),
        ("num_kv_shared_layers", json!(26), "num_kv_shared_layers"),
        ("num_experts", json!(null), "num_experts"),
        ("num_experts", json!(0), "num_experts"),
        ("top_k_experts", json!(null), "top_k_experts"),
        ("top_k_experts", json!(0), "top_k_experts"),
        ("top_k_experts", json!(129), "top_k_experts"),
        ("moe_intermediate_size", json!(null), "moe_intermediate_size"),
        ("enable_moe_block", json!("yes"), "enable_moe_block"),
        ("attention_k_eq_v", json!(1), "attention_k_eq_v"),
        ("tie_word_embeddings", json!(0), "tie_word_embeddings"),
        ("pad_token_id", json!(262_144), "pad_token_id"),
        ("bos_token_id", json!(-2), "bos_token_id"),
        ("eos_token_id", json!("</s>"), "eos_token_id"),
        ("eos_token_id", json!([1, 2.5]), "eos_token_id"),
    ];
    for (field, value, names) in text {
        let mut v = published("26B-A4B");
        // A window of null is the default; the refusals below are of what stands in the field.
        if (*field, value) == ("sliding_window", &Value::Null) {
            v["text_config"][*field] = Value::Null;
            assert_eq!(read(v).window, 512);
            continue;
        }
        v["text_config"][*field] = value.clone();
        let error = Config::from_json(&v).expect_err(&format!("{field} = {value}")).to_string();
        assert!(error.contains(names), "{field} = {value}: {error}");
    }
    let root: &[(Value, &str)] = &[
        (json!({}), "model_type"),
        (json!({"model_type": "gemma4", "num_hidden_layers": 0}), "num_hidden_layers"),
        (json!(null), "model_type"),
        (json!([1, 2]), "model_type"),
        (json!({"model_type": 4}), "model_type"),
        (json!({"model_type": "llama"}), "model_type llama"),
        (json!({"model_type": "gemma2"}), "model_type gemma2"),
        (json!({"model_type": "gemma3n"}), "model_type gemma3n"),
        (json!({"model_type": "gemma4_assistant"}), "gemma4_assistant"),
        (json!({"model_type": "gemma4_unified_assistant"}), "assistant"),
        (json!({"model_type": "gemma4", "text_config": 5}), "text_config"),
        (json!({"model_type": "gemma4", "image_token_id": -1}), "image_token_id"),
        (json!({"model_type": "gemma3", "query_pre_attn_scalar": 0}), "query_pre_attn_scalar"),
        (json!({"model_type": "gemma3", "query_pre_attn_scalar": 1e-300}), "query_pre_attn_scalar"),
        (json!({"model_type": "gemma3", "query_pre_attn_scalar": 1e300}), "query_pre_attn_scalar"),
        (json!({"model_type": "gemma3", "sliding_window_pattern": 0}), "sliding_window_pattern"),
        (json!({"model_type": "gemma3", "rope_scaling": {"rope_type": "llama3"}}), "llama3"),
        (json!({"model_type": "gemma3", "rope_scaling": {"rope_type": "linear", "factor": 0}}), "rope"),
        (json!({"model_type": "gemma3", "rope_scaling": "linear"}), "rope_scaling"),
        (json!({"model_type": "gemma3", "use_bidirectional_attention": true}), "use_bidirectional_attention"),
        (json!({"model_type": "gemma4", "vocab_size_per_layer_input": 0}), "vocab_size_per_layer_input"),
        (json!({"model_type": "gemma4", "vocab_size_per_layer_input": 2, "pad_token_id": 1}), "bos_token_id"),
    ];
    for (v, names) in root {
        let error = Config::from_json(v).expect_err(&v.to_string()).to_string();
        assert!(error.contains(names), "{v}: {error}");
    }
    let unsupported = Config::from_json(&json!({"model_type": "gemma4_assistant"}));
    assert!(matches!(unsupported, Err(Error::NotSupported { .. })));
}

#[test]
fn layers_find_their_keys_and_values() {
    let c = read(published("E2B"));
    let refs = kv_refs(&c);
    assert_eq!((refs[13].group, refs[13].index, refs[13].writes), (Group::Sliding, 11, true));
    assert_eq!((refs[14].group, refs[14].index, refs[14].writes), (Group::Full, 2, true));
    for (i, r) in refs.iter().enumerate().skip(15) {
        let donor = if i % 5 == 4 { refs[14] } else { refs[13] };
        assert_eq!((r.group, r.index, r.writes), (donor.group, donor.index, false), "layer {i}");
    }
    let plan = kv_plan(&c, [KvFormat::Bf16; 2], 1, 64, 16);
    assert_eq!([plan.groups[0].layers.len(), plan.groups[1].layers.len()], [12, 3]);
}

#[test]
fn pages_of_a_sequence() {
    let c = read(published("E2B"));
    // Window 512; a chunk below 16 counts as 16, the promised rollback.
    for (context, chunk, sliding, full) in [
        (1, 1, 1, 1),
        (32, 1, 1, 1),
        (33, 1, 2, 2),
        (8192, 1, 18, 256),
        (8192, 16, 18, 256),
        (8192, 17, 18, 256),
        (8192, 32, 18, 256),
        (8192, 33, 19, 256),
        (8192, 512, 33, 256),
        (600, 512, 19, 19),
        (0, 16, 0, 0),
    ] {
        let found = Group::ALL.map(|g| sequence_pages(&c, g, context, chunk));
        assert_eq!(found, [sliding, full], "context {context}, chunk {chunk}");
    }
    assert_eq!(sequence_pages(&c, Group::Sliding, 8192, usize::MAX), 256, "no overflow");
}

fn junk() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0u64..70).prop_map(Value::from),
        any::<f64>().prop_map(|f| serde_json::Number::from_f64(f).map_or(Value::Null, Value::Number)),
        "[a-z_]{0,8}".prop_map(Value::from),
        Just(json!("proportional")),
        Just(json!("full_attention")),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        let key = prop_oneof![
            Just("full_attention".to_string()),
            Just("sliding_attention".to_string()),
            Just("rope_type".to_string()),
            Just("rope_theta".to_string()),
            Just("factor".to_string()),
            Just("head_dim".to_string()),
            "[0-9]{1,2}",
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::Array),
            prop::collection::vec((key, inner), 0..5).prop_map(|kv| Value::Object(kv.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Whatever stands in whichever fields: an error or a config that everything later can rely on.
    #[test]
    fn hostile_configs_never_panic(
        base in prop::sample::select(vec!["E2B", "12B", "26B-A4B", "gemma3", "bare"]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), junk()), 1..5),
    ) {
        let mut v = match base {
            "gemma3" => json!({"model_type": "gemma3", "text_config": {"num_hidden_layers": 7}}),
            "bare" => json!({"model_type": "gemma4", "num_hidden_layers": 7, "text_config": {}}),
            name => published(name),
        };
        const FIELDS: [&str; 34] = [
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "intermediate_size",
            "num_kv_shared_layers", "use_double_wide_mlp", "layer_types", "per_layer_config",
            "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size",
            "hidden_size_per_layer_input", "vocab_size", "vocab_size_per_layer_input",
            "use_bidirectional_attention", "rope_parameters", "sliding_window", "max_position_embeddings",
            "rms_norm_eps", "final_logit_softcapping", "hidden_activation", "tie_word_embeddings",
            "pad_token_id", "eos_token_id", "query_pre_attn_scalar", "sliding_window_pattern",
            "rope_scaling", "image_token_id",
        ];
        for (field, inside, value) in changes {
            let field = FIELDS[field.index(FIELDS.len())];
            match inside {
                true => v["text_config"][field] = value,
                false => v[field] = value,
            }
        }
        if let Ok(c) = Config::from_json(&v) {
            prop_assert!(c.first_shared() >= 1 && c.first_shared() <= c.layers.len());
            prop_assert!(c.layers.len() <= 1024);
            for (i, l) in c.layers.iter().enumerate() {
                prop_assert!(l.kv_heads > 0 && c.heads % l.kv_heads == 0 && l.head_dim % 2 == 0);
                prop_assert!(l.donor.is_none_or(|d| d < i && c.layers[d].donor.is_none()));
                let f = c.rope[l.group.index()].inv_freq(2 * (l.head_dim / 2).min(300));
                prop_assert!(f.iter().all(|f| f.is_finite() && *f >= 0.0));
            }
            prop_assert!(c.score_scale.is_normal() && c.eps.is_finite());
            prop_assert_eq!(kv_refs(&c).len(), c.layers.len());
            let plan = kv_plan(&c, [KvFormat::Bf16; 2], 1, c.max_positions, 512);
            let owners: usize = plan.groups.iter().map(|g| g.layers.len()).sum();
            prop_assert_eq!(owners, c.first_shared());
        }
    }

    #[test]
    fn configs_of_pure_junk_never_panic(v in junk()) {
        let _ = Config::from_json(&v);
    }
}
