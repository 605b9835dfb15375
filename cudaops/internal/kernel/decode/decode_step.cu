// One kernel that decodes a token: it runs all ops of a model, one after another, on blocks that stay on
// their multiprocessors.
//
// An op is one of
//
//   product    y = x·wᵀ + c, or gate(x·gateᵀ) ⊙ x·upᵀ, for one row x
//   attention  to cached keys and values, as in decode_attention.cuh
//   vector     a lookup, norm, sum or elementwise function of one row
//
// Rows of products and slices of attention are divided among the blocks. Vector ops are so short that every
// block computes them by itself: the result stays in the block's shared memory, where the next op reads it,
// and block 0 also stores it. An op that reads results of other blocks first waits for all of them.
//
// The weights don't depend on any op. Each warp therefore copies the pieces of its rows, through all ops of
// the kernel, to a ring of its own in shared memory. While blocks wait for each other, attend or compute
// norms, the rings fill with the rows of the next products, so that reading weights hardly ever stops.
//
// Sums are float32, and their order depends only on the shapes and on the number of blocks.
#include "barrier.cuh"
#include "common.cuh"
#include "decode_attention.cuh"
#include "gate.cuh"

constexpr int kWarps = 8, kPieceBytes = 4096;

#ifdef HOPPER

// The numbers of kinds, flags and fields must match step.go.
enum Kind { kProduct, kGated, kAttention, kEmbedding, kRMSNorm, kLayerNorm, kAdd, kGELU, kMulScalar, kAddScalar };
enum Flag {
  kWait = 1,         // wait for all blocks first
  kFirstHeld = 2,    // the first operand is the result of the preceding op, in shared memory
  kSecondHeld = 4,   // the second operand is
  kUseGELU = 8,      // the gate is GELU instead of SiLU
  kPlusOne = 16,     // the norm's factor is 1 + w
  kPacked = 32,      // attention can read 16 bytes at a time
  kPaged = 64,       // the position is followed by the pages of the sequence
};

struct Op {
  void* p[11];
  int kind, flags, n[7];
  float f;
};
constexpr int kOpWords = sizeof(Op) / 4, kOps = 4;  // ops in shared memory at a time

// Weights are the rows of a product, divided into items. An item is two rows that a warp multiplies at once.
struct Weights {
  const char* first;  // the first row of the first item
  int64_t apart;      // bytes from an item's first row to its second
  int step;           // bytes from an item's first row to the next item's
  int items, bytes;   // bytes of a row
  int odd;            // the last item has no second row
};

