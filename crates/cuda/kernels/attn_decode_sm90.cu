// Split-KV attention for decode, head dims 256 and 512: out[h] = softmax(scale q_h K^T) V over the keys that a row sees,
// position - window < j < visible_to. Layout of pages: common/page.cuh.
//
// A block takes a run of pages, which a ninth warp fetches with bulk copies; two groups of 4 warps take alternate pages. For each: S = K Q^T
// (A = 16 tokens, B = up to 8 query heads of the kv head; two warps share D), one barrier of the group, softmax by every warp for itself,
// O^T += V^T P^T (A = V^T by ldmatrix.trans, each warp D/4 rows). GQA costs nothing: the heads are the n = 8 columns; 16 heads of a kv head
// are two units. The blocks of a cluster push their parts through distributed shared memory, each sums a slice of D; more clusters of one
// row meet in global memory, where the last to arrive for a slice sums them in order. How many clusters work is decided here by the row's number of
// keys, so one recorded launch serves every length; the others leave at once.
// FP8 E4M3: the bytes are moved into bf16 fields (times 2^-120), q and p carry 2^100.
//
// Traffic: the visible pages once for every 8 query heads, the parts in shared memory. p is rounded to bf16 (relative 2^-9).
// Before griddepcontrol.wait only pages are fetched that no row of this pass can have written.
// Times: docs/performance.md. Tried and dropped: one group of 8 warps (31B sliding FP8 8192 10.8 against 7.2 us); peers pulling the parts
// (5.6 against 3.3 us); two pages a step; the last block summing everything in global memory (9.1 against 4.6 us); an odd number of
// stages (wrong: a group can mistake the phase before on a slot that the other group used).
#include <cooperative_groups.h>

#include "common/heads.cuh"
namespace cg = cooperative_groups;

// Mirrored by AttnArgs in src/kernels/attn_decode.rs.
struct AttnArgs {
  const bf16* q;
  const uint8_t* kv;
  KvColumns at;
  bf16* out;
  float* ws;           // [unit][cluster][8][D]
  float* ws_ml;        // [unit][cluster][block of the cluster][8][2]
  unsigned* counters;  // [unit][block of the cluster], zero between launches
  int ld_q, ld_out, kv_heads, window, clusters, rows;  // window 0: all keys; clusters: at most, of one unit
  int group, subs, lcs;  // query heads of a unit, units of a kv head, log2 of the blocks of a cluster
  float scale, v_scale;
};
// With the heads of the row finished here. Mirrored by OwnHeadsArgs in src/kernels/attn_decode.rs.
struct OwnHeadsArgs {
  AttnArgs attn;
  HeadsArgs heads;
};

// Two groups of 4 warps take alternate pages, each with its own maximum, sum and output, so that one computes while the other waits.
// ST stages of one page; ST is even, so that a slot always serves the same group: loads can complete out of order. Beyond the ring: scores
// [2 groups][2][2 parts of D][8][40], the parts received from the cluster's blocks, maxima and sums, barriers.
template <int D, bool FP8, int ST> __host__ __device__ constexpr int attn_smem() {
  return ST * 2 * half_page<D, FP8>() + 2 * 2 * 2 * 8 * 40 * 4 + 8 * D * 4 + 9 * 16 * 4 + 4 * ST * 8;
}
// Heads finished here: queries lie [8][D + 32] behind that, rows apart by half of the banks, then the row's own key and value as in their page.
template <int D> __host__ __device__ constexpr int own_stride() { return D + 32; }
__device__ __forceinline__ void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
__device__ __forceinline__ void warps_sync() { asm volatile("bar.sync 3, 256;" ::: "memory"); }
// The same, and whether `one` holds for any thread.
__device__ __forceinline__ bool warps_or(bool one) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 3, 256, p;\nselp.u32 %0, 1, 0, q;\n}" : "=r"(any) : "r"((uint32_t)one) : "memory");
  return any;
}
__device__ __forceinline__ void store4(bf16* to, float4 v) { *(uint2*)to = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w)); }

