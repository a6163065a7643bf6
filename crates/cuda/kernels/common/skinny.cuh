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
//   EXPERT_UP      groups of strips by the list of chosen experts, gated; out[group][n] = weight[group][n] * f(gate) * up, zero where row n did not
//                  choose the group's expert. All rows are columns of every group: they are free.
//   EXPERT_DOWN    x[group][n]; the sum runs over k and over the groups, so out[n] is the weighted sum over the experts
//
// Traffic: the packed weights once, x from L2 once a block, the outputs. Times and shares of the read ceiling: docs/cuda-prototypes.md and
// docs/performance.md. Tried and dropped: stream-K with a fix-up by the last block (4 to 12 us on small matrices), a ring a warp, cp.async in
// place of bulk copies (31B head bf16 85 against 101 %), a block barrier for the sums, 16 consumer warps, three blocks a multiprocessor.
#pragma once
#include "forms.cuh"

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
  int scale_rows;             // EXPERT_DOWN with row scales: groups whose scales fit shared memory
  float softcap;              // OUT_F32: c tanh(sum / c), 0 for none
};

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// u / d for a divisor whose reciprocal the host knows: exact for u * d < 2^31. Integer division costs 40 cycles and more, and what stands
// before the first copy is paid by every kernel.
__device__ __forceinline__ int divide(int u, uint32_t magic) { return magic ? (int)__umulhi((uint32_t)u, magic) : u; }

// Beyond the ring: scratch of the forms with headers, the warps' sums (two buffers), barriers; then x when it is kept here.
template <class F, int CW, int NS, int MS, int NT> __host__ __device__ constexpr int skinny_smem() {
  return NS * 8 * CW * MS * F::CB + 8 * MS * F::SCRATCH + 2 * 8 * MS * NT * 512 + (2 * NS + 4) * 8;
}

