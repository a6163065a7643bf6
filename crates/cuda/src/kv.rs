//! Pools of keys and values on the device, in the layout of `lapidary-ops`.

use std::sync::Arc;

use lapidary_ops::{
    Error, GROUPS, Group, KvFormat, KvGroupPlan, KvLayerShape, KvPlan, KvRef, PAGE_TOKENS, Result,
};

use crate::args::{Pool, kv_code};
use crate::driver::{Block, Context, DevPtr, Stream};
use crate::kernels::heads::MOST_HEAD_DIM;

/// Pools start at multiples of this many bytes.
const ALIGNMENT: usize = 256;

/// Both groups' pools, in one allocation.
#[derive(Debug)]
pub(crate) struct KvPools {
    /// What they were made for.
    pub plan: KvPlan,
    /// Whether pools that can are in the layout of the fast kernels.
    fast: bool,
    memory: Option<Block>,
    starts: [Vec<usize>; GROUPS],
    /// By pool, for FP8: what stored keys and stored values are multiplied with.
    scales: [Vec<[f32; 2]>; GROUPS],
}

impl KvPools {
    /// No layers at all.
    pub fn empty(fast: bool) -> KvPools {
        let none = || KvGroupPlan { layers: Vec::new(), format: KvFormat::F32, pages: 0, window: None };
        let plan = KvPlan { groups: [none(), none()] };
        KvPools { plan, fast, memory: None, starts: Default::default(), scales: Default::default() }
    }

    /// Allocates or resizes to `plan`, zeros where nothing was; waits for what is queued. Nothing has changed
    /// after an error.
    pub fn resize(&mut self, context: &Arc<Context>, stream: &Stream, plan: &KvPlan) -> Result<()> {
        let unsupported = |what: String| Err(Error::Unsupported { device: "cuda".into(), what });
        let mut starts: [Vec<usize>; GROUPS] = Default::default();
        let mut total = 0usize;
        for (g, group) in plan.groups.iter().enumerate() {
            let old = &self.plan.groups[g];
            if self.memory.is_some() && (old.layers != group.layers || old.format != group.format) {
                return unsupported("changing the layers or the format of a KV cache in use".into());
            }
            for (i, layer) in group.layers.iter().enumerate() {
                let d = layer.head_dim;
                if group.format == KvFormat::Q8_0 && !d.is_multiple_of(32) {
                    return unsupported(format!("a q8_0 KV cache for heads of {d}, not a multiple of 32"));
                }
                if d > MOST_HEAD_DIM {
                    return unsupported(format!("heads of {d} values, more than {MOST_HEAD_DIM}"));
                }
                starts[g].push(total);
                let bytes = group.page_bytes(i).saturating_mul(group.pages);
                total = total.saturating_add(bytes.next_multiple_of(ALIGNMENT));
            }
        }
        let memory = Block::new(context, "the KV cache", total)?;
        // SAFETY: both allocations are alive until the wait, and as large as their plans say.
        unsafe {
            stream.fill(memory.ptr(), 0, total)?;
            if let Some(held) = &self.memory {
                for (g, group) in plan.groups.iter().enumerate() {
                    let pages = group.pages.min(self.plan.groups[g].pages);
                    for (i, &start) in starts[g].iter().enumerate() {
                        let from = held.ptr().at(self.starts[g][i]);
                        stream.copy(memory.ptr().at(start), from, group.page_bytes(i) * pages)?;
                    }
                }
            }
        }
        stream.wait()?;
        let mut scales = std::mem::take(&mut self.scales);
        for (scales, group) in scales.iter_mut().zip(&plan.groups) {
            scales.resize(group.layers.len(), [1.0; 2]);
        }
        *self = KvPools { plan: plan.clone(), fast: self.fast, memory: Some(memory), starts, scales };
        Ok(())
    }

