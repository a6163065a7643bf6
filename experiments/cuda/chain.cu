// What a chain of small kernels costs inside one graph, with and without programmatic dependent launch (PDL): empty kernels, a grid
// barrier inside one kernel for comparison, and decode layers of E2B and 26B-A4B (attention replaced by a small stand-in, experts left out).
//   split: norm, qkv, stand-in, o, norm, gate+up, geglu, down               8 kernels a layer
//   fused: qkv (norms inside), stand-in, o, gate+up (norms, geglu inside), down   5 kernels a layer
// Both compute the same function; their results are compared.
#include "skinny_gemm.cuh"
#include <cstring>

static cudaStream_t st;
__global__ void empty(int) { pdl_launch(); pdl_wait(); }

__global__ void __launch_bounds__(256) barriers(unsigned* c, int n) {
  for (int i = 1; i <= n; i++) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(c, 1);
      while (*(volatile unsigned*)c < (unsigned)(i * gridDim.x)) {}
      __threadfence();
    }
    __syncthreads();
  }
}
// One block a row; same arithmetic as make_x.
__global__ void __launch_bounds__(1024) norm_kernel(SkinnyArgs a, bf16* x, int rows, bool wide) {
  __shared__ float red[32];
  pdl_launch();
  const int r = blockIdx.x, n4 = a.K / 4, i = threadIdx.x;
  float4 post = make_float4(0, 0, 0, 0), pre = post;
  if (i < n4) { post = ((const float4*)a.gain_post)[i]; pre = ((const float4*)a.gain_pre)[i]; }
  pdl_wait();
  auto block_sum = [&](float s) {
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if ((i & 31) == 0) red[i >> 5] = s;
    __syncthreads();
    s = 0;
    for (int w = 0; w < blockDim.x / 32; w++) s += red[w];
    __syncthreads();
    return s;
  };
  float4 v = make_float4(0, 0, 0, 0), res = v;
  if (i < n4) {
    res = ((const float4*)a.resid)[r * n4 + i];
    for (int p = 0; p < a.in_planes; p++) { float4 u = ((const float4*)a.in)[(p * rows + r) * n4 + i]; v.x += u.x; v.y += u.y; v.z += u.z; v.w += u.w; }
  }
  float s = rsqrtf(block_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w) / a.K + NORM_EPS);
  if (i < n4) {
    const float4 g = post;
    v = make_float4(res.x + v.x * s * g.x, res.y + v.y * s * g.y, res.z + v.z * s * g.z, res.w + v.w * s * g.w);
    ((float4*)a.resid_out)[r * n4 + i] = v;
  }
  s = rsqrtf(block_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w) / a.K + NORM_EPS);
  if (i < n4) {
    const float4 g = pre;
    *(uint2*)(x + (size_t)r * a.K + x_place(wide, 4 * i)) = make_uint2(pack_bf16x2(v.x * s * g.x, v.y * s * g.y), pack_bf16x2(v.z * s * g.z, v.w * s * g.w));
  }
}
// In place of attention: width K of bf16 from width M of float32, normed over 256.
__global__ void __launch_bounds__(256) stand_in(const float* qkv, int M, bf16* o, int K, bool wide) {
  pdl_launch(); pdl_wait();
  __shared__ float red[8];
  const int r = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
  float v = qkv[(size_t)r * M + i % M], s = v * v;
  for (int k = 16; k; k >>= 1) s += __shfl_xor_sync(~0u, s, k);
  if ((threadIdx.x & 31) == 0) red[threadIdx.x >> 5] = s;
  __syncthreads();
  s = 0;
  for (int w = 0; w < 8; w++) s += red[w];
  o[(size_t)r * K + x_place(wide, i)] = __float2bfloat16(v * rsqrtf(s / 256 + NORM_EPS));
}
__global__ void __launch_bounds__(256) geglu(const float* gu, int M, bf16* h, bool wide) {  // 8 gate, 8 up, 8 gate, ...
  pdl_launch(); pdl_wait();
  const int r = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
  if (i >= M / 2) return;
  const float* p = gu + (size_t)r * M + i / 8 * 16 + i % 8;
  h[(size_t)r * (M / 2) + x_place(wide, i)] = __float2bfloat16(gelu_tanh(p[0]) * p[8]);
}
__global__ void fill_bytes(uint8_t* p, size_t n, uint32_t seed) {  // valid in every format: no NaN code, no exponent above one
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = hash32(i, seed) & 0xbf;
}
__global__ void fill_f32(float* p, size_t n, uint32_t seed, float lo, float scale) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = lo + scale * uniform(i, seed);
}

