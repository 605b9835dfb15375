// How the rows of a layer reach the threads of a kernel: two feeds.
//
//   Direct  each thread loads a batch of rows into its registers
//   Ring    each thread copies batches to its places in shared memory, two ahead (cp.async, sm_80)
//
// A thread reads only what it has fetched itself, so that no block ever waits for itself. A batch
// is B consecutive rows. The lanes take batches in turn, so that all blocks move through memory
// together, and rows that do not fill a batch one by one. The last batches come first: what the
// kernel before has written last, the L2 still holds. The kernel behind, which begins with the
// first rows, finds those there.
#pragma once
#include "kasmina.cuh"
#include <climits>

constexpr int kThreads = 256;

// Share is how the threads of a launch share the work. Of each warp's threads in a row, the first
// used have columns. They are fewer than all where a chunk must not cross from one warp to the
// next. The lanes before number late take batches in turn. Each of the others has run batches
// behind those, but the last few, ending, no more than tail. Blocks of lanes start in order. So
// late ones even out what the first ones' multiprocessors differ in speed, and short ones at last
// what those do.
struct Share {
  unsigned late : 24, run : 8, ending : 18, tail : 8, used : 6;
};

// Lane is where a thread works: the columns from col on, in batches index, index + count, ... The
// threads of a warp that have the same rows are peers. leads is whether it is the first thread that
// a warp has in a row.
struct Lane {
  int col;
  int index, count;  // of lanes
  unsigned peers;
  bool leads;

  __device__ __forceinline__ Lane(int n, const Share& share) {
    const bool narrow = blockDim.x < kWarp;  // else a multiple of it
    const int t = blockIdx.x * blockDim.x + threadIdx.x, place = narrow ? threadIdx.x : t % kWarp;
    col = place < share.used ? ((narrow ? blockIdx.x : t / kWarp) * share.used + place) * n : INT_MAX;
    index = blockIdx.y * blockDim.y + threadIdx.y, count = gridDim.y * blockDim.y, leads = place == 0;
  }
  // find says whether the thread has any columns of d. All threads of the block call it.
  __device__ __forceinline__ bool find(int d) {
    peers = __ballot_sync(kAllLanes, col < d);
    if (blockDim.x < kWarp) peers &= __match_any_sync(kAllLanes, threadIdx.y);
    return col < d;
  }
  __device__ __forceinline__ static int inBlock() { return threadIdx.y * blockDim.x + threadIdx.x; }
  __device__ __forceinline__ static int inWarp() { return inBlock() % kWarp; }
};

// Work is the rows of a lane: batches of B, from the last one on, then single rows, which one lane has. Places are in elements, of its
// columns.
template <int B> struct Work {
  int row, stride;  // of the first batch; rows from one batch back to the next
  int rest;         // the first single row; the last lane that takes batches in turn has them, as it has no more than others
  int batches, singles, col, d;

  __device__ __forceinline__ Work(const Lane& lane, const Share& share, int rows, int d)
      : col(lane.col), d(d) {
    const int full = rows / B, ending = lane.count - share.ending;
    const int last = max(full - share.ending * share.tail, 0), turns = max(last - (ending - share.late) * share.run, 0);
    int at = lane.index, end = turns, by = share.late;  // batches: the first, behind the last, from one to the next
    if (lane.index >= ending) at = last + (lane.index - ending) * share.tail, end = min(full, at + share.tail), by = 1;
    else if (lane.index >= share.late) at = turns + (lane.index - share.late) * share.run, end = min(last, at + share.run), by = 1;
    batches = at < end ? unsigned(end - 1 - at) / unsigned(by) + 1 : 0;
    row = (full - 1 - at) * B, stride = by * B, rest = full * B;
    singles = lane.index == share.late - 1 ? rows - rest : 0;
  }
  // Products are of 32 bits by 32 bits, which is one instruction: none is negative.
  __device__ __forceinline__ int64_t place(int row) const { return int64_t(uint64_t(unsigned(row)) * unsigned(d) + unsigned(col)); }
  __device__ __forceinline__ int64_t step() const { return int64_t(uint64_t(unsigned(stride)) * unsigned(d)); }
  // prefetch brings the first so many batches to the L2, a thread for each line. They need not have been written yet.
  template <int count, class T> __device__ __forceinline__ void prefetch(const T* x, const Lane& lane) const {
    if (!lane.leads && (reinterpret_cast<uintptr_t>(x + col) & 127) >= 16) return;
#pragma unroll
    for (int i = 0; i < count * B; i++)
      if (i < batches * B) asm volatile("prefetch.global.L2 [%0];" ::"l"(x + nth(i)));
  }
  __device__ __forceinline__ int count() const { return batches * B + singles; }  // of its rows
  __device__ __forceinline__ int64_t nth(int i) const {
    return place(i < batches * B ? row - i / B * stride + i % B : single(i - batches * B));
  }
  __device__ __forceinline__ int single(int i) const { return rest + i; }
};

