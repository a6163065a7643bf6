// The small kernels between products: norms around the residual, head norms with rotation and KV write, router, arg max. Each makes in one go
// everything that the products after it read, because a dependent kernel costs 2 to 2.5 us however little it does.
//
// All may start while the kernel before ends (programmatic dependent launch): gains and router weights are fetched before
// griddepcontrol.wait, nothing else. Sums run in an order fixed by the shape. Traffic: inputs and outputs once.
#include <cooperative_groups.h>

#include "common/heads.cuh"
#include "common/router.cuh"
namespace cg = cooperative_groups;

// ---- residual ----
// A row:
//   y = sum of the planes of y                              (none: v = x)
//   y = rms(y; inner) + rms(sum of the planes of z; z_gain)  with experts, then
//   v = (x + rms(y; post)) * scalar, stored as the residual
//   outs[i] = rms(v; gain_i) in bf16 or float32, or v itself in bf16
// Mirrored by ResidualArgs in src/kernels/producers.rs.
struct ResidualArgs {
  const float* x;
  float* x_out;          // x, or where it goes on
  Branch y, z;
  const float* post;
  NormOut outs[3];
  int ld_x, width, n_outs, pad;
  float eps, scalar;
};

// One cluster of 8 blocks a row: a single multiprocessor reads 150 KB of planes and gains at 64 bytes a clock, 1.3 us by itself (31B with two
// branches took 5.7 us so). A thread has four values.
constexpr int CLUSTER = ROW_CLUSTER;
// Sums of N values over the row, the same bits in every thread. Every warp leaves its part in all blocks of the cluster; `red` is used by no other call.
template <int N> __device__ __forceinline__ void row_sums(cg::cluster_group& cl, float (&s)[N], float* red) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, all = (blockDim.x >> 5) * CLUSTER, rank = cl.block_rank();
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = part_sum(s[i]);
  if (lane < CLUSTER) {
    float* there = cl.map_shared_rank(red, lane);
#pragma unroll
    for (int i = 0; i < N; i++) there[i * 64 + warp * CLUSTER + rank] = s[i];
  }
  cl.sync();
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = warp_sum((lane < all ? red[i * 64 + lane] : 0.f) + (lane + 32 < all ? red[i * 64 + lane + 32] : 0.f));
}

extern "C" __global__ void __launch_bounds__(256) residual(const __grid_constant__ ResidualArgs a) {
  __shared__ float red[4 * 64];
  cg::cluster_group cl = cg::this_cluster();
  cl.barrier_arrive();  // waited for before the first write into a peer
  pdl_launch();
  const int r = blockIdx.y, at = 4 * ((int)cl.block_rank() * blockDim.x + threadIdx.x);
  const bool on = at < a.width, y_on = a.y.planes, z_on = a.z.planes;
  const float4 none = make_float4(0, 0, 0, 0);
  auto gain = [&](const float* g, bool want) { return on && want ? *(const float4*)(g + at) : none; };
  const float4 gy = gain(a.y.gain, y_on && z_on), gz = gain(a.z.gain, z_on), gp = gain(a.post, y_on);
  float4 go[3];
#pragma unroll
  for (int o = 0; o < 3; o++) go[o] = gain(a.outs[o].gain, o < a.n_outs && a.outs[o].gain);
  pdl_wait();
  auto planes = [&](const Branch& b) {
    float4 s[3];  // all on their way before the first is added
#pragma unroll
    for (int p = 0; p < 3; p++) s[p] = on && p < b.planes ? *(const float4*)(b.p + p * b.plane_stride + (size_t)r * b.ld + at) : none;
    return add4(add4(s[0], s[1]), s[2]);
  };
  float4 x = on ? *(const float4*)(a.x + (size_t)r * a.ld_x + at) : none, v = planes(a.y);
  const float4 z = planes(a.z);
  cl.barrier_wait();
  const float inv = 1.f / a.width;
  if (y_on) {
    if (z_on) {
      float s[2] = {dot4(v), dot4(z)};
      row_sums(cl, s, red);  // 0 and 1
      v = add4(scale4(v, rms_factor(s[0], inv, a.eps), gy), scale4(z, rms_factor(s[1], inv, a.eps), gz));
    }
    float s[1] = {dot4(v)};
    row_sums(cl, s, red + 128);
    x = join4(x, v, rms_factor(s[0], inv, a.eps), gp, a.scalar);
    if (on) *(float4*)(a.x_out + (size_t)r * a.ld_x + at) = x;
  }
  float s[1] = {dot4(x)};
  row_sums(cl, s, red + 192);
  if (!on) return;
  const float f = rms_factor(s[0], inv, a.eps);
#pragma unroll
  for (int o = 0; o < 3; o++) {
    if (o >= a.n_outs) break;
    const NormOut& out = a.outs[o];
    const float4 w = out.gain ? scale4(x, f, go[o]) : x;
    const size_t to = (size_t)r * out.ld + at;
    if (out.bf16_out) *(uint2*)((bf16*)out.p + to) = make_uint2(pack_bf16x2(w.x, w.y), pack_bf16x2(w.z, w.w));
    else *(float4*)((float*)out.p + to) = w;
  }
}

