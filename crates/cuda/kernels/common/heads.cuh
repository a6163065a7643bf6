// A head between the product that makes it and attention: norm, rotation, rounding. A warp has a head; a lane holds neighbours i of the first
// half and their partners i + D/2, four at a time.
//
// Two kernels do this: finish (producers_sm90.cu) by itself, and attention for its own row (attn_decode_sm90.cu). Which of them runs depends on
// what else is asked of the pass, so both have the same bits: products are fused with additions by name.
// HeadsArgs is mirrored by HeadsArgs in src/kernels/producers.rs.
#pragma once
#include "page.cuh"
#include "residual.cuh"

struct HeadsArgs {
  float* qkv;            // [plane][rows][ld]: queries, keys, values side by side
  const float* rope;     // [rows][ld_rope]: cosines, sines
  const float* q_gain;
  const float* k_gain;
  const int* cell;       // by batch row: page * 32 + position in it, negative for none
  uint64_t plane_stride;
  int planes, ld, ld_rope, heads;
  int kv_heads, values_are_keys, norm_values;  // kv_heads: 0 where the layer has no keys and values of its own
  float q_eps, k_eps, v_eps;
  float k_inverse, v_inverse;  // FP8: 1 / scale
};

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  return (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3) | (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3) << 16;
}

enum HeadKind { QUERY, KEY, VALUE };

template <int D> struct Head {
  static constexpr int J = D / 256, HALF = D / 2;
  float4 p[3][2][J];  // the planes, then in p[0] what became of them

  __device__ __forceinline__ static int at(int s, int j, int lane) { return s * HALF + 4 * lane + 128 * j; }
  // Asks for the sums of the head at place `from` of a row.
  __device__ __forceinline__ void load(const HeadsArgs& a, int row, int from, int lane) {
#pragma unroll
    for (int n = 0; n < 3; n++)
#pragma unroll
      for (int j = 0; j < J; j++)
#pragma unroll
        for (int s = 0; s < 2; s++) {
          p[n][s][j] = make_float4(0, 0, 0, 0);
          if (n < a.planes) p[n][s][j] = *(const float4*)(a.qkv + n * a.plane_stride + (size_t)row * a.ld + from * D + at(s, j, lane));
        }
  }
  // gain: read before the kernel before has ended. rope: of the row, of the same places.
  __device__ __forceinline__ void finish(const HeadsArgs& a, HeadKind kind, const float4 (&gain)[2][J], const float4 (&rope)[2][J]) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
      for (int s = 0; s < 2; s++) {
        p[0][s][j] = add4(add4(p[0][s][j], p[1][s][j]), p[2][s][j]);
        sum += dot4(p[0][s][j]);
      }
    if (kind != VALUE || a.norm_values) {
      const float f = 1.f / sqrtf(fmaf(warp_sum(sum), 1.f / D, kind == QUERY ? a.q_eps : kind == KEY ? a.k_eps : a.v_eps));
#pragma unroll
      for (int j = 0; j < J; j++)
#pragma unroll
        for (int s = 0; s < 2; s++) p[0][s][j] = scale4(p[0][s][j], f, kind == VALUE ? make_float4(1, 1, 1, 1) : gain[s][j]);
    }
    if (kind == VALUE) return;
#pragma unroll
    for (int j = 0; j < J; j++) {
      const float4 c = rope[0][j], n = rope[1][j], x = p[0][0][j], y = p[0][1][j];
      auto low = [](float x, float y, float c, float n) { return fmaf(x, c, -__fmul_rn(y, n)); };
      auto high = [](float x, float y, float c, float n) { return fmaf(y, c, __fmul_rn(x, n)); };
      p[0][0][j] = make_float4(low(x.x, y.x, c.x, n.x), low(x.y, y.y, c.y, n.y), low(x.z, y.z, c.z, n.z), low(x.w, y.w, c.w, n.w));
      p[0][1][j] = make_float4(high(x.x, y.x, c.x, n.x), high(x.y, y.y, c.y, n.y), high(x.z, y.z, c.z, n.z), high(x.w, y.w, c.w, n.w));
    }
  }
  __device__ __forceinline__ uint2 rounded(int s, int j) const {
    const float4 v = p[0][s][j];
    return make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
  }
  __device__ __forceinline__ uint32_t rounded_fp8(int s, int j, float inverse) const {
    const float4 v = p[0][s][j];
    return pack_e4m3(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
  }
};

// Four values at each of a head's places of a lane: gains, or cosines and sines.
template <int D> __device__ __forceinline__ void head_places(float4 (&to)[2][D / 256], const float* from, int lane) {
#pragma unroll
  for (int j = 0; j < D / 256; j++)
#pragma unroll
    for (int s = 0; s < 2; s++) to[s][j] = *(const float4*)(from + Head<D>::at(s, j, lane));
}