// Pivots finds what the deviations of a thread's seeds are first taken from: of each, the median of its first three elements.
// From an outlier all others of a group would be far, and their squares would cancel.
template <class T, int N, int E> struct Pivots {
  static constexpr int G = N / E, early = E < 3 ? 3 : 1;  // rows that have three elements
  Pack<T, N> first[early];

  template <int B> __device__ __forceinline__ void fetch(const T* x, const Work<B>& work) {
#pragma unroll
    for (int i = 0; i < early; i++) {
      first[i] = {};
      if (i < work.count()) first[i] = load<N>(x + work.nth(i));
    }
  }
  template <int B> __device__ __forceinline__ void find(float (&k)[G], const T* x, const Work<B>& work) const {
#pragma unroll
    for (int g = 0; g < G; g++) {
      float e[3];
#pragma unroll
      for (int i = 0; i < 3; i++) e[i] = E < 3 ? first[i % early].get(g * E) : first[0].get(g * E + i);
      const bool plain = work.count() >= early && finite(e[0]) && finite(e[1]) && finite(e[2]);
      k[g] = __builtin_expect(plain, 1) || search(e, x + g * E, work) ? median(e[0], e[1], e[2]) : e[0];
    }
  }
  // search finds three elements that are finite, or as many as there are, and says whether it did.
  template <int B> __device__ static __forceinline__ bool search(float (&e)[3], const T* x, const Work<B>& work) {
    int found = 0;
    e[0] = 0;
#pragma unroll 1
    for (int i = 0; found < 3 && i < E * work.count(); i++)
      if (float v = toFloat(x[work.nth(i / E) + i % E]); finite(v)) e[2] = e[1], e[1] = e[0], e[0] = v, found++;
    return found == 3;
  }
};

// Source is A arrays of one shape.
template <class T, int A> struct Source {
  const T* p[A];
};

// A Feed<T, N, A> has the size B of its batches. With next(v, at) it gives the lane's batches one
// after the other, where at is where the batch begins. Of arrays but the first it gives zeros
// unless all, which a warp's threads agree on, and does not read them. After finish, and a barrier
// if it is shared, shared memory may serve other ends.
template <class T, int N, int A, int B_> struct Direct {
  static constexpr int B = B_;
  static constexpr bool shared = false;
  const Source<T, A>& src;
  const Work<B>& work;
  const bool all;

  __device__ __forceinline__ Direct(void*, const Source<T, A>& src, const Lane&, const Work<B>& w, bool all)
      : src(src), work(w), all(all) {}
  __device__ __forceinline__ void next(Pack<T, N> (&v)[A][B], int64_t at) {
#pragma unroll
    for (int a = 0; a < A; a++)
#pragma unroll
      for (int u = 0; u < B; u++) {
        v[a][u] = {};
        if (a == 0 || all) v[a][u] = load<N>(src.p[a] + at + int64_t(u) * work.d);
      }
  }
  __device__ __forceinline__ void finish() {}
};

// loadShared reads 16 bytes.
template <class V> __device__ __forceinline__ void loadShared(V& v, uint32_t from) {
  static_assert(sizeof(V) == 16, "16-byte accesses only");
  uint4& w = reinterpret_cast<uint4&>(v);
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(from) : "memory");
}

// storeWhole is store of 16 bytes in one access, which the compiler takes apart where it has lost sight of what belongs together.
template <class T, int N> __device__ __forceinline__ void storeWhole(T* p, const Pack<T, N>& v) {
  if constexpr (sizeof(v) == 16) {
    const uint4& w = reinterpret_cast<const uint4&>(v);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
  } else {
    store(p, v);
  }
}

