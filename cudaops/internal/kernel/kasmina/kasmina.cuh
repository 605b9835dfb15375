// Definitions shared by the kernels of a Kasmina layer: its description, a seed's transform as
// coefficients, and moments.
//
// x is [rows, seeds·chunk], and weights [slots, chunk] and scales [slots] are float32. Let w be the
// weight row of a seed's slot, a its scale and α its blending weight. Then a single formula per
// element i of the chunk covers every built-in pointwise kind:
//
//   y[i] = (x·u > thr or unordered ? p : off)·x[i] + r1·x[i−1] + r2·x[i−2] + q
//
//   kind           t(x)                              p                 off     q     r1      r2
//   Residual       x + a·w                           1                         αaw
//   AttentionGate  a·x ⊙ softmax(w)                  1−α + αa·softmax
//   MLPExpansion   a·relu(x ⊙ w), u = w, thr = 0     1−α + αaw         1−α
//   ConvFilter     a·(w0·x[i] + w1·x[i−1] + w2·x[i−2]) 1−α + αa·w0                   αa·w1   αa·w2
//
// Neighboring seeds of different kinds and stages therefore don't make a warp diverge. The gradient
// is the transpose, dx[i] = p·g[i] + r1·g[i+1] + r2·g[i+2]. A seed that does not blend passes the
// bits of x through.
//
// A thread has N consecutive columns, which hold N/E seeds or part of one, and moves down the rows,
// so that coefficients and sums stay in registers. Rows are divided among lanes, groups of threads
// that cover all columns, in turn.
#pragma once
#include "common.cuh"
#include "overlap.cuh"
#include <cfloat>
#include <type_traits>

enum Kind : uint32_t { kResidual, kAttentionGate, kMLPExpansion, kConvFilter, kKinds };

// Layer is the first parameter of every kernel. word describes each seed: its kind in bits 0 to 7,
// whether it blends in bit 8, whether it learns in bit 9, and its slot from bit 16 on. It is 0 for
// a seed that neither blends nor learns. These kernels don't evaluate seeds of a kind from kKinds
// on. They treat such a seed as if it neither blended nor learned, with y = x, dx = g, and no
// gradients of parameters.
struct Layer {
  const uint32_t* word;
  const float* alpha;      // blending weight; 1 in Training, where the output is not blended
  const float *low, *high; // clamp limits of the strict mode
  const float* limit;      // on the norm of a row's gradient; null for none
  const float *weights, *scales;
  const float* softmax;    // max(w) and 1/Σexp(w − max w) of each slot; null if threads compute these themselves
  int64_t rows;
  int seeds, chunk;
  float eps;
  float large;  // rows with larger x are scaled down for evaluation
};

struct Word {
  uint32_t bits;
  __device__ Kind kind() const { return Kind(bits & 0xff); }
  __device__ bool known() const { return kind() < kKinds; }
  __device__ bool blends() const { return bits >> 8 & 1 && known(); }
  __device__ bool active() const { return bits >> 8 & 3 && known(); }
  // ignores reports whether the gradients don't depend on x. This holds for Residual, and for a
  // word of 0.
  __device__ bool ignores() const { return kind() == kResidual; }
  __device__ int slot() const { return bits >> 16; }
};

// ---- Seeds ----

// loadWeights reads E weights of a slot.
template <int E> __device__ __forceinline__ void loadWeights(float (&w)[E], const float* p) {
  if (E % 4 == 0 && aligned16(p)) {
    const Pack<float, E> v = load<E>(p);
#pragma unroll
    for (int j = 0; j < E; j++) w[j] = v.v[j];
  } else {
#pragma unroll
    for (int j = 0; j < E; j++) w[j] = p[j];
  }
}

// State is a seed and E elements of its slot, from element `at` on, as stored in memory.
template <int E> struct State {
  Word word;
  float alpha, scale;
  float w[E], first[3];  // weights, and the first weights of the slot

  // begin and finish load the state in two steps, since the word determines the addresses of the
  // rest. begin may run before awaitPrevious, because it reads only memory that is written by
  // copies, which never overlap with kernels.
  __device__ __forceinline__ void begin(const Layer& l, int seed) { word.bits = l.word[seed], alpha = l.alpha[seed]; }
  template <bool whole> __device__ __forceinline__ void finish(const Layer& l, int at) {
    const float* row = l.weights + int64_t(word.slot()) * l.chunk;
    scale = l.scales[word.slot()];
    loadWeights(w, row + at);
#pragma unroll
    for (int j = 0; j < 3; j++) first[j] = whole && j < E ? w[j] : row[min(j, l.chunk - 1)];
  }
};

