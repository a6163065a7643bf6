// What the kernels for very many rows share. Mirrored by ArrangeArgs and WideArgs in src/kernels/gemm_wide.rs.
#pragma once
#include "forms.cuh"

struct ArrangeArgs {
  const bf16* x;   // [rows][ldx]
  uint4* out;      // [chunk of 64][padded][8]
  float* sums;     // [block of 32][padded], or null
  int ldx, rows, padded, k, chunks, pad;
};
struct WideArgs {
  const uint8_t* w;
  const float* row_scale;  // by output, or null
  const uint8_t* x;        // arranged
  const float* sums;       // of x by 32 inputs, or null
  void* out;               // [rows][ldo]
  const float* times;      // epilogue 3
  uint64_t strip_bytes;
  int strips, chunks, rows, padded, ldo, m;  // strips and m: of gate alone when gated
  int epilogue, activation, ld_times;
  float softcap;
};
