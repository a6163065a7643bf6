// Attention for many rows over paged keys and values in bf16, head dims 256 and 512:
// out[h] = softmax(scale q_h K^T) V over the keys that a row sees, position - window < j < visible_to. Pages: common/page.cuh.
//
// A block has 64 pairs of row and query head of one kv head (group g: 64 / g rows), so that a page serves them all. Four warps along the pairs,
// two that share D: each forms half of S = Q K^T for its 16 pairs, the halves meet in shared memory, both do the softmax, each
// forms its half of D of O += P V. Q stays in registers as A fragments, P goes from accumulators to A fragments as it is. Pages come by
// bulk copies, one ahead. Rows of several sequences in one block are taken sequence by sequence, the others masked.
//
// Traffic: the visible pages of a sequence once for every 64 / group rows (from L2). p is rounded to bf16.
#include "common/page.cuh"

// Mirrored by PrefillAttnArgs in src/kernels/attn_prefill.rs.
struct PrefillAttnArgs {
  const bf16* q;
  const uint8_t* kv;
  KvColumns at;
  bf16* out;
  int ld_q, ld_out, heads, kv_heads, window, rows;
  float scale;
};
constexpr int STAGES = 2, PAIRS = 64;
template <int D> __host__ __device__ constexpr int prefill_attn_smem() { return STAGES * 2 * half_page<D, false>() + 2 * 8 * 4 * 32 * 16 + 4 * STAGES * 8; }

template <int D> __device__ __forceinline__ void prefill_attn(const PrefillAttnArgs& a) {
  constexpr int HALF = half_page<D, false>(), ROW = HALF / PAGE, DH = D / 2, KS = DH / 16, NO = DH / 8;
  extern __shared__ __align__(128) uint8_t sm[];
  float4* exchange = (float4*)(sm + STAGES * 2 * HALF);  // [2][warp][tile][lane]
  uint64_t* kfull = (uint64_t*)(exchange + 2 * 8 * 4 * 32);
  uint64_t *vfull = kfull + STAGES, *kempty = vfull + STAGES, *vempty = kempty + STAGES;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int all_heads = a.heads / a.kv_heads, group = min(all_heads, 8), subs = all_heads / group;
  const int kvh = blockIdx.y / subs, head0 = kvh * all_heads + blockIdx.y % subs * group;
  const int per = PAIRS / group, row0 = blockIdx.x * per, n_rows = min(per, a.rows - row0);
  auto batch_row = [&](int r) { return a.at.map ? a.at.map[r] : r; };
  auto low_of = [&](int row) { return a.window ? max(0, a.at.positions[row] + 1 - a.window) : 0; };
  if (tid == 0) {
    for (int i = 0; i < STAGES; i++) { mbar_init(kfull + i, 1); mbar_init(vfull + i, 1); mbar_init(kempty + i, 256); mbar_init(vempty + i, 256); }
    fence_barrier_init();
    fence_proxy_async();
  }
  __syncthreads();
  pdl_launch();
  pdl_wait();
  // A run is the block's rows of one sequence: rows r0 .. r1, pages p0 .. p1.
  struct Run { int r0, r1, table, p0, p1; };
  auto run_from = [&](int r0) {
    Run run = {r0, r0, a.at.table[batch_row(row0 + r0)], 1 << 30, 0};
    for (; run.r1 < n_rows; run.r1++) {
      const int row = batch_row(row0 + run.r1);
      if (a.at.table[row] != run.table) break;
      run.p0 = min(run.p0, low_of(row) / PAGE);
      run.p1 = max(run.p1, (a.at.visible_to[row] + PAGE - 1) / PAGE);
    }
    return run;
  };
  // Lane 0 of the first warp keeps one page ahead of the others: a warp of its own would cost registers that the sums need.
  Run ahead = run_from(0);
  int ahead_p = ahead.p0, ahead_slot = 0, ahead_parity = 1;
  auto fetch = [&]() {
    while (ahead_p >= ahead.p1) {
      if (ahead.r1 >= n_rows) return;
      ahead = run_from(ahead.r1);
      ahead_p = ahead.p0;
    }
    const uint8_t* src = a.kv + ((size_t)a.at.pages[ahead.table + ahead_p] * a.kv_heads + kvh) * (2 * HALF);
    uint8_t* dst = sm + ahead_slot * 2 * HALF;
    mbar_wait(kempty + ahead_slot, ahead_parity);
    mbar_expect(kfull + ahead_slot, HALF);
    bulk_load(dst, src, HALF, kfull + ahead_slot);
    mbar_wait(vempty + ahead_slot, ahead_parity);
    mbar_expect(vfull + ahead_slot, HALF);
    bulk_load(dst + HALF, src + HALF, HALF, vfull + ahead_slot);
    ahead_p++;
    if (++ahead_slot == STAGES) { ahead_slot = 0; ahead_parity ^= 1; }
  };
  if (tid == 0) fetch();
  const int mt = warp & 3, dq = warp >> 2;
  // This thread's two pairs: g and g + 8 of the warp's 16.
  int r_of[2], lo[2], hi[2];
  uint32_t qf[KS][4];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int i = mt * 16 + g + 8 * h;
    r_of[h] = i / group;
    const bool ok = r_of[h] < n_rows && i < per * group;
    if (!ok) r_of[h] = -1;
    lo[h] = hi[h] = 0;
    if (ok) { const int row = batch_row(row0 + r_of[h]); lo[h] = low_of(row); hi[h] = a.at.visible_to[row]; }
    const bf16* q = a.q + (size_t)(row0 + (ok ? r_of[h] : 0)) * a.ld_q + (head0 + i % group) * D + dq * DH + 2 * t;
#pragma unroll
    for (int k = 0; k < KS; k++) {
      qf[k][h] = ok ? *(const uint32_t*)(q + 16 * k) : 0;
      qf[k][2 + h] = ok ? *(const uint32_t*)(q + 16 * k + 8) : 0;
    }
  }
  const float sc = a.scale * 1.4426950408889634f;
  float o[NO][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
  int slot = 0, parity = 0, step = 0;
  const int mi = lane >> 3, mr = lane & 7;
  for (int r = 0; r < n_rows;) {
    const Run run = run_from(r);
    for (int p = run.p0; p < run.p1; p++, step ^= 1) {
      const uint32_t K = smem_addr(sm + slot * 2 * HALF), V = K + HALF;
      if (tid == 0) fetch();
      __syncwarp();
      mbar_wait(kfull + slot, parity);
      float s[4][4] = {};
#pragma unroll
      for (int n = 0; n < 4; n++) {  // eight keys; two k16 steps a load
        const int tok = n * 8 + mr;
#pragma unroll
        for (int k = 0; k < KS; k += 2) {
          uint32_t b[4];
          ldmatrix_x4(b, K + tok * ROW + (((dq * DH / 8 + 2 * k + mi) ^ swizzle(tok)) << 4));
          mma(s[n], qf[k][0], qf[k][1], qf[k][2], qf[k][3], b[0], b[1]);
          mma(s[n], qf[k + 1][0], qf[k + 1][1], qf[k + 1][2], qf[k + 1][3], b[2], b[3]);
        }
      }
      float4* mine = exchange + ((step * 8 + warp) * 4) * 32 + lane;
      const float4* other = exchange + ((step * 8 + (warp ^ 4)) * 4) * 32 + lane;
#pragma unroll
      for (int n = 0; n < 4; n++) mine[n * 32] = *(float4*)s[n];
      mbar_arrive(kempty + slot);
      asm volatile("bar.sync %0, 64;" ::"r"(mt + 1) : "memory");
      float mx[2] = {m[0], m[1]};
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float4 u = other[n * 32];
        s[n][0] = (s[n][0] + u.x) * sc; s[n][1] = (s[n][1] + u.y) * sc; s[n][2] = (s[n][2] + u.z) * sc; s[n][3] = (s[n][3] + u.w) * sc;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int h = j >> 1, pos = p * PAGE + n * 8 + 2 * t + (j & 1);
          if (r_of[h] < run.r0 || r_of[h] >= run.r1 || pos < lo[h] || pos >= hi[h]) s[n][j] = -INFINITY;
          mx[h] = fmaxf(mx[h], s[n][j]);
        }
      }
      float alpha[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        mx[h] = fmaxf(mx[h], __shfl_xor_sync(~0u, mx[h], 1));
        mx[h] = fmaxf(mx[h], __shfl_xor_sync(~0u, mx[h], 2));
        alpha[h] = mx[h] == m[h] ? 1.f : exp2f(m[h] - mx[h]);  // nothing seen yet: both are -inf
        m[h] = mx[h];
        l[h] *= alpha[h];
      }
      uint32_t pf[2][4];
#pragma unroll
      for (int n = 0; n < 4; n++) {
        float e[4];
#pragma unroll
        for (int j = 0; j < 4; j++) { e[j] = s[n][j] == -INFINITY ? 0.f : exp2f(s[n][j] - m[j >> 1]); l[j >> 1] += e[j]; }
        pf[n >> 1][(n & 1) * 2] = pack_bf16x2(e[0], e[1]);
        pf[n >> 1][(n & 1) * 2 + 1] = pack_bf16x2(e[2], e[3]);
      }
      if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
        for (int n = 0; n < NO; n++) { o[n][0] *= alpha[0]; o[n][1] *= alpha[0]; o[n][2] *= alpha[1]; o[n][3] *= alpha[1]; }
      }
      mbar_wait(vfull + slot, parity);
