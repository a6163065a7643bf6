// Skinny GEMM for decode: out[n][m] = sum_k W[m][k] x[n][k] for 1..16 rows n, weights in their own form, float32 sums.
//
// Weights are the A operand of mma.m16n8k16, so one to eight rows cost the same (forms.cuh has the layouts). A ninth warp streams the block's
// strips through a ring in shared memory with the copy engine, 16 to 36 KB a stage; the 8 consumer warps share a stage's chunks out among them
// (2^lwm groups of strips x 8 >> lwm parts of k) and add their sums through shared memory at the end of a unit of strips. A block owns whole
// units, or a fixed part of k ("planes"): no block waits for another. The ring is filled before griddepcontrol.wait, so under programmatic
// dependent launch the weights are there when the kernel before ends.
//
// Four modes:
//   dense          out = W x
//   gated (flag)   strips s and s + strips / 2 are gate and up; out = f(gate) * up
//   EXPERT_UP      (with a plain product beside it, UpArgs) groups of strips by the list of chosen experts, gated; out[group][n] = weight[group][n] * f(gate) * up, zero where row n did not
//                  choose the group's expert. All rows are columns of every group: they are free.
//   EXPERT_DOWN    x[group][n]; the sum runs over k and over the groups, so out[n] is the weighted sum over the experts
//
// Traffic: the packed weights once, x from L2 once a block, the outputs. Times and shares of the read ceiling: docs/cuda-prototypes.md and
// docs/performance.md. Tried and dropped: stream-K with a fix-up by the last block (4 to 12 us on small matrices), a ring a warp, cp.async in
// place of bulk copies (31B head bf16 85 against 101 %), a block barrier for the sums, 16 consumer warps, three blocks a multiprocessor.
#pragma once
#include "forms.cuh"
#include "prologue.cuh"
#include "router.cuh"

enum Mode { DENSE, EXPERT_UP, EXPERT_DOWN };
enum Epilogue { OUT_F32 = 0, OUT_BF16 = 1, OUT_GATED = 2, OUT_GATE_TIMES = 3 };
constexpr int MAX_GROUPS = 128;

// Mirrored by SkinnyArgs in src/kernels/skinny_gemm.rs.
struct SkinnyArgs {
  const uint8_t* w;           // the first strip
  const float* row_scale;     // by output (of all groups), or null
  const bf16* x;              // [rows][ldx]; EXPERT_DOWN: [group][rows][ldx]
  void* out;                  // [plane][rows][ldo], float32 or bf16; EXPERT_UP: [group][rows][ldo]
  const float* times;         // OUT_GATE_TIMES: out = f(sum) * times[row][ld_times]
  const int* groups;          // experts: count, then ids
  const float* group_weight;  // EXPERT_UP: [group][16]
  uint64_t strip_bytes, group_bytes;
  int strips, k, chunks;      // strips of one group (of gate alone when gated); inputs; chunks of a strip (k padded)
  int ldx, rows, ldo, m;      // m: outputs (of one group; half of its rows when gated)
  int lwm, planes, cut;       // planes: grid.y; cut: chunks of a plane (not EXPERT_DOWN)
  int epilogue, activation, ld_times;
  int per_group;              // units of one group
  uint32_t magic_group, magic_chunks;  // 2^32 / per_group and 2^32 / chunks rounded up, 0 for 1
  float softcap;              // OUT_F32: c tanh(sum / c), 0 for none
};
// Gate and up of chosen experts, and a plain product of the same form beside them: its weights are on their way while the ids are not known. It
// has side_jobs = units times planes, at most as many as there are blocks; 0 for none.
struct UpArgs {
  SkinnyArgs experts, side;
  int side_jobs, pad;
};
// A product, and the router in the first blocks of the launch.
struct RoutedArgs {
  SkinnyArgs product;
  RouterArgs router;
  int router_blocks, pad;
};

// A gated product of one row, and the residual step that makes its x. Mirrored by AfterArgs in src/kernels/prologue.rs.
struct AfterArgs {
  SkinnyArgs product;
  PrologueArgs before;
};

extern __shared__ __align__(128) uint8_t sm[];

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// u / d for a divisor whose reciprocal the host knows: exact for u * d < 2^31. Integer division costs 40 cycles and more, and what stands
// before the first copy is paid by every kernel.
__device__ __forceinline__ int divide(int u, uint32_t magic) { return magic ? (int)__umulhi((uint32_t)u, magic) : u; }

