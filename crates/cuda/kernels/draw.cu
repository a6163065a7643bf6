// Tokens that are drawn from a row of logits, as the host's sampler draws them: suppress, temperature, top-k, top-p, min-p, then the
// number of a counter-based generator. Every rounding of the host's sampler is repeated (float64 sums, its own power of two), and no product is
// fused with a sum, so both choose the same token.
//
// Each block finds the best top-k of its part; the last block of a row to finish finds the best of those. A logit and its id make one number, the
// greater the better the token, and the k-th greatest is found two bits at a time from the top: each step counts the numbers that are not below three
// bounds. No two are equal, so the search ends with k exactly; most end early. Traffic: the logits once.
#include <cstdint>

constexpr int THREADS = 256, WARPS = THREADS / 32, PART = 4096, MOST_PARTS = 128, MOST_KEPT = 64;
constexpr int PARAMETERS = 17, MOST_SUPPRESSED = 8;

// Mirrored by DrawArgs in src/kernels/draw.rs.
struct DrawArgs {
  const float* logits;     // [rows][ld]
  const int* draws;        // [rows][PARAMETERS]: src/kernels/draw.rs says in which order
  int* out;                // by row: the token of the largest logit, or -1; then the drawn one
  uint64_t* candidates;    // [rows][parts][MOST_KEPT]
  unsigned* counters;      // [rows], zero between launches
  int* told;               // pinned host memory, [turn][told_rows]: the same for the host; or null
  const int* turn;
  int ld, vocab, told_rows, pad;
};

// Greater for a better token; 0 for none. The two zeros are equal, and of equal logits the lower id is better.
__device__ __forceinline__ uint64_t rank_of(float logit, int id) {
  if (logit == -INFINITY) return 0;
  const uint32_t bits = __float_as_uint(logit == 0.f ? 0.f : logit);
  return (uint64_t)(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << 32 | (uint32_t)~id;
}
__device__ __forceinline__ int id_of(uint64_t rank) { return (int)~(uint32_t)rank; }
__device__ __forceinline__ float logit_of(uint64_t rank) {
  const uint32_t bits = rank >> 32;
  return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

// The least of the k greatest numbers of the block, or 1 if there are no more than k beside zeros.
template <int N> __device__ uint64_t bound_of(const uint64_t (&rank)[N], int k, uint64_t (&sums)[2][WARPS]) {
  int turn = 0;
  // How many are not below each bound, 21 bits apart.
  auto count = [&](auto reaches) {
    uint32_t low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      low += (uint32_t)reaches(rank[i], 1) + ((uint32_t)reaches(rank[i], 2) << 16);
      high += reaches(rank[i], 3);
    }
    low = __reduce_add_sync(~0u, low);
    high = __reduce_add_sync(~0u, high);
    if ((threadIdx.x & 31) == 0) sums[turn][threadIdx.x >> 5] = (uint64_t)(low & 0xffff) | (uint64_t)(low >> 16) << 21 | (uint64_t)high << 42;
    __syncthreads();
    uint64_t all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += sums[turn][w];
    turn ^= 1;  // written again only after another meeting
    return all;
  };
  if ((int)(count([](uint64_t rank, int) { return rank != 0; }) & 0x1fffff) <= k) return 1;
  uint64_t bound = 0;
  auto two_bits = [&](uint64_t counts, int bit) {  // whether the bound is known
#pragma unroll
    for (int step = 3; step >= 1; step--) {
      const int n = (int)(counts >> 21 * (step - 1) & 0x1fffff);
      if (n < k) continue;
      bound |= (uint64_t)step << bit;
      return n == k;
    }
    return false;
  };
  for (int bit = 62; bit >= 32; bit -= 2) {  // logits first, which are mostly enough
    const uint32_t high = bound >> 32, one = 1u << (bit - 32);
    if (two_bits(count([&](uint64_t rank, int step) { return (uint32_t)(rank >> 32) >= (high | one * step); }), bit)) return bound;
  }
  for (int bit = 30; bit >= 0; bit -= 2)
    if (two_bits(count([&](uint64_t rank, int step) { return rank >= (bound | (uint64_t)step << bit); }), bit)) return bound;
  return bound;
}

// The greatest k numbers of the block, in no order, then zeros.
template <int N> __device__ void keep_best(const uint64_t (&rank)[N], int k, uint64_t* kept, int& n, uint64_t (&sums)[2][WARPS]) {
  if (threadIdx.x < MOST_KEPT) kept[threadIdx.x] = 0;
  if (threadIdx.x == 0) n = 0;
  const uint64_t bound = bound_of(rank, k, sums);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (rank[i] >= bound) kept[atomicAdd(&n, 1)] = rank[i];
  __syncthreads();
}

// 2^((logit - max) * log2_scale) as the host's sampler has it.
__device__ __forceinline__ float weight_of(float logit, float max, double log2_scale) {
  constexpr double ROUND = 6755399441055744.0;
  constexpr float TAYLOR[8] = {1.f, 0.693147180559945309417232121458f, 0.2402265f, 0.05550411f, 0.009618129f, 0.0013333558f, 0.000154035300f, 0.000015252734f};
  double y = __dmul_rn(__dsub_rn((double)logit, (double)max), log2_scale);
  if (!(y > -150.0)) y = -150.0;
  const double shifted = __dadd_rn(y, ROUND);
  const float fraction = (float)__dsub_rn(y, __dsub_rn(shifted, ROUND));
  const int whole = (int)(uint32_t)__double_as_longlong(shifted), biased = whole + 127 > 0 ? whole + 127 : 0;
  float sum = 0.f;
#pragma unroll
  for (int i = 7; i >= 0; i--) sum = __fadd_rn(__fmul_rn(sum, fraction), TAYLOR[i]);
  return __fmul_rn(sum, __uint_as_float((uint32_t)biased << 23));
}

// Philox 4x32 with ten rounds; 53 bits of its first two words.
__device__ __forceinline__ double uniform(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0}, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int i = 0; i < 10; i++) {
    const uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    const uint32_t n0 = (uint32_t)(b >> 32) ^ c[1] ^ k0, n2 = (uint32_t)(a >> 32) ^ c[3] ^ k1;
    c[1] = (uint32_t)b;
    c[3] = (uint32_t)a;
    c[0] = n0;
    c[2] = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (double)(((uint64_t)c[0] << 32 | c[1]) >> 11) * 0x1p-53;
}

