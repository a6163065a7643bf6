// Products with packed weights for very many rows, of the forms whose blocks have scales that no bf16 weight holds.
//
// As gemm_wide_sm90.cu, from whose arrangement of x it reads, but the weights go to the matrix instruction as the small integers that they are, and each
// block's product is scaled in float32 where it is added: acc += d P (+ m times the block's sum of x). While one warpgroup scales, the other
// multiplies. A warpgroup has 64 outputs; when gated the second group has the up rows of the first's, and hands its sums over through shared
// memory at the end.
#include "common/forms.cuh"
#include "common/wgmma.cuh"
#include "common/wide.cuh"

// A form: STEPS k16 steps a block, whether it has minimums, POST; its fragments and scales. Piece: 64 inputs of a chunk. Rows g and g + 8.
template <class F> struct Scaled;
struct Scale { float d0, d1, m0, m1; };

__device__ __forceinline__ uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Nibbles 0 and 4 of r, less a constant: 128 + q is exact in bf16. MINUS: minus (128 + offset) twice.
template <uint32_t MINUS> __device__ __forceinline__ uint32_t nibbles(uint32_t r) { return add_bf16x2((r & 0x000f000fu) | 0x43004300u, MINUS); }
constexpr uint32_t MINUS_128 = 0xc300c300u, MINUS_136 = 0xc308c308u;
template <uint32_t MINUS> __device__ __forceinline__ void nibble_block(uint32_t r0, uint32_t r1, uint32_t (&a)[2][4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    a[i][0] = nibbles<MINUS>(r0 >> (8 * i)); a[i][1] = nibbles<MINUS>(r1 >> (8 * i));
    a[i][2] = nibbles<MINUS>(r0 >> (8 * i + 4)); a[i][3] = nibbles<MINUS>(r1 >> (8 * i + 4));
  }
}
// Bytes 0 and 2 of r, below 128.
__device__ __forceinline__ uint32_t low_bytes(uint32_t r) { return add_bf16x2((r & 0x007f007fu) | 0x43004300u, MINUS_128); }
// Bytes 0 and 2 of r, less 128: 128 + the low bits, less 256 or, with the high bit, 128.
__device__ __forceinline__ uint32_t signed_bytes(uint32_t r) { return add_bf16x2((r & 0x007f007fu) | 0x43004300u, (r & 0x00800080u) ^ 0xc380c380u); }
template <bool SIGNED> __device__ __forceinline__ void byte_step(uint32_t r0, uint32_t r1, uint32_t (&a)[4]) {
  a[0] = SIGNED ? signed_bytes(r0) : low_bytes(r0); a[1] = SIGNED ? signed_bytes(r1) : low_bytes(r1);
  a[2] = SIGNED ? signed_bytes(r0 >> 8) : low_bytes(r0 >> 8); a[3] = SIGNED ? signed_bytes(r1 >> 8) : low_bytes(r1 >> 8);
}
#define SCALED(STEPS_, MIN_, POST_) static constexpr int STEPS = STEPS_; static constexpr bool MIN = MIN_; static constexpr float POST = POST_;
#define FRAGMENTS static __device__ __forceinline__ void load(const uint8_t* c, int p, int h, int lane, uint32_t (&a)[STEPS][4])
#define SCALES static __device__ __forceinline__ Scale scale(const uint8_t* c, int p, int h, int g)

