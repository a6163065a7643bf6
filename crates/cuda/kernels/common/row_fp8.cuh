// One row of x against E4M3 weights: out[m] = sum_k W[m][k] x[k], float32 sums of exact products.
//
// The chip converts two codes to f16 in one instruction (F2FP.UNPACK), where bringing them into bf16 fields takes three and a half. So x becomes f16 as well, under
// a power of two that all its inputs share: 2^5 where the largest lies in [2^-6, 2^10), which costs no second look, else the one that brings the largest to [2^14, 2^15).
// An input that is 2^-16 of the largest or more keeps all of a bf16's bits, a smaller one is off by at most 2^-24 of the largest. An input that is not finite makes every
// output NaN.
//
// Of the eight columns of mma.m16n8k16 one is wanted; the others repeat it.
#pragma once
#include "row.cuh"

__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The codes in bytes 0 and 1 of v, and those in bytes 2 and 3.
__device__ __forceinline__ uint32_t e4m3_low(uint32_t v) {
  uint32_t r;
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ uint32_t e4m3_high(uint32_t v) {
  uint32_t r;
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ uint32_t pack_f16x2(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// BLOCK: scales by 128 x 128 behind a chunk's codes (forms.cuh).
template <class F, int CW, int MS, bool DOWN, bool BLOCK> struct RowE4M3 {
  static constexpr bool SCALED = DOWN || BLOCK;                 // every chunk's sums are scaled before they are added
  static constexpr int SETS = MS == 1 && !SCALED ? 2 : 1;       // two sets of sums where one would be a chain
  static constexpr uint32_t LEAST = 121, MOST = 136;            // 2^-6, 2^9: exponents of the largest input for which times 2^5 will do
  float acc[SETS][MS][4];

  static __device__ __forceinline__ int filled(int chunks, int cps) { return (chunks + cps - 1) & -cps; }  // the last stage is multiplied whole
  static __device__ __forceinline__ int x_bytes(int chunks, int cps) { return filled(chunks, cps) * F::KC * 2; }

  // Words of a code are k2 k0 k3 k1: pairs of x follow.
  static __device__ __forceinline__ float bring(uint8_t* to, const bf16* x, int chunks, int inputs, int cps, uint32_t* most) {
    uint4* xs = (uint4*)to;
    const int n = filled(chunks, cps) * (F::KC / 8);
    float times = 32, factor = 1 / 32.f;
#pragma unroll 1
    for (bool again = false;; again = true) {
      auto low = [&](uint32_t v) { return __uint_as_float(v << 16) * times; };
      auto high = [&](uint32_t v) { return __uint_as_float(v & 0xffff0000u) * times; };
      uint32_t top = 0;
#pragma unroll 1
      for (int i0 = threadIdx.x; i0 < n; i0 += 4 * 256) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          v[j] = make_uint4(0, 0, 0, 0);
          if ((i0 + j * 256) * 8 < inputs) v[j] = *(const uint4*)(x + (i0 + j * 256) * 8);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const uint4 u = v[j];
          top = __vmaxu2(__vmaxu2(top, u.x & 0x7fff7fffu), u.y & 0x7fff7fffu);
          top = __vmaxu2(__vmaxu2(top, u.z & 0x7fff7fffu), u.w & 0x7fff7fffu);
          if (i0 + j * 256 < n) xs[i0 + j * 256] = make_uint4(pack_f16x2(low(u.y), low(u.x)), pack_f16x2(high(u.y), high(u.x)), pack_f16x2(low(u.w), low(u.z)), pack_f16x2(high(u.w), high(u.z)));
        }
      }
      if (!again) {
        top = __reduce_max_sync(~0u, max(top & 0xffffu, top >> 16));
        if ((threadIdx.x & 31) == 0) atomicMax(most, top);
      }
      consumers_sync();
      const uint32_t e = *most >> 7;
      if (again || (e >= LEAST && e <= MOST)) return factor;
      const uint32_t own = max(e, 15u);
      times = __uint_as_float((268 - own) << 23);
      factor = e < 255 ? __uint_as_float((own - 14) << 23) : __uint_as_float(0x7fffffffu);
    }
  }

  __device__ __forceinline__ void begin(const RowPlace&) {}
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < SETS * MS * 4; i++) (&acc[0][0][0])[i] = 0;
  }
  // The warp's chunks of a stage are wk, wk + 2^lwk, ...; in place of one that is not there the first is multiplied, by zeros.
  __device__ __forceinline__ void stage(const RowPlace& p, const RowStage& s, const uint8_t* xs) {
    uint4 w[CW][MS][2], x[CW][2];
    int ck[CW];
#pragma unroll
    for (int j = 0; j < CW; j++) {
      ck[j] = p.wk + (j << p.lwk);
      const uint32_t from = smem_addr(xs) + (s.at + ck[j]) * F::KC * 2 + p.t * 16;
      if (ck[j] >= s.have) ck[j] = 0;
      const uint32_t codes = s.codes + ck[j] * F::CB + p.lane * 16;
#pragma unroll
      for (int ms = 0; ms < MS; ms++) w[j][ms][0] = shared16(codes + ms * p.cps * F::CB), w[j][ms][1] = shared16(codes + ms * p.cps * F::CB + 512);
      x[j][0] = shared16(from), x[j][1] = shared16(from + 64);
    }
#pragma unroll
    for (int j = 0; j < CW; j++)
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        float part[4] = {};
        float(&to)[4] = SCALED ? part : acc[j % SETS][ms];
        const uint32_t *r0 = &w[j][ms][0].x, *r1 = &w[j][ms][1].x, *b = &x[j][0].x;
#pragma unroll
        for (int i = 0; i < 4; i++) mma_f16(to, e4m3_low(r0[i]), e4m3_low(r1[i]), e4m3_high(r0[i]), e4m3_high(r1[i]), b[2 * i], b[2 * i + 1]);
        if (!SCALED) continue;
        float d0 = 1, d1 = 1;
        if (BLOCK) {
          const uint4 d = shared16(s.codes + (ms * p.cps + ck[j]) * F::CB + 1024);
          d0 = __uint_as_float(p.g < (int)d.z ? d.x : d.y), d1 = __uint_as_float(p.g + 8 < (int)d.z ? d.x : d.y);
        } else if (s.scales) {
          const float* d = s.scales_of(ck[j]) + ms * 16;
          d0 = d[0], d1 = d[8];
        }
        acc[0][ms][0] = fmaf(d0, part[0], acc[0][ms][0]);
        acc[0][ms][2] = fmaf(d1, part[2], acc[0][ms][2]);
      }
  }
  __device__ __forceinline__ float2 sum(int ms) const {
    return SETS == 1 ? make_float2(acc[0][ms][0], acc[0][ms][2]) : make_float2(acc[0][ms][0] + acc[SETS - 1][ms][0], acc[0][ms][2] + acc[SETS - 1][ms][2]);
  }
};
template <int CW, int MS, bool DOWN> struct RowWarp<Fp8, CW, MS, DOWN> : RowE4M3<Fp8, CW, MS, DOWN, false> {};
template <int CW, int MS, bool DOWN> struct RowWarp<Fp8Block, CW, MS, DOWN> : RowE4M3<Fp8Block, CW, MS, DOWN, true> {};
