// Skinny GEMM over four-bit weights with f16 scale and minimum for 32 (Q4_1). The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_gemm.rs.
#include "common/skinny.cuh"

SKINNY_FORM(int4_min, Int4Min, 4, 4)
SKINNY_TWO_STRIPS(int4_min, Int4Min, 2, 4)
