// The formats as files hold them (canonical), their value element by element for the reference, and packing into strips.
#pragma once
#include "skinny_gemm.cuh"

struct Canon { const uint8_t *q, *s; int K; float scale; };  // q: codes or blocks by row; s: scales where they are apart

__host__ __device__ constexpr size_t q_row_bytes(const char* f, int K) {
  return f[0] == 'b' ? 2 * K : f[0] == 'f' ? K : f[0] == 'n' ? K / 2 : f[1] == '8' ? K / 32 * 34 : f[3] == '0' ? K / 32 * 18 : K / 256 * 144;
}
__host__ __device__ constexpr size_t s_row_bytes(const char* f, int K) { return f[0] == 'f' ? 4 : f[0] == 'n' ? K / 16 : 0; }

__device__ inline float h2f(const uint8_t* p) { __half_raw r; r.x = p[0] | p[1] << 8; return __half2float(__half(r)); }
__device__ inline float e4m3(uint8_t v) {
  int e = v >> 3 & 15, m = v & 7;
  float f = e ? ldexpf(1.f + m / 8.f, e - 7) : ldexpf(m / 8.f, -6);
  return v & 128 ? -f : f;
}
__device__ inline float e2m1(int v) {
  const float t[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  return v & 8 ? -t[v & 7] : t[v & 7];
}
// The code of element (m, k) and, for the reference, its value without the tensor scale.
template <class F> struct Codec;
template <> struct Codec<Bf16> {
  static __device__ uint32_t code(const Canon& c, size_t m, int k) { return ((const uint16_t*)c.q)[m * c.K + k]; }
  static __device__ double value(const Canon& c, size_t m, int k) { return __uint_as_float(code(c, m, k) << 16); }
};
template <> struct Codec<Fp8> {
  static __device__ uint32_t code(const Canon& c, size_t m, int k) { return c.q[m * c.K + k]; }
  static __device__ double value(const Canon& c, size_t m, int k) { return (double)e4m3(code(c, m, k)) * ((const float*)c.s)[m]; }
};
template <> struct Codec<Nvfp4> {
  static __device__ uint32_t code(const Canon& c, size_t m, int k) { return c.q[(m * c.K + k) / 2] >> (k & 1) * 4 & 15; }
  static __device__ double value(const Canon& c, size_t m, int k) { return (double)e2m1(code(c, m, k)) * e4m3(c.s[m * (c.K / 16) + k / 16]); }
};
template <> struct Codec<Q4_0> {
  static __device__ const uint8_t* block(const Canon& c, size_t m, int k) { return c.q + (m * (c.K / 32) + k / 32) * 18; }
  static __device__ uint32_t code(const Canon& c, size_t m, int k) { return block(c, m, k)[2 + (k & 15)] >> (k >> 4 & 1) * 4 & 15; }
  static __device__ double value(const Canon& c, size_t m, int k) { return (double)h2f(block(c, m, k)) * ((int)code(c, m, k) - 8); }
};
template <> struct Codec<Q8_0> {
  static __device__ const uint8_t* block(const Canon& c, size_t m, int k) { return c.q + (m * (c.K / 32) + k / 32) * 34; }
  static __device__ uint32_t code(const Canon& c, size_t m, int k) { return block(c, m, k)[2 + (k & 31)]; }
  static __device__ double value(const Canon& c, size_t m, int k) { return (double)h2f(block(c, m, k)) * (int8_t)code(c, m, k); }
};
template <> struct Codec<Q4_K> {
  static __device__ const uint8_t* block(const Canon& c, size_t m, int k) { return c.q + (m * (c.K / 256) + k / 256) * 144; }
  static __device__ uint32_t code(const Canon& c, size_t m, int k) {
    int i = k & 255;
    return block(c, m, k)[16 + i / 64 * 32 + (i & 31)] >> (i >> 5 & 1) * 4 & 15;
  }
  static __device__ double value(const Canon& c, size_t m, int k) {
    const uint8_t* b = block(c, m, k); const uint8_t* s = b + 4;
    int j = (k & 255) / 32;
    int sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, mn = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
    return (double)h2f(b) * sc * code(c, m, k) - (double)h2f(b + 2) * mn;
  }
};

// Random canonical data: every code, scales over a wide range, no NaN.
template <class F> __global__ void fill_canon(uint8_t* q, uint8_t* s, size_t M, int K, uint32_t seed) {
  const char* f = F::NAME;
  size_t nq = M * q_row_bytes(f, K), ns = M * s_row_bytes(f, K);
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < nq; i += (size_t)gridDim.x * blockDim.x) {
    uint32_t r = hash32(i, seed);
    if (f[0] == 'b') { if (i % 2 == 0) ((uint16_t*)q)[i / 2] = __float2bfloat16_rn(uniform(i, seed)).operator __nv_bfloat16_raw().x; continue; }
    uint8_t v = r;
    if (f[0] == 'f' && (v & 127) == 127) v = 0x15;
    int blk = f[0] != 'q' ? 0 : f[1] == '8' ? 34 : f[3] == '0' ? 18 : 144, at = blk ? i % blk : 0;
    if (blk && (at == 1 || (blk == 144 && at == 3))) v = 0x1c + (r & 7);  // high byte of an f16: 2^-8 to 2^-6
    q[i] = v;
  }
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < ns; i += (size_t)gridDim.x * blockDim.x) {
    if (f[0] == 'f') { if (i % 4 == 0) ((float*)s)[i / 4] = 0.01f * (1.5f + uniform(i, seed + 1)); }
    else s[i] = hash32(i, seed + 1) % 0x7f;
  }
}

