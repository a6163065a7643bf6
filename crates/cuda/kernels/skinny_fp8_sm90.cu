// Skinny GEMM over FP8 E4M3 weights with a scale a row. The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/skinny.cuh"

SKINNY_FORM(fp8, Fp8, 2, 4)
SKINNY_TWO_STRIPS(fp8, Fp8, 1, 4)
