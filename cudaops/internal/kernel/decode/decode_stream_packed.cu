// Matrix products of a single row of 16-bit numbers with frozen weights in float8 or NF4 (package internal/quant), for
// GPUs whose kernels overlap. Reading the weights is the bottleneck.
//
//   y[n] = Σ_k x[k]·w[n, k] + c[n]                       product
//   h[n] = gate(Σ_k x[k]·w[n, k]) · Σ_k x[k]·w[f+n, k]    gated
//
//   float8:  w[n, k] = E4M3(codes[n, k])·scales[n]
//   NF4:     w[n, k] = NF4(codes[n, k])·(table[nested[b]]·scales[b/256] + offset),  b = (n·depth + k)/64
//
// The normed kernels normalize x first:  x[k] ← x[k]·norm[k] / sqrt(Σ_j x[j]²/depth + eps).
//
// The rows of w come from up to kMostParts matrices. decode_stream.cuh explains how the kernels keep the memory busy. A
// piece has kRowBytes bytes of codes of each row of a tile and, with NF4, the scales of the blocks that they belong to. A
// lane takes 16 consecutive bytes of codes and the matching elements of x. Codes become 16-bit operands in registers:
//
// - NF4: a byte, which has two codes, is an index of a table with both numbers of each pair. The table lies in shared
//   memory, with a copy for every lane in the lane's own bank, so lookups never conflict. The scales are applied in
//   float32 to the sums of blocks of 64 elements. A row of a piece has four blocks, and each of them has columns of its
//   own in operand B: columns 2·i and 2·i + 1 hold the elements of x that block i multiplies, and zeros elsewhere. Lanes
//   of quarter i hold the results of these two columns, so each lane has the sums of one block, and scales only these.
//   Column 2·i has x, and after a norm, column 2·i + 1 has what rounding x to the storage type loses.
//
// - float8: the GPU converts codes to float16, so x is float16, too. To keep the range of bfloat16, column 0 has
//   high = x·2⁻¹² and column 1 has low = (x − high·2¹²)·2¹², both rounded, so that x ≈ high·2¹² + low·2⁻¹².
//
//   Without a norm, this is exact, except for an error of at most 2⁻³⁷ in tiny elements. After a norm, the error of an
//   element is at most 2⁻²³ times its magnitude, or at most 2⁻²⁵ if the magnitude is below 1/4. High overflows for
//   elements of about 2²⁸ and above. After a norm, low can overflow from 2¹⁵ on. The results are then infinite or NaN.
#include <type_traits>
#include "decode_packed.cuh"
#include "decode_stream.cuh"
#include "gate.cuh"
#include "overlap.cuh"

constexpr int kRowBytes = 128;
constexpr int kFloat8Stages = 4, kNF4Stages = 3;  // one less without a norm
constexpr int kBatch = 4;  // tiles whose sums are added up over the warps at the same time
constexpr int kBlock = 64, kPairs = 256;

struct Args {
  void* y;
  const void *x, *c;  // c may be null or y
  const float *norm, *table;
  Part parts[kMostParts];
  int n, depth;  // n columns of y
  float eps;
  int steady, early, isGELU;  // see Overlap in product.go
};

// Row is row `of` of the result, as a row of a part of w. In a gated product, parts 0 and 1 both have this row, and
// `second` chooses between them; otherwise the parts are stacked.
template <bool Gated> struct Row {
  int part;
  int64_t row;  // of the part
  __device__ __forceinline__ Row(const Args& a, int of, bool second) : part(0), row(of) {
    if (Gated) {
      part = second;
    } else if (row >= a.parts[0].rows) {
      row -= a.parts[0].rows, part = 1;
      if (row >= a.parts[1].rows) row -= a.parts[1].rows, part = 2;
    }
  }
  // pick returns a field of the part. Indexing the kernel's arguments would copy them to local memory.
  template <class F> __device__ __forceinline__ F pick(const Args& a, F Part::*field) const {
    return part == 0 ? a.parts[0].*field : part == 1 ? a.parts[1].*field : a.parts[2].*field;
  }
};

// loadWordsIf loads four words if they are wanted, and leaves them unchanged otherwise. It uses a predicate, because the
// compiler may move products into the branches of an `if` around the load, where some lanes would be missing (mma.cuh).
__device__ __forceinline__ void loadWordsIf(uint32_t (&v)[4], uint32_t address, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %5, 0;\n"
      "@wanted ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])
      : "r"(address), "r"(uint32_t(wanted)));
}

// convertFloat8 returns the lower or upper two codes of a word in float16. All GPUs that run this kernel have the
// instruction; the code for older ones only has to compile.
__device__ __forceinline__ uint32_t convertFloat8(uint32_t codes, bool upper) {
  uint32_t two = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(uint16_t(upper ? codes >> 16 : codes)));
