// Products with packed weights for very many rows, of the forms whose weights are exact in bf16: bf16, FP8 with row scales, NVFP4.
//
// The packed fragments (forms.cuh) are also what wgmma wants of an A operand in registers, so weights go from shared memory through the
// usual decoding into the warpgroup's matrix instruction; x is its B operand, from shared memory. `arrange` brings x into that order once: chunk by chunk
// of 64 inputs, rows of 128 bytes, permuted as the form's lanes hold their inputs, scaled as the form asks and swizzled, so that a stage of x is
// one bulk copy.
//
// A block has 2 NB x 64 outputs and N rows of x: two warpgroups with NB x 64 outputs each, a third
// whose one thread copies and whose registers they get. While one group decodes, the
// other multiplies. When gated, a group's second 64 outputs are the up rows of its first, so each thread holds both factors.
//
// Traffic: x twice to be arranged; weights once for every N rows, x once for every 128 NB outputs, from L2 but for the first time.
#include "common/forms.cuh"
#include "common/wgmma.cuh"
#include "common/wide.cuh"

// MAP and scales as of forms.cuh.
template <XMap MAP, uint32_t PRE> __device__ __forceinline__ void arrange_body(const ArrangeArgs& a) {
  pdl_launch();
  pdl_wait();
  const int i = blockIdx.x * 256 + threadIdx.x, u = i & 7, row = i >> 3, c = blockIdx.y;
  uint32_t w[4] = {};
  float s = 0;
  if (row < a.rows) {
    const bf16* x = a.x + (size_t)row * a.ldx + c * 64;
#pragma unroll
    for (int t = 0; t < 4; t++) {  // word u of lane t, as load_x has it
      const int at = 2 * (MAP == WIDE ? 8 * t + u : MAP == SUB16 ? 8 * (u >> 1) + 2 * t + (u & 1) : u < 4 ? 4 * t + u : 16 + 4 * t + u - 4);
      if (c * 64 + at < a.k) w[t] = *(const uint32_t*)(x + at);
      s += __uint_as_float(w[t] << 16) + __uint_as_float(w[t] & 0xffff0000u);
      if (PRE) w[t] = mul_bf16x2(w[t], PRE);
    }
  }
  s += __shfl_xor_sync(~0u, s, 1);
  s += __shfl_xor_sync(~0u, s, 2);
  if (row >= a.padded) return;
  a.out[((size_t)c * a.padded + row) * 8 + (u ^ (row & 7))] = make_uint4(w[0], w[1], w[2], w[3]);
  if (a.sums && (u & 3) == 0) a.sums[(size_t)(2 * c + (u >> 2)) * a.padded + row] = s;
}
#define ARRANGE(NAME, MAP, PRE) \
  extern "C" __global__ void __launch_bounds__(256) arrange_##NAME(const __grid_constant__ ArrangeArgs a) { arrange_body<MAP, PRE>(a); }
ARRANGE(narrow, NARROW, 0)
ARRANGE(narrow_scaled, NARROW, POW2_100)
ARRANGE(wide, WIDE, 0)
ARRANGE(sub16, SUB16, 0)

// The fragments of a chunk's four k16 steps.
template <class F> struct Fragment;
template <> struct Fragment<Bf16> {
  static __device__ __forceinline__ void load(const uint8_t* c, int lane, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) *(uint4*)a[j] = *(const uint4*)(c + j * 512 + lane * 16);
  }
};
template <> struct Fragment<Fp8> {
  static __device__ __forceinline__ void load(const uint8_t* c, int lane, uint32_t (&a)[4][4]) {
    const uint4 r0 = *(const uint4*)(c + lane * 16), r1 = *(const uint4*)(c + 512 + lane * 16);
    const uint32_t *p0 = &r0.x, *p1 = &r1.x;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      a[j][0] = e4m3_hi_to_bf16x2(p0[j]); a[j][1] = e4m3_hi_to_bf16x2(p1[j]);
      a[j][2] = e4m3_hi_to_bf16x2(p0[j] << 8); a[j][3] = e4m3_hi_to_bf16x2(p1[j] << 8);
    }
  }
};
template <> struct Fragment<Nvfp4> {
  static __device__ __forceinline__ void load(const uint8_t* c, int lane, uint32_t (&a)[4][4]) {
    const uint4 v = *(const uint4*)(c + lane * 16);
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(*(const uint16_t*)(c + 512 + lane * 2), __NV_E4M3);
    const float2 f = __half22float2(__half2(h));
    const uint32_t s0 = pack_bf16x2(f.x * 0x1p110f, f.x * 0x1p110f), s1 = pack_bf16x2(f.y * 0x1p110f, f.y * 0x1p110f);
#pragma unroll
    for (int w = 0; w < 2; w++) {
      const uint32_t r0 = w ? v.y : v.x, r1 = w ? v.w : v.z;
      a[2 * w][0] = mul_bf16x2(Nvfp4::decode<0>(r0), s0); a[2 * w][1] = mul_bf16x2(Nvfp4::decode<0>(r1), s1);
      a[2 * w][2] = mul_bf16x2(Nvfp4::decode<1>(r0), s0); a[2 * w][3] = mul_bf16x2(Nvfp4::decode<1>(r1), s1);
      a[2 * w + 1][0] = mul_bf16x2(Nvfp4::decode<2>(r0), s0); a[2 * w + 1][1] = mul_bf16x2(Nvfp4::decode<2>(r1), s1);
      a[2 * w + 1][2] = mul_bf16x2(Nvfp4::decode<3>(r0), s0); a[2 * w + 1][3] = mul_bf16x2(Nvfp4::decode<3>(r1), s1);
    }
  }
};

