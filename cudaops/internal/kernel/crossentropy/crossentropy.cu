// Cross-entropy over the rows of logits [rows, v], with integer targets. A row with a negative
// target does not count.
//
//   m[r] = max_i x[r, i],  l[r] = Σ_i exp(x[r, i] − m[r])
//   loss[r] = m[r] − x[r, target] + log l[r],  mean = Σ loss / count
//   dx[r, i] = scale·(exp(x[r, i] − m[r])/l[r] − [i = target]),  scale = gradient of the mean / count
//
// The normalizer (m, l) of a row is two numbers because m + log l would be inexact: with logits
// near 10⁶ it would be off by up to 0.03, and probabilities would be wrong by 3%. l is relative to
// m as computed by Shifted<T>.
//
// classify computes the loss and the in-place gradient for the rows it is given, so that a model's
// head can process its logits in chunks of rows. A block handles one row. If the row fits, it stays
// in shared memory for the second pass, so that memory is read and written once. Otherwise the
// second pass finds it in L2. A target of v or more makes the loss NaN.
#include "rows.cuh"

// gradient replaces the logits i, i+1, ... by their gradients.
template <class T, int N>
__device__ __forceinline__ void gradient(Pack<T, N>& p, int i, float2 normalizer, int64_t target, float scale) {
  Pack<T, N> logits = p;
  Shifted<T> e(normalizer.x);
  const float share = scale / normalizer.y;
#pragma unroll
  for (int j = 0; j < N; j++) p.set(j, share * e.exp(p.get(j)));
  if (target < i || target >= i + N) return;
#pragma unroll
  for (int j = 0; j < N; j++)
    if (i + j == target) p.set(j, share * (e.exp(logits.get(j)) - normalizer.y));
}

template <class T> __device__ __forceinline__ void zero(T* row, int v) {
  forRow(row, v, [&](int i, auto p) {
    p = {};
    store(row + i, p);
  });
}

struct Row {
  int64_t target;
  float at;  // the target's logit
};

template <class T> __device__ __forceinline__ Row rowOf(const T* row, int64_t target, int v) {
  return {target, target < 0 ? 0.0f : target < v ? toFloat(row[target]) : NAN};
}

// keep writes the row's loss, which is 0 for a row without a target, and its normalizer.
template <class T>
__device__ __forceinline__ void keep(float* losses, float2* normalizers, const RowSum<T>& s, const Row& r) {
  if (threadIdx.x != 0) return;
  bool counts = r.target >= 0;
  losses[blockIdx.x] = counts ? s.max - r.at + s.log() : 0.0f;
  if (normalizers) normalizers[blockIdx.x] = counts ? make_float2(s.max, s.sum) : make_float2(0, 1);
}

// The launches below use one block per row. normalizers and grad may be null. The gradient is
// scaled by scale[0]·(grad ? grad[0] : 1).

// The forward pass only.
template <class T>
__device__ __forceinline__ RowSum<T> classifyForward(const T* row, float* losses, float2* normalizers, const Row& r, int v) {
  RowSum<T> s;
  if (r.target >= 0) {
    forRow(row, v, [&](int, auto p) { s.add(p); });
    s.reduce();
  }
  keep(losses, normalizers, s, r);
  return s;
}

template <class T>
__device__ __forceinline__ void classify(T* logits, float* losses, float2* normalizers, const int64_t* targets,
                                         const float* scale, const float* grad, int v) {
  T* row = logits + int64_t(blockIdx.x) * v;
  Row r = rowOf(row, targets[blockIdx.x], v);
  RowSum<T> s = classifyForward(row, losses, normalizers, r, v);
  if (r.target < 0) return zero(row, v);
  const float2 normalizer = make_float2(s.max, s.sum);
  float g = scale[0] * (grad ? grad[0] : 1.0f);
  forRow(row, v, [&](int i, auto p) {
    gradient(p, i, normalizer, r.target, g);
    store(row + i, p);
  });
}

