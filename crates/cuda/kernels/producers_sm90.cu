// The small kernels between products: norms around the residual, head norms with rotation and KV write, router, arg max. Each makes in one go
// everything that the products after it read, because a dependent kernel costs 2 to 2.5 us however little it does.
//
// All may start while the kernel before ends (programmatic dependent launch): gains and router weights are fetched before
// griddepcontrol.wait, nothing else. Sums run in an order fixed by the shape. Traffic: inputs and outputs once.
#include <cooperative_groups.h>

#include "common/page.cuh"
namespace cg = cooperative_groups;

// ---- residual ----
// One block a row:
//   y = sum of the planes of y                              (none: v = x)
//   y = rms(y; inner) + rms(sum of the planes of z; z_gain)  with experts, then
//   v = (x + rms(y; post)) * scalar, stored as the residual
//   outs[i] = rms(v; gain_i) in bf16 or float32, or v itself in bf16
// Mirrored by ResidualArgs in src/kernels/producers.rs.
struct Branch {
  const float* p;        // [plane][rows][ld]
  const float* gain;
  uint64_t plane_stride;
  int planes, ld;        // 0 planes: absent
};
struct NormOut {
  void* p;
  const float* gain;     // null: no norm
  int ld, bf16_out;
};
struct ResidualArgs {
  float* x;
  Branch y, z;
  const float* post;
  NormOut outs[3];
  int ld_x, width, n_outs, store_x;
  float eps, scalar;
};

__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float dot4(float4 a) { return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; }
__device__ __forceinline__ float4 scale4(float4 a, float s, float4 g) { return make_float4(a.x * s * g.x, a.y * s * g.y, a.z * s * g.z, a.w * s * g.w); }
// Sums of N values over the block, the same bits in every thread.
template <int N> __device__ __forceinline__ void block_sums(float (&s)[N], float* red) {
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = warp_sum(s[i]);
  if ((threadIdx.x & 31) == 0)
#pragma unroll
    for (int i = 0; i < N; i++) red[i * 32 + warp] = s[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) {
    s[i] = 0;
    for (int w = 0; w < warps; w++) s[i] += red[i * 32 + w];
  }
  __syncthreads();
}

constexpr int RV = 2, RESIDUAL_THREADS = 704;  // float4 a thread: width <= 8 * threads
extern "C" __global__ void __launch_bounds__(RESIDUAL_THREADS) residual(const __grid_constant__ ResidualArgs a) {
  __shared__ float red[64];
  pdl_launch();
  const int r = blockIdx.x, n4 = a.width / 4;
  float4 gy[RV], gz[RV], gp[RV], go[3][RV];
  auto each = [&](auto f) {
#pragma unroll
    for (int j = 0; j < RV; j++) { const int i = threadIdx.x + j * blockDim.x; if (i < n4) f(j, i); }
  };
  each([&](int j, int i) {
    if (a.y.planes) { if (a.z.planes) gy[j] = ((const float4*)a.y.gain)[i]; gp[j] = ((const float4*)a.post)[i]; }
    if (a.z.planes) gz[j] = ((const float4*)a.z.gain)[i];
#pragma unroll
    for (int o = 0; o < 3; o++) if (o < a.n_outs && a.outs[o].gain) go[o][j] = ((const float4*)a.outs[o].gain)[i];
  });
  pdl_wait();
  float4 v[RV], x[RV], z[RV];
#pragma unroll
  for (int j = 0; j < RV; j++) v[j] = x[j] = z[j] = make_float4(0, 0, 0, 0);
  auto planes = [&](const Branch& b, int i) {
    float4 s = *(const float4*)(b.p + (size_t)r * b.ld + 4 * i);
    for (int p = 1; p < b.planes; p++) s = add4(s, *(const float4*)(b.p + p * b.plane_stride + (size_t)r * b.ld + 4 * i));
    return s;
  };
  each([&](int j, int i) {
    x[j] = *(const float4*)(a.x + (size_t)r * a.ld_x + 4 * i);
    if (a.y.planes) v[j] = planes(a.y, i);
    if (a.z.planes) z[j] = planes(a.z, i);
  });
  const float inv = 1.f / a.width;
  if (a.y.planes) {
    if (a.z.planes) {
      float s[2] = {};
      each([&](int j, int) { s[0] += dot4(v[j]); s[1] += dot4(z[j]); });
      block_sums(s, red);
      const float fy = 1.f / sqrtf(s[0] * inv + a.eps), fz = 1.f / sqrtf(s[1] * inv + a.eps);
      each([&](int j, int) { v[j] = add4(scale4(v[j], fy, gy[j]), scale4(z[j], fz, gz[j])); });
    }
    float s[1] = {};
    each([&](int j, int) { s[0] += dot4(v[j]); });
    block_sums(s, red);
    const float f = 1.f / sqrtf(s[0] * inv + a.eps);
    each([&](int j, int i) {
      const float4 w = add4(x[j], scale4(v[j], f, gp[j]));
      x[j] = make_float4(w.x * a.scalar, w.y * a.scalar, w.z * a.scalar, w.w * a.scalar);
      if (a.store_x) *(float4*)(a.x + (size_t)r * a.ld_x + 4 * i) = x[j];
    });
  }
  float s[1] = {};
  each([&](int j, int) { s[0] += dot4(x[j]); });
  block_sums(s, red);
  const float f = 1.f / sqrtf(s[0] * inv + a.eps);
#pragma unroll
  for (int o = 0; o < 3; o++) {
    if (o >= a.n_outs) break;
    const NormOut& out = a.outs[o];
    each([&](int j, int i) {
      const float4 w = out.gain ? scale4(x[j], f, go[o][j]) : x[j];
      const size_t at = (size_t)r * out.ld + 4 * i;
      if (out.bf16_out) *(uint2*)((bf16*)out.p + at) = make_uint2(pack_bf16x2(w.x, w.y), pack_bf16x2(w.z, w.w));
      else *(float4*)((float*)out.p + at) = w;
    });
  }
}

