// Matrix products with a single row. Reading the weights is the bottleneck.
//
//   y[n] = Σ_k x[k]·w[n, k] + c[n]                       product
//   h[n] = gate(Σ_k x[k]·w[n, k]) · Σ_k x[k]·w[f+n, k]    gated
//
// The gate is SiLU or the tanh approximation of GELU; the first f rows of w are the gate and the
// next f rows the up projection.
//
// The normed kernels normalize x first:  x[k] ← x[k]·norm[k] / sqrt(Σ_j x[j]²/depth + eps). Each warp
// sums the squares of x along with its products and divides at the end, so that no separate pass over x is needed.
//
// Each warp computes one row of w, or one row from each half, with kDeep 16-byte loads per lane in
// flight. Sums are float32, and their order depends only on the shape.
#include "common.cuh"
#include "decode_product.cuh"
#include "element.cuh"
#include "gate.cuh"
#include "overlap.cuh"

constexpr int kWarps = 4, kDeep = 8;

// Rows holds a lane's kDeep outstanding loads, divided among R rows of w. The rows start `apart` elements from each
// other. Unless Full is set, a row may end before the last of these loads.
template <class T, int R, int N, bool Full> struct Rows {
  static constexpr int kStep = kWarp * N, kEach = kDeep / R, kAll = kEach * kStep;
  Pack<T, N> row[R][kEach];

  // load starts the loads for columns at, at + kStep, ... below depth.
  __device__ __forceinline__ void load(const T* w, int64_t apart, int at, int depth) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int u = 0; u < kEach; u++) {
        if (!Full && at + u * kStep >= depth) continue;
        if constexpr (N > 1)
          row[r][u] = loadOnce<N>(w + r * apart + at + u * kStep);
        else
          row[r][u] = ::load<N>(w + r * apart + at + u * kStep);
      }
  }

  // add adds the products of the loaded elements with x to the sum of each row and, if Normed, the squares of x to squares.
  template <bool Normed>
  __device__ __forceinline__ void add(float (&sum)[R], float& squares, const T* x, const float* norm, int at, int depth) const {
    // A full row has no branches, so that several loads of x are in flight at the same time.
    Pack<T, N> v[kEach];
    if constexpr (Full)
#pragma unroll
      for (int u = 0; u < kEach; u++) v[u] = ::load<N>(x + at + u * kStep);
#pragma unroll
    for (int u = 0; u < kEach; u++) {
      if constexpr (!Full) {
        if (at + u * kStep >= depth) break;
        v[u] = ::load<N>(x + at + u * kStep);
      }
      Pack<float, N> factors;
      if constexpr (Normed) factors = ::load<N>(norm + at + u * kStep);
#pragma unroll
      for (int i = 0; i < N; i++) {
        float e = element(v[u], i);
        if constexpr (Normed) squares += e * e, e *= factors.v[i];
#pragma unroll
        for (int r = 0; r < R; r++) sum[r] += e * element(row[r][u], i);
      }
    }
  }
};

// multiply computes, for each of the n rows of the result, the products of x with R rows of w that are `apart` rows
// from each other. One lane passes them to put(row, sums, added), where added is the row's element of c, or 0.
// Launch: kWarps warps per block, one warp per row.
template <class T, int N, int R, bool Normed, bool Full, class Put>
__device__ __forceinline__ void multiply(const Product& a, int apart, Put put) {
  using Loads = Rows<T, R, N, Full>;
  const int r = blockIdx.x * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp, depth = a.depth;
  const int64_t between = int64_t(apart) * depth;
  const T *x = static_cast<const T*>(a.x), *w = static_cast<const T*>(a.w) + int64_t(r) * depth;
  const bool valid = r < a.n;
  int at = lane * N;
  Loads rows;
  if (a.steady && valid) rows.load(w, between, at, depth);
  if (a.early) releaseNext();
  awaitPrevious();
  if (!a.early) releaseNext();
  if (!valid) return;

  const float added = a.c && lane == 0 ? toFloat(static_cast<const T*>(a.c)[r]) : 0.0f;
  float sum[R] = {}, squares = 0;
  if (a.steady) {
    rows.template add<Normed>(sum, squares, x, a.norm, at, depth);
    at += Loads::kAll;
  }
  for (; at < depth; at += Loads::kAll) {
    rows.load(w, between, at, depth);
    rows.template add<Normed>(sum, squares, x, a.norm, at, depth);
  }

  __syncwarp();  // lanes past the end of a row arrive first
#pragma unroll
  for (int i = 0; i < R; i++) sum[i] = warpReduce<Sum>(sum[i]);
  if constexpr (Normed) {
    const float scale = rsqrtf(warpReduce<Sum>(squares) / depth + a.eps);
#pragma unroll
    for (int i = 0; i < R; i++) sum[i] *= scale;
  }
  if (lane == 0) put(r, sum, added);
}

template <class T, int N, bool Normed, bool Full> __device__ __forceinline__ void product(const Product& a) {
  multiply<T, N, 1, Normed, Full>(a, 0, [&](int r, const float (&sum)[1], float added) {
    static_cast<T*>(a.y)[r] = fromFloat<T>(sum[0] + added);
  });
}

template <class T, int N, bool Normed, bool Full> __device__ __forceinline__ void gated(const Product& a) {
  multiply<T, N, 2, Normed, Full>(a, a.n, [&](int r, const float (&sum)[2], float) {
    static_cast<T*>(a.y)[r] = fromFloat<T>(a.isGELU ? gateMul<T, true>(sum[0], sum[1]) : gateMul<T, false>(sum[0], sum[1]));
  });
}

#define DEFINE_KERNEL(T, op, name, ...) \
  extern "C" __global__ void __launch_bounds__(kWarps * kWarp) decode_##op##_##name##_##T(Product a) { op<T, __VA_ARGS__>(a); }
#define DEFINE_ACCESS(T, name, N, Full)                                                                   \
  DEFINE_KERNEL(T, product, name, N, false, Full) DEFINE_KERNEL(T, product, normed_##name, N, true, Full) \
  DEFINE_KERNEL(T, gated, name, N, false, Full) DEFINE_KERNEL(T, gated, normed_##name, N, true, Full)
// The `full` kernels require that the depth is a multiple of kDeep packs per lane.
#define DEFINE(T)                            \
  DEFINE_ACCESS(T, full, kVec<T>, true)      \
  DEFINE_ACCESS(T, packs, kVec<T>, false)    \
  DEFINE_ACCESS(T, elements, 1, false)
FOR_STORAGE_TYPES(DEFINE)
