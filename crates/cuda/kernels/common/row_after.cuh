// One row of x against weights of four bits: out[m] = sum_k W[m][k] x[k], float32 sums.
//
// The skinny kernel (skinny.cuh) multiplies block by block and scales 16 x 8 sums in float32 after each, though at one row seven of the eight columns
// are idle. Here they are used: the inputs of block j of a group stand in column j alone, zeros in the others (a lane whose column it is not reads x from
// a few zeros), so that the sums of eight blocks come out side by side in one accumulator and are scaled once, each by the lane that holds them. The
// sums of x that the offsets need are made once, when x is brought to shared memory. Packed bytes are the same (forms.cuh).
//
// Units, planes, ring and producer are those of skinny.cuh. Instructions for 1,024 weights, loop included, and times: docs/performance.md.
#pragma once
#include "skinny_after.cuh"

// Where a group of chunks and its inputs lie: every pointer is to the warp's first chunk of it, with the step to the next.
struct RowGroup {
  const uint8_t* w;    // packed chunk, one strip after the other every `strip` bytes
  const uint8_t* x;    // bf16, prescaled
  const float* sums;   // of x by 32 inputs, times 2^-33
  const uint8_t* zeros;
  int w_step, strip, x_step, sums_step, n, lane;  // n: chunks that exist
};
__device__ __forceinline__ uint4 row_x(bool mine, const uint8_t* x, const uint8_t* zeros) { return *(const uint4*)(mine ? x : zeros); }

// Two nibble words of 8 inputs a row, as Int4's.
__device__ __forceinline__ void row_nibbles(float (&P)[2][4], uint32_t r0, uint32_t r1, const uint4& x) {
  mma(P[0], r0 & 0x000f000fu, r1 & 0x000f000fu, r0 & 0x00f000f0u, r1 & 0x00f000f0u, x.x, x.y);
  r0 >>= 8; r1 >>= 8;
  mma(P[1], r0 & 0x000f000fu, r1 & 0x000f000fu, r0 & 0x00f000f0u, r1 & 0x00f000f0u, x.z, x.w);
}

// RowForm<F>: GROUP chunks fill the eight columns; multiply adds rows g and g + 8 of each strip to acc.
template <class F> struct RowForm;

// 2 blocks a chunk. SCALES adds the lane's four scaled sums: columns 2 t and 2 t + 1 are the blocks of chunk t.
template <class F, class SCALES> struct RowInt4 {
  static constexpr int GROUP = 4;
  static constexpr float POST = F::POST;
  template <int MS, bool FULL> static __device__ __forceinline__ void multiply(const RowGroup& r, float (&acc)[MS][2]) {
    const int g = r.lane >> 2, t = r.lane & 3;
    float P[MS][2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!FULL && i >= r.n) break;
      const uint8_t* x = r.x + i * r.x_step + t * 16;
      const uint4 x0 = row_x(g == 2 * i, x, r.zeros), x1 = row_x(g == 2 * i + 1, x + 64, r.zeros);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        const uint4 v = *(const uint4*)(r.w + ms * r.strip + i * r.w_step + r.lane * 16);
        row_nibbles(P[ms], v.x, v.y, x0);
        row_nibbles(P[ms], v.z, v.w, x1);
      }
    }
    if (!FULL && t >= r.n) return;
    const float2 X = *(const float2*)(r.sums + t * r.sums_step);