// One thread writes one lane's bytes of one chunk.
template <class F> __global__ void pack(uint8_t* out, Canon c, size_t strips) {
  const int chunks = c.K / F::KC;
  for (size_t id = blockIdx.x * (size_t)blockDim.x + threadIdx.x; id < strips * chunks * 32; id += (size_t)gridDim.x * blockDim.x) {
    const int lane = id & 31, g = lane >> 2, t = lane & 3, ch = id / 32 % chunks;
    const size_t m0 = id / 32 / chunks * 16 + g, k0 = (size_t)ch * F::KC;
    uint8_t* o = out + id / 32 * F::CB;
    auto q = [&](int r, int k) { return Codec<F>::code(c, m0 + 8 * r, k0 + k); };
    const char f = F::NAME[0], f1 = F::NAME[1];
    if (f == 'b') {
      for (int j = 0; j < 4; j++)
        for (int w = 0; w < 4; w++) ((uint32_t*)(o + j * 512 + lane * 16))[w] = q(w & 1, 32 * (j >> 1) + 8 * t + 4 * (j & 1) + (w >> 1) * 2) | q(w & 1, 32 * (j >> 1) + 8 * t + 4 * (j & 1) + (w >> 1) * 2 + 1) << 16;
    } else if (f == 'f') {
      for (int r = 0; r < 2; r++)
        for (int j = 0; j < 4; j++) { int k = 32 * (j >> 1) + 8 * t + 4 * (j & 1); ((uint32_t*)(o + r * 512 + lane * 16))[j] = q(r, k + 2) | q(r, k) << 8 | q(r, k + 3) << 16 | q(r, k + 1) << 24; }
    } else if (f == 'n') {
      for (int r = 0; r < 2; r++) {
        for (int w = 0; w < 2; w++) {
          uint32_t v = 0;
          for (int h = 0; h < 2; h++) {  // half word h: values k = 0, 2, 4, 6 (+ h) of eight
            uint32_t n[4];
            for (int i = 0; i < 4; i++) n[i] = q(r, 16 * t + 8 * w + 2 * i + h);
            uint32_t x = (n[0] >> 3) << 15 | (n[0] & 7) << 6 | (n[1] >> 3) << 12 | (n[1] & 7) << 3 | (n[2] >> 3) << 9 | (n[2] & 7) | (n[3] >> 3) << 14 | (n[3] >> 2 & 1) << 13 | (n[3] & 3) << 10;
            v |= x << 16 * h;
          }
          ((uint32_t*)(o + lane * 16))[r * 2 + w] = v;
        }
        o[512 + lane * 2 + r] = c.s[(m0 + 8 * r) * (c.K / 16) + k0 / 16 + t];
      }
    } else if (f1 == '8') {
      for (int h = 0; h < 2; h++)
        for (int r = 0; r < 2; r++) {
          for (int i = 0; i < 2; i++) { int k = 32 * h + 8 * t + 4 * i; ((uint32_t*)(o + h * 512 + lane * 16))[r * 2 + i] = (q(r, k) | q(r, k + 2) << 8 | q(r, k + 1) << 16 | q(r, k + 3) << 24) ^ 0x80808080u; }
          if (t == 0) ((uint16_t*)(o + 1024 + g * 8))[h * 2 + r] = *(const uint16_t*)(c.q + ((m0 + 8 * r) * (c.K / 32) + k0 / 32 + h) * 34);
        }
    } else {
      for (int p = 0; p < F::KC / 64; p++)
        for (int h = 0; h < 2; h++)
          for (int r = 0; r < 2; r++) {
            uint32_t v = 0;
            for (int i = 0; i < 8; i++) v |= q(r, 64 * p + 32 * h + 8 * t + i) << (4 * (i >> 1) + 16 * (i & 1));
            ((uint32_t*)(o + p * 512 + lane * 16))[h * 2 + r] = v;
            if (F::KC == 64 && t == 0) ((uint16_t*)(o + 512 + g * 8))[h * 2 + r] = *(const uint16_t*)(c.q + ((m0 + 8 * r) * (c.K / 32) + k0 / 32 + h) * 18);
          }
      if (F::KC == 256) for (int r = 0; r < 2; r++) ((uint32_t*)(o + 2048 + (g + 8 * r) * 16))[t] = *(const uint32_t*)(c.q + ((m0 + 8 * r) * (c.K / 256) + ch) * 144 + t * 4);
    }
  }
}

