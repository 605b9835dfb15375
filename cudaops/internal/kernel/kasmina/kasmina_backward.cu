// Kasmina backward: one pass over the gradient g of y and over x computes dx, the sums from which the gradients of
// weights and scales follow, and statistics of g for every seed.
//
//   g ← g·min(1, limit/(‖g‖ + eps))                     for each row and seed, if there are limits
//   dx = (1 − α)·g + (∂t/∂x)ᵀ·αg                         for seeds that blend, otherwise g
//   dweights[slot] = Σ_seeds Σ_rows (∂t/∂w)ᵀ·βg          for seeds that learn: β = α, or 1 in Training
//   dscales[slot]  = Σ_seeds Σ_rows (∂t/∂a)·βg
//
// The statistics, called figures below, are the norm, variance and largest magnitude of a seed's g before clipping, and
// the mean and variance of the norms of its rows.
//
// Gradients of parameters: for all kinds of seeds, these are linear in a few sums over rows. For each column, it is the
// sum of g·m, where m is 1 for Residual, x for AttentionGate and ConvFilter, and x where the relu is active for
// MLPExpansion. For each seed, there are also the sums of g[i]·x[i−1] and of g[i]·x[i−2], which only ConvFilter needs.
// The kernel backward therefore only adds up, without knowing which seeds share a slot.
//
// Threads: as in the forward pass (see kasmina.cuh), a thread has N consecutive columns and moves down the rows, two at a
// time. Its sums and the coefficients of its seeds stay in registers, so each element of g and x is read once and each
// element of dx written once, in accesses of up to 16 bytes. At the end, the threads of a block add up their sums in
// shared memory, and the block stores them in sums [gridDim.y, columns + 2·units]. kasmina_gather then adds them up over
// blocks, and kasmina_slots over the seeds of a slot. The order of all additions is fixed.
//
// Most rows take the fast path, which assumes that all numbers are finite and not too large to square in float32. Other
// rows take a slow path, one at a time, as kasmina.cu describes.
//
// dx may overwrite g if all threads of a chunk belong to one warp. Elements that neither blend nor are clipped are then
// not written.
#include "kasmina_feed.cuh"

constexpr float kLargestSquared = 1e18f;  // limit on gradients with squares summed in float32

// Seen accumulates statistics of a seed's gradients over the rows of a thread. The sums are those of differences from a
// pivot close to the mean, m.k for gradients and norms.k for norms; see Running.
template <class T, int E> struct Seen {
  static constexpr bool pairs = inPairs<T, E>;
  Running m, norms;
  float s1 = 0, s2 = 0, n1 = 0, n2 = 0;  // sums of g − m.k and its square over rows not yet merged, and the same for norms
  Wide<T, E> top;

  __device__ __forceinline__ Seen() {
    if constexpr (pairs) top = pairOf<T>(0);
    else top = 0;
  }
  // add includes elements, all of which must be finite.
  __device__ __forceinline__ void add(const float* g) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      float d = g[j] - m.k;
      s1 += d, s2 = fmaf(d, d, s2);
    }
  }
  // add includes elements given the sum of their squares. The pivot must be 0.
  __device__ __forceinline__ void add(const float* g, float squares) {
#pragma unroll
    for (int j = 0; j < E; j++) s1 += g[j];
    s2 += squares;
  }
  // addTop includes the magnitudes of elements as they are stored, or the largest magnitude of a batch of rows.
  __device__ __forceinline__ void addTop(const T* stored) {
    if constexpr (pairs) {
      const Pair<T>* raw = reinterpret_cast<const Pair<T>*>(stored);
#pragma unroll
      for (int j = 0; j < E / 2; j++) top = __hmax2(top, __habs2(raw[j]));
    } else {
#pragma unroll
      for (int j = 0; j < E; j++) top = fmaxf(top, fabsf(toFloat(stored[j])));
    }
  }
  __device__ __forceinline__ void addTop(Wide<T, E> most) {
    if constexpr (pairs) top = __hmax2(top, most);
    else top = fmaxf(top, most);
  }
  __device__ __forceinline__ void addNorm(float norm) {
    float d = norm - norms.k;
    n1 += d, n2 = fmaf(d, d, n2);
  }
  // merge adds the sums of a group of rows, with the given numbers of elements and norms, to the statistics.
  template <bool bare> __device__ __forceinline__ void merge(int elements, int rows) {
    m.template add<bare>(s1, s2, float(elements)), norms.add(n1, n2, float(rows));
    s1 = s2 = n1 = n2 = 0;
  }
  // addFinite includes an element of the slow path, where NaN and Inf are left out one by one.
  __device__ __forceinline__ void addFinite(float g) {
    float d = g - m.k;
    s1 += d, s2 = fmaf(d, d, s2);
    if constexpr (pairs) top = __hmax2(top, pairOf<T>(fabsf(g)));
    else top = fmaxf(top, fabsf(g));
  }
  __device__ __forceinline__ void put(float4* to) const {
    to[0] = record(m), to[1] = record(norms);
    if constexpr (pairs) to[2] = {fmaxf(__low2float(top), __high2float(top)), 0, 0, 0};
    else to[2] = {top, 0, 0, 0};
  }
};

