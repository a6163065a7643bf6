//! The small kernels between products: `kernels/producers_sm90.cu`.
//!
//! [`residual`] is every norm around the residual stream, [`finish`] what happens to q, k and v before attention,
//! [`router`] the choice of experts, [`argmax`] the end of a greedy pass.

use crate::driver::{DevPtr, Kernel};
use crate::error::{Error, Result};
use crate::kernels::attn_decode::PageShape;
use crate::kernels::skinny_gemm::MAX_PLANES;
use crate::launch::{Args, Queue, Shape};

const FAMILY: &str = "producers_sm90";
/// Blocks that share a row of the residual, and most threads of one; a thread has four values.
const RESIDUAL_CLUSTER: usize = 8;
const RESIDUAL_THREADS: usize = 256;
/// Widest residual.
pub const MAX_WIDTH: usize = RESIDUAL_CLUSTER * RESIDUAL_THREADS * 4;
/// Most experts of a router, and most rows of one call.
pub const MAX_EXPERTS: usize = 128;
/// Most rows of a [`Router`] call.
pub const MAX_ROUTER_ROWS: usize = 16;

fn refuse(kernel: &'static str, what: String) -> Error {
    Error::Shape { kernel, what }
}

/// A branch's output that joins the residual: float32 planes to be added, `[plane][rows][stride]`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Branch {
    /// First plane.
    pub p: DevPtr,
    /// Norm gain, float32. Unused (null) where there is one branch only: then `post` is the norm.
    pub gain: DevPtr,
    /// Values from plane to plane.
    pub plane_stride: u64,
    /// Planes; 0 for no branch.
    pub planes: i32,
    /// Values from row to row.
    pub stride: i32,
}

impl Branch {
    /// No branch.
    pub const NONE: Branch =
        Branch { p: DevPtr::NULL, gain: DevPtr::NULL, plane_stride: 0, planes: 0, stride: 0 };
}

/// A form in which the residual goes on.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NormOut {
    /// `[rows][stride]`.
    pub p: DevPtr,
    /// Norm gain; null for the residual itself.
    pub gain: DevPtr,
    /// Values from row to row.
    pub stride: i32,
    /// 1 for bf16, 0 for float32.
    pub bf16: i32,
}

impl NormOut {
    /// Nothing.
    pub const NONE: NormOut = NormOut { p: DevPtr::NULL, gain: DevPtr::NULL, stride: 0, bf16: 0 };
}

/// `x = (x + rms(y; post)) * scalar` and up to three norms of it, where `y` is one branch, or with a second one
/// `rms(y; y.gain) + rms(z; z.gain)`. Without `y` only the norms.
#[derive(Clone, Copy, Debug)]
pub struct Residual {
    /// float32 `[rows][x_stride]`.
    pub x: DevPtr,
    /// Where the residual goes on: `x`, or rows elsewhere.
    pub x_out: DevPtr,
    /// Values from row to row of both.
    pub x_stride: usize,
    /// Rows.
    pub rows: usize,
    /// Values of a row, a multiple of 4.
    pub width: usize,
    /// The branch that joins.
    pub y: Branch,
    /// The experts' branch.
    pub z: Branch,
    /// Gain of the norm before the addition.
    pub post: DevPtr,
    /// Multiplies the sum.
    pub scalar: f32,
    /// Epsilon of every norm.
    pub eps: f32,
    /// What is made of it.
    pub outs: [NormOut; 3],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ResidualArgs {
    x: DevPtr,
    x_out: DevPtr,
    y: Branch,
    z: Branch,
    post: DevPtr,
    outs: [NormOut; 3],
    ld_x: i32,
    width: i32,
    n_outs: i32,
    pad: i32,
    eps: f32,
    scalar: f32,
}

// SAFETY: mirrors `ResidualArgs` in kernels/producers_sm90.cu.
unsafe impl Args for ResidualArgs {}

/// Queues [`Residual`].
///
/// # Errors
/// `Shape` for a width or stride that is no multiple of 4, or beyond [`MAX_WIDTH`].
///
/// # Safety
/// All pointers are what their fields say, 16-byte aligned, and stay so until the work is done.
pub unsafe fn residual(queue: Queue<'_>, call: &Residual) -> Result<()> {
    let strides = [call.x_stride, call.y.stride as usize, call.z.stride as usize];
    let outs = call.outs.iter().take_while(|o| o.p != DevPtr::NULL).count();
    let fits = call.width <= MAX_WIDTH
        && call.width.is_multiple_of(4)
        && strides.iter().all(|s| s.is_multiple_of(4))
        && call.outs[..outs].iter().all(|o| o.stride % 4 == 0);
    if !fits {
        return Err(refuse("residual", format!("rows of {}, strides {strides:?}", call.width)));
    }
    let args = ResidualArgs {
        x: call.x,
        x_out: call.x_out,
        y: call.y,
        z: call.z,
        post: call.post,
        outs: call.outs,
        ld_x: call.x_stride as i32,
        width: call.width as i32,
        n_outs: outs as i32,
        pad: 0,
        eps: call.eps,
        scalar: call.scalar,
    };
    let threads = call.width.div_ceil(RESIDUAL_CLUSTER * 4).next_multiple_of(32);
    let grid = [RESIDUAL_CLUSTER as u32, call.rows as u32, 1];
    let shape = Shape::grid(grid, threads as u32).cluster(RESIDUAL_CLUSTER as u32).dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new(FAMILY, "residual"), shape, &args) }
}

