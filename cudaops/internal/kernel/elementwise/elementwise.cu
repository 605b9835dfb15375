// Elementwise arithmetic:
//
//   unary:  y = f(a, p), where p is a number     binary:  y = f(a, b)     cast:  y = a in y's type
//   axpby:  y = alpha·x + beta·y
//
// An operand of binary is indexed as operand[(i / repeat) % period]. This covers a whole array
// (repeat 1, period n), a scalar (period 1), a row that applies to every row (period columns), and
// a column that applies to every column (repeat columns, period rows).
//
// Launch: blocks of 256 threads. Each thread has kUnroll accesses of 16 bytes that are a block's
// width apart, so that a warp's access is contiguous and several are in flight; binary functions
// have one access per operand. A block works element by element if a pointer is not a multiple of
// 16 bytes, at the ragged end, and for the functions that are compiled for size. Separate kernels
// handle a row that applies to every row.
#include "common.cuh"

// F(name, formula), in the order of the host's UnaryOp. The first list is compiled for speed, the second for size.
#define FAST_UNARY(F)                                                  \
  F(Identity, a)                                                       \
  F(Neg, -a)                                                           \
  F(Abs, fabsf(a))                                                     \
  F(Square, a * a)                                                     \
  F(Sqrt, sqrtf(a))                                                    \
  F(InverseSqrt, 1.0f / sqrtf(a))                                      \
  F(Inverse, 1.0f / a)                                                 \
  F(Exp, expf(a))                                                      \
  F(Log, logf(a))                                                      \
  F(Tanh, tanhf(a))                                                    \
  F(Sigmoid, sigmoid(a))                                               \
  F(AddScalar, a + p)                                                  \
  F(MulScalar, a * p)                                                  \
  F(GELU, a * sigmoid(geluExponent(a)))
#define SMALL_UNARY(F)                                                 \
  F(SubFrom, p - a)                                                    \
  F(DivideInto, p / a)                                                 \
  F(PowScalar, powf(a, p))                                             \
  F(PowOf, powf(p, a))                                                 \
  F(Sign, a > 0 ? 1.0f : a < 0 ? -1.0f : a)                            \
  F(Step, a > 0 ? 1.0f : 0.0f)                                         \
  F(Cube, a * a * a)                                                   \
  F(Expm1, expm1f(a))                                                  \
  F(Log1p, log1pf(a))                                                  \
  F(Log2, log2f(a))                                                    \
  F(Sin, sinf(a))                                                      \
  F(Cos, cosf(a))                                                      \
  F(Softplus, fmaxf(a, 0.0f) + log1pf(expf(-fabsf(a))))                \
  F(Ceil, ceilf(a))                                                    \
  F(Floor, floorf(a))

// F(name, formula), in the order of the host's BinaryOp.
#define FAST_BINARY(F)                                                 \
  F(Add, a + b)                                                        \
  F(Sub, a - b)                                                        \
  F(Mul, a* b)                                                         \
  F(Div, a / b)                                                        \
  F(GELUGradient, a* geluSlope(b))
#define SMALL_BINARY(F)                                                \
  F(Pow, powf(a, b))                                                   \
  F(Maximum, a > b || a != a ? a : b)                                  \
  F(Minimum, a < b || a != a ? a : b)                                  \
  F(Less, a < b)                                                       \
  F(LessEqual, a <= b)                                                 \
  F(Greater, a > b)                                                    \
  F(GreaterEqual, a >= b)                                              \
  F(Equal, a == b)                                                     \
  F(NotEqual, a != b)

#define NAME(name, formula) name,
enum Unary { FAST_UNARY(NAME) SMALL_UNARY(NAME) };
enum Binary { FAST_BINARY(NAME) SMALL_BINARY(NAME) };

__device__ __forceinline__ float sigmoid(float a) { return 1.0f / (1.0f + expf(-a)); }

// The tanh approximation of GELU is a·σ(z) with z = k·a·(1 + c·a²), k = 2√(2/π). From |a| = 10 on,
// σ(z) is 0 or 1 and does not change. The factor of σ may therefore be bounded, which avoids NaN
// from 0·∞.
constexpr float kGELUScale = 1.595769121605731f, kGELUCubic = 0.044715f;
__device__ __forceinline__ float geluBounded(float a) { return fminf(fmaxf(a, -100.0f), 100.0f); }
__device__ __forceinline__ float geluExponent(float a) {
  const float b = geluBounded(a);
  return kGELUScale * a * (1 + kGELUCubic * b * b);
}
__device__ __forceinline__ float geluSlope(float a) {
  const float z = geluExponent(a), b = geluBounded(a);
  return sigmoid(z) * (1 + b * sigmoid(-z) * kGELUScale * (1 + 3 * kGELUCubic * b * b));
}

#define CASE(name, formula) \
  case name: return formula;

__device__ __forceinline__ float unary(int op, float a, float p) {
  switch (op) { FAST_UNARY(CASE) SMALL_UNARY(CASE) }
  return a;
}

