// What a Kasmina layer measures row by row, for those who ask for it: the figures of each row and seed, averaged over the
// rows or their largest; gradient norms of chunks that do not fit in a thread; histograms.
//
//   health:    variance, mean, min, max, share of |v| < eps, |mean|/sqrt(variance + eps)       rows without a finite
//   gradient:  norm, variance, largest magnitude                                               element do not count
//   scale[row, seed] = min(1, limit/(norm + eps))
//
// W lanes of a warp, a power of two, share a row of a chunk, and read it twice: for the mean and for the deviations.
#include "kasmina.cuh"

enum Reduction { kExact, kMean, kMax };
constexpr int kRowFigures = 6;

// RowPartial is what a block of rows leaves of a seed.
struct RowPartial {
  double figures[kRowFigures];
  Moments norms;
};

template <class Op> __device__ __forceinline__ float groupReduce(float v, int w) {
  for (int k = w / 2; k > 0; k /= 2) v = Op::merge(v, __shfl_xor_sync(kAllLanes, v, k));
  return v;
}

// Launch: 256 threads, 256/W seeds a block; the gridDim.y blocks share the rows. partial is [gridDim.y, seeds]. scale and
// clipped matter where l.limit is not null.
template <class T, bool gradient>
__device__ __forceinline__ void measureRows(const Layer& l, const T* v, RowPartial* partial, float* scale, uint32_t* clipped,
                                            int w, int reduction) {
  const int c = l.chunk, lane = threadIdx.x % w;
  int seed = blockIdx.x * (blockDim.x / w) + threadIdx.x / w;
  const bool mine = seed < l.seeds && lane == 0;
  seed = min(seed, l.seeds - 1);  // all lanes take part in reductions
  RowPartial sum{};
  if (reduction == kMax)
    for (double& f : sum.figures) f = -INFINITY;
  uint32_t clips = 0;
  for (int64_t row = blockIdx.y; row < l.rows; row += gridDim.y) {
    const T* p = v + (row * l.seeds + seed) * c;
    float first = toFloat(p[0]), anchor = finite(first) ? first : 0;
    float s = 0, n = 0, dead = 0, low = INFINITY, high = -INFINITY, m2 = 0;
    for (int i = lane; i < c; i += w) {
      float e = toFloat(p[i]);
      if (!finite(e)) continue;
      s += e - anchor, n++, dead += fabsf(e) < l.eps, low = fminf(low, e), high = fmaxf(high, e);
    }
    s = groupReduce<Sum>(s, w), n = groupReduce<Sum>(n, w), dead = groupReduce<Sum>(dead, w);
    low = -groupReduce<Max>(-low, w), high = groupReduce<Max>(high, w);
    float mean = s / fmaxf(n, 1);
    for (int i = lane; i < c; i += w) {
      float e = toFloat(p[i]), dv = e - anchor - mean;
      if (finite(e)) m2 = fmaf(dv, dv, m2);
    }
    Moments m{n, double(anchor) + mean, groupReduce<Sum>(m2, w)};
    double norm = m.norm();
    if (gradient && l.limit) {
      double by = l.limit[seed] / (norm + l.eps);
      if (by < 1) clips++;
      if (mine) scale[row * l.seeds + seed] = by < 1 ? float(by) : 1;
    }
    if (n == 0) continue;
    double figures[kRowFigures] = {};
    if (gradient) {
      figures[0] = norm, figures[1] = m.variance(), figures[2] = fmaxf(-low, high);
    } else {
      figures[0] = m.variance(), figures[1] = m.mean, figures[2] = low, figures[3] = high, figures[4] = dead / n;
      figures[5] = fabs(m.mean) / sqrt(m.variance() + l.eps);
    }
    for (int i = 0; i < kRowFigures; i++)
      sum.figures[i] = reduction == kMax ? fmax(sum.figures[i], figures[i]) : sum.figures[i] + figures[i];
    sum.norms.merge({1, norm, 0});
  }
  if (!mine) return;
  partial[int64_t(blockIdx.y) * l.seeds + seed] = sum;
  if (clips > 0) atomicAdd(clipped + seed, clips);
}

// Writes the first count figures [.., seeds] unless the reduction is exact, and from figure norms on mean, variance and
// number of the norms unless norms is negative. Launch: a thread a seed.
extern "C" __global__ void __launch_bounds__(128)
    kasmina_rows_merge(float* figures, const RowPartial* partial, int blocks, int seeds, int reduction, int count, int norms) {
  int seed = blockIdx.x * blockDim.x + threadIdx.x;
  if (seed >= seeds) return;
  RowPartial sum = partial[seed];
  for (int b = 1; b < blocks; b++) {
    const RowPartial& o = partial[int64_t(b) * seeds + seed];
    for (int i = 0; i < kRowFigures; i++)
      sum.figures[i] = reduction == kMax ? fmax(sum.figures[i], o.figures[i]) : sum.figures[i] + o.figures[i];
    sum.norms.merge(o.norms);
  }
  double rows = sum.norms.n;
  if (reduction != kExact)
    for (int i = 0; i < count; i++)
      figures[int64_t(i) * seeds + seed] = rows == 0 ? 0 : float(reduction == kMean ? sum.figures[i] / rows : sum.figures[i]);
  if (norms < 0) return;
  figures[int64_t(norms) * seeds + seed] = float(sum.norms.mean);
  figures[int64_t(norms + 1) * seeds + seed] = float(sum.norms.variance());
  figures[int64_t(norms + 2) * seeds + seed] = float(rows);
}

constexpr int kBins = 40;

// Adds to bins [seeds, kBins]: bin i counts 2^(i−24) ≤ |x| < 2^(i−23), the first also what is smaller and the last what is
// larger. Launch: a thread a column, the gridDim.y blocks share the rows.
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
      kasmina_rows_health_##T(Layer l, const T* v, RowPartial* partial, int w, int reduction) {                 \
    measureRows<T, false>(l, v, partial, nullptr, nullptr, w, reduction);                                       \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                             \
      kasmina_rows_gradient_##T(Layer l, const T* v, RowPartial* partial, float* scale, uint32_t* clipped, int w, \
                                int reduction) {                                                                \
    measureRows<T, true>(l, v, partial, scale, clipped, w, reduction);                                          \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                             \
      kasmina_histogram_##T(uint32_t* bins, const T* x, int64_t rows, int seeds, int chunk) {                   \
    histogram(bins, x, rows, seeds, chunk);                                                                     \
  }
FOR_STORAGE_TYPES(DEFINE)
#undef DEFINE
