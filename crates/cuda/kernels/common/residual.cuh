// What kernels around the residual share: the branches that join it, the forms in which it goes on, four values at a time.
// Branch and NormOut are mirrored in src/kernels/producers.rs.
#pragma once
#include <cstdint>

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

__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float4 scale4(float4 a, float s, float4 g) { return make_float4(a.x * s * g.x, a.y * s * g.y, a.z * s * g.z, a.w * s * g.w); }

// (x + y * factor * gain) * scalar, fused by name.
__device__ __forceinline__ float4 join4(float4 x, float4 y, float f, float4 g, float scalar) {
  return make_float4(fmaf(y.x * f, g.x, x.x) * scalar, fmaf(y.y * f, g.y, x.y) * scalar, fmaf(y.z * f, g.z, x.z) * scalar, fmaf(y.w * f, g.w, x.w) * scalar);
}

// The squares of a row of the residual are added up in one order by every kernel that norms it, so that a row that is normed by itself, after it was
// steered, has the bits of one that is normed where it was made: four neighbours (dot4), strips of 16 (strip_sum), parts of 128 (part_sum, or
// part_of_strips where the strips were made elsewhere), then the parts, of which a warp takes two a lane (part_at): v[lane] + v[lane + 32], warp_sum.
// Products are fused with additions by name: what a compiler makes of the same expression may differ from place to place.
constexpr int ROW_CLUSTER = 8;  // blocks that share a row in producers_sm90.cu
__device__ __forceinline__ float dot4(float4 a) { return fmaf(a.w, a.w, fmaf(a.z, a.z, fmaf(a.y, a.y, a.x * a.x))); }
__device__ __forceinline__ float strip_sum(float s) {
  s += __shfl_xor_sync(~0u, s, 1);
  return s + __shfl_xor_sync(~0u, s, 2);
}
__device__ __forceinline__ float part_sum(float s) {
  s = strip_sum(s);
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) s += __shfl_xor_sync(~0u, s, o);
  return s;
}
__device__ __forceinline__ float part_of_strips(float4 a, float4 b) { return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w)); }
// Warps of a block there, and the part that stands at place i of the `warps * ROW_CLUSTER`.
__host__ __device__ __forceinline__ constexpr int row_warps(int width) { return (width + 128 * ROW_CLUSTER - 1) / (128 * ROW_CLUSTER); }
__device__ __forceinline__ int part_at(int i, int warps) { return i % ROW_CLUSTER * warps + i / ROW_CLUSTER; }
__device__ __forceinline__ float rms_factor(float sum, float inverse_width, float eps) { return 1.f / sqrtf(fmaf(sum, inverse_width, eps)); }
