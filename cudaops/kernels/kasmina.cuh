// What the kernels of a Kasmina layer share: its description, a seed's transform as coefficients, and moments.
//
// x is [rows, seeds·chunk], weights [slots, chunk] and scales [slots] in float32. With w the weight row of a seed's slot,
// a its scale and α its blending weight, every built-in kind is one formula per element i of the chunk,
//
//   y[i] = (x·u > thr or unordered ? p : off)·x[i] + r1·x[i−1] + r2·x[i−2] + q
//
//   kind           t(x)                              p                 off     q     r1      r2
//   Residual       x + a·w                           1                         αaw
//   AttentionGate  a·x ⊙ softmax(w)                  1−α + αa·softmax
//   MLPExpansion   a·relu(x ⊙ w), u = w, thr = 0     1−α + αaw         1−α
//   ConvFilter     a·(w0·x[i] + w1·x[i−1] + w2·x[i−2]) 1−α + αa·w0                   αa·w1   αa·w2
//
// so that neighbouring seeds of different kinds and stages do not make a warp diverge. The gradient is its transpose:
// dx[i] = p·g[i] + r1·g[i+1] + r2·g[i+2]. A seed that does not blend keeps the bits of x.
//
// A thread keeps N consecutive columns, which are N/E seeds or part of one, and walks down the rows: coefficients and sums
// stay in registers. Rows are dealt out to lanes (a group of threads that covers all columns) in turn.
#pragma once
#include "common.cuh"
#include <cfloat>
#include <type_traits>

enum Kind : uint32_t { kResidual, kAttentionGate, kMLPExpansion, kConvFilter, kKinds };

// Layer is the first parameter of every kernel. word holds, of each seed, its kind in bits 0 to 7, whether it blends in bit
// 8 and learns in bit 9, and its slot from bit 16 on; it is 0 for a seed that does neither. A seed of a kind from kKinds on
// is not evaluated here: y = x, dx = g and no gradients of parameters, as if it did neither.
struct Layer {
  const uint32_t* word;
  const float* alpha;      // of the output; in Training, where there is none, 1
  const float *low, *high; // clamp limits of the strict mode
  const float* limit;      // of a row's gradient norm; null for none
  const float *weights, *scales;
  const float* softmax;    // of each slot, max(w) and 1/Σexp(w − max w); null where chunks lie within a thread
  int64_t rows;
  int seeds, chunk;
  float eps;
  float large;  // x beyond it is evaluated scaled down
};

struct Word {
  uint32_t bits;
  __device__ Kind kind() const { return Kind(bits & 0xff); }
  __device__ bool known() const { return kind() < kKinds; }
  __device__ bool blends() const { return bits >> 8 & 1 && known(); }
  __device__ bool active() const { return bits >> 8 & 3 && known(); }
  __device__ int slot() const { return bits >> 16; }
};

// ---- Seeds ----

