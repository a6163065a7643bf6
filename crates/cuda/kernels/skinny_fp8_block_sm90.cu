// Skinny GEMM over FP8 E4M3 weights with a scale for 128 x 128. The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/skinny.cuh"

SKINNY_FORM(fp8_block, Fp8Block, 2, 4)
SKINNY_TWO_STRIPS(fp8_block, Fp8Block, 1, 4)
