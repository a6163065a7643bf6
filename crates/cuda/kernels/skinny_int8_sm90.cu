// Skinny GEMM over eight-bit weights with an f16 scale for 32 (Q8_0, Q5_0, IQ4_NL). The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/skinny.cuh"

SKINNY_FORM(int8, Int8, 2, 4)
SKINNY_TWO_STRIPS(int8, Int8, 1, 4)
