// Registers: values that are the same in all lanes, and registers that one warpgroup gives up for
// another.
#pragma once
#include "common.cuh"
#include "target.cuh"

#ifdef HOPPER
namespace tile {

// Tells the compiler that a value is the same in all lanes: what follows from it then costs no vector instructions.
__device__ inline int uniform(int v) { return __shfl_sync(kAllLanes, v, 0); }

// A warpgroup's registers a thread: the copier gives up what the workers take.
template <int Registers> __device__ inline void takeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> __device__ inline void giveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace tile
#endif  // HOPPER