// ---- finish: q = rotate(norm(q)); k = rotate(norm(k)), v = norm(v) to their page ----
// One warp a head; grid (heads + 2 kv heads over 4, rows). A lane holds neighbours i of the first half and their partners i + D/2, four at a time.
// Mirrored by FinishArgs in src/kernels/producers.rs.
struct FinishArgs {
  float* qkv;            // [plane][rows][ld]; queries are stored back in place when store_q
  const float* rope;     // [rows][ld_rope]: cosines, sines
  uint8_t* kv;
  const float* q_gain;
  const float* k_gain;
  const int* cell;       // by batch row: page * 32 + position in it, negative for none
  const int* map;
  bf16* q;               // [rows][ld_q]
  uint64_t plane_stride;
  int planes, ld, ld_rope, ld_q, heads, kv_heads, values_are_keys, norm_values, store_q;
  float q_eps, k_eps, v_eps;
  float k_inverse, v_inverse;  // FP8: 1 / scale
};
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  return (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3) | (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3) << 16;
}
template <int D, bool FP8> __device__ __forceinline__ void finish_body(const FinishArgs& a) {
  constexpr int J = D / 256, HALF = D / 2;
  pdl_launch();
  const int lane = threadIdx.x & 31, h = blockIdx.x * 4 + (threadIdx.x >> 5), r = blockIdx.y;
  if (h >= a.heads + 2 * a.kv_heads) return;
  const bool query = h < a.heads, value = h >= a.heads + a.kv_heads;
  const int head = query ? h : value ? h - a.heads - a.kv_heads : h - a.heads;
  const int from = query ? head : a.heads + head + (value && !a.values_are_keys ? a.kv_heads : 0);
  float4 v[2][J], gain[2][J];
#pragma unroll
  for (int j = 0; j < J; j++)
#pragma unroll
    for (int s = 0; s < 2; s++) {
      gain[s][j] = make_float4(1, 1, 1, 1);
      if (!value) gain[s][j] = *(const float4*)((query ? a.q_gain : a.k_gain) + s * HALF + 4 * lane + 128 * j);
    }
  pdl_wait();
  float ss = 0;
#pragma unroll
  for (int j = 0; j < J; j++)
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const float* at = a.qkv + (size_t)r * a.ld + from * D + s * HALF + 4 * lane + 128 * j;
      v[s][j] = *(const float4*)at;
      for (int p = 1; p < a.planes; p++) { const float4 u = *(const float4*)(at + p * a.plane_stride); v[s][j].x += u.x; v[s][j].y += u.y; v[s][j].z += u.z; v[s][j].w += u.w; }
      ss += v[s][j].x * v[s][j].x + v[s][j].y * v[s][j].y + v[s][j].z * v[s][j].z + v[s][j].w * v[s][j].w;
    }
  if (!value || a.norm_values) {
    const float f = 1.f / sqrtf(warp_sum(ss) / D + (query ? a.q_eps : value ? a.v_eps : a.k_eps));
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
      for (int s = 0; s < 2; s++) { v[s][j].x *= f * gain[s][j].x; v[s][j].y *= f * gain[s][j].y; v[s][j].z *= f * gain[s][j].z; v[s][j].w *= f * gain[s][j].w; }
  }
  if (!value) {
#pragma unroll
    for (int j = 0; j < J; j++) {
      const float4 c = *(const float4*)(a.rope + (size_t)r * a.ld_rope + 4 * lane + 128 * j), s = *(const float4*)(a.rope + (size_t)r * a.ld_rope + HALF + 4 * lane + 128 * j);
      const float4 x = v[0][j], y = v[1][j];
      v[0][j] = make_float4(x.x * c.x - y.x * s.x, x.y * c.y - y.y * s.y, x.z * c.z - y.z * s.z, x.w * c.w - y.w * s.w);
      v[1][j] = make_float4(y.x * c.x + x.x * s.x, y.y * c.y + x.y * s.y, y.z * c.z + x.z * s.z, y.w * c.w + x.w * s.w);
    }
  }
  const int cell = query ? 0 : a.cell[a.map ? a.map[r] : r];
  if (cell < 0) return;
  uint8_t* half = a.kv + (((size_t)(cell / PAGE) * a.kv_heads + head) * 2 + value) * half_page<D, FP8>();