// out or workspace = the sum of the CS parts received, this block's slice of D.
template <int D, int CS>
__device__ __forceinline__ void combine(const AttnArgs& a, bf16* out, const float* part, const float* ml, size_t unit, int group, int rank, int clus, int clusters) {
  constexpr int DS = D / CS;
#pragma unroll 1
  for (int e = threadIdx.x; e < group * DS / 4; e += 256) {  // four neighbours of D a thread
    const int h = e / (DS / 4), d = e % (DS / 4) * 4;
    float M = -INFINITY, L = 0;
    float4 s = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < CS; j++) M = fmaxf(M, ml[j * 16 + h]);
#pragma unroll
    for (int j = 0; j < CS; j++) {
      const float m = ml[j * 16 + h], w = m == -INFINITY ? 0.f : exp2f(m - M);
      const float4 v = *(const float4*)(part + (j * 8 + h) * DS + d);
      L += w * ml[j * 16 + 8 + h];
      if (m != -INFINITY) { s.x += w * v.x; s.y += w * v.y; s.z += w * v.z; s.w += w * v.w; }
    }
    if (clusters == 1) {
      const float r = a.v_scale / L;
      store4(out + h * D + rank * DS + d, make_float4(s.x * r, s.y * r, s.z * r, s.w * r));
    } else {
      __stcg((float4*)(a.ws + ((unit * a.clusters + clus) * 8 + h) * D + rank * DS + d), s);
      if (d == 0) __stcg((float2*)(a.ws_ml + (((unit * a.clusters + clus) * CS + rank) * 8 + h) * 2), make_float2(M, L));
    }
  }
}

