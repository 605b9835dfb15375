// Definitions shared by the Hopper (sm_90a) attention kernels: tile shapes, the order of work, and
// the inverse of RoPE.
#pragma once
#include "attention.cuh"
#include "barrier.cuh"
#include "registers.cuh"
#include "wgmma.cuh"

// Compiles a kernel's body only for Hopper. Other GPUs never launch these kernels.
#ifdef HOPPER
#define BODY(...) attention::__VA_ARGS__
#else
#define BODY(...)
#endif

namespace attention {

// Shape describes a kernel's tiles. Each of the Workers warpgroups owns 64 rows and loops over the
// other operand Loop rows at a time. Shared memory has room for the owned tiles of Turns turns and
// for Stages tiles of the other operand.
template <int D_, int Workers_, int Loop_, int Turns_, int Stages_> struct Shape {
  static constexpr int D = D_, Workers = Workers_, Loop = Loop_, Turns = Turns_, Stages = Stages_, Own = 64 * Workers;
  static constexpr int WorkerThreads = 128 * Workers, Threads = 128 + WorkerThreads, CopierRegisters = Workers == 2 ? 24 : 32,
                       WorkerRegisters = Workers == 2 ? 240 : 160;
  static constexpr int OwnBytes = Own * D * 2, LoopBytes = Loop * D * 2;
};

#ifdef HOPPER

__device__ inline uint32_t loadWord(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ inline void storeWord(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// workOf returns the work that a block does in a turn. Every second turn is reversed: work is
// sorted by length, so this evens out the blocks' total work.
__device__ inline int workOf(int turn) {
  return turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// keyTiles returns the number of tiles of keys that queries up to `last` see.
template <class S> __device__ inline int keyTiles(const Params &p, int last) {
  return (min(p.causal ? last + 1 : p.seq, p.seq) + S::Loop - 1) / S::Loop;
}

// Reach stores where the documents of each warpgroup's rows begin or end, in tiles or rows of the
// loop. The copier looks this up a few turns ahead, and the workers find it in shared memory as
// soon as the turn's tiles have arrived.
template <class S> struct Reach {
  uint32_t words;
  __device__ uint32_t word(int turn, int group) const { return words + turn % S::Turns * 16 + group * 4; }
  __device__ void set(int turn, const int (&reach)[S::Workers]) const {
    for (int g = 0; g < S::Workers; g++) storeWord(word(turn, g), reach[g]);
  }
  __device__ int get(int turn, int group) const { return uniform(loadWord(word(turn, group))); }
};

// The cosines and sines of RoPE, both [seq, D/2]; null if nothing is to be rotated.
struct Angles {
  const float *cosines, *sines;
};

// anglesAt returns the offset of a lane's first angle in the tables, for a warp's rows from the
// given position on.
template <int D> __device__ inline int64_t anglesAt(int position, int half, int seq) {
  const int lane = threadIdx.x % 32;
  return (int64_t)min(position + 8 * half + lane / 4, seq - 1) * (D / 2) + lane % 4 * 2;
}

// turnBack undoes the rotation of two neighboring pairs. The two elements of a pair, D/2 columns
// apart, are in the same lane.
__device__ inline void turnBack(float *a, float *b, float2 cosine, float2 sine) {
  const float a0 = a[0], a1 = a[1];
  a[0] = a0 * cosine.x + b[0] * sine.x;
  a[1] = a1 * cosine.y + b[1] * sine.y;
  b[0] = b[0] * cosine.x - a0 * sine.x;
  b[1] = b[1] * cosine.y - a1 * sine.y;
}

// turnBack undoes RoPE's rotation of a warp's gradients, with rows from the given position on.
template <int D> __device__ inline void turnBack(Accumulator<1, D> &d, const Angles &angles, int position, int seq) {
  if (!angles.cosines) return;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int64_t at = anglesAt<D>(position, half, seq);
#pragma unroll
    for (int x = 0; x < D / 16; x++) {
      const float2 cosine = *(const float2 *)(angles.cosines + at + 8 * x), sine = *(const float2 *)(angles.sines + at + 8 * x);
      turnBack(d.c[0][x] + 2 * half, d.c[0][x + D / 16] + 2 * half, cosine, sine);
    }
  }
}

// TurnBack is turnBack in two steps, for kernels with enough registers: the angles have a long
// latency and are loaded while products or stores are in flight.
template <int D> struct TurnBack {
  float2 cosines[2][D / 16], sines[2][D / 16];
  bool turns;

  __device__ TurnBack(const Angles &angles, int position, int seq) : turns(angles.cosines) {
    if (!turns) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t at = anglesAt<D>(position, half, seq);
#pragma unroll
      for (int x = 0; x < D / 16; x++) {
        cosines[half][x] = *(const float2 *)(angles.cosines + at + 8 * x);
        sines[half][x] = *(const float2 *)(angles.sines + at + 8 * x);
      }
    }
  }

  __device__ void turn(Accumulator<1, D> &d) const {
    if (!turns) return;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int x = 0; x < D / 16; x++)
        turnBack(d.c[0][x] + 2 * half, d.c[0][x + D / 16] + 2 * half, cosines[half][x], sines[half][x]);
  }
};

#endif  // HOPPER
}  // namespace attention
