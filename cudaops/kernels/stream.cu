// Kasmina forward over many small batches by one kernel that stays: y = x + α(t(x) − x), without figures, as in kasmina.cuh.
//
// A launch costs more than the work on a small batch. Here the host writes batches into a ring in pinned memory and the kernel
// takes them from there:
//
//   host:    entries[k % depth] = {x, y};  head = k + 1 (release)
//   warden:  sees head (acquire, system), copies the entries to the device, publishes head there (release)
//   team:    sees it (acquire), computes, and its last block sets done[k % depth] = k + 1 (release, system)
//
// The last block of the grid is the warden, the only one that looks across the bus. The others form teams; batch k is team
// k % teams' work, so nobody competes for it. A thread has the same columns of every batch: what it needs to know of its seeds
// stays in registers.
//
// The kernel always ends: when the host asks it to, and when it has seen no new batch for some time by the device's own clock,
// whatever has become of the host. Either way all batches that it has published are computed first, and consumed tells the
// host with which one the next launch begins.
#include "kasmina.cuh"

constexpr int kStreamThreads = 256;

struct Entry { const void* x; void* y; };

// Control is in pinned memory: the first line is the host's, the second the kernel's.
struct Control {
  unsigned long long head, stop;
  unsigned long long pad[6];
  unsigned long long consumed, ended;  // ended: 1 asked to, 2 idle
};

// Ring is the rest of what host and kernel share, and the kernel's own copy, which a memset clears before the launch.
struct Ring {
  Control* control;
  const Entry* entries;
  unsigned long long* done;
  unsigned long long* head;  // on the device: published, then closing
  Entry* copies;             // on the device
  unsigned* left;            // on the device: blocks that are done with a slot's batch
  unsigned long long first;  // the first batch
  unsigned long long idle;   // nanoseconds
  int depth, tiles, parts;   // a team is tiles·parts blocks: columns, rows
};

