// Matrix products with 2 to 64 rows, as they occur when several texts are continued at the same time. Reading the
// weights is the bottleneck.
//
//   y[r, n] = Σ_k x[r, k]·w[n, k] + c[r, n]                          product
//   h[r, n] = gate(Σ_k x[r, k]·w[n, k]) · Σ_k x[r, k]·w[f + n, k]    gated
//
// A block multiplies kTile rows of w by all rows of x. In the products of the tensor cores, w is the operand with 16
// rows and x the one with 8 columns, so that few rows of x waste little. x is filled up with zeros to R rows. A warp has
// 32 rows of w or, in a gated product, 16 rows of the gate and the 16 matching rows of up.
//
// The block moves along k in steps of kDepth. For each step, its rows of w and x are copied to a ring of kStages slots in
// shared memory with cp.async, up to kStages − 1 steps ahead. The first copies of w don't wait for the preceding kernel.
//
// If there are few tiles, k is divided into ranges, and the blocks of a tile form a cluster, one for each range. They
// leave their sums in shared memory, and each block adds up a part of the results over the cluster, in order.
#include "common.cuh"
#include "gate.cuh"
#include "mma.cuh"
#include "overlap.cuh"

constexpr int kTile = 128, kDepth = 64, kStages = 4, kThreads = 128;

struct Args {
  void* y;
  const void *x, *w, *c;  // c may be null or y
  int rows, n, depth, ranges, steady, early, isGELU;  // n is the number of columns of y; see Overlap in product.go
};

// awaitCluster waits for all threads of the cluster, and makes their shared memory visible.
__device__ __forceinline__ void awaitCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// loadFrom reads 16 bytes of another block's shared memory, at the address of a variable in this block's memory.
__device__ __forceinline__ float4 loadFrom(int block, uint32_t address) {
  float4 v = {};
#if __CUDA_ARCH__ >= 900
  uint32_t theirs;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(theirs) : "memory");
#endif
  return v;
}