// Stream copies the pieces of a warp's rows to a ring of slots. A piece is up to PieceBytes of both rows of an
// item. All lanes of the warp call its methods.
//
// A copy by the copy engine costs about 70 cycles of its time besides the transfer, however short it is. If
// Bulk is not set, the lanes copy 16 bytes each instead.
template <int Warps, int PieceBytes, bool Bulk> struct Stream {
  const Weights* weights;
  int count;  // of products
  char* data;
  uint32_t barriers;
  int slots;
  // the next piece to copy, and the slot to wait for
  Weights now;
  int product, item, end, at;
  int slot, parity;

  __device__ __forceinline__ void begin() {
    while (product < count) {
      now = weights[product];
      const int from = int64_t(now.items) * blockIdx.x / gridDim.x;
      end = int64_t(now.items) * (blockIdx.x + 1) / gridDim.x;
      item = from + threadIdx.x / kWarp, at = 0;
      if (item < end) return;
      product++;
    }
  }

  // secondRow returns the offset of an item's second row in a slot. Short rows that follow each other in
  // memory do so in a slot as well, so that one copy moves both.
  __device__ __forceinline__ static int secondRow(const Weights& w) {
    return w.apart == w.bytes && w.bytes <= PieceBytes ? w.bytes : PieceBytes;
  }

  // copy starts the copy of the next piece to a slot that is not in use.
  __device__ __forceinline__ void copy(int to) {
    if (product < count) {
      const char* from = now.first + int64_t(item) * now.step + at;
      const int bytes = min(PieceBytes, now.bytes - at), second = secondRow(now);
      const bool both = !(now.odd && item == now.items - 1);
      char* slot = data + to * 2 * PieceBytes;
      if constexpr (!Bulk) {
        move(slot, from, bytes);
        if (both) move(slot + second, from + now.apart, bytes);
      } else if (threadIdx.x % kWarp == 0) {
        const uint32_t barrier = barriers + 8 * to;
        tile::barrierExpect(barrier, both ? 2 * bytes : bytes);
        const bool together = both && now.apart == now.bytes && now.bytes <= PieceBytes;
        bulk(slot, from, together ? 2 * bytes : bytes, barrier);
        if (both && !together) bulk(slot + second, from + now.apart, bytes, barrier);
      }
      at += bytes;
      if (at == now.bytes) {
        at = 0, item += Warps;
        if (item >= end) product++, begin();
      }
    }
    if constexpr (!Bulk) commitAsync();  // also without a piece, because wait counts groups
  }

  // move starts the lanes' copies of a multiple of 16 bytes, at most PieceBytes.
  __device__ __forceinline__ void move(char* to, const char* from, int bytes) {
#pragma unroll
    for (int u = 0; u < PieceBytes / 16 / kWarp; u++) {
      const int i = (u * kWarp + threadIdx.x % kWarp) * 16;
      if (i < bytes) copyAsync(to + i, from + i, true);
    }
  }

  // bulk starts the copy of a multiple of 16 bytes that the block reads only once.
  __device__ __forceinline__ void bulk(void* to, const void* from, int bytes, uint32_t barrier) {
    uint64_t once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            uint32_t(__cvta_generic_to_shared(to))),
        "l"(from), "r"(bytes), "r"(barrier), "l"(once)
        : "memory");
  }

  // wait waits for the next piece and returns its first row.
  __device__ __forceinline__ const char* wait() const {
    if constexpr (Bulk) {
      tile::barrierWait(barriers + 8 * slot, parity);
    } else {
      if (slots == 2)
        awaitAsync<1>();
      else
        awaitAsync<2>();
      __syncwarp();
    }
    return data + slot * 2 * PieceBytes;
  }
  // next frees the slot of wait, which then receives another piece.
  __device__ __forceinline__ void next() {
    __syncwarp();
    copy(slot);
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

// arrive announces that the block has finished its ops so far. The barrier orders the writes of its threads
// before the release, and the release orders them before the acquire of any block in awaitAll.
__device__ __forceinline__ void arrive(unsigned* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}

// awaitAll waits until all blocks have called arrive `times` times.
__device__ __forceinline__ void awaitAll(const unsigned* arrived, unsigned times) {
  if (threadIdx.x == 0) {
    unsigned n;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(arrived) : "memory");
    while (n < times * gridDim.x);
  }
  __syncthreads();
}

// prefetch loads n bytes to L2. All threads of the block must call it with the same arguments.
__device__ __forceinline__ void prefetch(const void* p, int bytes) {
  for (int i = threadIdx.x * 128; p && i < bytes; i += blockDim.x * 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p) + i));
}

// The operands of vector ops are read in packs of kVec<T> elements, by all threads of the block.
template <class T, class F> __device__ __forceinline__ void forPacks(int n, F f) {
  for (int i = threadIdx.x * kVec<T>; i < n; i += blockDim.x * kVec<T>) f(i);
}

// fromOthers reads results of other blocks.
template <class T> __device__ __forceinline__ Pack<T, kVec<T>> fromOthers(const T* p) {
  Pack<T, kVec<T>> r;
  reinterpret_cast<uint4&>(r) = __ldcg(reinterpret_cast<const uint4*>(p));
  return r;
}

// Context is what all ops of a block share.
template <class T> struct Context {
  T* held;  // the result of the last vector op, or the input of the current product
  bool stores;  // whether this block stores results of vector ops
  __device__ __forceinline__ Pack<T, kVec<T>> read(const Op& o, int operand, int i) const {
    if (o.flags & (operand == 1 ? kFirstHeld : kSecondHeld)) return load<kVec<T>>(held + i);
    return fromOthers(static_cast<const T*>(o.p[operand]) + i);
  }
  __device__ __forceinline__ void write(const Op& o, int i, const Pack<T, kVec<T>>& v) const {
    store(held + i, v);
    if (stores && o.p[0]) store(static_cast<T*>(o.p[0]) + i, v);
  }
};