template <bool BF> struct Scaled<Int4<BF>> {
  SCALED(2, false, 1.f)
  FRAGMENTS { const uint2 v = *(const uint2*)(c + lane * 16 + h * 8); nibble_block<MINUS_136>(v.x, v.y, a); }
  SCALES {
    const uint32_t s = *(const uint32_t*)(c + 512 + g * 8 + h * 4);
    if (BF) return {__uint_as_float(s << 16), __uint_as_float(s & 0xffff0000u), 0, 0};
    const float2 d = __half22float2(*(const __half2*)&s);
    return {d.x, d.y, 0, 0};
  }
};
template <> struct Scaled<Int4Min> {
  SCALED(2, true, 1.f)
  FRAGMENTS { const uint2 v = *(const uint2*)(c + lane * 16 + h * 8); nibble_block<MINUS_128>(v.x, v.y, a); }
  SCALES { const float2 d0 = half2_at(c + 512 + g * 16 + h * 8), d1 = half2_at(c + 512 + g * 16 + h * 8 + 4); return {d0.x, d1.x, d0.y, d1.y}; }
};
template <> struct Scaled<Int8> {
  SCALED(2, false, 1.f)
  FRAGMENTS { const uint4 v = *(const uint4*)(c + h * 512 + lane * 16); byte_step<true>(v.x, v.z, a[0]); byte_step<true>(v.y, v.w, a[1]); }
  SCALES { const float2 d = half2_at(c + 1024 + g * 8 + h * 4); return {d.x, d.y, 0, 0}; }
};
template <> struct Scaled<Int8Min> {
  SCALED(2, true, 1.f)
  FRAGMENTS { const uint4 v = *(const uint4*)(c + h * 512 + lane * 16); byte_step<false>(v.x, v.z, a[0]); byte_step<false>(v.y, v.w, a[1]); }
  SCALES { const float2 d0 = half2_at(c + 1024 + g * 16 + h * 8), d1 = half2_at(c + 1024 + g * 16 + h * 8 + 4); return {d0.x, d1.x, d0.y, d1.y}; }
};
// {scale, minus minimum} of block b of a row with header h.
__device__ __forceinline__ float2 k_scale(uint4 h, int b) {
  const int shift = (b & 3) * 8;
  const uint32_t s = h.y >> shift, m = h.z >> shift, u = h.w >> shift;
  const uint32_t sc = b < 4 ? s & 63u : (u & 15u) | ((s >> 2) & 0x30u), mn = b < 4 ? m & 63u : ((u >> 4) & 15u) | ((m >> 2) & 0x30u);
  const float2 d = __half22float2(*(const __half2*)&h.x);
  return make_float2(d.x * byte_f<0>(sc), -d.y * byte_f<0>(mn));
}
template <int HEADER> __device__ __forceinline__ Scale k_scales(const uint8_t* c, int b, int g) {
  const float2 s0 = k_scale(*(const uint4*)(c + HEADER + g * 16), b), s1 = k_scale(*(const uint4*)(c + HEADER + 128 + g * 16), b);
  return {s0.x, s1.x, s0.y, s1.y};
}
template <> struct Scaled<Q4K> {
  SCALED(2, true, 1.f)
  FRAGMENTS { const uint2 v = *(const uint2*)(c + p * 512 + lane * 16 + h * 8); nibble_block<MINUS_128>(v.x, v.y, a); }
  SCALES { return k_scales<2048>(c, 2 * p + h, g); }
};
template <> struct Scaled<Q5K> {
  SCALED(2, true, 1.f)
  FRAGMENTS { const uint4 v = *(const uint4*)(c + p * 1024 + h * 512 + lane * 16); byte_step<false>(v.x, v.z, a[0]); byte_step<false>(v.y, v.w, a[1]); }
  SCALES { return k_scales<4096>(c, 2 * p + h, g); }
};
template <> struct Scaled<Sub16> {
  SCALED(1, false, 1.f)
  FRAGMENTS {
    const uint2 r0 = *(const uint2*)(c + p * 1024 + (h >> 1) * 512 + lane * 16), r1 = *(const uint2*)(c + p * 1024 + (h >> 1) * 512 + lane * 16 + 8);
    byte_step<true>(h & 1 ? r0.y : r0.x, h & 1 ? r1.y : r1.x, a[0]);
  }
  SCALES {
    const float s0 = (float)c[4096 + p * 64 + g * 4 + h] - 128.f, s1 = (float)c[4096 + p * 64 + g * 4 + 32 + h] - 128.f;
    return {s0 * __half2float(*(const __half*)(c + 4352 + g * 2)), s1 * __half2float(*(const __half*)(c + 4352 + g * 2 + 16)), 0, 0};
  }
};
template <> struct Scaled<Fp8Block> {
  SCALED(4, false, 0x1p20f)
  FRAGMENTS {
    const uint4 r0 = *(const uint4*)(c + lane * 16), r1 = *(const uint4*)(c + 512 + lane * 16);
    const uint32_t *p0 = &r0.x, *p1 = &r1.x;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      a[j][0] = e4m3_hi_to_bf16x2(p0[j]); a[j][1] = e4m3_hi_to_bf16x2(p1[j]);
      a[j][2] = e4m3_hi_to_bf16x2(p0[j] << 8); a[j][3] = e4m3_hi_to_bf16x2(p1[j] << 8);
    }
  }
  SCALES {
    const uint4 s = *(const uint4*)(c + 1024);
    return {__uint_as_float(g < (int)s.z ? s.x : s.y), __uint_as_float(g + 8 < (int)s.z ? s.x : s.y), 0, 0};
  }
};

