// Sums and maxima. x is [outer, n, inner], and the middle dimension is reduced: y[o, i] = scale·Σ_k
// x[o, k, i], or the maximum. inner = 1 reduces rows, outer = 1 reduces columns, and both reduce
// everything.
//
// Wide reductions take two steps. The middle dimension is divided into parts. The same kernels then
// reduce the float32 results [outer, parts, inner] of the parts, in a launch that may overlap with
// the first one. The division depends only on the shape, and every part is added up in a fixed
// order. Packs are loaded without L1 allocation, which is a few percent faster if other kernels
// have just written them.
#include "common.cuh"
#include "overlap.cuh"

constexpr int kThreads = 256;

// inner = 1. Part p reduces the elements [p·perPart, (p+1)·perPart) of a row; perPart is a multiple
// of kVec unless there is just one part. Launch: one block per part, outer·parts blocks, with
// enough threads for kRowUnroll accesses each, at most kThreads.
constexpr int kRowUnroll = 2;
template <class Op, class Y, class X>
__device__ __forceinline__ void reduceRows(Y* y, const X* x, float scale, int64_t n, int parts, int64_t perPart) {
  constexpr int N = kVec<X>;
  releaseNext();
  awaitPrevious();
  int64_t row = blockIdx.x / parts, lo = blockIdx.x % parts * perPart, hi = min(n, lo + perPart);
  x += row * n;
  float r = Op::identity;
  int64_t i = lo + threadIdx.x;
  if (aligned16(x + lo)) {
    int64_t end = lo + (hi - lo) / N * N;
    i = lo + threadIdx.x * N;
    int apart = blockDim.x * N;
    auto merge = [&](const Pack<X, N>& v) {
#pragma unroll
      for (int j = 0; j < N; j++) r = Op::merge(r, v.get(j));
    };
    for (; i + (kRowUnroll - 1) * apart < end; i += kRowUnroll * apart) {
      Pack<X, N> v[kRowUnroll];
#pragma unroll
      for (int u = 0; u < kRowUnroll; u++) v[u] = loadOnce<N>(x + i + u * apart);
#pragma unroll
      for (int u = 0; u < kRowUnroll; u++) merge(v[u]);
    }
    for (; i < end; i += apart) merge(loadOnce<N>(x + i));
    i = end + threadIdx.x;
  }
  for (; i < hi; i += blockDim.x) r = Op::merge(r, toFloat(x[i]));
  r = blockReduce<Op>(r);
  if (threadIdx.x == 0) y[blockIdx.x] = fromFloat<Y>(scale * r);
}

// inner > 1. The first parts take groups of eight rows in turn, kColumnUnroll groups at once. Each
// of the last `late` parts takes a run of kRun rows after those. Blocks start in order, so the runs
// even out the speed of multiprocessors.
//
// Launch: blocks of 32 by 8 threads, one thread for each N columns of inner and eight to share the
// rows. There are outer·parts·tiles blocks, each for 32·N columns. The launch bounds allow four
// blocks per multiprocessor; otherwise the compiler would save registers and wait for the first two
// loads before starting a third.
constexpr int kColumnUnroll = 8, kRun = 128;

template <class Op, class Y, class X, int N>
__device__ __forceinline__ void reduceColumns(Y* y, const X* x, float scale, int64_t n, int64_t inner, int parts, int late,
                                              int tiles) {
  constexpr int rows = kThreads / kWarp;
  __shared__ float partial[rows][kWarp * N];
  releaseNext();
  awaitPrevious();
  const int result = blockIdx.x / tiles, part = result % parts, turns = parts - late;
  const int64_t first = int64_t(blockIdx.x % tiles) * kWarp * N, col = first + threadIdx.x * N;
  x += result / parts * n * inner + col;
  int64_t k = part * rows, apart = rows * turns, end = n - late * kRun;
  if (part >= turns) k = end + (part - turns) * kRun, apart = rows, end = k + kRun;
  k += threadIdx.y;
  float r[N];
#pragma unroll
  for (int j = 0; j < N; j++) r[j] = Op::identity;
  if (col < inner) {
    auto merge = [&](const Pack<X, N>& v) {
#pragma unroll
      for (int j = 0; j < N; j++) r[j] = Op::merge(r[j], v.get(j));
    };
    auto read = [&](int64_t row) {
      if constexpr (N > 1)
        return loadOnce<N>(x + row * inner);
      else
        return load<1>(x + row * inner);
    };
    for (; k + (kColumnUnroll - 1) * apart < end; k += kColumnUnroll * apart) {
      Pack<X, N> v[kColumnUnroll];
#pragma unroll
      for (int u = 0; u < kColumnUnroll; u++) v[u] = read(k + u * apart);
#pragma unroll
      for (int u = 0; u < kColumnUnroll; u++) merge(v[u]);
    }
#pragma unroll 4
    for (; k < end; k += apart) merge(read(k));
  }
#pragma unroll
  for (int j = 0; j < N; j++) partial[threadIdx.y][threadIdx.x * N + j] = r[j];
  __syncthreads();
  for (int i = threadIdx.y * kWarp + threadIdx.x; i < kWarp * N && first + i < inner; i += kThreads) {
    float v = partial[0][i];
    for (int k = 1; k < rows; k++) v = Op::merge(v, partial[k][i]);
    y[result * inner + first + i] = fromFloat<Y>(scale * v);
  }
}

#define DEFINE_OP(name, Op, Y, X)                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads, 6)                                                   \
      name##_rows_##Y##_##X(Y* y, const X* x, float scale, int64_t n, int parts, int64_t perPart) {           \
    reduceRows<Op>(y, x, scale, n, parts, perPart);                                                           \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads, 4)                                                   \
      name##_columns_##Y##_##X(Y* y, const X* x, float scale, int64_t n, int64_t inner, int parts, int late,  \
                              int tiles) {                                                                    \
    reduceColumns<Op, Y, X, 1>(y, x, scale, n, inner, parts, late, tiles);                                    \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads, 4)                                                   \
      name##_packs_##Y##_##X(Y* y, const X* x, float scale, int64_t n, int64_t inner, int parts, int late,    \
                            int tiles) {                                                                      \
    reduceColumns<Op, Y, X, kVec<X>>(y, x, scale, n, inner, parts, late, tiles);                              \
  }
#define DEFINE(Y, X)          \
  DEFINE_OP(sum, Sum, Y, X)   \
  DEFINE_OP(max, Max, Y, X)
DEFINE(f32, f32)
DEFINE(f32, bf16)
DEFINE(f32, f16)
DEFINE(bf16, bf16)
DEFINE(bf16, f32)
DEFINE(f16, f16)
DEFINE(f16, f32)
#undef DEFINE
