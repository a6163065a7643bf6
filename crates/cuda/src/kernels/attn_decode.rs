//! Attention for few rows over paged keys and values: `kernels/attn_decode_sm90.cu`.
//!
//! Head dims 256 and 512, keys and values in bf16 or FP8, in pages of their own layout ([`PageShape`]).

use lapidary_ops::PAGE_TOKENS;

use crate::driver::{DevPtr, Kernel};
use crate::error::{Error, Result};
use crate::kernels::producers::{Finish, HeadsArgs};
use crate::launch::{Args, Queue, Shape};

const FAMILY: &str = "attn_decode_sm90";

/// How the fast attention kernels keep one layer's keys and values: `[page][kv head][K, V][token][head_dim]`, where
/// the 16-byte pieces of a token's row are permuted by the token's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// FP8 E4M3 instead of bf16.
    pub fp8: bool,
}

impl PageShape {
    /// Bytes of a page: all heads' keys and values of 32 tokens.
    pub const fn page_bytes(self) -> usize {
        2 * self.kv_heads * PAGE_TOKENS * self.head_dim * self.value_bytes()
    }

    /// Bytes of a value.
    pub const fn value_bytes(self) -> usize {
        if self.fp8 { 1 } else { 2 }
    }

    /// Where a value lies in the pool, in bytes; `side` is 0 for keys and 1 for values.
    pub const fn offset(self, page: usize, head: usize, side: usize, token: usize, i: usize) -> usize {
        let half = PAGE_TOKENS * self.head_dim * self.value_bytes();
        let swizzle = (token & 1) << 2 | (token >> 1 & 3);
        let inside = (token * self.head_dim + i) * self.value_bytes();
        ((page * self.kv_heads + head) * 2 + side) * half + (inside ^ swizzle << 4)
    }

    /// Whether the kernels take these heads.
    pub const fn supports(self, heads: usize) -> bool {
        let group = heads / self.kv_heads;
        heads.is_multiple_of(self.kv_heads)
            && (self.head_dim == 256 || self.head_dim == 512)
            && (group <= 8 || group.is_multiple_of(8))
    }
}

/// Which rows the kernels see and where their keys are: columns of the uploaded batch, by batch row.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KvColumns {
    /// Positions.
    pub positions: DevPtr,
    /// Last visible key + 1.
    pub visible_to: DevPtr,
    /// The page of block `b` is `pages[table[row] + b]`.
    pub table: DevPtr,
    /// Page numbers.
    pub pages: DevPtr,
    /// Active row to batch row, or null.
    pub map: DevPtr,
}

/// One layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttnDecode {
    /// Query heads.
    pub heads: usize,
    /// Layout of the pool.
    pub pages: PageShape,
    /// The layer's pool, zeroed when it was allocated.
    pub pool: DevPtr,
    /// bf16 queries `[rows][q_stride]`, normed and rotated.
    pub q: DevPtr,
    /// Values from row to row of `q`.
    pub q_stride: usize,
    /// bf16 `[rows][out_stride]`.
    pub out: DevPtr,
    /// Values from row to row of `out`.
    pub out_stride: usize,
    /// Where keys are.
    pub columns: KvColumns,
    /// Active rows.
    pub rows: usize,
    /// Rows of the whole batch: none of them writes a page that ends before `position - batch_rows + 1`.
    pub batch_rows: usize,
    /// Keys that a row sees at most.
    pub window: Option<usize>,
    /// Multiplies each score; with FP8 times the scale of the keys.
    pub scale: f32,
    /// Multiplies the result: the scale of FP8 values, else 1.
    pub v_scale: f32,
    /// [`workspace_bytes`] of memory, zeroed once.
    pub workspace: DevPtr,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct AttnArgs {
    q: DevPtr,
    kv: DevPtr,
    at: KvColumns,
    out: DevPtr,
    ws: DevPtr,
    ws_ml: DevPtr,
    counters: DevPtr,
    ld_q: i32,
    ld_out: i32,
    kv_heads: i32,
    window: i32,
    clusters: i32,
    rows: i32,
    group: i32,
    subs: i32,
    lcs: i32,
    scale: f32,
    v_scale: f32,
}

