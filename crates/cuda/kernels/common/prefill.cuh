// Products with packed weights for many rows: out[n][m] = sum_k W[m][k] x[n][k], n from 17 up.
//
// The weights are the A operand as in the skinny kernel and are decoded straight from their packed bytes (forms.cuh); x is the B operand, from
// shared memory. A block has 8 strips (128 outputs) x 16 NT rows of x: four warps along the outputs with strips s and s + 4 each, two along x
// with NT tiles of 8. x and weights arrive by cp.async in stages of one chunk. When gated, strips 0..3 are gate and 4..7 the up strips that
// belong to them, so a warp holds both factors of its outputs.
// Experts: a block takes all rows that chose its expert, 16 NT at a time; which they are stands in a list on the device.
//
// Traffic: weights once for every 16 NT rows (from L2 but for the first), x once for every 128 outputs. Arithmetic: each decoded weight is
// multiplied with 8 NT rows.
#pragma once
#include "forms.cuh"

// Mirrored by PrefillArgs in src/kernels/gemm_prefill.rs.
struct PrefillArgs {
  const uint8_t* w;
  const float* row_scale;     // by output of all matrices, or null
  const bf16* x;              // [rows or pairs][ldx]
  void* out;                  // [rows or pairs][ldo]
  const float* times;         // epilogue 3
  const int* counts;          // experts: rows of each
  const int* pairs;           // experts: [expert][list_stride], row * top_k + slot
  const float* pair_weight;   // experts, gated: [row][2 top_k], the weights behind the ids; null: none
  uint64_t strip_bytes, group_bytes;
  int strips, k, chunks;      // strips: of gate alone when gated
  int ldx, rows, ldo, m;
  int epilogue, activation, ld_times;
  int list_stride, top_k, x_by_pair;  // x_by_pair: row of x is the pair, else pair / top_k
  float softcap;
};

constexpr int XPAD = 8;
template <class F, int NT, int ST> __host__ __device__ constexpr int prefill_smem() { return ST * (8 * F::CB + 16 * NT * (F::KC + XPAD) * 2) + 16 * NT * 4 + 8 * 1024; }

