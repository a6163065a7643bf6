// The per-layer branch of one to eight rows in one kernel (Gemma 3n's and 4's small models):
//   x1 = x + rms(sum of the planes of y; post)
//   h  = f(W_gate x1) * inputs[layer]                        256 wide
//   x  = (x1 + rms(W_proj h; close)) * scalar                stored as the residual
//   outs = rms(x; their one gain) in bf16 or float32         the next layer's input, or the head's and what is told of it
// Apart these are four kernels of 2 to 2.5 us each, whatever they read.
//
// One cluster of 16 blocks. Block b multiplies strip b of the gate (256 outputs are 16 strips) and n = ceil(strips / 16) strips of the projection;
// both are copied to its shared memory before the kernel before has ended. Every block norms whole rows for itself; h, which all need whole, and the
// sums of squares of the two norms behind it go through distributed shared memory, one cluster barrier each. The products are those of forms.cuh with up to
// eight rows as columns; x1 and h are rounded to bf16 as inputs of the products, nothing else is rounded.
// The last norm adds up in the order of residual.cuh, for where the residual is steered it is another kernel's work.
//
// Traffic: both matrices once, x and y from L2 once a block.
#include <cooperative_groups.h>
#include <cstdio>

#include "common/forms.cuh"
#include "common/residual.cuh"
namespace cg = cooperative_groups;

constexpr int BLOCKS = 16, WIDTH = 256, MOST_ROWS = 8, MOST_J = 3;  // MOST_J: fours of outputs of a lane, of up to 320 a block

// Mirrored by PerLayerArgs in src/kernels/per_layer.rs.
struct PerLayerArgs {
  float* x;
  Branch y;
  const float* post;
  const uint8_t* gate;
  const uint8_t* proj;
  const float* gate_scale;  // by output, or null
  const float* proj_scale;
  const float* times;       // [row][ld_times], this layer's 256
  const float* close;
  NormOut outs[2];          // with one gain
  uint64_t gate_strip_bytes, proj_strip_bytes;
  int ld_x, rows, width, gate_chunks, proj_chunks, strips, ld_times, activation, n_outs, pad;  // strips: of the projection
  float post_eps, close_eps, out_eps, scalar;
};

// h's rows are padded by 16 bytes, so that eight rows' reads fall into different banks; so are x's.
constexpr int H_STRIDE = WIDTH + 8;