// x as NVFP4's kernel wants it: place 32h + 8t + i of each 64 holds input 16t + 8h + i.
static __global__ void permute_x(bf16* o, const bf16* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, at = i & 63;
  if (i < n) o[i] = x[(i & ~63) | (at >> 3 & 3) << 4 | (at >> 5) << 3 | (at & 7)];
}

// Reference in float64: one warp a weight row, all x rows. Expert mode: pair p = row * 8 + slot uses expert ids8[p].
template <class F> __global__ void reference(double* out, Canon c, size_t M, const bf16* x, int ldx, int rows, const int* ids8, int xshift) {
  const int lane = threadIdx.x & 31;
  for (size_t w = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) >> 5; w < M * (ids8 ? rows : 1); w += ((size_t)gridDim.x * blockDim.x) >> 5) {
    const size_t m = w % M, row = ids8 ? ids8[w / M] * M + m : m;
    double s[16] = {};
    for (int k = lane; k < c.K; k += 32) {
      double v = Codec<F>::value(c, row, k);
      if (ids8) s[0] += v * (double)__bfloat162float(x[(size_t)((w / M) >> xshift) * ldx + k]);
      else
        for (int n = 0; n < 16; n++) if (n < rows) s[n] += v * (double)__bfloat162float(x[(size_t)n * ldx + k]);
    }
    for (int n = 0; n < 16; n++)
      for (int o = 16; o; o >>= 1) s[n] += __shfl_xor_sync(~0u, s[n], o);
    if (lane == 0) {
      if (ids8) out[w] = s[0] * c.scale;
      else
        for (int n = 0; n < rows; n++) out[(size_t)n * M + m] = s[n] * c.scale;
    }
  }
}

// |out - ref|^2, |ref|^2, count of values that are not finite, count of bits that differ from a second run.
static __global__ void compare(const float* o, const float* o2, const double* r, size_t n, int planes, double* res) {
  double a = 0, b = 0, c = 0, d = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    float v = 0;
    for (int p = 0; p < planes; p++) { v += o[p * n + i]; if (__float_as_uint(o[p * n + i]) != __float_as_uint(o2[p * n + i])) d++; }
    if (!isfinite(v)) c++;
    a += (v - r[i]) * (v - r[i]); b += r[i] * r[i];
  }
  for (int k = 16; k; k >>= 1) { a += __shfl_xor_sync(~0u, a, k); b += __shfl_xor_sync(~0u, b, k); c += __shfl_xor_sync(~0u, c, k); d += __shfl_xor_sync(~0u, d, k); }
  if ((threadIdx.x & 31) == 0) { atomicAdd(res, a); atomicAdd(res + 1, b); atomicAdd(res + 2, c); atomicAdd(res + 3, d); }
}