// SAFETY: mirrors `AttnArgs` in kernels/attn_decode_sm90.cu.
unsafe impl Args for AttnArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
struct OwnHeadsArgs {
    attn: AttnArgs,
    heads: HeadsArgs,
}

// SAFETY: mirrors `OwnHeadsArgs` in kernels/attn_decode_sm90.cu.
unsafe impl Args for OwnHeadsArgs {}

/// Blocks of one row and kv head, as clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    /// Blocks of a cluster.
    cluster: usize,
    /// Clusters at most; the kernel uses as many as the keys are worth.
    clusters: usize,
}

/// Kv heads and groups of 8 query heads.
fn units(heads: usize, pages: PageShape) -> usize {
    pages.kv_heads * (heads / pages.kv_heads).div_ceil(8)
}

/// Clusters of eight while there are few units, since parts are then summed inside the cluster; about 100 blocks in all,
/// one a multiprocessor: with more, clusters of eight wait for a free corner of the chip.
fn split(units: usize, multiprocessors: usize) -> Split {
    let cluster = match units {
        ..=8 => 8,
        9..=16 => 4,
        17..=64 => 2,
        _ => 1,
    };
    Split { cluster, clusters: (multiprocessors * 3 / 4 / (units * cluster)).clamp(1, 8) }
}

/// Memory that a call with at most `rows` rows needs, in bytes. It is zeroed once; calls leave it ready for the next.
pub fn workspace_bytes(rows: usize, heads: usize, pages: PageShape, multiprocessors: usize) -> usize {
    (1..=rows)
        .map(|rows| {
            let units = rows * units(heads, pages);
            let s = split(units, multiprocessors);
            COUNTERS * 4 + parts(units, s, pages) * 4 + maxima(units, s) * 4
        })
        .max()
        .unwrap_or(0)
}

/// Counters in front of the workspace. Their place does not depend on a call's shape, because each call leaves them at
/// zero for the next, whatever its shape.
const COUNTERS: usize = 1 << 14;

fn parts(units: usize, s: Split, pages: PageShape) -> usize {
    units * s.clusters * 8 * pages.head_dim
}

fn maxima(units: usize, s: Split) -> usize {
    units * s.clusters * s.cluster * 16
}

/// Queues the attention of one layer.
///
/// # Errors
/// `Shape` for heads that [`PageShape::supports`] denies.
///
/// # Safety
/// All pointers are what their fields say, 16-byte aligned, and stay so until the work is done. The columns name pages
/// of the pool only, and every row sees its own position.
pub unsafe fn attn_decode(queue: Queue<'_>, call: &AttnDecode) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { launch(queue, call, None) }
}

/// The same for rows whose heads are not finished: what [`finish`](super::producers::finish) and [`attn_decode`] one after the
/// other do, with the bits that they have, in one kernel. `finish.q`, `call.q` and `finish.store_q` are not looked at, queries
/// are left nowhere.
///
/// # Errors
/// As both.
///
/// # Safety
/// As both. Every row is its sequence's only one of the pass: none reads another's key or value.
pub unsafe fn finish_and_attend(queue: Queue<'_>, finish: &Finish, call: &AttnDecode) -> Result<()> {
    let fits = finish.rows == call.rows
        && finish.heads == call.heads
        && finish.pages == call.pages
        && (!finish.writes || finish.pool == call.pool);
    if !fits {
        let what = format!("{} rows of {} heads finished for {}", finish.rows, finish.heads, call.rows);
        return Err(Error::Shape { kernel: "attn_own", what });
    }
    // SAFETY: the caller's.
    unsafe { launch(queue, call, Some(finish)) }
}

/// Behind the shared memory of attention: queries in bf16, the row's own key and value (attn_decode_sm90.cu).
fn own_bytes(pages: PageShape) -> usize {
    8 * (pages.head_dim + 32) * 2 + 2 * pages.head_dim * pages.value_bytes()
}

