// From router logits to chosen experts, the order in which experts take their rows, and the sum of their outputs.
#include "common/reduce.cuh"

struct RouteArgs {
  Rows out;     // [ids as numbers, weights]
  Rows logits;
  const float* expert_scale;
  int experts;
  int top_k;
};

// p = softmax(logits); the top_k largest, ties to the lower id; weights p / sum(p chosen) * scale. The softmax's
// denominator cancels, so weights are exp(logit - max) over the sum of the chosen. One warp a row; values that are not
// numbers count as the smallest.
extern "C" __global__ void route(const __grid_constant__ RouteArgs a) {
  extern __shared__ float logit[];
  const int r = blockIdx.x, lane = threadIdx.x;
  const float lowest = __int_as_float(0xff800000);
  bool bad = false;
  for (int e = lane; e < a.experts; e += 32) {
    logit[e] = load(a.logits, r, e);
    bad |= isnan(logit[e]);
  }
  bad = __any_sync(~0u, bad);
  __syncwarp();
  float most = 0.0f, sum = 0.0f;
  for (int k = 0; k < a.top_k; k++) {
    float v = lowest;
    int id = 0x7fffffff;
    // What was chosen is marked by its place in the output, which lane 0 wrote.
    for (int e = lane; e < a.experts; e += 32) {
      bool taken = false;
      for (int j = 0; j < k; j++) taken |= (int)load(a.out, r, j) == e;
      const float x = isnan(logit[e]) ? lowest : logit[e];
      if (!taken && (id == 0x7fffffff || x > v)) v = x, id = e;
    }
    for (int o = 16; o; o >>= 1) {
      const float v2 = __shfl_xor_sync(~0u, v, o);
      const int id2 = __shfl_xor_sync(~0u, id, o);
      if (id2 != 0x7fffffff && (id == 0x7fffffff || v2 > v || (v2 == v && id2 < id))) v = v2, id = id2;
    }
    if (k == 0) most = v;
    // A NaN among the logits makes every weight NaN, as the softmax over all experts does.
    const float p = bad ? __int_as_float(0x7fc00000) : expf(v - most);
    sum += p;
    if (lane == 0) {
      store(a.out, r, k, (float)id);
      store(a.out, r, a.top_k + k, p);
    }
    __syncwarp();
  }
  for (int k = lane; k < a.top_k; k += 32)
    store(a.out, r, a.top_k + k, load(a.out, r, a.top_k + k) / sum * a.expert_scale[(int)load(a.out, r, k)]);
}

struct SortArgs {
  Rows routes;
  int* order;   // [rows * top_k] pairs = row * top_k + choice, by expert, ascending
  int* starts;  // [experts + 1]
  int rows;
  int experts;
  int top_k;
};

// One block, a thread for each expert (in turns where there are more): every expert counts its pairs, sums give the
// starts, and every expert writes its pairs in ascending order.
extern "C" __global__ void sort_pairs(const __grid_constant__ SortArgs a) {
  const int pairs = a.rows * a.top_k;
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
    int count = 0;
    for (int p = 0; p < pairs; p++) count += (int)load(a.routes, p / a.top_k, p % a.top_k) == e;
    a.starts[e + 1] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    a.starts[0] = 0;
    for (int e = 0; e < a.experts; e++) a.starts[e + 1] += a.starts[e];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
    int at = a.starts[e];
    for (int p = 0; p < pairs; p++)
      if ((int)load(a.routes, p / a.top_k, p % a.top_k) == e) a.order[at++] = p;
  }
}

struct CombineArgs {
  Rows out;
  Rows parts;   // one row for each pair
  Rows routes;
  int top_k;
};

// out[r] = sum_k weight[r, k] * parts[r * top_k + k], in router order.
extern "C" __global__ void combine(const __grid_constant__ CombineArgs a) {
  const int r = blockIdx.x;
  for (int i = threadIdx.x; i < a.out.width; i += blockDim.x) {
    float sum = 0.0f;
    for (int k = 0; k < a.top_k; k++)
      sum = fmaf(load(a.routes, r, a.top_k + k), load(a.parts, r * a.top_k + k, i), sum);
    store(a.out, r, i, sum);
  }
}