__device__ __forceinline__ float squareRoot(float v) {
  float r;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// Manner selects the code for a batch of rows: with clipping and pivots, with pivots only, or, if all pivots of the warp
// are 0, without both.
enum Manner { kClips, kPivots, kBare };

// differentiate computes the gradients dx of E inputs of a seed, and adds their terms to the sums over rows: acc for
// columns, d1 and d2 for the taps.
//
// A tap of ConvFilter connects neighboring elements: dx needs g1 and g2, the gradients that follow g, and the sums need x1
// and x2, the inputs that precede x. They are not used if the thread has the whole chunk. For Residual, the caller sets x
// to 1, because its sums don't involve x. `need` must be at least the need of the seed, and not kNothing.
template <bool careful, bool whole, Need need, int E>
__device__ __forceinline__ void differentiate(float (&dx)[E], float* acc, float& d1, float& d2, const float* g, const float* x,
                                              float g1, float g2, float x1, float x2, const Seed<E>& s) {
  constexpr bool taps = need == kTaps;
#pragma unroll
  for (int j = 0; j < E; j++) {
    bool on = need == kLinear || s.on(x[j], j);
    float sum = 0;
    if (taps && (!whole || j + 2 < E)) sum = addTerm<careful>(s.r2, j + 2 < E ? g[j + 2 < E ? j + 2 : 0] : j + 1 < E ? g1 : g2, sum);
    if (taps && (!whole || j + 1 < E)) sum = addTerm<careful>(s.r1, j + 1 < E ? g[j + 1 < E ? j + 1 : 0] : g1, sum);
    dx[j] = addTerm<careful>(on ? s.p[j] : s.off, g[j], sum);
    if (taps && (!whole || j > 0)) d1 = fmaf(g[j], j > 0 ? x[j > 0 ? j - 1 : 0] : x1, d1);
    if (taps && (!whole || j > 1)) d2 = fmaf(g[j], j > 1 ? x[j > 1 ? j - 2 : 0] : j > 0 ? x1 : x2, d2);
    acc[j] = fmaf(g[j], on ? x[j] : 0.0f, acc[j]);
  }
}

// ones sets E elements of a pack to 1, starting with element `at`, if `wanted` is set. It selects instead of branching,
// because the seeds of a warp differ.
template <int E, class T, int N> __device__ __forceinline__ void ones(Pack<T, N>& v, int at, bool wanted) {
  if constexpr (inPairs<T, E>) {
    const Pair<T> one = pairOf<T>(1);
#pragma unroll
    for (int j = 0; j < E; j += 2) {
      uint32_t& word = *reinterpret_cast<uint32_t*>(&v.v[at + j]);
      word = wanted ? *reinterpret_cast<const uint32_t*>(&one) : word;
    }
  } else {
#pragma unroll
    for (int j = 0; j < E; j++) v.v[at + j] = wanted ? fromFloat<T>(1) : v.v[at + j];
  }
}

// GradientSums adds up the records of several threads or blocks, which Seen::put writes.
struct GradientSums {
  Sums m, norms;
  float top = 0;
  float unused = 0;
  __device__ __forceinline__ void add(const GradientSums& o) { m.add(o.m), norms.add(o.norms), top = fmaxf(top, o.top); }
  __device__ __forceinline__ void add(const float4* r, double pivot, double middle) {
    m.add(r[0], pivot), norms.add(r[1], middle), top = fmaxf(top, r[2].x);
  }
};

// mergeGradient adds up the records of the blocks, [parts, units] of three float4 each, and writes the figures [6, seeds]:
// the norm, variance and largest magnitude and, if `norms` is set, the mean, variance and number of norms of rows. A seed
// has `each` units, and `share` threads divide its records; otherwise, it is like HealthSums::gather. Without parts it
// writes nothing.
__device__ __forceinline__ void mergeGradient(float* figures, const float4* records, int parts, int units, int each, int first,
                                              int seeds, int share, int i, bool norms) {
  constexpr int early = 2;  // records that a thread reads at once
  GradientSums h;
  const int nth = i / share, seed = first + nth, all = seed < seeds ? parts * each : 0;
  int p = i & share - 1, unit = p, part = 0;
  if (each == 1) part = p, unit = 0;
  else if (p >= each) part = p / each, unit = p % each;
  const int step = each == 1 ? share : share / each, over = each == 1 ? 0 : share % each;
  records += 3 * int64_t(nth) * each;
  float4 lead = {};
  float middle = 0;
  if (all > 0) lead = records[0], middle = records[1].x;
#pragma unroll 1
  do {
    float4 r[early][3];
#pragma unroll
    for (int k = 0; k < early; k++) {
      const float4* from = records + 3 * (int64_t(part) * units + unit);
#pragma unroll
      for (int n = 0; n < 3; n++) {
        r[k][n] = {};
        if (p < all) r[k][n] = from[n];
      }
      p += share, part += step, unit += over;
      if (unit >= each) unit -= each, part++;
    }
    if (lead.w == 0 && all > 0) lead.x = pivotOf(records, parts, 3 * int64_t(units)), lead.w = 1;
#pragma unroll
    for (int k = 0; k < early; k++) h.add(r[k], lead.x, middle);
  } while (p < all);
  addOver(h, share, i);
  if (all == 0 || i % share > 0) return;
  Moments m = h.m.moments(lead.x), n = h.norms.moments(middle);
  const float out[6] = {float(m.norm()), float(m.variance()), h.top, float(n.mean), float(n.variance()), float(n.n)};
#pragma unroll
  for (int f = 0; f < 6; f++)
    if (norms || f < 3) figures[int64_t(f) * seeds + seed] = out[f];
}

// backward is the pass over rows. A thread has G seeds of E columns each, or, unless `whole`, part of the chunk of one
// seed.
//
// sharing is the number of threads of a warp that have a chunk together and compute the norms of its rows. If sharing is
// 0, the threads of a chunk belong to several warps and compute no norms; scale [rows, seeds] then holds the clipping
// factors, and is null without clipping. records, [gridDim.y, units] of three float4, may be null in strict mode.
//
// Launch: like forward, but with 4·(N + 2·G) bytes of shared memory per thread and, with figures, 48·G more.
template <class T, int N, int E, bool whole, Mode mode, class Feed>
__device__ __forceinline__ void backward(const Layer& l, T* dx, const Source<T, 2>& src, const Share& share, int sharing,
                                         const float* scale, float* sums, float4* records, uint32_t* bad,
                                         uint32_t* clipped) {
  constexpr int G = N / E, B = Feed::B, group = 8 / B;  // batches between merges
  constexpr bool bare = mode == kWatch && !whole;       // whether rows can be processed without pivots
  extern __shared__ __align__(128) uint4 shared[];
  const T *g = src.p[0], *x = src.p[1];
  const bool watch = mode == kWatch || mode == kStrict && records;
  const int d = l.seeds * l.chunk, units = d / E;
  releaseNext();
  Lane lane(N, share);
  const bool here = lane.find(d);
  const int seed = lane.col / (whole ? E : l.chunk), at = whole ? 0 : lane.col % l.chunk;
  Seen<T, E> h[G];
  float acc[N] = {}, d1[G] = {}, d2[G] = {};
  if (here) {
    State<E> states[G];
#pragma unroll
    for (int k = 0; k < G; k++) states[k].begin(l, seed + k);
    const Work<B> work(lane, share, int(l.rows), d);
    const bool ahead = (whole || !l.softmax) && share.late > blockIdx.y * blockDim.y;
    if (ahead) work.template prefetch<2>(g, lane);
    bool needs = false;
#pragma unroll
    for (int k = 0; k < G; k++) needs = needs || !states[k].word.ignores();
    needs = __any_sync(lane.peers, needs);
    if (ahead && needs) work.template prefetch<2>(x, lane);
    if (whole || !l.softmax) awaitPrevious();  // it may have written g; with a softmax kernel in between, g is complete
    Feed feed(shared, src, lane, work, needs);
    const Neighbours<T, N> neighbours(lane, at, l.chunk, whole);
    const bool norm = whole || sharing > 0, together = !whole && sharing > 1, leads = at == 0;
    const float large = greatest<T>(kLargestSquared);
    Pivots<T, N, E> pivots;
    if (watch) pivots.fetch(g, work);
#pragma unroll
    for (int k = 0; k < G; k++) states[k].template finish<whole>(l, at);
    awaitPrevious();  // it computed l.softmax or scale; the compiler must not delay loads beyond this point
    Seed<E> s[G];
    Need most = kNothing;
    uint32_t clips[G] = {};
    bool ignores[G];
#pragma unroll
    for (int k = 0; k < G; k++) {
      s[k].template init<whole>(l, states[k]);
      ignores[k] = s[k].word.ignores();
      most = greater(most, needOf(s[k].word, s[k].active));
    }
    const bool clipping = l.limit || !whole && scale;
    most = clipping ? kTaps : mostOf(most, lane.peers);  // clipping is rare and has no specialized code
    if (watch) {
      float middle[G];
      pivots.find(middle, g, work);
#pragma unroll
      for (int k = 0; k < G; k++) {
        float q = 0;
#pragma unroll
        for (int j = 0; j < E; j++) {
          float v = pivots.first[0].get(k * E + j);
          if (finite(v)) q = fmaf(v, v, q);
        }
        if (together) q = sumOver(q, sharing, at / N, lane.peers);
        h[k].m.k = middle[k];
        if (q <= FLT_MAX) h[k].norms.k = squareRoot(q);
      }
    }
    bool writes = dx != g || clipping;
#pragma unroll
    for (int k = 0; k < G; k++) writes = writes || s[k].blends;

    // If norms are only statistics, one reduction computes those of both rows of a batch, and the first two threads of a
    // chunk include one of them each. Clipping needs the norm of a row in all threads.
    static_assert(B == 2, "two rows");
    const bool twoByTwo = watch && !whole && sharing > 1 && sharing % 2 == 0 && !l.limit;

    // slowRow is the slow path: it checks every element of a row. The threads that share a chunk call it together.
    auto slowRow = [&](int r) {
      const int64_t row = work.place(r);
      const unsigned peers = together ? kAllLanes >> kWarp - sharing << Lane::inWarp() - at / N : 0;
      Pack<T, N> gv = load<N>(g + row), xv = load<N>(x + row), strictX = xv;
      float x1 = 0, x2 = 0, g1 = 0, g2 = 0, ge[N], xe[N];
      if (!whole) neighbours.loadBefore(x + row, x1, x2), neighbours.loadBehind(g + row, g1, g2);
#pragma unroll
      for (int k = 0; k < G; k++) ones<E>(xv, k * E, ignores[k]);
      unpack(ge, gv, 0);
      unpack(xe, xv, 0);
#pragma unroll
      for (int k = 0; k < G; k++) {
        bool huge = false, some = false;
        int left = 0;
#pragma unroll
        for (int j = 0; j < E; j++) {
          float v = ge[k * E + j];
          if (!finite(v)) continue;
          some = true, huge = huge || fabsf(v) > kLargestSquared, left++;
          if (watch) h[k].addFinite(v);
        }
        if (left < E) atomicAdd(bad + seed + k, uint32_t(E - left));  // integers, so the order does not matter
        float by = !whole && scale ? scale[int64_t(r) * l.seeds + seed] : 1;
        bool counts = false;
        if (norm && (watch || l.limit)) {
          if (together) huge = __any_sync(peers, huge), some = sumOver(some, sharing, at / N, peers) > 0;
          float q = 0, down = huge ? 0x1p-66f : 1;
#pragma unroll
          for (int j = 0; j < E; j++)
            if (finite(ge[k * E + j])) q = fmaf(ge[k * E + j] * down, ge[k * E + j] * down, q);
          if (together) q = sumOver(q, sharing, at / N, peers);
          float length = squareRoot(q) / down;
          counts = watch && leads && some;
          if (counts) h[k].addNorm(length);
          if (l.limit) {
            by = fminf(l.limit[seed + k] / (length + l.eps), 1.0f);
            clips[k] += leads && by < 1;
          }
        }
        if (watch) h[k].template merge<bare>(left, counts);
        if (by < 1) {
#pragma unroll
          for (int j = 0; j < E; j++) ge[k * E + j] *= by;
        }
        float out[E], b1 = x1, b2 = x2;
        if (mode == kStrict) {
          Strict strict(l, seed + k, s[k].active);
#pragma unroll
          for (int j = 0; j < E; j++)
            if (!ignores[k]) xe[k * E + j] = strict(xe[k * E + j]);
          b1 = at > 0 ? strict(x1) : 0, b2 = at > 1 ? strict(x2) : 0;
        }
        differentiate<true, whole, kTaps>(out, acc + k * E, d1[k], d2[k], ge + k * E, xe + k * E, g1 * by, g2 * by, b1, b2, s[k]);
        if (mode == kStrict) {
          Strict strict(l, seed + k, s[k].active);
#pragma unroll
          for (int j = 0; j < E; j++)
            if (strict.bites(strictX.get(k * E + j))) out[j] = 0;
        }
        if (by < 1) {
#pragma unroll
          for (int j = 0; j < E; j++) out[j] = s[k].blends ? out[j] : ge[k * E + j];
        }
        if (s[k].blends || by < 1) setPart(gv, k * E, out);
      }
      if (together) __syncwarp(peers);  // all threads that share the chunk have read g, which dx may overwrite
      if (writes) store(dx + row, gv);
    };
    // Processes row u of a batch without extreme values. `near` holds its neighbors: the following
    // g and the preceding x. If twoByTwo is set, `square` receives the thread's part of the square
    // of the row's norm.
    auto fastRow = [&](auto needs, auto manner, Pack<T, N>& gv, Pack<T, N>& xv, const float (&near)[4], float rowScale,
                       float& square) {
      constexpr Need need = Need(decltype(needs)::value);
      constexpr bool scales = decltype(manner)::value == kClips, pivot = decltype(manner)::value != kBare;
#pragma unroll
      for (int k = 0; k < G; k++) {
        float ge[E], xe[E], by = rowScale;
        unpack(ge, gv, k * E);
        if (watch && (pivot || !bare)) h[k].add(ge);
        if (watch && G > 1) h[k].addTop(gv.v + k * E);
        float q = 0;
        if (bare && !pivot || norm && (watch || scales && l.limit)) {
#pragma unroll
          for (int j = 0; j < E; j++) q = fmaf(ge[j], ge[j], q);
        }
        if (bare && !pivot) h[k].add(ge, q);
        if (norm && (watch || scales && l.limit)) {
          if (twoByTwo) {
            square = q;
          } else {
            if (together) q = sumOver(q, sharing, at / N, lane.peers);
            float length = squareRoot(q);
            if (watch && leads) h[k].addNorm(length);
            if (scales && l.limit) {
              by = fminf(l.limit[seed + k] / (length + l.eps), 1.0f);
              clips[k] += leads && by < 1;
            }
          }
        }
        if (scales && by < 1) {
#pragma unroll
          for (int j = 0; j < E; j++) ge[j] *= by;
        }
        float out[E];
        if constexpr (need > kNothing) {
          ones<E>(xv, k * E, ignores[k]);
          unpack(xe, xv, k * E);
          differentiate<false, whole, need>(out, acc + k * E, d1[k], d2[k], ge, xe, near[0] * by, near[1] * by, near[2],
                                                  near[3], s[k]);
        }
        if (scales && by < 1) {
#pragma unroll
          for (int j = 0; j < E; j++) out[j] = s[k].blends ? out[j] : ge[j];
        }
        if (!scales) {
          if (need > kNothing) setPartIf(s[k].blends, gv, k * E, out);
        } else if (s[k].blends || by < 1) {
          setPart(gv, k * E, out);
        }
      }
    };
    int pending = 0;  // batches whose sums have not been merged into the statistics
    bool pivoted = true;  // whether any of the warp's seeds has a pivot
    auto flush = [&] {
      const int normed = !norm ? 0 : twoByTwo ? at < 2 * N : leads ? B : 0;  // norms of a batch that the thread includes
      if (watch)
#pragma unroll
        for (int k = 0; k < G; k++) h[k].template merge<bare>(pending * (B * E), pending * normed);
      pending = 0;
      if (bare) pivoted = !__all_sync(lane.peers, h[0].m.k == 0);
    };
    int r = work.row;
#pragma unroll 1
    for (int i = 0; i <= work.batches; i++, r -= work.stride) {  // the last iteration handles the single rows
      const bool full = i < work.batches;
      bool fine = false;
      Pack<T, N> v[2][B];
      if (mode != kStrict && full) {
        float near[B][4] = {};
        const int64_t row = work.place(r);
        feed.next(v, row);
        Magnitudes<T, N> sizes(v[0]);
        if (!whole && most == kTaps) {
#pragma unroll
          for (int u = 0; u < B; u++) {
            neighbours.behind(v[0][u], g + row + int64_t(u) * d, near[u][0], near[u][1]);
            neighbours.before(v[1][u], x + row + int64_t(u) * d, near[u][2], near[u][3]);
          }
          if (__builtin_expect(neighbours.crosses, 0))
#pragma unroll
            for (int u = 0; u < B; u++) {
              neighbours.crossBehind(g + row + int64_t(u) * d, near[u][0], near[u][1]);
              neighbours.crossBefore(x + row + int64_t(u) * d, near[u][2], near[u][3]);
            }
          if (!together)  // otherwise the threads that own the neighbors check them
#pragma unroll
            for (int u = 0; u < B; u++) sizes.take(near[u][0]), sizes.take(near[u][1]);
        }
        fine = sizes.within(large);
        if (together || bare) fine = __all_sync(lane.peers, fine);  // peers must stay together, since they vote in flush
        if (fine) {
          if (watch && G == 1) h[0].addTop(sizes.most);
          float square[B] = {};
          auto rows = [&](auto needs, auto manner) {
#pragma unroll
            for (int u = 0; u < B; u++) {
              const float by = manner.value == kClips && !whole && scale ? scale[int64_t(r + u) * l.seeds + seed] : 1;
              fastRow(needs, manner, v[0][u], v[1][u], near[u], by, square[u]);
            }
          };
          auto all = [&](auto manner) {
            if (most == kTaps) rows(Int<kTaps>{}, manner);
            else if (most == kRelu) rows(Int<kRelu>{}, manner);
            else if (most == kLinear) rows(Int<kLinear>{}, manner);
            else rows(Int<kNothing>{}, manner);
          };
          if (clipping) rows(Int<kTaps>{}, Int<kClips>{});
          else if (bare && !pivoted) all(Int<kBare>{});
          else all(Int<kPivots>{});
          if (twoByTwo) {
            const float q = sumTwoOver(square[0], square[1], sharing, at / N, lane.peers);
            if (at < 2 * N) h[0].addNorm(squareRoot(q));
          }
          if (writes)
#pragma unroll
            for (int u = 0; u < B; u++) storeWhole(dx + row + int64_t(u) * d, v[0][u]);
          if (++pending == group) flush();
        }
      }
      if (__builtin_expect(!fine, 0)) {
        flush();
#pragma unroll 1
        for (int u = 0; u < (full ? B : work.singles); u++) slowRow(full ? r + u : work.single(u));
        pivoted = true;
      }
    }
    feed.finish();
#pragma unroll
    for (int k = 0; k < G; k++) {
      if (clips[k] > 0) atomicAdd(clipped + seed + k, clips[k]);
    }
  }
  constexpr int each = N + 2 * G;  // sums per thread
  const int across = blockDim.x, down = blockDim.y, wide = across * G;
  float* own = reinterpret_cast<float*>(shared) + threadIdx.x;
  float4* all = reinterpret_cast<float4*>(reinterpret_cast<float*>(shared) + kThreads * each);
  if (Feed::shared) __syncthreads();  // all threads have read the rows they fetched
  float* mine = own + threadIdx.y * each * across;
#pragma unroll
  for (int j = 0; j < N; j++) mine[j * across] = acc[j];
#pragma unroll
  for (int k = 0; k < G; k++) mine[(N + k) * across] = d1[k], mine[(N + G + k) * across] = d2[k];
  if (watch)
#pragma unroll
    for (int k = 0; k < G; k++) h[k].put(all + 3 * (threadIdx.y * wide + threadIdx.x * G + k));
  __syncthreads();
  if (!here) return;
  sums += int64_t(blockIdx.y) * (d + 2 * units);
  for (int j = threadIdx.y; j < each; j += down) {
    float sum = 0;
    for (int y = 0; y < down; y++) sum += own[(y * each + j) * across];
    sums[j < N ? lane.col + j : d + (j < N + G ? 0 : units) + lane.col / E + (j - N) % G] = sum;
  }
  if (watch) {
    for (int k = threadIdx.y; k < G; k += down) {
      const float4* r = all + 3 * (threadIdx.x * G + k);
      const double pivot = pivotOf(r, down, 3 * wide), middle = r[1].x;
      GradientSums sum;
      for (int y = 0; y < down; y++) sum.add(r + 3 * y * wide, pivot, middle);
      float4* to = records + 3 * (int64_t(blockIdx.y) * units + lane.col / E + k);
      to[0] = sum.m.record(pivot), to[1] = sum.norms.record(middle), to[2] = {sum.top, 0, 0, 0};
    }
  }
}

// total[i] = Σ_parts sums[part, i], for 32 columns per block. Without parts it writes nothing.
__device__ __forceinline__ void addParts(float* total, const float* sums, int parts, int64_t columns) {
  constexpr int rows = kMergeThreads / kWarp, early = 10;
  __shared__ float tile[rows][kWarp];
  const int x = threadIdx.x % kWarp, y = threadIdx.x / kWarp;
  const int64_t i = int64_t(blockIdx.x) * kWarp + x;
  const int all = i < columns ? parts : 0;
  float sum = 0;
  int b = y;
#pragma unroll 1
  do {
    float v[early];
#pragma unroll
    for (int k = 0; k < early; k++) v[k] = b + k * rows < all ? sums[(b + k * rows) * columns + i] : 0;
#pragma unroll
    for (int k = 0; k < early; k++) sum += v[k];
    b += early * rows;
  } while (b < all);
  tile[y][x] = sum;
  __syncthreads();
  if (y > 0 || all == 0) return;
#pragma unroll
  for (int k = 1; k < rows; k++) sum += tile[k][x];
  total[i] = sum;
}

// SlotSums is the input for the gradients of slots: the sums over rows in `total`, and the seeds
// that they belong to. The learning seeds of a slot are order[heads[slot]] to order[heads[slot + 1]
// − 1].
struct SlotSums {
  const uint32_t* word;
  const float *alpha, *weights, *scales, *total;
  const int *heads, *order;
  float *dweights, *dscales;
  int seeds, chunk, units;
};

// gatherSlot adds up the gradients over the seeds of a slot. Unless `ready`, it neither reads the
// sums nor writes anything. Launch: one slot and 32 columns per block, with 32 threads for the
// columns by up to 32 for seeds.
__device__ __forceinline__ void gatherSlot(const SlotSums& l, bool ready) {
  __shared__ double dw[kWarp][kWarp], da[kWarp];
  const int slot = blockIdx.x, lane = threadIdx.x, c = l.chunk, col = blockIdx.y * kWarp + lane, each = l.units / l.seeds;
  const int64_t d = int64_t(l.seeds) * c;
  const float* w = l.weights + int64_t(slot) * c;
  auto warpSum = [](double v) {
    for (int k = kWarp / 2; k > 0; k /= 2) v += __shfl_xor_sync(kAllLanes, v, k);
    return v;
  };
  float top = -INFINITY, by = 0;  // of the slot's softmax; computed for the first seed that needs it
  auto softmax = [&](int i) { return expf(w[i] - top) * by; };
  auto at = [&](const float* p) { return ready ? *p : 0.0f; };

  double weight = 0, scale = 0;  // scale: for this lane alone
  for (int i = l.heads[slot] + threadIdx.y; i < l.heads[slot + 1]; i += blockDim.y) {
    int seed = l.order[i];
    Word word{l.word[seed]};
    Kind kind = word.kind();
    double beta = l.alpha[seed], a = l.scales[slot];
    if (beta == 0 || !word.known()) continue;
    const float *sum = l.total + int64_t(seed) * c, *tap1 = l.total + d + int64_t(seed) * each, *tap2 = tap1 + l.units;
    if (kind == kConvFilter) {
      double taps[3] = {};
      for (int j = lane; j < c; j += kWarp) taps[0] += at(sum + j);
      for (int j = lane; j < each; j += kWarp) taps[1] += at(tap1 + j), taps[2] += at(tap2 + j);
#pragma unroll
      for (int k = 0; k < 3; k++) {
        taps[k] = warpSum(taps[k]);
        if (k >= c) continue;
        if (col == k) weight += beta * a * taps[k];
        if (lane == 0) scale += beta * w[k] * taps[k];
      }
      continue;
    }
    if (kind == kAttentionGate && by == 0) {
      for (int j = lane; j < c; j += kWarp) top = fmaxf(top, w[j]);
      top = warpReduce<Max>(top);
      float exps = 0;
      for (int j = lane; j < c; j += kWarp) exps += expf(w[j] - top);
      by = 1 / warpReduce<Sum>(exps);
    }
    double dot = 0;
    for (int j = lane; j < c; j += kWarp) dot += double(at(sum + j)) * (kind == kAttentionGate ? softmax(j) : w[j]);
    scale += beta * dot;
    if (kind == kAttentionGate) dot = warpSum(dot);
    if (col >= c) continue;
    if (kind == kAttentionGate) weight += beta * a * softmax(col) * (at(sum + col) - dot);
    else weight += beta * a * at(sum + col);
  }
  scale = warpSum(scale);
  dw[threadIdx.y][lane] = weight;
  if (lane == 0) da[threadIdx.y] = scale;
  __syncthreads();
  if (threadIdx.y > 0 || !ready) return;
  for (int k = 1; k < blockDim.y; k++) weight += dw[k][lane], scale += da[k];
  if (col < c) l.dweights[int64_t(slot) * c + col] = float(weight);
  if (col == 0) l.dscales[slot] = float(scale);
}

template <class T, int N> using PlainRows = Direct<T, N, 2, 2>;
template <class T, int N> using RingRows = Ring<T, N, 2, 2>;

#define DEFINE_BACKWARD(mode, name, shape, T, N, E, whole, Feed)                                           \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                \
      kasmina_backward_##name##_##shape##_##T(Layer l, Share share, T* dx, const T* g, const T* x,         \
                                              int sharing, const float* scale, float* sums,                \
                                              float4* records, uint32_t* bad, uint32_t* clipped) {         \
    backward<T, N, E, whole, mode, Feed<T, N>>(l, dx, {{g, x}}, share, sharing, scale, sums, records, bad, \
                                               clipped);                                                   \
  }
