// Kasmina layers over one small batch after another, by a kernel that stays on the GPU.
//
// A launch takes longer than the work on a small batch. Here the host announces batches in a ring
// in pinned memory, and the kernel takes them from there:
//
//   host     writes x[k % depth], then entries[k % depth] = word(k)            (release, system)
//   warden   sees the word, and copies it to published[k % depth]              (release, device)
//   team     sees it, computes the batch layer by layer, and its last block
//            sets done[k % depth] = 2(k + 1)                                   (release, system)
//
// The warden is one warp of the last block, the only one that polls across the bus. The other
// blocks form teams of as many blocks as an ordinary launch has, and batch k belongs to team k
// modulo the number of teams. Each block computes the same results, in the same order, as the block
// in its position in an ordinary launch, so outputs and telemetry are bit-identical.
//
// Between two layers, the blocks of a team wait for each other, unless each thread reads only its own
// results. With telemetry, they also wait for each other before merging the records of each layer and
// before taking the next batch. Without it, a block takes the next batch as soon as it is ready, so
// several batches of a team may be unfinished at the same time.
//
// The kernel ends when the host asks it to. It also ends after a period without batches, measured by
// the device's clock, so it never outlives a host that has crashed. Either way, it first computes all
// published batches, and sets `consumed` to the first batch of the next launch. All blocks must be
// resident on the device at the same time.
#include "kasmina_forward.cuh"

constexpr int kMaxLayers = 16;

// A word of the ring is 4(k + 1) for batch k, plus these.
constexpr unsigned long long kWatched = 1;  // compute the figures
constexpr unsigned long long kStop = 2;     // no batch: the kernel ends

// Control is in pinned memory.
struct Control {
  unsigned long long consumed;  // the first batch that was not published
  unsigned long long ended;     // 1: at the host's request; 2: after an idle period
};

// Queue describes the memory that the host and the kernel share, and the kernel's own memory. A batch
// has `stride` bytes of x and of y; `seeds` counts the seeds of all layers.
struct Queue {
  Control* control;                   // pinned
  const unsigned long long* entries;  // pinned [depth]
  unsigned long long* done;           // pinned [depth]; 2(k + 1), plus 1 if counts are set
  const char* x;                      // [depth, stride]
  char* y;                            // [depth, stride]
  float* figures;                     // [depth, 8·seeds], [8, seeds] for each layer
  uint32_t* counts;                   // pinned [depth, seeds], NaN and Inf if there are any
  unsigned long long* closing;        // the first batch that was not published, plus 1, once known
  unsigned long long* published;      // [depth]
  uint32_t* bad;                      // [depth, seeds]; 0 between batches
  uint32_t* spoiled;                  // [depth]; whether bad is not 0
  uint32_t* finished;                 // [depth]; blocks that have finished the batch; 0 between batches
  uint32_t* arrived;                  // [teams]; arrivals of blocks at barriers
  char* scratch;                      // [teams, 2, stride]; values between layers
  float4* records;                    // [teams, layers, 2·parts·units]
  unsigned long long first;           // the first batch of this launch
  unsigned long long idle;            // nanoseconds
  long long stride;
  int depth, layers, seeds, units;
  int tiles, parts, teams;            // a team has tiles·parts blocks
  int sync;                           // whether blocks wait for each other between layers
  Share share;
};

// Stage is a layer of the chain.
struct Stage {
  Layer layer;
  int firstSeed;  // among the seeds of all layers
  int merging;    // threads that merge the records of a seed
};

struct Stages {
  Stage at[kMaxLayers];
};

