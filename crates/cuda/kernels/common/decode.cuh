// Weight matrices as files hold them, and any sixteen consecutive weights of a row as float32.
//
// The operations and their order are those of lapidary-formats, so values agree bit for bit with the reference's.
// Products that the reference rounds are kept apart from the following addition by __fmul_rn.
#pragma once
#include "args.cuh"

// lapidary_formats::Format in the order of declaration. Rust: `matrix::format_code`.
enum Format {
  F32, F16, BF16, FP8, NVFP4, INT4_G32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS,
  MXFP4, GGUF_NVFP4
};

// Rows of one format under one kind of scale. Rust: `matrix::PartArgs`.
struct Part {
  const uint8_t* codes;   // [rows, row_bytes]
  const void* scales;     // FP8 by blocks: float [.., block_cols]; NVFP4: E4M3 [rows, cols / 16]; INT4: bf16 [rows, cols / 32]
  const float* row_scale; // one float a row, or null
  long long row_bytes;
  int first_row;          // in the matrix
  int rows;
  int format;
  int block_cols;         // FP8 by blocks: blocks across; 0 otherwise
  int first_scaled_row;   // FP8 by blocks: the row of the scaled matrix that row 0 is
  int pad;
};

// A matrix of `rows` outputs and `cols` inputs. Rust: `matrix::MatrixArgs`.
struct Matrix {
  const Part* parts;
  int count;
  int rows;
  int cols;
  int pad;
};

// The part that holds `row`.
DEVICE const Part& part_of(const Matrix& m, int row) {
  int low = 0, high = m.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (m.parts[middle].first_row <= row) low = middle;
    else high = middle - 1;
  }
  return m.parts[low];
}

DEVICE float half_at(const uint8_t* p) { return __half2float(__ushort_as_half((unsigned short)(p[0] | p[1] << 8))); }

DEVICE float bf16_at(const uint8_t* p) { return __uint_as_float((uint32_t)(p[0] | p[1] << 8) << 16); }

DEVICE float e4m3(uint8_t c) {
  const int e = c >> 3 & 15, m = c & 7;
  float v;
  if (e == 15 && m == 7) v = __uint_as_float(0x7fc00000u);
  else if (e == 0) v = m * (1.0f / 512.0f);
  else v = __uint_as_float((uint32_t)(e + 120) << 23 | (uint32_t)m << 20);
  return c & 128 ? -v : v;
}

// UE4M3 as ggml reads it: no sign, 0x7f is zero, 0xff is 480.
DEVICE float ue4m3(uint8_t c) { return c == 0x7f ? 0.0f : c == 0xff ? 480.0f : e4m3(c & 0x7f); }

// Twice an E2M1 value.
DEVICE int e2m1_doubled(int c) {
  const int m = c & 7;
  const int v = m < 5 ? m : m == 5 ? 6 : m == 6 ? 8 : 12;
  return c & 8 ? -v : v;
}

DEVICE float e2m1(int c) {
  const float v = 0.5f * (float)e2m1_doubled(c & 7);
  return c & 8 ? -v : v;  // code 8 is -0
}

// The sixteen levels of IQ4_NL: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
DEVICE int iq4_level(int c) {
  constexpr uint64_t LOW = 0xf6eaddcfbfad9881ull, HIGH = 0x7159453526190d01ull;
  return (int8_t)((c < 8 ? LOW : HIGH) >> (8 * (c & 7)));
}

// Half an E8M0 scale, 2^(e - 128).
DEVICE float half_e8m0(int e) { return __uint_as_float(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23); }

// The two-bit code of input i of 256 (lapidary_formats::codec::k_quant).
DEVICE int two_bits(const uint8_t* codes, int i) { return codes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3; }

