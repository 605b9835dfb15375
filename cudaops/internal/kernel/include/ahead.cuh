// Prefetching into the L2 cache, for kernels that run while the memory would otherwise be idle.
#pragma once
#include <stdint.h>

// Ahead lists memory that later kernels will read: up to two ranges, aligned to 16 bytes and multiples
// of 16 bytes long. The fields must match decode.Ahead.
struct Ahead {
  const char* from[2];
  int bytes[2];
};

// prefetch starts fetching a block's share of the ranges. `blocks` blocks with numbers from 0 divide the
// ranges among themselves; others pass a negative number. It returns at once.
__device__ __forceinline__ void prefetch(const Ahead& a, int block, int blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr int kLine = 128, kPiece = 8 << 10;
  if (threadIdx.x != 0 || block < 0) return;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int share = ((a.bytes[i] + blocks - 1) / blocks + kLine - 1) / kLine * kLine;
    const int end = min(int64_t(a.bytes[i]), (block + int64_t(1)) * share);
    for (int64_t at = int64_t(block) * share; at < end; at += kPiece)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(a.from[i] + at), "r"(int(min(int64_t(kPiece), end - at))));
  }
#endif
}
