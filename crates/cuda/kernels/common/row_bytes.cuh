// One row of x against weights of four bits: out[m] = sum_k W[m][k] x[k], float32 sums of exact integer products.
//
// The skinny kernel (skinny.cuh) multiplies block by block and scales 16 x 8 sums in float32 after each, though at one row seven of the eight columns
// are idle. Here they are used, and the tensor core multiplies bytes, since four codes of a word become bytes with fewer instructions than two become
// a pair of bf16. When x is brought to shared memory, each of the weights' blocks (16 or 32 inputs) becomes integers of 16 bits under a power of two of its
// own, and each integer two signed bytes: x = scale (256 hi + lo). The bytes of block j stand in columns 2 j and 2 j + 1 alone, zeros in the others, so
// that the sums of four blocks come out side by side in one accumulator, exact, and are scaled once, by the lane that holds them. The sums of x that
// the offsets need are made with the integers. Packed bytes are those of skinny.cuh (forms.cuh).
//
// An input that is at least 2^-6 of its block's largest keeps all of a bf16's bits, a smaller one is off by at most 2^-15 of the largest. A block
// with an input that is not finite gets a scale of NaN, and so every output. Sums of a block stay finite for inputs up to 2^115.
//
// Instructions for 1,024 weights, loop included, and times: docs/performance.md.
#pragma once
#include "row.cuh"

// c += A (16 x 32, bytes) * B (32 x 8, signed bytes), exact.
__device__ __forceinline__ void mma_u8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Byte i is byte s_i % 8 of {hi, lo}, s_i being nibble i of s; where the nibble's top bit is set, that byte's sign in all bits.
__device__ __forceinline__ uint32_t pick(uint32_t lo, uint32_t hi, uint32_t s) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(lo), "r"(hi), "r"(s));
  return r;
}

// Where a lane reads of its warp's first chunk of a stage; the others follow, strips are `strip` apart.
struct RowReads {
  uint32_t codes, scales, x, x_scales;
  int strip, lane, n;  // n: chunks that exist
  uint32_t zero;       // 0, which the compiler does not know: what is added to it once stays in a register, a constant is copied to one for every use
};

// RowForm<F>: GROUP chunks fill the eight columns; BLOCK inputs share a scale, which stands with their sum times OFFSET where SUMS is set. x holds by block its
// high bytes, then its low ones; of eight inputs those that ORDER's nibbles name, from the lowest, are the bytes of B's two registers. *_AT: where a lane reads in
// a chunk. multiply adds rows g and g + 8 of each strip, chunks from C on, to acc; B is what a lane has of x: it stays zero where the lane's column belongs to another block.
template <class F> struct RowForm;

// Of a word of eight codes those in the low nibbles of its bytes, and those in the high ones, 16 times as large: two sums.
struct RowNibbles {
  static constexpr int BLOCK = 32;
  static constexpr bool SUMS = true;
  static constexpr uint32_t ORDER = 0x73625140u;
  static constexpr float POST = 1 / 16.f;
  struct B { uint2 low[2], high[2]; };  // of each two blocks
  static __device__ __forceinline__ uint32_t x_at(int g, int t) { return (g & 1) * 32 + t * 4; }
  static __device__ __forceinline__ uint32_t x_scales_at(int t) { return t * 8; }
  // The bytes of eight inputs, from `at` on of a block: low nibbles' inputs in front of high nibbles', so that both are read into the registers where they belong.
  static __device__ __forceinline__ void store(uint8_t* block, uint32_t at, uint2 v) {
    *(uint32_t*)(block + at / 2) = v.x;
    *(uint32_t*)(block + 16 + at / 2) = v.y;
  }
  // Two blocks in columns from 4 i on.
  static __device__ __forceinline__ void load(B& b, int i, uint32_t x, int lane) {
    const int block = lane >> 3;
    if (block == 2 * i) b.low[i].x = shared4(x), b.high[i].x = shared4(x + 16);
    if (block == 2 * i + 1) b.low[i].y = shared4(x + 64), b.high[i].y = shared4(x + 80);
  }
  static __device__ __forceinline__ void products(int (&low)[4], int (&high)[4], uint4 v, const B& b, int i) {
    constexpr uint32_t L = 0x0f0f0f0fu, H = 0xf0f0f0f0u;
    mma_u8(low, v.x & L, v.y & L, v.z & L, v.w & L, b.low[i].x, b.low[i].y);
    mma_u8(high, v.x & H, v.y & H, v.z & H, v.w & H, b.high[i].x, b.high[i].y);
  }
  // 16 times the sum over a block, of row g (0) or g + 8 (1).
  static __device__ __forceinline__ float sum(const int (&low)[4], const int (&high)[4], int r) {
    return (float)((low[2 * r] * 256 + low[2 * r + 1]) * 16 + (high[2 * r] * 256 + high[2 * r + 1]));
  }
};

