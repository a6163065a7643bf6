// Products for 17 rows and more. The kernel is in common/prefill.cuh, the layouts in common/forms.cuh; stages here are those of
// src/kernels/gemm_prefill.rs.
#include "common/prefill.cuh"

PREFILL_FORM(bf16, Bf16, 3)
PREFILL_FORM(fp8, Fp8, 4)
PREFILL_FORM(fp8_block, Fp8Block, 4)
PREFILL_FORM(nvfp4, Nvfp4, 4)
PREFILL_FORM(int4, Int4<false>, 4)
PREFILL_FORM(int4_bf16, Int4<true>, 4)
PREFILL_FORM(int4_min, Int4Min, 4)
PREFILL_FORM(int8, Int8, 4)
PREFILL_FORM(int8_min, Int8Min, 4)
PREFILL_FORM(q4_k, Q4K, 2)
PREFILL_FORM(q5_k, Q5K, 2)
PREFILL_FORM(sub16, Sub16, 2)

// ---- lists of rows by expert, and the sum over a row's experts ----
// Mirrored by SortArgs and CombineArgs in src/kernels/gemm_prefill.rs.
struct SortArgs {
  const float* routes;  // [rows][2 top_k]: ids, weights
  int* counts;          // [experts]
  int* pairs;           // [experts][list_stride]
  int rows, top_k, list_stride;
};
// One warp an expert: the pairs that chose it, in order. Grid: experts.
extern "C" __global__ void __launch_bounds__(32) sort_pairs(const __grid_constant__ SortArgs a) {
  pdl_launch();
  pdl_wait();
  const int e = blockIdx.x, lane = threadIdx.x, all = a.rows * a.top_k;
  int n = 0;
  for (int i0 = 0; i0 < all; i0 += 32) {
    const int i = i0 + lane;
    const bool mine = i < all && (int)a.routes[(size_t)(i / a.top_k) * 2 * a.top_k + i % a.top_k] == e;
    const unsigned votes = __ballot_sync(~0u, mine);
    if (mine) a.pairs[(size_t)e * a.list_stride + n + __popc(votes & ((1u << lane) - 1))] = i;
    n += __popc(votes);
  }
  if (lane == 0) a.counts[e] = n;
}
struct CombineArgs {
  const float* parts;   // [rows * top_k][ld_parts], weighted already
  float* out;           // [rows][ldo]
  int top_k, ld_parts, ldo, width;
};
// out[r] = the sum of its parts in router order. Grid: (width over 1024, rows), four values a thread.
extern "C" __global__ void __launch_bounds__(256) combine_pairs(const __grid_constant__ CombineArgs a) {
  pdl_launch();
  pdl_wait();
  const int i = (blockIdx.x * 256 + threadIdx.x) * 4, r = blockIdx.y;
  if (i >= a.width) return;
  float4 s = make_float4(0, 0, 0, 0);
  for (int k = 0; k < a.top_k; k++) {
    const float4 v = *(const float4*)(a.parts + ((size_t)r * a.top_k + k) * a.ld_parts + i);
    s.x += v.x; s.y += v.y; s.z += v.z; s.w += v.w;
  }
  *(float4*)(a.out + (size_t)r * a.ldo + i) = s;
}
