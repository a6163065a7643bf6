// Skinny GEMM over NVFP4. The kernels are in common/skinny.cuh and common/row_bytes.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_shape.rs.
#include "common/row_bytes.cuh"

SKINNY_FORM(nvfp4, Nvfp4, 4, 4)
SKINNY_TWO_STRIPS(nvfp4, Nvfp4, 2, 4)
ROW_FORM(nvfp4, Nvfp4, 4, 4, 4, 2)
ROW_EXPERTS(nvfp4, Nvfp4, 4, 4)
