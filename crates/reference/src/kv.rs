//! Keys and values of the reference.
//!
//! A pool holds float32 values that have been through its storage format, in the layout of
//! `lapidary_ops::kv`: `[page][K, V][kv_head][position in page][head_dim]`. Reading needs no decoding, and
//! what is read is exactly what the format can hold.

use half::{bf16, f16};
use lapidary_ops::{Error, KvFormat, KvLayerShape, KvPlan, KvRef, PAGE_TOKENS, Result};

/// Which half of a page.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    Keys = 0,
    Values = 1,
}

/// The pools of both groups.
#[derive(Debug, Default)]
pub(crate) struct KvStore {
    plan: Option<KvPlan>,
    pools: [Vec<Vec<f32>>; lapidary_ops::GROUPS],
}

impl KvStore {
    /// Allocates or resizes; pages that both sizes have keep their values.
    pub fn resize(&mut self, plan: &KvPlan) -> Result<()> {
        let unsupported = |what: String| Error::Unsupported { device: "reference".into(), what };
        for (g, group) in plan.groups.iter().enumerate() {
            if let Some(old) = &self.plan
                && (old.groups[g].layers != group.layers || old.groups[g].format != group.format)
            {
                return Err(unsupported(
                    "a change of the shape or format of allocated keys and values".into(),
                ));
            }
            if group.format == KvFormat::Fp8 {
                return Err(unsupported("keys and values in fp8".into()));
            }
            if group.format == KvFormat::Q8_0
                && let Some(l) = group.layers.iter().find(|l| !l.head_dim.is_multiple_of(32))
            {
                return Err(unsupported(format!("keys and values of {} in blocks of 32", l.head_dim)));
            }
        }
        // All memory is asked for before anything changes, so that a refusal leaves the pools as they were.
        for (group, pools) in plan.groups.iter().zip(&mut self.pools) {
            pools.resize(group.layers.len(), Vec::new());
            for (shape, pool) in group.layers.iter().zip(pools) {
                let more = (group.pages * page_len(*shape)).saturating_sub(pool.len());
                pool.try_reserve_exact(more).map_err(|_| Error::OutOfMemory {
                    what: "keys and values".into(),
                    needed: more.saturating_mul(4),
                    available: 0,
                })?;
            }
        }
        for (group, pools) in plan.groups.iter().zip(&mut self.pools) {
            for (shape, pool) in group.layers.iter().zip(pools) {
                pool.resize(group.pages * page_len(*shape), 0.0);
            }
        }
        self.plan = Some(plan.clone());
        Ok(())
    }

    /// Heads of the layer's KV.
    pub fn shape(&self, cache: KvRef) -> Result<KvLayerShape> {
        let layer = self.plan.as_ref().and_then(|p| p.groups[cache.group.index()].layers.get(cache.index));
        layer
            .copied()
            .ok_or_else(|| Error::Device(format!("{:?} kv {} was never allocated", cache.group, cache.index)))
    }

    /// Errors when the cell is outside the pool.
    pub fn check_cell(&self, cache: KvRef, page: usize, in_page: usize) -> Result<KvLayerShape> {
        let shape = self.shape(cache)?;
        let pages = self.plan.as_ref().map_or(0, |p| p.groups[cache.group.index()].pages);
        if page >= pages || in_page >= PAGE_TOKENS {
            return Err(Error::Device(format!(
                "page {page} cell {in_page} is outside {pages} pages of {PAGE_TOKENS}"
            )));
        }
        Ok(shape)
    }

    /// One head's key or value at one position.
    pub fn head(&self, cache: KvRef, side: Side, cell: (usize, usize), head: usize) -> &[f32] {
        let (start, dim) = self.locate(cache, side, cell, head);
        &self.pools[cache.group.index()][cache.index][start..start + dim]
    }

    /// Stores one head's key or value as the pool's format can hold it.
    pub fn store(&mut self, cache: KvRef, side: Side, cell: (usize, usize), head: usize, values: &[f32]) {
        let (start, dim) = self.locate(cache, side, cell, head);
        let format = self.plan.as_ref().expect("located above").groups[cache.group.index()].format;
        let out = &mut self.pools[cache.group.index()][cache.index][start..start + dim];
        out.copy_from_slice(values);
        round(format, out);
    }

    /// Bytes held: float32 values, whatever the format.
    pub fn bytes(&self) -> usize {
        self.pools.iter().flatten().map(|p| p.len() * 4).sum()
    }

    fn locate(
        &self,
        cache: KvRef,
        side: Side,
        (page, in_page): (usize, usize),
        head: usize,
    ) -> (usize, usize) {
        let plan = self.plan.as_ref().expect("keys and values are allocated before a pass");
        let KvLayerShape { kv_heads, head_dim } = plan.groups[cache.group.index()].layers[cache.index];
        let row = ((page * 2 + side as usize) * kv_heads + head) * PAGE_TOKENS + in_page;
        (row * head_dim, head_dim)
    }
}