/// Head norms, rotation and the writing of keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Finish {
    /// float32 `[plane][rows][qkv_stride]`: q, k, v side by side, in planes to be added.
    pub qkv: DevPtr,
    /// Values from row to row of `qkv`.
    pub qkv_stride: usize,
    /// Values from plane to plane.
    pub plane_stride: usize,
    /// Planes.
    pub planes: usize,
    /// Whether queries are also stored back in place, for taps.
    pub store_q: bool,
    /// Rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Layout of the pool; `kv_heads` counts only with `writes`.
    pub pages: PageShape,
    /// Whether the layer has keys and values of its own.
    pub writes: bool,
    /// Whether values are the raw key projection.
    pub values_are_keys: bool,
    /// Gain and epsilon of the query norm.
    pub q_norm: (DevPtr, f32),
    /// Gain and epsilon of the key norm.
    pub k_norm: (DevPtr, f32),
    /// Epsilon of the value norm.
    pub v_eps: Option<f32>,
    /// float32 `[rows][rope_stride]`: cosines, sines.
    pub rope: DevPtr,
    /// Values from row to row of `rope`.
    pub rope_stride: usize,
    /// int32 by batch row: where the row's keys go, `page * 32 + place`; negative for nowhere.
    pub cell: DevPtr,
    /// Active row to batch row, or null.
    pub map: DevPtr,
    /// The layer's pool.
    pub pool: DevPtr,
    /// Scales of FP8 keys and values; 1 otherwise.
    pub kv_scales: [f32; 2],
    /// bf16 `[rows][q_stride]`.
    pub q: DevPtr,
    /// Values from row to row of `q`.
    pub q_stride: usize,
}

/// Mirrors `HeadsArgs` in kernels/common/heads.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct HeadsArgs {
    qkv: DevPtr,
    rope: DevPtr,
    q_gain: DevPtr,
    k_gain: DevPtr,
    cell: DevPtr,
    plane_stride: u64,
    planes: i32,
    ld: i32,
    ld_rope: i32,
    heads: i32,
    kv_heads: i32,
    values_are_keys: i32,
    norm_values: i32,
    q_eps: f32,
    k_eps: f32,
    v_eps: f32,
    k_inverse: f32,
    v_inverse: f32,
}

impl Finish {
    /// What the kernels take of it.
    ///
    /// # Errors
    /// `Shape` for strides that are no multiples of 4, and more than three planes.
    pub(super) fn arguments(&self) -> Result<HeadsArgs> {
        let strides = [self.qkv_stride, self.plane_stride, self.rope_stride];
        if strides.iter().any(|s| !s.is_multiple_of(4)) || self.planes > MAX_PLANES {
            return Err(refuse("finish", format!("{} planes, strides {strides:?}", self.planes)));
        }
        Ok(HeadsArgs {
            qkv: self.qkv,
            rope: self.rope,
            q_gain: self.q_norm.0,
            k_gain: self.k_norm.0,
            cell: self.cell,
            plane_stride: self.plane_stride as u64,
            planes: self.planes as i32,
            ld: self.qkv_stride as i32,
            ld_rope: self.rope_stride as i32,
            heads: self.heads as i32,
            kv_heads: self.kv_heads() as i32,
            values_are_keys: i32::from(self.values_are_keys),
            norm_values: i32::from(self.v_eps.is_some()),
            q_eps: self.q_norm.1,
            k_eps: self.k_norm.1,
            v_eps: self.v_eps.unwrap_or(0.0),
            k_inverse: 1.0 / self.kv_scales[0],
            v_inverse: 1.0 / self.kv_scales[1],
        })
    }