#pragma unroll
    for (int ms = 0; ms < MS; ms++) {
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; i++) p[i] = P[ms][0][i] + P[ms][1][i];
      SCALES::add(acc[ms], p, X, r.w + ms * r.strip + t * r.w_step + 512, g);
    }
  }
};
template <bool BF> struct RowScale8 {
  static __device__ __forceinline__ void add(float (&acc)[2], const float (&p)[4], float2 X, const uint8_t* scales, int g) {
    const uint2 s = *(const uint2*)(scales + g * 8);
    float2 d0, d1;
    if (BF) {
      d0 = make_float2(__uint_as_float(s.x << 16), __uint_as_float(s.x & 0xffff0000u));
      d1 = make_float2(__uint_as_float(s.y << 16), __uint_as_float(s.y & 0xffff0000u));
    } else { d0 = __half22float2(*(const __half2*)&s.x); d1 = __half22float2(*(const __half2*)&s.y); }
    acc[0] += d0.x * fmaf(-8.f, X.x, p[0]) + d1.x * fmaf(-8.f, X.y, p[1]);
    acc[1] += d0.y * fmaf(-8.f, X.x, p[2]) + d1.y * fmaf(-8.f, X.y, p[3]);
  }
};
struct RowScaleMin {
  static __device__ __forceinline__ void add(float (&acc)[2], const float (&p)[4], float2 X, const uint8_t* scales, int g) {
    const uint4 s = *(const uint4*)(scales + g * 16);
    const float2 a0 = __half22float2(*(const __half2*)&s.x), b0 = __half22float2(*(const __half2*)&s.y);
    const float2 a1 = __half22float2(*(const __half2*)&s.z), b1 = __half22float2(*(const __half2*)&s.w);
    acc[0] += fmaf(a0.x, p[0], a0.y * X.x) + fmaf(a1.x, p[1], a1.y * X.y);
    acc[1] += fmaf(b0.x, p[2], b0.y * X.x) + fmaf(b1.x, p[3], b1.y * X.y);
  }
};
template <bool BF> struct RowForm<Int4<BF>> : RowInt4<Int4<BF>, RowScale8<BF>> {};
template <> struct RowForm<Int4Min> : RowInt4<Int4Min, RowScaleMin> {};

// 4 blocks of 16 a chunk, block t in lane t: columns 4 i + t are those of chunk i. Codes are not scaled before the product.
template <> struct RowForm<Nvfp4> {
  static constexpr int GROUP = 2;
  static constexpr float POST = 0x1p26f;
  template <int MS, bool FULL> static __device__ __forceinline__ void multiply(const RowGroup& r, float (&acc)[MS][2]) {
    const int g = r.lane >> 2, t = r.lane & 3;
    float P[MS][2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (!FULL && i >= r.n) break;
      const uint8_t* x = g == 4 * i + t ? r.x + i * r.x_step + t * 32 : r.zeros;
      const uint4 x0 = *(const uint4*)x, x1 = *(const uint4*)(x + 16);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        const uint4 v = *(const uint4*)(r.w + ms * r.strip + i * r.w_step + r.lane * 16);
#pragma unroll
        for (int w = 0; w < 2; w++) {
          const uint32_t r0 = w ? v.y : v.x, r1 = w ? v.w : v.z;
          const uint4& b = w ? x1 : x0;
          mma(P[ms][0], Nvfp4::decode<0>(r0), Nvfp4::decode<0>(r1), Nvfp4::decode<1>(r0), Nvfp4::decode<1>(r1), b.x, b.y);
          mma(P[ms][1], Nvfp4::decode<2>(r0), Nvfp4::decode<2>(r1), Nvfp4::decode<3>(r0), Nvfp4::decode<3>(r1), b.z, b.w);
        }
      }
    }
    if (!FULL && (t >> 1) >= r.n) return;
#pragma unroll
    for (int ms = 0; ms < MS; ms++) {  // columns 2 t and 2 t + 1: two neighbouring lanes' blocks of chunk t / 2
      const uint32_t s = *(const uint32_t*)(r.w + ms * r.strip + (t >> 1) * r.w_step + 512 + (4 * g + ((2 * t) & 3)) * 2);
      const __half2_raw h0 = __nv_cvt_fp8x2_to_halfraw2((uint16_t)s, __NV_E4M3), h1 = __nv_cvt_fp8x2_to_halfraw2((uint16_t)(s >> 16), __NV_E4M3);
      const float2 d0 = __half22float2(__half2(h0)), d1 = __half22float2(__half2(h1));
      const float(&P0)[4] = P[ms][0], (&P1)[4] = P[ms][1];
      acc[ms][0] = fmaf(d0.x, P0[0] + P1[0], fmaf(d1.x, P0[1] + P1[1], acc[ms][0]));
      acc[ms][1] = fmaf(d0.y, P0[2] + P1[2], fmaf(d1.y, P0[3] + P1[3], acc[ms][1]));
    }
  }
};

