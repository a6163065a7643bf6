//! Routed experts in the fast mode: the router's kernel lists who was chosen, and experts read the list.

use lapidary_ops::{Act, Activation, ExpertSpec, Mat, Result, RouteSpec, TapPoint};

use super::Verb;
use super::emit::{Planes, SKINNY_ROWS, gate, not_packed};
use super::fuse::Step;
use crate::args::Rows;
use crate::driver::DevPtr;
use crate::kernels::gemm_prefill::{self, Combine, Grouped, Lists};
use crate::kernels::producers::{self, Router};
use crate::kernels::rows;
use crate::kernels::skinny_experts::{self, ExpertsDown, ExpertsUp};
use crate::kernels::skinny_gemm::{Chosen, Linear, MAX_ROWS, Weights};
use crate::matrix::Matrix;
use crate::ops::CudaOps;
use crate::workspace::Piece;

/// What [`Step::Router`] names.
#[derive(Clone, Copy)]
pub(super) struct RouterVerb {
    pub routes: Act,
    pub logits: Act,
    pub x: Act,
    pub w: Mat,
    pub spec: RouteSpec,
}

/// What [`Verb::Gated`] names, but for the buffer that the fast mode does without.
#[derive(Clone, Copy)]
pub(super) struct GatedVerb {
    pub out: Act,
    pub x: Act,
    pub w: Mat,
    pub f: Activation,
}

/// Output, input, matrix.
type LinearVerb = (Act, Act, Mat);
/// Output, input, experts.
type ExpertsVerb = (Act, Act, ExpertSpec);

/// Bytes of the list of chosen experts of sixteen rows: a count and ids, then weights.
const GROUP_BYTES: usize = 1024 + 128 * 16 * 4;

