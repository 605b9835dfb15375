// Barriers in shared memory, and rings of slots that one thread fills and other threads free. A
// phase of a barrier ends after `count` arrivals, once all announced bytes have arrived.
#pragma once
#include "common.cuh"
#include "target.cuh"

#ifdef HOPPER
namespace tile {

__device__ inline void barrierInit(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ inline void barrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void barrierExpect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// barrierWait waits for the end of the phase with the given parity. On a new barrier, parity 1 returns
// immediately.
__device__ inline void barrierWait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// fenceAsync orders this thread's accesses to shared memory before accesses by copies and products that
// start after its next arrival.
__device__ inline void fenceAsync() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Ring is a ring of Slots slots that the copier fills and the workers free, with its barriers in
// shared memory at `barriers`. Fill i goes to slot i % Slots.
template <int Slots> struct Ring {
  uint32_t barriers;
  static constexpr int bytes = 16 * Slots;
  __device__ uint32_t filled(int i) const { return barriers + i % Slots * 16; }
  __device__ uint32_t freed(int i) const { return filled(i) + 8; }
  __device__ static int slot(int i) { return i % Slots; }

  // init initializes the barriers. Workers must arrive `arrivals` times before a slot is free again.
  __device__ void init(int arrivals) const {
    for (int i = 0; i < Slots; i++) {
      barrierInit(filled(i), 1);
      barrierInit(freed(i), arrivals);
    }
  }
  // fill is called by the copier. It waits until the slot of fill i is free, announces the given number of
  // bytes, and returns the barrier that must receive them.
  __device__ uint32_t fill(int i, int bytes) const {
    waitFree(i);
    return announce(i, bytes);
  }
  __device__ void waitFree(int i) const { barrierWait(freed(i), i / Slots + 1 & 1); }
  __device__ uint32_t announce(int i, int bytes) const {
    barrierExpect(filled(i), bytes);
    return filled(i);
  }
  __device__ void wait(int i) const { barrierWait(filled(i), i / Slots & 1); }
  // release is called by every worker thread, after its own reads of the slot of fill i. One arrival per
  // warp would cost as much, and race checkers don't attribute a thread's reads to another's arrival.
  __device__ void release(int i) const { barrierArrive(freed(i)); }
};

}  // namespace tile
#endif  // HOPPER
