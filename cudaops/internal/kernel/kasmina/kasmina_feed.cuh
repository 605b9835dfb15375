// Two feeds that bring the rows of a layer to the threads of a kernel:
//
//   Direct  each thread loads a batch of rows into its registers
//   Ring    each thread copies batches to its part of shared memory, two ahead (cp.async, sm_80)
//
// A thread reads only data that it has fetched itself, so the threads of a block never wait for
// each other. A batch is B consecutive rows. Lanes take batches in turn, so that all blocks advance
// through memory together. Rows that don't fill a batch are processed one by one. The last batches
// come first, because L2 still holds the rows that the preceding kernel wrote last. The next
// kernel, which starts with the first rows, finds those there in turn.
#pragma once
#include "kasmina.cuh"
#include <climits>

constexpr int kThreads = 256;

// Share describes how the threads of a launch share the work. In each row of a warp's threads, only
// the first `used` have columns. This is less than a full warp if a chunk must not straddle two
// warps.
//
// The lanes numbered below `late` take batches in turn. Each later lane has `run` consecutive
// batches after those, except for the last `ending` lanes, which have at most `tail` each. Blocks
// start in order, so the late lanes even out differences in speed between multiprocessors in the
// first part, and the short ones do the same at the very end.
struct Share {
  unsigned late : 24, run : 8, ending : 18, tail : 8, used : 6;
};

// The position of a block in the grid that covers a layer, and the number of blocks that share its
// rows. Own is the running block. Part is a block that a block of another grid computes.
struct Own {
  static constexpr bool launched = true;
  __device__ static __forceinline__ unsigned x() { return blockIdx.x; }
  __device__ static __forceinline__ unsigned y() { return blockIdx.y; }
  __device__ static __forceinline__ unsigned down() { return gridDim.y; }
};

struct Part {
  static constexpr bool launched = false;
  unsigned across, row, rows;
  __device__ __forceinline__ unsigned x() const { return across; }
  __device__ __forceinline__ unsigned y() const { return row; }
  __device__ __forceinline__ unsigned down() const { return rows; }
};

// Lane is the position of a thread: the columns from col on, in batches index, index + count, ...
// The threads of a warp with the same rows are peers. leads is true for the first thread of a warp
// in a row.
struct Lane {
  int col;
  int index, count;  // of lanes
  unsigned peers;
  bool leads;

  template <class Block> __device__ __forceinline__ Lane(int n, const Share& share, const Block& block) {
    const bool narrow = blockDim.x < kWarp;  // otherwise a multiple of kWarp
    const int t = block.x() * blockDim.x + threadIdx.x, place = narrow ? threadIdx.x : t % kWarp;
    col = place < share.used ? ((narrow ? block.x() : t / kWarp) * share.used + place) * n : INT_MAX;
    index = block.y() * blockDim.y + threadIdx.y, count = block.down() * blockDim.y, leads = place == 0;
  }
  __device__ __forceinline__ Lane(int n, const Share& share) : Lane(n, share, Own{}) {}
  // find reports whether the thread has any of the d columns. All threads of the block must call
  // it.
  __device__ __forceinline__ bool find(int d) {
    peers = __ballot_sync(kAllLanes, col < d);
    if (blockDim.x < kWarp) peers &= __match_any_sync(kAllLanes, threadIdx.y);
    return col < d;
  }
  __device__ __forceinline__ static int inBlock() { return threadIdx.y * blockDim.x + threadIdx.x; }
  __device__ __forceinline__ static int inWarp() { return inBlock() % kWarp; }
};