// Seed is E consecutive elements of one seed's chunk, from element at on.
template <int E> struct Seed {
  float p[E], q[E], u[E];
  float off, thr, r1, r2;
  bool blends, active;

  __device__ __forceinline__ void init(const Layer& l, int seed, int at) {
    Word word{l.word[seed]};
    Kind kind = word.kind();
    blends = word.blends();
    active = word.active();
#pragma unroll
    for (int j = 0; j < E; j++) p[j] = 1, q[j] = 0, u[j] = 0;
    off = 1, thr = -1, r1 = r2 = 0;
    if (!word.active()) return;
    float alpha = l.alpha[seed], scale = l.scales[word.slot()], keep = 1 - alpha, as = alpha * scale;
    const float* row = l.weights + int64_t(word.slot()) * l.chunk;
    float w[E];
#pragma unroll
    for (int j = 0; j < E; j++) w[j] = row[at + j];
    if (kind == kMLPExpansion) {
      thr = 0, off = keep;
#pragma unroll
      for (int j = 0; j < E; j++) u[j] = w[j];
    }
    if (alpha == 0) {  // whatever t(x) is, NaN included, has no part in the result
      off = 1;
      return;
    }
    if (kind == kResidual) {
#pragma unroll
      for (int j = 0; j < E; j++) q[j] = as * w[j];
    } else if (kind == kAttentionGate) {
      softmaxOf(w, l, word.slot());
#pragma unroll
      for (int j = 0; j < E; j++) p[j] = keep + as * w[j];
    } else if (kind == kMLPExpansion) {
#pragma unroll
      for (int j = 0; j < E; j++) p[j] = keep + as * w[j];
    } else if (kind == kConvFilter) {
#pragma unroll
      for (int j = 0; j < E; j++) p[j] = keep + as * row[0];
      if (l.chunk > 1) r1 = as * row[1];
      if (l.chunk > 2) r2 = as * row[2];
    }
  }

  // softmaxOf replaces weights of a slot by their softmax.
  __device__ static __forceinline__ void softmaxOf(float (&w)[E], const Layer& l, int slot) {
    float top, by;
    if (l.softmax) {
      top = l.softmax[2 * slot], by = l.softmax[2 * slot + 1];
    } else {
      top = w[0];
      float sum = 0;
#pragma unroll
      for (int j = 1; j < E; j++) top = fmaxf(top, w[j]);
#pragma unroll
      for (int j = 0; j < E; j++) sum += expf(w[j] - top);
      by = 1 / sum;
    }
#pragma unroll
    for (int j = 0; j < E; j++) w[j] = expf(w[j] - top) * by;
  }

  __device__ __forceinline__ bool on(float x, int j) const { return !(x * u[j] <= thr); }

  // bySign makes p the coefficient where x > 0 and u that elsewhere, which is quicker to tell where x = 0 does not matter.
  __device__ __forceinline__ void bySign() {
#pragma unroll
    for (int j = 0; j < E; j++) {
      float open = p[j], w = u[j];
      p[j] = thr < 0 || w > 0 ? open : off, u[j] = thr < 0 || w < 0 ? open : off;
    }
  }
};

// Strict is what the strict mode does to x: it zeroes what is small and clamps the rest. bites is whether the result does not
// depend on x. It is read where it is needed, since it would take up registers that the other modes need.
struct Strict {
  float eps, low, high;
  __device__ __forceinline__ Strict(const Layer& l, int seed, bool active) : eps(0), low(-INFINITY), high(INFINITY) {
    if (active) eps = l.eps, low = l.low[seed], high = l.high[seed];
  }
  __device__ __forceinline__ float operator()(float x) const {
    if (fabsf(x) < eps) x = 0;
    if (x < low) x = low;
    if (x > high) x = high;
    return x;
  }
  __device__ __forceinline__ bool bites(float x) const { return fabsf(x) < eps || x < low || x > high; }
};

// addTerm is sum + c·v, where a coefficient of 0 leaves out NaN and Inf too if careful.
template <bool careful> __device__ __forceinline__ float addTerm(float c, float v, float sum) {
  return careful && c == 0 ? sum : fmaf(c, v, sum);
}

