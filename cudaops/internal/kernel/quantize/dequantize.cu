// Matrices of frozen weights in the formats of package internal/quant, widened to a storage type:
//
//   dequantize_f8:    y[r, c] = E4M3(codes[r, c])·scales[r]
//   dequantize_nf4:   y[i] = NF4(codes[i])·(table[nested[b]]·scales[b/256] + offset),  b = i/64
//
// Two NF4 codes share a byte, with the first code in the upper half. All arithmetic is in float32, with the same
// roundings as on a CPU, and the result is then rounded to the storage type. A thread computes kEach consecutive
// elements of a block, so they share a scale. n need not be a multiple of kEach, and a row may end between the
// elements of a thread.
//
// For products in float8, other kernels round the weights w that the codes represent to float8, in rows or
// transposed. The rows have factors that the products divide by:
//
//   float8_nf4:         y[r, c] = E4M3(w[r, c]·factors[r])
//   float8_columns_f8:  y[c, r] = E4M3(E4M3(codes[r, c])·factors[r])
//   float8_columns_nf4: y[c, r] = E4M3(w[r, c]·factors[r])
//
// These need rows and columns that are multiples of 16, so that each thread has 16 elements of a row or column.
#include "float8.cuh"

constexpr int kEach = 8;

template <class T> __device__ __forceinline__ void put(T* y, int64_t at, int64_t n, const float (&v)[kEach]) {
  constexpr int N = kVec<T>;
  if (at + kEach <= n && reinterpret_cast<uintptr_t>(y + at) % 16 == 0) {
#pragma unroll
    for (int k = 0; k < kEach; k += N) {
      Pack<T, N> p;
#pragma unroll
      for (int i = 0; i < N; i++) p.set(i, v[k + i]);
      store(y + at + k, p);
    }
    return;
  }
  for (int i = 0; i < kEach; i++)
    if (at + i < n) y[at + i] = fromFloat<T>(v[i]);
}

__device__ __forceinline__ float fromE4M3(f8 code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

template <class T>
__device__ __forceinline__ void dequantizeF8(T* y, const f8* codes, const float* scales, int64_t n, int d) {
  int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kEach;
  if (at >= n) return;
  float v[kEach];
  if (d % kEach == 0) {
    uint2 raw = *reinterpret_cast<const uint2*>(codes + at);
    float scale = scales[at / d];
#pragma unroll
    for (int i = 0; i < kEach; i++) v[i] = fromE4M3(f8((i < 4 ? raw.x : raw.y) >> (i % 4 * 8))) * scale;
  } else {
    for (int i = 0; i < kEach; i++) v[i] = at + i < n ? fromE4M3(codes[at + i]) * scales[(at + i) / d] : 0.0f;
  }
  put(y, at, n, v);
}

// nf4 contains the values of the codes, as in internal/quant.
__constant__ float nf4[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f,
    0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f,
    0.5626170039176941f, 0.7229568362236023f, 1.0f};

constexpr int kBlock = 64, kNested = 256;

template <class T>
__device__ __forceinline__ void dequantizeNF4(T* y, const uint8_t* codes, const uint8_t* nested, const float* scales,
                                              const float* table, float offset, int64_t n) {
  __shared__ float values[16];
  if (threadIdx.x < 16) values[threadIdx.x] = nf4[threadIdx.x];
  __syncthreads();
  int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kEach;
  if (at >= n) return;

  int64_t block = at / kBlock;
  float scale = __fadd_rn(__fmul_rn(table[nested[block]], scales[block / kNested]), offset);
  uint32_t raw = 0;
  if (at + kEach <= n) {
    raw = *reinterpret_cast<const uint32_t*>(codes + at / 2);
  } else {
    for (int i = 0; i < int(n - at + 1) / 2; i++) raw |= uint32_t(codes[at / 2 + i]) << (8 * i);
  }
  float v[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) v[i] = __fmul_rn(values[raw >> (i / 2 * 8 + (1 - i % 2) * 4) & 15], scale);
  put(y, at, n, v);
}

constexpr int kWide = 16;

// Float8Codes and NF4Codes give access to the 16 weights from element `at` on, a multiple of 16: load returns their
// codes, and value computes a weight from its code, the scale of the block and the values of the codes.
struct Float8Codes {
  const f8* codes;
  __device__ __forceinline__ Pack<f8, kWide> load(int64_t at) const { return ::load<kWide>(codes + at); }
  __device__ __forceinline__ float value(const Pack<f8, kWide>& raw, int i, float, const float*) const {
    return fromE4M3(raw.v[i]);
  }
  __device__ __forceinline__ float scale(int64_t) const { return 1; }
};

struct NF4Codes {
  const uint8_t *codes, *nested;
  const float *scales, *table;
  float offset;
  __device__ __forceinline__ uint2 load(int64_t at) const { return *reinterpret_cast<const uint2*>(codes + at / 2); }
  __device__ __forceinline__ float value(uint2 raw, int i, float scale, const float* values) const {
    uint32_t word = i < 8 ? raw.x : raw.y;
    return __fmul_rn(values[word >> (i % 8 / 2 * 8 + (1 - i % 2) * 4) & 15], scale);
  }
  __device__ __forceinline__ float scale(int64_t at) const {
    int64_t block = at / kBlock;
    return __fadd_rn(__fmul_rn(table[nested[block]], scales[block / kNested]), offset);
  }
};

// Launch: 256 threads, with 16 elements each.
__device__ __forceinline__ void float8NF4(f8* y, NF4Codes w, const float* factors, int64_t n, int d) {
  __shared__ float values[16];
  if (threadIdx.x < 16) values[threadIdx.x] = nf4[threadIdx.x];
  __syncthreads();
  int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kWide;
  if (at >= n) return;
  uint2 raw = w.load(at);
  float scale = w.scale(at), factor = factors[at / d];
  uint32_t words[kWide / 4];
#pragma unroll
  for (int i = 0; i < kWide / 4; i++) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = w.value(raw, 4 * i + j, scale, values) * factor;
    words[i] = fourE4M3(v[0], v[1], v[2], v[3]);
  }
  *reinterpret_cast<uint4*>(y + at) = make_uint4(words[0], words[1], words[2], words[3]);
}