// 8 blocks a chunk. A lane unpacks the scales and minimums of its own four sums.
template <> struct RowForm<Q4K> {
  static constexpr int GROUP = 1;
  static constexpr float POST = Q4K::POST;
  static __device__ __forceinline__ float row_of(uint4 h, int t, float p0, float p1, float2 X) {
    const int shift = (t & 1) * 16;
    const uint32_t s = h.y >> shift, m = h.z >> shift, u = h.w >> shift;
    const uint32_t sc = t < 2 ? s & 0x3f3fu : (u & 0x0f0fu) | ((s >> 2) & 0x3030u);
    const uint32_t mn = t < 2 ? m & 0x3f3fu : ((u >> 4) & 0x0f0fu) | ((m >> 2) & 0x3030u);
    const float2 d = __half22float2(*(const __half2*)&h.x);
    return d.x * fmaf(byte_f<0>(sc), p0, byte_f<1>(sc) * p1) - d.y * fmaf(byte_f<0>(mn), X.x, byte_f<1>(mn) * X.y);
  }
  template <int MS, bool FULL> static __device__ __forceinline__ void multiply(const RowGroup& r, float (&acc)[MS][2]) {
    const int g = r.lane >> 2, t = r.lane & 3;
    float P[MS][2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint8_t* x = r.x + i * 128 + t * 16;
      const uint4 x0 = row_x(g == 2 * i, x, r.zeros), x1 = row_x(g == 2 * i + 1, x + 64, r.zeros);
#pragma unroll
      for (int ms = 0; ms < MS; ms++) {
        const uint4 v = *(const uint4*)(r.w + ms * r.strip + i * 512 + r.lane * 16);
        row_nibbles(P[ms], v.x, v.y, x0);
        row_nibbles(P[ms], v.z, v.w, x1);
      }
    }
    const float2 X = *(const float2*)(r.sums + 2 * t);
#pragma unroll
    for (int ms = 0; ms < MS; ms++) {
      const float(&P0)[4] = P[ms][0], (&P1)[4] = P[ms][1];
      const uint8_t* h = r.w + ms * r.strip + 2048 + g * 16;
      acc[ms][0] += row_of(*(const uint4*)h, t, P0[0] + P1[0], P0[1] + P1[1], X);
      acc[ms][1] += row_of(*(const uint4*)(h + 128), t, P0[2] + P1[2], P0[3] + P1[3], X);
    }
  }
};

// Beyond the ring: the warps' sums (two buffers), barriers, zeros, sums of x; then x.
template <class F, int CW, int NS, int MS> __host__ __device__ constexpr int row_smem() {
  return NS * 8 * CW * MS * F::CB + 2 * 8 * MS * 64 + (2 * NS + 4) * 8 + 64;
}

