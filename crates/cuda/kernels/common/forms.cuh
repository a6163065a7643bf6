// Packed weight forms: how a chunk lies in memory and how a warp multiplies with it, exactly.
//
// A matrix is packed into strips of 16 outputs; a strip is a run of chunks (16 outputs x 64 inputs, or x 256), and a chunk holds
// each lane's fragment bytes of mma.m16n8k16's A operand in the order in which the lane reads them, scales behind. Lane 4 g + t holds
// rows g and g + 8. src/pack/ writes the same layouts and its tests read them back; a change here is a change there.
//
// Which inputs a lane holds is free as long as x follows (load_x). Of each 64, lane t of a quad takes
//   Narrow  8t..8t+7 and 32+8t..32+8t+7: block h of 32 is the products 2h and 2h + 1
//   Wide    16t..16t+15: its own block of 16, whose scale can multiply the weights
//   Sub16   16 s + 4 t..+3 for s = 0..3: product s is block s of 16
//
// Decoding moves bits and converts nothing: the tensor core multiplies bf16 subnormals exactly, so an integer q below 256 in the low bits of
// a bf16 is q * 2^-133, and E4M3 fields moved into bf16 fields are the value * 2^-120. x carries 2^100 (PRE0; 2^96 for nibbles that stay four
// bits up, PRE1), POST mends the sum. Block formats: integers to the tensor core, then d * (sum q x - zero * sum x) in float32; sum x is
// a product with ones.
#pragma once
#include "ptx.cuh"

enum XMap { NARROW, WIDE, SUB16 };

__device__ __forceinline__ float2 half2_at(const uint8_t* p) { return __half22float2(*(const __half2*)p); }
// Byte i of v as a float: 2^23 + byte, less 2^23.
template <int I> __device__ __forceinline__ float byte_f(uint32_t v) { return __uint_as_float(__byte_perm(v, 0x4B000000u, 0x7650 + I)) - 8388608.f; }

// sum over block h's 32 inputs of x, in every row of the fragment.
template <int NT> __device__ __forceinline__ void x_sums(float (&X)[NT][4], const uint32_t (&b)[NT][8], int h, uint32_t one0, uint32_t one1) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    X[n][0] = X[n][1] = X[n][2] = X[n][3] = 0;
    mma(X[n], one0, one0, one1, one1, b[n][4 * h], b[n][4 * h + 1]);
    mma(X[n], one0, one0, one1, one1, b[n][4 * h + 2], b[n][4 * h + 3]);
  }
}
// P = q x over block h: nibbles of two words, order k0 k2 k4 k6 | k1 k3 k5 k7 from the lowest.
template <int NT> __device__ __forceinline__ void int4_block(float (&P)[NT][4], uint32_t r0, uint32_t r1, const uint32_t (&b)[NT][8], int h) {
#pragma unroll
  for (int n = 0; n < NT; n++) P[n][0] = P[n][1] = P[n][2] = P[n][3] = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t a0 = r0 & 0x000f000fu, a1 = r1 & 0x000f000fu, a2 = r0 & 0x00f000f0u, a3 = r1 & 0x00f000f0u;
#pragma unroll
    for (int n = 0; n < NT; n++) mma(P[n], a0, a1, a2, a3, b[n][4 * h + 2 * i], b[n][4 * h + 2 * i + 1]);
    r0 >>= 8; r1 >>= 8;
  }
}
// P += q x over one k16 step: bytes k0 k2 k1 k3 of a word a row.
template <int NT> __device__ __forceinline__ void int8_step(float (&P)[NT][4], uint32_t r0, uint32_t r1, const uint32_t (&b)[NT][8], int step) {
  uint32_t a0 = r0 & 0x00ff00ffu, a1 = r1 & 0x00ff00ffu, a2 = (r0 >> 8) & 0x00ff00ffu, a3 = (r1 >> 8) & 0x00ff00ffu;
#pragma unroll
  for (int n = 0; n < NT; n++) mma(P[n], a0, a1, a2, a3, b[n][2 * step], b[n][2 * step + 1]);
}
template <int NT> __device__ __forceinline__ void int8_block(float (&P)[NT][4], uint4 v, const uint32_t (&b)[NT][8], int h) {
#pragma unroll
  for (int n = 0; n < NT; n++) P[n][0] = P[n][1] = P[n][2] = P[n][3] = 0;
  int8_step<NT>(P, v.x, v.z, b, 2 * h);
  int8_step<NT>(P, v.y, v.w, b, 2 * h + 1);
}
// acc += d * (P + z X), row g with (d0, z0), row g + 8 with (d1, z1).
__device__ __forceinline__ void add_scaled(float (&acc)[4], const float (&P)[4], const float (&X)[4], float d0, float z0, float d1, float z1) {
  acc[0] += d0 * fmaf(z0, X[0], P[0]); acc[1] += d0 * fmaf(z0, X[1], P[1]);
  acc[2] += d1 * fmaf(z1, X[0], P[2]); acc[3] += d1 * fmaf(z1, X[1], P[3]);
}
// acc += d * P + m * X.
__device__ __forceinline__ void add_affine(float (&acc)[4], const float (&P)[4], const float (&X)[4], float d0, float m0, float d1, float m1) {
  acc[0] += fmaf(d0, P[0], m0 * X[0]); acc[1] += fmaf(d0, P[1], m0 * X[1]);
  acc[2] += fmaf(d1, P[2], m1 * X[0]); acc[3] += fmaf(d1, P[3], m1 * X[1]);
}

