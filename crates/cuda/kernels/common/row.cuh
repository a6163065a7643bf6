// One row of x: the kernels of skinny.cuh again, short, with what one row leaves undone left out. What a step runs between a layer's weights comes from a
// cold instruction cache, and a warp that does less for a weight empties a full ring faster than the memory fills it.
//
// Units, planes, ring, producer and modes are those of skinny.cuh; x is always in shared memory. How a form multiplies is its RowWarp: row_bytes.cuh (four
// bits, by integers) and row_fp8.cuh. Tried and dropped: docs/performance.md.
#pragma once
#include "skinny.cuh"

// Reads of shared memory whose places are worked out once a stage.
__device__ __forceinline__ uint4 shared16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ uint2 shared8(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}
__device__ __forceinline__ uint32_t shared4(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ uint16_t shared2(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ float2 floats(uint2 v) { return make_float2(__uint_as_float(v.x), __uint_as_float(v.y)); }

// Where a warp and its lanes work: group of strips and part of k among 2^lwk, chunks that a stage holds of each strip.
struct RowPlace {
  int warp, lane, g, t, wm, wk, lwk, cps;
};
// A stage in shared memory: the warp's first strip in it, its chunks, and where they are among those of x. EXPERT_DOWN: the chunk counted through all
// experts, and the rows' scales of the first strip of the first expert in it (or null), an expert's `experts` floats behind each other.
struct RowStage {
  uint32_t codes;
  int have, at, x_chunks;  // x_chunks: chunks of x in shared memory
  int chunk, experts;
  uint32_t magic_chunks;
  const float* scales;
  // Where the scales of an expert stand, that of the stage's chunk ck.
  __device__ __forceinline__ const float* scales_of(int ck) const { return scales + (divide(chunk + ck, magic_chunks) - divide(chunk, magic_chunks)) * experts; }
};

// RowWarp<F, CW, MS, DOWN>: a form's sums in a warp.
//   float bring(uint8_t* to, const bf16* x, int chunks, int inputs, int cps, uint32_t* most)   all consumers: x, zeros beyond `inputs`, to shared memory; the
//                                                                             factor of all sums. *most is 0 and theirs
//   x_bytes(int chunks, int cps)                                              what that takes
//   begin(const RowPlace&); clear(); stage(const RowPlace&, const RowStage&, const uint8_t* x); float2 sum(int ms)   of rows g, g + 8, in lanes with t = 0
template <class F, int CW, int MS, bool DOWN> struct RowWarp;

// Beyond the ring: the warps' sums (two buffers), barriers, for experts their ids; EXPERT_DOWN: row scales of every stage; then x.
template <class F, int CW, int NS, int MS, Mode MODE> __host__ __device__ constexpr int row_smem() {
  return NS * 8 * CW * MS * F::CB + 2 * 8 * MS * 64 + (2 * NS + 6) * 8 + (MODE == EXPERT_DOWN ? MAX_GROUPS * 4 + NS * 8 * CW * MS * 64 : 0);
}

// u0, ustep, side, side_jobs, AFTER: as in skinny_body.
template <class F, int CW, int NS, int MS, Mode MODE, int AFTER = 0>
__device__ __forceinline__ void row_body(const SkinnyArgs& a, int u0, int ustep, const SkinnyArgs& side, int side_jobs, const PrologueArgs& before = {}) {
  constexpr int STAGE = 8 * CW * MS * F::CB, SCALES = 8 * CW * MS * 16;
  RowPlace p;
  p.warp = threadIdx.x >> 5; p.lane = threadIdx.x & 31; p.g = p.lane >> 2; p.t = p.lane & 3;
  p.lwk = 3 - a.lwm; p.cps = CW << p.lwk; p.wm = p.warp & ((1 << a.lwm) - 1); p.wk = p.warp >> a.lwm;
  const int warp = p.warp, lane = p.lane, cps = p.cps, wk_n = 1 << p.lwk;
  float* red = (float*)(sm + NS * STAGE);
  uint64_t* full = (uint64_t*)(red + 2 * 8 * MS * 16);
  uint64_t* empty = full + NS;
  uint64_t *rfull = empty + NS, *rempty = rfull + 2;
  uint32_t* most = (uint32_t*)(rempty + 2);   // for bring: of x, of the side product's
  int* ids = (int*)(rempty + 4);              // EXPERT_DOWN: experts in the order of the list
  float* scales = (float*)(ids + MAX_GROUPS);  // of the stages' rows
  uint8_t* xs = sm + row_smem<F, CW, NS, MS, MODE>();
  const bool all_gated = MODE == EXPERT_UP || (MODE == DENSE && a.epilogue == OUT_GATED);
  const int lunit = a.lwm + (MS == 2), unit_strips = 1 << lunit, plane = MODE == EXPERT_UP ? 0 : blockIdx.y;
  // The side product's jobs go to the last blocks, one each.
  const int v = ustep - 1 - u0, n_side = MODE == EXPERT_UP && v < side_jobs ? 1 : 0;
  const int side_plane = n_side ? (v >= side.per_group) + (v >= 2 * side.per_group) : 0, side_unit = v - side_plane * side.per_group;
  const int side_c0 = n_side ? min(side_plane * side.cut, side.chunks) : 0, side_c1 = n_side ? min(side_c0 + side.cut, side.chunks) : 0;
  if (threadIdx.x == 256) {
    for (int i = 0; i < NS; i++) { mbar_init(full + i, 1); mbar_init(empty + i, 256); }
    for (int i = 0; i < 2; i++) { mbar_init(rfull + i, 256); mbar_init(rempty + i, 32); }
    most[0] = most[1] = 0;
    fence_barrier_init();
    fence_proxy_async();
  }
  __syncthreads();
  pdl_launch();

  if (warp == 8) {  // the producer: weights only, so it waits for no kernel (but for expert ids)
    int groups = 1;
    if (MODE == EXPERT_DOWN) {
      pdl_wait();
      groups = __ldcg(a.groups);
      for (int i = lane; i < MAX_GROUPS; i += 32) ids[i] = __ldcg(a.groups + 1 + i);  // beyond `groups`: never used
      __syncwarp();
    }
    if (lane != 0) return;
    int slot = 0, parity = 1, units = a.per_group;
    bool waited = MODE != EXPERT_UP;
    auto next = [&]() { if (++slot == NS) { slot = 0; parity ^= 1; } };
    if constexpr (MODE == EXPERT_DOWN) {
      const int chunks = a.chunks * groups, cut = a.planes == 1 ? chunks : a.planes == 2 ? (chunks + 1) >> 1 : (chunks + 2) / 3;
      const int c0 = min(plane * cut, chunks), c1 = min(c0 + cut, chunks);
      for (int u = u0; u < units; u += ustep) {
        const int first = u << lunit, n = min(unit_strips, a.strips - first);
        for (int c = c0; c < c1; c += cps, next()) {  // the stage's chunks may belong to several experts
          const int have = min(cps, c1 - c), v0 = divide(c, a.magic_chunks);
          mbar_wait(empty + slot, parity);
          const int of_scales = a.row_scale ? (divide(c + have - 1, a.magic_chunks) - v0 + 1) * 64 : 0;
          mbar_expect(full + slot, (have * F::CB + of_scales) * n);
          for (int done = 0; done < have;) {
            const int e = divide(c + done, a.magic_chunks), at = c + done - e * a.chunks, take = min(have - done, a.chunks - at), id = ids[e];
            const uint8_t* from = a.w + id * a.group_bytes + (size_t)at * F::CB;
#pragma unroll 1
            for (int i = 0; i < n; i++) bulk_load_once(sm + slot * STAGE + (i * cps + done) * F::CB, from + (first + i) * a.strip_bytes, take * F::CB, full + slot);
            if (a.row_scale) bulk_load(scales + slot * SCALES + ((e - v0) << (lunit + 4)), a.row_scale + (size_t)id * a.m + first * 16, n * 64, full + slot);
            done += take;
          }
        }
      }
    } else {
      for (int u = u0 - n_side * ustep; u < units || !waited; u += ustep) {
        const bool on_side = MODE == EXPERT_UP && u < u0, gated = all_gated && !on_side;
        if (!on_side && !waited) {
          waited = true;
          pdl_wait();
          units *= __ldcg(a.groups);
          if (u >= units) break;
        }
        const int e = MODE == EXPERT_UP && !on_side ? divide(u, a.magic_group) : 0, lrun = gated ? lunit - 1 : lunit, run = 1 << lrun;
        const int total = on_side ? side.strips : a.strips, first = (on_side ? side_unit : u - e * a.per_group) << lrun, n = min(run, total - first);
        const uint8_t* w = on_side ? side.w : MODE == EXPERT_UP ? a.w + __ldcg(a.groups + 1 + e) * a.group_bytes : a.w;
        const uint64_t strip_bytes = on_side ? side.strip_bytes : a.strip_bytes;
        const int c0 = on_side ? side_c0 : min(plane * a.cut, a.chunks), c1 = on_side ? side_c1 : min(c0 + a.cut, a.chunks);
        for (int c = c0; c < c1; c += cps, next()) {
          const int have = min(cps, c1 - c);
          mbar_wait(empty + slot, parity);
          mbar_expect(full + slot, have * F::CB * (gated ? 2 * n : n));
#pragma unroll 1
          for (int i = 0; i < unit_strips; i++) {
            const int j = i >= run ? i - run : i;
            if (j >= n) continue;
            const int strip = first + j + (i >= run ? total : 0);
            bulk_load_once(sm + slot * STAGE + i * cps * F::CB, w + strip * strip_bytes + (size_t)c * F::CB, have * F::CB, full + slot);
          }
        }
      }
    }
    return;
  }

  // The reducing warp's first output of unit u (of expert e): what scales it is asked for at the unit's start, of the first one before the kernel before has ended.
  float scale_gate = 1, scale_up = 1, weight = 1;
  auto fetch_scales = [&](bool on_side, int e, int m) {
    const float* at = on_side ? side.row_scale : a.row_scale;
    scale_gate = scale_up = 1;
    if (MODE == EXPERT_UP && !on_side) weight = __ldcg(a.group_weight + e * 16);
    if (MODE == EXPERT_DOWN || !at || m >= (on_side ? side.m : a.m)) return;
    if (MODE == EXPERT_UP && !on_side) at += (size_t)__ldcg(a.groups + 1 + e) * a.m * 2;
    scale_gate = __ldg(at + m);
    if (all_gated && !on_side) scale_up = __ldg(at + a.m + m);
  };
  auto first_output = [&](int first, int run) { return (first + ((lane >> 4) & (run - 1))) * 16 + (lane & 15); };
  const int main_lrun = all_gated ? lunit - 1 : lunit;
  if (MODE == DENSE && u0 < a.per_group && warp == 0) fetch_scales(false, 0, first_output(u0 << main_lrun, 1 << main_lrun));
  Prologue<AFTER ? AFTER : 1> prologue;
  if (AFTER) prologue.gains(before);
  pdl_wait();
  const int groups = MODE != DENSE ? __ldcg(a.groups) : 1, units = a.per_group * (MODE == EXPERT_UP ? groups : 1);
  const int chunks = a.chunks * (MODE == EXPERT_DOWN ? groups : 1);
  const int cut = MODE != EXPERT_DOWN ? a.cut : a.planes == 1 ? chunks : a.planes == 2 ? (chunks + 1) >> 1 : (chunks + 2) / 3;
  const int main_c0 = min(plane * cut, chunks), main_c1 = min(main_c0 + cut, chunks);
  RowWarp<F, CW, MS, MODE == EXPERT_DOWN> w;
  w.begin(p);
  const bf16* x = a.x;
  if (AFTER) {  // the one row is made behind the place of x, whole: there is one plane
    float* red = (float*)(xs + w.x_bytes(chunks, cps));
    bf16* row = (bf16*)(red + 2 * 8 * AFTER);
    prologue.run(before, red, u0 == 0, consumers_sync, [&](int i, uint2 v) { *(uint2*)(row + i) = v; });
    consumers_sync();
    x = row;
  }
  uint8_t* side_xs = xs + w.x_bytes(main_c1 - main_c0, cps);
  float side_factor = 1;
  if (n_side) side_factor = w.bring(side_xs, side.x + side_c0 * F::KC, side_c1 - side_c0, min(side_c1 * F::KC, side.k) - side_c0 * F::KC, cps, most + 1);
  const float factor = w.bring(xs, x + main_c0 * F::KC, main_c1 - main_c0, min(main_c1 * F::KC, a.k * (MODE == EXPERT_DOWN ? groups : 1)) - main_c0 * F::KC, cps, most);

  int slot = 0, parity = 0;
#pragma unroll 1
  for (int it = 0, u = u0 - n_side * ustep; u < units; u += ustep, it++) {
    const bool on_side = MODE == EXPERT_UP && u < u0, gated = all_gated && !on_side;
    const int e = MODE == EXPERT_UP && !on_side ? divide(u, a.magic_group) : 0, lrun = gated ? lunit - 1 : lunit, run = 1 << lrun;
    const int first = (on_side ? side_unit : u - e * a.per_group) << lrun, turn = (warp - it) & 7;
    const int c0 = on_side ? side_c0 : main_c0, c1 = on_side ? side_c1 : main_c1;
    if ((MODE != DENSE || it) && turn == 0) fetch_scales(on_side, e, first_output(first, run));
    w.clear();
    RowStage s;
    s.magic_chunks = a.magic_chunks;
    s.experts = 16 << lunit;
    s.x_chunks = c1 - c0;
#pragma unroll 1
    for (int c = c0; c < c1; c += cps) {
      s.codes = smem_addr(sm) + slot * STAGE + p.wm * MS * cps * F::CB;
      s.have = min(cps, c1 - c);
      s.at = c - c0;
      s.chunk = c;
      s.scales = MODE == EXPERT_DOWN && a.row_scale ? scales + slot * SCALES + p.wm * MS * 16 + p.g : nullptr;
      mbar_wait(full + slot, parity);
      w.stage(p, s, on_side ? side_xs : xs);
      mbar_arrive(empty + slot);
      if (++slot == NS) { slot = 0; parity ^= 1; }
    }
    // The warps that shared the strips' inputs, in warp order; one warp in turn adds and writes, the others go on.
    const int buf = it & 1, phase = it >> 1 & 1;
    float* rb = red + buf * 8 * MS * 16;
    if (it >= 2) mbar_wait(rempty + buf, phase ^ 1);
#pragma unroll
    for (int ms = 0; ms < MS; ms++) {
      const float2 rows = w.sum(ms);
      if (p.t == 0) rb[(warp * MS + ms) * 16 + p.g] = rows.x, rb[(warp * MS + ms) * 16 + p.g + 8] = rows.y;
    }
    mbar_arrive(rfull + buf);
    if (turn != 0) continue;
    mbar_wait(rfull + buf, phase);
#pragma unroll 1
    for (int i = lane; i < run * 16; i += 32) {
      const int strip = i >> 4, m = (first + strip) * 16 + (i & 15);
      if (m >= (on_side ? side.m : a.m)) continue;
      if (i != lane) fetch_scales(on_side, e, m);
      auto sum = [&](int j) {  // of local strip j
        const float* at = rb + j * 16 + (i & 15);
        float r = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {  // all read at once
          const float part = at[(min(k, wk_n - 1) << lunit) * 16];
          r += k < wk_n ? part : 0.f;
        }
        return r * (on_side ? side_factor : factor);
      };
      float r = sum(strip) * scale_gate;
      if (gated) r = activate(a.activation, r) * (sum(strip + run) * scale_up);
      if (on_side) {
        ((float*)side.out)[(size_t)side_plane * side.ldo + m] = r;
      } else if (MODE == EXPERT_UP) {
        ((bf16*)a.out)[(size_t)e * a.ldo + m] = __float2bfloat16(weight == 0.f ? 0.f : weight * r);
      } else if (a.epilogue == OUT_F32) {
        if (a.softcap > 0.f) r = a.softcap * tanhf(r / a.softcap);
        ((float*)a.out)[(size_t)plane * a.ldo + m] = r;
      } else {
        if (a.epilogue == OUT_GATE_TIMES) r = activate(a.activation, r) * a.times[m];
        ((bf16*)a.out)[m] = __float2bfloat16(r);
      }
    }
    mbar_arrive(rempty + buf);
  }
}

// A form's kernels for one row: CW chunks a warp and stage, NS stages, for one strip a warp and for two; the router beside a product, and chosen experts.
#define ROW(NAME, F, CW, NS, MS)                                                                         \
  extern "C" __global__ void __launch_bounds__(288, 2) NAME(const __grid_constant__ SkinnyArgs a) {       \
    row_body<F, CW, NS, MS, DENSE>(a, blockIdx.x, gridDim.x, a, 0);                                       \
  }
#define ROW_AFTER(NAME, F, CW, NS, J)                                                                \
  extern "C" __global__ void __launch_bounds__(288, 2) NAME(const __grid_constant__ AfterArgs p) {    \
    row_body<F, CW, NS, 1, DENSE, J>(p.product, blockIdx.x, gridDim.x, p.product, 0, p.before);       \
  }
#define ROW_FORM(FORM, F, CW1, NS1, CW2, NS2) \
  ROW(skinny_##FORM##_r1, F, CW1, NS1, 1)     \
  ROW(skinny_##FORM##_r2, F, CW2, NS2, 2)
// The same with more stages.
#define ROW_DEEP(FORM, F, CW1, NS1, CW2, NS2)  \
  ROW(skinny_##FORM##_r1_deep, F, CW1, NS1, 1) \
  ROW(skinny_##FORM##_r2_deep, F, CW2, NS2, 2)
#define ROW_EXPERTS(FORM, F, CW, NS)                                                                                          \
  extern "C" __global__ void __launch_bounds__(288, 2) skinny_##FORM##_r_routed(const __grid_constant__ RoutedArgs p) {        \
    const int block = blockIdx.x, routers = p.router_blocks;                                                                   \
    if (block < routers) router_body(p.router, block, routers, sm);                                                            \
    else row_body<F, CW, NS, 1, DENSE>(p.product, block - routers, gridDim.x - routers, p.product, 0);                         \
  }                                                                                                                            \
  extern "C" __global__ void __launch_bounds__(288, 2) skinny_##FORM##_r_up(const __grid_constant__ UpArgs p) {                \
    row_body<F, CW, NS, 1, EXPERT_UP>(p.experts, blockIdx.x, gridDim.x, p.side, p.side_jobs);                                  \
  }                                                                                                                            \
  extern "C" __global__ void __launch_bounds__(288, 2) skinny_##FORM##_r_down(const __grid_constant__ SkinnyArgs a) {          \
    row_body<F, CW, NS, 1, EXPERT_DOWN>(a, blockIdx.x, gridDim.x, a, 0);                                                       \
  }
