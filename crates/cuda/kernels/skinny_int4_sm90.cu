// Skinny GEMM over four-bit weights with an f16 scale for 32 (Q4_0). The kernels are in common/skinny.cuh and common/row_bytes.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/row_bytes.cuh"

SKINNY_FORM(int4, Int4<false>, 4, 4)
SKINNY_TWO_STRIPS(int4, Int4<false>, 2, 4)
ROW_FORM(int4, Int4<false>, 4, 4, 4, 2)
ROW_EXPERTS(int4, Int4<false>, 4, 4)