#define FORM(NAME_, KC_, CB_, SCRATCH_, MAP_, PRE0_, PRE1_, POST_)                     \
  static constexpr int KC = KC_, CB = CB_, SCRATCH = SCRATCH_;                         \
  static constexpr XMap MAP = MAP_;                                                    \
  static constexpr uint32_t PRE0 = PRE0_, PRE1 = PRE1_;                                \
  static constexpr float POST = POST_;
#define NO_HEADER static __device__ __forceinline__ void chunk_begin(const uint8_t*, int, float*) {}
#define PIECE                                                                                                      \
  template <int MS, int NT>                                                                                        \
  static __device__ __forceinline__ void piece(const uint8_t* c, int ms_stride, int p, int lane, uint32_t (&b)[NT][8], \
                                               float (&acc)[MS][NT][4], const float* scratch)

// 4 x 512: k16 step j, lane's four fragment words.
struct Bf16 {
  FORM("bf16", 64, 2048, 0, NARROW, 0, 0, 1.f)
  NO_HEADER
  PIECE {
#pragma unroll
    for (int ms = 0; ms < MS; ms++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint4 a = *(const uint4*)(c + ms * ms_stride + j * 512 + lane * 16);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(acc[ms][n], a.x, a.y, a.z, a.w, b[n][2 * j], b[n][2 * j + 1]);
      }
  }
};

// 2 x 512: row g, row g + 8; byte order k2 k0 k3 k1. Scales by row, on the sum.
template <int MS, int NT> __device__ __forceinline__ void fp8_chunk(const uint8_t* c, int lane, int ms, uint32_t (&b)[NT][8], float (&acc)[MS][NT][4]) {
  uint4 r0 = *(const uint4*)(c + lane * 16), r1 = *(const uint4*)(c + 512 + lane * 16);
  const uint32_t* p0 = &r0.x; const uint32_t* p1 = &r1.x;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint32_t a0 = e4m3_hi_to_bf16x2(p0[j]), a1 = e4m3_hi_to_bf16x2(p1[j]);
    uint32_t a2 = e4m3_hi_to_bf16x2(p0[j] << 8), a3 = e4m3_hi_to_bf16x2(p1[j] << 8);
#pragma unroll
    for (int n = 0; n < NT; n++) mma(acc[ms][n], a0, a1, a2, a3, b[n][2 * j], b[n][2 * j + 1]);
  }
}
struct Fp8 {
  FORM("fp8", 64, 1024, 0, NARROW, POW2_100, POW2_100, 0x1p20f)
  NO_HEADER
  PIECE {
#pragma unroll
    for (int ms = 0; ms < MS; ms++) fp8_chunk<MS, NT>(c + ms * ms_stride, lane, ms, b, acc);
  }
};
// The same with scales by 128 x 128 block, behind the codes: {float s0, float s1, int split, 0}, rows from `split` on take s1.
struct Fp8Block {
  FORM("fp8_block", 64, 1040, 0, NARROW, POW2_100, POW2_100, 0x1p20f)
  NO_HEADER
  PIECE {
#pragma unroll
    for (int ms = 0; ms < MS; ms++) {
      const uint8_t* at = c + ms * ms_stride;
      float P[1][NT][4] = {};
      fp8_chunk<1, NT>(at, lane, 0, b, P);
      uint4 s = *(const uint4*)(at + 1024);
      const int g = lane >> 2;
      const float d0 = __uint_as_float(g < (int)s.z ? s.x : s.y), d1 = __uint_as_float(g + 8 < (int)s.z ? s.x : s.y);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        acc[ms][n][0] = fmaf(d0, P[0][n][0], acc[ms][n][0]); acc[ms][n][1] = fmaf(d0, P[0][n][1], acc[ms][n][1]);
        acc[ms][n][2] = fmaf(d1, P[0][n][2], acc[ms][n][2]); acc[ms][n][3] = fmaf(d1, P[0][n][3], acc[ms][n][3]);
      }
    }
  }
};

