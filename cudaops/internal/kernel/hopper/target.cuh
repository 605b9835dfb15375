// HOPPER is defined when compiling for sm_90a, where kernels may use instructions specific to
// Hopper.
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER 1
#endif
