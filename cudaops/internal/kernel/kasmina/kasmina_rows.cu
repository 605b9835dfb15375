// Optional row-by-row measurements of a Kasmina layer: figures of each row and seed, reduced to
// their mean or maximum over the rows; gradient norms of chunks that don't fit in a warp; and
// histograms.
//
//   health:    variance, mean, min, max, share of |v| < eps, |mean|/sqrt(variance + eps)
//   gradient:  norm, variance, largest magnitude
//   scale[row, seed] = min(1, limit/(norm + eps))
//
// Rows without a finite element don't count. W lanes of a warp, a power of two, share a row of a
// chunk. They read it twice: once for the mean and once for the deviations. Groups of W lanes
// without a seed of their own take other rows.
#include "kasmina.cuh"

enum Reduction { kExact, kMean, kMax };
constexpr int kRowFigures = 6;

// RowPartial is the result for a seed from one part of the rows.
struct RowPartial {
  double figures[kRowFigures];
  Moments norms;

  __device__ __forceinline__ explicit RowPartial(int reduction) {  // for no rows
    for (double& f : figures) f = reduction == kMax ? -INFINITY : 0;
  }
  __device__ __forceinline__ void merge(const RowPartial& o, int reduction) {
    for (int i = 0; i < kRowFigures; i++)
      figures[i] = reduction == kMax ? fmax(figures[i], o.figures[i]) : figures[i] + o.figures[i];
    norms.merge(o.norms);
  }
};

template <class Op> __device__ __forceinline__ float groupReduce(float v, int w) {
  for (int k = w / 2; k > 0; k /= 2) v = Op::merge(v, __shfl_xor_sync(kAllLanes, v, k));
  return v;
}

// forEach calls f for every w-th of c elements, from number lane on, and possibly for some
// additional NaNs. It loads eight at a time.
template <class T, class F> __device__ __forceinline__ void forEach(const T* p, int c, int lane, int w, F f) {
  for (int i = lane; i < c; i += 8 * w) {
    float e[8];
#pragma unroll
    for (int j = 0; j < 8; j++) e[j] = i + j * w < c ? toFloat(p[i + j * w]) : NAN;
#pragma unroll
    for (int j = 0; j < 8; j++) f(e[j]);
  }
}

// anchorOf returns the median of the first three of c elements, to avoid an outlier. If these are
// not all finite, it returns the first finite element.
template <class T> __device__ __forceinline__ float anchorOf(const T* p, int c) {
  const float e0 = toFloat(p[0]), e1 = toFloat(p[min(1, c - 1)]), e2 = toFloat(p[min(2, c - 1)]);
  if (finite(e0) && finite(e1) && finite(e2)) return median(e0, e1, e2);
  for (int i = 0; i < c; i++)
    if (float e = toFloat(p[i]); finite(e)) return e;
  return 0;
}

// Launch: 256 threads in groups of W, for `across` seeds per block and as many parts of the rows as
// fit. The parts of the gridDim.y blocks take rows in turn. partial is [parts, seeds]. scale and
// clipped are used only if l.limit is not null.
template <class T, bool gradient>
__device__ __forceinline__ void measureRows(const Layer& l, const T* v, RowPartial* partial, float* scale, uint32_t* clipped,
                                            int across, int w, int reduction) {
  const int c = l.chunk, lane = threadIdx.x % w, group = threadIdx.x / w, down = blockDim.x / w / across;
  const int part = blockIdx.y * down + group / across, parts = gridDim.y * down;
  int seed = blockIdx.x * across + group % across;
  const bool mine = seed < l.seeds && lane == 0;
  seed = min(seed, l.seeds - 1);  // all lanes take part in reductions
  RowPartial sum(reduction);
  uint32_t clips = 0;
  for (int64_t turn = 0; turn < l.rows; turn += parts) {
    const bool here = turn + part < l.rows;  // all lanes take part in reductions
    const int64_t row = here ? turn + part : 0;
    const T* p = v + (row * l.seeds + seed) * c;
    float anchor = anchorOf(p, c);
    float s = 0, n = 0, dead = 0, low = INFINITY, high = -INFINITY, m2 = 0;
    forEach(p, c, lane, w, [&](float e) {
      if (!finite(e)) return;
      s += e - anchor, n++, dead += fabsf(e) < l.eps, low = fminf(low, e), high = fmaxf(high, e);
    });
    s = groupReduce<Sum>(s, w), n = groupReduce<Sum>(n, w), dead = groupReduce<Sum>(dead, w);
    low = -groupReduce<Max>(-low, w), high = groupReduce<Max>(high, w);
    float mean = s / fmaxf(n, 1);
    forEach(p, c, lane, w, [&](float e) {
      float dv = e - anchor - mean;
      if (finite(e)) m2 = fmaf(dv, dv, m2);
    });
    Moments m{n, double(anchor) + mean, groupReduce<Sum>(m2, w)};
    double norm = m.norm();
    if (gradient && l.limit) {
      double by = l.limit[seed] / (norm + l.eps);
      if (by < 1) clips += here;
      if (mine && here) scale[row * l.seeds + seed] = by < 1 ? float(by) : 1;
    }
    if (n == 0 || !here) continue;
    RowPartial one(reduction);
    one.norms = {1, norm, 0};
    if (gradient) {
      one.figures[0] = norm, one.figures[1] = m.variance(), one.figures[2] = fmaxf(-low, high);
    } else {
      one.figures[0] = m.variance(), one.figures[1] = m.mean, one.figures[2] = low, one.figures[3] = high;
      one.figures[4] = dead / n, one.figures[5] = fabs(m.mean) / sqrt(m.variance() + l.eps);
    }
    sum.merge(one, reduction);
  }
  if (!mine) return;
  partial[int64_t(part) * l.seeds + seed] = sum;
  if (clips > 0) atomicAdd(clipped + seed, clips);
}