// Fields of vector ops: p[0] is the result y, p[1] and p[2] are the first and second operand, and n[0] is
// the length of y.

template <class T, class F> __device__ __forceinline__ void map(const Op& o, Context<T> c, bool two, F f) {
  forPacks<T>(o.n[0], [&](int i) {
    const auto a = c.read(o, 1, i);
    const auto b = two ? c.read(o, 2, i) : a;
    Pack<T, kVec<T>> y;
#pragma unroll
    for (int j = 0; j < kVec<T>; j++) y.set(j, f(a.get(j), b.get(j)));
    c.write(o, i, y);
  });
}

// embed computes y = table[id]. p[1] are the ids, p[2] is the table, and n[1] the number of its rows.
template <class T> __device__ __noinline__ void embed(const Op& o, Context<T> c) {
  const int64_t id = *static_cast<const int64_t*>(o.p[1]);
  const bool known = id >= 0 && id < o.n[1];
  const T* row = static_cast<const T*>(o.p[2]) + (known ? id : 0) * o.n[0];
  forPacks<T>(o.n[0], [&](int i) {
    auto v = load<kVec<T>>(row + i);
    if (!known)
#pragma unroll
      for (int j = 0; j < kVec<T>; j++) v.set(j, NAN);
    c.write(o, i, v);
  });
}

// Fields of norms: p[3] is the weight, p[4] the sum of the operands or null, p[5] the bias of a layer norm,
// n[1] the number of features of a row, and f epsilon.

// Factors are the weights and biases of a pack.
template <int N> struct Factors {
  float w[N], b[N];
  __device__ __forceinline__ void load(const Op& o, int feature) {
    const float *weight = static_cast<const float*>(o.p[3]) + feature, *bias = static_cast<const float*>(o.p[5]);
    const float one = o.flags & kPlusOne ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) w[j] = weight[j] + one, b[j] = bias ? bias[feature + j] : 0.0f;
  }
  template <class T> __device__ __forceinline__ Pack<T, N> of(const Pack<T, N>& x, float mean, float s) const {
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; j++) y.set(j, (x.get(j) - mean) * s * w[j] + b[j]);
    return y;
  }
};

constexpr int kRowPacks = 4;  // the most packs of a row per thread

// normalize normalizes one row, which the block holds in registers.
template <bool Layer, class T> __device__ __noinline__ void normalize(const Op& o, Context<T> c) {
  constexpr int N = kVec<T>;
  const int d = o.n[1], apart = blockDim.x * N, first = threadIdx.x * N;
  Pack<T, N> x[kRowPacks];
  Factors<N> factors[kRowPacks];
  float sum = 0;
#pragma unroll
  for (int u = 0; u < kRowPacks; u++) {
    const int i = first + u * apart;
    if (i >= d) continue;
    x[u] = c.read(o, 1, i);
    factors[u].load(o, i);
    if (o.p[2] || o.flags & kSecondHeld) {
      const auto r = c.read(o, 2, i);
#pragma unroll
      for (int j = 0; j < N; j++) x[u].set(j, x[u].get(j) + r.get(j));
      if (c.stores && o.p[4]) store(static_cast<T*>(o.p[4]) + i, x[u]);
    }
#pragma unroll
    for (int j = 0; j < N; j++) sum += Layer ? x[u].get(j) : x[u].get(j) * x[u].get(j);
  }
  sum = blockReduce<Sum>(sum);
  float mean = 0;
  if (Layer) {
    mean = sum / d, sum = 0;
#pragma unroll
    for (int u = 0; u < kRowPacks; u++)
      if (first + u * apart < d)
#pragma unroll
        for (int j = 0; j < N; j++) sum += (x[u].get(j) - mean) * (x[u].get(j) - mean);
    sum = blockReduce<Sum>(sum);
  }
  const float s = rsqrtf(sum / d + o.f);
#pragma unroll
  for (int u = 0; u < kRowPacks; u++)
    if (first + u * apart < d) c.write(o, first + u * apart, factors[u].of(x[u], mean, s));
}