// Beyond the ring: scratch of the forms with headers, the warps' sums (two buffers), barriers; then x when it is kept here.
template <class F, int CW, int NS, int MS, int NT> __host__ __device__ constexpr int skinny_smem() {
  return NS * 8 * CW * MS * F::CB + 8 * MS * F::SCRATCH + 2 * 8 * MS * NT * 512 + (2 * NS + 4) * 8;
}

// The blocks of a launch that share its units out: this one's number among them, and how many they are. `side` is a plain product beside chosen
// experts (below); it and the number of its jobs are read by EXPERT_UP alone. AFTER: fours of a thread of the residual step `before`, 0 for none.
template <class F, int CW, int NS, int MS, int NT, bool XS, Mode MODE, int AFTER = 0>
__device__ __forceinline__ void skinny_body(const SkinnyArgs& a, int u0, int ustep, const SkinnyArgs& side, int side_jobs, const PrologueArgs& before = {}) {
  constexpr int STAGE = 8 * CW * MS * F::CB, PIECES = F::KC / 64, SETS = MS * NT == 1 ? 2 : 1;  // two sets of sums where one would be a chain
  constexpr int SCALES = 8 * CW * MS * 16;  // EXPERT_DOWN: row scales of a stage, 16 for each strip of each expert in it
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float* scratch = (float*)(sm + NS * STAGE + warp * MS * F::SCRATCH);
  float* red = (float*)(sm + NS * STAGE + 8 * MS * F::SCRATCH);
  uint64_t* full = (uint64_t*)(red + 2 * 8 * MS * NT * 128);
  uint64_t* empty = full + NS;
  uint64_t *rfull = empty + NS, *rempty = rfull + 2;  // the two buffers in which warps leave their sums
  uint8_t* extra = sm + skinny_smem<F, CW, NS, MS, NT>();
  const int reducers = min(a.rows, 8);                // warps that add them up and write the outputs
  const int lwk = 3 - a.lwm, wk_n = 1 << lwk, cps = CW << lwk;  // cps: chunks a stage holds of each strip
  const int lunit = a.lwm + (MS == 2), unit_strips = 1 << lunit;
  // A unit is unit_strips strips; when gated, the second half of them are the up strips that belong to the first.
  const bool all_gated = MODE == EXPERT_UP || (MODE == DENSE && a.epilogue == OUT_GATED);
  const int plane = MODE == EXPERT_UP ? 0 : blockIdx.y, per_group = a.per_group;
  auto cut_of = [&](int chunks) { return MODE != EXPERT_DOWN ? a.cut : a.planes == 1 ? chunks : a.planes == 2 ? (chunks + 1) >> 1 : (chunks + 2) / 3; };
  // The side product's jobs go to the last blocks, one each: the first have a unit of the experts more when they don't come out even.
  const int v = ustep - 1 - u0, n_side = MODE == EXPERT_UP && v < side_jobs ? 1 : 0;
  const int side_plane = n_side ? (v >= side.per_group) + (v >= 2 * side.per_group) : 0, side_first = n_side ? (v - side_plane * side.per_group) << lunit : 0;
  const int side_c0 = n_side ? min(side_plane * side.cut, side.chunks) : 0, side_c1 = n_side ? min(side_c0 + side.cut, side.chunks) : 0;
  if (threadIdx.x == 256) {
    for (int i = 0; i < NS; i++) { mbar_init(full + i, 1); mbar_init(empty + i, 256); }
    for (int i = 0; i < 2; i++) { mbar_init(rfull + i, 256); mbar_init(rempty + i, reducers * 32); }
    fence_barrier_init();
    fence_proxy_async();
  }
  __syncthreads();
  pdl_launch();

  if (warp == 8) {  // the producer: one lane asks for every stage, weights only, so it waits for no kernel (but for expert ids)
    int slot = 0, parity = 1;
    auto next = [&]() { __syncwarp(); if (++slot == NS) { slot = 0; parity ^= 1; } };
    auto send = [&](const uint8_t* w, uint64_t strip_bytes, int total, bool gated, int first, int c0, int c1) {
      const int run = gated ? unit_strips >> 1 : unit_strips, n = min(run, total - first);  // n: strips of each run that exist
      for (int c = c0; c < c1; c += cps, next()) {
        const int have = min(cps, c1 - c);
        if (lane != 0) continue;
        mbar_wait(empty + slot, parity);
        mbar_expect(full + slot, have * F::CB * (gated ? 2 * n : n));
        for (int i = 0; i < unit_strips; i++) {
          const bool up = i >= run;
          if ((up ? i - run : i) >= n) continue;
          bulk_load_once(sm + slot * STAGE + i * cps * F::CB, w + (up ? total + first + i - run : first + i) * strip_bytes + (size_t)c * F::CB, have * F::CB, full + slot);
        }
      }
    };
    if (n_side) send(side.w, side.strip_bytes, side.strips, false, side_first, side_c0, side_c1);
    int my_id[4] = {}, n_groups = 1;
    if (MODE != DENSE) {
      pdl_wait();
      n_groups = __ldcg(a.groups);
#pragma unroll
      for (int i = 0; i < 4; i++) my_id[i] = __ldcg(a.groups + 1 + i * 32 + lane);  // beyond n_groups: never used
    }
    auto id_of = [&](int e) {
      int id = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) { int w = __shfl_sync(~0u, my_id[i], e & 31); if (e >> 5 == i) id = w; }
      return id;
    };
    const int units = per_group * (MODE == EXPERT_UP ? n_groups : 1);
    const int chunks = a.chunks * (MODE == EXPERT_DOWN ? n_groups : 1), cut = cut_of(chunks), c0 = min(plane * cut, chunks), c1 = min(c0 + cut, chunks);
    for (int u = u0; u < units; u += ustep) {
      if (MODE != EXPERT_DOWN) {
        const int e = MODE == EXPERT_UP ? divide(u, a.magic_group) : 0, first = (u - e * per_group) << (all_gated ? lunit - 1 : lunit);
        send(MODE == EXPERT_UP ? a.w + id_of(e) * a.group_bytes : a.w, a.strip_bytes, a.strips, all_gated, first, c0, c1);
        continue;
      }
      const int first = u << lunit, n = min(unit_strips, a.strips - first);
      for (int c = c0; c < c1; c += cps, next()) {  // the stage's chunks may belong to several experts
        const int have = min(cps, c1 - c), v0 = divide(c, a.magic_chunks);
        if (lane == 0) {
          mbar_wait(empty + slot, parity);
          const int scales = a.row_scale ? (divide(c + have - 1, a.magic_chunks) - v0 + 1) * 64 : 0;
          mbar_expect(full + slot, (have * F::CB + scales) * n);
        }
        for (int done = 0; done < have;) {
          const int e = divide(c + done, a.magic_chunks), at = c + done - e * a.chunks, take = min(have - done, a.chunks - at), id = id_of(e);
          const uint8_t* from = a.w + id * a.group_bytes + (size_t)at * F::CB;
          if (lane == 0) {
            for (int i = 0; i < n; i++) bulk_load_once(sm + slot * STAGE + (i * cps + done) * F::CB, from + (first + i) * a.strip_bytes, take * F::CB, full + slot);
            if (a.row_scale) bulk_load((float*)extra + slot * SCALES + ((e - v0) << (lunit + 4)), a.row_scale + (size_t)id * a.m + first * 16, n * 64, full + slot);
          }
          done += take;
        }
      }
    }
    return;
  }

  // A reducing thread's first output of a unit: its row scales are asked for at the start of the unit (of the first one before the kernel before has
  // ended: they are weights, and far away).
  float scale_gate = 1, scale_up = 1;
  int* ids = (int*)extra;  // EXPERT_UP: ids, then the weights
  float* group_weight = (float*)(ids + MAX_GROUPS);
  auto scales_of = [&](bool on_side, int e, int m) {
    const float* at = on_side ? side.row_scale : a.row_scale;
    if (MODE == EXPERT_DOWN || !at || m >= (on_side ? side.m : a.m)) return;
    at += (MODE == EXPERT_UP && !on_side ? (size_t)ids[e] * a.m * 2 : 0) + m;
    scale_gate = __ldg(at);
    if (all_gated && !on_side) scale_up = __ldg(at + a.m);
  };
  auto fetch_scales = [&](bool on_side, int e, int first, int run, int it) {
    const int i = ((warp - it) & 7) * 32 + lane;
    scale_gate = scale_up = 1;
    scales_of(on_side, e, (first + ((i >> 4) & (run - 1))) * 16 + (i & 15));
  };
  const int main_run = all_gated ? unit_strips >> 1 : unit_strips;
  if (MODE == DENSE && u0 < per_group) fetch_scales(false, 0, u0 * main_run, main_run, 0);
  Prologue<AFTER ? AFTER : 1> prologue;
  if (AFTER) prologue.gains(before);
  pdl_wait();
  int n_groups = 1, my_id = 0;
  float4 my_weight[2];
  if (MODE != DENSE) {  // one round trip for everything that the list says, and for x
    n_groups = __ldcg(a.groups);
    if (MODE == EXPERT_UP) {
      if (threadIdx.x < MAX_GROUPS) my_id = __ldcg(a.groups + 1 + threadIdx.x);
#pragma unroll
      for (int i = 0; i < 2; i++) my_weight[i] = __ldcg((const float4*)a.group_weight + threadIdx.x + 256 * i);
    }
  }
  const int units = per_group * (MODE == EXPERT_UP ? n_groups : 1);
  const int chunks = a.chunks * (MODE == EXPERT_DOWN ? n_groups : 1), cut = cut_of(chunks), c0_all = min(plane * cut, chunks), c1_all = min(c0_all + cut, chunks);
  bf16* xs = (bf16*)(extra + (MODE == EXPERT_UP ? MAX_GROUPS * 68 : 0));
  const int kx = (c1_all - c0_all) * F::KC, stride = XS ? kx + 8 : a.ldx;
  const int side_kx = (side_c1 - side_c0) * F::KC, side_stride = XS ? side_kx + 8 : n_side ? side.ldx : 0;
  bf16* side_xs = xs + a.rows * stride;
  if (XS) {  // rows padded by 16 bytes, so that eight rows' reads fall into different banks; inputs beyond k are zero
    auto stage = [&](bf16* to, const bf16* x, int ldx, int k_end, int first_k, int width) {
      const int n = width / 8, all = a.rows * n;
      if (a.rows == 1) {  // code of its own, short: what runs first in a kernel comes from far away
        for (int i0 = threadIdx.x; i0 < n; i0 += 4 * 256) {
          uint4 w[4];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const int k = (i0 + j * 256) * 8;
            w[j] = make_uint4(0, 0, 0, 0);
            if (k < width && first_k + k < k_end) w[j] = *(const uint4*)(x + first_k + k);
          }
#pragma unroll
          for (int j = 0; j < 4; j++) if (i0 + j * 256 < n) *(uint4*)(to + (i0 + j * 256) * 8) = prescale<F>(w[j]);
        }
        return;
      }
      for (int i0 = threadIdx.x; i0 < all; i0 += 8 * 256) {  // eight loads in flight: one at a time costs 0.3 us each
        uint4 w[8];
        int at[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const int i = i0 + j * 256, r = i / n, k = (i - r * n) * 8;
          at[j] = i < all ? r * (width + 8) + k : -1;
          w[j] = make_uint4(0, 0, 0, 0);
          if (i < all && first_k + k < k_end) w[j] = *(const uint4*)(x + (size_t)r * ldx + first_k + k);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) if (at[j] >= 0) *(uint4*)(to + at[j]) = prescale<F>(w[j]);
      }
    };
    if (AFTER) {  // the one row is made here, whole: there is one plane
      for (int i = a.k + 8 * threadIdx.x; i < kx; i += 8 * 256) *(uint4*)(xs + i) = make_uint4(0, 0, 0, 0);
      prologue.run(before, (float*)(xs + kx + 8), u0 == 0, consumers_sync, [&](int i, uint2 v) {
        const uint4 w = prescale<F>(make_uint4(v.x, v.y, 0, 0));
        *(uint2*)(xs + i) = make_uint2(w.x, w.y);
      });
    } else {
      if (n_side) stage(side_xs, side.x, side.ldx, side.k, side_c0 * F::KC, side_kx);
      stage(xs, a.x, a.ldx, a.k, c0_all * F::KC, kx);
    }
  }
  if (MODE == EXPERT_UP) {
    if (threadIdx.x < MAX_GROUPS) ids[threadIdx.x] = my_id;
#pragma unroll
    for (int i = 0; i < 2; i++) ((float4*)group_weight)[threadIdx.x + 256 * i] = my_weight[i];
  }
  if (XS || MODE == EXPERT_UP) consumers_sync();
  const int wm = warp & ((1 << a.lwm) - 1), wk = warp >> a.lwm;
  const bf16* xr[NT];
  auto x_from = [&](const bf16* x, int ld) {
#pragma unroll
    for (int n = 0; n < NT; n++) xr[n] = x + (size_t)min(n * 8 + g, a.rows - 1) * ld;  // columns beyond the rows repeat the last row: no column touches another
  };
  auto x_at = [&](int n, int c) {  // the inputs of chunk c, which in EXPERT_DOWN counts on through the groups
    if (MODE != EXPERT_DOWN) return xr[n] + c * F::KC;
    const int e = divide(c, a.magic_chunks);
    return xr[n] + e * a.rows * stride + (c - e * a.chunks) * F::KC;
  };
  if (n_side) x_from(XS ? side_xs - side_c0 * F::KC : side.x, side_stride);
  else x_from(XS ? xs - c0_all * F::KC : a.x, stride);
  int slot = 0, parity = 0;
  for (int it = 0, u = u0 - n_side * ustep; u < units; u += ustep, it++) {
    const bool on_side = MODE == EXPERT_UP && u < u0, gated = all_gated && !on_side;
    if (MODE == EXPERT_UP && it == 1 && n_side) x_from(XS ? xs - c0_all * F::KC : a.x, stride);
    const int lrun = gated ? lunit - 1 : lunit, run = 1 << lrun, c0 = on_side ? side_c0 : c0_all, c1 = on_side ? side_c1 : c1_all;
    const int e = MODE == EXPERT_UP && !on_side ? divide(u, a.magic_group) : 0, first = on_side ? side_first : (u - e * per_group) << lrun;
    if (MODE != DENSE || it) fetch_scales(on_side, e, first, run, it);
    float acc[SETS][MS][NT][4] = {};
    constexpr bool AHEAD = !XS && PIECES == 1;  // x from global memory is asked for one chunk ahead
    uint32_t bx[NT][8];
    if (AHEAD) {
#pragma unroll
      for (int n = 0; n < NT; n++) load_x<F, XS>(bx[n], x_at(n, min(c0 + wk, c1 - 1)), t);
    }
    // EXPERT_DOWN with row scales: the sums of every chunk are scaled by its expert's, which come with the stage.
    const bool scaled_down = MODE == EXPERT_DOWN && a.row_scale;
    for (int c = c0; c < c1; c += cps) {
      const int mine = (min(cps, c1 - c) - wk + wk_n - 1) >> lwk;  // this warp's chunks of the stage: wk, wk + wk_n, ...
      const uint8_t* ch = sm + slot * STAGE + (wm * MS * cps + wk) * F::CB;
      const float* scales = (const float*)extra + slot * SCALES + (wm * MS * 16 + g);
      const int v0 = scaled_down ? divide(c, a.magic_chunks) : 0;
      int ck = c + wk;
      auto chunk = [&](int set) {
        if (F::SCRATCH) {
          __syncwarp();
#pragma unroll
          for (int ms = 0; ms < MS; ms++) F::chunk_begin(ch + ms * cps * F::CB, lane, scratch + ms * 256);
          __syncwarp();
        }
        float part[MS][NT][4];
        if (scaled_down) {
#pragma unroll
          for (int ms = 0; ms < MS; ms++)
#pragma unroll
            for (int n = 0; n < NT; n++) part[ms][n][0] = part[ms][n][1] = part[ms][n][2] = part[ms][n][3] = 0;
        }
#pragma unroll
        for (int q = 0; q < PIECES; q++) {
          uint32_t b[NT][8];
#pragma unroll
          for (int n = 0; n < NT; n++) {
            if (AHEAD) {
#pragma unroll
              for (int i = 0; i < 8; i++) b[n][i] = bx[n][i];
              load_x<F, XS>(bx[n], x_at(n, min(ck + wk_n, c1 - 1)), t);
            } else load_x<F, XS>(b[n], x_at(n, ck) + q * 64, t);
          }
          if (scaled_down) F::template piece<MS, NT>(ch, cps * F::CB, q, lane, b, part, scratch);
          else F::template piece<MS, NT>(ch, cps * F::CB, q, lane, b, acc[(set + q) % SETS], scratch);
        }
        if (scaled_down) {
          const float* d = scales + ((divide(ck, a.magic_chunks) - v0) << (lunit + 4));
#pragma unroll
          for (int ms = 0; ms < MS; ms++) {
            const float d0 = d[ms * 16], d1 = d[ms * 16 + 8];
#pragma unroll
            for (int n = 0; n < NT; n++) {
              float(&s)[4] = acc[0][ms][n];
              s[0] = fmaf(d0, part[ms][n][0], s[0]); s[1] = fmaf(d0, part[ms][n][1], s[1]);
              s[2] = fmaf(d1, part[ms][n][2], s[2]); s[3] = fmaf(d1, part[ms][n][3], s[3]);
            }
          }
        }
        ch += wk_n * F::CB;
        ck += wk_n;
      };
      mbar_wait(full + slot, parity);
      int j = 0;
      if (CW >= 4 && NT == 1 && F::PRE0 == 0)  // the integer forms would run out of registers
        for (; j + 3 < mine; j += 4) { chunk(0); chunk(1); chunk(0); chunk(1); }
      if (CW >= 2)
        for (; j + 1 < mine; j += 2) { chunk(0); chunk(1); }
      for (; j < mine; j++) chunk(0);
      __syncwarp();
      mbar_arrive(empty + slot);
      if (++slot == NS) { slot = 0; parity ^= 1; }
    }
    // Sum over the warps that shared the strips' inputs, in warp order. No barrier: the warps go on to the next unit, one of them in turn (all, for
    // many rows) waits for the others' sums; a thread takes output row i % 16 of a strip and column.
    const int buf = it & 1, phase = it >> 1 & 1;
    float* rb = red + buf * 8 * MS * NT * 128;
    if (it >= 2) mbar_wait(rempty + buf, phase ^ 1);
#pragma unroll
    for (int ms = 0; ms < MS; ms++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float4 s = *(float4*)acc[0][ms][n];
        if (SETS == 2) { float4 o = *(float4*)acc[SETS - 1][ms][n]; s.x += o.x; s.y += o.y; s.z += o.z; s.w += o.w; }
        *(float4*)(rb + ((warp * MS + ms) * NT + n) * 128 + lane * 4) = s;
      }
    mbar_arrive(rfull + buf);
    const int turn = (warp - it) & 7;
    if (turn >= reducers) continue;
    mbar_wait(rfull + buf, phase);
    const int mine = turn * 32 + lane, outputs = on_side ? side.m : a.m;
    for (int i = mine; i < (run * 16) * a.rows; i += reducers * 32) {
      const int row = i & 15, strip = (i >> 4) & (run - 1), col = i >> (4 + lrun), m = (first + strip) * 16 + row;
      if (m >= outputs) continue;
      if (i != mine) scales_of(on_side, e, m);
      auto sum = [&](int j) {  // of local strip j
        const float* at = rb + j * NT * 128 + (col >> 3) * 128 + ((row & 7) * 4 + (col & 7) / 2) * 4 + (row >> 3) * 2 + (col & 1);
        float s = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) {  // all read at once
          const float part = at[(min(w, wk_n - 1) << lunit) * NT * 128];
          s += w < wk_n ? part : 0.f;
        }
        return s * F::POST;
      };
      float r = sum(strip) * scale_gate;
      if (gated) r = activate(a.activation, r) * (sum(strip + run) * scale_up);
      if (on_side) {
        ((float*)side.out)[(size_t)(side_plane * a.rows + col) * side.ldo + m] = r;
      } else if (MODE == EXPERT_UP) {
        const float w = group_weight[e * 16 + col];
        ((bf16*)a.out)[(size_t)(e * a.rows + col) * a.ldo + m] = __float2bfloat16(w == 0.f ? 0.f : w * r);
      } else if (a.epilogue == OUT_F32) {
        if (a.softcap > 0.f) r = a.softcap * tanhf(r / a.softcap);
        ((float*)a.out)[(size_t)(plane * a.rows + col) * a.ldo + m] = r;
      } else {
        if (a.epilogue == OUT_GATE_TIMES) r = activate(a.activation, r) * a.times[(size_t)col * a.ld_times + m];
        ((bf16*)a.out)[(size_t)col * a.ldo + m] = __float2bfloat16(r);
      }
    }
    __syncwarp();
    mbar_arrive(rempty + buf);
  }
}