// OWN: the row's query heads are normed and rotated here, every block for its unit, and its key and value by the blocks whose pages they belong to. Those
// read the two from beside the ring, since the page in the ring was copied before they were in it; the first unit of a kv head stores
// them. Only for passes with one row a sequence: no other row reads them.
template <int D, bool FP8, int ST, bool OWN> __device__ __forceinline__ void attn_body(const AttnArgs& a, const HeadsArgs& of) {
  constexpr int HALF = half_page<D, FP8>(), ROW = HALF / PAGE, TILES = D / 64, DW = D / 4, DQ = D / 2, SW = 40;
  extern __shared__ __align__(128) uint8_t sm[];
  uint8_t* ring = sm;
  float* sp = (float*)(sm + ST * 2 * HALF);
  float* part = sp + 2 * 2 * 2 * 8 * SW;
  float* ml = part + 8 * D;        // [8][16] from the peers, then [16] of the second group
  uint64_t* kfull = (uint64_t*)(ml + 9 * 16);
  uint64_t* vfull = kfull + ST;
  uint64_t* kempty = vfull + ST;
  uint64_t* vempty = kempty + ST;
  bf16* own_q = (bf16*)(vempty + ST);
  uint8_t* own_kv = (uint8_t*)(own_q + 8 * own_stride<D>());  // key, value
  static_assert(ST % 2 == 0 && attn_smem<D, FP8, ST>() % 64 == 0);
  const int tid = threadIdx.x, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int grp = tid >> 7, warp = tid >> 5 & 3;
  // A unit is a row and up to 8 query heads of one kv head. Divisions are rare here: one costs 40 cycles and more, which every launch would wait for.
  const int group = a.group, kvh = a.subs == 1 ? blockIdx.y : blockIdx.y / a.subs, sub = blockIdx.y - kvh * a.subs, head0 = (kvh * a.subs + sub) * group;
  const int active = blockIdx.z, row = a.at.map ? a.at.map[active] : active;
  const int position = a.at.positions[row], len = a.at.visible_to[row], table = a.at.table[row], lo = a.window ? max(0, position + 1 - a.window) : 0;
  const int first = lo / PAGE, pages = (len + PAGE - 1) / PAGE - first;
  cg::cluster_group cl = cg::this_cluster();
  const int cs = 1 << a.lcs, rank = cl.block_rank(), clus = blockIdx.x >> a.lcs;
  // Another cluster costs a round trip through global memory: worth it from 48 pages on, at two pages a block and more. All blocks decide alike.
  const int clusters = pages < 48 ? 1 : min(a.clusters, max(1, pages >> (a.lcs + 1)));
  if (clus >= clusters) { pdl_launch(); return; }
  auto part_from = [&](int block) { return first + (clusters == 1 ? pages * block >> a.lcs : pages * block / (clusters << a.lcs)); };
  const int p0 = part_from(blockIdx.x), n = part_from(blockIdx.x + 1) - p0;
  // The run's page with the row's own key, and the place in it. A row without a cell reads what is there.
  const int own_cell = OWN && of.kv_heads ? of.cell[row] : -1, own_token = position % PAGE;
  const int own_page = own_cell >= 0 ? position / PAGE - p0 : -1;

  const int* ids_at = a.at.pages + table;
  int ids = grp == 2 && lane < n ? ids_at[p0 + lane] : 0;  // the producer's, 32 at a time, so that no copy waits for one
  if (tid == 256) {
    for (int i = 0; i < ST; i++) { mbar_init(kfull + i, 1); mbar_init(vfull + i, 1); mbar_init(kempty + i, 128); mbar_init(vempty + i, 128); }
    fence_barrier_init();
    fence_proxy_async();
  }
  __syncthreads();
  cl.barrier_arrive();  // waited for before the first write into a peer
  pdl_launch();
  if (grp == 2) {  // the producer
    // No row of this pass writes an earlier page of the sequence; where the one row finishes its own key, nobody reads what this pass writes.
    const int fresh = OWN && of.kv_heads ? 0x7fffffff : max(0, position + 1 - a.rows) / PAGE;
    int parity = 1, slot = 0;
    bool waited = false;
    for (int i = 0; i < n; i++) {
      if (i && i % 32 == 0) ids = i + lane < n ? ids_at[p0 + i + lane] : 0;
      const int id = __shfl_sync(~0u, ids, i % 32);
      if (!waited && p0 + i >= fresh) { pdl_wait(); waited = true; }
      if (lane == 0) {
        const uint8_t* src = a.kv + ((size_t)id * a.kv_heads + kvh) * (2 * HALF);
        uint8_t* dst = ring + slot * 2 * HALF;
        mbar_wait(kempty + slot, parity);
        mbar_expect(kfull + slot, HALF);
        bulk_load(dst, src, HALF, kfull + slot);
        mbar_wait(vempty + slot, parity);
        mbar_expect(vfull + slot, HALF);
        bulk_load(dst + HALF, src + HALF, HALF, vfull + slot);
      }
      __syncwarp();
      if (++slot == ST) { slot = 0; parity ^= 1; }
    }
    cl.barrier_wait();
    cl.barrier_arrive();
    cl.barrier_wait();
    return;
  }
  if (OWN) {  // a warp a query head; the last two warps the key and the value
    constexpr int J = D / 256;
    const int w = tid >> 5;
    const bool query = w < group, other = w >= 6 && own_page >= 0 && own_page < n;
    const HeadKind kind = w == 6 ? KEY : VALUE;
    float4 q_gain[2][J] = {}, k_gain[2][J] = {}, rope[2][J] = {};
    if (query) head_places<D>(q_gain, of.q_gain, lane);
    if (other && kind == KEY) head_places<D>(k_gain, of.k_gain, lane);
    pdl_wait();
    Head<D> q, kv;
    if (query) q.load(of, active, head0 + w, lane);
    if (other) kv.load(of, active, of.heads + kvh + (kind == VALUE && !of.values_are_keys ? of.kv_heads : 0), lane);
    head_places<D>(rope, of.rope + (size_t)active * of.ld_rope, lane);
    if (query) {
      q.finish(of, QUERY, q_gain, rope);
#pragma unroll
      for (int j = 0; j < J; j++)
#pragma unroll
        for (int s = 0; s < 2; s++) *(uint2*)(own_q + w * own_stride<D>() + Head<D>::at(s, j, lane)) = q.rounded(s, j);
    }
    if (other) {
      kv.finish(of, kind, k_gain, rope);
      uint8_t* half = (uint8_t*)a.kv + (((size_t)(own_cell / PAGE) * a.kv_heads + kvh) * 2 + (kind == VALUE)) * HALF;
      const bool stores = sub == 0;
      auto put = [&](int i, auto value) {
        const size_t to = page_offset(own_cell % PAGE, D, i, FP8 ? 1 : 2);
        *(decltype(value)*)(own_kv + (kind == VALUE) * ROW + to % ROW) = value;
        if (stores) *(decltype(value)*)(half + to) = value;
      };
#pragma unroll
      for (int j = 0; j < J; j++)
#pragma unroll
        for (int s = 0; s < 2; s++) {
          const int i = Head<D>::at(s, j, lane);
          if (FP8) put(i, kv.rounded_fp8(s, j, kind == VALUE ? of.v_inverse : of.k_inverse));
          else put(i, kv.rounded(s, j));
        }
    }
    warps_sync();
  } else pdl_wait();

  // Q as B fragments: this warp's half of D for head g. bf16: 8 neighbours of each 32; FP8: 16 of each 64, in byte order 1 3 0 2.
  const int tile = warp & 1, dq = warp >> 1;
  uint32_t qf[DQ / 8];
  {
    const bool have = g < group;
    const bf16* q = OWN ? own_q + g * own_stride<D>() + dq * DQ : a.q + (size_t)active * a.ld_q + (head0 + (have ? g : 0)) * D + dq * DQ;
#pragma unroll
    for (int c = 0; c < DQ / 32; c++) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (have) v = *(const uint4*)(q + (FP8 ? (c / 2) * 64 + 16 * t + (c & 1) * 8 : c * 32 + 8 * t));
      if (FP8) {
        qf[4 * c] = mul_bf16x2(__byte_perm(v.x, v.y, 0x7632), POW2_100); qf[4 * c + 1] = mul_bf16x2(__byte_perm(v.x, v.y, 0x5410), POW2_100);
        qf[4 * c + 2] = mul_bf16x2(__byte_perm(v.z, v.w, 0x7632), POW2_100); qf[4 * c + 3] = mul_bf16x2(__byte_perm(v.z, v.w, 0x5410), POW2_100);
      } else { qf[4 * c] = v.x; qf[4 * c + 1] = v.y; qf[4 * c + 2] = v.z; qf[4 * c + 3] = v.w; }
    }
  }
  const float sc = a.scale * 1.4426950408889634f * (FP8 ? 1048576.f : 1.f);
  float o[TILES][4] = {}, m = -INFINITY, l = 0;

  for (int i = grp; i < n; i += 2) {
    const int slot = i % ST, parity = i / ST & 1;
    const uint8_t* K = ring + slot * 2 * HALF;
    const uint8_t* V = K + HALF;
    mbar_wait(kfull + slot, parity);
    float s4[2][4] = {};
    const int r0 = tile * 16 + g, x0 = swizzle(r0);  // row r0 + 8 has the same swizzle
    const bool own = OWN && i == own_page;
    auto key_row = [&](int r) { return own && r == own_token ? own_kv : K + r * ROW; };
    auto value_row = [&](int r) { return own && r == own_token ? own_kv + ROW : V + r * ROW; };
    const uint8_t *k0 = key_row(r0), *k8 = key_row(r0 + 8);
#pragma unroll
    for (int c = 0; c < DQ / (FP8 ? 64 : 32); c++) {
      const int chunk = dq * (ROW / 32) + 4 * c + t;
      uint4 u = *(const uint4*)(k0 + ((chunk ^ x0) << 4)), v = *(const uint4*)(k8 + ((chunk ^ x0) << 4));
      if (FP8) {
        const uint32_t *pu = &u.x, *pv = &v.x;
#pragma unroll
        for (int j = 0; j < 4; j++)
          mma(s4[j & 1], e4m3_hi_to_bf16x2(pu[j]), e4m3_hi_to_bf16x2(pv[j]), e4m3_hi_to_bf16x2(pu[j] << 8), e4m3_hi_to_bf16x2(pv[j] << 8), qf[8 * c + 2 * j], qf[8 * c + 2 * j + 1]);
      } else {
        mma(s4[0], u.x, v.x, u.y, v.y, qf[4 * c], qf[4 * c + 1]);
        mma(s4[1], u.z, v.z, u.w, v.w, qf[4 * c + 2], qf[4 * c + 3]);
      }
    }
    float* S = sp + (grp * 2 + (i >> 1 & 1)) * 2 * 8 * SW;
    {
      float* w = S + (dq * 8 + 2 * t) * SW + r0;
      w[0] = s4[0][0] + s4[1][0]; w[SW] = s4[0][1] + s4[1][1]; w[8] = s4[0][2] + s4[1][2]; w[SW + 8] = s4[0][3] + s4[1][3];
    }
    __syncwarp();
    mbar_arrive(kempty + slot);
    group_sync(grp);

    // Head g, tokens 16 ks + 2t, +1, +8, +9: the order of the B fragment.
    float p[8], mx = m;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int tok = (j >> 1) * 16 + (j & 1) * 8 + 2 * t;
      float2 v = *(const float2*)(S + g * SW + tok), u = *(const float2*)(S + (8 + g) * SW + tok);
      p[2 * j] = (v.x + u.x) * sc; p[2 * j + 1] = (v.y + u.y) * sc;
    }
    const int pos0 = (p0 + i) * PAGE;
    if (pos0 < lo || pos0 + PAGE > len) {  // the window's first page and the last
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int pos = pos0 + (j >> 2) * 16 + (j >> 1 & 1) * 8 + 2 * t + (j & 1);
        if (pos < lo || pos >= len) p[j] = -INFINITY;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) mx = fmaxf(mx, p[j]);
    mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 1));
    mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 2));
    const float alpha = exp2f(m - mx);  // a page in range has a visible key, so mx is finite
    m = mx;
    l *= alpha;
    uint32_t pf[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float e0 = exp2f(p[2 * j] - m), e1 = exp2f(p[2 * j + 1] - m);
      l += e0 + e1;
      pf[j] = pack_bf16x2(e0, e1);
      if (FP8) pf[j] = mul_bf16x2(pf[j], POW2_100);
    }
    if (__any_sync(~0u, alpha != 1.f)) {
      const float al0 = __shfl_sync(~0u, alpha, 8 * t), al1 = __shfl_sync(~0u, alpha, 8 * t + 4);
#pragma unroll
      for (int k = 0; k < TILES; k++) { o[k][0] *= al0; o[k][1] *= al1; o[k][2] *= al0; o[k][3] *= al1; }
    }

    mbar_wait(vfull + slot, parity);
    const int mi = lane >> 3, r = lane & 7;