// 2 blocks a chunk, lane t scales block t of the four.
template <class F, int OFFSET_, class SCALES> struct RowInt4 : RowNibbles {
  static constexpr int GROUP = 2, OFFSET = OFFSET_;
  static __device__ __forceinline__ uint32_t scales_at(int g, int t) { return (t >> 1) * F::CB + 512 + (2 * g + (t & 1)) * SCALES::BYTES; }
  template <int MS, int C, bool FULL> static __device__ __forceinline__ void multiply(const RowReads& r, float (&acc)[MS][2], B& b) {
    int low[MS][4] = {}, high[MS][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (!FULL && C + i >= r.n) break;
      load(b, i, r.x + (C + i) * 128, r.lane);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) products(low[ms], high[ms], shared16(r.codes + ms * r.strip + (C + i) * F::CB), b, i);
    }
    if (!FULL && C + (r.lane >> 1 & 1) >= r.n) return;
    const float2 x = floats(shared8(r.x_scales + C * 16));
#pragma unroll
    for (int ms = 0; ms < MS; ms++) SCALES::add(acc[ms], x, sum(low[ms], high[ms], 0), sum(low[ms], high[ms], 1), r.scales + ms * r.strip + C * F::CB);
  }
};
template <bool BF> struct RowScale8 {
  static constexpr int BYTES = 4;
  static __device__ __forceinline__ void add(float (&acc)[2], float2 x, float p0, float p1, uint32_t at) {
    const uint32_t s = shared4(at);
    const float2 d = BF ? make_float2(__uint_as_float(s << 16), __uint_as_float(s & 0xffff0000u)) : __half22float2(*(const __half2*)&s);
    acc[0] = fmaf(d.x, fmaf(x.x, p0, x.y), acc[0]);
    acc[1] = fmaf(d.y, fmaf(x.x, p1, x.y), acc[1]);
  }
};
struct RowScaleMin {
  static constexpr int BYTES = 8;
  static __device__ __forceinline__ void add(float (&acc)[2], float2 x, float p0, float p1, uint32_t at) {
    const uint2 s = shared8(at);
    const float2 a = __half22float2(*(const __half2*)&s.x), b = __half22float2(*(const __half2*)&s.y);
    acc[0] += fmaf(a.x, x.x * p0, a.y * x.y);
    acc[1] += fmaf(b.x, x.x * p1, b.y * x.y);
  }
};
template <bool BF> struct RowForm<Int4<BF>> : RowInt4<Int4<BF>, -128, RowScale8<BF>> {};
template <> struct RowForm<Int4Min> : RowInt4<Int4Min, 16, RowScaleMin> {};

