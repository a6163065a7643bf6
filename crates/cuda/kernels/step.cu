// What a decoding step begins with: its batch comes from pinned host memory, and rows that follow the pass before take the token that it chose.
//
// One kernel in place of a copy and a kernel: a copy of a few hundred bytes occupies the copy engine for longer than all of this takes, and the
// columns of one row are far apart. Traffic: the columns once over the bus.
#include "common/args.cuh"

constexpr int COLUMNS = 17;

// Mirrored by StepArgs in src/kernels/step.rs.
struct StepArgs {
  const int* from;  // pinned, written by the host before the launch
  int* to;
  const int* chosen;  // by head row of the pass before; null when no row follows
  int place[COLUMNS], length[COLUMNS];
  int follows;  // place of the column that says whom a row follows
  int below;    // ids beyond it are no rows of the tables
};

// Grid: (parts of the longest column, columns). The first two columns are the ids.
extern "C" __global__ void __launch_bounds__(256) step_begin(const __grid_constant__ StepArgs a) {
  const int place = a.place[blockIdx.y], length = a.length[blockIdx.y];
  for (int i = blockIdx.x * 256 + threadIdx.x; i < length; i += gridDim.x * 256) {
    int v = __ldcv(a.from + place + i);
    if (a.chosen && blockIdx.y < 2) {
      const int from = __ldcv(a.from + a.follows + i);
      // A row that was not finite chose -1; what follows it is thrown away, but its id is looked up.
      if (from >= 0) v = max(0, min(a.chosen[from], a.below - 1));
    }
    a.to[place + i] = v;
  }
}