__device__ int clk_count;
__device__ __forceinline__ long long gtime() { long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
#define STAMP(i) do { if (CLK && tid == 0) st[i] = clock64(); } while (0)
template <class F, bool CLK> __device__ __forceinline__ void per_layer_body(const PerLayerArgs& a) {
  constexpr int PIECES = F::KC / 64;
  extern __shared__ __align__(128) uint8_t sm[];
  cg::cluster_group cl = cg::this_cluster();
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, rank = cl.block_rank();
  long long st[12];
  STAMP(0);
  const int per = (a.strips + BLOCKS - 1) / BLOCKS, s0 = min(rank * per, a.strips), mine = min(per, a.strips - s0), own = per * 16, x_stride = a.width + 8;
  const uint32_t gate_bytes = (uint32_t)a.gate_strip_bytes, proj_bytes = (uint32_t)a.proj_strip_bytes;
  uint8_t* gate = sm;
  uint8_t* proj = gate + gate_bytes;
  float* scratch = (float*)(proj + per * proj_bytes) + warp * 256;        // [8][256]
  float* red = (float*)(proj + per * proj_bytes) + 8 * 256;               // [8][16][8]
  float* norm = red + 8 * 128;                                            // [2][8]
  float* part = norm + 16;                                                // [rows: 8][16 blocks]
  const int warps = row_warps(a.width), all_strips = warps * ROW_CLUSTER * 8;
  float* strip = part + 8 * BLOCKS;                                       // [rows][all_strips]: sums of squares of 16 values, zero beyond the width
  float* x_own = strip + a.rows * all_strips;                             // [rows][own]
  float* y_own = x_own + a.rows * own;
  bf16* hs = (bf16*)(y_own + a.rows * own);                               // [rows][H_STRIDE]
  bf16* xs = hs + a.rows * H_STRIDE;                                      // [rows][x_stride]
  __shared__ uint64_t full[2];
  if (tid == 0) {
    mbar_init(full, 1);
    mbar_init(full + 1, 1);
    fence_barrier_init();
    fence_proxy_async();
    mbar_expect(full, gate_bytes);
    bulk_load(gate, a.gate + (size_t)rank * gate_bytes, gate_bytes, full);
    if (mine) {
      mbar_expect(full + 1, mine * proj_bytes);
      bulk_load(proj, a.proj + (size_t)s0 * proj_bytes, mine * proj_bytes, full + 1);
    }
  }
  for (int i = tid; i < a.rows * all_strips; i += 256) strip[i] = 0.f;
  __syncthreads();
  cl.barrier_arrive();  // waited for before the first write into a peer
  pdl_launch();

  // Gains: whole rows of the first norm, this block's outputs of the other two, in the order of their use.
  constexpr int J = 5;  // four values each: rows of up to 5,120
  float4 gp[J];
#pragma unroll
  for (int j = 0; j < J; j++) {
    const int at = 4 * (tid + 256 * j);
    gp[j] = at < a.width ? *(const float4*)(a.post + at) : make_float4(0, 0, 0, 0);
  }
  // This block's outputs; warp r has row r of them, a lane four in a row every 128.
  const int base = s0 * 16, outputs = min(mine * 16, a.width - base);
  const bool normed = a.n_outs && a.outs[0].gain;
  float4 gc[MOST_J], go[MOST_J];
#pragma unroll
  for (int j = 0; j < MOST_J; j++) {
    const int c = 4 * (lane + 32 * j);
    gc[j] = c < outputs ? *(const float4*)(a.close + base + c) : make_float4(0, 0, 0, 0);
    go[j] = c < outputs && normed ? *(const float4*)(a.outs[0].gain + base + c) : make_float4(1, 1, 1, 1);
  }
  STAMP(1);
  pdl_wait();
  STAMP(2);

  const int output = tid & 15, to = tid >> 4;  // of the gate's strip, and the block that this thread hands it to
  float times[MOST_ROWS];
#pragma unroll
  for (int r = 0; r < MOST_ROWS; r++) times[r] = r < a.rows ? a.times[(size_t)r * a.ld_times + rank * 16 + output] : 0.f;
  for (int r = 0; r < a.rows; r++) {
    float4 x[J], y[J];
    float s = 0;
#pragma unroll
    for (int j = 0; j < J; j++) {
      const int at = 4 * (tid + 256 * j);
      const bool on = at < a.width;
      x[j] = y[j] = make_float4(0, 0, 0, 0);
      if (on) x[j] = *(const float4*)(a.x + (size_t)r * a.ld_x + at);
#pragma unroll
      for (int p = 0; p < 3; p++)
        if (on && p < a.y.planes) y[j] = add4(y[j], *(const float4*)(a.y.p + p * a.y.plane_stride + (size_t)r * a.y.ld + at));
      s += dot4(y[j]);
    }
    s = warp_sum(s);
    if (lane == 0) norm[(r & 1) * 8 + warp] = s;
    __syncthreads();
    s = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) s += norm[(r & 1) * 8 + w];
    const float f = 1.f / sqrtf(s / a.width + a.post_eps);
#pragma unroll
    for (int j = 0; j < J; j++) {
      const int at = 4 * (tid + 256 * j);
      if (at >= a.width) continue;
      const float4 v = add4(x[j], scale4(y[j], f, gp[j]));
      *(uint2*)(xs + r * x_stride + at) = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
      if (at >= base && at < base + outputs) *(float4*)(x_own + r * own + at - base) = v;
    }
  }
  __syncthreads();
  STAMP(3);

  const int row = min(g, a.rows - 1);  // columns beyond the rows repeat the last row: no column touches another
  auto product = [&](const uint8_t* strip, const bf16* x, int first, int step, int chunks, float (&acc)[1][1][4]) {
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
  float acc[1][1][4] = {};
  mbar_wait(full, 0);
  STAMP(4);
  product(gate, xs + row * x_stride, warp, 8, a.gate_chunks, acc);
  {
    float(&s)[4] = acc[0][0];
    *(float2*)(red + (warp * 16 + g) * 8 + 2 * t) = make_float2(s[0], s[1]);
    *(float2*)(red + (warp * 16 + g + 8) * 8 + 2 * t) = make_float2(s[2], s[3]);
  }
  const float scale = a.gate_scale ? __ldg(a.gate_scale + rank * 16 + output) : 1.f;
  __syncthreads();
  STAMP(5);
  cl.barrier_wait();
  {
    bf16* there = cl.map_shared_rank(hs, to);
#pragma unroll
    for (int r = 0; r < MOST_ROWS; r++) {
      if (r >= a.rows) break;
      float s = 0;
#pragma unroll
      for (int w = 0; w < 8; w++) s += red[(w * 16 + output) * 8 + r];
      there[r * H_STRIDE + rank * 16 + output] = __float2bfloat16(activate(a.activation, s * F::POST * scale) * times[r]);
    }
  }
  cl.sync();
  STAMP(6);

  if (mine) mbar_wait(full + 1, 0);
  STAMP(7);
  for (int s = warp; s < mine; s += 8) {
    float acc[1][1][4] = {};
    product(proj + s * proj_bytes, hs + row * H_STRIDE, 0, 1, a.proj_chunks, acc);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int c = s * 16 + g + 8 * (i >> 1), r = 2 * t + (i & 1);
      if (r < a.rows) y_own[r * own + c] = acc[0][0][i] * F::POST * (a.proj_scale ? __ldg(a.proj_scale + min(base + c, a.width - 1)) : 1.f);
    }
  }
  __syncthreads();
  STAMP(8);

  // Warp r norms row r of this block's outputs; the blocks' sums of squares meet in all of them.
  const bool has_row = warp < a.rows;
  float4 x[MOST_J], y[MOST_J];
  float s = 0;
#pragma unroll
  for (int j = 0; j < MOST_J; j++) {
    const int c = 4 * (lane + 32 * j);
    const bool on = has_row && c < outputs;
    x[j] = y[j] = make_float4(0, 0, 0, 0);
    if (on) x[j] = *(const float4*)(x_own + warp * own + c);
    if (on) y[j] = *(const float4*)(y_own + warp * own + c);
    s += dot4(y[j]);
  }
  s = warp_sum(s);
  float* at = part + warp * BLOCKS;
  if (has_row && lane < BLOCKS) cl.map_shared_rank(at, lane)[rank] = s;
  cl.sync();
  STAMP(9);
  s = 0;
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) s += at[i];
  const float f = 1.f / sqrtf(s / a.width + a.close_eps);