// 512 of codes in the order of Int4's nibbles, 64 of E4M3 scales. A lane's 16 inputs of a row are one block, so its scale multiplies the weights: 2 x 4
// significant bits, exact in bf16. Two codes, one in each half word, times 2^6 + 2^12 have a copy with the magnitude in its place and one with the sign.
struct Nvfp4 {
  FORM("nvfp4", 64, 576, 0, WIDE, 0, 0, 0x1p16f)
  NO_HEADER
  // Values 2 I and 2 I + 1 of a word. row.cuh has the codes otherwise.
  template <int I> static __device__ __forceinline__ uint32_t decode(uint32_t v) {
    if (I >= 2) v >>= 8;
    return (I % 2 ? (v & 0x00f000f0u) * 260u : (v & 0x000f000fu) * 4160u) & 0x81c081c0u;
  }
  PIECE {
#pragma unroll
    for (int ms = 0; ms < MS; ms++) {
      uint4 v = *(const uint4*)(c + ms * ms_stride + lane * 16);
      uint16_t s8 = *(const uint16_t*)(c + ms * ms_stride + 512 + lane * 2);
      __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(s8, __NV_E4M3);
      float2 f = __half22float2(__half2(h));
      f.x *= 0x1p110f; f.y *= 0x1p110f;
      uint32_t s0 = pack_bf16x2(f.x, f.x), s1 = pack_bf16x2(f.y, f.y);
#pragma unroll
      for (int w = 0; w < 2; w++) {
        uint32_t r0 = w ? v.y : v.x, r1 = w ? v.w : v.z;
        uint32_t a0 = mul_bf16x2(decode<0>(r0), s0), a1 = mul_bf16x2(decode<0>(r1), s1);
        uint32_t a2 = mul_bf16x2(decode<1>(r0), s0), a3 = mul_bf16x2(decode<1>(r1), s1);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(acc[ms][n], a0, a1, a2, a3, b[n][4 * w], b[n][4 * w + 1]);
        a0 = mul_bf16x2(decode<2>(r0), s0), a1 = mul_bf16x2(decode<2>(r1), s1);
        a2 = mul_bf16x2(decode<3>(r0), s0), a3 = mul_bf16x2(decode<3>(r1), s1);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(acc[ms][n], a0, a1, a2, a3, b[n][4 * w + 2], b[n][4 * w + 3]);
      }
    }
  }
};

// 512 of nibbles (lane: block 0 row g, row g + 8, block 1 row g, row g + 8), 64 of scales [g][block][row]. BF: bf16 scales, else f16.
template <bool BF> struct Int4 {
  FORM("int4", 64, 576, 0, NARROW, POW2_100, POW2_96, 0x1p33f)
  NO_HEADER
  PIECE {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float X[NT][4], P[NT][4];
      x_sums<NT>(X, b, h, 0x00010001u, 0x00100010u);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        uint2 v = *(const uint2*)(c + ms * ms_stride + lane * 16 + h * 8);
        const uint8_t* s = c + ms * ms_stride + 512 + (lane >> 2) * 8 + h * 4;
        float2 d;
        if (BF) { uint32_t w = *(const uint32_t*)s; d = make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u)); }
        else d = half2_at(s);
        int4_block<NT>(P, v.x, v.y, b, h);