template <class T, int R, bool Gated> __device__ __forceinline__ void multiplyRows(const Args& a) {
  extern __shared__ __align__(128) char memory[];
  constexpr int wBytes = kTile * kDepth * 2, xBytes = R * kDepth * 2, stageBytes = wBytes + xBytes;
  constexpr int perWarp = Gated ? 16 : 32, perBlock = kThreads / kWarp * perWarp;  // columns of y
  const uint32_t base = tile::sharedAddress(memory);
  const int first = blockIdx.x * perBlock, range = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int steps = (a.depth + kDepth - 1) / kDepth;
  const int from = int64_t(steps) * range / a.ranges, to = int64_t(steps) * (range + 1) / a.ranges;
  const T *x = static_cast<const T*>(a.x), *w = static_cast<const T*>(a.w);

  const int chunk = threadIdx.x % 8, row0 = threadIdx.x / 8;
  const auto copyW = [&](int step) {
    const uint32_t at = base + (step - from) % kStages * stageBytes;
    const int k = step * kDepth + chunk * 8;
#pragma unroll
    for (int i = 0; i < kTile / (kThreads / 8); i++) {
      const int row = row0 + i * (kThreads / 8);
      const int column = first + (Gated ? row / 32 * 16 + row % 16 : row);
      const int64_t of = column + (Gated && row % 32 >= 16 ? a.n : 0);
      const bool valid = column < a.n && k < a.depth;
      tile::copyAsync<16>(tile::chunkAt<kDepth>(at, row, chunk), valid ? w + of * a.depth + k : w, valid);
    }
  };
  const auto copyX = [&](int step) {
    const uint32_t at = base + (step - from) % kStages * stageBytes + wBytes;
    const int k = step * kDepth + chunk * 8;
#pragma unroll
    for (int i = 0; i < R / (kThreads / 8); i++) {
      const int row = row0 + i * (kThreads / 8);
      const bool valid = row < a.rows && k < a.depth;
      tile::copyAsync<16>(tile::chunkAt<kDepth>(at, row, chunk), valid ? x + int64_t(row) * a.depth + k : x, valid);
    }
  };

  // Fill the ring. Each step has a group of copies. The first group also has the copies of w of all these steps.
  const int ahead = min(kStages - 1, to - from);
  if (a.steady)
    for (int i = 0; i < ahead; i++) copyW(from + i);
  if (a.early) releaseNext();
  awaitPrevious();
  if (!a.early) releaseNext();
  for (int i = 0; i < kStages - 1; i++) {
    if (i < ahead) {
      if (!a.steady) copyW(from + i);
      copyX(from + i);
    }
    tile::copyCommit();
  }

  tile::Accumulator<2, R> sum;
  sum.clear();
  for (int step = from; step < to; step++) {
    tile::copyWait<kStages - 2>();
    __syncthreads();  // the step has arrived, and all warps are done with the one before it
    if (step + kStages - 1 < to) copyW(step + kStages - 1), copyX(step + kStages - 1);
    tile::copyCommit();
    const uint32_t at = base + (step - from) % kStages * stageBytes;
    sum.template addNT<T, kDepth>(at, warp * 32, at + wBytes, 0);
  }

  T* y = static_cast<T*>(a.y);
  const T* c = static_cast<const T*>(a.c);
  // put completes and stores the results of rows 8·n to 8·n + 7 of x, given the lane's sums of both halves of the warp's
  // rows of w. Only halves from `from` up to `to` are stored. c is read before y is written, because c may be y.
  const auto put = [&](int n, int from, int to, const float (&s)[2][4]) {
    const auto index = [&](int m, int e) {
      const int column = first + warp * perWarp + m * 16 + lane / 4 + e / 2 * 8, row = n * 8 + lane % 4 * 2 + e % 2;
      return row < a.rows && column < a.n ? int64_t(row) * a.n + column : -1;
    };
    float v[2][4];
#pragma unroll
    for (int m = 0; m < (Gated ? 1 : 2); m++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int64_t i = index(m, e);
        if constexpr (Gated)
          v[m][e] = a.isGELU ? gateMul<T, true>(s[0][e], s[1][e]) : gateMul<T, false>(s[0][e], s[1][e]);
        else
          v[m][e] = s[m][e] + (c && i >= 0 && m >= from && m < to ? toFloat(c[i]) : 0.0f);
      }
#pragma unroll
    for (int m = 0; m < (Gated ? 1 : 2); m++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (const int64_t i = index(m, e); i >= 0 && m >= from && m < to) y[i] = fromFloat<T>(v[m][e]);
  };

  if (a.ranges == 1) {
#pragma unroll
    for (int n = 0; n < R / 8; n++) {
      float s[2][4];
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[m][e] = sum.c[m][n][e];
      put(n, 0, 2, s);
    }
    return;
  }

  // Store the sums in shared memory, where the ring was.
  tile::copyWait<0>();
  __syncthreads();
  const auto slot = [&](int m, int n) { return (m * (R / 8) + n) * kThreads + int(threadIdx.x); };
  float4* sums = reinterpret_cast<float4*>(memory);
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < R / 8; n++) sums[slot(m, n)] = make_float4(sum.c[m][n][0], sum.c[m][n][1], sum.c[m][n][2], sum.c[m][n][3]);
  awaitCluster();
  // Add up this block's part of the results. An item is 8 rows of x and, unless the product is gated, a half of the
  // warp's rows of w; the blocks of the cluster take items in turn.
  constexpr int halves = Gated ? 1 : 2;
  for (int item = range; item < R / 8 * halves; item += a.ranges) {
    const int n = item / halves, from = Gated ? 0 : item % 2, to = Gated ? 2 : from + 1;
    float s[2][4] = {};
#pragma unroll 8
    for (int r = 0; r < a.ranges; r++)
#pragma unroll
      for (int m = 0; m < 2; m++)
        if (m >= from && m < to) {
          const float4 v = loadFrom(r, base + slot(m, n) * sizeof(float4));
          s[m][0] += v.x, s[m][1] += v.y, s[m][2] += v.z, s[m][3] += v.w;
        }
    put(n, from, to, s);
  }
  awaitCluster();  // this block's shared memory lasts until all others have read it
}

#define DEFINE_KERNEL(T, name, ...) \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_rows##name##_##T(Args a) { multiplyRows<T, __VA_ARGS__>(a); }
#define DEFINE_ROWS(T, R) DEFINE_KERNEL(T, _##R, R, false) DEFINE_KERNEL(T, _gated_##R, R, true)
#define DEFINE(T) DEFINE_ROWS(T, 16) DEFINE_ROWS(T, 32) DEFINE_ROWS(T, 64)
DEFINE(bf16)
DEFINE(f16)