fn page_len(shape: KvLayerShape) -> usize {
    2 * shape.kv_heads * PAGE_TOKENS * shape.head_dim
}

/// Replaces each value by the nearest that `format` can hold.
fn round(format: KvFormat, values: &mut [f32]) {
    match format {
        KvFormat::F32 => {}
        KvFormat::F16 => values.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32()),
        KvFormat::Bf16 => values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32()),
        KvFormat::Q8_0 => values.chunks_mut(32).for_each(round_q8_0),
        KvFormat::Fp8 => unreachable!("pools of it are refused"),
    }
}

/// `d = max |x| / 127`, codes `round(x / d)`, values `code * f16(d)`.
///
/// A block with a value that is not finite becomes NaN throughout: a code cannot say so, and the judge must
/// not turn a NaN into a zero.
fn round_q8_0(block: &mut [f32]) {
    if !block.iter().all(|v| v.is_finite()) {
        block.fill(f32::NAN);
        return;
    }
    let d = block.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0;
    let inverse = if d > 0.0 { 1.0 / d } else { 0.0 };
    let stored = f16::from_f32(d).to_f32();
    for v in block {
        *v = (*v * inverse).round() * stored;
    }
}

#[cfg(test)]
mod tests {
    use lapidary_ops::{Group, KvGroupPlan};

    use super::*;

    fn plan(format: KvFormat, head_dim: usize, pages: usize) -> KvPlan {
        let layers = vec![KvLayerShape { kv_heads: 1, head_dim }, KvLayerShape { kv_heads: 3, head_dim }];
        let full = KvGroupPlan { layers, format, pages, window: None };
        let sliding = KvGroupPlan { layers: Vec::new(), format, pages: 1, window: Some(5) };
        KvPlan { groups: [sliding, full] }
    }

    const LAYER: KvRef = KvRef { group: Group::Full, index: 1, writes: true };

    #[test]
    fn resizing_keeps_the_pages_that_stay() {
        let mut kv = KvStore::default();
        kv.resize(&plan(KvFormat::F32, 2, 3)).unwrap();
        kv.store(LAYER, Side::Values, (2, 31), 2, &[1.5, -2.5]);
        kv.resize(&plan(KvFormat::F32, 2, 7)).unwrap();
        assert_eq!(kv.head(LAYER, Side::Values, (2, 31), 2), [1.5, -2.5]);
        assert_eq!(kv.bytes(), 7 * (2 + 6) * 2 * 32 * 4);
        assert!(kv.resize(&plan(KvFormat::F32, 4, 7)).is_err());
        assert_eq!(kv.head(LAYER, Side::Values, (2, 31), 2), [1.5, -2.5]);
    }

    #[test]
    fn no_two_cells_overlap() {
        let mut kv = KvStore::default();
        kv.resize(&plan(KvFormat::F32, 2, 3)).unwrap();
        let cells = || {
            (0..3).flat_map(|page| (0..PAGE_TOKENS).map(move |t| (page, t))).flat_map(|cell| {
                (0..3).flat_map(move |h| [Side::Keys, Side::Values].map(|side| (side, cell, h)))
            })
        };
        for (i, (side, cell, h)) in cells().enumerate() {
            kv.store(LAYER, side, cell, h, &[i as f32, -(i as f32)]);
        }
        for (i, (side, cell, h)) in cells().enumerate() {
            assert_eq!(kv.head(LAYER, side, cell, h), [i as f32, -(i as f32)]);
        }
    }

    #[test]
    fn formats_round_on_store() {
        let third = 1.0f32 / 3.0;
        let stored = |format, first: f32| {
            let mut kv = KvStore::default();
            kv.resize(&plan(format, 32, 1)).unwrap();
            let mut values = [0.0; 32];
            (values[0], values[1]) = (first, 127.0);
            kv.store(LAYER, Side::Keys, (0, 0), 0, &values);
            kv.head(LAYER, Side::Keys, (0, 0), 0)[0]
        };
        assert_eq!(stored(KvFormat::F32, third), third);
        assert_eq!(stored(KvFormat::F16, third), 0.33325195);
        assert_eq!(stored(KvFormat::Bf16, third), 0.33398438);
        assert_eq!(stored(KvFormat::Q8_0, 41.6), 42.0);
        assert!(stored(KvFormat::Q8_0, f32::INFINITY).is_nan());
        assert!(KvStore::default().resize(&plan(KvFormat::Q8_0, 48, 1)).is_err());
    }
}
