// Sums and maximums over a block, always in the same order: lanes by halves, then warps in turn. Every thread gets
// the result. `blockDim.x` is a multiple of 32, at most 1024.
#pragma once
#include "args.cuh"

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

DEVICE float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

DEVICE float block_sum(float v) {
  __shared__ float parts[32];
  const int warps = blockDim.x >> 5;
  v = warp_sum(v);
  __syncthreads();  // a call before this one may still be read
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = v;
  __syncthreads();
  v = 0.0f;
  for (int w = 0; w < warps; w++) v += parts[w];
  return v;
}
