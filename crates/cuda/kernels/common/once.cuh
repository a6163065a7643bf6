#pragma once
#include "ptx.cuh"
__device__ __forceinline__ void bulk_load_once(void* dst, const void* src, uint32_t bytes, uint64_t* b, bool once) {
  const uint64_t policy = once ? 0x12F0000000000000ull : 0x1000000000000000ull;
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(smem_addr(dst)),
               "l"(src), "r"(bytes), "r"(smem_addr(b)), "l"(policy)
               : "memory");
}