// Seed is E consecutive elements of a seed's chunk, from element `at` on.
template <int E> struct Seed {
  float p[E], q[E], u[E];
  float off, thr, r1, r2;
  bool blends, active;
  Word word;

  // read reads G seeds, starting with number `seed`, with all loads in flight at once.
  template <int G> __device__ static __forceinline__ void read(Seed (&s)[G], const Layer& l, int seed, int at) {
    State<E> states[G];
#pragma unroll
    for (int g = 0; g < G; g++) states[g].begin(l, seed + g);
#pragma unroll
    for (int g = 0; g < G; g++) states[g].template finish<false>(l, at);
#pragma unroll
    for (int g = 0; g < G; g++) s[g].template init<false>(l, states[g]);
  }

  // init has only one branch, since a warp has seeds of all kinds. `whole` means that E is the
  // chunk.
  template <bool whole> __device__ __forceinline__ void init(const Layer& l, const State<E>& state) {
    word = state.word;
    const Kind kind = word.kind();
    blends = word.blends(), active = word.active();
    const float alpha = state.alpha, keep = 1 - alpha, as = alpha * state.scale;
    const bool mixes = active && alpha != 0;  // otherwise t(x) must not affect the result, even if it is NaN
    const bool sums = mixes && kind == kResidual, scales = mixes && kind != kResidual;
    const bool gate = mixes && kind == kAttentionGate, conv = mixes && kind == kConvFilter, relu = active && kind == kMLPExpansion;
    float w[E];
#pragma unroll
    for (int j = 0; j < E; j++) w[j] = conv ? state.first[0] : state.w[j];
    if (gate) softmaxOf<whole>(w, l, word.slot());
#pragma unroll
    for (int j = 0; j < E; j++) {
      p[j] = scales ? fmaf(as, w[j], keep) : 1, q[j] = sums ? as * w[j] : 0, u[j] = relu ? w[j] : 0;
    }
    off = mixes && relu ? keep : 1, thr = relu ? 0 : -1;
    r1 = conv && l.chunk > 1 ? as * state.first[1] : 0, r2 = conv && l.chunk > 2 ? as * state.first[2] : 0;
  }

  // softmaxOf replaces weights of a slot by their softmax. Without a table of maxima and sums, a
  // thread reads all weights of the slot, E at a time, keeping the sum relative to the largest
  // weight so far.
  template <bool whole> __device__ static __forceinline__ void softmaxOf(float (&w)[E], const Layer& l, int slot) {
    float top = -FLT_MAX, sum = 0, by;
    auto take = [&](const float(&v)[E]) {
      float most = top;
#pragma unroll
      for (int j = 0; j < E; j++) most = fmaxf(most, v[j]);
      if (!whole) sum *= expf(top - most);
      top = most;
#pragma unroll
      for (int j = 0; j < E; j++) sum += expf(v[j] - top);
    };
    if (!whole && l.softmax) {
      top = l.softmax[2 * slot], by = l.softmax[2 * slot + 1];
    } else if (whole) {
      take(w);
      by = 1 / sum;
    } else {
      const float* row = l.weights + int64_t(slot) * l.chunk;
#pragma unroll 1
      for (int i = 0; i < l.chunk; i += E) {
        float v[E];
        loadWeights(v, row + i);
        take(v);
      }
      by = 1 / sum;
    }
#pragma unroll
    for (int j = 0; j < E; j++) w[j] = expf(w[j] - top) * by;
  }

  __device__ __forceinline__ bool on(float x, int j) const { return !(x * u[j] <= thr); }

  // bySign makes p the coefficient for x > 0 and u the coefficient otherwise. This is faster than
  // `on` and gives the same result, because the coefficient does not matter for x = 0.
  __device__ __forceinline__ void bySign() {
#pragma unroll
    for (int j = 0; j < E; j++) {
      float open = p[j], w = u[j];
      p[j] = thr < 0 || w > 0 ? open : off, u[j] = thr < 0 || w < 0 ? open : off;
    }
  }
};

// Strict is the transformation of x in strict mode: small values become zero and the rest is
// clamped. bites reports whether it changes x, so that no gradient passes; 0 stays 0. It is loaded
// where it is needed, since it would take up registers that the other modes need.
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
  __device__ __forceinline__ bool bites(float x) const { return (fabsf(x) < eps && x != 0) || x < low || x > high; }
};

// addTerm returns sum + c·v. If careful, a coefficient of 0 suppresses even NaN and Inf.
template <bool careful> __device__ __forceinline__ float addTerm(float c, float v, float sum) {
  return careful && c == 0 ? sum : fmaf(c, v, sum);
}

// maxNaN and minNaN return the larger and the smaller of two numbers, or NaN if either is NaN.
__device__ __forceinline__ float maxNaN(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ float minNaN(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ bool finite(float v) { return fabsf(v) < INFINITY; }

__device__ __forceinline__ float median(float a, float b, float c) { return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c)); }

