// Rows held in registers, each by a few threads of a block.
#pragma once
#include "common.cuh"

// kHeld is the most threads of a block whose threads hold rows in registers.
constexpr int kHeld = 512;

// forget makes the compiler convert a pack to float again where it is next used, since holding both takes three times the
// registers.
template <class V> __device__ __forceinline__ void forget(V& v) {
  unsigned* words = reinterpret_cast<unsigned*>(&v);
#pragma unroll
  for (int i = 0; i < int(sizeof(V)) / 4; i++) asm volatile("" : "+r"(words[i]));
}

// groupReduce reduces over the blockDim.x threads that hold a row. A kernel calls it once for each Op.
template <class Op> __device__ __forceinline__ float groupReduce(float v) {
  __shared__ float parts[kHeld / kWarp];
  int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp, first = threadIdx.y * warps;
  v = warpReduce<Op>(v);
  if (warps == 1) return v;
  if (lane == 0) parts[first + threadIdx.x / kWarp] = v;
  __syncthreads();
  return warpReduce<Op>(lane < warps ? parts[first + lane] : Op::identity);
}
