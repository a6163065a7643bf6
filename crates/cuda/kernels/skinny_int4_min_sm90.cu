// Skinny GEMM over four-bit weights with f16 scale and minimum for 32 (Q4_1). The kernels are in common/skinny.cuh and common/row_bytes.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/row_bytes.cuh"

SKINNY_FORM(int4_min, Int4Min, 4, 4)
SKINNY_TWO_STRIPS(int4_min, Int4Min, 2, 4)
ROW_FORM(int4_min, Int4Min, 4, 4, 4, 2)
ROW_EXPERTS(int4_min, Int4Min, 4, 4)