    /// Heads that are written.
    fn kv_heads(&self) -> usize {
        if self.writes { self.pages.kv_heads } else { 0 }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct FinishArgs {
    of: HeadsArgs,
    kv: DevPtr,
    map: DevPtr,
    q: DevPtr,
    ld_q: i32,
    store_q: i32,
}

// SAFETY: mirrors `FinishArgs` in kernels/producers_sm90.cu.
unsafe impl Args for FinishArgs {}

/// Queues [`Finish`].
///
/// # Errors
/// `Shape` for head dims other than 256 and 512, strides that are no multiples of 4, more than three planes.
///
/// # Safety
/// As [`residual`]; cells lie in the pool.
pub unsafe fn finish(queue: Queue<'_>, call: &Finish) -> Result<()> {
    let entry = match (call.pages.head_dim, call.pages.fp8) {
        (256, false) => "finish_256_bf16",
        (512, false) => "finish_512_bf16",
        (256, true) => "finish_256_fp8",
        (512, true) => "finish_512_fp8",
        (d, _) => return Err(refuse("finish", format!("heads of {d}"))),
    };
    if !call.q_stride.is_multiple_of(4) {
        return Err(refuse("finish", "a stride that is no multiple of 4".into()));
    }
    let args = FinishArgs {
        of: call.arguments()?,
        kv: call.pool,
        map: call.map,
        q: call.q,
        ld_q: call.q_stride as i32,
        store_q: i32::from(call.store_q),
    };
    let heads = call.heads + 2 * call.kv_heads();
    let shape = Shape::grid([heads.div_ceil(4) as u32, call.rows as u32, 1], 128).dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new(FAMILY, entry), shape, &args) }
}

/// Router logits, choice and the list of chosen experts.
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// float32 `[experts][width]`.
    pub weights: DevPtr,
    /// float32 `[rows][x_stride]`.
    pub x: DevPtr,
    /// Values from row to row of `x`.
    pub x_stride: usize,
    /// Inputs, a multiple of 4.
    pub width: usize,
    /// Rows, 1 to 16.
    pub rows: usize,
    /// Experts, at most 128.
    pub experts: usize,
    /// Chosen for each row, at most 32.
    pub top_k: usize,
    /// float32, a factor for each expert.
    pub expert_scale: DevPtr,
    /// float32 `[rows][experts]`, written.
    pub logits: DevPtr,
    /// float32 `[rows][2 * top_k]`, written: ids, then weights.
    pub routes: DevPtr,
    /// int32, written: how many distinct experts, then their ids, ascending; room for 129.
    pub groups: DevPtr,
    /// float32 `[group][16]`, written; room for 128 groups.
    pub group_weight: DevPtr,
    /// int32, zero before the first call; calls leave it at zero for the next.
    pub counter: DevPtr,
}

/// Shared memory of a block of the router.
pub(super) const ROUTER_SHARED: usize = (2 * 16 * MAX_EXPERTS + 8 * 16 + MAX_EXPERTS + 5) * 4;
/// Experts of a block of the router.
const ROUTER_PER_BLOCK: usize = 2;

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RouterArgs {
    w: DevPtr,
    x: DevPtr,
    expert_scale: DevPtr,
    logits: DevPtr,
    routes: DevPtr,
    groups: DevPtr,
    group_weight: DevPtr,
    counter: DevPtr,
    width: i32,
    ld_x: i32,
    rows: i32,
    experts: i32,
    top_k: i32,
    pad: i32,
}

// SAFETY: mirrors `RouterArgs` in kernels/common/router.cuh.
unsafe impl Args for RouterArgs {}