/// # Safety
/// As [`attn_decode`] or [`finish_and_attend`].
unsafe fn launch(queue: Queue<'_>, call: &AttnDecode, finish: Option<&Finish>) -> Result<()> {
    let d = call.pages.head_dim;
    if !call.pages.supports(call.heads)
        || !call.q_stride.is_multiple_of(8)
        || !call.out_stride.is_multiple_of(4)
    {
        return Err(Error::Shape {
            kernel: "attn_decode",
            what: format!("{} heads of {d} over {} kv heads", call.heads, call.pages.kv_heads),
        });
    }
    let sms = queue.stream.context().info.multiprocessors as usize;
    let per_row = units(call.heads, call.pages);
    let s = split(per_row * call.rows, sms);
    let all = per_row * call.rows;
    if all * s.cluster > COUNTERS {
        return Err(Error::Shape { kernel: "attn_decode", what: format!("{} rows", call.rows) });
    }
    let ws = call.workspace.at(COUNTERS * 4);
    let heads_of_one = call.heads / call.pages.kv_heads;
    let group = heads_of_one.min(8);
    let args = AttnArgs {
        q: call.q,
        kv: call.pool,
        at: call.columns,
        out: call.out,
        ws,
        ws_ml: ws.at(parts(all, s, call.pages) * 4),
        counters: call.workspace,
        ld_q: call.q_stride as i32,
        ld_out: call.out_stride as i32,
        kv_heads: call.pages.kv_heads as i32,
        window: call.window.map_or(0, |w| i32::try_from(w).unwrap_or(i32::MAX)),
        clusters: s.clusters as i32,
        rows: call.batch_rows as i32,
        group: group as i32,
        subs: (heads_of_one / group) as i32,
        lcs: s.cluster.ilog2() as i32,
        scale: call.scale,
        v_scale: call.v_scale,
    };
    let (entry, own, stages) = match (d, call.pages.fp8) {
        (256, false) => ("attn_decode_256_bf16", "attn_own_256_bf16", 4),
        (256, true) => ("attn_decode_256_fp8", "attn_own_256_fp8", 4),
        (_, false) => ("attn_decode_512_bf16", "attn_own_512_bf16", 2),
        (_, true) => ("attn_decode_512_fp8", "attn_own_512_fp8", 4),
    };
    let ring = stages * 2 * PAGE_TOKENS * d * call.pages.value_bytes();
    let shared = ring + 2 * 2 * 2 * 8 * 40 * 4 + 8 * d * 4 + 9 * 16 * 4 + 4 * stages * 8;
    let grid = [(s.cluster * s.clusters) as u32, per_row as u32, call.rows as u32];
    let shape = Shape::grid(grid, 288).cluster(s.cluster as u32).dependent();
    let Some(finish) = finish else {
        // SAFETY: the caller's; the shape is the kernel's own.
        return unsafe { queue.launch(Kernel::new(FAMILY, entry), shape.shared(shared as u32), &args) };
    };
    let args = OwnHeadsArgs { attn: args, heads: finish.arguments()? };
    let shape = shape.shared((shared + own_bytes(call.pages)) as u32);
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new(FAMILY, own), shape, &args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_of_a_pool_has_its_own_place() {
        for fp8 in [false, true] {
            let pages = PageShape { kv_heads: 3, head_dim: 256, fp8 };
            let mut seen = vec![false; 2 * pages.page_bytes() / pages.value_bytes()];
            for page in 0..2 {
                for head in 0..3 {
                    for side in 0..2 {
                        for (token, i) in (0..32).flat_map(|t| (0..256).map(move |i| (t, i))) {
                            let at = pages.offset(page, head, side, token, i) / pages.value_bytes();
                            assert!(!std::mem::replace(&mut seen[at], true));
                        }
                    }
                }
            }
            assert!(seen.iter().all(|&s| s));
        }
    }

    #[test]
    fn heads_that_fit_are_named() {
        let pages = |kv_heads, head_dim| PageShape { kv_heads, head_dim, fp8: false };
        assert!(pages(1, 512).supports(16) && pages(16, 256).supports(32) && pages(1, 256).supports(5));
        assert!(!pages(1, 128).supports(4) && !pages(1, 256).supports(12) && !pages(2, 256).supports(5));
    }
}
