// The per-layer branch of one row in one kernel (Gemma 3n's and 4's small models):
//   x1 = x + rms(sum of the planes of y; post)
//   h  = f(W_gate x1) * inputs[layer]                        256 wide
//   x  = (x1 + rms(W_proj h; close)) * scalar                stored as the residual
//   outs = rms(x; their one gain) in bf16 or float32         the next layer's input, or the head's and what is told of it
// Apart these are four kernels of 2 to 2.5 us each, whatever they read.
//
// One cluster of 16 blocks. Block b multiplies strip b of the gate (256 outputs are 16 strips) and n = ceil(strips / 16) strips of the projection;
// both are copied to its shared memory before the kernel before has ended, if that leaves room beside its blocks. Every block norms the row for itself.
// h, which all need whole, and the sums of squares of the two norms behind it are stored into the other blocks' shared memory and counted there by an mbarrier
// each: a barrier of the cluster would wait for everything else that its threads have stored as well. The products are those of forms.cuh with the row
// in all eight columns; x1 and h are rounded to bf16 as inputs of the products, nothing else is rounded.
// The last norm adds up in the order of residual.cuh, for where the residual is steered it is another kernel's work.
//
// Traffic: both matrices once, x and y from L2 once a block.
#include <cooperative_groups.h>

#include "common/forms.cuh"
#include "common/residual.cuh"
namespace cg = cooperative_groups;

constexpr int BLOCKS = 16, WIDTH = 256;
constexpr int J = 3;       // fours of a thread's part of the row, which is up to 3072 wide
constexpr int OWN_J = 2;   // fours of outputs of a lane, of up to 192 a block
constexpr int OWN_S = 2;   // strips of a warp

// Mirrored by PerLayerArgs in src/kernels/per_layer.rs.
struct PerLayerArgs {
  const float* x;
  float* x_out;
  Branch y;
  const float* post;
  const uint8_t* gate;
  const uint8_t* proj;
  const float* gate_scale;  // by output, or null
  const float* proj_scale;
  const float* times;       // this layer's 256
  const float* close;
  NormOut outs[2];          // with one gain
  uint64_t gate_strip_bytes, proj_strip_bytes;
  int width, gate_chunks, proj_chunks, strips, activation, n_outs;  // strips: of the projection
  float post_eps, close_eps, out_eps, scalar;
};

// Where `local` of this block lies in block `rank` of the cluster.
__device__ __forceinline__ uint32_t peer(const void* local, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_addr(local)), "r"(rank));
  return there;
}
// Stores to a peer, counted in bytes by its mbarrier.
__device__ __forceinline__ void send(uint32_t to, float v, uint32_t bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v), "r"(bar) : "memory");
}
__device__ __forceinline__ void send(uint32_t to, uint4 v, uint32_t bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar)
               : "memory");
}

