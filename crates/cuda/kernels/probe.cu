// A kernel that does next to nothing: what `check` launches to see that the device runs this build's machine code.
//
// y[i] = 2 x[i] + 1, n values.
#include "common/args.cuh"

struct ProbeArgs {
  const float* x;
  float* y;
  int n;
};

extern "C" __global__ void probe(const __grid_constant__ ProbeArgs a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < a.n) a.y[i] = 2.0f * a.x[i] + 1.0f;
}