struct Layer { const char* name; int hidden, qkv, attn, gu, layers; };
static uint8_t* pool; static size_t POOL = 4ull << 30;
static unsigned* counters;
static float *resid[2], *planes, *qkv_out, *gu_out, *gain; static bf16 *x, *ao, *hid;
static bool all_ok = true;

template <class F, int CW, int NS, int RM> void run(const Layer& L, double ceiling) {
  auto sm = [](int K, int np) { return skinny_smem<F, CW, NS, 1, 1>() + skinny_x_bytes(RM, K, np); };
  CK(cudaFuncSetAttribute(skinny<F, CW, NS, 1, 1, 2, true, false, 0, RM>, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 - 1024));
  CK(cudaFuncSetAttribute(skinny<F, CW, NS, 1, 1, 2, true, false, 1, RM>, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 - 1024));
  CK(cudaFuncSetAttribute(skinny<F, CW, NS, 1, 1, 2, true, false, 3, RM>, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 - 1024));
  auto bytes = [](size_t M, size_t K) { return M / 16 * (K / F::KC) * F::CB; };
  const size_t b[4] = {bytes(L.qkv, L.hidden), bytes(L.hidden, L.attn), bytes(L.gu, L.hidden), bytes(L.hidden, L.gu / 2)}, layer = b[0] + b[1] + b[2] + b[3];
  if (layer * L.layers > POOL) { printf("%s: pool too small\n", L.name); return; }
  auto gemv = [&](int l, int which, int M, int K, const bf16* in, float* out, int np, int wm, bool pdl, int fuse, const SkinnyArgs* nrm) {
    SkinnyArgs a = nrm ? *nrm : SkinnyArgs{};
    a.w = pool + l * layer; for (int i = 0; i < which; i++) a.w += b[i];
    a.strip_bytes = bytes(16, K); a.strips = M / 16; a.K = K; a.lwm = __builtin_ctz(wm); a.x = in; a.ldx = K; a.rows = a.xrows = RM; a.out = out; a.M = M; a.scale = 0.01f;
    a.planes = np; a.hidden = hid;
    const int grid = std::min(264 / np * np, (M / 16 + wm - 1) / wm * np);
    if (fuse == 0) launch(skinny<F, CW, NS, 1, 1, 2, true, false, 0, RM>, dim3(grid), 288, sm(K, np), st, pdl, 1, a);
    if (fuse == 1) launch(skinny<F, CW, NS, 1, 1, 2, true, false, 1, RM>, dim3(grid), 288, sm(K, np), st, pdl, 1, a);
    if (fuse == 3) launch(skinny<F, CW, NS, 1, 1, 2, true, false, 3, RM>, dim3(grid), 288, sm(K, np), st, pdl, 1, a);
  };
  for (int np : {1, 2}) {
    double us[2][2];
    std::vector<float> got[2];
    for (int fused = 0; fused < 2; fused++)
      for (int pdl = 0; pdl < 2; pdl++) {
        auto body = [&](int l) {
          SkinnyArgs n = {};
          n.K = L.hidden; n.in = planes; n.in_planes = np; n.gain_post = gain; n.gain_pre = gain + 8192;
          n.resid = resid[0]; n.resid_out = resid[1];
          if (!fused) launch(norm_kernel, dim3(RM), (L.hidden / 4 + 31) / 32 * 32, 0, st, pdl, 1, n, x, RM, F::WIDE);
          gemv(l, 0, L.qkv, L.hidden, x, qkv_out, 1, 1, pdl, fused, &n);
          launch(stand_in, dim3(L.attn / 256, RM), 256, 0, st, pdl, 1, qkv_out, L.qkv, ao, L.attn, F::WIDE);
          gemv(l, 1, L.hidden, L.attn, ao, planes, np, 1, pdl, 0, nullptr);
          n.resid = resid[1]; n.resid_out = resid[0];
          if (!fused) launch(norm_kernel, dim3(RM), (L.hidden / 4 + 31) / 32 * 32, 0, st, pdl, 1, n, x, RM, F::WIDE);
          gemv(l, 2, L.gu, L.hidden, x, gu_out, 1, 1, pdl, 3 * fused, &n);
          if (!fused) launch(geglu, dim3((L.gu / 2 + 255) / 256, RM), 256, 0, st, pdl, 1, gu_out, L.gu, hid, F::WIDE);
          gemv(l, 3, L.hidden, L.gu / 2, hid, planes, np, 1, pdl, 0, nullptr);
        };
        fill_f32<<<64, 256, 0, st>>>(resid[0], (size_t)RM * L.hidden, 1, 0, 1.f);
        fill_f32<<<64, 256, 0, st>>>(planes, (size_t)16 * RM * L.hidden, 2, 0, 1.f);
        for (int l = 0; l < 2; l++) body(l);
        CK(cudaStreamSynchronize(st));
        std::vector<float> v(RM * L.hidden);
        CK(cudaMemcpy(v.data(), resid[0], v.size() * 4, cudaMemcpyDeviceToHost));
        if (!fused && !pdl) got[0] = v;
        double num = 0, den = 0;
        bool fin = true;
        for (size_t i = 0; i < v.size(); i++) { fin &= std::isfinite(v[i]); num += pow(v[i] - got[0][i], 2); den += pow(got[0][i], 2); }
        // two layers in, sums in another order flip bf16 roundings now and then
        if (!fin || !(sqrt(num / den) < 2e-3)) { printf("WRONG chain %s fused %d pdl %d: finite %d, difference %.3g\n", L.name, fused, pdl, fin, sqrt(num / den)); all_ok = false; }
        us[fused][pdl] = time_graph(st, L.layers, 7, body);
      }
    printf("%-6s %-6s rows %d, planes %d: %5.2f MB a layer, at the ceiling %5.2f us | split 8 kernels: plain %6.2f us, PDL %6.2f us | fused 5 kernels: plain %6.2f us, PDL %6.2f us (%.0f %% of ceiling)\n", L.name, F::NAME, RM,
           np, layer / 1e6, layer / ceiling * 1e-3, us[0][0], us[0][1], us[1][0], us[1][1], layer / ceiling * 1e-3 / us[1][1] * 100);
    fflush(stdout);
  }
}