#pragma unroll
    for (int ks = 0; ks < 2; ks++) {
      const int tok = 16 * ks + r + (FP8 ? mi & 1 : mi >> 1) * 8;
      const uint8_t* from = value_row(tok);
      if (FP8) {
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) {
          const int chunk = (warp * DW + 32 * k) / 16 + (mi >> 1);
          uint32_t v[4];
          ldmatrix_x4_trans(v, smem_addr(from + ((chunk ^ swizzle(tok)) << 4)));
          mma(o[2 * k], e4m3_hi_to_bf16x2(v[0] << 8), e4m3_hi_to_bf16x2(v[0]), e4m3_hi_to_bf16x2(v[1] << 8), e4m3_hi_to_bf16x2(v[1]), pf[2 * ks], pf[2 * ks + 1]);
          mma(o[2 * k + 1], e4m3_hi_to_bf16x2(v[2] << 8), e4m3_hi_to_bf16x2(v[2]), e4m3_hi_to_bf16x2(v[3] << 8), e4m3_hi_to_bf16x2(v[3]), pf[2 * ks], pf[2 * ks + 1]);
        }
      } else {
#pragma unroll
        for (int k = 0; k < TILES; k++) {
          const int chunk = (warp * DW + 16 * k) / 8 + (mi & 1);
          uint32_t v[4];
          ldmatrix_x4_trans(v, smem_addr(from + ((chunk ^ swizzle(tok)) << 4)));
          mma(o[k], v[0], v[1], v[2], v[3], pf[2 * ks], pf[2 * ks + 1]);
        }
      }
    }
    __syncwarp();
    mbar_arrive(vempty + slot);
  }

  // The second group leaves its part in the ring, the first adds it to its own and pushes the sum to the peers: each takes a slice of D.
  l += __shfl_xor_sync(~0u, l, 1);
  l += __shfl_xor_sync(~0u, l, 2);
  const int DS = D / cs, lds = 31 - __clz(DS);
  warps_sync();
  float4* mine = (float4*)ring + warp * TILES * 32 + lane;
  if (grp == 1) {
#pragma unroll
    for (int k = 0; k < TILES; k++) mine[k * 32] = *(float4*)o[k];
    if (warp == 0 && t == 0) { ml[128 + g] = m; ml[136 + g] = l; }
  }
  warps_sync();
  cl.barrier_wait();
  if (grp == 0) {
    const float m1 = ml[128 + g], M = fmaxf(m, m1), w0 = m == -INFINITY ? 0.f : exp2f(m - M), w1 = m1 == -INFINITY ? 0.f : exp2f(m1 - M);
    l = l * w0 + ml[136 + g] * w1;
    m = M;
    const float a0 = __shfl_sync(~0u, w0, 8 * t), a1 = __shfl_sync(~0u, w0, 8 * t + 4), b0 = __shfl_sync(~0u, w1, 8 * t), b1 = __shfl_sync(~0u, w1, 8 * t + 4);
#pragma unroll
    for (int k = 0; k < TILES; k++) {
      const float4 u = mine[k * 32];
      o[k][0] = o[k][0] * a0 + u.x * b0; o[k][1] = o[k][1] * a1 + u.y * b1; o[k][2] = o[k][2] * a0 + u.z * b0; o[k][3] = o[k][3] * a1 + u.w * b1;
      const int d = warp * DW + 16 * k, owner = d >> lds;
      float* to = cl.map_shared_rank(part, owner) + rank * 8 * DS + d - owner * DS;
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const int h = 2 * t + q;
        if (h >= group) continue;
        if (FP8) *(float2*)(to + h * DS + 2 * g) = make_float2(o[k][q] * 1048576.f, o[k][q + 2] * 1048576.f);
        else { to[h * DS + g] = o[k][q]; to[h * DS + g + 8] = o[k][q + 2]; }
      }
    }
    for (int j = warp; j < cs; j += 4)
      if (t == 0) { float* pm = cl.map_shared_rank(ml, j) + rank * 16; pm[g] = m; pm[8 + g] = l; }
  }
  cl.barrier_arrive();
  cl.barrier_wait();
  const size_t unit = (size_t)active * gridDim.y + blockIdx.y;
  bf16* out = a.out + (size_t)active * a.ld_out + head0 * D;
  if (cs == 1) combine<D, 1>(a, out, part, ml, unit, group, rank, clus, clusters);
  else if (cs == 2) combine<D, 2>(a, out, part, ml, unit, group, rank, clus, clusters);
  else if (cs == 4) combine<D, 4>(a, out, part, ml, unit, group, rank, clus, clusters);
  else combine<D, 8>(a, out, part, ml, unit, group, rank, clus, clusters);
  if (clusters > 1) {
    bool last = false;
    __threadfence();
    warps_sync();
    if (tid == 0) {
      unsigned* c = a.counters + unit * cs + rank;
      last = atomicAdd(c, 1) + 1 == (unsigned)clusters;
      if (last) *c = 0;
      __threadfence();
    }
    last = warps_or(last);
    if (last)
      for (int e = tid; e < group * DS / 4; e += 256) {
        const int h = e / (DS / 4), d = rank * DS + e % (DS / 4) * 4;
        float M = -INFINITY, L = 0;
        float4 s = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (int j = 0; j < clusters; j++) M = fmaxf(M, __ldcg((const float2*)(a.ws_ml + (((unit * a.clusters + j) * cs + rank) * 8 + h) * 2)).x);
#pragma unroll 8
        for (int j = 0; j < clusters; j++) {
          float2 v = __ldcg((const float2*)(a.ws_ml + (((unit * a.clusters + j) * cs + rank) * 8 + h) * 2));
          float4 u = __ldcg((const float4*)(a.ws + ((unit * a.clusters + j) * 8 + h) * D + d));
          const float w = v.x == -INFINITY ? 0.f : exp2f(v.x - M);
          L += w * v.y; s.x += w * u.x; s.y += w * u.y; s.z += w * u.z; s.w += w * u.w;
        }
        const float r = a.v_scale / L;
        store4(out + h * D + d, make_float4(s.x * r, s.y * r, s.z * r, s.w * r));
      }
  }
}

#define ATTN(NAME, D, FP8, ST)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(288) attn_decode_##NAME(const __grid_constant__ AttnArgs a) {                         \
    attn_body<D, FP8, ST, false>(a, HeadsArgs{});                                                                                    \
  }                                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(288) attn_own_##NAME(const __grid_constant__ OwnHeadsArgs a) {                        \
    attn_body<D, FP8, ST, true>(a.attn, a.heads);                                                                                    \
  }
ATTN(256_bf16, 256, false, 4)
ATTN(512_bf16, 512, false, 2)
ATTN(256_fp8, 256, true, 4)
ATTN(512_fp8, 512, true, 4)
