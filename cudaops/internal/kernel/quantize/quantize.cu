// Rows or columns as float8 with a scale each (float8.cuh), and SiLU gates that store their rows in
// that form:
//
//   quantize:            y [rows, d], scale [rows] of x's rows
//   quantize columns:    y [d, rows], scale [d] of x's columns, transposed
//   silu_mul:            h8 [rows, f], scale8 [rows] of h = silu(a) ⊙ b, and optionally h
//   silu_mul_backward:   dab8 [rows, 2f], scale8 [rows] of [da | db], and da, db and optionally h (silu.cu)
//
// A row is held in registers until its largest element is known, so that memory is read and written
// once. Rows that don't fit or are not aligned are read twice, element by element. Gates round
// their results to their type first, and then to float8.
//
// Columns are read twice: by a kernel that finds the largest element of each, and by another kernel
// that transposes tiles. A weight is in L2 by then.
#include "float8.cuh"
#include "held.cuh"
#include "overlap.cuh"
#include "silu.cuh"

// ---- Rows ----

// Held is the position of a thread in the group that holds a row, with P packs each. Few packs are
// better, because the rows that the GPU accesses at the same time are then closer together in memory.
//
// Launch: blockDim.x threads, whole warps, hold a row of up to blockDim.x·P·kVec elements, a multiple
// of kVec. A block has blockDim.y rows, and at most kHeld threads.
template <class T> struct Held {
  static constexpr int N = kVec<T>;
  int64_t row;
  int d;
  bool inside;

  __device__ __forceinline__ Held(int64_t rows, int d)
      : row(int64_t(blockIdx.x) * blockDim.y + threadIdx.y), d(d), inside(row < rows) {}
  __device__ __forceinline__ int at(int k) const { return int(k * blockDim.x + threadIdx.x) * N; }
  __device__ __forceinline__ bool holds(int k) const { return inside && at(k) < d; }

  // scale returns the scale for the largest magnitude that any thread of the row has seen. It may
  // be called only once.
  __device__ __forceinline__ Scale scale(float most, float* out) const {
    Scale s(groupReduce<Largest>(most));
    if (threadIdx.x == 0 && inside) out[row] = s.scale;
    return s;
  }
};

template <class T, int P>
__device__ __forceinline__ void quantizeHeld(f8* y, float* scale, const T* x, int64_t rows, int d, int64_t stride) {
  constexpr int N = kVec<T>;
  Held<T> held(rows, d);
  Pack<T, N> v[P];
#pragma unroll
  for (int k = 0; k < P; k++) {
    v[k] = {};
    if (held.holds(k)) v[k] = load<N>(x + held.row * stride + held.at(k));
  }
  float most = 0;
#pragma unroll
  for (int k = 0; k < P; k++) most = largest(most, v[k]), forget(v[k]);
  Scale s = held.scale(most, scale);
#pragma unroll
  for (int k = 0; k < P; k++)
    if (held.holds(k)) store(y + held.row * d + held.at(k), s.round(v[k]));
}

// forRowTwice quantizes a row of n elements with a block; value(i) computes an element. n is
// arbitrary.
template <class F> __device__ __forceinline__ void forRowTwice(f8* y, float* scale, int n, F value) {
  float most = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) most = Largest::merge(most, fabsf(value(i)));
  Scale s(blockReduce<Largest>(most));
  if (threadIdx.x == 0) *scale = s.scale;
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = s.round(value(i));
}

// Launch: one block per row.
template <class T> __device__ __forceinline__ void quantizeAny(f8* y, float* scale, const T* x, int d, int64_t stride) {
  int64_t row = blockIdx.x;
  forRowTwice(y + row * d, scale + row, d, [&](int i) { return toFloat(x[row * stride + i]); });
}

#define DEFINE_HELD(T, P)                                                                                     \
  extern "C" __global__ void __launch_bounds__(kHeld)                                                         \
      quantize_held##P##_##T(f8* y, float* scale, const T* x, int64_t rows, int d, int64_t stride) {          \
    quantizeHeld<T, P>(y, scale, x, rows, d, stride);                                                         \
  }