// Grid (parts of PART logits, rows).
extern "C" __global__ void __launch_bounds__(THREADS) draw(const __grid_constant__ DrawArgs a) {
  __shared__ uint64_t kept[MOST_KEPT];
  __shared__ float by_id[MOST_KEPT], by_rank[MOST_KEPT];
  __shared__ int ids[MOST_KEPT], rank_by_id[MOST_KEPT];
  __shared__ uint64_t sums[2][WARPS];
  __shared__ int n;
  __shared__ float max;
  __shared__ bool last;
  const int r = blockIdx.y, tid = threadIdx.x, parts = gridDim.x;
  const int* p = a.draws + r * PARAMETERS;
  auto wide = [&](int i) { return (uint64_t)(uint32_t)p[i + 1] << 32 | (uint32_t)p[i]; };
  const int k = p[6];
  if (k == 0 || a.out[r] < 0) return;  // takes the token of the largest logit, or has none
  {
    const int first = blockIdx.x * PART + tid;
    uint64_t rank[PART / THREADS];
#pragma unroll
    for (int i = 0; i < PART / THREADS; i++) {
      const int id = first + i * THREADS;
      rank[i] = id < a.vocab ? rank_of(a.logits[(size_t)r * a.ld + id], id) : 0;
    }
    for (int s = 0; s < MOST_SUPPRESSED; s++) {
      const int never = p[9 + s];
#pragma unroll
      for (int i = 0; i < PART / THREADS; i++)
        if (first + i * THREADS == never) rank[i] = 0;
    }
    keep_best(rank, k, kept, n, sums);
  }
  uint64_t* own = a.candidates + (size_t)r * parts * MOST_KEPT;
  if (tid < MOST_KEPT) own[blockIdx.x * MOST_KEPT + tid] = kept[tid];
  __threadfence();
  __syncthreads();
  if (tid == 0) {
    last = atomicAdd(a.counters + r, 1) + 1 == (unsigned)parts;
    if (last) a.counters[r] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  {
    uint64_t rank[MOST_PARTS * MOST_KEPT / THREADS];
#pragma unroll
    for (int i = 0; i < MOST_PARTS * MOST_KEPT / THREADS; i++) {
      const int at = tid + i * THREADS;
      rank[i] = at < parts * MOST_KEPT ? __ldcg((const unsigned long long*)own + at) : 0;
    }
    keep_best(rank, k, kept, n, sums);
  }
  // Places in both orders, and the weights.
  const int count = n;
  int better = 0, lower = 0;
  if (tid < count) {
    for (int i = 0; i < count; i++) {
      better += kept[i] > kept[tid];
      lower += id_of(kept[i]) < id_of(kept[tid]);
    }
    if (better == 0) max = logit_of(kept[tid]);
  }
  __syncthreads();
  if (tid < count) {
    const double log2_scale = __dmul_rn(__longlong_as_double(wide(0)), 1.44269504088896340735992468100189214);
    const float w = weight_of(logit_of(kept[tid]), max, log2_scale);
    by_id[lower] = by_rank[better] = w;
    ids[lower] = id_of(kept[tid]);
    rank_by_id[lower] = better;
  }
  __syncthreads();
  if (tid) return;
  int token = -1;
  if (count > 0) {
    const float top_p = __int_as_float(p[7]), min_p = __int_as_float(p[8]);
    int worst = count - 1;
    if (top_p < 1.f) {
      double total = 0, sum = 0;
#pragma unroll 8
      for (int i = 0; i < count; i++) total = __dadd_rn(total, (double)by_id[i]);
      const double mass = __dmul_rn((double)top_p, total);
      for (int i = 0; i < count; i++) {
        sum = __dadd_rn(sum, (double)by_rank[i]);
        if (sum >= mass) { worst = i; break; }
      }
    }
    auto survives = [&](int i) { return rank_by_id[i] <= worst && !(by_id[i] < min_p); };
    double total = 0;
    for (int i = 0; i < count; i++)
      if (survives(i)) total = __dadd_rn(total, (double)by_id[i]);
    double left = __dmul_rn(uniform(wide(2), wide(4)), total);
    for (int i = 0; i < count; i++) {
      if (!survives(i) || !(by_id[i] > 0.f)) continue;
      token = ids[i];
      left = __dsub_rn(left, (double)by_id[i]);
      if (left < 0) break;
    }
  }
  a.out[r] = token;
  if (a.told) a.told[*a.turn * a.told_rows + r] = token;
}