// 8 blocks a chunk, lane t scales blocks t and 4 + t. It unpacks their scales and minimums itself.
template <> struct RowForm<Q4K> : RowNibbles {
  static constexpr int GROUP = 1, OFFSET = 16;
  static __device__ __forceinline__ uint32_t scales_at(int g, int) { return 2048 + g * 16; }
  static __device__ __forceinline__ float row_of(uint4 h, int t, float p0, float p1, float2 x0, float2 x1) {
    const uint32_t s = h.y >> 8 * t, m = h.z >> 8 * t, u = h.w >> 8 * t;
    const uint32_t s0 = s & 0x3fu, s1 = (u & 0x0fu) | ((s >> 2) & 0x30u), m0 = m & 0x3fu, m1 = ((u >> 4) & 0x0fu) | ((m >> 2) & 0x30u);
    const float2 d = __half22float2(*(const __half2*)&h.x);
    return d.x * fmaf((float)s0, x0.x * p0, (float)s1 * (x1.x * p1)) - d.y * fmaf((float)m0, x0.y, (float)m1 * x1.y);
  }
  template <int MS, int C, bool FULL> static __device__ __forceinline__ void multiply(const RowReads& r, float (&acc)[MS][2], B& b) {
    const int t = r.lane & 3;
    float p[MS][2][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int low[MS][4] = {}, high[MS][4] = {};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        load(b, i, r.x + C * 512 + half * 256 + i * 128, r.lane);
#pragma unroll
        for (int ms = 0; ms < MS; ms++) products(low[ms], high[ms], shared16(r.codes + ms * r.strip + C * Q4K::CB + (2 * half + i) * 512), b, i);
      }
#pragma unroll
      for (int ms = 0; ms < MS; ms++)
#pragma unroll
        for (int row = 0; row < 2; row++) p[ms][half][row] = sum(low[ms], high[ms], row);
    }
    const float2 x0 = floats(shared8(r.x_scales + C * 64)), x1 = floats(shared8(r.x_scales + C * 64 + 32));
#pragma unroll
    for (int ms = 0; ms < MS; ms++) {
      const uint32_t h = r.scales + ms * r.strip + C * Q4K::CB;
      acc[ms][0] += row_of(shared16(h), t, p[ms][0][0], p[ms][1][0], x0, x1);
      acc[ms][1] += row_of(shared16(h + 128), t, p[ms][0][1], p[ms][1][1], x0, x1);
    }
  }
};

// 4 blocks of 16 a chunk, block t in lane t. A code picks twice its magnitude from eight bytes. With its sign in the top bit of the selecting nibble it
// picks the sign of a byte there: so codes themselves pick the positive numbers (and zeros), codes with their signs turned the negative ones, and since those are
// bytes with a sign, -1 where the number is positive, which the positive bytes, one larger, make up for. The sum of both is a sum of products.
template <> struct RowForm<Nvfp4> {
  static constexpr int GROUP = 1, BLOCK = 16, OFFSET = 0;
  static constexpr bool SUMS = false;
  static constexpr uint32_t ORDER = 0x75316420u;
  static constexpr float POST = 0.5f;
  using B = uint4;
  static __device__ __forceinline__ uint32_t scales_at(int g, int t) { return 512 + (4 * g + t) * 2; }
  static __device__ __forceinline__ uint32_t x_at(int g, int t) { return t * 32 + (g & 1) * 16; }
  static __device__ __forceinline__ uint32_t x_scales_at(int t) { return t * 4; }
  static __device__ __forceinline__ void store(uint8_t* block, uint32_t at, uint2 v) { *(uint2*)(block + at) = v; }
  static __device__ __forceinline__ uint32_t positive(uint32_t s, uint32_t zero) { return pick(0x04030200u ^ zero, 0x0d090705u, s); }
  static __device__ __forceinline__ uint32_t negative(uint32_t s, uint32_t zero) { return pick(0xfdfeff00u ^ zero, 0xf4f8fafcu, s); }
  template <int MS, int C, bool FULL> static __device__ __forceinline__ void multiply(const RowReads& r, float (&acc)[MS][2], B& b) {
    if (r.lane >> 3 == (r.lane & 3)) b = shared16(r.x + C * 128);
    const float x = __uint_as_float(shared4(r.x_scales + C * 16));
#pragma unroll
    for (int ms = 0; ms < MS; ms++) {
      const uint4 v = shared16(r.codes + ms * r.strip + C * Nvfp4::CB);
      int P[4] = {};
#pragma unroll
      for (int w = 0; w < 2; w++) {
        const uint32_t r0 = w ? v.y : v.x, r1 = w ? v.w : v.z, n0 = r0 ^ 0x88888888u, n1 = r1 ^ 0x88888888u, b0 = w ? b.z : b.x, b1 = w ? b.w : b.y;
        mma_s8(P, positive(r0, r.zero), positive(r1, r.zero), positive(r0 >> 16, r.zero), positive(r1 >> 16, r.zero), b0, b1);
        mma_s8(P, negative(n0, r.zero), negative(n1, r.zero), negative(n0 >> 16, r.zero), negative(n1 >> 16, r.zero), b0, b1);
      }
      const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(shared2(r.scales + ms * r.strip + C * Nvfp4::CB), __NV_E4M3);
      const float2 d = __half22float2(__half2(h));
      acc[ms][0] = fmaf(x * d.x, (float)(P[0] * 256 + P[1]), acc[ms][0]);
      acc[ms][1] = fmaf(x * d.y, (float)(P[2] * 256 + P[3]), acc[ms][1]);
    }
  }
};