// Ring takes ahead·A·B·kThreads·16 bytes of shared memory.
template <class T, int N, int A, int B_> struct Ring {
  static constexpr int B = B_, ahead = 3;
  static constexpr bool shared = true;
  static constexpr uint32_t array = kThreads * 16, stage = A * B * array;
  const Source<T, A>& src;
  const Work<B>& work;
  int rest;                  // bytes to read of arrays but the first; what is not read is 0
  int64_t at;
  int left;                  // batches not fetched yet
  uint32_t ring, put, take;  // its address, and offsets into it

  __device__ __forceinline__ Ring(void* shared, const Source<T, A>& src, const Lane&, const Work<B>& w, bool all)
      : src(src), work(w), rest(all ? 16 : 0), at(w.place(w.row)), left(w.batches), put(0), take(0) {
    ring = uint32_t(__cvta_generic_to_shared(shared)) + Lane::inBlock() * 16;
    asm volatile("" : "+r"(ring), "+r"(rest));  // so that they stay in registers
    for (int i = 0; i < ahead - 1; i++) request();
  }
  __device__ __forceinline__ void request() {
    if (left > 0)
#pragma unroll
      for (int u = 0; u < B; u++)
#pragma unroll
        for (int a = 0; a < A; a++)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ring + put + (u * A + a) * array),
                       "l"(src.p[a] + at + int64_t(u) * work.d), "r"(a == 0 ? 16 : rest)
                       : "memory");
    left--, at -= work.step();
    put = put + stage == ahead * stage ? 0 : put + stage;
    commitAsync();
  }
  __device__ __forceinline__ void next(Pack<T, N> (&v)[A][B], int64_t) {
    request();
    awaitAsync<ahead - 1>();
#pragma unroll
    for (int u = 0; u < B; u++)
#pragma unroll
      for (int a = 0; a < A; a++) loadShared(v[a][u], ring + take + (u * A + a) * array);
    take = take + stage == ahead * stage ? 0 : take + stage;
  }
  __device__ __forceinline__ void finish() {}
};

// prefetchParts brings to the L2 what a block is about to read: count elements of each of so many parts, which lie stride apart.
// They need not have been written yet.
template <class T> __device__ __forceinline__ void prefetchParts(const T* p, int parts, int64_t stride, int count) {
  const int lines = (count * int(sizeof(T)) + 127) / 128;
  for (int i = threadIdx.x; i < parts * lines; i += blockDim.x)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(p + i / lines * stride) + i % lines * 128));
}