__device__ __forceinline__ unsigned long long peekSystem(const unsigned long long* p) {
  unsigned long long v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void storeSystem(unsigned long long* p, unsigned long long v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ unsigned long long peekDevice(const unsigned long long* p) {
  unsigned long long v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void storeDevice(unsigned long long* p, unsigned long long v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ uint32_t peekCount(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// ward publishes batches until the kernel should end. The lanes of a warp poll the next words of the
// ring simultaneously.
__device__ void ward(const Queue& r, int lane) {
  unsigned long long seen = r.first, since = nanoseconds();
  for (;;) {
    const unsigned long long k = seen + lane;
    const unsigned long long word = lane < r.depth ? peekSystem(r.entries + k % r.depth) : 0;
    const unsigned ready = __ballot_sync(kAllLanes, word >> 2 == k + 1 && !(word & kStop));
    const int n = ready == kAllLanes ? kWarp : __ffs(~ready) - 1;
    if (n > 0) {
      __threadfence_system();
      if (lane < n) storeDevice(r.published + k % r.depth, word);
      seen += n, since = nanoseconds();
      continue;
    }
    const bool asked = word >> 2 == k + 1, idle = nanoseconds() - since > r.idle;
    const unsigned long long why = __shfl_sync(kAllLanes, asked ? 1 : idle ? 2 : 0, 0);
    if (why == 0) continue;
    if (lane == 0) {
      storeDevice(r.closing, seen + 1);
      r.control->consumed = seen;
      storeSystem(&r.control->ended, why);
    }
    return;
  }
}

// await returns the word of batch k to all threads of a block, or 0 if the kernel ends without it.
__device__ __forceinline__ unsigned long long await(const Queue& r, unsigned long long k) {
  __shared__ unsigned long long shown;
  if (Lane::inBlock() == 0) {
    const unsigned long long* at = r.published + k % r.depth;
    for (;;) {
      const unsigned long long closing = peekDevice(r.closing), word = peekDevice(at);
      shown = 0;
      if (word >> 2 == k + 1) shown = word;
      if (shown != 0 || (closing != 0 && k + 1 >= closing)) break;
      __nanosleep(20);
    }
    __threadfence();
  }
  __syncthreads();
  const unsigned long long word = shown;
  __syncthreads();
  return word;
}

// meet waits until the blocks of the team have arrived `target` times altogether, and makes
// everything that they wrote before visible to all of them. The count may wrap around.
__device__ __forceinline__ void meet(uint32_t* arrived, uint32_t target) {
  __syncthreads();
  if (Lane::inBlock() == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
    while (int(peekCount(arrived) - target) < 0) {}
    __threadfence();
  }
  __syncthreads();
}

// Spoils is Counts for a batch, and notes that there are any.
struct Spoils {
  uint32_t *bad, *spoiled;
  __device__ __forceinline__ void add(int seed, int n) const {
    atomicAdd(bad + seed, uint32_t(n));
    atomicExch(spoiled, 1u);
  }
};

// complete passes a batch to the host. The last block of the team to finish it calls it.
__device__ __forceinline__ void complete(const Queue& r, unsigned long long k) {
  const int slot = int(k % r.depth);
  const uint32_t spoiled = peekCount(r.spoiled + slot);
  if (spoiled) {
    uint32_t *from = r.bad + int64_t(slot) * r.seeds, *to = r.counts + int64_t(slot) * r.seeds;
    for (int i = Lane::inBlock(); i < r.seeds; i += kThreads) to[i] = peekCount(from + i), from[i] = 0;
    __syncthreads();
  }
  if (Lane::inBlock() > 0) return;
  if (spoiled) r.spoiled[slot] = 0;
  r.finished[slot] = 0;
  __threadfence_system();
  storeSystem(r.done + slot, 2 * (k + 1) + spoiled);
}

// Launch: as many threads per block as the layers' ordinary launches, and teams·tiles·parts + 1 blocks,
// which must fit the GPU at the same time. Shared memory: 32·N/E bytes per thread.
template <class T, int N, int E, bool whole>
__device__ __forceinline__ void stream(const Queue& r, const Stages& stages) {
  if (blockIdx.x == gridDim.x - 1) {
    if (Lane::inBlock() < kWarp) ward(r, Lane::inBlock());
    return;
  }
  const unsigned members = r.tiles * r.parts, team = blockIdx.x / members, member = blockIdx.x % members;
  const Part block{member % r.tiles, member / r.tiles, unsigned(r.parts)};
  uint32_t* arrived = r.arrived + team;
  uint32_t target = 0;
  char* scratch = r.scratch + 2 * r.stride * team;
  const int64_t record = 2 * int64_t(r.parts) * r.units;
  float4* records = r.records + team * r.layers * record;

  const unsigned long long behind = (team + r.teams - r.first % r.teams) % r.teams;
#pragma unroll 1
  for (unsigned long long k = r.first + behind;; k += r.teams) {
    const unsigned long long word = await(r, k);
    if (word == 0) return;
    const bool watched = word & kWatched;
    const int slot = int(k % r.depth);
    const char* x = r.x + slot * r.stride;
#pragma unroll 1
    for (int i = 0; i < r.layers; i++) {
      const Stage& s = stages.at[i];
      char* y = i == r.layers - 1 ? r.y + slot * r.stride : scratch + (i & 1) * r.stride;
      const Spoils bad{r.bad + int64_t(slot) * r.seeds + s.firstSeed, r.spoiled + slot};
      if (i > 0 && r.sync) meet(arrived, target += members);
      const Source<T, 1> source{{reinterpret_cast<const T*>(x)}};
      if (watched) {
        forward<T, N, E, whole, kWatch, PlainRows<T, N>>(s.layer, reinterpret_cast<T*>(y), source, r.share, records + i * record, bad, block);
        __syncthreads();  // the next layer reuses shared memory
      } else {
        forward<T, N, E, whole, kQuiet, PlainRows<T, N>>(s.layer, reinterpret_cast<T*>(y), source, r.share, nullptr, bad, block);
      }
      x = y;
    }
    if (watched) {
      meet(arrived, target += members);
#pragma unroll 1
      for (int i = 0; i < r.layers; i++) {
        const Stage& s = stages.at[i];
        const Left left{r.figures + 8 * (int64_t(slot) * r.seeds + s.firstSeed), records + i * record, r.parts, r.units,
                        s.layer.seeds, s.merging, s.layer.eps};
        const int across = kMergeThreads / s.merging, blocks = (s.layer.seeds + across - 1) / across;
#pragma unroll 1
        for (int b = member; b < blocks; b += members) {
          mergeFigures(left, b, Lane::inBlock(), true);
          __syncthreads();
        }
      }
    }

    __shared__ bool last;
    __syncthreads();
    if (Lane::inBlock() == 0) {
      __threadfence_system();  // y and the figures may be in pinned memory
      last = atomicAdd(r.finished + slot, 1u) == members - 1;
      __threadfence();
    }
    __syncthreads();
    if (last) complete(r, k);
    if (watched || r.sync) meet(arrived, target += members);
  }
}

#define DEFINE_STREAM(shape, T, N, E, whole)                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                    \
      kasmina_stream_##shape##_##T(const __grid_constant__ Queue r, const __grid_constant__ Stages stages) {    \
    stream<T, N, E, whole>(r, stages);                                                                         \
  }
#define DEFINE(T) FOR_WIDE_SHAPES(DEFINE_STREAM, T) DEFINE_STREAM(single, T, 1, 1, false)
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#undef DEFINE_STREAM