#pragma unroll
        for (int n = 0; n < NT; n++) add_scaled(acc[ms][n], P[n], X[n], d.x, -8.f, d.y, -8.f);
      }
    }
  }
};
// 512 of nibbles, 128 of {d, m} in f16 [g][block][row].
struct Int4Min {
  FORM("int4_min", 64, 640, 0, NARROW, POW2_100, POW2_96, 0x1p33f)
  NO_HEADER
  PIECE {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float X[NT][4], P[NT][4];
      x_sums<NT>(X, b, h, 0x00010001u, 0x00100010u);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        uint2 v = *(const uint2*)(c + ms * ms_stride + lane * 16 + h * 8);
        const uint8_t* s = c + ms * ms_stride + 512 + (lane >> 2) * 16 + h * 8;
        float2 d0 = half2_at(s), d1 = half2_at(s + 4);
        int4_block<NT>(P, v.x, v.y, b, h);
#pragma unroll
        for (int n = 0; n < NT; n++) add_affine(acc[ms][n], P[n], X[n], d0.x, d0.y, d1.x, d1.y);
      }
    }
  }
};
// 2 x 512 of bytes q + 128 (block h; lane: row g, row g + 8, 8 bytes each), 64 of f16 scales as in Int4.
struct Int8 {
  FORM("int8", 64, 1088, 0, NARROW, POW2_100, POW2_100, 0x1p33f)
  NO_HEADER
  PIECE {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float X[NT][4], P[NT][4];
      x_sums<NT>(X, b, h, 0x00010001u, 0x00010001u);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        uint4 v = *(const uint4*)(c + ms * ms_stride + h * 512 + lane * 16);
        float2 d = half2_at(c + ms * ms_stride + 1024 + (lane >> 2) * 8 + h * 4);
        int8_block<NT>(P, v, b, h);
#pragma unroll
        for (int n = 0; n < NT; n++) add_scaled(acc[ms][n], P[n], X[n], d.x, -128.f, d.y, -128.f);
      }
    }
  }
};
// 2 x 512 of bytes q >= 0, 128 of {d, m} as in Int4Min.
struct Int8Min {
  FORM("int8_min", 64, 1152, 0, NARROW, POW2_100, POW2_100, 0x1p33f)
  NO_HEADER
  PIECE {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float X[NT][4], P[NT][4];
      x_sums<NT>(X, b, h, 0x00010001u, 0x00010001u);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        uint4 v = *(const uint4*)(c + ms * ms_stride + h * 512 + lane * 16);
        const uint8_t* s = c + ms * ms_stride + 1024 + (lane >> 2) * 16 + h * 8;
        float2 d0 = half2_at(s), d1 = half2_at(s + 4);
        int8_block<NT>(P, v, b, h);
#pragma unroll
        for (int n = 0; n < NT; n++) add_affine(acc[ms][n], P[n], X[n], d0.x, d0.y, d1.x, d1.y);
      }
    }
  }
};