// Int makes a number a type, for use with lambdas.
template <int n> struct Int { static constexpr int value = n; };

// ---- Elements ----

// unpack converts E elements of a pack, from element `at` on.
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

// setPart rounds E numbers to a pack, from element `at` on.
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

// setPartIf is setPart if wanted, without a branch that would restrict instruction scheduling.
template <class T, int N, int E>
__device__ __forceinline__ void setPartIf(bool wanted, Pack<T, N>& v, int at, const float (&x)[E]) {
  Pack<T, N> set = v;
  setPart(set, at, x);
  if constexpr (sizeof(T) * E % 4 == 0) {
#pragma unroll
    for (int j = 0; j < E; j += 4 / sizeof(T)) {
      uint32_t& word = *reinterpret_cast<uint32_t*>(&v.v[at + j]);
      word = wanted ? *reinterpret_cast<const uint32_t*>(&set.v[at + j]) : word;
    }
  } else if (wanted) {
    v = set;
  }
}

// Pair is a pair of elements of a 16-bit type.
template <class T> struct PairOf { using type = float; };
template <> struct PairOf<bf16> { using type = __nv_bfloat162; };
template <> struct PairOf<f16> { using type = __half2; };
template <class T> using Pair = typename PairOf<T>::type;

// inPairs is true if E elements of a type can be compared two at a time.
template <class T, int E> constexpr bool inPairs = sizeof(T) == 2 && E % 2 == 0;

template <class T> __device__ __forceinline__ Pair<T> pairOf(float v);
template <> __device__ __forceinline__ __nv_bfloat162 pairOf<bf16>(float v) { return __float2bfloat162_rn(v); }
template <> __device__ __forceinline__ __half2 pairOf<f16>(float v) { return __float2half2_rn(v); }

// greatest returns the type's largest finite number, or limit if that is less, such that infinity
// never compares as within it.
template <class T> __device__ __forceinline__ float greatest(float limit) {
  return fminf(limit, sizeof(T) == 4 ? FLT_MAX : __is_same(T, bf16) ? 0x1.fep127f : 65504.0f);
}

// Magnitudes checks whether all numbers are within a limit, two at a time if the type allows it.
template <class T, int N> struct Magnitudes {
  static constexpr bool pairs = inPairs<T, N>;
  typename std::conditional<pairs, Pair<T>, float>::type most;
  float others = 0;

  template <int B> __device__ __forceinline__ Magnitudes(const Pack<T, N> (&x)[B]) {
    if constexpr (pairs) most = pairOf<T>(0);
    else most = 0;
#pragma unroll
    for (int b = 0; b < B; b++) {
      if constexpr (pairs) {
        const Pair<T>* v = reinterpret_cast<const Pair<T>*>(&x[b]);
#pragma unroll
        for (int i = 0; i < N / 2; i++) most = __hmax2_nan(most, __habs2(v[i]));
      } else {
#pragma unroll
        for (int i = 0; i < N; i++) most = maxNaN(most, fabsf(x[b].get(i)));
      }
    }
  }
  __device__ __forceinline__ void take(float v) { others = maxNaN(others, fabsf(v)); }

  // within reports whether no number exceeds limit or is NaN.
  __device__ __forceinline__ bool within(float limit) const {
    bool fine = others <= limit;
    if constexpr (pairs) return fine && __hble2(most, Pair<T>{fromFloat<T>(limit), fromFloat<T>(limit)});
    else return fine && most <= limit;
  }
};

// Wide is the type for comparing E elements of a seed: pairs, or single numbers.
template <class T, int E> using Wide = typename std::conditional<inPairs<T, E>, Pair<T>, float>::type;

// Need is the most general formula among the seeds of a warp: none; y[i] = p·x[i] + q; the same
// with p depending on x; or the same with taps.
enum Need { kNothing, kLinear, kRelu, kTaps };

__device__ __forceinline__ Need needOf(Word word, bool any) {
  if (!any) return kNothing;
  return word.kind() == kConvFilter ? kTaps : word.kind() == kMLPExpansion ? kRelu : kLinear;
}

__device__ __forceinline__ Need greater(Need a, Need b) { return a < b ? b : a; }

// mostOf returns the greatest need among a warp's peers.
__device__ __forceinline__ Need mostOf(Need n, unsigned peers) {
  if (__any_sync(peers, n == kTaps)) return kTaps;
  if (__any_sync(peers, n == kRelu)) return kRelu;
  return __any_sync(peers, n == kLinear) ? kLinear : kNothing;
}

// Mode is a variant of a kernel: with figures, without figures, or with strict mode's clamp and
// optional figures.
enum Mode { kWatch, kQuiet, kStrict };

