// The verbs that work on each row alone. A block is one row (or part of one); sums run in a fixed order.
#include "common/decode.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

struct EmbedArgs {
  Rows out;
  Matrix table;
  const int* tokens;
  float scale;
};

// out[r] = table[token[r]] * scale. Grid: (rows, width / 16 / threads).
extern "C" __global__ void embed(const __grid_constant__ EmbedArgs a) {
  const int r = blockIdx.x, k = (blockIdx.y * blockDim.x + threadIdx.x) * 16;
  if (k >= a.table.cols) return;
  const int token = a.tokens[r];
  const Part& part = part_of(a.table, token);
  float w[16];
  decode16(part, token - part.first_row, k, a.table.cols, w);
  for (int i = 0; i < 16 && k + i < a.table.cols; i++) store(a.out, r, k + i, __fmul_rn(w[i], a.scale));
}

struct PackedArgs {
  Rows out;
  const uint8_t* strips;
  const float* row_scales;  // FP8: one a row, or null
  const int* tokens;
  int chunks;               // of a strip
  int fp8;                  // else bf16
  float scale;
  int pad;
};

// As `embed`, from the strips of 16 rows that products read (common/forms.cuh): a value's place in its chunk of 64 inputs.
// Grid: rows. Reads every 16th part of a strip, 2 or 4 bytes at a time; a row is a few kilobytes.
extern "C" __global__ void embed_packed(const __grid_constant__ PackedArgs a) {
  const int r = blockIdx.x, token = a.tokens[r], row = token & 15;
  const uint8_t* strip = a.strips + (size_t)(token >> 4) * a.chunks * (a.fp8 ? 1024 : 2048);
  const float row_scale = a.row_scales ? a.row_scales[token] : 1.0f;
  for (int i = threadIdx.x; i < a.out.width; i += blockDim.x) {
    const int k = i & 63, j = 2 * (k >> 5) + (k >> 2 & 1), lane = 4 * (row & 7) + (k >> 3 & 3);
    float v;
    if (a.fp8) {
      v = __fmul_rn(e4m3(strip[(i >> 6) * 1024 + (row >> 3) * 512 + lane * 16 + j * 4 + (0x2031 >> 4 * (k & 3) & 3)]), row_scale);
    } else {
      v = bf16_at(strip + (i >> 6) * 2048 + j * 512 + lane * 16 + 8 * (k >> 1 & 1) + 4 * (row >> 3) + 2 * (k & 1));
    }
    store(a.out, r, i, __fmul_rn(v, a.scale));
  }
}

struct SoftArgs {
  Rows out;
  const int* soft;
  const float* values;
};

// out[r] = values[soft[r]] where there is one.
extern "C" __global__ void inject_soft(const __grid_constant__ SoftArgs a) {
  const int r = blockIdx.x, which = a.soft[r];
  if (which < 0) return;
  for (int i = threadIdx.x; i < a.out.width; i += blockDim.x)
    store(a.out, r, i, a.values[(size_t)which * a.out.width + i]);
}

struct RopeArgs {
  Rows out;
  const float* inv_freq;
  const int* positions;
};

// out[r] = [cos(p f_0) .., sin(p f_0) ..]; the product is float32 by contract.
extern "C" __global__ void rope_table(const __grid_constant__ RopeArgs a) {
  const int r = blockIdx.x, half = a.out.width / 2;
  const float p = (float)a.positions[r];
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    float sine, cosine;
    sincosf(__fmul_rn(p, a.inv_freq[i]), &sine, &cosine);
    store(a.out, r, i, cosine);
    store(a.out, r, half + i, sine);
  }
}

struct NormArgs {
  Rows out;
  Rows x;
  const float* gain;
  float eps;
  int add;  // 1: out += norm, 0: out = norm
};

// out = x (mean(x^2) + eps)^(-1/2) gain. `out` may be `x`.
extern "C" __global__ void rms_norm(const __grid_constant__ NormArgs a) {
  const int r = blockIdx.x, width = a.x.width;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const float v = load(a.x, r, i);
    sum = fmaf(v, v, sum);
  }
  const float factor = 1.0f / sqrtf(block_sum(sum) / (float)width + a.eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const float v = __fmul_rn(__fmul_rn(load(a.x, r, i), factor), a.gain[i]);
    store(a.out, r, i, a.add ? __fadd_rn(load(a.out, r, i), v) : v);
  }
}

struct MapArgs {
  Rows out;
  Rows x;
  Rows y;
  int f;
  int from;  // first column of y
  float by;
};

// out = x.
extern "C" __global__ void cast(const __grid_constant__ MapArgs a) {
  for (int i = threadIdx.x; i < a.out.width; i += blockDim.x) store(a.out, blockIdx.x, i, load(a.x, blockIdx.x, i));
}

// out += x.
extern "C" __global__ void add(const __grid_constant__ MapArgs a) {
  const int r = blockIdx.x;
  for (int i = threadIdx.x; i < a.out.width; i += blockDim.x) store(a.out, r, i, load(a.out, r, i) + load(a.x, r, i));
}

// out *= by.
extern "C" __global__ void scale(const __grid_constant__ MapArgs a) {
  const int r = blockIdx.x;
  for (int i = threadIdx.x; i < a.out.width; i += blockDim.x) store(a.out, r, i, load(a.out, r, i) * a.by);
}