// Header of the K forms: each row's 16 bytes (d, dmin, eight six-bit scales and minimums) as in the file. The warp unpacks it once a chunk into
// scratch: 8 blocks x 8 lanes' rows {s_g, m_g, s_g+8, m_g+8}.
__device__ __forceinline__ void k_header(const uint8_t* c, int lane, float* scratch) {
  int row = lane >> 1, half = lane & 1;
  uint4 h = *(const uint4*)(c + row * 16);
  float2 d = __half22float2(*(const __half2*)&h.x);
  uint32_t s = half ? ((h.w & 0x0f0f0f0fu) | ((h.y >> 2) & 0x30303030u)) : (h.y & 0x3f3f3f3fu);
  uint32_t m = half ? (((h.w >> 4) & 0x0f0f0f0fu) | ((h.z >> 2) & 0x30303030u)) : (h.z & 0x3f3f3f3fu);
  float* o = scratch + ((half * 4) * 8 + (row & 7)) * 4 + (row >> 3) * 2;
  *(float2*)(o) = make_float2(d.x * byte_f<0>(s), d.y * byte_f<0>(m));
  *(float2*)(o + 32) = make_float2(d.x * byte_f<1>(s), d.y * byte_f<1>(m));
  *(float2*)(o + 64) = make_float2(d.x * byte_f<2>(s), d.y * byte_f<2>(m));
  *(float2*)(o + 96) = make_float2(d.x * byte_f<3>(s), d.y * byte_f<3>(m));
}
// 4 x 512 of nibbles as Int4's, 256 of headers.
struct Q4K {
  FORM("q4_k", 256, 2304, 1024, NARROW, POW2_100, POW2_96, 0x1p33f)
  static __device__ __forceinline__ void chunk_begin(const uint8_t* c, int lane, float* scratch) { k_header(c + 2048, lane, scratch); }
  PIECE {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float X[NT][4], P[NT][4];
      x_sums<NT>(X, b, h, 0x00010001u, 0x00100010u);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        uint2 v = *(const uint2*)(c + ms * ms_stride + p * 512 + lane * 16 + h * 8);
        float4 sm = *(const float4*)(scratch + ms * 256 + ((2 * p + h) * 8 + (lane >> 2)) * 4);
        int4_block<NT>(P, v.x, v.y, b, h);
#pragma unroll
        for (int n = 0; n < NT; n++) add_affine(acc[ms][n], P[n], X[n], sm.x, -sm.y, sm.z, -sm.w);
      }
    }
  }
};
// 4 x 1024 of bytes as Int8Min's, 256 of headers.
struct Q5K {
  FORM("q5_k", 256, 4352, 1024, NARROW, POW2_100, POW2_100, 0x1p33f)
  static __device__ __forceinline__ void chunk_begin(const uint8_t* c, int lane, float* scratch) { k_header(c + 4096, lane, scratch); }
  PIECE {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float X[NT][4], P[NT][4];
      x_sums<NT>(X, b, h, 0x00010001u, 0x00010001u);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        uint4 v = *(const uint4*)(c + ms * ms_stride + p * 1024 + h * 512 + lane * 16);
        float4 sm = *(const float4*)(scratch + ms * 256 + ((2 * p + h) * 8 + (lane >> 2)) * 4);
        int8_block<NT>(P, v, b, h);
#pragma unroll
        for (int n = 0; n < NT; n++) add_affine(acc[ms][n], P[n], X[n], sm.x, -sm.y, sm.z, -sm.w);
      }
    }
  }
};
// Blocks of 16 with a signed byte scale each: 4 x 1024 of bytes q + 128 in Sub16 order (half h of 512: products 2h, 2h + 1), 256 of scales
// s + 128 [piece][row][4], 32 of f16 d [row].
struct Sub16 {
  FORM("sub16", 256, 4384, 0, SUB16, POW2_100, POW2_100, 0x1p33f)
  NO_HEADER
  PIECE {
    const int g = lane >> 2;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        const uint8_t* at = c + ms * ms_stride;
        uint4 v = *(const uint4*)(at + p * 1024 + h * 512 + lane * 16);
        uint32_t s0 = *(const uint32_t*)(at + 4096 + p * 64 + g * 4) >> (16 * h), s1 = *(const uint32_t*)(at + 4096 + p * 64 + g * 4 + 32) >> (16 * h);
        const float d0 = __half2float(*(const __half*)(at + 4352 + g * 2)), d1 = __half2float(*(const __half*)(at + 4352 + g * 2 + 16));
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float f0 = d0 * ((i ? byte_f<1>(s0) : byte_f<0>(s0)) - 128.f), f1 = d1 * ((i ? byte_f<1>(s1) : byte_f<0>(s1)) - 128.f);
          float P[NT][4] = {}, X[NT][4] = {};
          int8_step<NT>(P, i ? v.y : v.x, i ? v.w : v.z, b, 2 * h + i);
#pragma unroll
          for (int n = 0; n < NT; n++) {
            mma(X[n], 0x00010001u, 0x00010001u, 0x00010001u, 0x00010001u, b[n][2 * (2 * h + i)], b[n][2 * (2 * h + i) + 1]);
            add_scaled(acc[ms][n], P[n], X[n], f0, -128.f, f1, -128.f);
          }
        }
      }
  }
};

// ---- x as B fragments of 64 inputs ----
// p: the row's 64 inputs, 16-byte aligned.
template <class F, bool SCALED> __device__ __forceinline__ void load_x(uint32_t (&b)[8], const bf16* p, int t) {
  if (F::MAP == SUB16) {
#pragma unroll
    for (int s = 0; s < 4; s++) { uint2 u = *(const uint2*)(p + 16 * s + 4 * t); b[2 * s] = u.x; b[2 * s + 1] = u.y; }
  } else {
    const uint4 u = *(const uint4*)(p + (F::MAP == WIDE ? 16 * t : 8 * t)), v = *(const uint4*)(p + (F::MAP == WIDE ? 16 * t + 8 : 32 + 8 * t));
    b[0] = u.x; b[1] = u.y; b[2] = u.z; b[3] = u.w; b[4] = v.x; b[5] = v.y; b[6] = v.z; b[7] = v.w;
  }
  if (!SCALED && F::PRE0) {
#pragma unroll
    for (int i = 0; i < 8; i++) b[i] = mul_bf16x2(b[i], i & 1 ? F::PRE1 : F::PRE0);
  }
}
template <class F> __device__ __forceinline__ uint4 prescale(uint4 v) {
  if (F::PRE0) { v.x = mul_bf16x2(v.x, F::PRE0); v.y = mul_bf16x2(v.y, F::PRE1); v.z = mul_bf16x2(v.z, F::PRE0); v.w = mul_bf16x2(v.w, F::PRE1); }
  return v;
}
