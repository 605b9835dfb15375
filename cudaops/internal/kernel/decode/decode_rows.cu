// Matrix products with 2 to 64 rows, as they occur when several texts are continued at the same time. Reading the
// weights is the bottleneck.
//
//   y[r, n] = Σ_k x[r, k]·w[n, k] + c[r, n]
//
// A block multiplies kTile rows of w, over a range of k, by all rows of x: the rows of w are the rows of the tensor
// cores' tiles, and the rows of x, filled up with zeros to R, their columns. Copies of w run kStages steps ahead, and
// those for the first steps don't wait for the preceding kernel.
//
// If k is divided into ranges, the last block of a tile to finish adds up the ranges, in order.
#include "common.cuh"
#include "mma.cuh"
#include "overlap.cuh"

constexpr int kTile = 128, kDepth = 64, kStages = 4, kThreads = 128;

struct Args {
  void* y;
  const void *x, *w, *c;  // c may be null or y
  float* parts;           // [ranges, rows, n]; unused if there is one range
  unsigned* arrived;      // for each tile, zero before and after
  int rows, n, depth, ranges, steady;
};

template <class T, int R> __device__ __forceinline__ void multiplyRows(const Args& a) {
  extern __shared__ __align__(128) char memory[];
  __shared__ bool last;
  constexpr int wBytes = kTile * kDepth * 2, xBytes = R * kDepth * 2, stageBytes = wBytes + xBytes;
  const uint32_t base = tile::sharedAddress(memory);
  const int first = blockIdx.x * kTile, range = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
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
      const bool valid = first + row < a.n && k < a.depth;
      tile::copyAsync<16>(tile::chunkAt<kDepth>(at, row, chunk), valid ? w + int64_t(first + row) * a.depth + k : w, valid);
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

  // Fill the ring. Each step has a group of copies, in order; the first group also has all of w.
  const int ahead = min(kStages - 1, to - from);
  if (a.steady)
    for (int i = 0; i < ahead; i++) copyW(from + i);
  awaitPrevious();
  releaseNext();  // after the wait, so every kernel but the preceding one has finished when the next one starts
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

  // store passes each element of the result to put.
  const auto each = [&](auto put) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int n = 0; n < R / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int column = first + warp * 32 + m * 16 + lane / 4 + e / 2 * 8, row = n * 8 + lane % 4 * 2 + e % 2;
          if (row < a.rows && column < a.n) put(int64_t(row) * a.n + column, sum.c[m][n][e]);
        }
  };
  T* y = static_cast<T*>(a.y);
  const T* c = static_cast<const T*>(a.c);
  if (a.ranges == 1) {
    each([&](int64_t i, float v) { y[i] = fromFloat<T>(c ? v + toFloat(c[i]) : v); });
    return;
  }

  const int64_t size = int64_t(a.rows) * a.n;
  each([&](int64_t i, float v) { a.parts[range * size + i] = v; });
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(a.arrived + blockIdx.x, 1) == unsigned(a.ranges) - 1;
    if (last) a.arrived[blockIdx.x] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int column = first + threadIdx.x;
  if (column >= a.n) return;
  for (int row = 0; row < a.rows; row++) {
    const int64_t i = int64_t(row) * a.n + column;
    float v = 0;
#pragma unroll 8
    for (int r = 0; r < a.ranges; r++) v += __ldcg(a.parts + r * size + i);
    y[i] = fromFloat<T>(c ? v + toFloat(c[i]) : v);
  }
}

#define DEFINE_ROWS(T, R) \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_rows_##R##_##T(Args a) { multiplyRows<T, R>(a); }
#define DEFINE(T) DEFINE_ROWS(T, 16) DEFINE_ROWS(T, 32) DEFINE_ROWS(T, 64)
DEFINE(bf16)
DEFINE(f16)