// Writes the first `count` figures [.., seeds], unless the reduction is exact. Unless norms is
// negative, it also writes the mean, variance and number of the norms, from figure `norms` on.
// Launch: one warp per seed, 4 per block.
extern "C" __global__ void __launch_bounds__(4 * kWarp)
    kasmina_rows_merge(float* figures, const RowPartial* partial, int parts, int seeds, int reduction, int count, int norms) {
  const int seed = blockIdx.x * 4 + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (seed >= seeds) return;
  RowPartial sum(reduction);
  for (int p = lane; p < parts; p += kWarp) sum.merge(partial[int64_t(p) * seeds + seed], reduction);
  for (int k = kWarp / 2; k > 0; k /= 2) {
    RowPartial o(reduction);
#pragma unroll
    for (int i = 0; i < int(sizeof(o) / 8); i++)
      reinterpret_cast<double*>(&o)[i] = __shfl_down_sync(kAllLanes, reinterpret_cast<const double*>(&sum)[i], k);
    sum.merge(o, reduction);
  }
  if (lane > 0) return;
  double rows = sum.norms.n;
  if (reduction != kExact)
#pragma unroll
    for (int i = 0; i < kRowFigures; i++) {
      double v = rows == 0 ? 0 : reduction == kMean ? sum.figures[i] / rows : sum.figures[i];
      if (i < count) figures[int64_t(i) * seeds + seed] = float(v);
    }
  if (norms < 0) return;
  figures[int64_t(norms) * seeds + seed] = float(sum.norms.mean);
  figures[int64_t(norms + 1) * seeds + seed] = float(sum.norms.variance());
  figures[int64_t(norms + 2) * seeds + seed] = float(rows);
}

constexpr int kBins = 40;

// Adds to bins [seeds, kBins]. Bin i counts 2^(i−24) ≤ |x| < 2^(i−23); the first bin includes
// everything smaller and the last bin everything larger. Launch: one thread per column; the
// gridDim.y blocks share the rows.
template <class T> __device__ __forceinline__ void histogram(uint32_t* bins, const T* x, int64_t rows, int seeds, int chunk) {
  int d = seeds * chunk, col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col >= d) return;
  bins += int64_t(col / chunk) * kBins;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    float v = toFloat(x[row * d + col]);
    int exponent = int(__float_as_uint(v) >> 23 & 0xff) - 127;
    if (exponent < 128) atomicAdd(bins + min(max(exponent + 24, 0), kBins - 1), 1u);
  }
}

#define DEFINE(T)                                                                                               \
  extern "C" __global__ void __launch_bounds__(256)                                                             \
      kasmina_rows_health_##T(Layer l, const T* v, RowPartial* partial, int across, int w, int reduction) {     \
    measureRows<T, false>(l, v, partial, nullptr, nullptr, across, w, reduction);                               \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                             \
      kasmina_rows_gradient_##T(Layer l, const T* v, RowPartial* partial, float* scale, uint32_t* clipped,      \
                                int across, int w, int reduction) {                                             \
    measureRows<T, true>(l, v, partial, scale, clipped, across, w, reduction);                                  \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                             \
      kasmina_histogram_##T(uint32_t* bins, const T* x, int64_t rows, int seeds, int chunk) {                   \
    histogram(bins, x, rows, seeds, chunk);                                                                     \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