// One entry of a form's table. NAME: skinny_FORM_n{NT}_{g|s}{MS}, or _routed_g / _routed_s with the router beside it, or _up / _ups (x in shared
// memory) / _down for experts.
#define SKINNY(NAME, F, CW, NS, MS, NT, XS, MODE)                                                  \
  extern "C" __global__ void __launch_bounds__(288, 2) NAME(const __grid_constant__ SkinnyArgs a) { \
    skinny_body<F, CW, NS, MS, NT, XS, MODE>(a, blockIdx.x, gridDim.x, a, 0);                       \
  }
#define SKINNY_AFTER(NAME, F, CW, NS, J)                                                                     \
  extern "C" __global__ void __launch_bounds__(288, 2) NAME(const __grid_constant__ AfterArgs p) {           \
    skinny_body<F, CW, NS, 1, 1, true, DENSE, J>(p.product, blockIdx.x, gridDim.x, p.product, 0, p.before);  \
  }
#define SKINNY_UP(NAME, F, CW, NS, NT, XS)                                                               \
  extern "C" __global__ void __launch_bounds__(288, 2) NAME(const __grid_constant__ UpArgs p) {           \
    skinny_body<F, CW, NS, 1, NT, XS, EXPERT_UP>(p.experts, blockIdx.x, gridDim.x, p.side, p.side_jobs);  \
  }