#define DEFINE(T)                                                                                             \
  DEFINE_HELD(T, 1)                                                                                           \
  DEFINE_HELD(T, 2)                                                                                           \
  DEFINE_HELD(T, 4)                                                                                           \
  extern "C" __global__ void __launch_bounds__(512)                                                           \
      quantize_any_##T(f8* y, float* scale, const T* x, int d, int64_t stride) {                              \
    quantizeAny(y, scale, x, d, stride);                                                                      \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#undef DEFINE_HELD

// ---- Gates ----

template <class T, int P>
__device__ __forceinline__ void siluHeld(f8* h8, float* scale8, T* h, const T* a, const T* b, int64_t rows, int f,
                                         int64_t stride) {
  constexpr int N = kVec<T>;
  Held<T> held(rows, f);
  Pack<T, N> va[P], vb[P];
#pragma unroll
  for (int k = 0; k < P; k++) {
    if (!held.holds(k)) continue;
    va[k] = load<N>(a + held.row * stride + held.at(k));
    vb[k] = load<N>(b + held.row * stride + held.at(k));
  }
  float most = 0;
#pragma unroll
  for (int k = 0; k < P; k++) {
    if (!held.holds(k)) continue;
#pragma unroll
    for (int j = 0; j < N; j++) va[k].set(j, siluMul<T>(va[k].get(j), vb[k].get(j)));
    forget(va[k]);
    most = largest(most, va[k]);
    if (h) store(h + held.row * f + held.at(k), va[k]);
  }
  Scale s = held.scale(most, scale8);
#pragma unroll
  for (int k = 0; k < P; k++)
    if (held.holds(k)) store(h8 + held.row * f + held.at(k), s.round(va[k]));
}

// Launch: one block per row.
template <class T>
__device__ __forceinline__ void siluAny(f8* h8, float* scale8, T* h, const T* a, const T* b, int f, int64_t stride) {
  int64_t row = blockIdx.x;
  auto value = [&](int i) { return fromFloat<T>(siluMul<T>(toFloat(a[row * stride + i]), toFloat(b[row * stride + i]))); };
  forRowTwice(h8 + row * f, scale8 + row, f, [&](int i) { return toFloat(value(i)); });
  if (!h) return;
  for (int i = threadIdx.x; i < f; i += blockDim.x) h[row * f + i] = value(i);
}

template <class T, int P>
__device__ __forceinline__ void siluBackwardHeld(f8* dab8, float* scale8, T* h, T* da, T* db, const T* dh, const T* a,
                                                 const T* b, int64_t rows, int f, int64_t stride, int64_t outStride) {
  constexpr int N = kVec<T>;
  Held<T> held(rows, f);
  Pack<T, N> va[P], vb[P];
  float most = 0;
#pragma unroll
  for (int k = 0; k < P; k++) {  // one pack after another, to save registers
    if (!held.holds(k)) continue;
    va[k] = load<N>(a + held.row * stride + held.at(k));
    vb[k] = load<N>(b + held.row * stride + held.at(k));
    Pack<T, N> vg = load<N>(dh + held.row * f + held.at(k));
#pragma unroll
    for (int j = 0; j < N; j++) {
      SiLUGradient<T> to(vg.get(j), va[k].get(j), vb[k].get(j));
      vg.set(j, to.h);
      va[k].set(j, to.da);
      vb[k].set(j, to.db);
    }
    forget(va[k]), forget(vb[k]);
    most = largest(largest(most, va[k]), vb[k]);
    store(da + held.row * outStride + held.at(k), va[k]);
    store(db + held.row * outStride + held.at(k), vb[k]);
    if (h) store(h + held.row * f + held.at(k), vg);
  }
  Scale s = held.scale(most, scale8);
  dab8 += held.row * 2 * f;
#pragma unroll
  for (int k = 0; k < P; k++) {
    if (!held.holds(k)) continue;
    store(dab8 + held.at(k), s.round(va[k]));
    store(dab8 + f + held.at(k), s.round(vb[k]));
  }
}

