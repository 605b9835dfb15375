// Kasmina forward: computes y from x, and six health figures of x for the chunk of every seed, in
// one pass.
//
//   y = x + α(t(x) − x) for seeds that blend, otherwise y = x; see kasmina.cuh
//   variance, mean, min, max, share of |x| < eps, |mean|/sqrt(variance + eps)
//
// NaN and Inf are counted and excluded from the figures. Each batch of rows passes through
// registers once, for both the transform and the sums of the moments. 16-bit types are processed
// two at a time where possible. Work that no seed of a warp needs is skipped, so a warp with only
// dormant seeds just copies and measures. Rows with NaN, Inf or numbers too large to multiply, and
// all rows in strict mode, take a slow path, row by row. A block merges the figures of its lanes in
// order, and a second kernel merges the figures of the blocks.
#include "kasmina_forward.cuh"

template <class T, int N> using RingRows = Ring<T, N, 1, 4>;

#define DEFINE_FORWARD(mode, name, shape, T, N, E, whole, Feed)                      \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                          \
      kasmina_forward_##name##_##shape##_##T(Layer l, Share share, T* y, const T* x, \
                                             float4* records, uint32_t* bad) {       \
    forward<T, N, E, whole, mode, Feed<T, N>>(l, y, {{x}}, share, records, Counts{bad}, Own{}); \
  }
// If rows are not aligned, a thread has one column.
#define DEFINE_WIDE(...) FOR_MODES(DEFINE_FORWARD, RingRows, __VA_ARGS__)
#define DEFINE(T) FOR_WIDE_SHAPES(DEFINE_WIDE, T) FOR_MODES(DEFINE_FORWARD, PlainRows, single, T, 1, 1, false)
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#undef DEFINE_WIDE
#undef DEFINE_FORWARD

// Launch: the blocks of mergeFigures. It may overlap with the preceding kernel.
extern "C" __global__ void __launch_bounds__(kMergeThreads) kasmina_merge(const __grid_constant__ Left l) {
  const int each = l.units / l.seeds, across = kMergeThreads / l.share, first = blockIdx.x * across;
  releaseNext();
  // The first iteration merges nothing. It only loads the code into the multiprocessor while the
  // preceding kernel is still running, because that kernel's data has evicted the code from L2,
  // along with the records of the first blocks.
  prefetchParts(l.records + 2 * int64_t(first) * each, l.parts, 2 * int64_t(l.units), 2 * min(across, l.seeds - first) * each);
#pragma unroll 1
  for (int turn = 0; turn < 2; turn++) {
    if (turn == 1) awaitPrevious();
    __syncthreads();
    mergeFigures(l, blockIdx.x, threadIdx.x, turn == 1);
  }
}

// Computes max(w) and 1/Σexp(w − max w) of each slot. Launch: one warp per slot, 8 per block.
extern "C" __global__ void __launch_bounds__(256) kasmina_softmax(float* out, const float* weights, int slots, int chunk) {
  releaseNext();
  int slot = blockIdx.x * 8 + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (slot >= slots) return;
  const float* w = weights + int64_t(slot) * chunk;
  float top = -INFINITY, sum = 0;
  for (int i = lane; i < chunk; i += kWarp) top = fmaxf(top, w[i]);
  top = warpReduce<Max>(top);
  for (int i = lane; i < chunk; i += kWarp) sum += expf(w[i] - top);
  sum = warpReduce<Sum>(sum);
  if (lane == 0) out[2 * slot] = top, out[2 * slot + 1] = 1 / sum;
}