// maxNaN is the larger of two numbers, NaN if one is.
__device__ __forceinline__ float maxNaN(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ bool finite(float v) { return fabsf(v) < INFINITY; }

// Int is a number as a type, for lambdas.
template <int n> struct Int { static constexpr int value = n; };

// ---- Memory ----

constexpr int kThreads = 256;
constexpr int kGroup = 8;   // rows whose sums are formed before they are merged with the others'
constexpr int kStages = 8;  // rows of a thread on their way from memory at once, if accesses have 16 bytes

// Lane is where a thread works: the columns from col on, and the rows first, first + step, ... The threads of a warp that
// have the same rows are peers.
struct Lane {
  int col;
  int64_t index, count;  // of lanes
  unsigned peers;

  __device__ __forceinline__ Lane(int n) {
    col = (blockIdx.x * blockDim.x + threadIdx.x) * n;
    index = int64_t(blockIdx.y) * blockDim.y + threadIdx.y, count = int64_t(gridDim.y) * blockDim.y;
  }
  // find says whether the thread has any columns of d. All threads of the block call it.
  __device__ __forceinline__ bool find(int d) {
    unsigned busy = __ballot_sync(kAllLanes, col < d);
    peers = busy & __match_any_sync(kAllLanes, threadIdx.y);
    return col < d;
  }
  __device__ __forceinline__ int rows(int64_t all) const { return index < all ? int((all - 1 - index) / count) + 1 : 0; }
  __device__ __forceinline__ int inWarp() const { return (threadIdx.y * blockDim.x + threadIdx.x) % kWarp; }
};

// Rows feeds a thread its columns of A arrays of one shape, row by row. Accesses of 16 bytes go through shared memory,
// kStages − 1 rows ahead; a thread reads what it has itself fetched, so no barrier is needed. Others are loaded some rows at
// a time.
template <class T, int N, int A> struct Rows {
  using V = Pack<T, N>;
  static constexpr bool ahead = sizeof(V) == 16;
  static constexpr int batch = 4;
  static constexpr uint32_t array = kThreads * sizeof(V), stage = A * array;  // bytes of shared memory
  const T* p[A];             // the next row to fetch
  int64_t step;              // elements from one row of the lane to the next
  int left;                  // rows not fetched yet
  uint32_t ring, put, take;  // its address, and offsets into it
  V loaded[ahead ? 1 : batch][A];

  __device__ __forceinline__ Rows(void* shared, int64_t step, int rows) : step(step), left(rows), put(0), take(0) {
    ring = uint32_t(__cvta_generic_to_shared(shared)) + (threadIdx.y * blockDim.x + threadIdx.x) * sizeof(V);
  }
  __device__ __forceinline__ void request() {
    if (left > 0) {
#pragma unroll
      for (int a = 0; a < A; a++) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(ring + put + a * array), "l"(p[a]) : "memory");
        p[a] += step;
      }
    }
    left--;
    put = (put + stage) % (kStages * stage);
    commitAsync();
  }
  __device__ __forceinline__ void start() {
    if (ahead)
      for (int i = 0; i < kStages - 1; i++) request();
  }
  // next gives row u of n that are loaded at a time.
  template <int n> __device__ __forceinline__ void next(int u, V (&v)[A]) {
    if constexpr (ahead) {
      request();
      awaitAsync<kStages - 1>();
#pragma unroll
      for (int a = 0; a < A; a++) {
        uint4& w = *reinterpret_cast<uint4*>(&v[a]);
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                     : "r"(ring + take + a * array)
                     : "memory");
      }
      take = (take + stage) % (kStages * stage);
    } else {
      if (u == 0)
#pragma unroll
        for (int i = 0; i < n; i++)
#pragma unroll
          for (int a = 0; a < A; a++) loaded[i][a] = load<N>(p[a]), p[a] += step;
#pragma unroll
      for (int a = 0; a < A; a++) v[a] = loaded[u][a];
    }
  }
};

// walk calls row(Int<n>, u) for each of a lane's rows, which may be row u of n that are loaded at a time, and after every few
// of them group(how many).
template <bool ahead, class Row, class Group> __device__ __forceinline__ void walk(int rows, Row row, Group group) {
  constexpr int batch = 4;
  int i = 0;
  if (!ahead)
    for (; i + batch <= rows; i += batch) {
#pragma unroll
      for (int u = 0; u < batch; u++) row(Int<batch>{}, u);
      group(batch);
    }
  int n = 1, left = n;  // the first row alone: what deviations are taken from must soon be near the mean
#pragma unroll 1
  for (; i < rows; i++) {
    row(Int<1>{}, 0);
    if (--left == 0) group(n), left = n = kGroup;
  }
  group(n - left);
}