template <class F> __device__ __forceinline__ void per_layer_body(const PerLayerArgs& a) {
  constexpr int PIECES = F::KC / 64;
  extern __shared__ __align__(128) uint8_t sm[];
  cg::cluster_group cl = cg::this_cluster();
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, rank = cl.block_rank();
  const int per = (a.strips + BLOCKS - 1) / BLOCKS, s0 = min(rank * per, a.strips), mine = min(per, a.strips - s0);
  const uint32_t gate_bytes = (uint32_t)a.gate_strip_bytes, proj_bytes = (uint32_t)a.proj_strip_bytes;
  const int warps = row_warps(a.width), all_strips = warps * ROW_CLUSTER * 8;
  uint8_t* gate = sm;
  uint8_t* proj = gate + gate_bytes;
  float* scratch = (float*)(proj + per * proj_bytes) + warp * 256;  // [8][256]
  float* red = (float*)(proj + per * proj_bytes) + 8 * 256;         // [8][16]
  float* norm = red + 8 * 16;                                       // [8]
  float* part = norm + 8;                                           // by block
  float* strip = part + BLOCKS;                                     // [all_strips]: sums of squares of 16 values, zero beyond the width
  float* x_own = strip + all_strips;                                // [per][16]
  float* y_own = x_own + per * 16;
  bf16* hs = (bf16*)(y_own + per * 16);                             // [WIDTH]
  bf16* xs = hs + WIDTH;                                            // [width]
  __shared__ uint64_t full[2], there[3];                            // weights; h, sums, sums of strips from all blocks

  // Gains and scales: the whole row of the first norm, this block's outputs of the rest. Asked for before the copies, which they would wait behind.
  const float4 none = make_float4(0, 0, 0, 0);
  float4 gp[J];
#pragma unroll
  for (int j = 0; j < J; j++) {
    const int at = 4 * (tid + 256 * j);
    gp[j] = none;
    if (at < a.width) gp[j] = *(const float4*)(a.post + at);
  }
  const int base = s0 * 16, outputs = min(mine * 16, a.width - base);
  const bool normed = a.n_outs && a.outs[0].gain;
  float4 gc[OWN_J], go[OWN_J];
#pragma unroll
  for (int j = 0; j < OWN_J; j++) {
    const int c = 4 * (lane + 32 * j);
    gc[j] = none;
    go[j] = make_float4(1, 1, 1, 1);
    if (warp == 0 && c < outputs) {
      gc[j] = *(const float4*)(a.close + base + c);
      if (normed) go[j] = *(const float4*)(a.outs[0].gain + base + c);
    }
  }
  float gate_scale = 1.f, proj_scale[OWN_S][2];
  if (a.gate_scale && warp == 0) gate_scale = a.gate_scale[rank * 16 + (lane & 15)];
#pragma unroll
  for (int i = 0; i < OWN_S; i++)
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int c = base + (warp + 8 * i) * 16 + g + 8 * k;
      proj_scale[i][k] = 1.f;
      if (a.proj_scale && c < a.width) proj_scale[i][k] = a.proj_scale[c];
    }

  if (tid == 0) {
    mbar_init(full, 1);
    mbar_init(full + 1, 1);
    for (int i = 0; i < 3; i++) mbar_init(there + i, 1);
    fence_barrier_init();
    fence_proxy_async();
    mbar_expect(there, WIDTH * 2);
    mbar_expect(there + 1, BLOCKS * 4);
    mbar_expect(there + 2, a.strips * 4);
    mbar_expect(full, gate_bytes);
    bulk_load_once(gate, a.gate + (size_t)rank * gate_bytes, gate_bytes, full);
    if (mine) {
      mbar_expect(full + 1, mine * proj_bytes);
      bulk_load_once(proj, a.proj + (size_t)s0 * proj_bytes, mine * proj_bytes, full + 1);
    }
  }
  for (int i = tid; i < all_strips; i += 256) strip[i] = 0.f;
  __syncthreads();
  cl.barrier_arrive();  // waited for before the first store to a peer
  pdl_launch();

  auto product = [&](const uint8_t* strip, const bf16* x, int first, int step, int chunks, float (&acc)[1][1][4]) {
#pragma unroll 1
    for (int c = first; c < chunks; c += step) {
      const uint8_t* ch = strip + c * F::CB;
      if (F::SCRATCH) {
        __syncwarp();
        F::chunk_begin(ch, lane, scratch);
        __syncwarp();
      }
#pragma unroll
      for (int q = 0; q < PIECES; q++) {
        uint32_t b[1][8];
        load_x<F, false>(b[0], x + c * F::KC + q * 64, t);
        F::template piece<1, 1>(ch, 0, q, lane, b, acc, scratch);
      }
    }
  };

  pdl_wait();
  float times = 0.f;
  if (warp == 0) times = a.times[rank * 16 + (lane & 15)];
  float4 x[J], y[J][3];
#pragma unroll
  for (int j = 0; j < J; j++) {
    const int at = 4 * (tid + 256 * j);
    const bool on = at < a.width;
    x[j] = y[j][0] = y[j][1] = y[j][2] = none;
    if (on) x[j] = *(const float4*)(a.x + at);
#pragma unroll
    for (int p = 0; p < 3; p++)
      if (on && p < a.y.planes) y[j][p] = *(const float4*)(a.y.p + p * a.y.plane_stride + at);
  }
  float s = 0;
#pragma unroll
  for (int j = 0; j < J; j++) {
    y[j][0] = add4(add4(y[j][0], y[j][1]), y[j][2]);
    s += dot4(y[j][0]);
  }
  s = warp_sum(s);
  if (lane == 0) norm[warp] = s;
  __syncthreads();
  s = 0;
#pragma unroll
  for (int w = 0; w < 8; w++) s += norm[w];
  const float f = 1.f / sqrtf(s / a.width + a.post_eps);
#pragma unroll
  for (int j = 0; j < J; j++) {
    const int at = 4 * (tid + 256 * j);
    if (at >= a.width) break;
    const float4 v = add4(x[j], scale4(y[j][0], f, gp[j]));
    *(uint2*)(xs + at) = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
    if (at >= base && at < base + outputs) *(float4*)(x_own + at - base) = v;
  }
  cl.barrier_wait();
  __syncthreads();

  float acc[1][1][4] = {};
  mbar_wait(full, 0);
  product(gate, xs, warp, 8, a.gate_chunks, acc);
  if (t == 0) {
    red[warp * 16 + g] = acc[0][0][0];
    red[warp * 16 + g + 8] = acc[0][0][2];
  }
  __syncthreads();
  if (warp == 0) {  // lanes l and l + 16 have output l; a lane sends eight outputs to one block
    float s = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) s += red[w * 16 + (lane & 15)];
    const float h = activate(a.activation, s * F::POST * gate_scale) * times;
    const int eight = (lane & 1) * 8, to = lane >> 1;
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float lo = __shfl_sync(~0u, h, eight + 2 * i), hi = __shfl_sync(~0u, h, eight + 2 * i + 1);
      v[i] = pack_bf16x2(lo, hi);
    }
    send(peer(hs + rank * 16 + eight, to), make_uint4(v[0], v[1], v[2], v[3]), peer(there, to));
  }
  mbar_wait(there, 0);
  if (mine) mbar_wait(full + 1, 0);
