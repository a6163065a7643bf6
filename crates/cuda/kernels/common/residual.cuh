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
__device__ __forceinline__ float dot4(float4 a) { return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; }
__device__ __forceinline__ float4 scale4(float4 a, float s, float4 g) { return make_float4(a.x * s * g.x, a.y * s * g.y, a.z * s * g.z, a.w * s * g.w); }