#pragma unroll
  for (int j = 0; j < MOST_J; j++) {
    const int c = 4 * (lane + 32 * j);
    const float4 v = add4(x[j], scale4(y[j], f, gc[j]));
    x[j] = make_float4(v.x * a.scalar, v.y * a.scalar, v.z * a.scalar, v.w * a.scalar);
    if (has_row && c < outputs) *(float4*)(a.x + (size_t)warp * a.ld_x + base + c) = x[j];
  }
  if (!a.n_outs) return;
  float q = 1.f;
  if (normed) {
    float* row_strips = strip + warp * all_strips;
#pragma unroll
    for (int j = 0; j < MOST_J; j++) {
      const float u = strip_sum(dot4(x[j]));
      const int i = (lane >> 2) + 8 * j;
      // All four lanes of a strip have its sum; each leaves it in four of the blocks.
      if (has_row && i < mine)
#pragma unroll
        for (int b = 0; b < BLOCKS / 4; b++) cl.map_shared_rank(row_strips, (lane & 3) * (BLOCKS / 4) + b)[s0 + i] = u;
    }
    cl.sync();
    STAMP(10);
    if (!has_row) return;
    auto sum = [&](int i) {
      if (i >= warps * ROW_CLUSTER) return 0.f;
      const float4* eight = (const float4*)(row_strips + part_at(i, warps) * 8);
      return part_of_strips(eight[0], eight[1]);
    };
    q = rms_factor(warp_sum(sum(lane) + sum(lane + 32)), 1.f / a.width, a.out_eps);
  }
  if (!has_row) return;
#pragma unroll
  for (int j = 0; j < MOST_J; j++) {
    const int c = 4 * (lane + 32 * j);
    if (c >= outputs) continue;
    const float4 v = scale4(x[j], q, go[j]);
#pragma unroll
    for (int o = 0; o < 2; o++) {
      if (o >= a.n_outs) break;
      const size_t to = (size_t)warp * a.outs[o].ld + base + c;
      if (a.outs[o].bf16_out) *(uint2*)((bf16*)a.outs[o].p + to) = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
      else *(float4*)((float*)a.outs[o].p + to) = v;
    }
  }
  if (CLK && tid == 0) {
    st[11] = clock64();
    if (rank == 0 || rank == 9) {
      const int n = rank == 0 ? atomicAdd(&clk_count, 1) : *(volatile int*)&clk_count;
      if (n % 211 < 2)
        printf("PL r%d n%d pre %d waited %d | norm %d gate_w %d gate %d hx %d proj_w %d proj %d sums %d strips %d out %d\n", rank, n, (int)(st[1] - st[0]), (int)(st[2] - st[1]), (int)(st[3] - st[2]), (int)(st[4] - st[3]),
               (int)(st[5] - st[4]), (int)(st[6] - st[5]), (int)(st[7] - st[6]), (int)(st[8] - st[7]), (int)(st[9] - st[8]), (int)(st[10] - st[9]), (int)(st[11] - st[10]));
    }
  }
}

#define PER_LAYER(NAME, F) \
  extern "C" __global__ void __launch_bounds__(256) per_layer_##NAME(const __grid_constant__ PerLayerArgs a) { per_layer_body<F, false>(a); }
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
extern "C" __global__ void __launch_bounds__(256) per_layer_clk_bf16(const __grid_constant__ PerLayerArgs a) { per_layer_body<Bf16, true>(a); }
extern "C" __global__ void __launch_bounds__(256) per_layer_clk_q4_k(const __grid_constant__ PerLayerArgs a) { per_layer_body<Q4K, true>(a); }
