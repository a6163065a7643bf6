// Products with weights of any format, float32 throughout: the float32 mode's `linear`, `logits` and experts.
//
//   out[r, o] = cap(sum_k x[r, k] * w[o, k])
//
// A block makes 64 outputs of 16 or 64 rows. It walks the inputs in chunks of 64: each thread decodes sixteen weights
// into shared memory, then the block multiplies. Each chunk is summed alone, in order, and the chunks' sums are added
// in order, so a value's bits depend on its row and the matrix only, not on the tile's height or its neighbours.
// Every tile of rows decodes the weights again; speed is not this kernel's point.
#include "common/decode.cuh"
#include "common/math.cuh"

constexpr int OUTS = 64, CHUNK = 64, THREADS = 256;

template <int ROWS> struct Tile {
  float w[CHUNK][OUTS + 4];
  float x[CHUNK][ROWS + 4];
};

// Sums of outputs first_out + 4 (t % 16) .. + 4 and rows t / 16 + 16 i of the tile. `row_of(i)` is the row of x for
// tile row i, or -1.
template <int ROWS, class RowOf>
DEVICE void multiply(Tile<ROWS>& tile, const Matrix& m, int first_out, const Rows& x, RowOf row_of, float (&sum)[ROWS / 16][4]) {
  const int t = threadIdx.x;
#pragma unroll
  for (int i = 0; i < ROWS / 16; i++)
    for (int j = 0; j < 4; j++) sum[i][j] = 0.0f;
  const int out = first_out + t / 4;
  const Part* part = out < m.rows ? &part_of(m, out) : nullptr;
  for (int k0 = 0; k0 < m.cols; k0 += CHUNK) {
    float w[16] = {};
    const int at = t % 4 * 16;
    if (part && k0 + at < m.cols) decode16(*part, out - part->first_row, k0 + at, m.cols, w);
#pragma unroll
    for (int i = 0; i < 16; i++) tile.w[at + i][t / 4] = w[i];
    for (int i = t; i < ROWS * CHUNK; i += THREADS) {
      const int r = i / CHUNK, k = i % CHUNK, row = row_of(r);
      tile.x[k][r] = row >= 0 && k0 + k < m.cols ? load(x, row, k0 + k) : 0.0f;
    }
    __syncthreads();
    float part_sum[ROWS / 16][4] = {};
#pragma unroll 8
    for (int k = 0; k < CHUNK; k++) {
      const float4 v = *(const float4*)&tile.w[k][t % 16 * 4];
#pragma unroll
      for (int i = 0; i < ROWS / 16; i++) {
        const float xv = tile.x[k][t / 16 + 16 * i];
        part_sum[i][0] = fmaf(v.x, xv, part_sum[i][0]);
        part_sum[i][1] = fmaf(v.y, xv, part_sum[i][1]);
        part_sum[i][2] = fmaf(v.z, xv, part_sum[i][2]);
        part_sum[i][3] = fmaf(v.w, xv, part_sum[i][3]);
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
      for (int j = 0; j < 4; j++) sum[i][j] += part_sum[i][j];
    __syncthreads();
  }
}

struct LinearArgs {
  Rows out;
  Rows x;
  Matrix w;
  int rows;
  float softcap;  // 0: none
};

// Grid: (outputs / 64, rows / ROWS).
template <int ROWS> DEVICE void linear(const LinearArgs& a) {
  __shared__ Tile<ROWS> tile;
  const int first_out = blockIdx.x * OUTS, first_row = blockIdx.y * ROWS, t = threadIdx.x;
  float sum[ROWS / 16][4];
  multiply<ROWS>(tile, a.w, first_out, a.x, [&](int r) { return first_row + r < a.rows ? first_row + r : -1; }, sum);
#pragma unroll
  for (int i = 0; i < ROWS / 16; i++) {
    const int row = first_row + t / 16 + 16 * i;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int out = first_out + t % 16 * 4 + j;
      if (row < a.rows && out < a.w.rows) store(a.out, row, out, soft_cap(sum[i][j], a.softcap));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) linear_16(const __grid_constant__ LinearArgs a) { linear<16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) linear_64(const __grid_constant__ LinearArgs a) { linear<64>(a); }

struct ExpertArgs {
  Rows out;           // one row for each pair of row and choice
  Rows x;             // gate and up: one row for each row; down: one for each pair
  Matrix w;           // all experts
  const int* order;   // pairs, sorted by expert
  const int* starts;  // by expert: first entry of `order`; one more at the end
  int outs;           // outputs of one expert
  int per_row;        // pairs of one row of x: top_k for gate and up, 1 for down
};

// Grid: (outputs of one expert / 64, experts). The expert's pairs are taken sixteen at a time.
extern "C" __global__ void __launch_bounds__(THREADS) experts_16(const __grid_constant__ ExpertArgs a) {
  __shared__ Tile<16> tile;
  const int e = blockIdx.y, first_out = blockIdx.x * OUTS, t = threadIdx.x;
  const int end = a.starts[e + 1];
  Matrix own = a.w;
  own.rows = min(a.w.rows, (e + 1) * a.outs);
  for (int first = a.starts[e]; first < end; first += 16) {
    float sum[1][4];
    const auto row_of = [&](int r) { return first + r < end ? a.order[first + r] / a.per_row : -1; };
    multiply<16>(tile, own, e * a.outs + first_out, a.x, row_of, sum);
    const int at = first + t / 16;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int out = first_out + t % 16 * 4 + j;
      if (at < end && out < a.outs) store(a.out, a.order[at], out, sum[0][j]);
    }
  }
}
