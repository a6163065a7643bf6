// Skinny GEMM for decode: out[n][m] = sum_k W[m][k] x[n][k] for 1..16 rows n, weights in their own format, float32 sums.
//
// The weights are the A operand of mma.m16n8k16, so that one to eight rows cost the same and the FMA pipe stays free for
// scales. W is packed at load into strips of 16 output rows; a strip is a run of chunks (16 rows x 64 inputs, Q4_K 256), a
// chunk holds each lane's fragment bytes in the order in which the lane reads them, scales behind. Which k a lane holds is free
// as long as x follows: lane t of a quad reads x[8t..8t+7] and x[32+8t..32+8t+7] of each 64 (whole sectors, no bank conflict). For NVFP4, whose
// lanes hold one block of 16 each, x is stored with each 64 permuted: place 32h + 8t + i holds input 16t + 8h + i.
//
// A ninth warp streams the block's strips through a ring in shared memory with the copy engine, 16 to 36 KB a stage; the 8 consumer warps
// share a stage's chunks out among them and add their sums through shared memory at the end of a strip. A block owns whole strips (or a fixed
// part of k, "planes"): no block waits for another. The ring is filled before griddepcontrol.wait, so under programmatic
// dependent launch the weights are already there when the kernel before ends. Blocks with one strip more than others don't matter while the rest
// keeps enough bytes in flight.
#pragma once
#include "common.cuh"

struct SkinnyArgs {
  const uint8_t* w; size_t strip_bytes, group_bytes;
  int strips, K, lwm;         // strips of 16 rows (of one expert); the 8 warps are 2^lwm strips x 8 >> lwm parts of k
  const bf16* x; int ldx, rows, xrows;  // xrows: rows of x to keep in shared memory (experts: all of them)
  float* out; int M;
  const float* row_scale; float scale;
  int planes;                 // above 1: plane i of out holds the sums over the i-th part of k, for the next kernel to add
  // Experts, read on the device: experts[0] groups; group i has expert [1 + i], [129 + i] rows, and their pairs row * 8 + slot in [257 + 16 i ...].
  const int* experts; int xshift;
  // FUSE & 1, x is made here: v = resid + norm(sum of in_planes) * gain_post; x = norm(v) * gain_pre; block 0 stores v.
  const float *resid, *in; int in_planes; const float *gain_post, *gain_pre; float* resid_out;
  // FUSE & 2: rows g of a strip are gate, g + 8 up; hidden[n][m / 2] = gelu_tanh(gate) * up in bf16.
  bf16* hidden;
};

