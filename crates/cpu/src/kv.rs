//! Keys and values: the pools, and how single heads go in and out.
//!
//! Pools are laid out as `lapidary-ops` describes: `[page][K, V][kv_head][position in page][head_dim]`.

use half::f16;
use half::slice::HalfFloatSliceExt;
use lapidary_ops::{
    Error, GROUPS, Group, KvFormat, KvGroupPlan, KvLayerShape, KvPlan, KvRef, PAGE_TOKENS, Result,
};

use crate::level::{Isa, Level};
use crate::memory::Aligned;

/// The element type of keys and values that the fast mode is fastest with at `level` (`None` for the best): bf16 where
/// the processor multiplies it, else f16.
pub fn native_kv(level: Option<Level>) -> KvFormat {
    if Isa::new(level).is_some_and(Isa::bf16) { KvFormat::Bf16 } else { KvFormat::F16 }
}

/// Both groups' pools.
#[derive(Debug)]
pub(crate) struct KvPools {
    /// What they were made for.
    pub plan: KvPlan,
    pools: [Vec<Aligned>; GROUPS],
}

/// Which half of a page.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Keys = 0,
    Values = 1,
}

impl KvPools {
    /// No layers at all.
    pub fn empty() -> KvPools {
        let none = || KvGroupPlan { layers: Vec::new(), format: KvFormat::F32, pages: 0, window: None };
        KvPools { plan: KvPlan { groups: [none(), none()] }, pools: Default::default() }
    }

    /// Allocates or resizes to `plan`. Nothing has changed after an error.
    pub fn resize(&mut self, plan: &KvPlan) -> Result<()> {
        let first = self.pools.iter().all(Vec::is_empty);
        let mut pools: [Vec<Aligned>; GROUPS] = Default::default();
        for (g, group) in plan.groups.iter().enumerate() {
            let old = &self.plan.groups[g];
            if !first && (old.layers != group.layers || old.format != group.format) {
                let what = "changing the layers or the format of a KV cache in use".into();
                return Err(Error::Unsupported { device: "cpu".into(), what });
            }
            if group.format == KvFormat::Fp8 {
                let what = "keys and values in fp8: a GPU does; q8_0 is as small here".into();
                return Err(Error::Unsupported { device: "cpu".into(), what });
            }
            for (i, layer) in group.layers.iter().enumerate() {
                if group.format == KvFormat::Q8_0 && !layer.head_dim.is_multiple_of(32) {
                    let what =
                        format!("a q8_0 KV cache for heads of {}, not a multiple of 32", layer.head_dim);
                    return Err(Error::Unsupported { device: "cpu".into(), what });
                }
                let bytes = group.page_bytes(i).saturating_mul(group.pages);
                let mut pool = Aligned::zeroed_in_steps(bytes, "the KV cache")?;
                if let Some(held) = self.pools[g].get(i) {
                    let keep = held.len().min(bytes);
                    pool.as_mut_slice()[..keep].copy_from_slice(&held.as_slice()[..keep]);
                }
                pools[g].push(pool);
            }
        }
        self.plan = plan.clone();
        self.pools = pools;
        Ok(())
    }

    /// Appends the bytes of one page of a group, layer after layer.
    pub fn read_page(&self, group: Group, page: usize, out: &mut Vec<u8>) -> Result<()> {
        self.check_page(group, page)?;
        let plan = &self.plan.groups[group.index()];
        for (layer, pool) in self.pools[group.index()].iter().enumerate() {
            let bytes = plan.page_bytes(layer);
            out.extend_from_slice(&pool.as_slice()[page * bytes..(page + 1) * bytes]);
        }
        Ok(())
    }

    /// The way back.
    pub fn write_page(&mut self, group: Group, page: usize, bytes: &[u8]) -> Result<()> {
        self.check_page(group, page)?;
        let plan = &self.plan.groups[group.index()];
        let expected: usize = (0..plan.layers.len()).map(|layer| plan.page_bytes(layer)).sum();
        if bytes.len() != expected {
            let found = bytes.len();
            return Err(Error::Device(format!(
                "{found} bytes for a page of the {group:?} group, not {expected}"
            )));
        }
        let mut rest = bytes;
        for (layer, pool) in self.pools[group.index()].iter_mut().enumerate() {
            let (part, behind) = rest.split_at(plan.page_bytes(layer));
            pool.as_mut_slice()[page * part.len()..(page + 1) * part.len()].copy_from_slice(part);
            rest = behind;
        }
        Ok(())
    }