// normalizeRows normalizes several rows, such as heads, each by a warp.
template <class T> __device__ __noinline__ void normalizeRows(const Op& o, Context<T> c) {
  constexpr int N = kVec<T>;
  const int d = o.n[1], lane = threadIdx.x % kWarp;
  for (int row = threadIdx.x / kWarp * d; row < o.n[0]; row += blockDim.x / kWarp * d) {
    float squares = 0;
    for (int i = lane * N; i < d; i += kWarp * N) {
      const auto x = c.read(o, 1, row + i);
#pragma unroll
      for (int j = 0; j < N; j++) squares += x.get(j) * x.get(j);
    }
    const float s = rsqrtf(warpReduce<Sum>(squares) / d + o.f);
    for (int i = lane * N; i < d; i += kWarp * N) {
      Factors<N> factors;
      factors.load(o, i);
      c.write(o, row + i, factors.of(c.read(o, 1, row + i), 0.0f, s));
    }
  }
}

// multiply computes a product. p[0] is y, p[1] is x, p[2] is c or null, n[0] is the number of results, and
// n[1] the length of x.
template <bool Gated, class T, int Warps, int PieceBytes, bool Bulk>
__device__ __forceinline__ void multiply(const Op& o, Context<T> c, Stream<Warps, PieceBytes, Bulk>& stream, const Weights& w) {
  constexpr int N = kVec<T>;
  const int second = stream.secondRow(w);
  const int lane = threadIdx.x % kWarp, end = int64_t(w.items) * (blockIdx.x + 1) / gridDim.x;
  int item = int64_t(w.items) * blockIdx.x / gridDim.x + threadIdx.x / kWarp;
  // addend returns the lane's element of c for an item. It is loaded an item ahead.
  auto addend = [&](int item) {
    const int row = 2 * item + lane;
    return !Gated && o.p[2] && item < end && lane < 2 && row < o.n[0] ? toFloat(static_cast<const T*>(o.p[2])[row]) : 0.0f;
  };
  float next = addend(item);
  if (!(o.flags & kFirstHeld)) {
    forPacks<T>(o.n[1], [&](int i) { store(c.held + i, fromOthers(static_cast<const T*>(o.p[1]) + i)); });
    __syncthreads();
  }
  for (; item < end; item += Warps) {
    const int row = Gated ? item : 2 * item + lane;
    const bool writes = Gated ? lane == 0 : lane < 2 && row < o.n[0];
    const float add = next;
    next = addend(item + Warps);
    float sum[2][2] = {};
    for (int at = 0; at < w.bytes; at += PieceBytes) {
      const int packs = min(PieceBytes, w.bytes - at) / 16;
      const T* x = c.held + at / int(sizeof(T));
      const char* rows = stream.wait();
#pragma unroll 4
      for (int i = lane; i < packs; i += kWarp) {
        const auto v = load<N>(x + i * N);
        const auto a = load<N>(reinterpret_cast<const T*>(rows) + i * N);
        const auto b = load<N>(reinterpret_cast<const T*>(rows + second) + i * N);
#pragma unroll
        for (int j = 0; j < N; j++) sum[0][j % 2] += v.get(j) * a.get(j), sum[1][j % 2] += v.get(j) * b.get(j);
      }
      stream.next();
    }
    const float a = warpReduce<Sum>(sum[0][0] + sum[0][1]), b = warpReduce<Sum>(sum[1][0] + sum[1][1]);
    if (!writes) continue;
    float y = (lane ? b : a) + add;
    if (Gated) y = o.flags & kUseGELU ? gateMul<T, true>(a, b) : gateMul<T, false>(a, b);
    static_cast<T*>(o.p[0])[row] = fromFloat<T>(y);
  }
}

constexpr int kTogetherHeads = 4;  // query heads that a block computes at once