#define DEFINE_HELD(T, P)                                                                                     \
  extern "C" __global__ void __launch_bounds__(kHeld)                                                         \
      silu_mul_held##P##_##T(f8* h8, float* scale8, T* h, const T* a, const T* b, int64_t rows, int f,        \
                             int64_t stride) {                                                                \
    siluHeld<T, P>(h8, scale8, h, a, b, rows, f, stride);                                                     \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kHeld, P > 2 ? 2 : 0)                                         \
      silu_mul_backward_held##P##_##T(f8* dab8, float* scale8, T* h, T* da, T* db, const T* dh, const T* a,   \
                                      const T* b, int64_t rows, int f, int64_t stride, int64_t outStride) {   \
    siluBackwardHeld<T, P>(dab8, scale8, h, da, db, dh, a, b, rows, f, stride, outStride);                    \
  }
#define DEFINE(T)                                                                                             \
  DEFINE_HELD(T, 1)                                                                                           \
  DEFINE_HELD(T, 2)                                                                                           \
  DEFINE_HELD(T, 4)                                                                                           \
  extern "C" __global__ void __launch_bounds__(512)                                                           \
      silu_mul_any_##T(f8* h8, float* scale8, T* h, const T* a, const T* b, int f, int64_t stride) {          \
    siluAny(h8, scale8, h, a, b, f, stride);                                                                  \
  }
DEFINE(bf16)
DEFINE(f16)
#undef DEFINE
#undef DEFINE_HELD

// ---- Columns ----

constexpr int kColumns = 8;         // per thread
constexpr int kColumnThreads = 256;  // per block

// columns loads kColumns elements of a row from column c on, with zeros past the end.
template <class T> __device__ __forceinline__ Pack<T, kColumns> columns(const T* row, int c, int d, bool together) {
  if (together && c < d) return load<kColumns>(row + c);
  Pack<T, kColumns> v = {};
  if (!together)
#pragma unroll
    for (int j = 0; j < kColumns; j++)
      if (c + j < d) v.v[j] = row[c + j];
  return v;
}

template <class T> __device__ __forceinline__ bool wholePacks(const T* x, int d) {
  return aligned16(x) && d % (16 / int(sizeof(T))) == 0 && d % kColumns == 0;
}

// Writes most [gridDim.y, d]: the largest magnitude of each column in section blockIdx.y of the
// rows. Launch: kColumnThreads threads; the lanes of a warp cover adjacent columns.
template <class T> __device__ __forceinline__ void columnsLargest(float* most, const T* x, int rows, int d) {
  constexpr int warps = kColumnThreads / kWarp, U = 8;  // rows at once
  __shared__ float tile[warps][kWarp * kColumns];
  releaseNext();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, c = (blockIdx.x * kWarp + lane) * kColumns;
  const int section = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * section, end = min(rows, first + section);
  const bool together = wholePacks(x, d);
  float m[kColumns] = {};
  for (int row = first + warp; row < end; row += U * warps) {
    Pack<T, kColumns> v[U];
#pragma unroll
    for (int u = 0; u < U; u++) v[u] = columns(x + int64_t(min(row + u * warps, end - 1)) * d, c, d, together);
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int j = 0; j < kColumns; j++) m[j] = Largest::merge(m[j], fabsf(v[u].get(j)));
  }
#pragma unroll
  for (int j = 0; j < kColumns; j++) tile[warp][j * kWarp + lane] = m[j];
  __syncthreads();
  float all = 0;
#pragma unroll
  for (int w = 0; w < warps; w++) all = Largest::merge(all, tile[w][threadIdx.x]);
  const int column = (blockIdx.x * kWarp + lane) * kColumns + warp;
  if (column < d) most[int64_t(blockIdx.y) * d + column] = all;
}

