// All weights of a model as float8 after an update, twice: their rows with a scale each, and their columns, turned to rows, with a
// scale each (float8.cuh). Each of the two would read every weight by itself, launched for one after the other; here two launches
// are for all of them, in tiles.
//
//   largest:  the largest magnitude of each row and each column, of what a tile has of them, merged in memory
//   quantize: y [rows, d], scale [rows], turned [d, rows], turnedScale [d]
//
// Magnitudes are ordered as their bits are, NaN behind all numbers, so they are merged as integers: in any order, the same bits.
#include "float8.cuh"

// Weight is a matrix; rows and d are multiples of 16. most [rows + d] holds 0 at first. turned and turnedScale may be null.
struct Weight {
  const bf16* x;
  f8* y;
  float* scale;
  f8* turned;
  float* turnedScale;
  unsigned* most;
  int rows, d;
};

// WeightTile is kTileRows rows by kTileColumns columns of a matrix, counted in tiles.
struct WeightTile {
  unsigned weight;
  unsigned short row, column;
};

// Thread t has four rows from t / 8 · 4 on of kColumns columns, whose float8 of one column make a word.
constexpr int kThreads = 256, kColumns = 8, kGroups = 8;
constexpr int kTileColumns = kGroups * kColumns, kTileRows = kThreads / kGroups * 4;

struct Place {
  const Weight w;
  int group, quad, firstRow, firstColumn, row, c;

  __device__ __forceinline__ Place(const Weight* weights, const WeightTile* tiles)
      : w(weights[tiles[blockIdx.x].weight]), group(threadIdx.x % kGroups), quad(threadIdx.x / kGroups),
        firstRow(tiles[blockIdx.x].row * kTileRows), firstColumn(tiles[blockIdx.x].column * kTileColumns),
        row(firstRow + quad * 4), c(firstColumn + group * kColumns) {}

  // holds reports whether the thread's rows and columns are there: of all of them or of none.
  __device__ __forceinline__ bool holds() const { return row < w.rows && c < w.d; }

  __device__ __forceinline__ void read(Pack<bf16, kColumns> (&v)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i] = {};
      if (holds()) v[i] = load<kColumns>(w.x + int64_t(row + i) * w.d + c);
    }
  }
};

// Launch: a block of kThreads a tile.
extern "C" __global__ void __launch_bounds__(kThreads)
    quantize_weights_largest(const Weight* weights, const WeightTile* tiles) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ float ofWarps[kWarps][kTileColumns];
  const Place p(weights, tiles);
  Pack<bf16, kColumns> v[4];
  p.read(v);
  float columns[kColumns] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float row = 0;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      float x = fabsf(v[i].get(j));
      row = Largest::merge(row, x), columns[j] = Largest::merge(columns[j], x);
    }
#pragma unroll
    for (int lane = 1; lane < kGroups; lane *= 2) row = Largest::merge(row, __shfl_xor_sync(kAllLanes, row, lane));
    if (p.group == 0 && p.row < p.w.rows) atomicMax(p.w.most + p.row + i, __float_as_uint(row));
  }
  if (!p.w.turned) return;
#pragma unroll
  for (int j = 0; j < kColumns; j++) {
#pragma unroll
    for (int lane = kGroups; lane < kWarp; lane *= 2)
      columns[j] = Largest::merge(columns[j], __shfl_xor_sync(kAllLanes, columns[j], lane));
    if (threadIdx.x % kWarp < kGroups) ofWarps[threadIdx.x / kWarp][p.group * kColumns + j] = columns[j];
  }
  __syncthreads();
  const int column = p.firstColumn + threadIdx.x;
  if (threadIdx.x >= kTileColumns || column >= p.w.d) return;
  float all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w++) all = Largest::merge(all, ofWarps[w][threadIdx.x]);
  atomicMax(p.w.most + p.w.rows + column, __float_as_uint(all));
}

__device__ __forceinline__ uint32_t fourRounded(float a, float b, float c, float d) {
  uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// Launch: a block of kThreads a tile.
extern "C" __global__ void __launch_bounds__(kThreads) quantize_weights(const Weight* weights, const WeightTile* tiles) {
  constexpr int kWords = kTileRows / 4, kPitch = kWords + 4;  // writing, four rows' words of eight columns meet no bank twice
  __shared__ __align__(16) uint32_t tile[kTileColumns][kPitch];
  __shared__ float rowInverse[kTileRows], columnInverse[kTileColumns];
  const Place p(weights, tiles);
  Pack<bf16, kColumns> v[4];
  p.read(v);
  const int t = threadIdx.x, r = p.firstRow + t, column = p.firstColumn + t - kTileRows;
  if (t < kTileRows && r < p.w.rows) {
    Scale s(__uint_as_float(p.w.most[r]));
    rowInverse[t] = s.inverse;
    if (p.firstColumn == 0) p.w.scale[r] = s.scale;
  }
  if (p.w.turned && t >= kTileRows && t < kTileRows + kTileColumns && column < p.w.d) {
    Scale s(__uint_as_float(p.w.most[p.w.rows + column]));
    columnInverse[t - kTileRows] = s.inverse;
    if (p.firstRow == 0) p.w.turnedScale[column] = s.scale;
  }
  __syncthreads();

  if (p.holds()) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float s = rowInverse[p.quad * 4 + i];
      uint2 bytes = {fourRounded(v[i].get(0) * s, v[i].get(1) * s, v[i].get(2) * s, v[i].get(3) * s),
                     fourRounded(v[i].get(4) * s, v[i].get(5) * s, v[i].get(6) * s, v[i].get(7) * s)};
      *reinterpret_cast<uint2*>(p.w.y + int64_t(p.row + i) * p.w.d + p.c) = bytes;
    }
  }
  if (!p.w.turned) return;
  if (p.holds()) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      float s = columnInverse[p.group * kColumns + j];
      tile[j * kGroups + p.group][p.quad] = fourRounded(v[0].get(j) * s, v[1].get(j) * s, v[2].get(j) * s, v[3].get(j) * s);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = t; i < kTileColumns * kWords / 4; i += kThreads) {
    int j = i / (kWords / 4), at = i % (kWords / 4) * 16;  // of a column's bytes
    int to = p.firstColumn + j % kGroups * kColumns + j / kGroups, first = p.firstRow + at;
    if (to < p.w.d && first < p.w.rows)
      *reinterpret_cast<uint4*>(p.w.turned + int64_t(to) * p.w.rows + first) = *reinterpret_cast<const uint4*>(&tile[j][at / 4]);
  }
}