// Rounds is the number of heads merged at once, so that the shared memory stays below 18 KiB per eight
// warps.
template <int L, int Warps> using Merged = SharedOf<L, kTogetherHeads, L == 8 ? 4 : L == 16 ? 2 : 1, Warps * kWarp>;

// attentionOf returns the fields of an attention: p holds its pointers, and n its sizes, in their order.
__device__ __forceinline__ Attention attentionOf(const Op& o) {
  return {o.p[1], o.p[2], o.p[3], o.p[0], o.p[4], o.p[5], static_cast<const float*>(o.p[6]), static_cast<const float*>(o.p[7]),
          static_cast<const int64_t*>(o.p[8]), static_cast<float*>(o.p[9]), static_cast<unsigned*>(o.p[10]),
          o.n[0], o.n[1], o.n[2], o.n[3], o.n[4], o.n[5], o.f, o.flags & kPacked};
}

// forSlices calls f(kv, z, slice, slices, keys) for the block's slices of an attention.
template <class F> __device__ __forceinline__ void forSlices(const Attention& a, int64_t position, F f) {
  if (position < 0 || position >= a.capacity) return;  // the host rejects such positions
  int keys;
  const int slices = slicesOf(int(position) + 1 - firstVisible(a, position), a.slices, &keys);
  const int groups = (a.heads / a.kvHeads + kTogetherHeads - 1) / kTogetherHeads;
  for (int i = blockIdx.x; i < slices * a.kvHeads * groups; i += gridDim.x)
    f(i % a.kvHeads, i / a.kvHeads % groups, i / a.kvHeads / groups, slices, keys);
}

// Known is a position that the block has read from an address.
struct Known {
  const int64_t* from;
  int64_t position;
  __device__ __forceinline__ int64_t at(const int64_t* p) const { return p == from ? position : *p; }
};

template <class T, class Shared, class RowOf>
__device__ __noinline__ void attendAll(const Op& o, void* shared, Known known) {
  const Attention a = attentionOf(o);
  const int64_t position = known.at(a.position);
  forSlices(a, position, [&](int kv, int z, int slice, int slices, int keys) {
    __syncthreads();
    attend<T>(a, *static_cast<Shared*>(shared), position, kv, z, slice, slices, keys, RowOf(a.position + 1));
  });
}

template <class T, int L, int Warps> __device__ __forceinline__ void attendWith(const Op& o, void* shared, Known known) {
  if (o.flags & kPaged)
    attendAll<T, Merged<L, Warps>, PagedRows<true>>(o, shared, known);
  else
    attendAll<T, Merged<L, Warps>, Rows>(o, shared, known);
}

// prefetchFor loads what an op reads and no other block writes to L2, and the position of an attention.
template <class T> __device__ __forceinline__ void prefetchFor(const Op& o, Known& known) {
  if (o.kind == kRMSNorm || o.kind == kLayerNorm) {
    prefetch(o.p[3], 4 * o.n[1]);
    prefetch(o.p[5], 4 * o.n[1]);
  }
  if (o.kind != kAttention) return;
  const Attention a = attentionOf(o);
  const int64_t position = known.at(a.position);
  known = {a.position, position};
  forSlices(a, position, [&](int kv, int z, int slice, int slices, int keys) {
    const int begin = firstVisible(a, position) + slice * keys, end = min(begin + keys, int(position));
    const int bytes = a.dim * sizeof(T), lines = (bytes + 127) / 128;
    for (int i = threadIdx.x; i < (end - begin) * lines; i += blockDim.x) {
      const int row = begin + i / lines;
      const int64_t to = o.flags & kPaged ? PagedRows<true>(a.position + 1)(row) : row;
      const int64_t at = (to * a.kvHeads + kv) * bytes + i % lines * 128;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(a.keys) + at));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(a.values) + at));
    }
  });
}

#endif  // HOPPER