// ---- finish: q = rotate(norm(q)); k = rotate(norm(k)), v = norm(v) to their page ----
// One warp a head; grid (heads + 2 kv heads over 4, rows). Attention does the same by itself where it can (attn_decode_sm90.cu).
// Mirrored by FinishArgs in src/kernels/producers.rs.
struct FinishArgs {
  HeadsArgs of;          // queries are stored back in place of the first plane when store_q
  uint8_t* kv;
  const int* map;
  bf16* q;               // [rows][ld_q]
  int ld_q, store_q;
};
template <int D, bool FP8> __device__ __forceinline__ void finish_body(const FinishArgs& a) {
  constexpr int J = D / 256;
  pdl_launch();
  const HeadsArgs& of = a.of;
  const int lane = threadIdx.x & 31, h = blockIdx.x * 4 + (threadIdx.x >> 5), r = blockIdx.y;
  if (h >= of.heads + 2 * of.kv_heads) return;
  const HeadKind kind = h < of.heads ? QUERY : h < of.heads + of.kv_heads ? KEY : VALUE;
  const int head = kind == QUERY ? h : kind == KEY ? h - of.heads : h - of.heads - of.kv_heads;
  const int from = kind == QUERY ? head : of.heads + head + (kind == VALUE && !of.values_are_keys ? of.kv_heads : 0);
  float4 gain[2][J] = {}, rope[2][J] = {};
  if (kind != VALUE) head_places<D>(gain, kind == QUERY ? of.q_gain : of.k_gain, lane);
  pdl_wait();
  Head<D> v;
  v.load(of, r, from, lane);
  if (kind != VALUE) head_places<D>(rope, of.rope + (size_t)r * of.ld_rope, lane);
  v.finish(of, kind, gain, rope);
  const int cell = kind == QUERY ? 0 : of.cell[a.map ? a.map[r] : r];
  if (cell < 0) return;
  uint8_t* half = a.kv + (((size_t)(cell / PAGE) * of.kv_heads + head) * 2 + (kind == VALUE)) * half_page<D, FP8>();
#pragma unroll
  for (int j = 0; j < J; j++)
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const int i = Head<D>::at(s, j, lane);
      if (kind == QUERY) {
        *(uint2*)(a.q + (size_t)r * a.ld_q + head * D + i) = v.rounded(s, j);
        if (a.store_q) *(float4*)(of.qkv + (size_t)r * of.ld + head * D + i) = v.p[0][s][j];
      } else if (FP8) *(uint32_t*)(half + page_offset(cell % PAGE, D, i, 1)) = v.rounded_fp8(s, j, kind == VALUE ? of.v_inverse : of.k_inverse);
      else *(uint2*)(half + page_offset(cell % PAGE, D, i, 2)) = v.rounded(s, j);
    }
}
#define FINISH(NAME, D, FP8) \
  extern "C" __global__ void __launch_bounds__(128) NAME(const __grid_constant__ FinishArgs a) { finish_body<D, FP8>(a); }
FINISH(finish_256_bf16, 256, false)
FINISH(finish_512_bf16, 512, false)
FINISH(finish_256_fp8, 256, true)
FINISH(finish_512_fp8, 512, true)

// ---- router ----
extern "C" __global__ void __launch_bounds__(256) router(const __grid_constant__ RouterArgs a) {
  extern __shared__ __align__(128) uint8_t sm[];
  router_body(a, blockIdx.x, gridDim.x, sm);
}

// ---- arg max ----
// The largest logit of a row (ties: the lower id), -1 when any is not finite. Grid (blocks, rows); the last block of a row to finish compares
// the blocks' results. Mirrored by ArgmaxArgs in src/kernels/producers.rs.
struct ArgmaxArgs {
  const float* logits;   // [rows][ld]
  int* out;
  float* best;           // [rows][blocks]
  int* best_id;          // [rows][blocks], -1 for a part that is not finite
  unsigned* counters;    // [rows], zero between launches
  int* told;             // pinned host memory, [turn][told_rows]: the same for the host; or null
  const int* turn;
  int ld, vocab, told_rows;
};
extern "C" __global__ void __launch_bounds__(256) argmax(const __grid_constant__ ArgmaxArgs a) {
  __shared__ float values[8];
  __shared__ int ids[8];
  __shared__ bool last;
  pdl_launch();
  pdl_wait();
  const int r = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = gridDim.x;
  const float* row = a.logits + (size_t)r * a.ld;
  float best = -INFINITY;
  int id = 0x7fffffff;
  bool bad = false;
  auto merge = [](float& best, int& id, float v, int e) { if (v > best || (v == best && e < id)) { best = v; id = e; } };
  auto reduce = [&]() {
    for (int o = 16; o; o >>= 1) {
      const float v = __shfl_xor_sync(~0u, best, o);
      const int e = __shfl_xor_sync(~0u, id, o);
      merge(best, id, v, e);
    }
    if (lane == 0) { values[warp] = best; ids[warp] = id; }
    __syncthreads();
    if (threadIdx.x == 0) for (int w = 1; w < 8; w++) merge(best, id, values[w], ids[w]);
  };
  for (int i = blockIdx.x * 256 + threadIdx.x; i < a.vocab; i += blocks * 256) {
    const float v = row[i];
    bad |= !isfinite(v);
    if (v > best) { best = v; id = i; }
  }
  bad = __syncthreads_or(bad);
  reduce();
  if (threadIdx.x == 0) {
    a.best[r * blocks + blockIdx.x] = best;
    a.best_id[r * blocks + blockIdx.x] = bad ? -1 : id;
    __threadfence();
    last = atomicAdd(a.counters + r, 1) + 1 == (unsigned)blocks;
    if (last) a.counters[r] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  best = -INFINITY;
  id = 0x7fffffff;
  bad = false;
  for (int i = threadIdx.x; i < blocks; i += 256) {
    const int e = __ldcg(a.best_id + r * blocks + i);
    bad |= e < 0;
    merge(best, id, __ldcg(a.best + r * blocks + i), e);
  }
  bad = __syncthreads_or(bad);
  reduce();
  if (threadIdx.x == 0) {
    a.out[r] = bad ? -1 : id;
    if (a.told) a.told[*a.turn * a.told_rows + r] = bad ? -1 : id;
  }
}