#pragma unroll
  for (int j = 0; j < J; j++)
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const int i = s * HALF + 4 * lane + 128 * j;
      const float4 w = v[s][j];
      const uint2 b = make_uint2(pack_bf16x2(w.x, w.y), pack_bf16x2(w.z, w.w));
      if (query) {
        *(uint2*)(a.q + (size_t)r * a.ld_q + head * D + i) = b;
        if (a.store_q) *(float4*)(a.qkv + (size_t)r * a.ld + head * D + i) = w;
      } else if (FP8) {
        const float f = value ? a.v_inverse : a.k_inverse;
        *(uint32_t*)(half + page_offset(cell % PAGE, D, i, 1)) = pack_e4m3(w.x * f, w.y * f, w.z * f, w.w * f);
      } else *(uint2*)(half + page_offset(cell % PAGE, D, i, 2)) = b;
    }
}
#define FINISH(NAME, D, FP8) \
  extern "C" __global__ void __launch_bounds__(128) NAME(const __grid_constant__ FinishArgs a) { finish_body<D, FP8>(a); }
FINISH(finish_256_bf16, 256, false)
FINISH(finish_512_bf16, 512, false)
FINISH(finish_256_fp8, 256, true)
FINISH(finish_512_fp8, 512, true)

// ---- router ----
// logits[r][e] = W_e x_r in float32; p = softmax; the top_k largest (ties: the lower id) in descending order, their weights divided by their sum,
// times the expert's scale; and the list of distinct experts, ids ascending, that the expert kernels read. One cluster of 8 blocks, a
// sixteenth of 128 experts each; logits meet in the first block's shared memory.
// Mirrored by RouterArgs in src/kernels/producers.rs.
struct RouterArgs {
  const void* w;               // [experts][width]
  const float* x;              // [rows][ld_x]
  const float* expert_scale;
  float* logits;               // [rows][experts]
  float* routes;               // [rows][2 top_k]
  int* groups;                 // count, ids
  float* group_weight;         // [group][16]
  int w_bf16, width, ld_x, rows, experts, top_k;
};
constexpr int MAX_EXPERTS = 128, MAX_ROWS = 16;
extern "C" __global__ void __launch_bounds__(256) __cluster_dims__(8, 1, 1) router(const __grid_constant__ RouterArgs a) {
  __shared__ float logits[MAX_ROWS][MAX_EXPERTS];
  __shared__ float weight[MAX_EXPERTS][MAX_ROWS];
  cg::cluster_group cl = cg::this_cluster();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = cl.block_rank();
  pdl_launch();
  const int e0 = rank * 16 + warp * 2, ws = a.w_bf16 ? 2 : 4;
  {  // the block's weights on their way before the kernel before has ended
    const char* from = (const char*)a.w + (size_t)rank * 16 * a.width * ws;
    const size_t bytes = (size_t)max(0, min(16, a.experts - rank * 16)) * a.width * ws;
    for (size_t i = (size_t)threadIdx.x * 128; i < bytes; i += 256 * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
  }
  cl.sync();  // every block of the cluster runs
  pdl_wait();
  float acc[2][MAX_ROWS] = {};
  if (e0 < a.experts) {
    const bool second = e0 + 1 < a.experts;
    for (int k = 4 * lane; k < a.width; k += 128) {
      float4 w[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const size_t at = (size_t)(e0 + (second ? j : 0)) * a.width + k;
        if (a.w_bf16) {
          const uint2 u = *(const uint2*)((const bf16*)a.w + at);
          w[j] = make_float4(__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xffff0000u), __uint_as_float(u.y << 16), __uint_as_float(u.y & 0xffff0000u));
        } else w[j] = *(const float4*)((const float*)a.w + at);
      }
#pragma unroll
      for (int r = 0; r < MAX_ROWS; r++) {
        if (r >= a.rows) break;
        const float4 x = *(const float4*)(a.x + (size_t)r * a.ld_x + k);
#pragma unroll
        for (int j = 0; j < 2; j++) acc[j][r] += w[j].x * x.x + w[j].y * x.y + w[j].z * x.z + w[j].w * x.w;
      }
    }
    float* there = cl.map_shared_rank(&logits[0][0], 0);
#pragma unroll
    for (int r = 0; r < MAX_ROWS; r++) {
      if (r >= a.rows) break;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float s = warp_sum(acc[j][r]);
        if (lane == 0 && e0 + j < a.experts) {
          there[r * MAX_EXPERTS + e0 + j] = s;
          a.logits[(size_t)r * a.experts + e0 + j] = s;
        }
      }
    }
  }
  cl.sync();
  if (rank != 0) return;
  for (int i = threadIdx.x; i < MAX_EXPERTS * MAX_ROWS; i += 256) (&weight[0][0])[i] = 0;
  __syncthreads();
  for (int r = warp; r < a.rows; r += 8) {
    float p[4], most = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int e = i * 32 + lane;
      p[i] = e < a.experts ? logits[r][e] : -INFINITY;
      most = fmaxf(most, p[i]);
    }
    for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
