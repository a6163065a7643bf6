// Cells of the KV pools in one of the formats of lapidary_ops::KvFormat, in one of two layouts:
//   plain  [page][K, V][kv_head][position in page][head_dim]
//   fast   [page][kv_head][K, V][position in page][head_dim], the 16-byte pieces of a row permuted by its position
//          (common/page.cuh), for bf16 and FP8
#pragma once
#include <cuda_fp8.h>

#include "args.cuh"

enum KvFormat { KV_F32, KV_F16, KV_BF16, KV_Q8_0, KV_FP8 };

// The pool of one layer. Rust: `args::Pool`.
struct Pool {
  uint8_t* p;
  int kv_heads;
  int head_dim;
  int format;
  int row_bytes;  // of one head's key or value at one position
  int fast;
  float scales[2];  // FP8: of keys and of values, powers of two
  int pad;
};

// The bytes of one head's key (side 0) or value (side 1) at a position of a page.
DEVICE uint8_t* kv_row(const Pool& kv, int page, int side, int head, int in_page) {
  const size_t line = kv.fast ? ((size_t)page * kv.kv_heads + head) * 2 + side : ((size_t)page * 2 + side) * kv.kv_heads + head;
  return kv.p + (line * PAGE_TOKENS + in_page) * kv.row_bytes;
}

// Where value i of the row of position in_page is, in values, of which 16 bytes have `in_16`: 8 of bf16, 16 of FP8.
DEVICE int kv_place(const Pool& kv, int i, int in_page, int in_16) {
  return kv.fast ? i ^ ((in_page & 1) << 2 | (in_page >> 1 & 3)) * in_16 : i;
}

DEVICE float kv_load(const Pool& kv, const uint8_t* row, int side, int i, int in_page) {
  switch (kv.format) {
    case KV_F32: return ((const float*)row)[i];
    case KV_F16: return __half2float(((const __half*)row)[i]);
    case KV_BF16: return __bfloat162float(((const __nv_bfloat16*)row)[kv_place(kv, i, in_page, 8)]);
    case KV_FP8: return __half2float(__half(__nv_cvt_fp8_to_halfraw(row[kv_place(kv, i, in_page, 16)], __NV_E4M3))) * kv.scales[side];
    default: {
      const uint8_t* block = row + i / 32 * 34;
      return (float)(int8_t)block[2 + i % 32] * __half2float(*(const __half*)block);
    }
  }
}

// Stores value i of a row. All 32 lanes of a warp call this together with consecutive i, the first a multiple of 32
// (Q8_0 finds its scale among them); lanes with `on` false store nothing.
DEVICE void kv_store(const Pool& kv, uint8_t* row, int side, int i, int in_page, float v, bool on) {
  switch (kv.format) {
    case KV_F32: if (on) ((float*)row)[i] = v; break;
    case KV_F16: if (on) ((__half*)row)[i] = __float2half(v); break;
    case KV_BF16: if (on) ((__nv_bfloat16*)row)[kv_place(kv, i, in_page, 8)] = __float2bfloat16(v); break;
    case KV_FP8:
      if (on) row[kv_place(kv, i, in_page, 16)] = __nv_cvt_float_to_fp8(v / kv.scales[side], __NV_SATFINITE, __NV_E4M3);
      break;
    default: {
      float most = on ? fabsf(v) : 0.0f;
      int finite = !on || isfinite(v);
      for (int o = 16; o; o >>= 1) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        finite &= __shfl_xor_sync(~0u, finite, o);
      }
      const float d = most / 127.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f;
      uint8_t* block = row + i / 32 * 34;
      if (on) block[2 + i % 32] = (uint8_t)(int8_t)(finite ? roundf(v * inverse) : 0.0f);
      // A block that cannot be written down is NaN throughout.
      if (on && i % 32 == 0) *(__half*)block = finite ? __float2half(d) : __ushort_as_half(0x7e00);
    }
  }
}
