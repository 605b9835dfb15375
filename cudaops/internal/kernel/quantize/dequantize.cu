// Matrices of frozen weights in the formats of package internal/quant, widened to a storage type:
//
//   dequantize_f8:    y[r, c] = E4M3(codes[r, c])·scales[r]
//   dequantize_nf4:   y[i] = NF4(codes[i])·(table[nested[b]]·scales[b/256] + offset),  b = i/64
//
// Two NF4 codes share a byte, with the first code in the upper half. All arithmetic is in float32, with the same
// roundings as on a CPU, and the result is then rounded to the storage type. A thread computes kEach consecutive
// elements of a block, so they share a scale. n need not be a multiple of kEach, and a row may end between the
// elements of a thread.
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
