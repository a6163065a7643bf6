// Skinny GEMM over NVFP4. The kernel is in common/skinny.cuh, the layout in common/forms.cuh;
// chunks and stages here are those of src/kernels/skinny_gemm.rs.
#include "common/skinny.cuh"

SKINNY_FORM(nvfp4, Nvfp4, 4, 4)
SKINNY_TWO_STRIPS(nvfp4, Nvfp4, 2, 4)
