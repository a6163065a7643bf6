// The router, as a launch of its own or beside a product that reads other inputs (skinny.cuh).
//
//   logits[r][e] = W_e x_r in float32; p = softmax; the top_k largest (ties: the lower id) in descending order, their weights divided by their sum,
//   times the expert's scale; and the list of distinct experts, ids ascending, that the expert kernels read
//
// Two experts a block, four warps each: their weights stand in registers before the kernel before has ended, so what remains is one round trip
// for x and one for the logits of all blocks, which the last of them to finish reads and chooses from. A cluster of 8 blocks with 16 experts each in
// shared memory took 4.8 us for one row and 23 us for 16, and nothing else could share its multiprocessors.
#pragma once
#include "ptx.cuh"

// Mirrored by RouterArgs in src/kernels/producers.rs.
struct RouterArgs {
  const float* w;              // [experts][width]
  const float* x;              // [rows][ld_x]
  const float* expert_scale;
  float* logits;               // [rows][experts]
  float* routes;               // [rows][2 top_k]
  int* groups;                 // count, ids
  float* group_weight;         // [group][16]
  unsigned* counter;           // zero between launches
  int width, ld_x, rows, experts, top_k, pad;
};
constexpr int ROUTER_EXPERTS = 128, ROUTER_ROWS = 16, ROUTER_PER_BLOCK = 2;
struct RouterShared {
  float logits[ROUTER_ROWS][ROUTER_EXPERTS];
  float weight[ROUTER_EXPERTS][ROUTER_ROWS];
  float part[8][ROUTER_ROWS];
  int chosen[ROUTER_EXPERTS], counts[4], last;
};

__device__ __forceinline__ float router_dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// The first 256 threads of block `block` of `blocks` = experts / 2; `sm` is for RouterShared.
__device__ __forceinline__ void router_body(const RouterArgs& a, int block, int blocks, uint8_t* sm) {
  constexpr int AHEAD = 6, STEP = 4 * 128;  // a lane's vectors that stand in registers (3,072 inputs in all), inputs from one to the next
  RouterShared& s = *(RouterShared*)sm;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, e = block * ROUTER_PER_BLOCK + (warp >> 2), k0 = 4 * ((warp & 3) * 32 + lane);
  const bool mine = warp < 8 && e < a.experts;
  const float* own = a.w + (size_t)e * a.width;
  const float4 none = make_float4(0, 0, 0, 0);
  float4 w[AHEAD], x[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) w[i] = mine && k0 + STEP * i < a.width ? __ldg((const float4*)(own + k0 + STEP * i)) : none;
  pdl_launch();
  pdl_wait();
  if (mine) {
    auto fetch = [&](int r) {
#pragma unroll
      for (int i = 0; i < AHEAD; i++) x[i] = k0 + STEP * i < a.width ? *(const float4*)(a.x + (size_t)r * a.ld_x + k0 + STEP * i) : none;
    };
    fetch(0);
    for (int r = 0; r < a.rows; r++) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < AHEAD; i++) sum += router_dot(w[i], x[i]);
      for (int k = k0 + STEP * AHEAD; k < a.width; k += STEP) sum += router_dot(__ldg((const float4*)(own + k)), *(const float4*)(a.x + (size_t)r * a.ld_x + k));
      if (r + 1 < a.rows) fetch(r + 1);
      sum = warp_sum(sum);
      if (lane == 0) s.part[warp][r] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x < ROUTER_PER_BLOCK * a.rows) {
    const int i = threadIdx.x % ROUTER_PER_BLOCK, r = threadIdx.x / ROUTER_PER_BLOCK, to = block * ROUTER_PER_BLOCK + i;
    if (to < a.experts) a.logits[(size_t)r * a.experts + to] = (s.part[4 * i][r] + s.part[4 * i + 1][r]) + (s.part[4 * i + 2][r] + s.part[4 * i + 3][r]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    s.last = atomicAdd(a.counter, 1) + 1 == (unsigned)blocks;
    if (s.last) *a.counter = 0;
    __threadfence();
  }
  __syncthreads();
  if (!s.last) return;

  for (int i = threadIdx.x; i < a.rows * a.experts; i += blockDim.x) s.logits[i / a.experts][i % a.experts] = __ldcg(a.logits + i);
  for (int i = threadIdx.x; i < ROUTER_EXPERTS * ROUTER_ROWS; i += blockDim.x) (&s.weight[0][0])[i] = 0;
  if (threadIdx.x < ROUTER_EXPERTS) s.chosen[threadIdx.x] = 0;
  __syncthreads();
  for (int r = warp; r < a.rows && warp < 8; r += 8) {
    float p[4], most = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int id = i * 32 + lane;
      p[i] = id < a.experts ? s.logits[r][id] : -INFINITY;
      most = fmaxf(most, p[i]);
    }
    for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
#pragma unroll
    for (int i = 0; i < 4; i++) { p[i] = expf(p[i] - most); sum += p[i]; }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] /= sum;
    // The largest, of equals the lowest id. A key orders as the numbers do; what is not a number counts as least but can be chosen, so ids are
    // valid whatever comes in.
    unsigned key[4];
#pragma unroll
    for (int i = 0; i < 4; i++) key[i] = i * 32 + lane >= a.experts ? 0 : p[i] >= 0.f ? __float_as_uint(p[i]) + 2 : 1;
    float total = 0, taken = 0;
    int my_id = 0;
    for (int k = 0; k < a.top_k; k++) {
      const unsigned best = __reduce_max_sync(~0u, max(max(key[0], key[1]), max(key[2], key[3])));
      const unsigned from = key[0] == best ? lane : key[1] == best ? 32 + lane : key[2] == best ? 64 + lane : key[3] == best ? 96 + lane : ROUTER_EXPERTS;
      const int id = __reduce_min_sync(~0u, from);
#pragma unroll
      for (int i = 0; i < 4; i++) if (i * 32 + lane == id) key[i] = 0;  // taken
      const float p_best = best == 1 ? NAN : __uint_as_float(best - 2);
      total += p_best;
      if (lane == k) { taken = p_best; my_id = id; }
    }
    if (lane < a.top_k) {
      const float v = taken / total * a.expert_scale[my_id];
      a.routes[(size_t)r * 2 * a.top_k + lane] = (float)my_id;
      a.routes[(size_t)r * 2 * a.top_k + a.top_k + lane] = v;
      s.weight[my_id][r] = v;
      s.chosen[my_id] = 1;  // the same from every row
    }
  }
  __syncthreads();
  const bool in_list = warp < 4 && s.chosen[threadIdx.x];
  const unsigned votes = __ballot_sync(~0u, in_list);
  if (warp < 4 && lane == 0) s.counts[warp] = __popc(votes);
  __syncthreads();
  if (in_list) {
    int at = __popc(votes & ((1u << lane) - 1));
    for (int i = 0; i < warp; i++) at += s.counts[i];
    a.groups[1 + at] = threadIdx.x;
#pragma unroll
    for (int r = 0; r < ROUTER_ROWS; r += 4) *(float4*)(a.group_weight + at * ROUTER_ROWS + r) = *(const float4*)&s.weight[threadIdx.x][r];
  }
  if (threadIdx.x == 0) a.groups[0] = s.counts[0] + s.counts[1] + s.counts[2] + s.counts[3];
}