// Where input k of x is stored. Wide formats (a lane's 16 weights are one block): input 16t + 8h + j of each 64 at place 32h + 8t + j.
__device__ __forceinline__ int x_place(bool wide, int k) { return wide ? (k & ~63) | (k >> 3 & 1) << 5 | (k >> 4 & 3) << 3 | (k & 7) : k; }
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ float gelu_tanh(float x) { return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
constexpr float NORM_EPS = 1e-6f;
// The closing and opening norms of a layer, done by every block for itself: K <= 3072 values of RM rows in registers.
template <class F> __device__ __forceinline__ uint4 prescale(uint4 v);
struct Gains { float4 post[3], pre[3]; };
__device__ __forceinline__ Gains load_gains(const SkinnyArgs& a) {  // weights, so they may be read before the kernel before has ended
  Gains g;
#pragma unroll
  for (int j = 0; j < 3; j++) {
    const int i = threadIdx.x + j * 256;
    if (i < a.K / 4) { g.post[j] = ((const float4*)a.gain_post)[i]; g.pre[j] = ((const float4*)a.gain_pre)[i]; }
  }
  return g;
}
template <class F, int RM> __device__ __forceinline__ void make_x(const SkinnyArgs& a, const Gains& gains, bf16* xs, int stride, float* red) {
  const int tid = threadIdx.x, n4 = a.K / 4;
  float4 v[RM][3];
  float ss[RM];
  auto block_sum = [&]() {
#pragma unroll
    for (int r = 0; r < RM; r++) {
      for (int o = 16; o; o >>= 1) ss[r] += __shfl_xor_sync(~0u, ss[r], o);
      if ((tid & 31) == 0) red[(tid >> 5) * RM + r] = ss[r];
    }
    consumers_sync();
#pragma unroll
    for (int r = 0; r < RM; r++) { ss[r] = 0; for (int w = 0; w < 8; w++) ss[r] += red[w * RM + r]; }
    consumers_sync();
  };
  float4 res[1][3];  // one row: kept; more: read again, for registers
#pragma unroll
  for (int r = 0; r < RM; r++) {
    ss[r] = 0;
#pragma unroll
    for (int j = 0; j < 3; j++) {
      int i = tid + j * 256;
      v[r][j] = make_float4(0, 0, 0, 0);
      if (i < n4) {
        if (RM == 1) res[0][j] = ((const float4*)a.resid)[i];
        for (int p = 0; p < a.in_planes; p++) { float4 u = ((const float4*)a.in)[(p * RM + r) * n4 + i]; v[r][j].x += u.x; v[r][j].y += u.y; v[r][j].z += u.z; v[r][j].w += u.w; }
      }
      ss[r] += v[r][j].x * v[r][j].x + v[r][j].y * v[r][j].y + v[r][j].z * v[r][j].z + v[r][j].w * v[r][j].w;
    }
  }
  block_sum();
#pragma unroll
  for (int r = 0; r < RM; r++) {
    float s = rsqrtf(ss[r] / a.K + NORM_EPS);
    ss[r] = 0;
#pragma unroll
    for (int j = 0; j < 3; j++) {
      int i = tid + j * 256;
      if (i < n4) {
        const float4 g = gains.post[j];
        float4& u = v[r][j];
        const float4 h = RM == 1 ? res[0][j] : ((const float4*)a.resid)[r * n4 + i];
        u = make_float4(h.x + u.x * s * g.x, h.y + u.y * s * g.y, h.z + u.z * s * g.z, h.w + u.w * s * g.w);
        if (blockIdx.x == 0) ((float4*)a.resid_out)[r * n4 + i] = u;
        ss[r] += u.x * u.x + u.y * u.y + u.z * u.z + u.w * u.w;
      }
    }
  }
  block_sum();
#pragma unroll
  for (int r = 0; r < RM; r++) {
    float s = rsqrtf(ss[r] / a.K + NORM_EPS);
#pragma unroll
    for (int j = 0; j < 3; j++) {
      int i = tid + j * 256;
      if (i < n4) {
        const float4 g = gains.pre[j], u = v[r][j];
        const uint4 x = prescale<F>(make_uint4(pack_bf16x2(u.x * s * g.x, u.y * s * g.y), pack_bf16x2(u.z * s * g.z, u.w * s * g.w), 0, 0));
        *(uint2*)(xs + r * stride + x_place(F::WIDE, 4 * i)) = make_uint2(x.x, x.y);
      }
    }
  }
  consumers_sync();
}

// ---- formats: chunk layout and decode to exact bf16 (times a power of two) ----
__device__ __forceinline__ float2 half2_at(const uint8_t* p) { return __half22float2(*(const __half2*)p); }

struct Bf16 {
  static constexpr const char* NAME = "bf16";
  static constexpr int KC = 64, CB = 2048, SCRATCH = 0;
  static constexpr bool WIDE = false;
  static constexpr uint32_t PRE0 = 0, PRE1 = 0;
  static constexpr float POST = 1.f;
  static __device__ void chunk_begin(const uint8_t*, int, float*) {}
  template <int MS, int NT>
  static __device__ __forceinline__ void piece(const uint8_t* c, int ms_stride, int, int lane, uint32_t (&b)[NT][8], float (&acc)[MS][NT][4], const float*) {
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

// A scale a row, applied to the sum. Lane: 16 bytes of row g, 16 of row g + 8; byte order k2 k0 k3 k1.
struct Fp8 {
  static constexpr const char* NAME = "fp8";
  static constexpr int KC = 64, CB = 1024, SCRATCH = 0;
  static constexpr bool WIDE = false;
  static constexpr uint32_t PRE0 = POW2_100, PRE1 = POW2_100;
  static constexpr float POST = 1048576.f;  // 2^20
  static __device__ void chunk_begin(const uint8_t*, int, float*) {}
  template <int MS, int NT>
  static __device__ __forceinline__ void piece(const uint8_t* c, int ms_stride, int, int lane, uint32_t (&b)[NT][8], float (&acc)[MS][NT][4], const float*) {
#pragma unroll
    for (int ms = 0; ms < MS; ms++) {
      uint4 r0 = *(const uint4*)(c + ms * ms_stride + lane * 16), r1 = *(const uint4*)(c + ms * ms_stride + 512 + lane * 16);
      const uint32_t* p0 = &r0.x; const uint32_t* p1 = &r1.x;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t a0 = e4m3_hi_to_bf16x2(p0[j]), a1 = e4m3_hi_to_bf16x2(p1[j]);
        uint32_t a2 = e4m3_hi_to_bf16x2(p0[j] << 8), a3 = e4m3_hi_to_bf16x2(p1[j] << 8);
#pragma unroll
        for (int n = 0; n < NT; n++) mma(acc[ms][n], a0, a1, a2, a3, b[n][2 * j], b[n][2 * j + 1]);
      }
    }
  }
};

// A lane's 16 inputs of a row are one block, so its scale multiplies the weights: 2 x 4 significant bits, exact in bf16.
// A half word holds four values with their fields so placed that three come out with one shift and one mask.
struct Nvfp4 {
  static constexpr const char* NAME = "nvfp4";
  static constexpr int KC = 64, CB = 576, SCRATCH = 0;
  static constexpr bool WIDE = true;
  static constexpr uint32_t PRE0 = 0, PRE1 = 0;
  static constexpr float POST = 65536.f;  // 2^16
  static __device__ void chunk_begin(const uint8_t*, int, float*) {}
  template <int I> static __device__ __forceinline__ uint32_t decode(uint32_t v) {
    constexpr uint32_t F = 0x81c081c0u;
    if (I == 0) return v & F;
    if (I == 1) return (v << 3) & F;
    if (I == 2) return (v << 6) & F;
    return ((v << 1) & 0x80008000u) | ((v >> 5) & 0x01000100u) | ((v >> 4) & 0x00c000c0u);
  }
  template <int MS, int NT>
  static __device__ __forceinline__ void piece(const uint8_t* c, int ms_stride, int, int lane, uint32_t (&b)[NT][8], float (&acc)[MS][NT][4], const float*) {
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

// Blocks of 32 with an 11-bit scale: the integers go to the tensor core as they are, and d * (sum q x - zero * sum x) is formed in float32.
// An integer below 256 in the low bits of a bf16 is q * 2^-133, so nothing is converted: a mask is the decode. sum x comes from a product with ones.
// b holds 8 words: block h uses words 4h..4h+3.
template <int NT> __device__ __forceinline__ void block_x_sums(float (&X)[NT][4], const uint32_t (&b)[NT][8], int h, uint32_t one0, uint32_t one1) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    X[n][0] = X[n][1] = X[n][2] = X[n][3] = 0;
    mma(X[n], one0, one0, one1, one1, b[n][4 * h], b[n][4 * h + 1]);
    mma(X[n], one0, one0, one1, one1, b[n][4 * h + 2], b[n][4 * h + 3]);
  }
}
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

struct Q4_0 {
  static constexpr const char* NAME = "q4_0";
  static constexpr int KC = 64, CB = 576, SCRATCH = 0;
  static constexpr bool WIDE = false;
  static constexpr uint32_t PRE0 = POW2_100, PRE1 = POW2_96;
  static constexpr float POST = 8589934592.f;  // 2^33
  static __device__ void chunk_begin(const uint8_t*, int, float*) {}
  template <int MS, int NT>
  static __device__ __forceinline__ void piece(const uint8_t* c, int ms_stride, int, int lane, uint32_t (&b)[NT][8], float (&acc)[MS][NT][4], const float*) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float X[NT][4], P[NT][4];
      block_x_sums<NT>(X, b, h, 0x00010001u, 0x00100010u);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        uint2 v = *(const uint2*)(c + ms * ms_stride + lane * 16 + h * 8);
        float2 d = half2_at(c + ms * ms_stride + 512 + (lane >> 2) * 8 + h * 4);
        int4_block<NT>(P, v.x, v.y, b, h);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          acc[ms][n][0] += d.x * fmaf(-8.f, X[n][0], P[n][0]); acc[ms][n][1] += d.x * fmaf(-8.f, X[n][1], P[n][1]);
          acc[ms][n][2] += d.y * fmaf(-8.f, X[n][0], P[n][2]); acc[ms][n][3] += d.y * fmaf(-8.f, X[n][1], P[n][3]);
        }
      }
    }
  }
};