template <class F, int CW, int NS, int MS, int NT, bool XS, Mode MODE> __device__ __forceinline__ void skinny_body(const SkinnyArgs& a) {
  constexpr int STAGE = 8 * CW * MS * F::CB, PIECES = F::KC / 64, SETS = MS * NT == 1 ? 2 : 1;  // two sets of sums where one would be a chain
  extern __shared__ __align__(128) uint8_t sm[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float* scratch = (float*)(sm + NS * STAGE + warp * MS * F::SCRATCH);
  float* red = (float*)(sm + NS * STAGE + 8 * MS * F::SCRATCH);
  uint64_t* full = (uint64_t*)(red + 2 * 8 * MS * NT * 128);
  uint64_t* empty = full + NS;
  uint64_t *rfull = empty + NS, *rempty = rfull + 2;  // the two buffers in which warps leave their sums
  const bool gated = MODE == EXPERT_UP || (MODE == DENSE && a.epilogue == OUT_GATED);
  const int reducers = min(a.rows, 8);                // warps that add them up and write the outputs
  const int lwk = 3 - a.lwm, wk_n = 1 << lwk, cps = CW << lwk;  // cps: chunks a stage holds of each strip
  const int lunit = a.lwm + (MS == 2), unit_strips = 1 << lunit;
  // A unit is unit_strips strips; when gated, the second half of them are the up strips that belong to the first.
  const int lrun = gated ? lunit - 1 : lunit, run = 1 << lrun, total = a.strips, per_group = a.per_group;
  auto strip_of = [&](int first, int j) { return gated && j >= run ? total + first + j - run : first + j; };
  const int plane = blockIdx.y, u0 = blockIdx.x, ustep = gridDim.x;
  auto cut_of = [&](int chunks) { return MODE != EXPERT_DOWN ? a.cut : a.planes == 1 ? chunks : a.planes == 2 ? (chunks + 1) >> 1 : (chunks + 2) / 3; };
  if (threadIdx.x == 256) {
    for (int i = 0; i < NS; i++) { mbar_init(full + i, 1); mbar_init(empty + i, 8); }
    for (int i = 0; i < 2; i++) { mbar_init(rfull + i, 256); mbar_init(rempty + i, reducers); }
    fence_barrier_init();
    fence_proxy_async();
  }
  __syncthreads();
  pdl_launch();

  if (warp == 8) {  // the producer: one lane asks for every stage, weights only, so it waits for no kernel (but for expert ids)
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
      for (int i = 0; i < 4; i++) { int v = __shfl_sync(~0u, my_id[i], e & 31); if (e >> 5 == i) id = v; }
      return id;
    };
    const int units = per_group * (MODE == EXPERT_UP ? n_groups : 1);
    const int chunks = a.chunks * (MODE == EXPERT_DOWN ? n_groups : 1), cut = cut_of(chunks), c0 = min(plane * cut, chunks), c1 = min(c0 + cut, chunks);
    int slot = 0, parity = 1;
    for (int u = u0; u < units; u += ustep) {
      const int e = MODE == EXPERT_UP ? divide(u, a.magic_group) : 0, first = (u - e * per_group) << lrun;
      const int n = min(run, total - first);  // strips of each run that exist
      const uint8_t* src = a.w;
      if (MODE == EXPERT_UP) src += id_of(e) * a.group_bytes;
      for (int c = c0; c < c1; c += cps) {
        const int have = min(cps, c1 - c);
        if (lane == 0) {
          mbar_wait(empty + slot, parity);
          mbar_expect(full + slot, have * F::CB * (gated ? 2 * n : n));
        }
        if (MODE == EXPERT_DOWN) {  // the stage's chunks may belong to several experts
          for (int done = 0; done < have;) {
            const int v = divide(c + done, a.magic_chunks), at = c + done - v * a.chunks, take = min(have - done, a.chunks - at);
            const uint8_t* from = a.w + id_of(v) * a.group_bytes + (size_t)at * F::CB;
            if (lane == 0)
              for (int i = 0; i < n; i++) bulk_load(sm + slot * STAGE + (i * cps + done) * F::CB, from + (first + i) * a.strip_bytes, take * F::CB, full + slot);
            done += take;
          }
        } else if (lane == 0) {
          for (int i = 0; i < unit_strips; i++) {
            if ((i >= run ? i - run : i) >= n) continue;
            bulk_load(sm + slot * STAGE + i * cps * F::CB, src + strip_of(first, i) * a.strip_bytes + (size_t)c * F::CB, have * F::CB, full + slot);
          }
        }
        __syncwarp();
        if (++slot == NS) { slot = 0; parity ^= 1; }
      }
    }
    return;
  }

  // A reducing thread's first output of unit u: its row scales are asked for at the start of the unit (of the first one before the kernel before has
  // ended: they are weights, and far away).
  float scale_gate = 1, scale_up = 1;
  int* ids = (int*)(sm + skinny_smem<F, CW, NS, MS, NT>());  // experts: ids, then EXPERT_UP the weights, EXPERT_DOWN row scales
  float* group_weight = (float*)(ids + MAX_GROUPS);
  auto fetch_scales = [&](int u, int it) {
    if (MODE == EXPERT_DOWN || !a.row_scale) return;
    const int e = MODE == EXPERT_UP ? divide(u, a.magic_group) : 0, first = (u - e * per_group) << lrun;
    const int i = ((warp - it) & 7) * 32 + lane, m = (first + ((i >> 4) & (run - 1))) * 16 + (i & 15);
    if (m >= a.m) return;
    const float* at = a.row_scale + (MODE == EXPERT_UP ? (size_t)ids[e] * a.m * 2 : 0) + m;
    scale_gate = __ldg(at);
    if (gated) scale_up = __ldg(at + a.m);
  };
  if (MODE == DENSE && u0 < per_group) fetch_scales(u0, 0);
  pdl_wait();
  int n_groups = 1;
  if (MODE != DENSE) {  // one round trip for everything that the list says
    n_groups = __ldcg(a.groups);
    if (threadIdx.x < MAX_GROUPS) ids[threadIdx.x] = __ldcg(a.groups + 1 + threadIdx.x);
    if (MODE == EXPERT_UP)
      for (int i = threadIdx.x; i < MAX_GROUPS * 4; i += 256) ((float4*)group_weight)[i] = __ldcg((const float4*)a.group_weight + i);
    consumers_sync();
  }
  const int units = per_group * (MODE == EXPERT_UP ? n_groups : 1);
  const int chunks = a.chunks * (MODE == EXPERT_DOWN ? n_groups : 1), cut = cut_of(chunks), c0 = min(plane * cut, chunks), c1 = min(c0 + cut, chunks);
  bf16* xs = (bf16*)(sm + skinny_smem<F, CW, NS, MS, NT>() + (MODE == EXPERT_UP ? MAX_GROUPS * 68 : 0));
  const int kx0 = c0 * F::KC, kx = (c1 - c0) * F::KC, stride = XS ? kx + 8 : a.ldx;
  if (XS) {  // rows padded by 16 bytes, so that eight rows' reads fall into different banks; inputs beyond k are zero
    const int n = kx / 8, all = a.rows * n;
    for (int i0 = threadIdx.x; i0 < all; i0 += 8 * 256) {  // eight loads in flight: one at a time costs 0.3 us each
      uint4 v[8];
      int at[8];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int i = i0 + j * 256, r = a.rows == 1 ? 0 : i / n, k = (i - r * n) * 8;
        at[j] = i < all ? r * stride + k : -1;
        v[j] = make_uint4(0, 0, 0, 0);
        if (i < all && kx0 + k < a.k) v[j] = *(const uint4*)(a.x + (size_t)r * a.ldx + kx0 + k);
      }
#pragma unroll
      for (int j = 0; j < 8; j++) if (at[j] >= 0) *(uint4*)(xs + at[j]) = prescale<F>(v[j]);
    }
    consumers_sync();
  }
  const int wm = warp & ((1 << a.lwm) - 1), wk = warp >> a.lwm;
  const bf16* xr[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) {  // columns beyond the rows repeat the last row: no column touches another
    const int row = min(n * 8 + g, a.rows - 1);
    xr[n] = XS ? xs + row * stride - kx0 : a.x + (size_t)row * stride;
  }
  auto x_at = [&](int n, int c) {  // the inputs of chunk c, which in EXPERT_DOWN counts on through the groups
    if (MODE != EXPERT_DOWN) return xr[n] + c * F::KC;
    const int v = divide(c, a.magic_chunks);
    return xr[n] + v * a.rows * stride + (c - v * a.chunks) * F::KC;
  };
  int slot = 0, parity = 0, it = 0;
  for (int u = u0; u < units; u += ustep, it++) {
    const int e = MODE == EXPERT_UP ? divide(u, a.magic_group) : 0, first = (u - e * per_group) << lrun;
    if (MODE != DENSE || it) fetch_scales(u, it);
    float acc[SETS][MS][NT][4] = {};
    constexpr bool AHEAD = !XS && PIECES == 1;  // x from global memory is asked for one chunk ahead
    uint32_t bx[NT][8];
    if (AHEAD) {
#pragma unroll
      for (int n = 0; n < NT; n++) load_x<F, XS>(bx[n], x_at(n, min(c0 + wk, c1 - 1)), t);
    }
    // EXPERT_DOWN with row scales: the sums of every chunk are scaled by its expert's, which are brought here first: [group][rows of the unit].
    const bool scaled_down = MODE == EXPERT_DOWN && a.row_scale;
    const float* scales = group_weight + (it & 1) * (a.scale_rows << (lunit + 4)) + (wm * MS * 16 + g);
    if (scaled_down) {
      float* to = group_weight + (it & 1) * (a.scale_rows << (lunit + 4));
      for (int i = threadIdx.x; i < n_groups << (lunit + 4); i += 256) {
        const int m = first * 16 + (i & ((16 << lunit) - 1));
        to[i] = m < a.m ? __ldg(a.row_scale + (size_t)ids[i >> (lunit + 4)] * a.m + m) : 0.f;
      }
      consumers_sync();
    }
    for (int c = c0; c < c1; c += cps) {
      const int mine = (min(cps, c1 - c) - wk + wk_n - 1) >> lwk;  // this warp's chunks of the stage: wk, wk + wk_n, ...
      const uint8_t* ch = sm + slot * STAGE + (wm * MS * cps + wk) * F::CB;
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
          const float* d = scales + (divide(ck, a.magic_chunks) << (lunit + 4));
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
      if (lane == 0) mbar_arrive(empty + slot);
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
    mbar_arrive(rfull + buf);  // every lane for itself: racecheck does not follow a warp's writes through one lane's arrival
    const int turn = (warp - it) & 7;
    if (turn >= reducers) continue;
    mbar_wait(rfull + buf, phase);
    const int mine = turn * 32 + lane;
    for (int i = mine; i < (run * 16) * a.rows; i += reducers * 32) {
      const int row = i & 15, strip = (i >> 4) & (run - 1), col = i >> (4 + lrun), m = (first + strip) * 16 + row;
      if (m >= a.m) continue;
      if (i != mine && a.row_scale && MODE != EXPERT_DOWN) {
        const float* at = a.row_scale + (MODE == EXPERT_UP ? (size_t)ids[e] * a.m * 2 : 0) + m;
        scale_gate = __ldg(at);
        if (gated) scale_up = __ldg(at + a.m);
      }
      auto sum = [&](int j) {  // of local strip j
        const float* at = rb + j * NT * 128 + (col >> 3) * 128 + ((row & 7) * 4 + (col & 7) / 2) * 4 + (row >> 3) * 2 + (col & 1);
        float s = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) if (w < wk_n) s += at[(w << lunit) * NT * 128];
        return s * F::POST;
      };
      float v = sum(strip) * scale_gate;
      if (gated) v = activate(a.activation, v) * (sum(strip + run) * scale_up);
      if (MODE == EXPERT_UP) {
        const float w = group_weight[e * 16 + col];
        ((bf16*)a.out)[(size_t)(e * a.rows + col) * a.ldo + m] = __float2bfloat16(w == 0.f ? 0.f : w * v);
      } else if (a.epilogue == OUT_F32) {
        if (a.softcap > 0.f) v = a.softcap * tanhf(v / a.softcap);
        ((float*)a.out)[(size_t)(plane * a.rows + col) * a.ldo + m] = v;
      } else {
        if (a.epilogue == OUT_GATE_TIMES) v = activate(a.activation, v) * a.times[(size_t)col * a.ld_times + m];
        ((bf16*)a.out)[(size_t)col * a.ldo + m] = __float2bfloat16(v);
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(rempty + buf);
  }
}

// One entry of a form's table. NAME: skinny_FORM_n{NT}_{g|s}{MS}, or _up / _ups (x in shared memory) / _down for experts.
#define SKINNY(NAME, F, CW, NS, MS, NT, XS, MODE)                                                                    \
  extern "C" __global__ void __launch_bounds__(288, 2) NAME(const __grid_constant__ SkinnyArgs a) {                   \
    skinny_body<F, CW, NS, MS, NT, XS, MODE>(a);                                                                      \
  }
// A form's kernels: CW chunks a warp and stage, NS stages. g: x from global memory, s: from shared; then the strips of a warp.
#define SKINNY_FORM(FORM, F, CW, NS)                                   \
  SKINNY(skinny_##FORM##_n1_g1, F, CW, NS, 1, 1, false, DENSE)         \
  SKINNY(skinny_##FORM##_n1_s1, F, CW, NS, 1, 1, true, DENSE)          \
  SKINNY(skinny_##FORM##_n2_g1, F, CW, NS, 1, 2, false, DENSE)         \
  SKINNY(skinny_##FORM##_n1_up, F, CW, NS, 1, 1, false, EXPERT_UP)     \
  SKINNY(skinny_##FORM##_n1_ups, F, CW, NS, 1, 1, true, EXPERT_UP)     \
  SKINNY(skinny_##FORM##_n2_up, F, CW, NS, 1, 2, false, EXPERT_UP)     \
  SKINNY(skinny_##FORM##_n1_down, F, CW, NS, 1, 1, false, EXPERT_DOWN) \
  SKINNY(skinny_##FORM##_n2_down, F, CW, NS, 1, 2, false, EXPERT_DOWN)
// Two strips a warp, which halves the reads of x.
#define SKINNY_TWO_STRIPS(FORM, F, CW, NS)                    \
  SKINNY(skinny_##FORM##_n1_s2, F, CW, NS, 2, 1, true, DENSE)  \
  SKINNY(skinny_##FORM##_n1_g2, F, CW, NS, 2, 1, false, DENSE) \
  SKINNY(skinny_##FORM##_n2_g2, F, CW, NS, 2, 2, false, DENSE)