    fn check_page(&self, group: Group, page: usize) -> Result<()> {
        match self.plan.groups[group.index()].pages {
            pages if page < pages => Ok(()),
            pages => {
                Err(Error::Device(format!("page {page} is outside the {group:?} group's {pages} pages")))
            }
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.pools.iter().flatten().map(Aligned::len).sum()
    }

    /// The layer's heads and the element type.
    pub fn layer(&self, cache: KvRef) -> (KvLayerShape, KvFormat) {
        let group = &self.plan.groups[cache.group.index()];
        (group.layers[cache.index], group.format)
    }

    fn offset(&self, cache: KvRef, page: usize, side: Side, head: usize, in_page: usize) -> usize {
        let group = &self.plan.groups[cache.group.index()];
        let shape = group.layers[cache.index];
        assert!(
            page < group.pages && head < shape.kv_heads && in_page < PAGE_TOKENS,
            "page {page}, head {head}, position {in_page} leave the KV cache"
        );
        let row = group.format.row_bytes(shape.head_dim);
        group.cell_offset(cache.index, page, in_page)
            + (side as usize * shape.kv_heads + head) * PAGE_TOKENS * row
    }

    /// All positions of one head in a page, `[PAGE_TOKENS, row_bytes]`.
    ///
    /// # Safety
    /// Nobody writes to the page while the reference lives.
    pub unsafe fn page(&self, cache: KvRef, page: usize, side: Side, head: usize) -> &[u8] {
        let (shape, format) = self.layer(cache);
        let start = self.offset(cache, page, side, head, 0);
        let len = PAGE_TOKENS * format.row_bytes(shape.head_dim);
        let pool = &self.pools[cache.group.index()][cache.index];
        assert!(start + len <= pool.len());
        // SAFETY: inside the pool by the assertion; the caller answers for writers.
        unsafe { std::slice::from_raw_parts(pool.start().add(start), len) }
    }

    /// One head's key or value at one position.
    ///
    /// # Safety
    /// Nobody else uses this cell while the reference lives.
    #[allow(clippy::mut_from_ref, reason = "workers write disjoint cells of one pool")]
    pub unsafe fn cell_mut(
        &self,
        cache: KvRef,
        page: usize,
        side: Side,
        head: usize,
        in_page: usize,
    ) -> &mut [u8] {
        let (shape, format) = self.layer(cache);
        let start = self.offset(cache, page, side, head, in_page);
        let len = format.row_bytes(shape.head_dim);
        let pool = &self.pools[cache.group.index()][cache.index];
        assert!(start + len <= pool.len());
        // SAFETY: inside the pool by the assertion; the caller answers for other users.
        unsafe { std::slice::from_raw_parts_mut(pool.start().add(start), len) }
    }
}

/// Encodes `values` into `bytes`.
pub(crate) fn encode(format: KvFormat, values: &[f32], bytes: &mut [u8]) {
    match format {
        KvFormat::F32 => {
            for (b, v) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *b = v.to_le_bytes();
            }
        }
        KvFormat::F16 => {
            for (b, v) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *b = f16::from_f32(*v).to_le_bytes();
            }
        }
        KvFormat::Bf16 => {
            for (b, v) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *b = half::bf16::from_f32(*v).to_le_bytes();
            }
        }
        KvFormat::Q8_0 => {
            for (block, v) in bytes.as_chunks_mut::<34>().0.iter_mut().zip(values.as_chunks::<32>().0) {
                let largest = v.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let scale = largest / 127.0;
                let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
                for (q, x) in block[2..].iter_mut().zip(v) {
                    *q = (x * inverse).round() as i8 as u8;
                }
            }
        }
        KvFormat::Fp8 => unreachable!("pools of it are refused"),
    }
}

/// Decodes `bytes` into `values`; any number of whole rows.
pub(crate) fn decode(format: KvFormat, bytes: &[u8], values: &mut [f32]) {
    match format {
        KvFormat::F32 => {
            for (b, v) in bytes.as_chunks::<4>().0.iter().zip(values) {
                *v = f32::from_le_bytes(*b);
            }
        }
        KvFormat::F16 => {
            // SAFETY: every bit pattern is an f16; an unaligned start falls to the slow loop.
            match unsafe { bytes.align_to::<f16>() } {
                ([], halves, []) if cfg!(target_endian = "little") => {
                    halves.convert_to_f32_slice(&mut values[..halves.len()]);
                }
                _ => {
                    for (b, v) in bytes.as_chunks::<2>().0.iter().zip(values) {
                        *v = f16::from_le_bytes(*b).to_f32();
                    }
                }
            }
        }
        KvFormat::Bf16 => {
            for (b, v) in bytes.as_chunks::<2>().0.iter().zip(values) {
                *v = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        KvFormat::Q8_0 => {
            for (block, v) in bytes.as_chunks::<34>().0.iter().zip(values.as_chunks_mut::<32>().0) {
                let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
                for (x, &q) in v.iter_mut().zip(&block[2..]) {
                    *x = scale * f32::from(q as i8);
                }
            }
        }
        KvFormat::Fp8 => unreachable!("pools of it are refused"),
    }
}