__device__ __forceinline__ unsigned long long loadSystem(const unsigned long long* p) {
  unsigned long long v;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void storeSystem(unsigned long long* p, unsigned long long v) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ unsigned long long loadDevice(const unsigned long long* p) {
  unsigned long long v;
  asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void storeDevice(unsigned long long* p, unsigned long long v) {
  asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// ward passes on batches until the kernel is to end. One warp runs it.
__device__ void ward(const Ring& r) {
  const int lane = threadIdx.x;
  unsigned long long seen = r.first, since = nanoseconds();
  for (;;) {
    unsigned long long head = 0, ended = 0;
    if (lane == 0) {
      unsigned long long stop = loadSystem(&r.control->stop);  // before head: what came before it is done
      head = loadSystem(&r.control->head);
      if (head <= seen) ended = stop ? 1 : nanoseconds() - since > r.idle ? 2 : 0;
    }
    head = __shfl_sync(kAllLanes, head, 0), ended = __shfl_sync(kAllLanes, ended, 0);
    if (head > seen) {
      __threadfence_system();
      for (unsigned long long k = seen + lane; k < head; k += kWarp) {
        const volatile Entry* e = r.entries + k % r.depth;
        r.copies[k % r.depth] = {e->x, e->y};
      }
      __threadfence();
      __syncwarp();
      if (lane == 0) storeDevice(r.head, head);
      seen = head, since = nanoseconds();
    } else if (ended) {
      if (lane == 0) {
        storeDevice(r.head + 1, 1);
        r.control->consumed = seen;
        storeSystem(&r.control->ended, ended);
      }
      return;
    }
  }
}

// loadFresh is load past the L1, which may hold what an earlier batch had at the same place.
template <int N, class T> __device__ __forceinline__ Pack<T, N> loadFresh(const T* p) {
  Pack<T, N> r;
  if constexpr (sizeof(r) == 16) {
    uint4& u = reinterpret_cast<uint4&>(r);
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w) : "l"(p) : "memory");
  } else {
    using W = typename WordOf<sizeof(r)>::type;
    reinterpret_cast<W&>(r) = *reinterpret_cast<const volatile W*>(p);
  }
  return r;
}

// apply computes the outputs of a seed's E inputs e, all scaled by scale; x1 and x2 are those before them.
template <bool careful, int E>
__device__ __forceinline__ void apply(float (&y)[E], const float* e, float x1, float x2, const Seed<E>& s, float scale) {
#pragma unroll
  for (int j = 0; j < E; j++) {
    float sum = s.q[j] * scale;
    sum = addTerm<careful>(s.r2, j > 1 ? e[j > 1 ? j - 2 : 0] : j > 0 ? x1 : x2, sum);
    sum = addTerm<careful>(s.r1, j > 0 ? e[j > 0 ? j - 1 : 0] : x1, sum);
    float c = e[j] > 0 ? s.p[j] : s.u[j];
    y[j] = careful && e[j] != e[j] ? e[j] : addTerm<careful>(c, e[j], sum);  // NaN is never hidden
  }
}

// transform replaces N elements, G seeds of E, by their outputs and returns how many are NaN or Inf.
template <class T, int N, int E>
__device__ __forceinline__ int transform(Pack<T, N>& v, float x1, float x2, const Seed<E> (&s)[N / E], float large) {
  float e[N];
  unpack(e, v, 0);
  int lost = 0;
#pragma unroll
  for (int g = 0; g < N / E; g++) {
    float top = maxNaN(fabsf(x1), fabsf(x2)), out[E];
#pragma unroll
    for (int j = 0; j < E; j++) top = maxNaN(top, fabsf(e[g * E + j]));
    if (top <= large) {
      apply<false>(out, e + g * E, x1, x2, s[g], 1);
    } else {
      int exp = 0;
#pragma unroll
      for (int j = 0; j < E; j++) lost += !finite(e[g * E + j]);
      if (finite(top)) frexpf(fmaxf(top / large, 0.5f), &exp);
      float down = ldexpf(1, -exp), up = ldexpf(1, exp);
#pragma unroll
      for (int j = 0; j < E; j++) e[g * E + j] *= down;
      apply<true>(out, e + g * E, x1 * down, x2 * down, s[g], down);
#pragma unroll
      for (int j = 0; j < E; j++) out[j] *= up;
    }
    if (s[g].blends) setPart(v, g * E, out);
  }
  return lost;
}

// Launch: kStreamThreads threads, teams·tiles·parts blocks and one more, all of which fit the GPU at once. bad counts elements that
// are NaN or Inf.
template <class T, int N, int E> __device__ __forceinline__ void stream(const Layer& l, const Ring& r, uint32_t* bad) {
  if (blockIdx.x == gridDim.x - 1) {
    if (threadIdx.x < kWarp) ward(r);
    return;
  }
  const int members = r.tiles * r.parts, member = blockIdx.x % members, tile = member % r.tiles, part = member / r.tiles;
  const unsigned teams = (gridDim.x - 1) / members, team = blockIdx.x / members;
  const int d = l.seeds * l.chunk, col = (tile * kStreamThreads + threadIdx.x) * N, at = col % l.chunk;
  const float large = greatest<T>(l.large);
  Seed<E> s[N / E];
  if (col < d) {
    Seed<E>::read(s, l, col / l.chunk, N == 1 ? at : 0);
#pragma unroll
    for (int g = 0; g < N / E; g++) s[g].bySign();
  }

  __shared__ Entry entry;
  __shared__ bool over;
  for (unsigned long long k = r.first + (team + teams - r.first % teams) % teams;; k += teams) {
    if (threadIdx.x == 0) {
      for (;;) {
        bool closing = loadDevice(r.head + 1);  // before head, which does not change after it
        over = loadDevice(r.head) <= k;
        if (!over || closing) break;
        __nanosleep(40);
      }
      if (!over) entry = r.copies[k % r.depth];
    }
    __syncthreads();
    if (over) return;
    if (col < d) {
      int lost = 0;
      const T* x = static_cast<const T*>(entry.x) + col;
      T* y = static_cast<T*>(entry.y) + col;
      constexpr int ahead = 4;
      for (int64_t row = part; row < l.rows; row += ahead * r.parts) {
        Pack<T, N> v[ahead];
        float x1[ahead] = {}, x2[ahead] = {};
#pragma unroll
        for (int i = 0; i < ahead; i++) {
          const T* p = x + (row + i * r.parts) * d;
          if (row + i * r.parts >= l.rows) continue;
          v[i] = loadFresh<N>(p);
          if (N == 1 && at > 0) x1[i] = loadFresh<1>(p - 1).get(0);
          if (N == 1 && at > 1) x2[i] = loadFresh<1>(p - 2).get(0);
        }
#pragma unroll
        for (int i = 0; i < ahead; i++) {
          if (row + i * r.parts >= l.rows) continue;
          lost += transform<T, N, E>(v[i], x1[i], x2[i], s, large);
          store(y + (row + i * r.parts) * d, v[i]);
        }
      }
      if (lost > 0) atomicAdd(bad, uint32_t(lost));
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* left = r.left + k % r.depth;
      if (atomicAdd(left, 1) == unsigned(members) - 1) {
        *left = 0;
        __threadfence_system();
        storeSystem(r.done + k % r.depth, k + 1);
      }
    }
  }
}

#define DEFINE(T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(kStreamThreads)                                                       \
      kasmina_stream_quad_##T(const __grid_constant__ Layer l, const __grid_constant__ Ring r, uint32_t* bad) { \
    stream<T, kVec<T>, 4>(l, r, bad);                                                                          \
  }                                                                                                            \
  extern "C" __global__ void __launch_bounds__(kStreamThreads)                                                       \
      kasmina_stream_single_##T(const __grid_constant__ Layer l, const __grid_constant__ Ring r, uint32_t* bad) { \
    stream<T, 1, 1>(l, r, bad);                                                                                \
  }
FOR_STORAGE_TYPES(DEFINE)
