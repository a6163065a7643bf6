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
}

impl KvPools {
    /// No layers at all.
    pub fn empty(fast: bool) -> KvPools {
        let none = || KvGroupPlan { layers: Vec::new(), format: KvFormat::F32, pages: 0, window: None };
        KvPools { plan: KvPlan { groups: [none(), none()] }, fast, memory: None, starts: Default::default() }
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
        *self = KvPools { plan: plan.clone(), fast: self.fast, memory: Some(memory), starts };
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
            pad: 0,
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
    format == KvFormat::Bf16 && (head_dim == 256 || head_dim == 512)
}
