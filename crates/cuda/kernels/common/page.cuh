// KV pages of the fast attention kernels: a page holds 32 tokens of one kv head, K [32][D], then V [32][D], each contiguous, in bf16 or FP8.
// Pools are [page][kv_head][K, V]. The 16-byte chunk index of a token's row is xored with a permutation of token & 7, so that one bulk copy
// brings half a page and every shared-memory read of it is free of conflicts. Pages are zeroed when allocated: a masked token's weight
// is 0, and 0 * NaN is NaN. Mirrored by src/kernels/attn_decode.rs.
#pragma once
#include "ptx.cuh"

constexpr int PAGE = 32;
__host__ __device__ constexpr int swizzle(int token) { return (token & 1) << 2 | (token >> 1 & 3); }
// Bytes of half a page: the keys or the values.
template <int D, bool FP8> __host__ __device__ constexpr int half_page() { return PAGE * D * (FP8 ? 1 : 2); }
// Where value i of a token's row lies, in bytes from the start of K or V. ES: bytes of a value.
__device__ __forceinline__ size_t page_offset(int token, int d, int i, int es) { return ((size_t)token * d + i) * es ^ (size_t)(swizzle(token & 7) << 4); }

// Which rows the kernels see and where their keys are; columns of the uploaded batch, by batch row.
struct KvColumns {
  const int* positions;
  const int* visible_to;  // last visible key + 1
  const int* table;       // the page of block b is pages[table[row] + b]
  const int* pages;
  const int* map;         // active row to batch row, or null
};