/// What the kernel takes, and its blocks.
pub(super) fn router_arguments(call: &Router) -> Result<(RouterArgs, usize)> {
    let fits = (1..=MAX_ROUTER_ROWS).contains(&call.rows)
        && call.experts <= MAX_EXPERTS
        && call.top_k <= 32.min(call.experts)
        && call.width.is_multiple_of(4)
        && call.x_stride.is_multiple_of(4);
    if !fits {
        let what =
            format!("{} of {} experts for {} rows of {}", call.top_k, call.experts, call.rows, call.width);
        return Err(refuse("router", what));
    }
    let args = RouterArgs {
        w: call.weights,
        x: call.x,
        expert_scale: call.expert_scale,
        logits: call.logits,
        routes: call.routes,
        groups: call.groups,
        group_weight: call.group_weight,
        counter: call.counter,
        width: call.width as i32,
        ld_x: call.x_stride as i32,
        rows: call.rows as i32,
        experts: call.experts as i32,
        top_k: call.top_k as i32,
        pad: 0,
    };
    Ok((args, call.experts.div_ceil(ROUTER_PER_BLOCK)))
}

/// Queues [`Router`].
///
/// # Errors
/// `Shape` for more rows, experts or choices than it takes.
///
/// # Safety
/// As [`residual`].
pub unsafe fn router(queue: Queue<'_>, call: &Router) -> Result<()> {
    let (args, blocks) = router_arguments(call)?;
    let shape = Shape::new(blocks as u32, 256).shared(ROUTER_SHARED as u32).dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new(FAMILY, "router"), shape, &args) }
}

/// The largest logit of each row.
#[derive(Clone, Copy, Debug)]
pub struct Argmax {
    /// float32 `[rows][stride]`.
    pub logits: DevPtr,
    /// Values from row to row.
    pub stride: usize,
    /// Logits of a row.
    pub vocab: usize,
    /// Rows.
    pub rows: usize,
    /// int32 by row, written; -1 for a row with a logit that is not finite.
    pub out: DevPtr,
    /// [`argmax_workspace_bytes`] of memory, zeroed once.
    pub workspace: DevPtr,
    /// Where the host reads the same.
    pub told: Option<Told>,
}

/// Pinned host memory that takes the chosen tokens of two passes in turn.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// int32 `[turn][rows]`.
    pub at: DevPtr,
    /// Rows of a turn.
    pub rows: usize,
    /// int32 on the device: which turn the pass is.
    pub turn: DevPtr,
}

const ARGMAX_BLOCKS: usize = 64;
/// Most rows of an [`argmax`] call: the counters in front of its workspace, whose place does not depend on the rows
/// of a call, because each call leaves them at zero for the next.
pub const MAX_ARGMAX_ROWS: usize = 4096;

/// Memory that [`argmax`] needs for `rows` rows. It is zeroed once; calls leave it ready for the next.
pub const fn argmax_workspace_bytes(rows: usize) -> usize {
    MAX_ARGMAX_ROWS * 4 + rows * ARGMAX_BLOCKS * 8
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ArgmaxArgs {
    logits: DevPtr,
    out: DevPtr,
    best: DevPtr,
    best_id: DevPtr,
    counters: DevPtr,
    told: DevPtr,
    turn: DevPtr,
    ld: i32,
    vocab: i32,
    told_rows: i32,
    pad: i32,
}

// SAFETY: mirrors `ArgmaxArgs` in kernels/producers_sm90.cu.
unsafe impl Args for ArgmaxArgs {}

/// Queues [`Argmax`].
///
/// # Errors
/// `Shape` for more rows than [`MAX_ARGMAX_ROWS`].
///
/// # Safety
/// As [`residual`].
pub unsafe fn argmax(queue: Queue<'_>, call: &Argmax) -> Result<()> {
    if call.rows > MAX_ARGMAX_ROWS || call.told.is_some_and(|t| t.rows < call.rows) {
        return Err(refuse("argmax", format!("{} rows", call.rows)));
    }
    let best = call.workspace.at(MAX_ARGMAX_ROWS * 4);
    let args = ArgmaxArgs {
        logits: call.logits,
        out: call.out,
        best,
        best_id: best.at(call.rows * ARGMAX_BLOCKS * 4),
        counters: call.workspace,
        told: call.told.map_or(DevPtr::NULL, |t| t.at),
        turn: call.told.map_or(DevPtr::NULL, |t| t.turn),
        ld: call.stride as i32,
        vocab: call.vocab as i32,
        told_rows: call.told.map_or(0, |t| t.rows) as i32,
        pad: 0,
    };
    let shape = Shape::grid([ARGMAX_BLOCKS as u32, call.rows as u32, 1], 256).dependent();
    // SAFETY: the caller's; the shape is the kernel's own.
    unsafe { queue.launch(Kernel::new(FAMILY, "argmax"), shape, &args) }
}
