// Attention in float32 over pages: one block for each row and head.
//
//   out = sum_j p_j v_j,  p = softmax(cap(scale * q k_j)),  position - window < j < visible_to
//
// Keys are taken in blocks of 32 aligned to absolute positions with the online softmax: scores of a block (a warp for
// each key in turn), their maximum, then weights and values. The order of all sums is fixed by absolute positions.
#include "common/kv.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

constexpr int THREADS = 128, MOST = 8;  // head_dim up to MOST * THREADS

struct AttentionArgs {
  Rows out;
  Rows q;
  Pool kv;
  const int* positions;
  const int* visible_to;
  const int* table;
  const int* pages;
  const int* map;
  int heads;
  int window;     // 0: none
  float scale;
  float softcap;  // 0: none
};

// Grid: (heads, rows).
extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ AttentionArgs a) {
  extern __shared__ float query[];  // head_dim
  __shared__ float score[PAGE_TOKENS];
  const int h = blockIdx.x, r = blockIdx.y, t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const int row = batch_row(a.map, r), d = a.kv.head_dim, kv_head = h / (a.heads / a.kv.kv_heads);
  const int position = a.positions[row], to = a.visible_to[row], table = a.table[row];
  const int from = a.window ? max(position + 1 - a.window, 0) : 0;
  for (int i = t; i < d; i += THREADS) query[i] = load(a.q, r, h * d + i);
  float sum[MOST] = {}, total = 0.0f, most = __int_as_float(0xff800000);
  for (int block = from / PAGE_TOKENS; block * PAGE_TOKENS < to; block++) {
    const int page = a.pages[table + block];
    const uint8_t* keys = kv_row(a.kv, page, 0, kv_head, 0);
    const uint8_t* values = kv_row(a.kv, page, 1, kv_head, 0);
    const int first = max(from - block * PAGE_TOKENS, 0), end = min(to - block * PAGE_TOKENS, PAGE_TOKENS);
    __syncthreads();  // the query is there; scores of the block before are read
    for (int j = warp; j < PAGE_TOKENS; j += THREADS / 32) {
      const bool seen = j >= first && j < end;
      float dot = 0.0f;
      if (seen)
        for (int i = lane; i < d; i += 32) dot = fmaf(query[i], kv_load(a.kv, keys + (size_t)j * a.kv.row_bytes, 0, i, j), dot);
      dot = warp_sum(dot);
      if (lane == 0) score[j] = seen ? soft_cap(dot * a.scale, a.softcap) : __int_as_float(0xff800000);
    }
    __syncthreads();
    const float own = score[lane], block_most = fmaxf(most, warp_max(own));
    const float shrink = expf(most - block_most), p = expf(own - block_most);
    total = total * shrink + warp_sum(p);
    most = block_most;
#pragma unroll
    for (int n = 0; n < MOST; n++) sum[n] *= shrink;
    for (int j = first; j < end; j++) {
      const float pj = __shfl_sync(~0u, p, j);
#pragma unroll
      for (int n = 0; n < MOST; n++) {
        const int i = t + n * THREADS;
        if (i < d) sum[n] = fmaf(pj, kv_load(a.kv, values + (size_t)j * a.kv.row_bytes, 1, i, j), sum[n]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < MOST; n++) {
    const int i = t + n * THREADS;
    if (i < d) store(a.out, r, h * d + i, sum[n] / total);
  }
}
