// Rounds all weights of a model to float8 after an update, twice: once with a scale for each row, and once transposed, with
// a scale for each column. float8.cuh defines the scales.
//
// Separate launches for rows and columns would each read every weight. Here a single launch handles
// all weights, in strips of two kinds:
//
//   searching:  finds the largest magnitude in each row and column of the strip, and merges it in memory
//   rounding:   writes y [rows, d], scale [rows], turned [d, rows] (the transpose), turnedScale [d]
//
// The rounding strips of a matrix follow its searching strips, in reverse order, so that they find the weights in the
// cache. They wait for the searching strips, all of which have already started because blocks start in the order of their
// numbers.
//
// Magnitudes are merged by atomicMax of their bits as integers, which orders them like numbers, with NaN above all. The
// result does not depend on the order of merging.
#include "float8.cuh"

// Weight describes a matrix, with rows and d multiples of 16. turned and turnedScale may be null. A table for all weights
// contains, from index `most` on, the largest magnitudes of the matrix [rows + d] and then the number of strips that have
// been merged into them. All of these must initially be 0.
struct Weight {
  const bf16* x;
  f8* y;
  float* scale;
  f8* turned;
  float* turnedScale;
  int64_t most;
  int rows, d;
};

// WeightStrip is a strip of kRows rows by kTiles tiles of kTileColumns columns. row and column
// count strips.
struct WeightStrip {
  unsigned weight : 31, rounds : 1;
  unsigned short row, column;
};

// In each tile, thread t has kColumns columns of four rows, starting with row t / 8 · 4. The four float8 numbers of a
// column form a 32-bit word.
constexpr int kThreads = 256, kColumns = 8, kGroups = 8, kTiles = 4;
constexpr int kTileColumns = kGroups * kColumns, kStripColumns = kTiles * kTileColumns, kRows = kThreads / kGroups * 4;
static_assert(kStripColumns == kThreads, "a thread for each column");

// Place is a thread's place in a strip.
struct Place {
  const Weight w;
  unsigned* const most;
  int group, quad, firstRow, firstColumn, row;

  __device__ __forceinline__ Place(const Weight* weights, const WeightStrip& strip, unsigned* largest)
      : w(weights[strip.weight]), most(largest + w.most), group(threadIdx.x % kGroups), quad(threadIdx.x / kGroups),
        firstRow(strip.row * kRows), firstColumn(strip.column * kStripColumns), row(firstRow + quad * 4) {}

  __device__ __forceinline__ int column(int tile) const { return firstColumn + tile * kTileColumns + group * kColumns; }
  // holds reports whether the thread's rows and columns of a tile exist. Either they all do or none
  // does.
  __device__ __forceinline__ bool holds(int tile) const { return row < w.rows && column(tile) < w.d; }

  // Packs is a thread's part of a tile.
  struct Packs {
    Pack<bf16, kColumns> of[4];
  };
  __device__ __forceinline__ Packs read(int tile) const {
    Packs v = {};
    if (tile < kTiles && holds(tile)) {
#pragma unroll
      for (int i = 0; i < 4; i++) v.of[i] = load<kColumns>(w.x + int64_t(row + i) * w.d + column(tile));
    }
    return v;
  }

  // A searching strip calls tellMerged after merging its largest magnitudes. A rounding strip calls
  // awaitMerged to wait for all of these.
  __device__ __forceinline__ unsigned* merged() const { return most + w.rows + w.d; }
  __device__ __forceinline__ void tellMerged() const {
    __syncthreads();
    if (threadIdx.x > 0) return;
    __threadfence();
    atomicAdd(merged(), 1);
  }
  __device__ __forceinline__ void awaitMerged() const {
    const unsigned strips = (w.rows + kRows - 1) / kRows * ((w.d + kStripColumns - 1) / kStripColumns);
    unsigned done;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(merged()) : "memory");
    while (done < strips);
  }
};

// Two holds a pair of magnitudes.
using Two = Pairs<bf16>;
__device__ __forceinline__ unsigned bitsOf(Two::Word w) { return reinterpret_cast<unsigned&>(w); }
// Returns the bits of one of the two numbers as float32.
__device__ __forceinline__ unsigned oneOf(Two::Word w, int i) { return i ? bitsOf(w) & 0xffff0000u : bitsOf(w) << 16; }
// Merges w with the pair of the lane whose number differs in bit `apart`.
__device__ __forceinline__ void mergeLanes(Two::Word& w, int apart) {
  unsigned other = __shfl_xor_sync(kAllLanes, bitsOf(w), apart);
  w = Two::merge(w, reinterpret_cast<Two::Word&>(other));
}

