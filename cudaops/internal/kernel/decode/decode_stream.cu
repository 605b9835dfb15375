// Matrix products with a single row of 16-bit numbers, for GPUs whose kernels overlap. decode_stream.cuh explains how
// they keep the memory busy.
//
//   y[n] = Σ_k x[k]·w[n, k] + c[n]                       product
//   h[n] = gate(Σ_k x[k]·w[n, k]) · Σ_k x[k]·w[f+n, k]    gated
//
// The normed kernels normalize x first:  x[k] ← x[k]·norm[k] / sqrt(Σ_j x[j]²/depth + eps).
//
// A piece has kColumns columns. Operand B has x in column 0. After a norm, column 1 has the difference between the
// normalized x and its rounded value in column 0, so that x has about twice as many bits as the storage type.
#include "decode_product.cuh"
#include "decode_stream.cuh"
#include "gate.cuh"
#include "overlap.cuh"

constexpr int kColumns = 64, kStages = 5;
constexpr int kBatch = 8;  // tiles whose sums are added up over the warps at the same time

template <class T, bool Gated, bool Normed> __device__ __forceinline__ void stream(const Product& a) {
  extern __shared__ __align__(128) char memory[];
  constexpr int stageBytes = kRows * kColumns * 2, perTile = kPerTile<Gated>;
  float* sums = reinterpret_cast<float*>(memory + kStreamWarps * kStages * stageBytes);
  float* squares = sums + kBatch * kStreamWarps * kRows;
  char* xs = reinterpret_cast<char*>(squares + kWarp);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, group = lane / 4, quarter = lane % 4;
  const int from = int64_t(a.n) * blockIdx.x / gridDim.x, to = int64_t(a.n) * (blockIdx.x + 1) / gridDim.x;
  const int tiles = (to - from + perTile - 1) / perTile;
  const int pieces = max(0, (a.depth / kColumns - warp + kStreamWarps - 1) / kStreamWarps);  // of this warp, in a row
  const T *x = static_cast<const T*>(a.x), *w = static_cast<const T*>(a.w), *c = static_cast<const T*>(a.c);

  // copy starts copying the warp's next piece to the ring: each lane copies one chunk of every fourth row. It ends a group
  // of copies even if no piece is left, so that copyWait can count on one group per call.
  const uint32_t ring = tile::sharedAddress(memory) + warp * kStages * stageBytes;
  const int chunk = lane % 8, row0 = lane / 8;
  int nextTile = 0, nextPiece = 0, nextSlot = 0;
  const auto copy = [&] {
    if (nextTile < tiles && pieces > 0) {
      const int column = (nextPiece * kStreamWarps + warp) * kColumns + chunk * 8;
#pragma unroll
      for (int i = 0; i < kRows / 4; i++) {
        const int row = i * 4 + row0, of = from + nextTile * perTile + row % perTile;
        const bool valid = of < to;
        tile::copyAsync<16>(ring + nextSlot * stageBytes + row * (kColumns * 2) + ((chunk ^ (row % 2 * 4)) << 4),
                            w + (valid ? (of + (row < perTile ? 0 : int64_t(a.n))) * a.depth + column : 0), valid);
      }
      if (++nextPiece == pieces) nextPiece = 0, nextTile++;
      if (++nextSlot == kStages) nextSlot = 0;
    }
    tile::copyCommit();
  };

  // copyNorm starts copying the norm's factors to where x will be. Each thread copies the ones that it will use.
  const auto copyNorm = [&] {
    if constexpr (Normed)
#pragma unroll
      for (int i = 0; i < kPacks; i++)
        if (const int at = (i * kThreads + threadIdx.x) * 8; at < a.depth) {
          copyAsync(xs + at * 4, a.norm + at, true);
          copyAsync(xs + at * 4 + 16, a.norm + at + 4, true);
        }
    tile::copyCommit();
  };

  if (a.steady) {
    copyNorm();
    for (int i = 0; i < kStages; i++) copy();
  }
  if (a.early) releaseNext();
  awaitPrevious();
  if (!a.early) releaseNext();

  // residual returns the element of c for the result that this thread completes in the batch that starts with a tile.
  const auto residual = [&](int firstTile) {
    const int r = from + firstTile * perTile + threadIdx.x;
    return c && threadIdx.x < kBatch * perTile && r < to ? c[r] : fromFloat<T>(0);
  };
  T added = residual(0);

  // Store x in shared memory.
  const int lowAt = a.depth * 2 + 64;  // where column 1 is, in other banks than column 0
  if constexpr (Normed) {
    Pack<T, 8> v[kPacks];
    loadRow(v, x, a.depth);
    if (!a.steady) {
      copyNorm();
      for (int i = 0; i < kStages; i++) copy();
    }
    storeSquares(squares, v, a.depth);
    tile::copyWait<kStages>();  // the thread's factors have arrived
    Pack<float, 8> factors[kPacks];
    loadRow(factors, reinterpret_cast<const float*>(xs), a.depth);
    __syncthreads();  // all threads have loaded their factors, which x overwrites, and stored squares
    const float scale = normScale(squares, a.depth, a.eps);
#pragma unroll
    for (int i = 0; i < kPacks; i++)
      if (const int at = (i * kThreads + threadIdx.x) * 8; at < a.depth) {
        Pack<T, 8> high, low;
#pragma unroll
        for (int e = 0; e < 8; e++) splitRounded(v[i].get(e) * scale * factors[i].v[e], high.v[e], low.v[e]);
        store(reinterpret_cast<T*>(xs) + at, high);
        store(reinterpret_cast<T*>(xs + lowAt) + at, low);
      }
  } else {
    for (int at0 = threadIdx.x * 8; at0 < a.depth; at0 += kCopied * kThreads * 8) {
      Pack<T, 8> v[kCopied];
#pragma unroll
      for (int i = 0; i < kCopied; i++)
        if (const int at = at0 + i * kThreads * 8; at < a.depth) v[i] = load<8>(x + at);
#pragma unroll
      for (int i = 0; i < kCopied; i++)
        if (const int at = at0 + i * kThreads * 8; at < a.depth) store(reinterpret_cast<T*>(xs) + at, v[i]);
    }
    if (!a.steady) {
      tile::copyCommit();
      for (int i = 0; i < kStages; i++) copy();
    }
  }
  __syncthreads();

  // Each iteration multiplies one piece, in halves of 32 columns: quarter q has 8 columns from 8·q on, and from 32 + 8·q
  // on. Lanes of columns of B that are zero load nothing.
  const bool has = group < (Normed ? 2 : 1);
  const uint32_t xAt = tile::sharedAddress(xs) + group * lowAt + warp * kColumns * 2 + quarter * 16;
  const uint32_t wAt = ring + group * (kColumns * 2) + ((quarter ^ (group % 2 * 4)) << 4);
  T* y = static_cast<T*>(a.y);
  int slot = 0;
  for (int t = 0; t < tiles; t++) {
    float acc[2][4] = {};
    for (int p = 0; p < pieces; p++) {
      tile::copyWait<kStages - 1>();
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint32_t b[4] = {}, upper[4], lower[4];
        if (has) tile::loadWords(b, xAt + p * (kStreamWarps * kColumns * 2) + h * 64);
        tile::loadWords(upper, (wAt + slot * stageBytes) ^ (h * 64));
        tile::loadWords(lower, ((wAt + slot * stageBytes) ^ (h * 64)) + 8 * kColumns * 2);
        tile::multiply(acc[0], {upper[0], lower[0], upper[1], lower[1]}, b[0], b[1], T());
        tile::multiply(acc[1], {upper[2], lower[2], upper[3], lower[3]}, b[2], b[3], T());
      }
      if (++slot == kStages) slot = 0;
      __syncwarp();  // all lanes have read the slot
      copy();
    }

    // Store the sums of columns 0 and 1, which lanes of quarter 0 hold, and complete the results after the last tile of a
    // batch.
    const int of = t % kBatch;
    if (quarter == 0) {
      float* to = sums + (of * kStreamWarps + warp) * kRows + group;
      to[0] = acc[0][0] + acc[0][1] + acc[1][0] + acc[1][1];
      to[8] = acc[0][2] + acc[0][3] + acc[1][2] + acc[1][3];
    }
    if (of != kBatch - 1 && t != tiles - 1) continue;

    __syncthreads();
    const int r = from + (t - of) * perTile + threadIdx.x;
    if (threadIdx.x < kBatch * perTile && r < to) {
      float v, up;
      addWarps<Gated>(sums, v, up);
      if constexpr (Gated)
        v = a.isGELU ? gateMul<T, true>(v, up) : gateMul<T, false>(v, up);
      else
        v += toFloat(added);
      y[r] = fromFloat<T>(v);
    }
    if (t != tiles - 1) {
      added = residual(t + 1);
      __syncthreads();
    }
  }
}

#define DEFINE_KERNEL(T, name, ...) \
  extern "C" __global__ void __launch_bounds__(kThreads, 4) decode_stream##name##_##T(Product a) { stream<T, __VA_ARGS__>(a); }
#define DEFINE(T)                                                                     \
  DEFINE_KERNEL(T, , false, false) DEFINE_KERNEL(T, _normed, false, true)             \
  DEFINE_KERNEL(T, _gated, true, false) DEFINE_KERNEL(T, _gated_normed, true, true)
DEFINE(bf16)
DEFINE(f16)
