// What every kernel file includes: how kernels take their arguments, activations and the batch.
//
// A kernel has one parameter, a struct passed by value as `const __grid_constant__`. Its launcher in
// src/kernels/ holds the same struct with #[repr(C)], field by field in the same order and of the same width:
// pointers are 8 bytes, int is i32, float is f32, no bool. Padding follows the C rules on both sides.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#define DEVICE __device__ __forceinline__

// An activation: rows of `width` values, `stride` values apart. Rust: `args::Rows`.
struct Rows {
  void* p;
  int stride;
  int width;
  int bf16;  // 1: bf16 values, 0: float32
  int pad;
};

DEVICE float load(const Rows& a, int row, int col) {
  size_t at = (size_t)row * a.stride + col;
  return a.bf16 ? __bfloat162float(((const __nv_bfloat16*)a.p)[at]) : ((const float*)a.p)[at];
}

DEVICE void store(const Rows& a, int row, int col, float v) {
  size_t at = (size_t)row * a.stride + col;
  if (a.bf16)
    ((__nv_bfloat16*)a.p)[at] = __float2bfloat16(v);
  else
    ((float*)a.p)[at] = v;
}

// The row of a float32 activation.
DEVICE float* floats(const Rows& a, int row) { return (float*)a.p + (size_t)row * a.stride; }

// The uploaded batch, one entry for each of its rows unless said otherwise. Rust: `args::Columns`.
struct Columns {
  const int* tokens;
  const int* per_layer_tokens;
  const int* positions;
  const int* visible_to[2];  // last visible key + 1, by group
  const int* table[2];       // by group: the page of block b is pages[group][table[group][row] + b]
  const int* pages[2];
  const int* cell[2];        // by group: where the row writes its keys and values, page * 32 + position; -1 nowhere
  const int* soft;           // which of the given embeddings, or -1
  const float* soft_values;  // [soft rows, width]
  const int* heads;          // rows whose logits are wanted
  const int* steer;          // steering set, or -1; nothing where no row is steered
};

// The batch row that active row `r` is; `map` is null while all rows are active.
DEVICE int batch_row(const int* map, int r) { return map ? map[r] : r; }

constexpr int PAGE_TOKENS = 32;