// mergeLargest is the work of a searching strip.
__device__ __forceinline__ void mergeLargest(const Place& p) {
  constexpr int kWarps = kThreads / kWarp, kPairs = kColumns / 2;
  __shared__ Two::Word ofWarps[kWarps][kStripColumns / 2];
  Two::Word rows[4] = {};
  Place::Packs v = p.read(0);
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) {
    const Place::Packs next = p.read(tile + 1);
    Two::Word columns[kPairs];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < kPairs; j++) {
        const Two::Word x = Two::magnitudes(pair(v.of[i], j));
        rows[i] = Two::merge(rows[i], x);
        columns[j] = i ? Two::merge(columns[j], x) : x;
      }
    if (p.w.turned) {
#pragma unroll
      for (int j = 0; j < kPairs; j++) {
#pragma unroll
        for (int lane = kGroups; lane < kWarp; lane *= 2) mergeLanes(columns[j], lane);
        if (threadIdx.x % kWarp < kGroups)
          ofWarps[threadIdx.x / kWarp][tile * kTileColumns / 2 + p.group * kPairs + j] = columns[j];
      }
    }
    v = next;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // two rows per word
    rows[i] = Two::merge(__lows2bfloat162(rows[i], rows[i + 1]), __highs2bfloat162(rows[i], rows[i + 1]));
#pragma unroll
    for (int lane = 1; lane < kGroups; lane *= 2) mergeLanes(rows[i], lane);
  }
  if (p.group < 4 && p.row < p.w.rows) atomicMax(p.most + p.row + p.group, oneOf(p.group < 2 ? rows[0] : rows[2], p.group % 2));
  __syncthreads();
  const int column = p.firstColumn + threadIdx.x;
  if (p.w.turned && column < p.w.d) {
    Two::Word all = ofWarps[0][threadIdx.x / 2];
#pragma unroll
    for (int w = 1; w < kWarps; w++) all = Two::merge(all, ofWarps[w][threadIdx.x / 2]);
    atomicMax(p.most + p.w.rows + column, oneOf(all, threadIdx.x % 2));
  }
  p.tellMerged();
}

// round is the work of a rounding strip.
__device__ __forceinline__ void round(const Place& p) {
  constexpr int kWords = kRows / 4, kPitch = kWords + 4;  // kPitch avoids bank conflicts of writes
  __shared__ __align__(16) uint32_t turned[2][kTileColumns][kPitch];
  __shared__ float rowInverse[kRows], columnInverse[kStripColumns];
  const int t = threadIdx.x, r = p.firstRow + t, column = p.firstColumn + t;
  Place::Packs v = p.read(0);
  p.awaitMerged();
  if (t < kRows && r < p.w.rows) {
    Scale s(__uint_as_float(__ldcg(p.most + r)));
    rowInverse[t] = s.inverse;
    if (p.firstColumn == 0) p.w.scale[r] = s.scale;
  }
  if (p.w.turned && column < p.w.d) {
    Scale s(__uint_as_float(__ldcg(p.most + p.w.rows + column)));
    columnInverse[t] = s.inverse;
    if (p.firstRow == 0) p.w.turnedScale[column] = s.scale;
  }
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) {
    const Place::Packs next = p.read(tile + 1);
    float2 x[4];
    if (p.holds(tile)) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float s = rowInverse[p.quad * 4 + i];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = Two::floats(pair(v.of[i], j));
        uint2 bytes = {fourE4M3(x[0].x * s, x[0].y * s, x[1].x * s, x[1].y * s), fourE4M3(x[2].x * s, x[2].y * s, x[3].x * s, x[3].y * s)};
        *reinterpret_cast<uint2*>(p.w.y + int64_t(p.row + i) * p.w.d + p.column(tile)) = bytes;
      }
    }
    if (p.w.turned) {
      if (p.holds(tile)) {
        const float* s = columnInverse + tile * kTileColumns + p.group * kColumns;
#pragma unroll
        for (int j = 0; j < kColumns; j += 2) {
#pragma unroll
          for (int i = 0; i < 4; i++) x[i] = Two::floats(pair(v.of[i], j / 2));
          turned[tile % 2][j * kGroups + p.group][p.quad] = fourE4M3(x[0].x * s[j], x[1].x * s[j], x[2].x * s[j], x[3].x * s[j]);
          turned[tile % 2][(j + 1) * kGroups + p.group][p.quad] =
              fourE4M3(x[0].y * s[j + 1], x[1].y * s[j + 1], x[2].y * s[j + 1], x[3].y * s[j + 1]);
        }
      }
      __syncthreads();  // also separates this tile's reads from the writes of the tile after the next one
#pragma unroll
      for (int i = t; i < kTileColumns * kWords / 4; i += kThreads) {
        int j = i / (kWords / 4), at = i % (kWords / 4) * 16;  // in bytes of a column
        int to = p.firstColumn + tile * kTileColumns + j % kGroups * kColumns + j / kGroups, first = p.firstRow + at;
        if (to < p.w.d && first < p.w.rows)
          *reinterpret_cast<uint4*>(p.w.turned + int64_t(to) * p.w.rows + first) =
              *reinterpret_cast<const uint4*>(&turned[tile % 2][j][at / 4]);
      }
    }
    v = next;
  }
}

// Launch: one block of kThreads per strip.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    quantize_weights(const Weight* weights, const WeightStrip* strips, unsigned* largest) {
  const WeightStrip strip = strips[blockIdx.x];
  const Place p(weights, strip, largest);
  if (strip.rounds)
    round(p);
  else
    mergeLargest(p);
}
