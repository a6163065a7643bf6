// Head norms, rotation and the writing of keys and values; single cells in and out.
#include "common/kv.cuh"
#include "common/reduce.cuh"

struct FinishArgs {
  Rows qkv;
  Rows rope;
  Pool kv;
  const float* q_gain;
  const float* k_gain;
  const int* cell;   // by batch row: page * 32 + position, -1 nowhere
  const int* map;    // active row to batch row, or null
  int heads;
  int kv_heads;      // 0: the layer has no keys and values of its own
  int values_are_keys;
  int norm_values;
  float q_eps, k_eps, v_eps;
};

// Grid: (heads + 2 kv_heads, rows). A block has at least head_dim threads, a multiple of 32; thread i holds value i.
//   queries  q = rotate(norm(q)), in place
//   keys     k = rotate(norm(k)), to the cache
//   values   v = norm(v) or v, to the cache; from the raw keys where the layer has no projection of its own
// Rotation: x_i cos_i - x_{i + D/2} sin_i, x_{i + D/2} cos_i + x_i sin_i.
extern "C" __global__ void qkv_finish(const __grid_constant__ FinishArgs a) {
  extern __shared__ float shared[];
  const int r = blockIdx.y, i = threadIdx.x, d = a.rope.width, half = d / 2;
  const int h = blockIdx.x;
  const bool on = i < d, query = h < a.heads, value = h >= a.heads + a.kv_heads;
  const int head = query ? h : value ? h - a.heads - a.kv_heads : h - a.heads;
  const int from = query ? head : a.heads + head + (value && !a.values_are_keys ? a.kv_heads : 0);
  float v = on ? load(a.qkv, r, from * d + i) : 0.0f;
  if (!value || a.norm_values) {
    const float eps = query ? a.q_eps : value ? a.v_eps : a.k_eps;
    const float factor = 1.0f / sqrtf(block_sum(v * v) / (float)d + eps);
    v *= factor;
    if (on && !value) v *= (query ? a.q_gain : a.k_gain)[i];
  }
  if (!value) {
    if (on) shared[i] = v;
    __syncthreads();
    if (on) {
      const float other = shared[i < half ? i + half : i - half];
      const float cosine = load(a.rope, r, i % half), sine = load(a.rope, r, half + i % half);
      v = i < half ? v * cosine - other * sine : v * cosine + other * sine;
    }
  }
  if (query) {
    if (on) store(a.qkv, r, from * d + i, v);
    return;
  }
  const int cell = a.cell[batch_row(a.map, r)];
  if (cell < 0) return;
  kv_store(a.kv, kv_row(a.kv, cell / PAGE_TOKENS, value, head, cell % PAGE_TOKENS), value, i, cell % PAGE_TOKENS, v, on);
}

struct CellArgs {
  Pool kv;
  float* values;  // [K, V][kv_heads][head_dim]
  int page;
  int in_page;
};

// Grid: (kv_heads, 2). One position in, one position out.
extern "C" __global__ void cell_store(const __grid_constant__ CellArgs a) {
  const int i = threadIdx.x, d = a.kv.head_dim;
  const float v = i < d ? a.values[((size_t)blockIdx.y * a.kv.kv_heads + blockIdx.x) * d + i] : 0.0f;
  kv_store(a.kv, kv_row(a.kv, a.page, blockIdx.y, blockIdx.x, a.in_page), blockIdx.y, i, a.in_page, v, i < d);
}

extern "C" __global__ void cell_load(const __grid_constant__ CellArgs a) {
  const int i = threadIdx.x, d = a.kv.head_dim;
  if (i < d)
    a.values[((size_t)blockIdx.y * a.kv.kv_heads + blockIdx.x) * d + i] =
        kv_load(a.kv, kv_row(a.kv, a.page, blockIdx.y, blockIdx.x, a.in_page), blockIdx.y, i, a.in_page);
}
