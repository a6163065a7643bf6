//! Which layers keep keys and values, where, and how many pages a context needs.

use lapidary_ops::{GROUPS, Group, KvFormat, KvGroupPlan, KvLayerShape, KvPlan, KvRef, PAGE_TOKENS};

use crate::config::Config;

/// The smallest number of positions that a sliding layer can roll back.
pub const MIN_ROLLBACK: usize = 16;

/// Finds each layer its KV: a layer of its own kind's pools, or its donor's.
pub fn kv_refs(config: &Config) -> Vec<KvRef> {
    let mut next = [0; GROUPS];
    let mut refs: Vec<KvRef> = Vec::with_capacity(config.layers.len());
    for layer in &config.layers {
        let kv = match layer.donor {
            Some(donor) => KvRef { writes: false, ..refs[donor] },
            None => {
                let index = next[layer.group.index()];
                next[layer.group.index()] += 1;
                KvRef { group: layer.group, index, writes: true }
            }
        };
        refs.push(kv);
    }
    refs
}

/// Pages that one sequence of `context` positions needs in `group`, fed at most `chunk` rows at a time.
///
/// A full layer keeps every position. A sliding layer keeps its window and the largest chunk, so that the
/// last `max(chunk, 16)` positions can be rolled back, and one page more because neither end need fall on a
/// page border.
pub fn sequence_pages(config: &Config, group: Group, context: usize, chunk: usize) -> usize {
    let all = context.div_ceil(PAGE_TOKENS);
    match group {
        Group::Full => all,
        Group::Sliding => {
            let kept = config.window.saturating_add(chunk.max(MIN_ROLLBACK));
            all.min(kept.div_ceil(PAGE_TOKENS) + 1)
        }
    }
}

/// The pools for `sequences` sequences of `context` positions each, page 0 included.
pub fn kv_plan(
    config: &Config,
    formats: [KvFormat; GROUPS],
    sequences: usize,
    context: usize,
    chunk: usize,
) -> KvPlan {
    let groups = Group::ALL.map(|group| KvGroupPlan {
        layers: config
            .layers
            .iter()
            .filter(|l| l.group == group && l.donor.is_none())
            .map(|l| KvLayerShape { kv_heads: l.kv_heads, head_dim: l.head_dim })
            .collect(),
        format: formats[group.index()],
        pages: 1 + sequences * sequence_pages(config, group, context, chunk),
        window: (group == Group::Sliding).then_some(config.window),
    });
    KvPlan { groups }
}
