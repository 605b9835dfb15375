// Elements of 16-bit packs.
#pragma once
#include <type_traits>

#include "common.cuh"

// element returns an element of a pack. It shifts words of bfloat16, because the compiler would otherwise keep every
// element in a register of its own from the load on.
template <class T, int N> __device__ __forceinline__ float element(const Pack<T, N>& p, int i) {
  if constexpr (sizeof(T) == 2 && N > 1) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(&p)[i / 2];
    if constexpr (std::is_same_v<T, bf16>) return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(word));
    return i % 2 ? both.y : both.x;
  }
  return p.get(i);
}