template <class F, int NB, int N, int ST> __device__ __forceinline__ void wide_body(const WideArgs& a) {
  constexpr int XB = N * 128, WB = 8 * NB * F::CB;
  extern __shared__ __align__(1024) uint8_t sm[];
  uint8_t* xs = sm;
  uint8_t* ws = sm + ST * XB;
  uint64_t* full = (uint64_t*)(ws + ST * WB);
  uint64_t* empty = full + ST;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const bool gated = NB == 2 && a.epilogue == 2;
  const int n0 = blockIdx.x * N, first = blockIdx.y * (gated ? 8 : 8 * NB);  // strip of this block
  // Local strip j: group j / (4 NB), its block j / 4 % NB. Strips beyond the last repeat it.
  auto strip_of = [&](int j) {
    if (gated) return min(first + (j >> 3) * 4 + (j & 3), a.strips - 1) + (j >> 2 & 1) * a.strips;
    return min(first + j, a.strips - 1);
  };
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
      mbar_expect(full + slot, XB + WB);
      bulk_load(xs + slot * XB, a.x + ((size_t)c * a.padded + n0) * 128, XB, full + slot);
      for (int j = 0; j < 8 * NB; j++) bulk_load(ws + slot * WB + j * F::CB, a.w + strip_of(j) * a.strip_bytes + (size_t)c * F::CB, F::CB, full + slot);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int group = warp >> 2, wi = warp & 3;
  float acc[NB][N / 2];
#pragma unroll
  for (int b = 0; b < NB; b++)
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[b][i] = 0;
  for (int c = 0; c < a.chunks; c++) {
    const int slot = c % ST;
    mbar_wait(full + slot, c / ST & 1);
    uint32_t f[NB][4][4];
#pragma unroll
    for (int b = 0; b < NB; b++) Fragment<F>::load(ws + slot * WB + ((group * NB + b) * 4 + wi) * F::CB, lane, f[b]);
    const uint64_t x = wgmma_rows(xs + slot * XB);
#pragma unroll
    for (int b = 0; b < NB; b++) wgmma_pin(acc[b]);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int b = 0; b < NB; b++) Wgmma<N>::run(acc[b], f[b][j], x + 2 * j);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < NB; b++) wgmma_pin(acc[b]);
    mbar_arrive(empty + slot);
  }
  pdl_wait();
  // Thread: outputs g and g + 8 of its strip in each block, rows 2 t and 2 t + 1 of every eight.
#pragma unroll
  for (int b = 0; b < NB; b++) {
    if (gated && b == 1) break;
    const int strip = first + (gated ? group * 4 : (group * NB + b) * 4) + wi;
    if (strip >= a.strips) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int m = strip * 16 + g + 8 * half;
      if (m >= a.m) continue;
      const float s0 = F::POST * (a.row_scale ? __ldg(a.row_scale + m) : 1.f);
      const float s1 = gated ? F::POST * (a.row_scale ? __ldg(a.row_scale + a.m + m) : 1.f) : 0.f;
#pragma unroll
      for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int row = n0 + i * 8 + 2 * t + j;
          if (row >= a.rows) continue;
          float v = acc[b][i * 4 + 2 * half + j] * s0;
          const size_t at = (size_t)row * a.ldo + m;
          if (a.epilogue == 0) {
            if (a.softcap > 0.f) v = a.softcap * tanhf(v / a.softcap);
            ((float*)a.out)[at] = v;
            continue;
          }
          if (gated) v = activate(a.activation, v) * (acc[NB - 1][i * 4 + 2 * half + j] * s1);
          else if (a.epilogue == 3) v = activate(a.activation, v) * a.times[(size_t)row * a.ld_times + m];
          ((bf16*)a.out)[at] = __float2bfloat16(v);
        }
    }
  }
}

// wide_FORM_{64 NB outputs a group}x{rows}; stages as in src/kernels/gemm_wide.rs.
#define WIDE(FORM, F, NB, N, ST) \
  extern "C" __global__ void __launch_bounds__(384, 1) wide_##FORM##_##NB##x##N(const __grid_constant__ WideArgs a) { wide_body<F, NB, N, ST>(a); }
#define WIDE_FORM(FORM, F)                                                                                                     \
  WIDE(FORM, F, 2, 128, 4)                                                                                                     \
  WIDE(FORM, F, 2, 64, 4)                                                                                                      \
  WIDE(FORM, F, 1, 128, 4)
WIDE_FORM(bf16, Bf16)
WIDE_FORM(fp8, Fp8)
WIDE_FORM(nvfp4, Nvfp4)