// classify for rows that are aligned to 16 bytes. Dynamic shared memory: a row. Each thread copies
// the elements that it will read itself, in kParts portions, and processes the first portion while
// the rest is in flight. The row's target is loaded at the same time.
template <class T>
__device__ __forceinline__ void classifyShared(T* logits, float* losses, float2* normalizers, const int64_t* targets,
                                               const float* scale, const float* grad, int v) {
  constexpr int N = kVec<T>, kParts = 4;
  extern __shared__ uint4 shared[];
  auto* held = reinterpret_cast<Pack<T, N>*>(shared);
  T* row = logits + int64_t(blockIdx.x) * v;
  int packs = v / N, round = kParts * blockDim.x, portion = (packs + round - 1) / round * blockDim.x;
  auto copy = [&](int part) {
    for (int i = part * portion + threadIdx.x; i < min(packs, (part + 1) * portion); i += blockDim.x)
      copyAsync(held + i, row + i * N, true);
    commitAsync();
  };
  int64_t target = targets[blockIdx.x];
  copy(0);
  if (target < 0) {
    keep(losses, normalizers, RowSum<T>(), Row{-1, 0});
    awaitAsync<0>();
    return zero(row, v);
  }
#pragma unroll
  for (int part = 1; part < kParts; part++) copy(part);
  Row r = rowOf(row, target, v);
  RowSum<T> s;
  auto add = [&](int part) {
    for (int i = part * portion + threadIdx.x; i < min(packs, (part + 1) * portion); i += blockDim.x)
      s.add(held[i]);
  };
  awaitAsync<3>(), add(0);
  awaitAsync<2>(), add(1);
  awaitAsync<1>(), add(2);
  awaitAsync<0>(), add(3);
  s.reduce();
  keep(losses, normalizers, s, r);
  const float2 normalizer = make_float2(s.max, s.sum);
  float g = scale[0] * (grad ? grad[0] : 1.0f);
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack<T, N> p = held[i];
    gradient(p, i * N, normalizer, r.target, g);
    store(row + i * N, p);
  }
}

// The backward pass only, from the normalizers. out may be logits.
template <class T>
__device__ __forceinline__ void classifyBackward(T* out, const T* logits, const float2* normalizers, const int64_t* targets,
                                                 const float* scale, const float* grad, int v) {
  int64_t r = blockIdx.x, target = targets[r];
  out += r * v, logits += r * v;
  const float2 normalizer = normalizers[r];
  float g = scale[0] * (grad ? grad[0] : 1.0f);
  bool together = aligned16(out);
  forRow(logits, v, [&](int i, auto p) {
    if (target < 0)
      p = {};
    else
      gradient(p, i, normalizer, target, g);
    put(out + i, p, together);
  });
}

#define DEFINE(T)                                                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                         \
      cross_entropy_forward_##T(const T* logits, float* losses, float2* normalizers, const int64_t* targets, int v) { \
    const T* row = logits + int64_t(blockIdx.x) * v;                                                             \
    classifyForward(row, losses, normalizers, rowOf(row, targets[blockIdx.x], v), v);                            \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                      \
      cross_entropy_##T(T* logits, float* losses, float2* normalizers, const int64_t* targets,                   \
                        const float* scale, const float* grad, int v) {                                          \
    classify(logits, losses, normalizers, targets, scale, grad, v);                                              \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                      \
      cross_entropy_shared_##T(T* logits, float* losses, float2* normalizers, const int64_t* targets,            \
                               const float* scale, const float* grad, int v) {                                   \
    classifyShared(logits, losses, normalizers, targets, scale, grad, v);                                        \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                      \
      cross_entropy_backward_##T(T* out, const T* logits, const float2* normalizers, const int64_t* targets,     \
                                 const float* scale, const float* grad, int v) {                                 \
    classifyBackward(out, logits, normalizers, targets, scale, grad, v);                                         \
  }
FOR_STORAGE_TYPES(DEFINE)

// sumRows returns the block's sum of f(r), with each thread adding its rows in order. A thread has
// sixteen loads in flight, since a single block could not hide the latency otherwise.
template <class F> __device__ __forceinline__ float sumRows(int64_t rows, F f) {
  constexpr int kBatch = 16;
  float sum = 0;
  for (int64_t first = threadIdx.x; first < rows; first += kBatch * kThreads) {
    float x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) x[i] = first + i * kThreads < rows ? f(first + i * kThreads) : 0.0f;
#pragma unroll
    for (int i = 0; i < kBatch; i++) sum += x[i];
  }
  return blockReduce<Sum>(sum);
}

// scale[0] = 1 / number of targets that are not negative. The counts are whole numbers, exact below
// 2²⁴ per thread. Launch: one block.
extern "C" __global__ void __launch_bounds__(kThreads)
    cross_entropy_scale(float* scale, const int64_t* targets, int64_t rows) {
  float count = sumRows(rows, [&](int64_t r) { return targets[r] >= 0 ? 1.0f : 0.0f; });
  if (threadIdx.x == 0) scale[0] = 1.0f / count;
}

// mean[0] = scale[0]·Σ losses. Launch: one block.
extern "C" __global__ void __launch_bounds__(kThreads)
    cross_entropy_mean(float* mean, const float* losses, const float* scale, int64_t rows) {
  float sum = sumRows(rows, [&](int64_t r) { return losses[r]; });
  if (threadIdx.x == 0) mean[0] = sum * scale[0];
}