// Launch: Warps warps per block, and at most as many blocks as run at once. Dynamic shared memory holds
// the rings, with `slots` slots for each warp, the held vector of heldBytes, the weights, ops, and barriers.
// arrived holds two numbers that are zero before and after a launch.
template <class T, int Warps, int PieceBytes, bool Bulk>
__device__ __forceinline__ void step(const void* table, int count, int products, unsigned* arrived, int slots, int heldBytes) {
#ifdef HOPPER
  extern __shared__ __align__(128) char memory[];
  constexpr int slotBytes = 2 * PieceBytes;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  char* held = memory + Warps * slots * slotBytes;
  Weights* weights = reinterpret_cast<Weights*>(held + heldBytes);
  Op* ops = reinterpret_cast<Op*>(weights + products);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(ops + kOps);

  const uint32_t* words = static_cast<const uint32_t*>(table);
  for (int i = threadIdx.x; i < min(count, kOps - 1) * kOpWords; i += blockDim.x)
    reinterpret_cast<uint32_t*>(ops)[i] = words[i];
  for (int i = threadIdx.x; i < products * int(sizeof(Weights) / 4); i += blockDim.x)
    reinterpret_cast<uint32_t*>(weights)[i] = words[count * kOpWords + i];
  Stream<Warps, PieceBytes, Bulk> stream{weights, products, memory + warp * slots * slotBytes,
                                   uint32_t(__cvta_generic_to_shared(barriers + warp * slots)), slots};
  if (lane < slots) tile::barrierInit(stream.barriers + 8 * lane, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  tile::fenceAsync();
  __syncthreads();

  stream.product = stream.slot = stream.parity = 0;
  stream.begin();
  for (int i = 0; i < slots; i++) stream.copy(i);

  const Context<T> c{reinterpret_cast<T*>(held), blockIdx.x == 0};
  Known position{};
  int product = 0;
  unsigned waits = 0;
  for (int i = 0; i < count; i++) {
    const int later = i + kOps - 1;
    const bool fetches = threadIdx.x < kOpWords && later < count;
    uint32_t word = 0;
    if (fetches) word = words[later * kOpWords + threadIdx.x];

    const Op& o = ops[i % kOps];
    if (o.flags & kWait) {
      arrive(arrived);
      prefetchFor<T>(o, position);
      awaitAll(arrived, ++waits);
    } else {
      __syncthreads();
    }
    switch (o.kind) {
      case kProduct: multiply<false>(o, c, stream, weights[product++]); break;
      case kGated: multiply<true>(o, c, stream, weights[product++]); break;
      case kAttention:
        if (o.n[2] <= 8 * kElements)
          attendWith<T, 8, Warps>(o, held, position);
        else if (o.n[2] <= 16 * kElements)
          attendWith<T, 16, Warps>(o, held, position);
        else
          attendWith<T, 32, Warps>(o, held, position);
        break;
      case kEmbedding: embed(o, c); break;
      case kRMSNorm:
        if (o.n[0] == o.n[1])
          normalize<false>(o, c);
        else
          normalizeRows(o, c);
        break;
      case kLayerNorm: normalize<true>(o, c); break;
      case kAdd: map(o, c, true, [](float a, float b) { return a + b; }); break;
      case kGELU: map(o, c, false, [](float a, float) { return geluMul<float>(a, 1.0f); }); break;
      case kMulScalar: map(o, c, false, [&](float a, float) { return a * o.f; }); break;
      case kAddScalar: map(o, c, false, [&](float a, float) { return a + o.f; }); break;
    }
    if (fetches) reinterpret_cast<uint32_t*>(ops + later % kOps)[threadIdx.x] = word;
  }

  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(arrived + 1, 1) == gridDim.x - 1) arrived[0] = arrived[1] = 0;
#endif
}

#define DEFINE_COPIES(T, name, Bulk)                                                                                 \
  extern "C" __global__ void __launch_bounds__(kWarps* kWarp, 1)                                                     \
      decode_step_##name##_##T(const void* table, int count, int products, unsigned* arrived, int slots, int heldBytes) { \
    step<T, kWarps, kPieceBytes, Bulk>(table, count, products, arrived, slots, heldBytes);                           \
  }
#define DEFINE(T) DEFINE_COPIES(T, bulk, true) DEFINE_COPIES(T, lanes, false)
FOR_STORAGE_TYPES(DEFINE)