__device__ __forceinline__ float binary(int op, float a, float b) {
  switch (op) { FAST_BINARY(CASE) SMALL_BINARY(CASE) }
  return a;
}

constexpr int kThreads = 256, kUnroll = 2;

// mapPacks calls read for each of the thread's packs of N elements, and then write(i, result). It
// returns false without doing anything if the block's span exceeds the n elements.
template <int N, int unroll = kUnroll, class Read, class Write>
__device__ __forceinline__ bool mapPacks(int64_t n, Read read, Write write) {
  constexpr int64_t span = int64_t(unroll) * kThreads * N;
  if ((blockIdx.x + 1) * span > n) return false;
  int64_t i = blockIdx.x * span + threadIdx.x * N;
  decltype(read(i)) got[unroll];
#pragma unroll
  for (int u = 0; u < unroll; u++) got[u] = read(i + u * kThreads * N);
#pragma unroll
  for (int u = 0; u < unroll; u++) write(i + u * kThreads * N, got[u]);
  return true;
}

// mapElements calls f for each of the n elements in the block's span.
template <int N, int unroll = kUnroll, class F> __device__ __forceinline__ void mapElements(int64_t n, F f) {
  constexpr int64_t span = int64_t(unroll) * kThreads * N;
  int64_t end = min(n, (blockIdx.x + 1) * span);
#pragma unroll 1
  for (int64_t i = blockIdx.x * span + threadIdx.x; i < end; i += kThreads) f(i);
}

// ---- unary ----

template <int op, class T> __device__ __forceinline__ bool fastUnary(T* y, const T* x, float p, int64_t n) {
  constexpr int N = kVec<T>;
  return mapPacks<N>(
      n, [&](int64_t i) { return load<N>(x + i); },
      [&](int64_t i, Pack<T, N> v) {
#pragma unroll
        for (int j = 0; j < N; j++) v.set(j, unary(op, v.get(j), p));
        store(y + i, v);
      });
}

template <class T>
__device__ __forceinline__ void runUnary(T* y, const T* x, int op, float p, int64_t n) {
  bool done = false;
#define RUN(name, formula) \
  case name: done = fastUnary<name>(y, x, p, n); break;
  if (aligned16(y, x)) switch (op) { FAST_UNARY(RUN) }
#undef RUN
  if (!done) mapElements<kVec<T>>(n, [&](int64_t i) { y[i] = fromFloat<T>(unary(op, toFloat(x[i]), p)); });
}

#define DEFINE(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      unary_##T(T* y, const T* x, int op, float p, int64_t n) {                                               \
    runUnary(y, x, op, p, n);                                                                                 \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE

// ---- binary ----

// Operand maps element i of the result to an element of the operand.
template <class T> struct Operand {
  const T* p;
  int64_t repeat, period;

  // The cost of indexing is mostly the divisions, especially 64-bit ones.
  __device__ __forceinline__ int64_t at(int64_t i, int64_t n) const {
    if (period == 1) return 0;
    if (n < (int64_t(1) << 31)) {
      unsigned j = repeat == 1 ? unsigned(i) : unsigned(i) / unsigned(repeat);
      return period == n ? j : j % unsigned(period);
    }
    return i / repeat % period;
  }
  // packs reports whether N elements of the result use N adjacent, aligned elements of the operand,
  // or a single one. The answer is the same for all threads.
  template <int N> __device__ __forceinline__ bool packs() const {
    return one<N>() || (repeat == 1 && period % N == 0 && aligned16(p));
  }
  template <int N> __device__ __forceinline__ bool one() const { return period == 1 || repeat % N == 0; }
  template <int N> __device__ __forceinline__ Pack<T, N> get(int64_t i, int64_t n) const {
    if (!one<N>()) return load<N>(p + at(i, n));
    Pack<T, N> v;
    T x = p[at(i, n)];
#pragma unroll
    for (int j = 0; j < N; j++) v.v[j] = x;
    return v;
  }
};

template <class T> struct Two {
  Pack<T, kVec<T>> a, b;
};

template <int op, class T, class Read> __device__ __forceinline__ bool fastBinary(T* y, int64_t n, Read read) {
  return mapPacks<kVec<T>, 1>(n, read, [&](int64_t i, Two<T> v) {
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) v.a.set(j, binary(op, v.a.get(j), v.b.get(j)));
    store(y + i, v.a);
  });
}