// Work is the rows of a lane: batches of B, from the last one to the first, and then single rows,
// which only one lane has. Positions are in elements, for the lane's columns.
template <int B> struct Work {
  int row, stride;  // row: of the first batch; stride: rows from one batch back to the next
  int rest;         // the first single row; these go to the last lane that takes batches in turn, which never has more batches than another lane
  int batches, singles, col, d;

  __device__ __forceinline__ Work(const Lane& lane, const Share& share, int rows, int d)
      : col(lane.col), d(d) {
    const int full = rows / B, ending = lane.count - share.ending;
    const int last = max(full - share.ending * share.tail, 0), turns = max(last - (ending - share.late) * share.run, 0);
    int at = lane.index, end = turns, by = share.late;  // batches: first, end, and step
    if (lane.index >= ending) at = last + (lane.index - ending) * share.tail, end = min(full, at + share.tail), by = 1;
    else if (lane.index >= share.late) at = turns + (lane.index - share.late) * share.run, end = min(last, at + share.run), by = 1;
    batches = at < end ? unsigned(end - 1 - at) / unsigned(by) + 1 : 0;
    row = (full - 1 - at) * B, stride = by * B, rest = full * B;
    singles = lane.index == share.late - 1 ? rows - rest : 0;
  }
  // Products are 32 by 32 bits, which takes one instruction; no operand is negative.
  __device__ __forceinline__ int64_t place(int row) const { return int64_t(uint64_t(unsigned(row)) * unsigned(d) + unsigned(col)); }
  __device__ __forceinline__ int64_t step() const { return int64_t(uint64_t(unsigned(stride)) * unsigned(d)); }
  // prefetch brings the first `count` batches to L2, with one thread per line. They may still be
  // unwritten.
  template <int count, class T> __device__ __forceinline__ void prefetch(const T* x, const Lane& lane) const {
    if (!lane.leads && (reinterpret_cast<uintptr_t>(x + col) & 127) >= 16) return;
#pragma unroll
    for (int i = 0; i < count * B; i++)
      if (i < batches * B) asm volatile("prefetch.global.L2 [%0];" ::"l"(x + nth(i)));
  }
  __device__ __forceinline__ int count() const { return batches * B + singles; }  // rows of the lane
  __device__ __forceinline__ int64_t nth(int i) const {
    return place(i < batches * B ? row - i / B * stride + i % B : single(i - batches * B));
  }
  __device__ __forceinline__ int single(int i) const { return rest + i; }
};

// Pivots finds a pivot for the deviations of each of a thread's seeds: the median of its first
// three elements. If the pivot were an outlier, all other elements would be far from it, and their
// squares would cancel.
template <class T, int N, int E> struct Pivots {
  static constexpr int G = N / E, early = E < 3 ? 3 : 1;  // rows that contain three elements
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
  // search finds the first three finite elements, and reports whether there were three.
  template <int B> __device__ static __forceinline__ bool search(float (&e)[3], const T* x, const Work<B>& work) {
    int found = 0;
    e[0] = 0;
#pragma unroll 1
    for (int i = 0; found < 3 && i < E * work.count(); i++)
      if (float v = toFloat(x[work.nth(i / E) + i % E]); finite(v)) e[2] = e[1], e[1] = e[0], e[0] = v, found++;
    return found == 3;
  }
};

// Source holds A arrays of the same shape.
template <class T, int A> struct Source {
  const T* p[A];
};

// A feed, Feed<T, N, A>, has a batch size B. next(v, at) returns the lane's batches one after
// another, where `at` is the start of the batch. Unless `all` is set, which must be the same for
// all threads of a warp, only the first array is read, and next returns zeros for the rest. After
// finish, plus a barrier if `shared` is set, shared memory may be reused.
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

// loadShared reads 16 bytes from shared memory.
template <class V> __device__ __forceinline__ void loadShared(V& v, uint32_t from) {
  static_assert(sizeof(V) == 16, "16-byte accesses only");
  uint4& w = reinterpret_cast<uint4&>(v);
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(from) : "memory");
}

// storeWhole stores 16 bytes in one access. The compiler splits a plain store if it no longer knows
// that the registers belong together.
template <class T, int N> __device__ __forceinline__ void storeWhole(T* p, const Pack<T, N>& v) {
  if constexpr (sizeof(v) == 16) {
    const uint4& w = reinterpret_cast<const uint4&>(v);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
  } else {
    store(p, v);
  }
}