// 8 inputs of x, a thread's, as bytes; its block's other inputs are in the neighbouring threads. scale: the block's, sum: of the block's integers.
template <class R> __device__ __forceinline__ void row_bytes(uint4 v, uint2& hi, uint2& lo, float& scale, float& sum) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
  uint32_t top = 0;
#pragma unroll
  for (int q = 0; q < 4; q++) top = __vmaxu2(top, w[q] & 0x7fff7fffu);
  top = max(top & 0xffffu, top >> 16);
  top = max(top, __shfl_xor_sync(~0u, top, 1));
  if (R::BLOCK == 32) top = max(top, __shfl_xor_sync(~0u, top, 2));
  // The least power of two above the largest (above 255/256 of it: 255 * 2^7 would be no 16 bits of two signed bytes), which becomes 2^15.
  const uint32_t e = max((top + 1) >> 7, 15u);
  const float times = __uint_as_float((268 - e) << 23);
  scale = top < 0x7f80u ? __uint_as_float((e - 14) << 23) : __uint_as_float(0x7fffffffu);
  uint32_t u[8];  // 2^23 + 2^22 + 128 + x: its low byte is 128 more than x's, the next x's high one
#pragma unroll
  for (int q = 0; q < 8; q++) u[q] = __float_as_uint(fmaf(__uint_as_float(q & 1 ? w[q / 2] & 0xffff0000u : w[q / 2] << 16), times, 12583040.f));
  auto bytes = [&](int at, uint32_t& h, uint32_t& l) {
    const uint32_t o = R::ORDER >> 4 * at;
    const uint32_t p = __byte_perm(u[o & 7], u[o >> 4 & 7], 0x5140), q = __byte_perm(u[o >> 8 & 7], u[o >> 12 & 7], 0x5140);
    l = __byte_perm(p, q, 0x5410) ^ 0x80808080u;
    h = __byte_perm(p, q, 0x7632);
  };
  bytes(0, hi.x, lo.x);
  bytes(4, hi.y, lo.y);
  sum = 0;
  if (!R::SUMS) return;
  int s = 0;
#pragma unroll
  for (int q = 0; q < 8; q++) s += (int)(u[q] - 0x4b400080u);
  s += __shfl_xor_sync(~0u, s, 1);
  s += __shfl_xor_sync(~0u, s, 2);
  sum = (float)s;
}

template <class F, int CW, int MS, bool DOWN> struct RowIntegers {
  using R = RowForm<F>;
  static_assert(CW % R::GROUP == 0);
  static constexpr int PER = R::SUMS ? 2 : 1;  // numbers a block in front of x: its scale, its sum
  float acc[MS][2];
  typename R::B b[CW / R::GROUP];
  RowReads r;

  static __device__ __forceinline__ int x_bytes(int chunks, int) { return chunks * F::KC / 4 + chunks * F::KC * 2; }
  static __device__ __forceinline__ float bring(uint8_t* to, const bf16* x, int chunks, int inputs, int, uint32_t*) {
    const int kx = chunks * F::KC;
    float* scales = (float*)to;
    uint8_t* xs = to + kx / 4;
#pragma unroll 1
    for (int i0 = threadIdx.x; i0 < (kx / 8 + 255) / 256 * 256; i0 += 4 * 256) {
      uint4 v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int k = (i0 + j * 256) * 8;
        v[j] = make_uint4(0, 0, 0, 0);
        if (k < kx && k < inputs) v[j] = *(const uint4*)(x + k);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int k = (i0 + j * 256) * 8;
        if (i0 - (int)threadIdx.x + j * 256 >= kx / 8) break;  // the same for all threads
        uint2 hi, lo;
        float scale, sum;
        row_bytes<R>(v[j], hi, lo, scale, sum);
        if (k >= kx) continue;
        const uint32_t block = (uint32_t)k / R::BLOCK, at = k % (uint32_t)R::BLOCK;
        R::store(xs + block * 2 * R::BLOCK, at, hi);
        R::store(xs + block * 2 * R::BLOCK + R::BLOCK, at, lo);
        if (at) continue;
        scales[block * PER] = scale;
        if (R::SUMS) scales[block * PER + 1] = scale * sum * R::OFFSET;
      }
    }
    consumers_sync();
    return R::POST;
  }

  __device__ __forceinline__ void begin(const RowPlace& p) {
    r.lane = p.lane;
    r.strip = p.cps * F::CB;
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(r.zero));
    r.zero >>= 31;
