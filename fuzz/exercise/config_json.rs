//! What a loader does with a `config.json`, on any bytes: parse it, and rely on what was validated.

use lapidary_model::Config;

/// Panics if a config is accepted that a pass could not rely on.
pub fn config_json(bytes: &[u8]) {
    let Ok(json) = serde_json::from_slice(bytes) else { return };
    let Ok(config) = Config::from_json(&json) else { return };
    assert!(config.vocab > 0 && config.hidden > 0 && config.heads > 0 && config.window > 0);
    assert!((config.lookup_id(config.bos) as usize) < config.vocab);
    assert!((config.pad as usize) < config.vocab);
    assert!(config.score_scale.is_finite() && config.eps.is_finite());
    let first_shared = config.first_shared();
    for (index, layer) in config.layers.iter().enumerate() {
        assert!(layer.kv_heads > 0 && config.heads.is_multiple_of(layer.kv_heads));
        assert!(layer.head_dim > 0 && layer.intermediate > 0);
        assert_eq!(layer.donor.is_some(), index >= first_shared);
        if let Some(donor) = layer.donor {
            assert!(donor < first_shared && config.layers[donor].group == layer.group);
        }
        if layer.head_dim <= 1024 {
            let rope = config.rope[layer.group.index()].inv_freq(layer.head_dim);
            assert!(rope.iter().all(|f| f.is_finite()));
        }
    }
    if let Some(moe) = config.moe {
        assert!((1..=moe.experts).contains(&moe.top_k) && moe.width > 0);
    }
}