#pragma unroll
    for (int i = 0; i < 4; i++) { p[i] = expf(p[i] - most); sum += p[i]; }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] /= sum;
    float total = 0, mine = 0;
    int my_id = 0;
    for (int k = 0; k < a.top_k; k++) {
      // The largest, of equals the lowest id; what is not a number counts as least, so ids are valid whatever comes in.
      float best = -2.f;
      int id = MAX_EXPERTS;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = i * 32 + lane;
        const float v = e >= a.experts ? -3.f : p[i] >= 0.f ? p[i] : p[i] < -1.5f ? -3.f : -1.f;
        if (v > best) { best = v; id = e; }
      }
      for (int o = 16; o; o >>= 1) {
        const float v = __shfl_xor_sync(~0u, best, o);
        const int e = __shfl_xor_sync(~0u, id, o);
        if (v > best || (v == best && e < id)) { best = v; id = e; }
      }
      float p_best = __shfl_sync(~0u, id < 32 ? p[0] : id < 64 ? p[1] : id < 96 ? p[2] : p[3], id & 31);
#pragma unroll
      for (int i = 0; i < 4; i++) if (i * 32 + lane == id) p[i] = -2.f;  // taken
      total += p_best;
      if (lane == k) { mine = p_best; my_id = id; }
    }
    if (lane < a.top_k) {
      const float w = mine / total * a.expert_scale[my_id];
      a.routes[(size_t)r * 2 * a.top_k + lane] = (float)my_id;
      a.routes[(size_t)r * 2 * a.top_k + a.top_k + lane] = w;
      weight[my_id][r] = w;
      logits[r][lane] = __int_as_float(my_id);
    }
  }
  __shared__ int chosen[MAX_EXPERTS], counts[4];
  if (threadIdx.x < MAX_EXPERTS) chosen[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < a.rows * a.top_k; i += 256) chosen[__float_as_int(logits[i / a.top_k][i % a.top_k])] = 1;
  __syncthreads();
  if (warp < 4) {
    const unsigned votes = __ballot_sync(~0u, chosen[threadIdx.x]);
    if (lane == 0) counts[warp] = __popc(votes);
  }
  __syncthreads();
  if (warp < 4) {
    const unsigned votes = __ballot_sync(~0u, chosen[threadIdx.x]);
    int at = __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < warp; w++) at += counts[w];
    if (chosen[threadIdx.x]) {
      a.groups[1 + at] = threadIdx.x;
      for (int r = 0; r < MAX_ROWS; r++) a.group_weight[at * MAX_ROWS + r] = weight[threadIdx.x][r];
    }
    if (threadIdx.x == 0) a.groups[0] = counts[0] + counts[1] + counts[2] + counts[3];
  }
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
  int ld, vocab;
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
  if (threadIdx.x == 0) a.out[r] = bad ? -1 : id;
}
