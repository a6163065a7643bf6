//! How keys and values are laid out.
//!
//! Layers with KV of their own fall into two groups, sliding and full attention. A page covers
//! [`PAGE_TOKENS`] consecutive positions of one sequence in **all** layers of a group, so a sequence has one
//! page table a group. Each layer of a group has one pool, `[page][K, V][kv_head][position in page][head_dim]`,
//! indexed by the same page numbers. Page 0 belongs to no sequence: rows that only pad a batch write there.

/// Positions in a page, and the length of the blocks in which sums over keys run (blocks are aligned to
/// absolute positions, so that results do not depend on how a prompt was cut).
pub const PAGE_TOKENS: usize = 32;

/// Number of page groups.
pub const GROUPS: usize = 2;

/// The two kinds of attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// Sees a window of the newest positions.
    Sliding = 0,
    /// Sees every earlier position.
    Full = 1,
}

impl Group {
    /// Both groups, in index order.
    pub const ALL: [Group; GROUPS] = [Group::Sliding, Group::Full];

    /// Index into arrays by group.
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Element type of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
pub enum KvFormat {
    F32,
    F16,
    Bf16,
    /// Blocks of 32 signed bytes under one f16 scale, 34 bytes a block.
    Q8_0,
    /// FP8 E4M3 under two scales a layer, for keys and for values, which the device derives from what bounds them: the
    /// norm of the keys, and that of the values, which has no weight.
    Fp8,
}

impl KvFormat {
    /// Bytes of one head's key or value at one position; `head_dim` is a multiple of 32 for `Q8_0`.
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            KvFormat::F32 => head_dim * 4,
            KvFormat::F16 | KvFormat::Bf16 => head_dim * 2,
            KvFormat::Q8_0 => head_dim / 32 * 34,
            KvFormat::Fp8 => head_dim,
        }
    }

    /// The name used in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
            KvFormat::Bf16 => "bf16",
            KvFormat::Q8_0 => "q8_0",
            KvFormat::Fp8 => "fp8",
        }
    }
}

/// Which KV a layer uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRef {
    /// Sliding or full.
    pub group: Group,
    /// Which of the group's pools.
    pub index: usize,
    /// Whether the layer writes it; a KV-sharing layer only reads its donor's.
    pub writes: bool,
}

/// Heads of one layer's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayerShape {
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
}

/// One group's pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroupPlan {
    /// The layers with KV of their own, in model order; [`KvRef::index`] points here.
    pub layers: Vec<KvLayerShape>,
    /// Element type.
    pub format: KvFormat,
    /// Pages of every pool, page 0 included.
    pub pages: usize,
    /// Window of the group in positions, the current one included; `None` for full attention.
    pub window: Option<usize>,
}

impl KvGroupPlan {
    /// Bytes of one page of layer `index`: keys and values of all heads.
    pub fn page_bytes(&self, index: usize) -> usize {
        let l = self.layers[index];
        2 * l.kv_heads * PAGE_TOKENS * self.format.row_bytes(l.head_dim)
    }

    /// Offset in bytes of head 0's key at `in_page` of `page`, from the start of layer `index`'s pool.
    pub fn cell_offset(&self, index: usize, page: usize, in_page: usize) -> usize {
        page * self.page_bytes(index) + in_page * self.format.row_bytes(self.layers[index].head_dim)
    }

    /// Bytes of all pools.
    pub fn bytes(&self) -> usize {
        (0..self.layers.len()).map(|i| self.page_bytes(i) * self.pages).sum()
    }
}

/// Both groups, indexed by [`Group::index`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPlan {
    /// Sliding, full.
    pub groups: [KvGroupPlan; GROUPS],
}

impl KvPlan {
    /// Bytes of all pools of both groups.
    pub fn bytes(&self) -> usize {
        self.groups.iter().map(KvGroupPlan::bytes).sum()
    }
}