impl CudaOps<'_> {
    pub(super) fn routes_fast(&self, x: Act, w: Mat, spec: &RouteSpec) -> bool {
        let width = self.act(x).width as usize;
        self.on.mats[w.0 as usize].floats.is_some()
            && self.act(x).bf16 == 0
            && spec.experts <= producers::MAX_EXPERTS
            && spec.top_k <= 32.min(spec.experts)
            && width.is_multiple_of(8)
    }

    /// Where the choice of the tile of sixteen rows that begins at `first` is kept.
    pub(super) fn chosen(&mut self, first: usize) -> Result<Chosen> {
        let most = self.on.acts.iter().map(|a| a.spec.max_rows).max().unwrap_or(0);
        let bytes = most.div_ceil(MAX_ROWS) * GROUP_BYTES;
        let all = self.on.workspace.get(Piece::Pairs, &self.on.stream, bytes)?;
        let groups = all.at(first / MAX_ROWS * GROUP_BYTES);
        Ok(Chosen { groups, weights: groups.at(1024) })
    }

    pub(super) fn router(&mut self, call: RouterVerb) -> Result<()> {
        for (first, rows) in self.tiles() {
            let call = self.router_call(call, first, rows)?;
            // SAFETY: widths agree.
            unsafe { producers::router(self.on.queue(), &call)? };
        }
        self.routed(call)
    }

    /// The router's call over the tile of rows that begins at `first`.
    fn router_call(&mut self, call: RouterVerb, first: usize, rows: usize) -> Result<Router> {
        let RouterVerb { routes, logits, x, w, spec } = call;
        let (r, l, v) = (self.act(routes), self.act(logits), self.act(x));
        let matrix = &self.on.mats[w.0 as usize];
        let Some(weights) = matrix.floats else { return Err(not_packed()) };
        crate::ops::same("route", v.width, matrix.cols as i32)?;
        crate::ops::same("route", l.width, spec.experts as i32)?;
        crate::ops::same("route", r.width, 2 * spec.top_k as i32)?;
        let expert_scale = self.gain(spec.per_expert_scale, spec.experts)?;
        let (e, k) = (spec.experts, 2 * spec.top_k);
        // The kernel writes logits and routes without gaps; buffers have some, which one row does not see.
        let dense = self.dense_routes(spec.experts, spec.top_k)?;
        let (logits_at, routes_at) = if self.rows == 1 { (l.ptr, r.ptr) } else { dense };
        let chosen = self.chosen(first)?;
        let counter = self.on.workspace.get(Piece::Counters, &self.on.stream, 4)?;
        Ok(Router {
            weights,
            x: v.ptr.at(first * v.stride as usize * 4),
            x_stride: v.stride as usize,
            width: v.width as usize,
            rows,
            experts: spec.experts,
            top_k: spec.top_k,
            expert_scale,
            logits: logits_at.at(first * e * 4),
            routes: routes_at.at(first * k * 4),
            groups: chosen.groups,
            group_weight: chosen.weights,
            counter,
        })
    }

    /// The router's kernel was queued for every row.
    fn routed(&mut self, call: RouterVerb) -> Result<()> {
        let RouterVerb { routes, w, spec, .. } = call;
        self.left.weight_bytes += self.on.mats[w.0 as usize].bytes as u64;
        let tapped = self.on.upload.batch.taps.points.iter().any(|p| matches!(p, TapPoint::Routes(_)));
        if self.rows > 1 && tapped {
            let (r, k) = (self.act(routes), 2 * spec.top_k);
            let (_, routes_at) = self.dense_routes(spec.experts, spec.top_k)?;
            // SAFETY: both hold as many rows.
            unsafe { rows::cast(self.on.queue(), r, Rows::floats(routes_at, k), self.rows)? };
        }
        self.routed = true;
        Ok(())
    }

    /// A gated product and a router that one launch can do.
    pub(super) fn gates_beside_router(
        &self,
        both: &[Step; 2],
        later: &[Step],
    ) -> Option<(GatedVerb, RouterVerb)> {
        let (
            &Step::Verb(Verb::Gated { out, x, w, f, .. }),
            &Step::Router { routes, logits, x: own, w: router, spec },
        ) = (&both[0], &both[1])
        else {
            return None;
        };
        let fits = self.rows <= MAX_ROWS
            && self.gates_in_product(out, x, w)
            && self.routes_fast(own, router, &spec)
            && packed_experts(later, routes, &self.on.mats);
        fits.then_some((GatedVerb { out, x, w, f }, RouterVerb { routes, logits, x: own, w: router, spec }))
    }

    pub(super) fn gated_and_router(&mut self, gated: GatedVerb, router: RouterVerb) -> Result<()> {
        let call = self.gated_call(gated)?;
        let beside = self.router_call(router, 0, self.rows)?;
        // SAFETY: widths agree.
        unsafe { skinny_experts::gated_and_router(self.on.queue(), &call, &beside)? };
        self.routed(router)
    }

    /// A product and experts that one launch can begin with.
    pub(super) fn multiplies_beside_experts(&self, both: &[Step; 2]) -> Option<(LinearVerb, ExpertsVerb)> {
        let (&Step::Verb(Verb::Linear(y, hidden, w)), &Step::Experts { out, x, spec, .. }) =
            (&both[0], &both[1])
        else {
            return None;
        };
        let fits =
            self.routed && self.rows <= MAX_ROWS && self.act(hidden).bf16 == 1 && self.one_run(w).is_some();
        fits.then_some(((y, hidden, w), (out, x, spec)))
    }

    /// Where logits and routes of all rows are without gaps.
    pub(super) fn dense_routes(&mut self, experts: usize, top_k: usize) -> Result<(DevPtr, DevPtr)> {
        let most = self.most_rows();
        let bytes = most * (experts + 2 * top_k) * 4;
        let logits = self.on.workspace.get(Piece::Routes, &self.on.stream, bytes)?;
        Ok((logits, logits.at(most * experts * 4)))
    }

    /// Rows that buffers have.
    pub(super) fn most_rows(&self) -> usize {
        self.on.acts.iter().map(|a| a.spec.max_rows).max().unwrap_or(0)
    }

    /// Experts, and a product whose weights are on their way while the chosen are not known. Both may be cut into planes,
    /// the product into the first number of `most_planes`.
    pub(super) fn fast_experts(
        &mut self,
        (out, x, spec): ExpertsVerb,
        beside: Option<LinearVerb>,
        most_planes: [usize; 2],
    ) -> Result<()> {
        let (Some(up), Some(down)) = (self.one_run(spec.gate_up), self.one_run(spec.down)) else {
            return Err(not_packed());
        };
        let (o, v) = (self.act(out), self.act(x));
        crate::ops::same("experts", v.width, up.shape.cols as i32)?;
        crate::ops::same("experts", up.shape.rows as i32, 2 * spec.width as i32)?;
        crate::ops::same("experts", down.shape.cols as i32, spec.width as i32)?;
        crate::ops::same("experts", o.width, down.shape.rows as i32)?;
        let both = self.on.mats[spec.gate_up.0 as usize].bytes + self.on.mats[spec.down.0 as usize].bytes;
        let chosen = (self.rows * spec.top_k).min(spec.experts);
        self.left.weight_bytes += (both as u128 * chosen as u128 / spec.experts as u128) as u64;
        let stride = spec.width.next_multiple_of(8);
        if self.rows > SKINNY_ROWS {
            return self.grouped_experts(out, x, &spec, (up, down), stride);
        }
        let bytes = spec.experts * MAX_ROWS * stride * 2;
        let hidden = self.on.workspace.get(Piece::Experts, &self.on.stream, bytes)?;
        let mut side = None;
        if let Some((y, from, w)) = beside {
            self.left.weight_bytes += self.on.mats[w.0 as usize].bytes as u64;
            self.same_widths(y, from, w)?;
            let weights = self.one_run(w).ok_or_else(not_packed)?;
            let call = self.call(y, from, weights);
            side = Some(match most_planes[0] {
                1 => (call, None),
                most_planes => {
                    let room = self.plane_room(y)?;
                    self.waits(Planes { count: 1, ..room });
                    (Linear { out: room.ptr, out_stride: room.stride, most_planes, ..call }, Some(room))
                }
            });
        }
        let room = if most_planes[1] > 1 { Some(self.plane_room(out)?) } else { None };
        for (first, rows) in self.tiles() {
            let chosen = self.chosen(first)?;
            let up = ExpertsUp {
                weights: up,
                chosen,
                top_k: spec.top_k,
                x: v.ptr.at(first * v.stride as usize * 2),
                x_stride: v.stride as usize,
                rows,
                hidden,
                hidden_stride: stride,
                gate: gate(spec.activation),
            };
            let down = ExpertsDown {
                weights: down,
                chosen,
                top_k: spec.top_k,
                hidden,
                hidden_stride: stride,
                rows,
                out: room.map_or(o.ptr.at(first * o.stride as usize * 4), |p| p.ptr),
                out_stride: o.stride as usize,
                most_planes: most_planes[1],
            };
            // SAFETY: widths agree, and the hidden piece holds sixteen rows of every expert.
            let counts = unsafe {
                let of_side = skinny_experts::experts_up(self.on.queue(), &up, side.as_ref().map(|s| &s.0))?;
                [of_side, skinny_experts::experts_down(self.on.queue(), &down)?]
            };
            // Planes are asked for only where one tile holds all rows.
            for (room, count) in [side.and_then(|s| s.1), room].into_iter().zip(counts) {
                if let Some(room) = room {
                    self.waits(Planes { count, ..room });
                }
            }
        }
        Ok(())
    }

    /// Sums that nobody has added up, in place of others of the same buffer.
    fn waits(&mut self, planes: Planes) {
        self.planes.retain(|p| p.act != planes.act);
        self.planes.push(planes);
    }

    /// Experts over all rows that chose them.
    pub(super) fn grouped_experts(
        &mut self,
        out: Act,
        x: Act,
        spec: &ExpertSpec,
        (up, down): (Weights, Weights),
        hidden_stride: usize,
    ) -> Result<()> {
        let (o, v, top_k, most) = (self.act(out), self.act(x), spec.top_k, self.most_rows());
        let (_, routes) = self.dense_routes(spec.experts, top_k)?;
        let (stream, workspace) = (&self.on.stream, &mut self.on.workspace);
        let counts = workspace.get(Piece::Lists, stream, spec.experts * (1 + most) * 4)?;
        let parts_stride = (o.width as usize).next_multiple_of(8);
        let hidden_bytes = (most * top_k * hidden_stride * 2).next_multiple_of(256);
        let bytes = hidden_bytes + most * top_k * parts_stride * 4;
        let hidden = workspace.get(Piece::Experts, stream, bytes)?;
        let parts = hidden.at(hidden_bytes);
        let pairs = counts.at(spec.experts * 4);
        let lists = Lists { counts, pairs, list_stride: most, experts: spec.experts, top_k };
        let x_stride = v.stride as usize;
        let up = Grouped { weights: up, lists, x: v.ptr, x_stride, out: hidden, out_stride: hidden_stride };
        let down = Grouped {
            weights: down,
            lists,
            x: hidden,
            x_stride: hidden_stride,
            out: parts,
            out_stride: parts_stride,
        };
        let combine = Combine {
            parts,
            parts_stride,
            out: o.ptr,
            out_stride: o.stride as usize,
            rows: self.rows,
            top_k,
            width: o.width as usize,
        };
        let queue = self.on.queue();
        // SAFETY: widths agree, and the pieces hold the pairs of as many rows as buffers do.
        unsafe {
            gemm_prefill::sort_pairs(queue, routes, self.rows, &lists)?;
            gemm_prefill::grouped_up(queue, &up, gate(spec.activation), routes)?;
            gemm_prefill::grouped_down(queue, &down)?;
            gemm_prefill::combine_pairs(queue, &combine)?;
        }
        Ok(())
    }
}

/// Whether the experts that follow by `routes` are packed, so that they read the list that the router's kernel makes.
pub(super) fn packed_experts(later: &[Step], routes: Act, mats: &[Matrix]) -> bool {
    let packed = |m: Mat| mats[m.0 as usize].packed.is_some();
    let both = |s: &Step| match s {
        Step::Experts { routes: r, spec, .. } if *r == routes => {
            Some(packed(spec.gate_up) && packed(spec.down))
        }
        _ => None,
    };
    let parts = |s: &Step| match s {
        Step::LinearExperts(parts) => both(&parts[1]),
        other => both(other),
    };
    later.iter().find_map(parts).unwrap_or(false)
}
