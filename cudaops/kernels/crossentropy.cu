// Cross-entropy over the rows of logits [rows, v], with int targets; a row with a target below 0 does not count.
//
//   lse[r] = log Σ_i exp(x[r, i]),  loss[r] = lse[r] − x[r, target],  mean = Σ loss / count
//   dx[r, i] = scale·(exp(x[r, i] − lse[r]) − [i = target]),  scale = gradient of the mean / count
//
// classify does both, forward and in-place backward, for the rows that are there, so that a model's head can go through its
// logits a chunk of rows at a time. A block takes a row: the first pass keeps a running maximum and sum, the second finds
// the row in L2. A target of v or more makes its row's loss NaN.
#include "common.cuh"

// Two blocks fit on a multiprocessor: while one reduces the other reads, and the rows of all of them fit in L2.
constexpr int kThreads = 512;

// forRow calls f(i, pack) for the packs of a row of v elements, one element a pack unless the row is aligned for more.
// The thread's accesses lie kThreads packs apart, U of them in flight.
template <class T, class F> __device__ __forceinline__ void forRow(const T* row, int v, F f) {
  constexpr int N = kVec<T>, U = 4;
  int done = 0;
  if (aligned16(row)) {
    int i = threadIdx.x * N;
    for (; i + (U - 1) * kThreads * N + N <= v; i += U * kThreads * N) {
      Pack<T, N> p[U];
#pragma unroll
      for (int u = 0; u < U; u++) p[u] = load<N>(row + i + u * kThreads * N);
#pragma unroll
      for (int u = 0; u < U; u++) f(i + u * kThreads * N, p[u]);
    }
    for (; i + N <= v; i += kThreads * N) f(i, load<N>(row + i));
    done = v / N * N;
  }
  for (int i = done + threadIdx.x; i < v; i += kThreads) f(i, load<1>(row + i));
}

struct RowSum {
  float max, sum;
};

// rowSum is max and Σ exp(x − max) over a row, given to all threads. Each keeps a running maximum and sum.
template <class T> __device__ __forceinline__ RowSum rowSum(const T* row, int v) {
  RowSum r = {-INFINITY, 0};
  forRow(row, v, [&](int, auto p) {
    constexpr int N = sizeof(p) / sizeof(T);
    float m = p.get(0);
#pragma unroll
    for (int j = 1; j < N; j++) m = Max::merge(m, p.get(j));
    if (m > r.max || m != m) {
      r.sum *= expf(r.max - m);
      r.max = m;
    }
    if (r.max == -INFINITY) return;
#pragma unroll
    for (int j = 0; j < N; j++) r.sum += expf(p.get(j) - r.max);
  });
  float max = blockReduce<Max>(r.max);
  float sum = blockReduce<Sum>(r.max == -INFINITY ? 0.0f : r.sum * expf(r.max - max));
  return {max, sum};
}

template <class T> __device__ __forceinline__ void gradient(T* row, int v, float lse, int64_t target, float scale) {
  forRow(row, v, [&](int i, auto p) {
    constexpr int N = sizeof(p) / sizeof(T);
#pragma unroll
    for (int j = 0; j < N; j++) p.set(j, scale * (expf(p.get(j) - lse) - (i + j == target)));
    store(row + i, p);
  });
}

template <class T> __device__ __forceinline__ void zero(T* row, int v) {
  forRow(row, v, [&](int i, auto p) {
    constexpr int N = sizeof(p) / sizeof(T);
#pragma unroll
    for (int j = 0; j < N; j++) p.set(j, 0.0f);
    store(row + i, p);
  });
}

__device__ __forceinline__ int64_t targetOf(const void* targets, int bytes, int64_t row) {
  return bytes == 8 ? static_cast<const int64_t*>(targets)[row] : static_cast<const int32_t*>(targets)[row];
}

// Any of lse and scale may be null: lse is then not kept, without scale there is no backward pass. The gradient is scaled by
// scale[0]·(grad ? grad[0] : 1). Launch: a block a row.
template <class T>
__device__ __forceinline__ void classify(T* logits, float* losses, float* lse, const void* targets, int targetBytes,
                                         const float* scale, const float* grad, int v) {
  int64_t r = blockIdx.x, target = targetOf(targets, targetBytes, r);
  T* row = logits + r * v;
  if (target < 0) {
    if (threadIdx.x == 0) {
      losses[r] = 0;
      if (lse) lse[r] = 0;
    }
    if (scale) zero(row, v);
    return;
  }
  float at = target < v ? toFloat(row[target]) : NAN;
  RowSum s = rowSum(row, v);
  float logSum = logf(s.sum);
  if (threadIdx.x == 0) {
    losses[r] = s.max - at + logSum;
    if (lse) lse[r] = s.max + logSum;
  }
  if (scale) gradient(row, v, s.max + logSum, target, scale[0] * (grad ? grad[0] : 1.0f));
}

// The backward pass alone, from lse. out may be logits. Launch: a block a row.
template <class T>
__device__ __forceinline__ void classifyBackward(T* out, const T* logits, const float* lse, const void* targets,
                                                 int targetBytes, const float* scale, const float* grad, int v) {
  int64_t r = blockIdx.x, target = targetOf(targets, targetBytes, r);
  out += r * v, logits += r * v;
  float l = lse[r], g = scale[0] * (grad ? grad[0] : 1.0f);
  auto write = [&](int i, auto p) {
    constexpr int N = sizeof(p) / sizeof(T);
#pragma unroll
    for (int j = 0; j < N; j++) p.set(j, target < 0 ? 0.0f : g * (expf(p.get(j) - l) - (i + j == target)));
    if (aligned16(out) || N == 1)
      store(out + i, p);
    else
#pragma unroll
      for (int j = 0; j < N; j++) out[i + j] = p.v[j];
  };
  forRow(logits, v, write);
}

#define DEFINE(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                   \
      cross_entropy_##T(T* logits, float* losses, float* lse, const void* targets, int targetBytes,           \
                        const float* scale, const float* grad, int v) {                                       \
    classify(logits, losses, lse, targets, targetBytes, scale, grad, v);                                      \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                   \
      cross_entropy_backward_##T(T* out, const T* logits, const float* lse, const void* targets,              \
                                 int targetBytes, const float* scale, const float* grad, int v) {             \
    classifyBackward(out, logits, lse, targets, targetBytes, scale, grad, v);                                 \
  }
FOR_STORAGE_TYPES(DEFINE)

// scale[0] = 1 / number of targets of at least 0. Launch: one block.
extern "C" __global__ void __launch_bounds__(kThreads)
    cross_entropy_scale(float* scale, const void* targets, int targetBytes, int64_t rows) {
  float count = 0;  // whole numbers, exact below 2²⁴ a thread
  for (int64_t r = threadIdx.x; r < rows; r += kThreads) count += targetOf(targets, targetBytes, r) >= 0;
  count = blockReduce<Sum>(count);
  if (threadIdx.x == 0) scale[0] = 1.0f / count;
}

// mean[0] = scale[0]·Σ losses. Launch: one block.
extern "C" __global__ void __launch_bounds__(kThreads)
    cross_entropy_mean(float* mean, const float* losses, const float* scale, int64_t rows) {
  float sum = 0;
  for (int64_t r = threadIdx.x; r < rows; r += kThreads) sum += losses[r];
  sum = blockReduce<Sum>(sum);
  if (threadIdx.x == 0) mean[0] = sum * scale[0];
}