// A block transposes a tile of kTileRows by kTileColumns, with blockIdx.x counting along the
// columns. Thread t has four rows from t / 8 · 4 on of kColumns columns. The float8 numbers of one
// column then form a word.
constexpr int kTileColumns = 8 * kColumns, kTileRows = kColumnThreads / 8 * 4;

// Launch: kColumnThreads threads. It may overlap with columnsLargest, which has written the given
// number of sections.
template <class T>
__device__ __forceinline__ void quantizeColumns(f8* y, float* scale, const T* x, const float* most, int sections, int rows,
                                                int d) {
  constexpr int kWords = kTileRows / 4, kPitch = kWords + 4;  // so that writing four rows' words of eight columns has no bank conflicts
  __shared__ __align__(16) uint32_t tile[kTileColumns][kPitch];
  __shared__ __align__(16) float inverses[kTileColumns];
  const int firstRow = blockIdx.y * kTileRows, firstColumn = blockIdx.x * kTileColumns;
  const int group = threadIdx.x % 8, quad = threadIdx.x / 8, row = firstRow + quad * 4, c = firstColumn + group * kColumns;
  const bool together = wholePacks(x, d);
  Pack<T, kColumns> v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[i] = {};
    if (row + i < rows) v[i] = columns(x + int64_t(row + i) * d, c, d, together);
  }
  awaitPrevious();
  // Four threads per column loop over the sections.
  const int column = firstColumn + threadIdx.x / 4;
  float m = 0;
  if (column < d)
#pragma unroll 8
    for (int s = threadIdx.x % 4; s < sections; s += 4) m = Largest::merge(m, most[int64_t(s) * d + column]);
  m = Largest::merge(m, __shfl_xor_sync(kAllLanes, m, 1));
  m = Largest::merge(m, __shfl_xor_sync(kAllLanes, m, 2));
  if (threadIdx.x % 4 == 0) {
    Scale s(m);
    inverses[threadIdx.x / 4] = s.inverse;
    if (blockIdx.y == 0 && column < d) scale[column] = s.scale;
  }
  __syncthreads();

  Pack<float, kColumns> inverse = load<kColumns>(inverses + group * kColumns);
#pragma unroll
  for (int j = 0; j < kColumns; j += 2) {
    float2 two[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      two[i] = Pairs<T>::floats(pair(v[i], j / 2));
      two[i].x *= inverse.v[j], two[i].y *= inverse.v[j + 1];
    }
    tile[j * 8 + group][quad] = fourE4M3(two[0].x, two[1].x, two[2].x, two[3].x);
    tile[j * 8 + 8 + group][quad] = fourE4M3(two[0].y, two[1].y, two[2].y, two[3].y);
  }
  __syncthreads();

  const bool wide = rows % 16 == 0 && aligned16(y);
#pragma unroll
  for (int i = threadIdx.x; i < kTileColumns * kWords / 4; i += kColumnThreads) {
    int j = i / (kWords / 4), at = i % (kWords / 4) * 16;  // in bytes of a column
    int to = firstColumn + j % 8 * kColumns + j / 8, r = firstRow + at;
    if (to >= d || r >= rows) continue;
    uint4 bytes = *reinterpret_cast<const uint4*>(&tile[j][at / 4]);
    f8* out = y + int64_t(to) * rows + r;
    if (wide)
      *reinterpret_cast<uint4*>(out) = bytes;
    else
      for (int b = 0; b < 16 && r + b < rows; b++) out[b] = reinterpret_cast<const f8*>(&tile[j][at / 4])[b];
  }
}

#define DEFINE(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kColumnThreads)                                                \
      quantize_columns_largest_##T(float* most, const T* x, int rows, int d) {                                \
    columnsLargest(most, x, rows, d);                                                                         \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(kColumnThreads)                                                \
      quantize_columns_##T(f8* y, float* scale, const T* x, const float* most, int sections, int rows,        \
                           int d) {                                                                           \
    quantizeColumns(y, scale, x, most, sections, rows, d);                                                    \
  }
FOR_STORAGE_TYPES(DEFINE)