#pragma unroll
    for (int i = 0; i < CW / R::GROUP; i++) b[i] = {};
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int ms = 0; ms < MS; ms++) acc[ms][0] = acc[ms][1] = 0;
  }
  // The chunks from C on of a warp's n.
  template <int C, bool FULL> __device__ __forceinline__ void chunks(const RowPlace& p, const RowStage& s, int from) {
    if constexpr (C < CW) {
      if (DOWN && R::GROUP == 1 && s.scales) {
        if (FULL || C < r.n) {
          float part[MS][2] = {};
          R::template multiply<MS, C, true>(r, part, b[C]);
          const float* d = s.scales_of(from + C);
#pragma unroll
          for (int ms = 0; ms < MS; ms++) acc[ms][0] = fmaf(d[ms * 16], part[ms][0], acc[ms][0]), acc[ms][1] = fmaf(d[ms * 16 + 8], part[ms][1], acc[ms][1]);
        }
      } else if (FULL || C + R::GROUP <= r.n) R::template multiply<MS, C, true>(r, acc, b[C / R::GROUP]);
      else if (R::GROUP > 1 && C < r.n) R::template multiply<MS, C, false>(r, acc, b[C / R::GROUP]);
      chunks<C + R::GROUP, FULL>(p, s, from);
    }
  }
  // The stage's chunks in equal parts, one after the other.
  __device__ __forceinline__ void stage(const RowPlace& p, const RowStage& s, const uint8_t* xs) {
    const int part = (s.have + (1 << p.lwk) - 1) >> p.lwk, from = p.wk * part;
    r.n = min(part, s.have - from);
    r.codes = s.codes + from * F::CB + p.lane * 16;
    r.scales = s.codes + from * F::CB + R::scales_at(p.g, p.t);
    r.x_scales = smem_addr(xs) + (s.at + from) * (F::KC / 4) + R::x_scales_at(p.t);
    r.x = smem_addr(xs) + s.x_chunks * (F::KC / 4) + (s.at + from) * F::KC * 2 + R::x_at(p.g, p.t);
    if (r.n == CW) chunks<0, true>(p, s, from);
    else chunks<0, false>(p, s, from);
  }
  __device__ __forceinline__ float2 sum(int ms) const {
    float2 s = make_float2(acc[ms][0], acc[ms][1]);
    s.x += __shfl_xor_sync(~0u, s.x, 1), s.y += __shfl_xor_sync(~0u, s.y, 1);
    s.x += __shfl_xor_sync(~0u, s.x, 2), s.y += __shfl_xor_sync(~0u, s.y, 2);
    return s;
  }
};
template <bool BF, int CW, int MS, bool DOWN> struct RowWarp<Int4<BF>, CW, MS, DOWN> : RowIntegers<Int4<BF>, CW, MS, DOWN> {};
template <int CW, int MS, bool DOWN> struct RowWarp<Int4Min, CW, MS, DOWN> : RowIntegers<Int4Min, CW, MS, DOWN> {};
template <int CW, int MS, bool DOWN> struct RowWarp<Q4K, CW, MS, DOWN> : RowIntegers<Q4K, CW, MS, DOWN> {};
template <int CW, int MS, bool DOWN> struct RowWarp<Nvfp4, CW, MS, DOWN> : RowIntegers<Nvfp4, CW, MS, DOWN> {};
