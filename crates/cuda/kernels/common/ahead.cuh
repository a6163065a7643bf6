// Weights that the next products read, brought to the second-level cache by kernels that leave the memory idle: those that finish heads, and
// products once all their own copies are under way. Mirrored by Ahead in src/kernels/ahead.rs.
#pragma once
#include "ptx.cuh"

struct Ahead {
  const uint8_t* p[3];
  uint32_t bytes[3], pad;
};
constexpr uint32_t AHEAD_PIECE = 4096;
// One of `all` threads (or warps by one lane) asks for its share.
__device__ __forceinline__ void fetch_ahead(const Ahead& a, uint32_t me, uint32_t all) {
#pragma unroll
  for (int i = 0; i < 3; i++)
    for (uint32_t at = me * AHEAD_PIECE; at < a.bytes[i]; at += all * AHEAD_PIECE) prefetch_l2(a.p[i] + at, min(AHEAD_PIECE, a.bytes[i] - at));
}
