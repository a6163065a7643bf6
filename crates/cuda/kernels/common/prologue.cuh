// The residual step before a product, carried out by every block of the product for itself, for one row:
//   v = (x + rms(sum of the planes of y; post)) * scalar     stored as the residual by one block, elsewhere than x, which the others may still read
//   x of the product = rms(v; gain), rounded to bf16
// with the bits of the kernel that does this by itself (residual in producers_sm90.cu), which several rows and taps need.
#pragma once
#include "residual.cuh"

// Mirrored by PrologueArgs in src/kernels/prologue.rs.
struct PrologueArgs {
  const float* x;
  float* x_out;
  const float* y;       // planes
  const float* post;
  const float* gain;
  uint64_t plane_stride;
  int planes, width;
  float eps, scalar;
};

// J: fours of a thread; 256 threads take rows of up to 1024 J.
template <int J> struct Prologue {
  float4 post[J], gain[J];

  // Before the kernel before has ended.
  __device__ __forceinline__ void gains(const PrologueArgs& a) {
#pragma unroll
    for (int j = 0; j < J; j++) {
      const int at = 4 * (threadIdx.x + 256 * j);
      post[j] = gain[j] = make_float4(0, 0, 0, 0);
      if (at < a.width) {
        post[j] = *(const float4*)(a.post + at);
        gain[j] = *(const float4*)(a.gain + at);
      }
    }
  }
  // The sum over the row of the squares of v, in the order of residual.cuh. red: 8 J floats that no other call uses.
  template <class SYNC> __device__ __forceinline__ static float row_sum(const float4 (&v)[J], float* red, int warps, SYNC sync) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, all = warps * ROW_CLUSTER;
#pragma unroll
    for (int j = 0; j < J; j++) {
      const float s = part_sum(dot4(v[j]));
      if (lane == 0) red[warp + 8 * j] = s;
    }
    sync();
    return warp_sum((lane < all ? red[part_at(lane, warps)] : 0.f) + (lane + 32 < all ? red[part_at(lane + 32, warps)] : 0.f));
  }
  // put(i, four): takes values i to i + 3 of the product's x in bf16.
  template <class SYNC, class PUT> __device__ __forceinline__ void run(const PrologueArgs& a, float* red, bool stores, SYNC sync, PUT put) {
    const float4 none = make_float4(0, 0, 0, 0);
    const int warps = row_warps(a.width);
    float4 x[J], y[J][3];
#pragma unroll
    for (int j = 0; j < J; j++) {
      const int at = 4 * (threadIdx.x + 256 * j);
      const bool on = at < a.width;
      x[j] = y[j][0] = y[j][1] = y[j][2] = none;
      if (on) x[j] = *(const float4*)(a.x + at);
#pragma unroll
      for (int p = 0; p < 3; p++)
        if (on && p < a.planes) y[j][p] = *(const float4*)(a.y + p * a.plane_stride + at);
    }
    float4 v[J];
#pragma unroll
    for (int j = 0; j < J; j++) v[j] = add4(add4(y[j][0], y[j][1]), y[j][2]);
    const float inv = 1.f / a.width, f = rms_factor(row_sum(v, red, warps, sync), inv, a.eps);
#pragma unroll
    for (int j = 0; j < J; j++) {
      v[j] = join4(x[j], v[j], f, post[j], a.scalar);
      const int at = 4 * (threadIdx.x + 256 * j);
      if (stores && at < a.width) *(float4*)(a.x_out + at) = v[j];
    }
    const float g = rms_factor(row_sum(v, red + 8 * J, warps, sync), inv, a.eps);
#pragma unroll
    for (int j = 0; j < J; j++) {
      const int at = 4 * (threadIdx.x + 256 * j);
      const float4 w = scale4(v[j], g, gain[j]);
      if (at < a.width) put(at, make_uint2(pack_bf16x2(w.x, w.y), pack_bf16x2(w.z, w.w)));
    }
  }
};
