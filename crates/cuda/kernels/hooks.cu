// Looking into a pass and bending it: copies of activations for the host, and edits of the residual along directions.
// A block is one row, and sums run in an order fixed by the width, so a row's bits depend on nothing but the row.
#include "common/reduce.cuh"

// An activation as it lies: planes to be added, [plane][rows][stride]; bf16 has one plane.
struct Source {
  const void* p;
  const float* gain;     // of the norm, where two are added
  uint64_t plane_stride;
  int planes;            // 0: absent
  int stride;
  int bf16;
  int pad;
};

struct TapArgs {
  Source y;
  Source z;
  float* out;  // [rows][width], pinned host memory
  int width;
  float eps;
};

// Planes are added in the order in which `residual` of producers_sm90.cu adds them.
DEVICE float value(const Source& s, int row, int i) {
  const size_t at = (size_t)row * s.stride + i;
  if (s.bf16) return __bfloat162float(((const __nv_bfloat16*)s.p)[at]);
  float v = ((const float*)s.p)[at];
  for (int p = 1; p < s.planes; p++) v = __fadd_rn(v, ((const float*)s.p)[p * s.plane_stride + at]);
  return v;
}

DEVICE float factor(const Source& s, int row, int width, float eps) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const float v = value(s, row, i);
    sum = fmaf(v, v, sum);
  }
  return 1.0f / sqrtf(block_sum(sum) / (float)width + eps);
}

// out = y, or with two branches rms(y; y.gain) + rms(z; z.gain). Grid: rows. Writes over PCIe: width * 4 bytes a row.
extern "C" __global__ void tap(const __grid_constant__ TapArgs a) {
  const int r = blockIdx.x;
  float fy = 1.0f, fz = 1.0f;
  if (a.z.planes) {
    fy = factor(a.y, r, a.width, a.eps);
    fz = factor(a.z, r, a.width, a.eps);
  }
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    float v = value(a.y, r, i);
    if (a.z.planes) v = v * fy * a.y.gain[i] + value(a.z, r, i) * fz * a.z.gain[i];
    a.out[(size_t)r * a.width + i] = v;
  }
}

enum SteerMode { STEER_ADD, STEER_ABLATE, STEER_CLAMP, STEER_RENORM };

struct Edit {
  int mode;
  int gated;
  float strength, to, gate, norm;
};

// One steering set.
struct Set {
  const int* first;    // by layer: its first edit; [layers + 1]
  const Edit* edits;
  const float* units;  // [edits][width]
  int layers;          // of which `first` tells
  int pad;
};

struct SteerArgs {
  Rows x;              // float32
  const int* set;      // by batch row, -1 for none
  const int* map;      // active row to batch row, or null
  const Set* sets;
  float* projections;  // [batch row][stride], pinned host memory
  int stride;
  int layer;
};

// Makes the edits of each row's set for one layer, in order, and notes p before each:
//   p = x . u; nothing where the strength is 0 or p does not exceed the gate
//   add     x += s n u        ablate  x += -(s p) u
//   clamp   x += s (to - p) u renorm  as ablate, then x *= |x before| / |x after|
// Grid: rows. A thread has the same columns throughout, so that only sums need barriers.
extern "C" __global__ void steer(const __grid_constant__ SteerArgs a) {
  const int r = blockIdx.x, row = batch_row(a.map, r), which = a.set[row], width = a.x.width;
  if (which < 0) return;
  const Set set = a.sets[which];
  if (a.layer >= set.layers) return;
  float* x = floats(a.x, r);
  for (int e = set.first[a.layer]; e < set.first[a.layer + 1]; e++) {
    const Edit edit = set.edits[e];
    const float* u = set.units + (size_t)e * width;
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      sum = fmaf(x[i], u[i], sum);
      squares = fmaf(x[i], x[i], squares);
    }
    const float p = block_sum(sum);
    if (threadIdx.x == 0) a.projections[(size_t)row * a.stride + e] = p;
    const float s = edit.strength;
    // A projection that is not a number exceeds no gate.
    if (s == 0.0f || (edit.gated && !(p > edit.gate))) continue;
    const float along = edit.mode == STEER_ADD     ? __fmul_rn(s, edit.norm)
                        : edit.mode == STEER_CLAMP ? __fmul_rn(s, __fsub_rn(edit.to, p))
                                                   : -__fmul_rn(s, p);
    float left = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      const float v = fmaf(along, u[i], x[i]);
      x[i] = v;
      left = fmaf(v, v, left);
    }
    if (edit.mode != STEER_RENORM) continue;
    const float before = block_sum(squares), after = block_sum(left);
    if (!(after > 0.0f)) continue;
    const float by = sqrtf(before / after);
    for (int i = threadIdx.x; i < width; i += blockDim.x) x[i] *= by;
  }
}