// unpack converts E elements of a pack, from element at on.
template <class T, int N, int E> __device__ __forceinline__ void unpack(float (&x)[E], const Pack<T, N>& v, int at) {
  if constexpr (__is_same(T, bf16) && E % 2 == 0) {
#pragma unroll
    for (int j = 0; j < E; j += 2) {
      uint32_t two = *reinterpret_cast<const uint32_t*>(&v.v[at + j]);
      x[j] = __uint_as_float(two << 16), x[j + 1] = __uint_as_float(two & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int j = 0; j < E; j++) x[j] = v.get(at + j);
  }
}

// setPart rounds E numbers into a pack, from element at on.
template <class T, int N, int E> __device__ __forceinline__ void setPart(Pack<T, N>& v, int at, const float (&x)[E]) {
  if constexpr (E % 2 == 0 && sizeof(T) == 2) {
#pragma unroll
    for (int j = 0; j < E; j += 2) {
      if constexpr (sizeof(bf16) == sizeof(T) && __is_same(T, bf16))
        *reinterpret_cast<__nv_bfloat162*>(&v.v[at + j]) = __floats2bfloat162_rn(x[j], x[j + 1]);
      else
        *reinterpret_cast<__half2*>(&v.v[at + j]) = __floats2half2_rn(x[j], x[j + 1]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < E; j++) v.set(at + j, x[j]);
  }
}

// Pair is two elements of a 16-bit type.
template <class T> struct PairOf { using type = float; };
template <> struct PairOf<bf16> { using type = __nv_bfloat162; };
template <> struct PairOf<f16> { using type = __half2; };
template <class T> using Pair = typename PairOf<T>::type;

// inPairs is whether E elements of a type can be compared two at a time.
template <class T, int E> constexpr bool inPairs = sizeof(T) == 2 && E % 2 == 0;

template <class T> __device__ __forceinline__ Pair<T> pairOf(float v);
template <> __device__ __forceinline__ __nv_bfloat162 pairOf<bf16>(float v) { return __float2bfloat162_rn(v); }
template <> __device__ __forceinline__ __half2 pairOf<f16>(float v) { return __float2half2_rn(v); }

// greatest is a type's largest finite number, or limit if that is less, rounded so that no infinity compares as less.
template <class T> __device__ __forceinline__ float greatest(float limit) {
  return fminf(limit, sizeof(T) == 4 ? FLT_MAX : __is_same(T, bf16) ? 0x1.fep127f : 65504.0f);
}

// Magnitudes are those of N elements, two at a time if the type allows it.
template <class T, int N> struct Magnitudes {
  static constexpr bool pairs = inPairs<T, N>;
  using V = typename std::conditional<pairs, Pair<T>, float>::type;
  static constexpr int words = pairs ? N / 2 : N;
  V v[words];

  __device__ __forceinline__ Magnitudes(const Pack<T, N>& x) {
#pragma unroll
    for (int i = 0; i < words; i++) {
      if constexpr (pairs) {
        uint32_t w = reinterpret_cast<const uint32_t*>(&x)[i] & 0x7fff7fffu;
        v[i] = *reinterpret_cast<const V*>(&w);
      } else {
        v[i] = fabsf(x.get(i));
      }
    }
  }
  // within says whether none exceeds limit or is NaN.
  __device__ __forceinline__ bool within(float limit) const {
    V most = v[0];
    if constexpr (pairs) {
#pragma unroll
      for (int i = 1; i < words; i++) most = __hmax2_nan(most, v[i]);
      return __hble2(most, V{fromFloat<T>(limit), fromFloat<T>(limit)});
    } else {
#pragma unroll
      for (int i = 1; i < words; i++) most = maxNaN(most, v[i]);
      return most <= limit;
    }
  }
};

// Wide is how E elements of a seed are compared: a pair or one at a time.
template <class T, int E> using Wide = typename std::conditional<inPairs<T, E>, Pair<T>, float>::type;

// Mode is a variant of a kernel: with figures, without, or with the strict mode's clamp and figures where they are wanted.
enum Mode { kWatch, kQuiet, kStrict };

// Shuffles between the threads that hold neighbouring columns: the last elements of the one before, the first of the one
// behind. Where that thread is in another warp, the elements are loaded.
template <class T, int N> struct Neighbours {
  bool left, right;  // of this thread's columns there is one in the chunk
  bool loadLeft, loadRight;
  unsigned peers;

  __device__ __forceinline__ Neighbours(const Lane& l, int at, int chunk) : peers(l.peers) {
    left = at > 0, right = at + N < chunk;
    loadLeft = left && (l.inWarp() == 0 || !(peers >> (l.inWarp() - 1) & 1));
    loadRight = right && (l.inWarp() == kWarp - 1 || !(peers >> (l.inWarp() + 1) & 1));
  }
  // before gives the elements before v, whose place in memory is p: x1 right before it, x2 before x1.
  __device__ __forceinline__ void before(const Pack<T, N>& v, const T* p, float& x1, float& x2) const {
    x1 = __shfl_up_sync(peers, v.get(N - 1), 1), x2 = __shfl_up_sync(peers, v.get(N - 2), 1);
    if (loadLeft) x1 = toFloat(p[-1]), x2 = toFloat(p[-2]);
    if (!left) x1 = x2 = 0;
  }
  __device__ __forceinline__ void behind(const Pack<T, N>& v, const T* p, float& x1, float& x2) const {
    x1 = __shfl_down_sync(peers, v.get(0), 1), x2 = __shfl_down_sync(peers, v.get(1), 1);
    if (loadRight) x1 = toFloat(p[N]), x2 = toFloat(p[N + 1]);
    if (!right) x1 = x2 = 0;
  }
};

// sumOver adds up over the threads that share a chunk: share of them, a power of two.
__device__ __forceinline__ float sumOver(float v, int share, unsigned peers) {
  for (int k = share / 2; k > 0; k /= 2) v += __shfl_xor_sync(peers, v, k);
  return v;
}

// A single element is loaded with those around it.
template <class T> struct Neighbours<T, 1> {
  int at, chunk;
  __device__ __forceinline__ Neighbours(const Lane&, int at, int chunk) : at(at), chunk(chunk) {}
  __device__ __forceinline__ void before(const Pack<T, 1>&, const T* p, float& x1, float& x2) const {
    x1 = at > 0 ? toFloat(p[-1]) : 0, x2 = at > 1 ? toFloat(p[-2]) : 0;
  }
  __device__ __forceinline__ void behind(const Pack<T, 1>&, const T* p, float& x1, float& x2) const {
    x1 = at + 1 < chunk ? toFloat(p[1]) : 0, x2 = at + 2 < chunk ? toFloat(p[2]) : 0;
  }
};

// ---- Moments ----

// Running is the moments of numbers seen so far: n of them, with mean k + e and m2 the sum of squared deviations from it.
// Numbers are added in groups, as sums over v − k and (v − k)²: with k next to the mean these keep their precision where
// the numbers share leading digits, and nothing large cancels (Chan, Golub and LeVeque 1979, for a group at a time).
struct Running {
  float k = 0, e = 0, m2 = 0, n = 0;

  __device__ __forceinline__ void add(float s1, float s2, float count) {
    float all = n + count;
    if (!(all > 0)) return;
    float sum = fmaf(n, e, s1), mean = __fdividef(sum, all);
    m2 += fmaf(n * e, e, s2) - sum * mean;
    float next = k + mean;
    e = mean - (next - k), k = next, n = all;
  }
};

// Moments are the same in float64, for merging.
struct Moments {
  double n = 0, mean = 0, m2 = 0;

  __device__ __forceinline__ void merge(const Moments& o) {
    if (o.n == 0) return;
    double all = n + o.n, d = o.mean - mean, share = o.n / all;
    mean += d * share;
    m2 += o.m2 + d * d * n * share;
    n = all;
  }
  __device__ __forceinline__ double variance() const { return n > 0 ? (m2 < INFINITY ? fmax(m2, 0.0) / n : INFINITY) : 0; }
  __device__ __forceinline__ double norm() const { return sqrt(variance() * n + n * mean * mean); }
};

// Partials are what the lanes leave of their rows: arrays [figure, lane, unit], where a unit is the E elements of a Seed.
struct Partials {
  float* base;
  int64_t stride; // lanes·units
  int64_t at;
  __device__ __forceinline__ float& operator[](int figure) const { return base[figure * stride + at]; }

  __device__ __forceinline__ void put(int figure, const Running& r) const {
    (*this)[figure] = r.k, (*this)[figure + 1] = r.e, (*this)[figure + 2] = r.m2, (*this)[figure + 3] = r.n;
  }
};

// Sums merge moments without a division for each: of deviations from a pivot next to the mean, so that nothing large
// cancels, which double precision makes sure of.
struct Sums {
  double n = 0, d = 0, d2 = 0;

  __device__ __forceinline__ void add(const Partials& p, int figure, double pivot) {
    double count = p[figure + 3], dv = double(p[figure]) - pivot + p[figure + 1];
    n += count, d += count * dv, d2 += p[figure + 2] + count * dv * dv;
  }
  __device__ __forceinline__ void add(const Sums& o) { n += o.n, d += o.d, d2 += o.d2; }
  __device__ __forceinline__ Moments moments(double pivot) const {
    if (!(n > 0)) return {};
    return {n, pivot + d / n, d2 - d * d / n};
  }
};

constexpr int kMergeThreads = 512;

// Shapes: what a thread holds. FOR_SHAPES(DEFINE, T) is DEFINE(name, T, N, E, whole) for each; whole is whether E is the
// chunk. quad: chunks of 4. part: chunks of whole accesses. single: any chunk, element by element.
#define FOR_SHAPES(DEFINE, T)       \
  DEFINE(quad, T, kVec<T>, 4, true) \
  DEFINE(part, T, kVec<T>, kVec<T>, false) \
  DEFINE(single, T, 1, 1, false)