template <class F, int N, int ST> __device__ __forceinline__ void scaled_body(const WideArgs& a) {
  using S = Scaled<F>;
  constexpr int PIECES = F::KC / 64, PB = 4 / S::STEPS, XB = PIECES * N * 128, SB = S::MIN ? PIECES * PB * N * 4 : 0, WB = 8 * F::CB;
  extern __shared__ __align__(1024) uint8_t sm[];
  uint8_t* xs = sm;                                // [stage][piece][N][128]
  uint8_t* ws = sm + ST * XB;
  float* sums = (float*)(ws + ST * WB);            // [stage][block][N]
  uint64_t* full = (uint64_t*)((uint8_t*)sums + ST * SB);
  uint64_t* empty = full + ST;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const bool gated = a.epilogue == 2;
  const int n0 = blockIdx.x * N, first = blockIdx.y * (gated ? 4 : 8);
  auto strip_of = [&](int j) { return gated ? min(first + (j & 3), a.strips - 1) + (j >> 2) * a.strips : min(first + j, a.strips - 1); };
  if (tid == 256) {
    for (int i = 0; i < ST; i++) { mbar_init(full + i, 1); mbar_init(empty + i, 256); }
    fence_barrier_init();
    fence_proxy_async();
  }
  __syncthreads();
  pdl_launch();
  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (tid != 256) return;
    pdl_wait();
    for (int c = 0; c < a.chunks; c++) {
      const int slot = c % ST;
      mbar_wait(empty + slot, (c / ST & 1) ^ 1);
      mbar_expect(full + slot, XB + SB + WB);
      for (int p = 0; p < PIECES; p++) bulk_load(xs + slot * XB + p * N * 128, a.x + ((size_t)(c * PIECES + p) * a.padded + n0) * 128, N * 128, full + slot);
      for (int j = 0; j < 8; j++) bulk_load(ws + slot * WB + j * F::CB, a.w + strip_of(j) * a.strip_bytes + (size_t)c * F::CB, F::CB, full + slot);
      if (S::MIN)
        for (int b = 0; b < PIECES * 2; b++) bulk_load((uint8_t*)sums + slot * SB + b * N * 4, a.sums + (size_t)(c * PIECES * 2 + b) * a.padded + n0, N * 4, full + slot);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int group = warp >> 2, wi = warp & 3;
  float acc[N / 2], P[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) acc[i] = 0;
  for (int c = 0; c < a.chunks; c++) {
    const int slot = c % ST;
    const uint8_t* ch = ws + slot * WB + (group * 4 + wi) * F::CB;
    mbar_wait(full + slot, c / ST & 1);
#pragma unroll 1
    for (int p = 0; p < PIECES; p++) {
      const uint64_t x = wgmma_rows(xs + slot * XB + p * N * 128);
#pragma unroll
      for (int h = 0; h < PB; h++) {
        uint32_t f[S::STEPS][4];
        S::load(ch, p, h, lane, f);
        wgmma_pin(P);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < S::STEPS; j++) {
          if (j == 0) Wgmma<N>::first(P, f[0], x + 2 * (h * S::STEPS));
          else Wgmma<N>::run(P, f[j], x + 2 * (h * S::STEPS + j));
        }
        wgmma_commit();
        const Scale s = S::scale(ch, p, h, g);
        const float* X = (const float*)((const uint8_t*)sums + slot * SB) + (p * PB + h) * N + 2 * t;
        wgmma_wait<0>();
        wgmma_pin(P);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
          float2 v = make_float2(0, 0);
          if (S::MIN) v = *(const float2*)(X + i * 8);
          float* to = acc + i * 4;
          const float* from = P + i * 4;
          to[0] = fmaf(s.d0, from[0], S::MIN ? fmaf(s.m0, v.x, to[0]) : to[0]); to[1] = fmaf(s.d0, from[1], S::MIN ? fmaf(s.m0, v.y, to[1]) : to[1]);
          to[2] = fmaf(s.d1, from[2], S::MIN ? fmaf(s.m1, v.x, to[2]) : to[2]); to[3] = fmaf(s.d1, from[3], S::MIN ? fmaf(s.m1, v.y, to[3]) : to[3]);
        }
      }
    }
    mbar_arrive(empty + slot);
  }
  pdl_wait();
  if (gated) {  // all copies have arrived and were read: the ring is free
    float* hand = (float*)sm + (tid & 127);
    asm volatile("bar.sync 1, 256;" ::: "memory");
    if (group == 1)
#pragma unroll
      for (int i = 0; i < N / 2; i++) hand[i * 128] = acc[i];
    asm volatile("bar.sync 1, 256;" ::: "memory");
    if (group == 1) return;
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = activate(a.activation, acc[i] * S::POST) * (hand[i * 128] * S::POST);
  }
  const int strip = first + (gated ? 0 : group * 4) + wi;
  if (strip >= a.strips) return;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int m = strip * 16 + g + 8 * half;
    if (m >= a.m) continue;
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = n0 + i * 8 + 2 * t + j;
        if (row >= a.rows) continue;
        float v = acc[i * 4 + 2 * half + j];
        if (!gated) v *= S::POST;
        const size_t at = (size_t)row * a.ldo + m;
        if (a.epilogue == 0) {
          if (a.softcap > 0.f) v = a.softcap * tanhf(v / a.softcap);
          ((float*)a.out)[at] = v;
          continue;
        }
        if (a.epilogue == 3) v = activate(a.activation, v) * a.times[(size_t)row * a.ld_times + m];
        ((bf16*)a.out)[at] = __float2bfloat16(v);
      }
  }
}

// scaled_FORM_{rows}; stages as in src/kernels/gemm_wide.rs.
#define SCALED_FORM(FORM, F, N, ST) \
  extern "C" __global__ void __launch_bounds__(384, 1) scaled_##FORM##_##N(const __grid_constant__ WideArgs a) { scaled_body<F, N, ST>(a); }
SCALED_FORM(fp8_block, Fp8Block, 128, 4)
SCALED_FORM(int4, Int4<false>, 128, 4)
SCALED_FORM(int4_bf16, Int4<true>, 128, 4)
SCALED_FORM(int4_min, Int4Min, 128, 4)
SCALED_FORM(int8, Int8, 128, 4)
SCALED_FORM(int8_min, Int8Min, 128, 4)
SCALED_FORM(q4_k, Q4K, 128, 2)
SCALED_FORM(q5_k, Q5K, 128, 2)
SCALED_FORM(sub16, Sub16, 128, 2)