#endif
  return two;
}

// splitScaled divides a number between the two columns of x for float8, as described above.
__device__ __forceinline__ void splitScaled(float v, f16& high, f16& low) {
  high = fromFloat<f16>(v * 0x1p-12f);
  low = fromFloat<f16>((v - toFloat(high) * 0x1p12f) * 0x1p12f);
}

template <class T, bool NF4, bool Gated, bool Normed> __device__ __forceinline__ void streamPacked(const Args& a) {
  extern __shared__ __align__(128) char memory[];  // with NF4, this starts with the table of pairs [kPairs][kWarp]
  using Operand = std::conditional_t<NF4, T, f16>;
  constexpr int kStages = (NF4 ? kNF4Stages : kFloat8Stages) - (Normed ? 0 : 1), perTile = kPerTile<Gated>;
  constexpr int columns = kRowBytes * (NF4 ? 2 : 1), blocks = columns / kBlock;  // of a piece
  constexpr int scalesAt = kRows * kRowBytes, stageBytes = scalesAt + (NF4 ? 2 * 4 * kRows : 0);
  char* const stages = memory + (NF4 ? kPairs * kWarp * 4 : 0);
  float* const sums = reinterpret_cast<float*>(stages + kStreamWarps * kStages * stageBytes);
  float* const squares = sums + kBatch * kStreamWarps * kRows;
  float* const signed8 = squares + kWarp;  // with NF4: the values of the codes of scales [kNested]
  char* const xs = reinterpret_cast<char*>(signed8 + (NF4 ? kNested : 0));
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, group = lane / 4, quarter = lane % 4;
  const int from = int64_t(a.n) * blockIdx.x / gridDim.x, to = int64_t(a.n) * (blockIdx.x + 1) / gridDim.x;
  const int tiles = (to - from + perTile - 1) / perTile;
  const int pieces = max(0, (a.depth / columns - warp + kStreamWarps - 1) / kStreamWarps);  // of this warp, in a row
  const T *x = static_cast<const T*>(a.x), *c = static_cast<const T*>(a.c);

  // select finds what this lane copies of a tile: one chunk of every fourth row and, with NF4, also four bytes for the
  // scales of row lane%kRows. These are the codes of the scales of its four blocks in the first kRows lanes, and the
  // scale of these codes in the others.
  const uint32_t ring = tile::sharedAddress(stages) + warp * kStages * stageBytes;
  const int chunk = lane % 8, row0 = lane / 8;
  const uint8_t *codes[kRows / 4], *nested = nullptr;
  const float* scales = nullptr;
  int firstBlock = 0;  // index of the row's first block in its part
  bool valid[kRows / 4], validScale = false;
  const auto select = [&](int tile) {
#pragma unroll
    for (int i = 0; i < kRows / 4; i++) {
      const int r = i * 4 + row0, of = from + tile * perTile + r % perTile;
      valid[i] = of < to;
      const Row<Gated> row(a, valid[i] ? of : 0, r >= perTile);
      codes[i] = row.pick(a, &Part::codes) + row.row * (NF4 ? a.depth / 2 : a.depth) + chunk * 16;
    }
    if constexpr (NF4) {
      const int r = lane % kRows, of = from + tile * perTile + r % perTile;
      validScale = of < to;
      const Row<Gated> row(a, validScale ? of : 0, r >= perTile);
      nested = row.pick(a, &Part::nested), scales = row.pick(a, &Part::scales);
      firstBlock = row.row * (a.depth / kBlock);
    }
  };

  // copy starts copying the warp's next piece to the ring. It ends a group of copies even if no piece is left, so that
  // copyWait can count on one group per call.
  int nextTile = 0, nextPiece = 0, nextSlot = 0;
  const auto copy = [&] {
    if (nextTile < tiles && pieces > 0) {
      if (nextPiece == 0) select(nextTile);
      const int piece = nextPiece * kStreamWarps + warp;
      const uint32_t stage = ring + nextSlot * stageBytes;
#pragma unroll
      for (int i = 0; i < kRows / 4; i++) {
        const int row = i * 4 + row0;
        tile::copyAsync<16>(stage + row * kRowBytes + ((chunk ^ (row % 2 * 4)) << 4), codes[i] + piece * kRowBytes, valid[i]);
      }
      if constexpr (NF4) {
        const int block = firstBlock + piece * blocks;
        const void* of = lane < kRows ? static_cast<const void*>(nested + block) : scales + block / kNested;
        tile::copyAsync<4>(stage + scalesAt + lane * 4, of, validScale);
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
  if constexpr (NF4) {  // fill the tables while the first copies are in flight
    uint32_t* pairs = reinterpret_cast<uint32_t*>(memory);
#pragma unroll 4
    for (int pair = warp; pair < kPairs; pair += kStreamWarps) pairs[pair * kWarp + lane] = tile::pack(nf4[pair >> 4], nf4[pair & 15], T());
    for (int i = threadIdx.x; i < kNested; i += kThreads) signed8[i] = a.table[i];
  }
  awaitPrevious();
  if (!a.early) releaseNext();

  // prepare loads the element of c and, with float8, the scales of the rows of w, for the result that this thread
  // completes in the batch that starts with a tile.
  T added = fromFloat<T>(0);
  float rowScale = 1, upScale = 1;
  const auto prepare = [&](int firstTile) {
    const int r = from + firstTile * perTile + threadIdx.x;
    if (threadIdx.x >= kBatch * perTile || r >= to) return;
    if (c) added = c[r];
    if constexpr (!NF4) {
      const Row<Gated> row(a, r, false);
      rowScale = row.pick(a, &Part::scales)[row.row];
      if constexpr (Gated) upScale = a.parts[1].scales[r];
    }
  };
  prepare(0);

  // Store x in shared memory. A product that needs no second column has none.
  const int lowAt = a.depth * 2 + 16;  // where the second column is, in other banks than the first
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
        Pack<Operand, 8> high, low;
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const float y = v[i].get(e) * scale * factors[i].v[e];
          if constexpr (NF4)
            splitRounded(y, high.v[e], low.v[e]);
          else
            splitScaled(y, high.v[e], low.v[e]);
        }
        store(reinterpret_cast<Operand*>(xs + at * 2), high);
        store(reinterpret_cast<Operand*>(xs + lowAt + at * 2), low);
      }
  } else {
    for (int at0 = threadIdx.x * 8; at0 < a.depth; at0 += kCopied * kThreads * 8) {
      Pack<T, 8> v[kCopied];
#pragma unroll
      for (int i = 0; i < kCopied; i++)
        if (const int at = at0 + i * kThreads * 8; at < a.depth) v[i] = load<8>(x + at);
#pragma unroll
      for (int i = 0; i < kCopied; i++)
        if (const int at = at0 + i * kThreads * 8; at < a.depth) {
          if constexpr (NF4) {
            store(reinterpret_cast<T*>(xs + at * 2), v[i]);
          } else {
            Pack<f16, 8> high, low;
#pragma unroll
            for (int e = 0; e < 8; e++) splitScaled(v[i].get(e), high.v[e], low.v[e]);
            store(reinterpret_cast<f16*>(xs + at * 2), high);
            store(reinterpret_cast<f16*>(xs + lowAt + at * 2), low);
          }
        }
    }
    if (!a.steady) {
      tile::copyCommit();
      for (int i = 0; i < kStages; i++) copy();
    }
  }
  __syncthreads();

  constexpr int laneBytes = NF4 ? 64 : 32;  // of the elements of x that match 16 bytes of codes
  const uint32_t xAt = tile::sharedAddress(xs) + group % 2 * lowAt + warp * columns * 2 + quarter * laneBytes;
  const uint32_t wAt = ring + group * kRowBytes + ((quarter ^ (group % 2 * 4)) << 4);
  T* y = static_cast<T*>(a.y);

  // The lane's part of operand B. It starts as zeros, and remains zero if the lane's column has no elements of x. With NF4,
  // a column has elements in only one half of a piece, so each half has its own part.
  uint32_t b[2][2][4] = {};
  int slot = 0;
  for (int t = 0; t < tiles; t++) {
    // acc has the products, total the sums of rows `group` and `group` + 8 of the tile, and offset (NF4) what is added to
    // the scales of these rows.
    float acc[2][4] = {}, total[2] = {}, offset[2] = {};
    if constexpr (NF4) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int of = from + t * perTile + group + (Gated ? 0 : i * 8);
        offset[i] = Row<Gated>(a, of < to ? of : 0, i == 1).pick(a, &Part::offset);
      }
    }
    for (int p = 0; p < pieces; p++) {
      tile::copyWait<kStages - 1>();
      __syncwarp();
      const int stage = slot * stageBytes;
      if constexpr (NF4) {  // sums of different pieces have different scales
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int e = 0; e < 4; e++) acc[i][e] = 0;
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t xPiece = xAt + p * (kStreamWarps * columns * 2) + h * (4 * laneBytes);
        // Whether this lane's column, which is `group`, has the elements of x that match the lane's codes. With NF4, these
        // codes belong to block h·2 + quarter/2.
        const bool wanted = (!NF4 || Normed || group % 2 == 0) && group / 2 == (NF4 ? h * 2 + quarter / 2 : 0);
        uint32_t upper[4], lower[4];
        tile::loadWords(upper, (wAt + stage) ^ (h * 64));
        tile::loadWords(lower, ((wAt + stage) ^ (h * 64)) + 8 * kRowBytes);
        if constexpr (NF4) {
#pragma unroll
          for (int s = 0; s < 4; s++) {
            uint32_t operand[2][4], (&of)[4] = b[h][s % 2];
            loadWordsIf(of, xPiece + s * 16, wanted);
#pragma unroll
            for (int i = 0; i < 8; i++) {
              // The address in the table: byte i/2 of the word times 128, the size of an entry, plus the lane's copy.
              const int shift = i / 2 * 8 - 7;
              const uint32_t word = i % 2 ? lower[s] : upper[s];
              const uint32_t at = ((shift < 0 ? word << -shift : word >> shift) & 0x7f80u) | lane * 4u;
              operand[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(memory + at);
            }
            tile::multiply(acc[0], operand[0], of[0], of[1], T());
            tile::multiply(acc[1], operand[1], of[2], of[3], T());
          }
        } else {
          loadWordsIf(b[0][0], xPiece, wanted);
          loadWordsIf(b[0][1], xPiece + 16, wanted);
#pragma unroll
          for (int s = 0; s < 4; s++) {
            uint32_t operand[4];
#pragma unroll
            for (int i = 0; i < 4; i++) operand[i] = convertFloat8(i % 2 ? lower[s] : upper[s], i / 2);
            tile::multiply(acc[s % 2], operand, b[0][s / 2][s % 2 * 2], b[0][s / 2][s % 2 * 2 + 1], f16());
          }
        }
      }
      if constexpr (NF4) {  // add the sums of block `quarter` of both rows, times their scales
        const char* at = stages + warp * kStages * stageBytes + stage + scalesAt + group * 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint32_t code = *reinterpret_cast<const uint8_t*>(at + i * 32 + quarter);
          const float scale = fmaf(signed8[code], *reinterpret_cast<const float*>(at + i * 32 + 4 * kRows), offset[i]);
          total[i] = fmaf((acc[0][2 * i] + acc[1][2 * i]) + (acc[0][2 * i + 1] + acc[1][2 * i + 1]), scale, total[i]);
        }
      }
      if (++slot == kStages) slot = 0;
      __syncwarp();  // all lanes have read the slot
      copy();
    }

    // Store the warp's sums, and complete the results after the last tile of a batch. With NF4, the four quarters have the
    // sums of different blocks. With float8, lanes of quarter 0 hold the results of both columns.
    const int of = t % kBatch;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (NF4) {
        total[i] += __shfl_xor_sync(kAllLanes, total[i], 1);
        total[i] += __shfl_xor_sync(kAllLanes, total[i], 2);
      } else {
        total[i] = (acc[0][2 * i] + acc[1][2 * i]) * 0x1p12f + (acc[0][2 * i + 1] + acc[1][2 * i + 1]) * 0x1p-12f;
      }
      if (quarter == 0) sums[(of * kStreamWarps + warp) * kRows + group + i * 8] = total[i];
    }
    if (of != kBatch - 1 && t != tiles - 1) continue;

    __syncthreads();
    const int r = from + (t - of) * perTile + threadIdx.x;
    if (threadIdx.x < kBatch * perTile && r < to) {
      float v, up;
      addWarps<Gated>(sums, v, up);
      v *= rowScale, up *= upScale;
      if constexpr (Gated)
        v = a.isGELU ? gateMul<T, true>(v, up) : gateMul<T, false>(v, up);
      else
        v += toFloat(added);
      y[r] = fromFloat<T>(v);
    }
    if (t != tiles - 1) {
      prepare(t + 1);
      __syncthreads();
    }
  }
}

#define DEFINE_KERNEL(T, name, ...)                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                      \
      decode_stream_packed_##name##_##T(const __grid_constant__ Args a) {                        \
    streamPacked<T, __VA_ARGS__>(a);                                                             \
  }
#define DEFINE_FORMAT(T, format, NF4)                                                            \
  DEFINE_KERNEL(T, format, NF4, false, false) DEFINE_KERNEL(T, format##_normed, NF4, false, true) \
  DEFINE_KERNEL(T, format##_gated, NF4, true, false) DEFINE_KERNEL(T, format##_gated_normed, NF4, true, true)
#define DEFINE(T) DEFINE_FORMAT(T, float8, false) DEFINE_FORMAT(T, nf4, true)
DEFINE(bf16)
DEFINE(f16)