    /// Whether heads of this width go through the fast kernels: whatever layer they belong to, its pool is in their
    /// layout.
    pub fn is_fast(&self, head_dim: usize) -> bool {
        self.fast && self.plan.groups.iter().all(|g| is_fast(g.format, head_dim))
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, Block::len)
    }

    /// What kernels take of a layer's pool.
    pub fn pool(&self, cache: KvRef) -> Pool {
        let g = cache.group.index();
        let group = &self.plan.groups[g];
        let KvLayerShape { kv_heads, head_dim } = group.layers[cache.index];
        Pool {
            ptr: self.memory.as_ref().map_or(DevPtr::NULL, |m| m.ptr().at(self.starts[g][cache.index])),
            kv_heads: kv_heads as i32,
            head_dim: head_dim as i32,
            format: kv_code(group.format),
            row_bytes: group.format.row_bytes(head_dim) as i32,
            fast: (self.fast && is_fast(group.format, head_dim)).into(),
            scales: self.scales[g][cache.index],
            pad: 0,
        }
    }

    /// Notes what bounds a layer's keys and values, before the first of them is stored: keys are normed and scaled by
    /// gains of at most `most_gain`, values are normed.
    pub fn bound(&mut self, cache: KvRef, most_gain: f32) {
        let g = cache.group.index();
        let head_dim = self.plan.groups[g].layers[cache.index].head_dim;
        if self.plan.groups[g].format == KvFormat::Fp8 {
            self.scales[g][cache.index] = [most_gain, 1.0].map(|gain| fp8_scale(head_dim, gain));
        }
    }

    /// Where a page of each layer of a group is, and its bytes.
    pub fn page(&self, group: Group, page: usize) -> Result<Vec<(DevPtr, usize)>> {
        let plan = &self.plan.groups[group.index()];
        let Some(memory) = self.memory.as_ref().filter(|_| page < plan.pages) else {
            return Err(Error::Device(format!("page {page} is outside a pool of {} pages", plan.pages)));
        };
        let place = |(i, &start): (usize, &usize)| {
            let bytes = plan.page_bytes(i);
            (memory.ptr().at(start + page * bytes), bytes)
        };
        Ok(self.starts[group.index()].iter().enumerate().map(place).collect())
    }

    /// Checks a cell's address and the lengths that go with it.
    pub fn check_cell(&self, cache: KvRef, page: usize, in_page: usize, k: usize, v: usize) -> Result<()> {
        let group = &self.plan.groups[cache.group.index()];
        let bad = |what: String| Err(Error::Device(what));
        let Some(shape) = group.layers.get(cache.index) else {
            return bad(format!("the {:?} group has no KV pool {}", cache.group, cache.index));
        };
        if page >= group.pages || in_page >= PAGE_TOKENS {
            let pages = group.pages;
            return bad(format!("position {in_page} of page {page} is outside a pool of {pages} pages"));
        }
        let width = shape.kv_heads * shape.head_dim;
        match k == width && v == width {
            true => Ok(()),
            false => bad(format!("{k} keys and {v} values, not {width} each")),
        }
    }
}

/// Whether the fast kernels read keys and values of this kind.
fn is_fast(format: KvFormat, head_dim: usize) -> bool {
    matches!(format, KvFormat::Bf16 | KvFormat::Fp8) && (head_dim == 256 || head_dim == 512)
}

/// The scale of FP8 values of which `head_dim` have a root mean square of 1 before they are multiplied with at most
/// `gain`: one of them can be sqrt(head_dim) * gain, and the largest code is 448. Rotation moves two values on a circle
/// and leaves the bound. Powers of two, so that nothing but the code itself is rounded; what that loses of the range is
/// one of E4M3's sixteen powers.
fn fp8_scale(head_dim: usize, gain: f32) -> f32 {
    const LARGEST: f32 = 448.0;
    let bound = ((head_dim as f32).sqrt() * gain / LARGEST).max(f32::MIN_POSITIVE);
    let bits = bound.to_bits();
    let up = u32::from(bits & 0x7f_ffff != 0);
    f32::from_bits(((bits >> 23) + up) << 23)
}

#[cfg(test)]
mod tests {
    use super::fp8_scale;

    #[test]
    fn scales_reach_what_a_normed_head_can_hold() {
        // 16 * 1 / 448 = 1/28 -> 1/16; 16 * 28 / 448 = 1; 22.6 * 0.3 / 448 = 0.01515 -> 1/64; 22.6 * 0.4 / 448 = 0.0202 -> 1/32.
        assert_eq!(fp8_scale(256, 1.0), 1.0 / 16.0);
        assert_eq!(fp8_scale(256, 28.0), 1.0);
        assert_eq!(fp8_scale(512, 0.3), 1.0 / 64.0);
        assert_eq!(fp8_scale(512, 0.4), 1.0 / 32.0);
        assert!(fp8_scale(256, 0.0) > 0.0 && (1.0 / fp8_scale(256, 0.0)).is_finite());
    }
}