template <class F, int NT, int ST> __device__ __forceinline__ void prefill_body(const PrefillArgs& a) {
  constexpr int BN = 16 * NT, XROW = F::KC + XPAD, WB = 8 * F::CB, STAGE = WB + BN * XROW * 2, PIECES = F::KC / 64;
  extern __shared__ __align__(128) uint8_t sm[];
  int* list = (int*)(sm + ST * STAGE);  // rows of x, then of out
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, wm = warp & 3, wn = warp >> 2;
  float* scratch = (float*)(list + BN) + warp * 256;
  const bool gated = a.epilogue == 2;
  const bool experts = a.counts != nullptr;
  const int e = experts ? blockIdx.z : 0, first = blockIdx.y * (gated ? 4 : 8);
  pdl_launch();
  pdl_wait();
  const int rows = experts ? a.counts[e] : a.rows;
  const uint8_t* w = a.w + (size_t)e * a.group_bytes;
  auto strip_of = [&](int j) { return gated && j >= 4 ? min(a.strips + first + j - 4, 2 * a.strips - 1) : min(first + j, a.strips - 1); };
  for (int n0 = experts ? 0 : blockIdx.x * BN; n0 < rows; n0 += experts ? BN : rows) {
    const int have = min(BN, rows - n0);
    if (experts) {
      __syncthreads();
      if (tid < BN) list[tid] = tid < have ? a.pairs[(size_t)e * a.list_stride + n0 + tid] : 0;
      __syncthreads();
    }
    auto load = [&](int c) {
      uint8_t* stage = sm + c % ST * STAGE;
      if (c < a.chunks) {
        for (int i = tid; i < WB / 16; i += 256) {
          const int j = i / (F::CB / 16), at = i % (F::CB / 16) * 16;
          cp_async16(stage + j * F::CB + at, w + strip_of(j) * a.strip_bytes + (size_t)c * F::CB + at, true);
        }
        bf16* xs = (bf16*)(stage + WB);
        for (int i = tid; i < BN * (F::KC / 8); i += 256) {
          const int n = i / (F::KC / 8), k = i % (F::KC / 8) * 8;
          const bool ok = n < have && c * F::KC + k < a.k;
          const int row = !ok ? 0 : !experts ? n0 + n : a.x_by_pair ? list[n] : list[n] / a.top_k;
          cp_async16(xs + n * XROW + k, a.x + (size_t)row * a.ldx + (ok ? c * F::KC + k : 0), ok);
        }
      }
      cp_async_commit();
    };
    float acc[2][NT][4] = {};
#pragma unroll
    for (int i = 0; i < ST - 1; i++) load(i);
    for (int c = 0; c < a.chunks; c++) {
      cp_async_wait<ST - 2>();
      __syncthreads();
      load(c + ST - 1);
      const uint8_t* stage = sm + c % ST * STAGE;
      const uint8_t* ch = stage + wm * F::CB;
      const bf16* xs = (const bf16*)(stage + WB) + (wn * 8 * NT + g) * XROW;
      // A form with headers: its two strips' scales in turn, since scratch holds one.
      if (F::SCRATCH) {
#pragma unroll
        for (int ms = 0; ms < 2; ms++) {
          __syncwarp();
          F::chunk_begin(ch + ms * 4 * F::CB, lane, scratch);
          __syncwarp();
#pragma unroll
          for (int q = 0; q < PIECES; q++) {
            uint32_t b[NT][8];
#pragma unroll
            for (int n = 0; n < NT; n++) load_x<F, false>(b[n], xs + n * 8 * XROW + q * 64, t);
            F::template piece<1, NT>(ch + ms * 4 * F::CB, 0, q, lane, b, *(float(*)[1][NT][4]) & acc[ms], scratch);
          }
        }
      } else {
#pragma unroll
        for (int q = 0; q < PIECES; q++) {
          uint32_t b[NT][8];
#pragma unroll
          for (int n = 0; n < NT; n++) load_x<F, false>(b[n], xs + n * 8 * XROW + q * 64, t);
          F::template piece<2, NT>(ch, 4 * F::CB, q, lane, b, acc, nullptr);
        }
      }
    }
    cp_async_wait<0>();
    __syncthreads();
    // Thread: outputs g and g + 8 of its strips, rows 2 t and 2 t + 1 of each tile.
    const size_t scale_at = (size_t)e * a.m * (gated ? 2 : 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int ms = 0; ms < 2; ms++) {
        if (gated && ms == 1) continue;
        const int m = (first + wm + 4 * ms) * 16 + g + 8 * half;
        if (first + wm + 4 * ms >= a.strips || m >= a.m) continue;
        const float s0 = F::POST * (a.row_scale ? __ldg(a.row_scale + scale_at + m) : 1.f);
        const float s1 = gated ? F::POST * (a.row_scale ? __ldg(a.row_scale + scale_at + a.m + m) : 1.f) : 0.f;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const int col = wn * 8 * NT + n * 8 + 2 * t + j;
            if (col >= have) continue;
            const int row = experts ? list[col] : n0 + col;
            float v = acc[ms][n][2 * half + j] * s0;
            const size_t at = (size_t)row * a.ldo + m;
            if (gated) {
              v = activate(a.activation, v) * (acc[1][n][2 * half + j] * s1);
              if (a.pair_weight) v *= a.pair_weight[(size_t)(row / a.top_k) * 2 * a.top_k + a.top_k + row % a.top_k];
              ((bf16*)a.out)[at] = __float2bfloat16(v);
            } else if (a.epilogue == 0) {
              if (a.softcap > 0.f) v = a.softcap * tanhf(v / a.softcap);
              ((float*)a.out)[at] = v;
            } else {
              if (a.epilogue == 3) v = activate(a.activation, v) * a.times[(size_t)row * a.ld_times + m];
              ((bf16*)a.out)[at] = __float2bfloat16(v);
            }
          }
      }
    }
  }
}

// NAME: prefill_FORM_{8 NT x 2 rows}.
#define PREFILL(NAME, F, NT, ST) \
  extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ PrefillArgs a) { prefill_body<F, NT, ST>(a); }
#define PREFILL_FORM(FORM, F, ST) \
  PREFILL(prefill_##FORM##_64, F, 4, ST) \
  PREFILL(prefill_##FORM##_128, F, 8, ST)
