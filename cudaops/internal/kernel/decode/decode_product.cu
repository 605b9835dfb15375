// Matrix products with a single row. Reading the weights is the bottleneck.
//
//   y[n] = Σ_k x[k]·w[n, k] + c[n]                       product
//   h[n] = gate(Σ_k x[k]·w[n, k]) · Σ_k x[k]·w[f+n, k]    gated
//
// The gate is SiLU or the tanh approximation of GELU; the first f rows of w are the gate and the
// next f rows the up projection.
//
// Each warp computes one row of w, or one row from each half, with kDeep 16-byte loads per lane in
// flight. Sums are float32, and their order depends only on the shape.
#include "common.cuh"
#include "gate.cuh"
#include "overlap.cuh"

constexpr int kWarps = 4, kDeep = 8;

// Rows holds kDeep loads of this lane in flight, for R rows of w that are `apart` elements apart.
template <class T, int R, int N> struct Rows {
  static constexpr int kStep = kWarp * N, kEach = kDeep / R;
  Pack<T, N> row[R][kEach];
  __device__ __forceinline__ void load(const T* w, int64_t apart) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int u = 0; u < kEach; u++)
        if constexpr (N > 1)
          row[r][u] = loadOnce<N>(w + r * apart + u * kStep);
        else
          row[r][u] = ::load<N>(w + r * apart + u * kStep);
  }
  __device__ __forceinline__ void add(float (&sum)[R], const T* x) const {
#pragma unroll
    for (int u = 0; u < kEach; u++) {
      const Pack<T, N> v = ::load<N>(x + u * kStep);
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int i = 0; i < N; i++) sum[r] += v.get(i) * row[r][u].get(i);
    }
  }
};

// sums gives every lane the products of x with R rows of w, reading N elements at a time. If steady
// is set, w was complete before the preceding kernel began, and the first loads don't wait for that
// kernel to end.
template <int R, int N, class T>
__device__ __forceinline__ void sums(float (&sum)[R], const T* x, const T* w, int64_t apart, int depth, bool steady) {
  using Loads = Rows<T, R, N>;
  constexpr int step = Loads::kStep, all = Loads::kEach * step;
  int at = threadIdx.x % kWarp * N;
  Loads rows;
  const bool ahead = steady && at + all - step < depth;
  if (ahead) rows.load(w + at, apart);
  awaitPrevious();
  releaseNext();  // after the wait, so every kernel but the preceding one has finished when the next one starts
  if (ahead) {
    rows.add(sum, x + at);
    at += all;
  }
  for (; at + all - step < depth; at += all) {
    rows.load(w + at, apart);
    rows.add(sum, x + at);
  }
  for (; at < depth; at += step) {
    const Pack<T, N> v = load<N>(x + at);
#pragma unroll
    for (int r = 0; r < R; r++) {
      const Pack<T, N> row = load<N>(w + r * apart + at);
#pragma unroll
      for (int i = 0; i < N; i++) sum[r] += v.get(i) * row.get(i);
    }
  }
#pragma unroll
  for (int r = 0; r < R; r++) sum[r] = warpReduce<Sum>(sum[r]);
}

__device__ __forceinline__ int rowOf() { return blockIdx.x * kWarps + threadIdx.x / kWarp; }

// c may be null, and y may be c. Launch: kWarps warps per block, one warp for each of the n rows of
// w.
template <class T, int N> __device__ __forceinline__ void product(T* y, const T* x, const T* w, const T* c, int n, int depth, bool steady) {
  const int r = rowOf();
  if (r >= n) return;
  float sum[1] = {0};
  sums<1, N>(sum, x, w + int64_t(r) * depth, 0, depth, steady);
  if (threadIdx.x % kWarp == 0) y[r] = fromFloat<T>(c ? sum[0] + toFloat(c[r]) : sum[0]);
}

template <class T, int N> __device__ __forceinline__ void gated(T* h, const T* x, const T* w, int f, int depth, int isGELU, bool steady) {
  const int r = rowOf();
  if (r >= f) return;
  float sum[2] = {0, 0};
  sums<2, N>(sum, x, w + int64_t(r) * depth, int64_t(f) * depth, depth, steady);
  if (threadIdx.x % kWarp == 0) h[r] = fromFloat<T>(isGELU ? gateMul<T, true>(sum[0], sum[1]) : gateMul<T, false>(sum[0], sum[1]));
}

#define DEFINE_ACCESS(T, name, N)                                                                                    \
  extern "C" __global__ void __launch_bounds__(kWarps * kWarp)                                                       \
      decode_product_##name##_##T(T* y, const T* x, const T* w, const T* c, int n, int depth, int steady) {                    \
    product<T, N>(y, x, w, c, n, depth, steady);                                                                             \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kWarps * kWarp)                                                       \
      decode_gated_##name##_##T(T* h, const T* x, const T* w, int f, int depth, int isGELU, int steady) {                      \
    gated<T, N>(h, x, w, f, depth, isGELU, steady);                                                                          \
  }
#define DEFINE(T) DEFINE_ACCESS(T, packs, kVec<T>) DEFINE_ACCESS(T, elements, 1)
FOR_STORAGE_TYPES(DEFINE)
