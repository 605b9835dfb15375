// HOPPER is defined where a kernel may use what only Hopper (sm_90a) has.
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER 1
#endif
