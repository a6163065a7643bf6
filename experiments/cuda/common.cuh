// What the three measurements share: one-instruction PTX wrappers, random data, checks, graph timing.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define CK(x)                                                                                  \
  do {                                                                                         \
    cudaError_t e_ = (x);                                                                      \
    if (e_ != cudaSuccess) {                                                                   \
      printf("FAILED %s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));         \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)

using bf16 = __nv_bfloat16;

// ---- PTX, one instruction a function ----
__device__ __forceinline__ uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(uint64_t* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void mbar_expect(uint64_t* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(b)) : "memory");
}
__device__ __forceinline__ void mbar_wait(uint64_t* b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nW_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra W_%=;\n}" ::"r"(smem_addr(b)),
      "r"(parity)
      : "memory");
}
// Contiguous bytes (a multiple of 16) from device memory to shared memory by the copy engine.
__device__ __forceinline__ void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_addr(dst)),
               "l"(src), "r"(bytes), "r"(smem_addr(b))
               : "memory");
}
// Programmatic dependent launch: let the next kernel start; wait until the kernel before has finished.
__device__ __forceinline__ void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// c += A (16 x 16, bf16) * B (16 x 8, bf16), float32 sums.
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t pack_bf16x2(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
// Two FP8 E4M3 in bytes 1 and 3 of v to bf16x2, each times 2^-120: the fields are moved, not converted. E4M3 subnormals become
// bf16 subnormals, which the tensor core multiplies exactly.
__device__ __forceinline__ uint32_t e4m3_hi_to_bf16x2(uint32_t v) { return (v & 0x80008000u) | ((v >> 4) & 0x07f007f0u); }
// The factor that brings such tiny values back into range sits on the other operand: 2^100 and 2^96 as bf16x2.
constexpr uint32_t POW2_100 = 0x71807180u, POW2_96 = 0x6f806f80u;

// ---- random data ----
__host__ __device__ inline uint32_t hash32(uint64_t i, uint32_t seed) {
  uint64_t z = i * 0x9E3779B97F4A7C15ull + ((uint64_t)seed << 32 | 0x1234567u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (uint32_t)(z >> 32) ^ (uint32_t)z;
}
__host__ __device__ inline float uniform(uint64_t i, uint32_t seed) { return hash32(i, seed) * (2.f / 4294967296.f) - 1.f; }
static __global__ void fill_bf16(bf16* p, size_t n, uint32_t seed, float scale) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    p[i] = __float2bfloat16(uniform(i, seed) * scale);
}
static __global__ void fill_nan(float* p, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = NAN;
}

// ---- checks: finite first, then |out - ref| / |ref| ----
inline double rel_error(const float* dout, const double* dref, size_t n) {
  std::vector<float> o(n);
  std::vector<double> r(n);
  CK(cudaMemcpy(o.data(), dout, n * 4, cudaMemcpyDeviceToHost));
  CK(cudaMemcpy(r.data(), dref, n * 8, cudaMemcpyDeviceToHost));
  double num = 0, den = 0;
  for (size_t i = 0; i < n; i++) {
    if (!std::isfinite(o[i]) || !std::isfinite(r[i])) return INFINITY;
    num += (o[i] - r[i]) * (o[i] - r[i]);
    den += r[i] * r[i];
  }
  return den > 0 ? sqrt(num / den) : INFINITY;
}

// ---- read bandwidth: a reduction that only reads ----
static __global__ void __launch_bounds__(512) read_reduce(const uint4* p, size_t n, uint32_t* sink) {
  uint32_t s = 0;
  size_t step = (size_t)gridDim.x * blockDim.x, i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = __ldcs(p + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; j++) s ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < n; i += step) { uint4 v = __ldcs(p + i); s ^= v.x ^ v.y ^ v.z ^ v.w; }
  if (s == 0x12345678u) *sink = s;
}

// ---- launches and timing ----
// One launch with or without programmatic dependent launch, and with a cluster size.
template <class... P, class... A>
void launch(void (*k)(P...), dim3 grid, int threads, size_t smem, cudaStream_t st, bool pdl, int cluster, A... args) {
  cudaLaunchConfig_t c = {};
  c.gridDim = grid; c.blockDim = dim3(threads); c.dynamicSmemBytes = smem; c.stream = st;
  cudaLaunchAttribute at[2];
  int n = 0;
  if (pdl) { at[n].id = cudaLaunchAttributeProgrammaticStreamSerialization; at[n++].val.programmaticStreamSerializationAllowed = 1; }
  if (cluster > 1) { at[n].id = cudaLaunchAttributeClusterDimension; at[n].val.clusterDim.x = cluster; at[n].val.clusterDim.y = at[n].val.clusterDim.z = 1; n++; }
  c.attrs = at; c.numAttrs = n;
  CK(cudaLaunchKernelEx(&c, k, (P)args...));
}
// Microseconds per call of body(i), i = 0..n-1 captured in one graph; median of `reps` replays after one to warm up.
inline double time_graph(cudaStream_t st, int n, int reps, const std::function<void(int)>& body) {
  cudaGraph_t g; cudaGraphExec_t ge;
  CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < n; i++) body(i);
  CK(cudaStreamEndCapture(st, &g));
  CK(cudaGraphInstantiate(&ge, g, 0));
  cudaEvent_t a, b;
  CK(cudaEventCreate(&a)); CK(cudaEventCreate(&b));
  CK(cudaGraphLaunch(ge, st));
  std::vector<float> ms(reps);
  for (auto& m : ms) {
    CK(cudaEventRecord(a, st)); CK(cudaGraphLaunch(ge, st)); CK(cudaEventRecord(b, st));
    CK(cudaEventSynchronize(b)); CK(cudaEventElapsedTime(&m, a, b));
  }
  CK(cudaGetLastError());
  std::sort(ms.begin(), ms.end());
  CK(cudaEventDestroy(a)); CK(cudaEventDestroy(b)); CK(cudaGraphExecDestroy(ge)); CK(cudaGraphDestroy(g));
  return ms[reps / 2] * 1e3 / n;
}
// The ceiling: GB/s of read_reduce over a 4 GB buffer, best of several grids.
inline double read_ceiling(const void* p, size_t bytes, uint32_t* sink, cudaStream_t st) {
  double best = 0;
  for (int per_sm : {2, 3, 4, 8}) {
    double us = time_graph(st, 4, 5, [&](int) { read_reduce<<<132 * per_sm, 512, 0, st>>>((const uint4*)p, bytes / 16, sink); });
    best = std::max(best, bytes / us * 1e-3);
  }
  return best;
}