#pragma unroll 1
  for (int i = 0; i < OWN_S; i++) {
    const int s = warp + 8 * i;
    if (s >= mine) break;
    float acc[1][1][4] = {};
    product(proj + s * proj_bytes, hs, 0, 1, a.proj_chunks, acc);
    if (t == 0) {
      y_own[s * 16 + g] = acc[0][0][0] * F::POST * (i ? proj_scale[1][0] : proj_scale[0][0]);
      y_own[s * 16 + g + 8] = acc[0][0][2] * F::POST * (i ? proj_scale[1][1] : proj_scale[0][1]);
    }
  }
  __syncthreads();
  if (warp != 0) return;

  // One warp norms this block's outputs; the blocks' sums of squares meet in all of them.
  float4 v[OWN_J], b[OWN_J];
  s = 0;
#pragma unroll
  for (int j = 0; j < OWN_J; j++) {
    const int c = 4 * (lane + 32 * j);
    v[j] = b[j] = none;
    if (c < outputs) {
      v[j] = *(const float4*)(x_own + c);
      b[j] = *(const float4*)(y_own + c);
    }
    s += dot4(b[j]);
  }
  s = warp_sum(s);
  if (lane < BLOCKS) send(peer(part + rank, lane), s, peer(there + 1, lane));
  mbar_wait(there + 1, 0);
  s = 0;
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) s += part[i];
  const float fc = 1.f / sqrtf(s / a.width + a.close_eps);
#pragma unroll
  for (int j = 0; j < OWN_J; j++) {
    const float4 u = add4(v[j], scale4(b[j], fc, gc[j]));
    v[j] = make_float4(u.x * a.scalar, u.y * a.scalar, u.z * a.scalar, u.w * a.scalar);
    const float q = strip_sum(dot4(v[j]));
    const int i = (lane >> 2) + 8 * j;
    // All four lanes of a strip have its sum; each sends it to four of the blocks.
    if (i < mine) {
#pragma unroll
      for (int k = 0; k < BLOCKS / 4; k++) send(peer(strip + s0 + i, (lane & 3) * (BLOCKS / 4) + k), q, peer(there + 2, (lane & 3) * (BLOCKS / 4) + k));
    }
  }
#pragma unroll
  for (int j = 0; j < OWN_J; j++) {
    const int c = 4 * (lane + 32 * j);
    if (c < outputs) *(float4*)(a.x_out + base + c) = v[j];
  }
  mbar_wait(there + 2, 0);  // also where nothing is normed: a block stays until all have stored to it
  float q = 1.f;
  if (normed) {
    auto sum = [&](int i) {
      if (i >= warps * ROW_CLUSTER) return 0.f;
      const float4* eight = (const float4*)(strip + part_at(i, warps) * 8);
      return part_of_strips(eight[0], eight[1]);
    };
    q = rms_factor(warp_sum(sum(lane) + sum(lane + 32)), 1.f / a.width, a.out_eps);
  }
#pragma unroll
  for (int j = 0; j < OWN_J; j++) {
    const int c = 4 * (lane + 32 * j);
    const float4 w = scale4(v[j], q, go[j]);
#pragma unroll
    for (int o = 0; o < 2; o++) {
      if (o >= a.n_outs || c >= outputs) continue;
      if (a.outs[o].bf16_out) *(uint2*)((bf16*)a.outs[o].p + base + c) = make_uint2(pack_bf16x2(w.x, w.y), pack_bf16x2(w.z, w.w));
      else *(float4*)((float*)a.outs[o].p + base + c) = w;
    }
  }
}

#define PER_LAYER(NAME, F) \
  extern "C" __global__ void __launch_bounds__(256, 2) per_layer_##NAME(const __grid_constant__ PerLayerArgs a) { per_layer_body<F>(a); }
PER_LAYER(bf16, Bf16)
PER_LAYER(fp8, Fp8)
PER_LAYER(fp8_block, Fp8Block)
PER_LAYER(nvfp4, Nvfp4)
PER_LAYER(int4, Int4<false>)
PER_LAYER(int4_bf16, Int4<true>)
PER_LAYER(int4_min, Int4Min)
PER_LAYER(int8, Int8)
PER_LAYER(int8_min, Int8Min)
PER_LAYER(q4_k, Q4K)
PER_LAYER(q5_k, Q5K)
PER_LAYER(sub16, Sub16)