// Bytes are stored as q + 128; order k0 k2 k1 k3.
struct Q8_0 {
  static constexpr const char* NAME = "q8_0";
  static constexpr int KC = 64, CB = 1088, SCRATCH = 0;
  static constexpr bool WIDE = false;
  static constexpr uint32_t PRE0 = POW2_100, PRE1 = POW2_100;
  static constexpr float POST = 8589934592.f;
  static __device__ void chunk_begin(const uint8_t*, int, float*) {}
  template <int MS, int NT>
  static __device__ __forceinline__ void piece(const uint8_t* c, int ms_stride, int, int lane, uint32_t (&b)[NT][8], float (&acc)[MS][NT][4], const float*) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float X[NT][4], P[NT][4];
      block_x_sums<NT>(X, b, h, 0x00010001u, 0x00010001u);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        uint4 v = *(const uint4*)(c + ms * ms_stride + h * 512 + lane * 16);
        float2 d = half2_at(c + ms * ms_stride + 1024 + (lane >> 2) * 8 + h * 4);
#pragma unroll
        for (int n = 0; n < NT; n++) P[n][0] = P[n][1] = P[n][2] = P[n][3] = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          uint32_t r0 = i ? v.y : v.x, r1 = i ? v.w : v.z;
          uint32_t a0 = r0 & 0x00ff00ffu, a1 = r1 & 0x00ff00ffu, a2 = (r0 >> 8) & 0x00ff00ffu, a3 = (r1 >> 8) & 0x00ff00ffu;
#pragma unroll
          for (int n = 0; n < NT; n++) mma(P[n], a0, a1, a2, a3, b[n][4 * h + 2 * i], b[n][4 * h + 2 * i + 1]);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
          acc[ms][n][0] += d.x * fmaf(-128.f, X[n][0], P[n][0]); acc[ms][n][1] += d.x * fmaf(-128.f, X[n][1], P[n][1]);
          acc[ms][n][2] += d.y * fmaf(-128.f, X[n][0], P[n][2]); acc[ms][n][3] += d.y * fmaf(-128.f, X[n][1], P[n][3]);
        }
      }
    }
  }
};

