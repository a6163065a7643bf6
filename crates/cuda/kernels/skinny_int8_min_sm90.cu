// Skinny GEMM over eight-bit weights with f16 scale and minimum for 32 (Q5_1). The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/skinny.cuh"

SKINNY_FORM(int8_min, Int8Min, 2, 4)
SKINNY_TWO_STRIPS(int8_min, Int8Min, 1, 4)