// A block transposes a tile of kSide by kSide elements, with blockIdx.x counting along the columns. Thread t has
// 16 columns of the four rows from t / 8 · 4 on, and the four float8 numbers of a column form a word. Column
// group·16 + j of the tile is stored at row j·8 + group, so that no two threads of a warp write to the same bank.
constexpr int kSide = 128, kGroups = kSide / kWide;

// Launch: 256 threads. The rows of y are `stride` elements apart.
template <class W>
__device__ __forceinline__ void float8Columns(f8* y, W w, const float* factors, int rows, int d, int64_t stride) {
  constexpr int kWords = kSide / 4, kPitch = kWords + 4;
  __shared__ __align__(16) uint32_t tile[kSide][kPitch];
  __shared__ float values[16];
  if (threadIdx.x < 16) values[threadIdx.x] = nf4[threadIdx.x];
  const int firstRow = blockIdx.y * kSide, firstColumn = blockIdx.x * kSide;
  const int group = threadIdx.x % kGroups, quad = threadIdx.x / kGroups;
  const int row = firstRow + quad * 4, column = firstColumn + group * kWide;
  const bool inside = row < rows && column < d;  // both are multiples of 4, and rows and d of 16

  decltype(w.load(0)) raw[4] = {};
  float scale[4] = {}, factor[4] = {};
  if (inside) {
#pragma unroll
    for (int i = 0; i < 4; i++) raw[i] = w.load(int64_t(row + i) * d + column);
#pragma unroll
    for (int i = 0; i < 4; i++) scale[i] = w.scale(int64_t(row + i) * d + column), factor[i] = factors[row + i];
  }
  __syncthreads();
  if (inside) {
#pragma unroll
    for (int j = 0; j < kWide; j++) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = w.value(raw[i], j, scale[i], values) * factor[i];
      tile[j * kGroups + group][quad] = fourE4M3(v[0], v[1], v[2], v[3]);
    }
  }
  __syncthreads();

#pragma unroll
  for (int i = threadIdx.x; i < kSide * kWords / 4; i += 256) {
    const int j = i / (kWords / 4), at = i % (kWords / 4) * 16;  // a row of the tile, and bytes of it
    const int to = firstColumn + j % kGroups * kWide + j / kGroups, from = firstRow + at;
    if (to < d && from < rows)
      *reinterpret_cast<uint4*>(y + int64_t(to) * stride + from) = *reinterpret_cast<const uint4*>(&tile[j][at / 4]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    float8_nf4(f8* y, const uint8_t* codes, const uint8_t* nested, const float* scales, const float* table,
               float offset, const float* factors, int64_t n, int d) {
  float8NF4(y, NF4Codes{codes, nested, scales, table, offset}, factors, n, d);
}

extern "C" __global__ void __launch_bounds__(256)
    float8_columns_f8(f8* y, const f8* codes, const float* factors, int rows, int d, int64_t stride) {
  float8Columns(y, Float8Codes{codes}, factors, rows, d, stride);
}

extern "C" __global__ void __launch_bounds__(256)
    float8_columns_nf4(f8* y, const uint8_t* codes, const uint8_t* nested, const float* scales, const float* table,
                       float offset, const float* factors, int rows, int d, int64_t stride) {
  float8Columns(y, NF4Codes{codes, nested, scales, table, offset}, factors, rows, d, stride);
}

#define DEFINE(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      dequantize_f8_##T(T* y, const f8* codes, const float* scales, int64_t n, int d) {                       \
    dequantizeF8(y, codes, scales, n, d);                                                                     \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                           \
      dequantize_nf4_##T(T* y, const uint8_t* codes, const uint8_t* nested, const float* scales,              \
                         const float* table, float offset, int64_t n) {                                       \
    dequantizeNF4(y, codes, nested, scales, table, offset, n);                                                \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