// Scale and minimum j of the eight in the twelve bytes of Q4_K and Q5_K.
DEVICE void k_scales(const uint8_t* b, int j, int& scale, int& minimum) {
  if (j < 4) {
    scale = b[j] & 63;
    minimum = b[4 + j] & 63;
  } else {
    scale = (b[4 + j] & 15) | b[j - 4] >> 6 << 4;
    minimum = b[4 + j] >> 4 | b[j] >> 6 << 4;
  }
}

// Inputs k .. k + 16 of row `row` of the part, scales applied; k is a multiple of 16, and inputs from `cols` on are 0.
DEVICE void decode16(const Part& p, int row, int k, int cols, float (&out)[16]) {
  const uint8_t* line = p.codes + (size_t)row * p.row_bytes;
  const float row_scale = p.row_scale ? p.row_scale[row] : 1.0f;
  switch (p.format) {
    case F32:
    case F16:
    case BF16:
    case FP8: {
      const float* blocks = (const float*)p.scales;
      float block = row_scale;
      if (p.block_cols) block = blocks[(size_t)((p.first_scaled_row + row) / 128) * p.block_cols + k / 128];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        if (k + i >= cols) out[i] = 0.0f;
        else if (p.format == F32) out[i] = ((const float*)line)[k + i];
        else if (p.format == F16) out[i] = half_at(line + 2 * (k + i));
        else if (p.format == BF16) out[i] = bf16_at(line + 2 * (k + i));
        else out[i] = __fmul_rn(e4m3(line[k + i]), block);
      }
      break;
    }
    case NVFP4: {
      const float block = e4m3(((const uint8_t*)p.scales)[(size_t)row * (cols / 16) + k / 16]);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const float code = e2m1(line[(k + i) / 2] >> (4 * (i & 1)) & 15);
        out[i] = __fmul_rn(__fmul_rn(code, block), row_scale);
      }
      break;
    }
    case INT4_G32: {
      const float scale = bf16_at((const uint8_t*)p.scales + 2 * ((size_t)row * (cols / 32) + k / 32));
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const int code = line[(k + i) / 2] >> (4 * (i & 1)) & 15;
        out[i] = __fmul_rn((float)(code - 8), scale);
      }
      break;
    }
    case Q4_0:
    case IQ4_NL: {
      const uint8_t* b = line + k / 32 * 18;
      const float d = half_at(b);
      const int shift = k & 16 ? 4 : 0;
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const int code = b[2 + i] >> shift & 15;
        out[i] = __fmul_rn(d, (float)(p.format == Q4_0 ? code - 8 : iq4_level(code)));
      }
      break;
    }
    case Q4_1: {
      const uint8_t* b = line + k / 32 * 20;
      const float d = half_at(b), m = half_at(b + 2);
      const int shift = k & 16 ? 4 : 0;
#pragma unroll
      for (int i = 0; i < 16; i++) out[i] = __fadd_rn(__fmul_rn(d, (float)(b[4 + i] >> shift & 15)), m);
      break;
    }
    case Q5_0:
    case Q5_1: {
      const bool one = p.format == Q5_1;
      const uint8_t* b = line + k / 32 * (one ? 24 : 22);
      const uint8_t* q = b + (one ? 4 : 2);
      const float d = half_at(b), m = one ? half_at(b + 2) : 0.0f;
      const uint32_t high = q[0] | q[1] << 8 | q[2] << 16 | (uint32_t)q[3] << 24;
      const int half = k & 16;
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const int code = (q[4 + i] >> (half ? 4 : 0) & 15) | (int)(high >> (half + i) & 1) << 4;
        out[i] = one ? __fadd_rn(__fmul_rn(d, (float)code), m) : __fmul_rn(d, (float)(code - 16));
      }
      break;
    }
    case Q8_0: {
      const uint8_t* b = line + k / 32 * 34;
      const float d = half_at(b);
#pragma unroll
      for (int i = 0; i < 16; i++) out[i] = __fmul_rn((float)(int8_t)b[2 + (k & 16) + i], d);
      break;
    }
    case Q2_K: {
      const uint8_t* b = line + k / 256 * 84;
      const int at = k % 256, s = b[at / 16];
      const float scale = __fmul_rn(half_at(b + 80), (float)(s & 15));
      const float minimum = __fmul_rn(half_at(b + 82), (float)(s >> 4));
#pragma unroll
      for (int i = 0; i < 16; i++) out[i] = __fsub_rn(__fmul_rn(scale, (float)two_bits(b + 16, at + i)), minimum);
      break;
    }
    case Q3_K: {
      const uint8_t* b = line + k / 256 * 110;
      const uint8_t* s = b + 96;
      const int at = k % 256, j = at / 16;
      const int scale = ((s[j % 8] >> (4 * (j / 8)) & 15) | (s[8 + j % 4] >> (2 * (j / 4)) & 3) << 4) - 32;
      const float d = __fmul_rn(half_at(b + 108), (float)scale);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const int third = b[(at + i) % 32] >> ((at + i) / 32) & 1;
        out[i] = __fmul_rn(d, (float)((two_bits(b + 32, at + i) | third << 2) - 4));
      }
      break;
    }
    case Q4_K:
    case Q5_K: {
      const bool five = p.format == Q5_K;
      const uint8_t* b = line + k / 256 * (five ? 176 : 144);
      const int at = k % 256, j = at / 32;
      int s, m;
      k_scales(b + 4, j, s, m);
      const float scale = __fmul_rn(half_at(b), (float)s), minimum = __fmul_rn(half_at(b + 2), (float)m);
      const uint8_t* codes = b + (five ? 48 : 16) + j / 2 * 32 + at % 32;
#pragma unroll
      for (int i = 0; i < 16; i++) {
        int code = codes[i] >> (4 * (j % 2)) & 15;
        if (five) code |= (b[16 + at % 32 + i] >> j & 1) << 4;
        out[i] = __fsub_rn(__fmul_rn(scale, (float)code), minimum);
      }
      break;
    }
    case Q6_K: {
      const uint8_t* b = line + k / 256 * 210;
      const int at = k % 256;
      const float scale = __fmul_rn(half_at(b + 208), (float)(int8_t)b[192 + at / 16]);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const int n = at + i;
        const int low = b[n / 128 * 64 + n % 64] >> (n % 128 / 64 * 4) & 15;
        out[i] = __fmul_rn(scale, (float)((low | two_bits(b + 128, n) << 4) - 32));
      }
      break;
    }
    case IQ4_XS: {
      const uint8_t* b = line + k / 256 * 136;
      const int at = k % 256, j = at / 32;
      const int high = (b[2] | b[3] << 8) >> (2 * j) & 3, low = b[4 + j / 2] >> (4 * (j % 2)) & 15;
      const float scale = __fmul_rn(half_at(b), (float)((low | high << 4) - 32));
      const int shift = at & 16 ? 4 : 0;
#pragma unroll
      for (int i = 0; i < 16; i++) out[i] = __fmul_rn(scale, (float)iq4_level(b[8 + 16 * j + i] >> shift & 15));
      break;
    }
    case MXFP4: {
      const uint8_t* b = line + k / 32 * 17;
      const float d = half_e8m0(b[0]);
      const int shift = k & 16 ? 4 : 0;
#pragma unroll
      for (int i = 0; i < 16; i++) out[i] = __fmul_rn(d, (float)e2m1_doubled(b[1 + i] >> shift & 15));
      break;
    }
    case GGUF_NVFP4: {
      const uint8_t* b = line + k / 64 * 36;
      const int s = k % 64 / 16;
      const float d = __fmul_rn(ue4m3(b[s]), 0.5f);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const int code = b[4 + 8 * s + (i & 7)] >> (i & 8 ? 4 : 0) & 15;
        out[i] = __fmul_rn(__fmul_rn(d, (float)e2m1_doubled(code)), row_scale);
      }
      break;
    }
  }
}