int main() {
  CK(cudaStreamCreate(&st));
  CK(cudaMalloc(&pool, POOL)); CK(cudaMalloc(&counters, 1 << 20)); CK(cudaMemset(counters, 0, 1 << 20));
  for (auto p : {&resid[0], &resid[1], &planes, &qkv_out, &gu_out, &gain}) CK(cudaMalloc(p, 8 << 20));
  for (auto p : {&x, &ao, &hid}) CK(cudaMalloc(p, 2 << 20));
  fill_bytes<<<4096, 256, 0, st>>>(pool, POOL, 5);
  fill_f32<<<64, 256, 0, st>>>(gain, 16384, 4, 1.f, 0.3f);
  double ceiling = read_ceiling(pool, POOL, counters + 1000, st);
  printf("read ceiling %.0f GB/s\n", ceiling);
  for (int grid : {1, 132}) {
    double a = time_graph(st, 200, 7, [&](int) { launch(empty, dim3(grid), 256, 0, st, false, 1, 0); });
    double b = time_graph(st, 200, 7, [&](int) { launch(empty, dim3(grid), 256, 0, st, true, 1, 0); });
    printf("empty kernel, %3d blocks: plain %.2f us, PDL %.2f us\n", grid, a, b);
  }
  unsigned* bc;
  CK(cudaMalloc(&bc, 64));
  double t[2];
  for (int i = 0; i < 2; i++) {
    int n = i ? 210 : 10;
    t[i] = time_graph(st, 1, 7, [&](int) { CK(cudaMemsetAsync(bc, 0, 4, st)); barriers<<<132, 256, 0, st>>>(bc, n); });
  }
  printf("grid barrier over 132 blocks inside one kernel: %.2f us\n", (t[1] - t[0]) / 200);
  const Layer e2b = {"E2B", 1536, 2560, 2048, 12288, 35}, a4b = {"26B", 2816, 8192, 4096, 4224, 30};
  for (const Layer& L : {e2b, a4b}) {
    run<Nvfp4, 4, 4, 1>(L, ceiling); run<Nvfp4, 4, 4, 4>(L, ceiling);
    run<Fp8, 2, 4, 1>(L, ceiling); run<Bf16, 1, 5, 1>(L, ceiling);
  }
  printf(all_ok ? "chain: all checks passed\n" : "chain: CHECKS FAILED\n");
  return !all_ok;
}
