// What the kernels of a Kasmina layer share: its description, a seed's transform as coefficients, and moments.
//
// x is [rows, seeds·chunk], weights [slots, chunk] and scales [slots] in float32. With w the weight row of a seed's slot,
// a its scale and α its blending weight, every built-in kind is one formula per element i of the chunk,
//
//   y[i] = (x·u > thr or unordered ? p : off)·x[i] + r1·x[i−1] + r2·x[i−2] + q
//
//   kind           t(x)                              p                 off     q     r1      r2
//   Residual       x + a·w                           1                         αaw
//   AttentionGate  a·x ⊙ softmax(w)                  1−α + αa·softmax
//   MLPExpansion   a·relu(x ⊙ w), u = w, thr = 0     1−α + αaw         1−α
//   ConvFilter     a·(w0·x[i] + w1·x[i−1] + w2·x[i−2]) 1−α + αa·w0                   αa·w1   αa·w2
//
// so that neighbouring seeds of different kinds and stages do not make a warp diverge. The gradient is its transpose:
// dx[i] = p·g[i] + r1·g[i+1] + r2·g[i+2]. A seed that does not blend keeps the bits of x.
//
// A thread keeps N consecutive columns, which are N/E seeds or part of one, and walks down the rows: coefficients and sums
// stay in registers. Rows are dealt out to lanes (a group of threads that covers all columns) in turn.
#pragma once
#include "common.cuh"

enum Kind : uint32_t { kResidual, kAttentionGate, kMLPExpansion, kConvFilter };

// Layer is the first parameter of every kernel. word holds, of each seed, its kind in bits 0 to 7, whether it blends in bit
// 8 and learns in bit 9, and its slot from bit 16 on; it is 0 for a seed that does neither.
struct Layer {
  const uint32_t* word;
  const float* alpha;      // of the output; in Training, where there is none, 1
  const float *low, *high; // clamp limits of the strict mode
  const float* limit;      // of a row's gradient norm; null for none
  const float *weights, *scales;
  const float* softmax;    // of each slot, max(w) and 1/Σexp(w − max w); null where chunks lie within a thread
  int64_t rows;
  int seeds, chunk;
  float eps;
  float large;             // x beyond it is evaluated scaled down
  int strict;
};

struct Word {
  uint32_t bits;
  __device__ Kind kind() const { return Kind(bits & 0xff); }
  __device__ bool blends() const { return bits >> 8 & 1; }
  __device__ bool learns() const { return bits >> 9 & 1; }
  __device__ bool active() const { return bits >> 8 & 3; }
  __device__ int slot() const { return bits >> 16; }
};

// ---- Seeds ----

// Seed is E consecutive elements of one seed's chunk, from element at on.
template <int E> struct Seed {
  float p[E], q[E], u[E];
  float off, thr, r1, r2, low, high;
  bool blends, strict, neighbours;

  __device__ __forceinline__ void init(const Layer& l, int seed, int at) {
    Word word{l.word[seed]};
    Kind kind = word.kind();
    blends = word.blends();
    strict = l.strict && word.active();
    neighbours = word.active() && kind == kConvFilter;
    low = high = 0;
    if (strict) low = l.low[seed], high = l.high[seed];
#pragma unroll
    for (int j = 0; j < E; j++) p[j] = 1, q[j] = 0, u[j] = 0;
    off = 1, thr = -1, r1 = r2 = 0;
    if (!word.active()) return;
    float alpha = l.alpha[seed], scale = l.scales[word.slot()], keep = 1 - alpha, as = alpha * scale;
    const float* row = l.weights + int64_t(word.slot()) * l.chunk;
    float w[E];
#pragma unroll
    for (int j = 0; j < E; j++) w[j] = row[at + j];
    if (kind == kMLPExpansion) {
      thr = 0, off = keep;
#pragma unroll
      for (int j = 0; j < E; j++) u[j] = w[j];
    }
    if (alpha == 0) {  // whatever t(x) is, NaN included, has no part in the result
      off = 1;
      return;
    }
    if (kind == kResidual) {
#pragma unroll
      for (int j = 0; j < E; j++) q[j] = as * w[j];
    } else if (kind == kAttentionGate) {
      softmaxOf(w, l, word.slot());
#pragma unroll
      for (int j = 0; j < E; j++) p[j] = keep + as * w[j];
    } else if (kind == kMLPExpansion) {
#pragma unroll
      for (int j = 0; j < E; j++) p[j] = keep + as * w[j];
    } else if (kind == kConvFilter) {
#pragma unroll
      for (int j = 0; j < E; j++) p[j] = keep + as * row[0];
      if (l.chunk > 1) r1 = as * row[1];
      if (l.chunk > 2) r2 = as * row[2];
    }
  }

  // softmaxOf replaces weights of a slot by their softmax.
  __device__ static __forceinline__ void softmaxOf(float (&w)[E], const Layer& l, int slot) {
    float top, by;
    if (l.softmax) {
      top = l.softmax[2 * slot], by = l.softmax[2 * slot + 1];
    } else {
      top = w[0];
      float sum = 0;
#pragma unroll
      for (int j = 1; j < E; j++) top = fmaxf(top, w[j]);
#pragma unroll
      for (int j = 0; j < E; j++) sum += expf(w[j] - top);
      by = 1 / sum;
    }
#pragma unroll
    for (int j = 0; j < E; j++) w[j] = expf(w[j] - top) * by;
  }

  __device__ __forceinline__ bool on(float x, int j) const { return !(x * u[j] <= thr); }

  // clamp is what the strict mode does to x; bites is whether the result does not depend on x.
  __device__ __forceinline__ float clamp(float x, float eps) const {
    if (fabsf(x) < eps) x = 0;
    if (x < low) x = low;
    if (x > high) x = high;
    return x;
  }
  __device__ __forceinline__ float input(float x, float eps) const { return strict ? clamp(x, eps) : x; }
  __device__ __forceinline__ bool bites(float x, float eps) const { return fabsf(x) < eps || x < low || x > high; }
};