// ---- Moments ----

// Running accumulates the moments of n numbers, with mean k + e and m2 the sum of squared
// deviations from the mean. Numbers are added in groups, as sums of v − k and (v − k)². With k
// close to the mean, these sums are precise even if the numbers share their leading digits, since
// nothing large cancels. (Chan, Golub and LeVeque 1979, one group at a time.)
//
// If the mean is not much larger than the deviation, k may as well be 0. `bare` selects this, which
// allows sums of v and v².
struct Running {
  float k = 0, e = 0, m2 = 0, n = 0;

  template <bool bare = false> __device__ __forceinline__ void add(float s1, float s2, float count) {
    float all = n + count;
    if (!(all > 0)) return;
    float sum = fmaf(n, e, s1), mean = __fdividef(sum, all);
    m2 += fmaf(n * e, e, s2) - sum * mean;
    float next = all < 8 ? k : k + mean;  // the mean of a few numbers may be far from the mean of all
    if (bare && next * next * all <= 2 * m2) next = 0;
    e = mean - (next - k), k = next, n = all;
  }
};

// inverse returns 1/n for n > 0 with an error of about 1e-15, in a fraction of the time of a
// division.
__device__ __forceinline__ double inverse(double n) {
  double r = __fdividef(1, float(n));
  r *= 2 - n * r;
  return r * (2 - n * r);
}

// Moments is the float64 counterpart of Running, for merging.
struct Moments {
  double n = 0, mean = 0, m2 = 0;

  __device__ __forceinline__ void merge(const Moments& o) {
    if (o.n == 0) return;
    double all = n + o.n, d = o.mean - mean, share = o.n / all;
    mean += d * share;
    m2 += o.m2 + d * d * n * share;
    n = all;
  }
  __device__ __forceinline__ double variance() const { return n > 0 ? (m2 < INFINITY ? fmax(m2, 0.0) * inverse(n) : INFINITY) : 0; }
  __device__ __forceinline__ double norm() const { return sqrt(variance() * n + n * mean * mean); }
};

// record returns the first part of a unit's record, the four numbers of Running. A unit is the E
// elements of a Seed.
__device__ __forceinline__ float4 record(const Running& r) { return {r.k, r.e, r.m2, r.n}; }

// pivotOf returns the mean of the first record that has any elements, among `count` records.
__device__ __forceinline__ double pivotOf(const float4* r, int count, int64_t apart) {
  while (count-- > 1 && r->w == 0) r += apart;
  return r->x;
}

// Sums merges moments without a division for each. It adds up deviations from a pivot close to the
// mean, so that nothing large cancels, in double precision.
struct Sums {
  double n = 0, d = 0, d2 = 0;

  __device__ __forceinline__ void add(const float4& r, double pivot) {
    double count = r.w, dv = double(r.x) - pivot + r.y;
    n += count, d += count * dv, d2 += r.z + count * dv * dv;
  }
  __device__ __forceinline__ void add(const Sums& o) { n += o.n, d += o.d, d2 += o.d2; }
  __device__ __forceinline__ Moments moments(double pivot) const {
    if (!(n > 0)) return {};
    double mean = d * inverse(n);
    return {n, pivot + mean, d2 - d * mean};
  }
  // record returns a single record of everything that was added.
  __device__ __forceinline__ float4 record(double pivot) const {
    Moments m = moments(pivot);
    float k = float(m.mean);
    return {k, float(m.mean - k), float(fmax(m.m2, 0.0)), float(m.n)};
  }
};

constexpr int kMergeThreads = 256;

// addOver combines values with S::add over groups of `share` threads, a power of two, in a block of
// kMergeThreads. The first thread of each group gets the result. i is the thread's number. All
// threads of the block must call it.
template <class S> __device__ __forceinline__ void addOver(S& s, int share, int i) {
  __shared__ alignas(S) char room[kMergeThreads / kWarp * sizeof(S)];
  S* warps = reinterpret_cast<S*>(room);
  constexpr int words = sizeof(S) / 4;
#pragma unroll 1
  for (int k = min(share, kWarp) / 2; k > 0; k /= 2) {
    S o;
#pragma unroll
    for (int w = 0; w < words; w++)
      reinterpret_cast<uint32_t*>(&o)[w] = __shfl_xor_sync(kAllLanes, reinterpret_cast<const uint32_t*>(&s)[w], k);
    s.add(o);
  }
  if (share <= kWarp) return;
  if (i % kWarp == 0) warps[i / kWarp] = s;
  __syncthreads();
  if ((i & share - 1) == 0)
#pragma unroll 1
    for (int w = 1; w < share / kWarp; w++) s.add(warps[i / kWarp + w]);
}
