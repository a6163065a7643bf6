// Skinny GEMM over four-bit weights with an f16 scale for 32 (Q4_0). The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_gemm.rs.
#include "common/skinny.cuh"

SKINNY_FORM(int4, Int4<false>, 4, 4)
SKINNY_TWO_STRIPS(int4, Int4<false>, 2, 4)
