// Rows held in registers, each by a group of threads of a block.
#pragma once
#include "common.cuh"

// kHeld is the largest number of threads in a block that holds rows in registers.
constexpr int kHeld = 512;

// forget makes the compiler convert a pack to float again at its next use. Holding both forms would
// take three times the registers.
template <class V> __device__ __forceinline__ void forget(V& v) {
  unsigned* words = reinterpret_cast<unsigned*>(&v);
#pragma unroll
  for (int i = 0; i < int(sizeof(V)) / 4; i++) asm volatile("" : "+r"(words[i]));
}

// groupReduce reduces over the blockDim.x threads that hold a row. A kernel may call it only once
// per Op.
template <class Op> __device__ __forceinline__ float groupReduce(float v) {
  __shared__ float parts[kHeld / kWarp];
  int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp, first = threadIdx.y * warps;
  v = warpReduce<Op>(v);
  if (warps == 1) return v;
  if (lane == 0) parts[first + threadIdx.x / kWarp] = v;
  __syncthreads();
  return warpReduce<Op>(lane < warps ? parts[first + lane] : Op::identity);
}