#pragma unroll
      for (int ks = 0; ks < 2; ks++) {
        const int tok = 16 * ks + mr + (mi & 1) * 8;
#pragma unroll
        for (int n = 0; n < NO; n += 2) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, V + tok * ROW + (((dq * DH / 8 + n + (mi >> 1)) ^ swizzle(tok)) << 4));
          mma(o[n], pf[ks][0], pf[ks][1], pf[ks][2], pf[ks][3], b[0], b[1]);
          mma(o[n + 1], pf[ks][0], pf[ks][1], pf[ks][2], pf[ks][3], b[2], b[3]);
        }
      }
      mbar_arrive(vempty + slot);
      if (++slot == STAGES) { slot = 0; parity ^= 1; }
    }
    r = run.r1;
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    l[h] += __shfl_xor_sync(~0u, l[h], 1);
    l[h] += __shfl_xor_sync(~0u, l[h], 2);
    if (r_of[h] < 0) continue;
    const float f = 1.f / l[h];
    bf16* to = a.out + (size_t)(row0 + r_of[h]) * a.ld_out + (head0 + (mt * 16 + g + 8 * h) % group) * D + dq * DH + 2 * t;
#pragma unroll
    for (int n = 0; n < NO; n++) *(uint32_t*)(to + 8 * n) = pack_bf16x2(o[n][2 * h] * f, o[n][2 * h + 1] * f);
  }
}
extern "C" __global__ void __launch_bounds__(256) attn_prefill_256(const __grid_constant__ PrefillAttnArgs a) { prefill_attn<256>(a); }
extern "C" __global__ void __launch_bounds__(256, 1) attn_prefill_512(const __grid_constant__ PrefillAttnArgs a) { prefill_attn<512>(a); }
