// The base-2 exponential as computed by the special function unit.
#pragma once
#include "common.cuh"

namespace tile {

constexpr float kLog2e = 1.4426950408889634f;

__device__ inline float exp2Approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tile