// If rows are not aligned, a thread has one column.
#define DEFINE_WIDE(...) FOR_MODES(DEFINE_BACKWARD, RingRows, __VA_ARGS__)
#define DEFINE(T) FOR_WIDE_SHAPES(DEFINE_WIDE, T) FOR_MODES(DEFINE_BACKWARD, PlainRows, single, T, 1, 1, false)
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
#undef DEFINE_WIDE
#undef DEFINE_BACKWARD

// While a pass is still running, the small kernels that follow it execute one iteration without effect, which loads their
// code. With more blocks than this, that iteration would cost more than it saves.
constexpr int kFewBlocks = 128;
__device__ __forceinline__ bool manyBlocks() { return gridDim.x * gridDim.y * gridDim.z > kFewBlocks; }

// Left holds the arguments of kasmina_gather, which are the results that the blocks of a pass have left: sums
// [parts, columns] and records, both of which may be null.
struct Left {
  float* total;
  const float* sums;
  float* figures;
  const float4* records;
  int64_t columns;
  int adding, parts, units, seeds, share, norms;
};

// The first `adding` blocks add up a pass's sums over the parts into `total`. Later blocks merge
// its records into figures, for kMergeThreads/share seeds each. It may overlap with the preceding
// kernel.
extern "C" __global__ void __launch_bounds__(kMergeThreads) kasmina_gather(const __grid_constant__ Left l) {
  releaseNext();
  const int each = l.units / l.seeds, across = kMergeThreads / l.share, first = (int(blockIdx.x) - l.adding) * across;
  const bool adds = int(blockIdx.x) < l.adding;
  if (adds) prefetchParts(l.sums + blockIdx.x * kWarp, l.parts, l.columns, kWarp);
  else prefetchParts(l.records + 3 * int64_t(first) * each, l.parts, 3 * int64_t(l.units), 3 * min(across, l.seeds - first) * each);
  // The first iteration adds nothing. It only loads the code into the multiprocessor while the
  // preceding kernel is still running.
#pragma unroll 1
  for (int turn = manyBlocks(); turn < 2; turn++) {
    if (turn == 1) awaitPrevious();
    __syncthreads();
    if (adds) addParts(l.total, l.sums, turn * l.parts, l.columns);
    else
      mergeGradient(l.figures, l.records + 3 * int64_t(first) * each, turn * l.parts, l.units, each, first, l.seeds, l.share, threadIdx.x,
                    l.norms);
  }
}

// Launch: gridDim.x slots and gridDim.y tiles of 32 columns. It may overlap with the preceding
// kernel.
extern "C" __global__ void __launch_bounds__(1024) kasmina_slots(const __grid_constant__ SlotSums l) {
  releaseNext();
  // The first iteration reads everything except `total`, and loads the code into the
  // multiprocessor.
#pragma unroll 1
  for (int turn = manyBlocks(); turn < 2; turn++) {
    if (turn == 1) awaitPrevious();
    __syncthreads();
    gatherSlot(l, turn == 1);
  }
}