#define SKINNY_ROUTED(NAME, F, CW, NS, NT, XS)                                                                            \
  extern "C" __global__ void __launch_bounds__(288, 2) NAME(const __grid_constant__ RoutedArgs p) {                        \
    const int block = blockIdx.x, routers = p.router_blocks;                                                               \
    if (block < routers) router_body(p.router, block, routers, sm);                                                        \
    else skinny_body<F, CW, NS, 1, NT, XS, DENSE>(p.product, block - routers, gridDim.x - routers, p.product, 0);          \
  }
// A form's kernels: CW chunks a warp and stage, NS stages. g: x from global memory, s: from shared; then the strips of a warp.
#define SKINNY_FORM(FORM, F, CW, NS)                                   \
  SKINNY(skinny_##FORM##_n1_g1, F, CW, NS, 1, 1, false, DENSE)         \
  SKINNY(skinny_##FORM##_n1_s1, F, CW, NS, 1, 1, true, DENSE)          \
  SKINNY(skinny_##FORM##_n2_g1, F, CW, NS, 1, 2, false, DENSE)         \
  SKINNY_ROUTED(skinny_##FORM##_n1_routed_g, F, CW, NS, 1, false)      \
  SKINNY_ROUTED(skinny_##FORM##_n1_routed_s, F, CW, NS, 1, true)       \
  SKINNY_ROUTED(skinny_##FORM##_n2_routed_g, F, CW, NS, 2, false)      \
  SKINNY_UP(skinny_##FORM##_n1_up, F, CW, NS, 1, false)                \
  SKINNY_UP(skinny_##FORM##_n1_ups, F, CW, NS, 1, true)                \
  SKINNY_UP(skinny_##FORM##_n2_up, F, CW, NS, 2, false)                \
  SKINNY(skinny_##FORM##_n1_down, F, CW, NS, 1, 1, false, EXPERT_DOWN) \
  SKINNY(skinny_##FORM##_n2_down, F, CW, NS, 1, 2, false, EXPERT_DOWN)
// Two strips a warp, which halves the reads of x.
#define SKINNY_TWO_STRIPS(FORM, F, CW, NS)                    \
  SKINNY(skinny_##FORM##_n1_s2, F, CW, NS, 2, 1, true, DENSE)  \
  SKINNY(skinny_##FORM##_n1_g2, F, CW, NS, 2, 1, false, DENSE) \
  SKINNY(skinny_##FORM##_n2_g2, F, CW, NS, 2, 2, false, DENSE)
