// How kernels that follow one another overlap: programmatic dependent launch, from compute capability 9.0 on.
#pragma once

// awaitPrevious waits for the kernel before this one, which was launched to overlap with it.
__device__ __forceinline__ void awaitPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// releaseNext lets the kernel after this one start as soon as all blocks of this one have, if it was launched to overlap.
__device__ __forceinline__ void releaseNext() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