// Chunk: 4 pieces of 64 inputs as Q4_0's, then each row's 16 header bytes (d, dmin, 8 six-bit scales and mins) as in the file. The warp
// unpacks the header once a chunk into scratch: 8 blocks x 8 lanes' rows {s_g, m_g, s_g+8, m_g+8}.
struct Q4_K {
  static constexpr const char* NAME = "q4_k";
  static constexpr int KC = 256, CB = 2304, SCRATCH = 1024;
  static constexpr bool WIDE = false;
  static constexpr uint32_t PRE0 = POW2_100, PRE1 = POW2_96;
  static constexpr float POST = 8589934592.f;
  static __device__ __forceinline__ void chunk_begin(const uint8_t* c, int lane, float* scratch) {
    int row = lane >> 1, half = lane & 1;
    uint4 h = *(const uint4*)(c + 2048 + row * 16);
    float2 d = __half22float2(*(const __half2*)&h.x);
    uint32_t s = half ? ((h.w & 0x0f0f0f0fu) | ((h.y >> 2) & 0x30303030u)) : (h.y & 0x3f3f3f3fu);
    uint32_t m = half ? (((h.w >> 4) & 0x0f0f0f0fu) | ((h.z >> 2) & 0x30303030u)) : (h.z & 0x3f3f3f3fu);
    float* o = scratch + ((half * 4) * 8 + (row & 7)) * 4 + (row >> 3) * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) *(float2*)(o + i * 32) = make_float2(d.x * (float)((s >> (8 * i)) & 255), d.y * (float)((m >> (8 * i)) & 255));
  }
  template <int MS, int NT>
  static __device__ __forceinline__ void piece(const uint8_t* c, int ms_stride, int p, int lane, uint32_t (&b)[NT][8], float (&acc)[MS][NT][4], const float* scratch) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float X[NT][4], P[NT][4];
      block_x_sums<NT>(X, b, h, 0x00010001u, 0x00100010u);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        uint2 v = *(const uint2*)(c + ms * ms_stride + p * 512 + lane * 16 + h * 8);
        float4 sm = *(const float4*)(scratch + ms * 256 + ((2 * p + h) * 8 + (lane >> 2)) * 4);
        int4_block<NT>(P, v.x, v.y, b, h);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          acc[ms][n][0] += sm.x * P[n][0] - sm.y * X[n][0]; acc[ms][n][1] += sm.x * P[n][1] - sm.y * X[n][1];
          acc[ms][n][2] += sm.z * P[n][2] - sm.w * X[n][0]; acc[ms][n][3] += sm.z * P[n][3] - sm.w * X[n][1];
        }
      }
    }
  }
};

