// Skinny GEMM over FP8 E4M3 weights with a scale for 128 x 128. The kernels are in common/skinny.cuh and common/row_fp8.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/row_fp8.cuh"

SKINNY_FORM(fp8_block, Fp8Block, 2, 4)
SKINNY_TWO_STRIPS(fp8_block, Fp8Block, 1, 4)
ROW_FORM(fp8_block, Fp8Block, 2, 4, 1, 4)
ROW_DEEP(fp8_block, Fp8Block, 2, 6, 1, 6)
ROW_EXPERTS(fp8_block, Fp8Block, 2, 4)
