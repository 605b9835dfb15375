// Basics shared by all kernels: storage types, 16-byte accesses, and reductions over warps and
// blocks.
//
// Numbers are stored as float, bfloat16 or half, and computations use float. Reductions add in an
// order that depends only on the launch's shape and never use atomics on floating-point numbers, so
// every run with the same inputs is bit-identical.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;
using f16 = __half;
using f32 = float;

// FOR_STORAGE_TYPES(DEFINE) expands to DEFINE(f32) DEFINE(bf16) DEFINE(f16). A DEFINE(T) usually
// defines an extern "C" kernel name_##T, which the host finds by its name, as a call of the
// template that does the work.
#define FOR_STORAGE_TYPES(DEFINE) DEFINE(f32) DEFINE(bf16) DEFINE(f16)

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// ---- Conversions; those to storage types round to nearest even ----

__device__ __forceinline__ float toFloat(float v) { return v; }
__device__ __forceinline__ float toFloat(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float toFloat(f16 v) { return __half2float(v); }

template <class T> __device__ __forceinline__ T fromFloat(float v);
template <> __device__ __forceinline__ float fromFloat<float>(float v) { return v; }
template <> __device__ __forceinline__ bf16 fromFloat<bf16>(float v) { return __float2bfloat16_rn(v); }
template <> __device__ __forceinline__ f16 fromFloat<f16>(float v) { return __float2half_rn(v); }

// ---- Vectors ----

// Pack is N consecutive elements, moved in accesses of up to 16 bytes.
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T v[N];
  __device__ __forceinline__ float get(int i) const { return toFloat(v[i]); }
  __device__ __forceinline__ void set(int i, float x) { v[i] = fromFloat<T>(x); }
};

// kVec is the number of elements in 16 bytes.
template <class T> constexpr int kVec = 16 / sizeof(T);

// WordOf gives the widest type that divides n bytes evenly.
template <int n> struct WordOf { using type = uint4; };
template <> struct WordOf<8> { using type = uint2; };
template <> struct WordOf<4> { using type = uint32_t; };
template <> struct WordOf<2> { using type = uint16_t; };

// load and store move a pack; p must be aligned as Pack<T, N> is.
template <int N, class T> __device__ __forceinline__ Pack<T, N> load(const T* p) {
  using Word = typename WordOf<sizeof(T) * N>::type;
  constexpr int words = sizeof(Pack<T, N>) / sizeof(Word);
  Pack<T, N> r;
#pragma unroll
  for (int i = 0; i < words; i++) reinterpret_cast<Word*>(&r)[i] = reinterpret_cast<const Word*>(p)[i];
  return r;
}

// loadOnce is load for data that this block will not read again, such as weights. It bypasses L1,
// which is left to shared data.
template <int N, class T> __device__ __forceinline__ Pack<T, N> loadOnce(const T* p) {
  static_assert(sizeof(T) * N % 16 == 0, "16-byte accesses only");
  Pack<T, N> r;
#pragma unroll
  for (int i = 0; i < int(sizeof(r)) / 16; i++) {
    uint4& u = reinterpret_cast<uint4*>(&r)[i];
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w)
                 : "l"(reinterpret_cast<const uint4*>(p) + i)
                 : "memory");
  }
  return r;
}

template <int N, class T> __device__ __forceinline__ void store(T* p, const Pack<T, N>& v) {
  using Word = typename WordOf<sizeof(T) * N>::type;
  constexpr int words = sizeof(Pack<T, N>) / sizeof(Word);
#pragma unroll
  for (int i = 0; i < words; i++) reinterpret_cast<Word*>(p)[i] = reinterpret_cast<const Word*>(&v)[i];
}

// copyAsync starts a copy of 16 bytes to shared memory, or of zeros if not wanted; src must be a
// valid address either way. commitAsync forms a group of the copies started since the last call.
// awaitAsync<n> waits until at most the n latest groups of this thread are still in flight. Other
// threads see the data after a barrier.
__device__ __forceinline__ void copyAsync(void* dst, const void* src, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(dst))), "l"(src),
               "r"(wanted ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commitAsync() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int n> __device__ __forceinline__ void awaitAsync() { asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); }

// aligned16 reports whether all pointers are aligned to 16 bytes; a null pointer is.
template <class... P> __device__ __forceinline__ bool aligned16(const P*... p) {
  return ((reinterpret_cast<uintptr_t>(p) | ...) & 15) == 0;
}

// ---- Reductions ----

struct Sum {
  static constexpr float identity = 0.0f;
  __device__ static __forceinline__ float merge(float a, float b) { return a + b; }
};

// Max is NaN if either argument is NaN, so that NaNs are not hidden.
struct Max {
  static constexpr float identity = -INFINITY;
  __device__ static __forceinline__ float merge(float a, float b) { return a > b || a != a ? a : b; }
};

// warpReduce returns the reduction over a warp in every lane. All lanes must take part.
template <class Op> __device__ __forceinline__ float warpReduce(float v) {
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) v = Op::merge(v, __shfl_xor_sync(kAllLanes, v, d));
  return v;
}

// blockReduce returns the reduction over a block of whole warps in every thread. All threads must
// take part.
template <class Op> __device__ __forceinline__ float blockReduce(float v) {
  __shared__ float partial[kWarp];
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  v = warpReduce<Op>(v);
  __syncthreads();  // all threads have read the previous call's partial
  if (lane == 0) partial[warp] = v;
  __syncthreads();
  return warpReduce<Op>(lane < warps ? partial[lane] : Op::identity);
}