// Ring uses ahead·A·B·kThreads·16 bytes of shared memory.
template <class T, int N, int A, int B_> struct Ring {
  static constexpr int B = B_, ahead = 3;
  static constexpr bool shared = true;
  static constexpr uint32_t array = kThreads * 16, stage = A * B * array;
  const Source<T, A>& src;
  const Work<B>& work;
  int rest;                  // bytes to read from each array after the first; the rest becomes 0
  int64_t at;
  int left;                  // batches not yet fetched
  uint32_t ring, put, take;  // the ring's address, and offsets into it

  __device__ __forceinline__ Ring(void* shared, const Source<T, A>& src, const Lane&, const Work<B>& w, bool all)
      : src(src), work(w), rest(all ? 16 : 0), at(w.place(w.row)), left(w.batches), put(0), take(0) {
    ring = uint32_t(__cvta_generic_to_shared(shared)) + Lane::inBlock() * 16;
    asm volatile("" : "+r"(ring), "+r"(rest));  // keep these in registers
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

// prefetchParts brings data that a block is about to read to L2: `count` elements from each part,
// where parts are `stride` elements apart. They may still be unwritten.
template <class T> __device__ __forceinline__ void prefetchParts(const T* p, int parts, int64_t stride, int count) {
  const int lines = (count * int(sizeof(T)) + 127) / 128;
  for (int i = threadIdx.x; i < parts * lines; i += blockDim.x)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(p + i / lines * stride) + i % lines * 128));
}

// Neighbours provides the elements on either side of a thread's N columns. x1 is adjacent to them
// and x2 is next to x1, before or after. Outside the chunk they are zeros.
template <class T, int N> struct Neighbours {
  int at, chunk;
  bool loadLeft, loadRight;  // the neighbor is in another warp
  bool crosses;              // true if any thread of the warp has such a neighbor
  unsigned peers;

  // If `whole` is set, threads have no neighbors, and no member function may be called.
  __device__ __forceinline__ Neighbours(const Lane& l, int at, int chunk, bool whole) : at(at), chunk(chunk), peers(l.peers) {
    if (whole) return;
    loadLeft = at > 0 && (l.inWarp() == 0 || !(peers >> (l.inWarp() - 1) & 1));
    loadRight = at + N < chunk && (l.inWarp() == kWarp - 1 || !(peers >> (l.inWarp() + 1) & 1));
    crosses = __any_sync(peers, loadLeft || loadRight);
  }
  // loadBefore and loadBehind read the neighbors from memory, where p points to the thread's
  // columns.
  __device__ __forceinline__ void loadBefore(const T* p, float& x1, float& x2) const {
    x1 = at > 0 ? toFloat(p[-1]) : 0, x2 = at > 1 ? toFloat(p[-2]) : 0;
  }
  __device__ __forceinline__ void loadBehind(const T* p, float& x1, float& x2) const {
    x1 = at + N < chunk ? toFloat(p[N]) : 0, x2 = at + N + 1 < chunk ? toFloat(p[N + 1]) : 0;
  }
  // before and behind get the neighbors from adjacent threads, which must all call them. If any
  // thread of the warp crosses into another warp, crossBefore and crossBehind then correct its
  // neighbors.
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
  // exchange returns elements i and i + 1 of another thread's v, or zeros if there are none.
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

// sumOver adds up v over the `share` threads of a warp that share a chunk. This thread is number
// `place` of these.
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

// sumTwoOver adds up two numbers the same way, for an even share. The thread at place 0 gets the
// sum of a, and the thread at place 1 the sum of b. It is written without a loop, since every
// iteration would start by checking that the threads of the mask are together, which takes longer
// than a shuffle.
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

// Shapes describe which columns a thread has. FOR_WIDE_SHAPES(DEFINE, T) expands to DEFINE(name, T,
// N, E, whole) for each shape with aligned rows, where `whole` means that E is the chunk. The shape
// quad has chunks of 4, and part has chunks of whole accesses. The shape single handles any chunk,
// element by element.
#define FOR_WIDE_SHAPES(DEFINE, T)  \
  DEFINE(quad, T, kVec<T>, 4, true) \
  DEFINE(part, T, kVec<T>, kVec<T>, false)
// FOR_MODES expands to the kernels of a pass for one shape, KERNEL(mode, name, shape, T, N, E,
// whole, Feed) for each mode.
#define FOR_MODES(KERNEL, Feed, shape, T, N, E, whole) \
  KERNEL(kWatch, watch, shape, T, N, E, whole, Feed)   \
  KERNEL(kQuiet, quiet, shape, T, N, E, whole, Feed)   \
  KERNEL(kStrict, strict, shape, T, N, E, whole, PlainRows)