// ---- the kernel ----
// x of one row tile for 64 inputs as B fragments. Columns beyond the rows may hold anything: no column touches another.
template <class F, bool XS> __device__ __forceinline__ void load_x(uint32_t (&b)[8], const bf16* row, int k, int t) {
  const bf16* p = row + k + 8 * t;
  uint4 u = *(const uint4*)p, v = *(const uint4*)(p + 32);
  b[0] = u.x; b[1] = u.y; b[2] = u.z; b[3] = u.w; b[4] = v.x; b[5] = v.y; b[6] = v.z; b[7] = v.w;
  if (!XS && F::PRE0) {
#pragma unroll
    for (int i = 0; i < 8; i++) b[i] = mul_bf16x2(b[i], i & 1 ? F::PRE1 : F::PRE0);
  }
}
template <class F> __device__ __forceinline__ uint4 prescale(uint4 v) {
  if (F::PRE0) { v.x = mul_bf16x2(v.x, F::PRE0); v.y = mul_bf16x2(v.y, F::PRE1); v.z = mul_bf16x2(v.z, F::PRE0); v.w = mul_bf16x2(v.w, F::PRE1); }
  return v;
}

// A stage holds CW chunks for each of the 8 consumer warps and each of a warp's MS strips.
template <class F, int CW, int NS, int MS, int NT> __host__ __device__ constexpr size_t skinny_smem() {
  return (size_t)NS * 8 * CW * MS * F::CB + 8 * MS * F::SCRATCH + 2 * 8 * MS * NT * 512 + (2 * NS + 4) * 8;
}
// x in shared memory (XS): rows padded by 16 bytes, so that eight rows' reads fall into different banks.
__host__ __device__ constexpr size_t skinny_x_bytes(int rows, int K, int planes) { return (size_t)rows * (((K / 64 + planes - 1) / planes + 3) * 64 * 2 + 16); }

