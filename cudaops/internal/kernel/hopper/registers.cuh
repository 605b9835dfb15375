// Hints about registers: values that are the same in all lanes, and registers that one warpgroup
// gives up for another.
#pragma once
#include "common.cuh"
#include "target.cuh"

#ifdef HOPPER
namespace tile {

// Declares a value to be the same in all lanes, so that computations on it need no vector
// instructions.
__device__ inline int uniform(int v) { return __shfl_sync(kAllLanes, v, 0); }

// Changes the number of registers per thread of a warpgroup. Workers can take only registers that
// the copier gives up.
template <int Registers> __device__ inline void takeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> __device__ inline void giveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace tile
#endif  // HOPPER