template <class F, int CW, int NS, int MS> __device__ __forceinline__ void row_body(const SkinnyArgs& a) {
  using R = RowForm<F>;
  constexpr int STAGE = 8 * CW * MS * F::CB;
  static_assert(CW % R::GROUP == 0);
  extern __shared__ __align__(128) uint8_t sm[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float* red = (float*)(sm + NS * STAGE);
  uint64_t* full = (uint64_t*)(red + 2 * 8 * MS * 16);
  uint64_t* empty = full + NS;
  uint64_t *rfull = empty + NS, *rempty = rfull + 2;
  uint8_t* zeros = (uint8_t*)(rempty + 2);
  const bool gated = a.epilogue == OUT_GATED;
  const int lwk = 3 - a.lwm, wk_n = 1 << lwk, cps = CW << lwk;
  const int lunit = a.lwm + (MS == 2), unit_strips = 1 << lunit;
  const int lrun = gated ? lunit - 1 : lunit, run = 1 << lrun, total = a.strips, units = a.per_group;
  const int plane = blockIdx.y, u0 = blockIdx.x, ustep = gridDim.x;
  const int c0 = min(plane * a.cut, a.chunks), c1 = min(c0 + a.cut, a.chunks);
  if (threadIdx.x == 256) {
    for (int i = 0; i < NS; i++) { mbar_init(full + i, 1); mbar_init(empty + i, 256); }
    for (int i = 0; i < 2; i++) { mbar_init(rfull + i, 256); mbar_init(rempty + i, 32); }
    fence_barrier_init();
    fence_proxy_async();
  }
  if (threadIdx.x < 16) ((uint32_t*)zeros)[threadIdx.x] = 0;
  __syncthreads();
  pdl_launch();

  if (warp == 8) {  // the producer: weights only, so it waits for no kernel
    if (lane != 0) return;
    int slot = 0, parity = 1;
    for (int u = u0; u < units; u += ustep) {
      const int first = u << lrun, n = min(run, total - first);
      for (int c = c0; c < c1; c += cps) {
        const int have = min(cps, c1 - c);
        mbar_wait(empty + slot, parity);
        mbar_expect(full + slot, have * F::CB * (gated ? 2 * n : n));
        for (int i = 0; i < unit_strips; i++) {
          const int j = i >= run ? i - run : i;
          if (j >= n) continue;
          const int strip = first + j + (i >= run ? total : 0);
          bulk_load_once(sm + slot * STAGE + i * cps * F::CB, a.w + strip * a.strip_bytes + (size_t)c * F::CB, have * F::CB, full + slot, a.ld_times == -1);
        }
        if (++slot == NS) { slot = 0; parity ^= 1; }
      }
    }
    return;
  }

  // The reducing warp's first output of unit u: row scales are asked for at its start, of the first one before the kernel before has ended.
  float scale_gate = 1, scale_up = 1;
  auto fetch_scales = [&](int u, int i) {
    const int m = ((u << lrun) + ((i >> 4) & (run - 1))) * 16 + (i & 15);
    if (!a.row_scale || m >= a.m) return;
    scale_gate = __ldg(a.row_scale + m);
    if (gated) scale_up = __ldg(a.row_scale + a.m + m);
  };
  if (u0 < units && warp == 0) fetch_scales(u0, lane);
  pdl_wait();
  const int kx0 = c0 * F::KC, kx = (c1 - c0) * F::KC;
  float* sums = (float*)(sm + row_smem<F, CW, NS, MS>());
  bf16* xs = (bf16*)(sums + (kx / 32 + 3) / 4 * 4);
  for (int i0 = threadIdx.x; i0 < (kx / 8 + 255) / 256 * 256; i0 += 4 * 256) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int k = (i0 + j * 256) * 8;
      v[j] = make_uint4(0, 0, 0, 0);
      if (k < kx && kx0 + k < a.k) v[j] = *(const uint4*)(a.x + kx0 + k);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int k = (i0 + j * 256) * 8;
      const uint32_t* w = &v[j].x;
      float s = 0;
#pragma unroll
      for (int q = 0; q < 4; q++) s += __uint_as_float(w[q] << 16) + __uint_as_float(w[q] & 0xffff0000u);
      s += __shfl_xor_sync(~0u, s, 1);
      s += __shfl_xor_sync(~0u, s, 2);
      if (k >= kx) continue;
      if (t == 0) sums[k / 32] = s * 0x1p-33f;
      v[j].x = mul_bf16x2(v[j].x, POW2_100);
      v[j].y = mul_bf16x2(v[j].y, F::MAP == WIDE ? POW2_100 : POW2_96);
      v[j].z = mul_bf16x2(v[j].z, POW2_100);
      v[j].w = mul_bf16x2(v[j].w, F::MAP == WIDE ? POW2_100 : POW2_96);
      *(uint4*)(xs + k) = v[j];
    }
  }
  consumers_sync();

  const int wm = warp & ((1 << a.lwm) - 1), wk = warp >> a.lwm;
  RowGroup r;
  r.zeros = zeros;
  r.lane = lane;
  r.w_step = wk_n * F::CB;
  r.strip = cps * F::CB;
  r.x_step = wk_n * F::KC * 2;
  r.sums_step = wk_n * (F::KC / 32);
  int slot = 0, parity = 0, it = 0;
  for (int u = u0; u < units; u += ustep, it++) {
    const int turn = (warp - it) & 7;
    if (it && turn == 0) fetch_scales(u, lane);
    float acc[MS][2] = {};
    for (int c = c0; c < c1; c += cps) {
      const int mine = (min(cps, c1 - c) - wk + wk_n - 1) >> lwk;  // this warp's chunks of the stage: wk, wk + wk_n, ...
      r.w = sm + slot * STAGE + (wm * MS * cps + wk) * F::CB;
      r.x = (const uint8_t*)xs + (c - c0 + wk) * F::KC * 2;
      r.sums = sums + (c - c0 + wk) * (F::KC / 32);
      mbar_wait(full + slot, parity);
#pragma unroll
      for (int j = 0; j < CW; j += R::GROUP) {
        r.n = mine - j;
        if (r.n >= R::GROUP) R::template multiply<MS, true>(r, acc);
        else if (R::GROUP > 1 && r.n > 0) R::template multiply<MS, false>(r, acc);
        r.w += R::GROUP * r.w_step;
        r.x += R::GROUP * r.x_step;
        r.sums += R::GROUP * r.sums_step;
      }
      __syncwarp();
      mbar_arrive(empty + slot);
      if (++slot == NS) { slot = 0; parity ^= 1; }
    }
    // The columns, then the warps that shared the strips' inputs, in warp order; one warp in turn adds and writes, the others go on.
    const int buf = it & 1, phase = it >> 1 & 1;
    float* rb = red + buf * 8 * MS * 16;
    if (it >= 2) mbar_wait(rempty + buf, phase ^ 1);
#pragma unroll
    for (int ms = 0; ms < MS; ms++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float s = acc[ms][i];
        s += __shfl_xor_sync(~0u, s, 1);
        s += __shfl_xor_sync(~0u, s, 2);
        if (t == 0) rb[(warp * MS + ms) * 16 + g + 8 * i] = s;
      }
    mbar_arrive(rfull + buf);
    if (turn != 0) continue;
    mbar_wait(rfull + buf, phase);
    const int first = u << lrun;
    for (int i = lane; i < run * 16; i += 32) {
      const int strip = i >> 4, m = (first + strip) * 16 + (i & 15);
      if (m >= a.m) continue;
      if (i != lane) fetch_scales(u, i);
      auto sum = [&](int j) {  // of local strip j
        const float* at = rb + j * 16 + (i & 15);
        float s = 0;
#pragma unroll
        for (int w = 0; w < 8; w++) if (w < wk_n) s += at[(w << lunit) * 16];
        return s * R::POST;
      };
      float v = sum(strip) * scale_gate;
      if (gated) v = activate(a.activation, v) * (sum(strip + run) * scale_up);
      if (a.epilogue == OUT_F32) {
        if (a.softcap > 0.f) v = a.softcap * tanhf(v / a.softcap);
        ((float*)a.out)[(size_t)plane * a.ldo + m] = v;
      } else {
        if (a.epilogue == OUT_GATE_TIMES) v = activate(a.activation, v) * a.times[m];
        ((bf16*)a.out)[m] = __float2bfloat16(v);
      }
    }
    __syncwarp();
    mbar_arrive(rempty + buf);
  }
}

// skinny_FORM_r1 and _r2: strips of a warp; CW chunks a warp and stage, NS stages.
#define ROW(NAME, F, CW, NS, MS) \
  extern "C" __global__ void __launch_bounds__(288, 2) NAME(const __grid_constant__ SkinnyArgs a) { row_body<F, CW, NS, MS>(a); }
#define ROW_FORM(FORM, F, CW1, NS1, CW2, NS2) \
  ROW(skinny_##FORM##_r1, F, CW1, NS1, 1)     \
  ROW(skinny_##FORM##_r2, F, CW2, NS2, 2)