template <class F, int CW, int NS, int MS, int NT, int OCC, bool XS, bool GROUPED, int FUSE = 0, int RM = 1>
__global__ void __launch_bounds__(288, OCC) skinny(const __grid_constant__ SkinnyArgs a) {
  constexpr int STAGE = 8 * CW * MS * F::CB, PIECES = F::KC / 64, SETS = MS * NT == 1 ? 2 : 1;  // two sets of sums where one would be a chain
  extern __shared__ __align__(128) uint8_t sm[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float* scratch = (float*)(sm + NS * STAGE + warp * MS * F::SCRATCH);
  float* red = (float*)(sm + NS * STAGE + 8 * MS * F::SCRATCH);
  uint64_t* full = (uint64_t*)(red + 2 * 8 * MS * NT * 128);
  uint64_t* empty = full + NS;
  uint64_t *rfull = empty + NS, *rempty = rfull + 2;  // the two buffers in which warps leave their sums
  const int reducers = min(a.rows, 8);                // warps that add them up and write the outputs
  const int lwk = 3 - a.lwm, wk_n = 1 << lwk, cps = CW << lwk, lunit = a.lwm + (MS == 2), unit_strips = 1 << lunit;  // cps: chunks a stage holds of each strip
  // A block keeps to one part of k (its plane) and takes every (grid / planes)-th unit of strips.
  const int chunks = a.K / F::KC, planes = a.planes, plane = blockIdx.x % planes, c0 = chunks * plane / planes, c1 = chunks * (plane + 1) / planes;
  const int per_expert = (a.strips + unit_strips - 1) >> lunit, u0 = blockIdx.x / planes, ustep = gridDim.x / planes;
  if (threadIdx.x == 256) {
    for (int i = 0; i < NS; i++) { mbar_init(full + i, 1); mbar_init(empty + i, 8); }
    for (int i = 0; i < 2; i++) { mbar_init(rfull + i, 256); mbar_init(rempty + i, reducers); }
    fence_barrier_init();
    fence_proxy_async();
  }
  __syncthreads();
  pdl_launch();

  if (warp == 8) {  // the producer: one lane asks for every stage, weights only, so it waits for no kernel (but for expert ids)
    if (GROUPED) pdl_wait();
    int my_id[4], n_groups = 1;
    if (GROUPED) {
      n_groups = __ldcg(a.experts);
#pragma unroll
      for (int i = 0; i < 4; i++) my_id[i] = __ldcg(a.experts + 1 + i * 32 + lane);  // beyond n_groups: never used
    }
    const int units = per_expert * n_groups;
    int slot = 0, parity = 1;
    for (int u = u0; u < units; u += ustep) {
      const int e = GROUPED ? u / per_expert : 0, first = (u - e * per_expert) * unit_strips, n = min(unit_strips, a.strips - first);
      int id = 0;
      if (GROUPED) {
#pragma unroll
        for (int i = 0; i < 4; i++) { int v = __shfl_sync(~0u, my_id[i], e & 31); if (e >> 5 == i) id = v; }
      }
      const uint8_t* src = a.w + id * a.group_bytes + first * a.strip_bytes;
      for (int c = c0; c < c1; c += cps) {
        const uint32_t bytes = min(cps, c1 - c) * F::CB;
        if (lane == 0) {
          mbar_wait(empty + slot, parity);
          mbar_expect(full + slot, bytes * n);
          for (int i = 0; i < n; i++) bulk_load(sm + slot * STAGE + i * cps * F::CB, src + i * a.strip_bytes + (size_t)c * F::CB, bytes, full + slot);
        }
        __syncwarp();
        if (++slot == NS) { slot = 0; parity ^= 1; }
      }
    }
    return;
  }

  Gains gains;
  if (FUSE & 1) gains = load_gains(a);
  pdl_wait();
  bf16* xs = (bf16*)(sm + skinny_smem<F, CW, NS, MS, NT>());
  const int kx0 = c0 * F::KC, kx = (c1 - c0) * F::KC, stride = XS ? kx + 8 : a.ldx;
  if (FUSE & 1) make_x<F, RM>(a, gains, xs, stride, red);
  else if (XS) {
    const int n = kx / 8, total = a.xrows * n;
    if (a.xrows == 1)  // short enough that the divisions below would cost more than they save
      for (int i = threadIdx.x; i < n; i += 256) *(uint4*)(xs + 8 * i) = prescale<F>(*(const uint4*)(a.x + kx0 + 8 * i));
    else for (int i0 = threadIdx.x; i0 < total; i0 += 8 * 256) {  // eight loads in flight: one at a time costs 0.3 us each
      uint4 v[8];
      int at[8];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int i = i0 + j * 256, r = i / n, k = (i - r * n) * 8;
        at[j] = i < total ? r * stride + k : -1;
        if (at[j] >= 0) v[j] = *(const uint4*)(a.x + (size_t)r * a.ldx + kx0 + k);
      }
#pragma unroll
      for (int j = 0; j < 8; j++) if (at[j] >= 0) *(uint4*)(xs + at[j]) = prescale<F>(v[j]);
    }
    consumers_sync();
  }
  const int units = per_expert * (GROUPED ? *a.experts : 1), wm = warp & ((1 << a.lwm) - 1), wk = warp >> a.lwm;
  int slot = 0, parity = 0, it = 0;
  // Rows of a group and which rows of x its columns take; asked for one unit ahead.
  struct Rows { int n, row[NT]; };
  auto rows_of = [&](int u) {
    Rows r = {a.rows, {}};
    const int e = GROUPED ? u / per_expert : 0;
    if (GROUPED) r.n = a.experts[129 + e];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      r.row[n] = n * 8 + g;
      if (GROUPED) r.row[n] = a.experts[257 + 16 * e + r.row[n]];  // beyond the rows: anything, mended below
    }
    return r;
  };
  Rows next = {};
  if (u0 < units) next = rows_of(u0);
  for (int u = u0; u < units; u += ustep, it++) {
    const int e = GROUPED ? u / per_expert : 0, first = (u - e * per_expert) * unit_strips, rows = next.n;
    const int* pairs = a.experts + 257 + 16 * e;
    const bf16* xr[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      int row = next.row[n];
      if (GROUPED) {  // columns beyond the rows take the first row's x
        const int r0 = __shfl_sync(~0u, next.row[0], 0);
        row = (n * 8 + g < rows ? row : r0) >> a.xshift;
      } else row = min(row, rows - 1);
      xr[n] = XS ? xs + row * stride - kx0 : a.x + (size_t)row * stride;
    }
    if (GROUPED && u + ustep < units) next = rows_of(u + ustep);
    float acc[SETS][MS][NT][4] = {};
    constexpr bool AHEAD = !XS && PIECES == 1;  // x from global memory is asked for one chunk ahead
    uint32_t bx[NT][8];
    if (AHEAD) {
#pragma unroll
      for (int n = 0; n < NT; n++) load_x<F, XS>(bx[n], xr[n], min(c0 + wk, c1 - 1) * F::KC, t);
    }
    for (int c = c0; c < c1; c += cps) {
      const int mine = (min(cps, c1 - c) - wk + wk_n - 1) >> lwk;  // this warp's chunks of the stage: wk, wk + wk_n, ...
      const uint8_t* ch = sm + slot * STAGE + (wm * MS * cps + wk) * F::CB;
      int k = (c + wk) * F::KC;
      auto chunk = [&](int set) {
        if (F::SCRATCH) {
          __syncwarp();
#pragma unroll
          for (int ms = 0; ms < MS; ms++) F::chunk_begin(ch + ms * cps * F::CB, lane, scratch + ms * 256);
          __syncwarp();
        }
#pragma unroll
        for (int q = 0; q < PIECES; q++) {
          uint32_t b[NT][8];
#pragma unroll
          for (int n = 0; n < NT; n++) {
            if (AHEAD) {
#pragma unroll
              for (int i = 0; i < 8; i++) b[n][i] = bx[n][i];
              load_x<F, XS>(bx[n], xr[n], min(k + wk_n * F::KC, (c1 - 1) * F::KC), t);
            } else load_x<F, XS>(b[n], xr[n], k + q * 64, t);
          }
          F::template piece<MS, NT>(ch, cps * F::CB, q, lane, b, acc[(set + q) % SETS], scratch);
        }
        ch += wk_n * F::CB;
        k += wk_n * F::KC;
      };
      mbar_wait(full + slot, parity);
      int j = 0;
      if (CW >= 4 && NT == 1 && F::PRE0 == 0)  // the integer formats would run out of registers
        for (; j + 3 < mine; j += 4) { chunk(0); chunk(1); chunk(0); chunk(1); }
      if (CW >= 2)
        for (; j + 1 < mine; j += 2) { chunk(0); chunk(1); }
      for (; j < mine; j++) chunk(0);
      __syncwarp();
      if (lane == 0) mbar_arrive(empty + slot);
      if (++slot == NS) { slot = 0; parity ^= 1; }
    }
    // Sum over the warps that shared the strips' inputs, in warp order. No barrier: the warps go on to the next unit, one of them in turn (all, for many
    // rows) waits for the others' sums; a thread takes output row i % 16 of a strip and column.
    const int buf = it & 1, phase = it >> 1 & 1;
    float* rb = red + buf * 8 * MS * NT * 128;
    if (it >= 2) mbar_wait(rempty + buf, phase ^ 1);
#pragma unroll
    for (int ms = 0; ms < MS; ms++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float4 s = *(float4*)acc[0][ms][n];
        if (SETS == 2) { float4 o = *(float4*)acc[SETS - 1][ms][n]; s.x += o.x; s.y += o.y; s.z += o.z; s.w += o.w; }
        *(float4*)(rb + ((warp * MS + ms) * NT + n) * 128 + lane * 4) = s;
      }
    mbar_arrive(rfull + buf);  // every lane for itself: racecheck does not follow a warp's writes through one lane's arrival
    const int turn = (warp - it) & 7;
    if (turn >= reducers) continue;
    mbar_wait(rfull + buf, phase);
    for (int i = turn * 32 + lane; i < unit_strips * 16 * rows; i += reducers * 32) {
      const int row = i & 15, strip = (i >> 4) & (unit_strips - 1), col = i >> 4 >> lunit, m = (first + strip) * 16 + row;
      auto sum = [&](int r) {
        const float* at = rb + strip * NT * 128 + (col >> 3) * 128 + ((r & 7) * 4 + (col & 7) / 2) * 4 + (r >> 3) * 2 + (col & 1);
        float s = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) if (w < wk_n) s += at[(w << lunit) * NT * 128];
        return s * a.scale * F::POST;
      };
      if (first + strip >= a.strips) continue;
      if (FUSE & 2) {
        if (row < 8) a.hidden[(size_t)col * (a.M / 2) + x_place(F::WIDE, (first + strip) * 8 + row)] = __float2bfloat16(gelu_tanh(sum(row)) * sum(row + 8));
      } else {
        const float sc = a.row_scale ? a.row_scale[(GROUPED ? (size_t)a.experts[1 + e] * a.M : 0) + m] : 1.f;
        a.out[((size_t)plane * a.rows + (GROUPED ? pairs[col] : col)) * a.M + m] = sum(row) * sc;
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(rempty + buf);
  }
}