// Neighbours gives the elements on either side of a thread's N columns. There is x1 right before
// them, x2 before x1, and likewise behind. They are zeros where the chunk ends.
template <class T, int N> struct Neighbours {
  int at, chunk;
  bool loadLeft, loadRight;  // the neighbour is in another warp
  bool crosses;              // of any thread of the warp
  unsigned peers;

  // whole: no thread has neighbours, and no member function is called.
  __device__ __forceinline__ Neighbours(const Lane& l, int at, int chunk, bool whole) : at(at), chunk(chunk), peers(l.peers) {
    if (whole) return;
    loadLeft = at > 0 && (l.inWarp() == 0 || !(peers >> (l.inWarp() - 1) & 1));
    loadRight = at + N < chunk && (l.inWarp() == kWarp - 1 || !(peers >> (l.inWarp() + 1) & 1));
    crosses = __any_sync(peers, loadLeft || loadRight);
  }
  // loadBefore and loadBehind take them from memory, where the thread's columns are at p.
  __device__ __forceinline__ void loadBefore(const T* p, float& x1, float& x2) const {
    x1 = at > 0 ? toFloat(p[-1]) : 0, x2 = at > 1 ? toFloat(p[-2]) : 0;
  }
  __device__ __forceinline__ void loadBehind(const T* p, float& x1, float& x2) const {
    x1 = at + N < chunk ? toFloat(p[N]) : 0, x2 = at + N + 1 < chunk ? toFloat(p[N + 1]) : 0;
  }
  // before and behind take them from the neighbouring threads, all of which call it. Where any of a
  // warp's crosses, crossBefore and crossBehind put right what those do not have.
  __device__ __forceinline__ void before(const Pack<T, N>& v, const T* p, float& x1, float& x2) const {
    if constexpr (N == 1) {
      loadBefore(p, x1, x2);
    } else {
      float two[2];
      exchange<N - 2>(two, v, at > 0, [&](uint32_t w) { return __shfl_up_sync(peers, w, 1); });
      x1 = two[1], x2 = two[0];
    }
  }
  __device__ __forceinline__ void behind(const Pack<T, N>& v, const T* p, float& x1, float& x2) const {
    if constexpr (N == 1) {
      loadBehind(p, x1, x2);
    } else {
      float two[2];
      exchange<0>(two, v, at + N < chunk, [&](uint32_t w) { return __shfl_down_sync(peers, w, 1); });
      x1 = two[0], x2 = two[1];
    }
  }
  __device__ __forceinline__ void crossBefore(const T* p, float& x1, float& x2) const {
    if (N > 1 && loadLeft) x1 = toFloat(p[-1]), x2 = toFloat(p[-2]);
  }
  __device__ __forceinline__ void crossBehind(const T* p, float& x1, float& x2) const {
    if (N > 1 && loadRight) x1 = toFloat(p[N]), x2 = toFloat(p[N + 1]);
  }

 private:
  // exchange gives elements i and i + 1 of another thread's v, or zeros where there are none.
  template <int i, class F>
  __device__ static __forceinline__ void exchange(float (&two)[2], const Pack<T, N>& v, bool any, F shuffle) {
    constexpr int words = 2 * sizeof(T) / 4;
    Pack<T, N> w = v;
#pragma unroll
    for (int k = 0; k < words; k++) {
      uint32_t& word = reinterpret_cast<uint32_t*>(&w)[i * int(sizeof(T)) / 4 + k];
      word = shuffle(word);
      word = any ? word : 0;
    }
    unpack(two, w, i);
  }
};

// sumOver adds up over the threads of a warp that share a chunk: share of them, of which this is number place.
__device__ __forceinline__ float sumOver(float v, int share, int place, unsigned peers) {
  if ((share & (share - 1)) == 0) {
    for (int k = share / 2; k > 0; k /= 2) v += __shfl_xor_sync(peers, v, k);
    return v;
  }
  for (int k = 1; k < share; k *= 2) {
    float o = __shfl_down_sync(peers, v, k);
    if (place + k < share) v += o;
  }
  return __shfl_sync(peers, v, Lane::inWarp() - place);
}

// sumTwoOver adds up two numbers likewise, over a share that is even. The thread at place 0 has the
// sum of a, the next that of b. It has no loop: each turn would begin with a check that the threads
// of such a mask are together. That takes longer than a shuffle.
__device__ __forceinline__ float sumTwoOver(float a, float b, int share, int place, unsigned peers) {
  const bool odd = place & 1;
  float v = (odd ? b : a) + __shfl_xor_sync(peers, odd ? a : b, 1);
  auto take = [&](int k) {
    float o = __shfl_down_sync(peers, v, k);
    v += place + k < share ? o : 0;
  };
  take(2), take(4);
  if (share > 8) take(8), take(16);
  return v;
}

// Shapes: what a thread holds. FOR_WIDE_SHAPES(DEFINE, T) is DEFINE(name, T, N, E, whole) for each
// where rows are aligned; whole is whether E is the chunk. quad: chunks of 4. part: chunks of whole
// accesses. Beside them there is single: any chunk, element by element.
#define FOR_WIDE_SHAPES(DEFINE, T)  \
  DEFINE(quad, T, kVec<T>, 4, true) \
  DEFINE(part, T, kVec<T>, kVec<T>, false)
// The kernels of a pass at a shape, KERNEL(mode, name, shape, T, N, E, whole, Feed) for each mode.
#define FOR_MODES(KERNEL, Feed, shape, T, N, E, whole) \
  KERNEL(kWatch, watch, shape, T, N, E, whole, Feed)   \
  KERNEL(kQuiet, quiet, shape, T, N, E, whole, Feed)   \
  KERNEL(kStrict, strict, shape, T, N, E, whole, PlainRows)