// Operands with y's shape take a separate path. Without branches between them, all loads are in
// flight at once.
template <class T> __device__ __forceinline__ void runBinary(T* y, int op, Operand<T> a, Operand<T> b, int64_t n) {
  constexpr int N = kVec<T>;
  bool done = false;
  auto whole = [&](int64_t i) { return Two<T>{load<N>(a.p + i), load<N>(b.p + i)}; };
  auto part = [&](int64_t i) { return Two<T>{a.template get<N>(i, n), b.template get<N>(i, n)}; };
  if (aligned16(y, a.p, b.p) && a.period == n && b.period == n) {
#define RUN(name, formula) \
  case name: done = fastBinary<name>(y, n, whole); break;
    switch (op) { FAST_BINARY(RUN) }
#undef RUN
  } else if (aligned16(y) && a.template packs<N>() && b.template packs<N>()) {
#define RUN(name, formula) \
  case name: done = fastBinary<name>(y, n, part); break;
    switch (op) { FAST_BINARY(RUN) }
#undef RUN
  }
  if (!done)
    mapElements<N, 1>(n, [&](int64_t i) {
      y[i] = fromFloat<T>(binary(op, toFloat(a.p[a.at(i, n)]), toFloat(b.p[b.at(i, n)])));
    });
}

#define DEFINE(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      binary_##T(T* y, const T* a, const T* b, int op, int64_t repeatA, int64_t periodA, int64_t repeatB,     \
                 int64_t periodB, int64_t n) {                                                                \
    runBinary(y, op, Operand<T>{a, repeatA, periodA}, Operand<T>{b, repeatB, periodB}, n);                    \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE

// A row that applies to every row: y[i] = f(a[i], row[i % period]), where op is from the first
// list. One access per thread is the fastest way to copy. The index into the row is computed while
// a is being loaded, and the row comes from L1. Launch: one thread per access. y, a and row are
// aligned to 16 bytes, and period is a multiple of kVec.
template <class T> __device__ __forceinline__ void runRow(T* y, int op, const T* a, const T* row, int64_t period, int64_t n) {
  constexpr int N = kVec<T>;
  auto at = [&](int64_t i) { return n < (int64_t(1) << 31) ? int64_t(unsigned(i) % unsigned(period)) : i % period; };
  auto read = [&](int64_t i) {
    Two<T> v;
    v.a = load<N>(a + i);
    v.b = load<N>(row + at(i));
    return v;
  };
  bool done = false;
#define RUN(name, formula) \
  case name: done = fastBinary<name>(y, n, read); break;
  switch (op) { FAST_BINARY(RUN) }
#undef RUN
  if (!done)
    mapElements<N, 1>(n, [&](int64_t i) { y[i] = fromFloat<T>(binary(op, toFloat(a[i]), toFloat(row[at(i)]))); });
}

#define DEFINE(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads, 8)                                                   \
      binary_row_##T(T* y, const T* a, const T* row, int op, int64_t period, int64_t n) {                     \
    runRow(y, op, a, row, period, n);                                                                         \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE

// ---- cast, axpby ----

// Four elements per access on both sides, so that 4-byte elements are moved 16 bytes at a time.
template <class Y, class X> __device__ __forceinline__ void runCast(Y* y, const X* x, int64_t n) {
  constexpr int N = 4;
  auto convert = [&](int64_t i, Pack<X, N> v) {
    Pack<Y, N> r;
#pragma unroll
    for (int j = 0; j < N; j++) r.set(j, v.get(j));
    store(y + i, r);
  };
  if (!aligned16(y, x) || !mapPacks<N>(n, [&](int64_t i) { return load<N>(x + i); }, convert))
    mapElements<N>(n, [&](int64_t i) { y[i] = fromFloat<Y>(toFloat(x[i])); });
}

// y = alpha·x + beta·y. If beta is 0, y is not read and may contain anything.
template <class Y, class X>
__device__ __forceinline__ void runAxpby(Y* y, const X* x, float alpha, float beta, int64_t n) {
  constexpr int N = 4;
  struct Two {
    Pack<X, N> x;
    Pack<Y, N> y;
  };
  auto read = [&](int64_t i) {
    Two v;
    v.x = load<N>(x + i);
    if (beta != 0) v.y = load<N>(y + i);
    return v;
  };
  auto write = [&](int64_t i, Two v) {
    Pack<Y, N> r;
#pragma unroll
    for (int j = 0; j < N; j++) r.set(j, beta != 0 ? alpha * v.x.get(j) + beta * v.y.get(j) : alpha * v.x.get(j));
    store(y + i, r);
  };
  if (!aligned16(y, x) || !mapPacks<N>(n, read, write))
    mapElements<N>(n, [&](int64_t i) {
      float v = alpha * toFloat(x[i]);
      y[i] = fromFloat<Y>(beta != 0 ? v + beta * toFloat(y[i]) : v);
    });
}

#define DEFINE(Y, X)                                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads) cast_##Y##_##X(Y* y, const X* x, int64_t n) {        \
    runCast(y, x, n);                                                                                         \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                      \
      axpby_##Y##_##X(Y* y, const X* x, float alpha, float beta, int64_t n) {                                 \
    runAxpby(y, x, alpha, beta, n);                                                                           \
  }
DEFINE(f32, f32)
DEFINE(f32, bf16)
DEFINE(f32, f16)
DEFINE(bf16, f32)
DEFINE(bf16, bf16)
DEFINE(bf16, f16)
DEFINE(f16, f32)
DEFINE(f16, bf16)
DEFINE(f16, f16)
#undef DEFINE