// addTerm is sum + c·v, where a coefficient of 0 leaves out NaN and Inf too if careful.
template <bool careful> __device__ __forceinline__ float addTerm(float c, float v, float sum) {
  return careful && c == 0 ? sum : fmaf(c, v, sum);
}

// maxNaN is the larger of two numbers, NaN if one is.
__device__ __forceinline__ float maxNaN(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ bool finite(float v) { return fabsf(v) < INFINITY; }

// Int is a number as a type, for lambdas.
template <int n> struct Int { static constexpr int value = n; };

// ---- Memory ----

template <int N, class T> __device__ __forceinline__ Pack<T, N> loadColumns(const T* p) {
  if constexpr (sizeof(T) * N == 16) return loadOnce<N>(p);
  else return load<N>(p);
}

// setPart rounds E numbers into a pack, from element at on.
template <class T, int N, int E> __device__ __forceinline__ void setPart(Pack<T, N>& v, int at, const float (&x)[E]) {
  if constexpr (E % 2 == 0 && sizeof(T) == 2) {
#pragma unroll
    for (int j = 0; j < E; j += 2) {
      if constexpr (sizeof(bf16) == sizeof(T) && __is_same(T, bf16))
        *reinterpret_cast<__nv_bfloat162*>(&v.v[at + j]) = __floats2bfloat162_rn(x[j], x[j + 1]);
      else
        *reinterpret_cast<__half2*>(&v.v[at + j]) = __floats2half2_rn(x[j], x[j + 1]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < E; j++) v.set(at + j, x[j]);
  }
}

// ---- Moments ----

// Running is the moments of numbers seen so far: n of them, with mean k + e and m2 the sum of squared deviations from it.
// Numbers are added in groups, as sums over v − k and (v − k)²: with k next to the mean these keep their precision where
// the numbers share leading digits, and nothing large cancels (Chan, Golub and LeVeque 1979, for a group at a time).
struct Running {
  float k, e = 0, m2 = 0, n = 0;

  __device__ __forceinline__ void add(float s1, float s2, float count) {
    float all = n + count;
    if (!(all > 0)) return;
    float sum = fmaf(n, e, s1), mean = __fdividef(sum, all);
    m2 += fmaf(n * e, e, s2) - sum * mean;
    float next = k + mean;
    e = mean - (next - k), k = next, n = all;
  }
};

// Moments are the same in float64, for merging.
struct Moments {
  double n = 0, mean = 0, m2 = 0;

  __device__ __forceinline__ void merge(const Moments& o) {
    if (o.n == 0) return;
    double all = n + o.n, d = o.mean - mean, share = o.n / all;
    mean += d * share;
    m2 += o.m2 + d * d * n * share;
    n = all;
  }
  __device__ __forceinline__ double variance() const { return n > 0 ? (m2 < INFINITY ? fmax(m2, 0.0) / n : INFINITY) : 0; }
  __device__ __forceinline__ double norm() const { return sqrt(variance() * n + n * mean * mean); }
};

// Partials are what the lanes leave of their rows: arrays [figure, lane, unit], where a unit is the E elements of a Seed.
struct Partials {
  float* base;
  int64_t stride; // lanes·units
  int64_t at;
  __device__ __forceinline__ float& operator[](int figure) const { return base[figure * stride + at]; }

  __device__ __forceinline__ void put(int figure, const Running& r) const {
    (*this)[figure] = r.k, (*this)[figure + 1] = r.e, (*this)[figure + 2] = r.m2, (*this)[figure + 3] = r.n;
  }
  __device__ __forceinline__ Moments moments(int figure) const {
    return {(*this)[figure + 3], double((*this)[figure]) + (*this)[figure + 1], (*this)[figure + 2]};
  }
};

// Shapes: what a thread holds. FOR_SHAPES(DEFINE, T) is DEFINE(name, T, N, E, whole) for each; whole is whether E is the
// chunk. quad: chunks of 4. part: chunks of whole accesses. single: any chunk, element by element.
#define FOR_SHAPES(DEFINE, T)       \
  DEFINE(quad, T, kVec<T>, 4, true) \
  DEFINE(part, T, kVec<T>, kVec<T>, false) \
  DEFINE(single, T, 1, 1, false)
