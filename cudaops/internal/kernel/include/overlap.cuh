// Overlap of consecutive kernels by programmatic dependent launch, for compute capability 9.0 and
// later.
#pragma once

// awaitPrevious waits for the preceding kernel, if this kernel was launched to overlap with it.
__device__ __forceinline__ void awaitPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// releaseNext lets the next kernel, if it was launched to overlap, start once all blocks of this
// kernel have called releaseNext or ended.
__device__ __forceinline__ void releaseNext() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