// out = f(x) * y[:, from ..]: GeGLU with x and y the halves of one buffer, and the per-layer gate.
extern "C" __global__ void gate(const __grid_constant__ MapArgs a) {
  const int r = blockIdx.x;
  for (int i = threadIdx.x; i < a.out.width; i += blockDim.x)
    store(a.out, r, i, activate(a.f, load(a.x, r, i)) * load(a.y, r, a.from + i));
}

struct PerLayerArgs {
  Rows out;
  Rows context;
  Matrix table;
  const int* tokens;
  const float* gain;
  int width;
  float eps;
  float context_scale;
  float token_scale;
  float mix_scale;
};

// out[r, l] = (norm(context[r, l] * context_scale) + table[token, l] * token_scale) * mix_scale. Grid: (rows, layers);
// `out` may be `context`: a block reads its part before it writes it.
extern "C" __global__ void per_layer_inputs(const __grid_constant__ PerLayerArgs a) {
  extern __shared__ float token_part[];
  const int r = blockIdx.x, first = blockIdx.y * a.width, token = a.tokens[r];
  const Part& part = part_of(a.table, token);
  // Runs of sixteen are aligned in the row, a layer's part need not be.
  for (int k = first / 16 * 16 + threadIdx.x * 16; k < first + a.width; k += blockDim.x * 16) {
    float w[16];
    decode16(part, token - part.first_row, k, a.table.cols, w);
    for (int i = 0; i < 16; i++)
      if (k + i >= first && k + i < first + a.width) token_part[k + i - first] = w[i];
  }
  float sum = 0.0f;
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    const float v = __fmul_rn(load(a.context, r, first + i), a.context_scale);
    sum = fmaf(v, v, sum);
  }
  // The sum's barriers also make token_part visible.
  const float factor = 1.0f / sqrtf(block_sum(sum) / (float)a.width + a.eps);
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    const float v = load(a.context, r, first + i) * a.context_scale * factor * a.gain[i];
    store(a.out, r, first + i, (v + token_part[i] * a.token_scale) * a.mix_scale);
  }
}

struct KeepArgs {
  Rows x;
  const int* heads;
  int count;
};

// x[i] = x[heads[i]]. A thread owns a column and moves its rows in ascending order, so that nothing is overwritten
// before it has moved.
extern "C" __global__ void keep_rows(const __grid_constant__ KeepArgs a) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col >= a.x.width) return;
  for (int i = 0; i < a.count; i++) store(a.x, i, col, load(a.x, a.heads[i], col));
}

struct ArgmaxArgs {
  Rows logits;
  float* best;    // [rows, parts]
  int* best_id;   // [rows, parts], -1 for a part with a value that is not finite
  int* out;       // [rows]
  int parts;
};

// The better of two candidates: the larger value, of equals the lower id. An id of -1 (not finite) wins over all.
DEVICE void better(float& v, int& id, float v2, int id2) {
  if (id < 0 || id2 < 0) id = -1;
  else if (v2 > v || (v2 == v && id2 < id)) v = v2, id = id2;
}

DEVICE void block_best(float& v, int& id) {
  __shared__ float vs[32];
  __shared__ int ids[32];
  for (int o = 16; o; o >>= 1) {
    const float v2 = __shfl_xor_sync(~0u, v, o);
    const int id2 = __shfl_xor_sync(~0u, id, o);
    better(v, id, v2, id2);
  }
  if ((threadIdx.x & 31) == 0) vs[threadIdx.x >> 5] = v, ids[threadIdx.x >> 5] = id;
  __syncthreads();
  v = vs[0], id = ids[0];
  for (int w = 1; w < blockDim.x / 32; w++) better(v, id, vs[w], ids[w]);
}

constexpr int NO_ID = 0x7fffffff;

// The best of one part of a row. Grid: (parts, rows).
extern "C" __global__ void argmax_parts(const __grid_constant__ ArgmaxArgs a) {
  const int r = blockIdx.y, width = a.logits.width;
  const int from = (long long)width * blockIdx.x / a.parts, to = (long long)width * (blockIdx.x + 1) / a.parts;
  float v = __int_as_float(0xff800000);
  int id = NO_ID;
  for (int i = from + threadIdx.x; i < to; i += blockDim.x) {
    const float x = load(a.logits, r, i);
    better(v, id, x, isfinite(x) ? i : -1);
  }
  block_best(v, id);
  if (threadIdx.x == 0) a.best[r * a.parts + blockIdx.x] = v, a.best_id[r * a.parts + blockIdx.x] = id;
}

// The best of a row's parts. Grid: rows, 32 threads.
extern "C" __global__ void argmax_rows(const __grid_constant__ ArgmaxArgs a) {
  const int r = blockIdx.x;
  float v = __int_as_float(0xff800000);
  int id = NO_ID;
  for (int i = threadIdx.x; i < a.parts; i += 32) better(v, id, a.best[r * a.parts + i], a.best_id[r * a.parts + i]);
  block_best(v, id);
  if (threadIdx.x == 0) a.out[r] = id == NO_ID ? -1 : id;
}
