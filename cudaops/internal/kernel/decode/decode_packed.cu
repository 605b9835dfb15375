// Matrix products of 1 to 64 rows with frozen weights in float8 or NF4 (package internal/quant). Reading the weights is
// the bottleneck.
//
//   y[r, n] = Σ_k x[r, k]·w[n, k] + c[r, n]                          product
//   h[r, n] = gate(Σ_k x[r, k]·w[n, k]) · Σ_k x[r, k]·w[f + n, k]    gated
//
//   float8:  w[n, k] = E4M3(codes[n, k])·scales[n]
//   NF4:     w[n, k] = NF4(codes[n, k])·(table[nested[b]]·scales[b/256] + offset),  b = (n·depth + k)/64
//
// The rows of w come from up to kMostParts matrices. A block multiplies 16 rows of w, as rows of the tensor cores'
// tiles, by all rows of x, as their columns. A gated block has 8 rows of each half. The warps of a block divide the
// depth into chunks of kChunk, and add up their sums at the end, in order.
//
// A product does not depend on the order of k, so a lane has consecutive elements of a chunk of w and x: it loads
// them at once, and no lane needs an element of another lane.
//
// Codes become the two halves of a word of an operand. A float8 code has the bits of a small number of the storage
// type, up to a power of two, which a multiplication removes without rounding. A pair of NF4 codes is an index of a
// table in shared memory with a copy for every lane, so that lanes never access the same bank. The sums of a chunk,
// which is an NF4 block, are multiplied by the block's scale in float32.
#include "common.cuh"
#include "decode_packed.cuh"
#include "gate.cuh"
#include "mma.cuh"
#include "overlap.cuh"

constexpr int kPackedWarps = 8, kChunk = 64, kFlight = 8;
struct Args {
  void* y;
  const void *x, *c;  // c may be null or y
  const float* table;
  Part parts[kMostParts];
  int rows, n, depth;  // n columns of y
  int steady, early, isGELU;  // see Overlap in product.go
};

// Row locates a row of w, given its number in a part and the parts that follow.
struct Row {
  const Part* part;  // null for a row past the end
  int64_t row;       // of the part
  __device__ __forceinline__ Row(const Args& a, int part, int64_t row) : part(nullptr), row(row) {
    for (int i = part; i < kMostParts; i++) {
      if (this->row < a.parts[i].rows) {
        this->part = a.parts + i;
        break;
      }
      this->row -= a.parts[i].rows;
    }
  }
};

// widenFloat8 returns codes 0 and 2, or 1 and 3, of a word as numbers of the storage type.
__device__ __forceinline__ uint32_t widenFloat8(uint32_t codes, bool odd, bf16) {
  const uint32_t bits = ((odd ? codes >> 4 : codes << 4) & 0x07f007f0u) | ((odd ? codes : codes << 8) & 0x80008000u);
  const __nv_bfloat162 two = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), __float2bfloat162_rn(0x1p120f));
  return reinterpret_cast<const uint32_t&>(two);
}
__device__ __forceinline__ uint32_t widenFloat8(uint32_t codes, bool odd, f16) {
  const uint32_t bits = ((odd ? codes >> 1 : codes << 7) & 0x3f803f80u) | ((odd ? codes : codes << 8) & 0x80008000u);
  const __half2 two = __hmul2(reinterpret_cast<const __half2&>(bits), __float2half2_rn(256.0f));
  return reinterpret_cast<const uint32_t&>(two);
}

// Codes holds this lane's 16 consecutive codes of a row in a chunk.
template <bool NF4> struct Codes;
template <> struct Codes<false> {
  static constexpr int kBytes = 16;
  uint32_t words[4];
  __device__ __forceinline__ void load(const uint8_t* p) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(p) : "memory");
  }
};
template <> struct Codes<true> {
  static constexpr int kBytes = 8;
  uint32_t words[2];
  __device__ __forceinline__ void load(const uint8_t* p) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(p) : "memory");
  }
};

// multiplyPacked computes products for up to 8·tiles rows of x. Launch: kPackedWarps warps per block, and at most one block
// for every 16 rows of w. Shared memory: with NF4, the table of pairs, which has 256 words for each lane of a warp, and
// then 4 floats for every thread and tile of 8 rows of x, where the sums of the warps are added up.
template <class T, bool NF4, int tiles, bool Gated> __device__ __forceinline__ void multiplyPacked(const Args& a) {
  constexpr int kPairs = 256, kWords = kPairs * kWarp;
  extern __shared__ __align__(128) uint32_t memory[];  // NF4: the table of pairs; and sums
  __shared__ float signed8[NF4 ? kNested : 1];
  constexpr int perTile = Gated ? 8 : 16;  // columns of y
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, group = lane / 4, quarter = lane % 4;
  const int chunks = a.depth / kChunk, rowBytes = NF4 ? a.depth / 2 : a.depth;
  const int all = (a.n + perTile - 1) / perTile;

  // This lane's two rows of w in a tile.
  const uint8_t *codes[2], *nestedRow[2];
  const float* scales[2];
  int64_t firstBlock[2];
  float factor[2];  // float8: the scale of the row; NF4: the offset of the part's scales
  bool valid[2];
  const auto select = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = tile * perTile + group + (Gated ? 0 : i * 8);
      const Row row(a, Gated ? i : 0, column);
      valid[i] = column < a.n && row.part;
      codes[i] = nestedRow[i] = nullptr, scales[i] = nullptr, firstBlock[i] = 0, factor[i] = 0;
      if (!valid[i]) continue;
      codes[i] = row.part->codes + row.row * rowBytes + quarter * Codes<NF4>::kBytes;
      if constexpr (NF4)
        nestedRow[i] = row.part->nested, scales[i] = row.part->scales, firstBlock[i] = row.row * chunks, factor[i] = row.part->offset;
      else
        factor[i] = row.part->scales[row.row];
    }
  };

  Codes<NF4> w[kFlight][2];
  uint8_t nested[kFlight][2];
  float blockScale[kFlight][2];
  const auto loadW = [&](int from) {
#pragma unroll
    for (int u = 0; u < kFlight; u++) {
      const int chunk = from + u * kPackedWarps;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        w[u][i] = {};
        if constexpr (NF4) nested[u][i] = 0, blockScale[u][i] = 0;
        if (chunk >= chunks || !valid[i]) continue;
        w[u][i].load(codes[i] + int64_t(chunk) * (4 * Codes<NF4>::kBytes));
        if constexpr (NF4) {
          const int64_t block = firstBlock[i] + chunk;
          nested[u][i] = nestedRow[i][block], blockScale[u][i] = scales[i][block / kNested];
        }
      }
    }
  };

  int tile = blockIdx.x;
  select(tile);
  if (a.steady) loadW(warp);
  if constexpr (NF4) {
    for (int i = threadIdx.x; i < kPairs * kWarp; i += kPackedWarps * kWarp) {
      const int pair = i / kWarp;
      memory[i] = tile::pack(nf4[pair >> 4], nf4[pair & 15], T());
    }
    for (int i = threadIdx.x; i < kNested; i += kPackedWarps * kWarp) signed8[i] = a.table[i];
    __syncthreads();
  }
  if (a.early) releaseNext();
  awaitPrevious();
  if (!a.early) releaseNext();
  if (!a.steady) loadW(warp);

  const T *x = static_cast<const T*>(a.x) + quarter * 16, *c = static_cast<const T*>(a.c);
  T* y = static_cast<T*>(a.y);
  float4* sums = reinterpret_cast<float4*>(NF4 ? memory + kWords : memory);
  while (tile < all) {
    float sum[tiles][4] = {};
    for (int from = warp; from < chunks; from += kFlight * kPackedWarps) {
      if (from > warp) loadW(from);
#pragma unroll
      for (int u = 0; u < kFlight; u++) {
        const int chunk = from + u * kPackedWarps;
        if (chunk >= chunks) break;
        uint32_t operand[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const Codes<NF4>& of = w[u][i % 2];
            if constexpr (NF4) {
              // The address in the table: byte 2·s + i/2 times 128, the size of an entry, plus the lane's copy.
              const int shift = (s % 2 * 2 + i / 2) * 8 - 7;
              const uint32_t word = of.words[s / 2], at = ((shift < 0 ? word << -shift : word >> shift) & 0x7f80u) | lane * 4u;
              operand[s][i] = *reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(memory) + at);
            } else {
              operand[s][i] = widenFloat8(of.words[s], i / 2, T());
            }
          }
#pragma unroll
        for (int n = 0; n < tiles; n++) {
          uint4 elements[2] = {};
          if (const int r = n * 8 + group; r < a.rows) {
            const uint4* of = reinterpret_cast<const uint4*>(x + int64_t(r) * a.depth + int64_t(chunk) * kChunk);
            elements[0] = of[0], elements[1] = of[1];
          }
          const uint32_t* words = reinterpret_cast<const uint32_t*>(elements);
          float part[4] = {};
#pragma unroll
          for (int s = 0; s < 4; s++) {
            const uint32_t b0 = words[2 * s], b1 = words[2 * s + 1];
            if constexpr (NF4)
              tile::multiply(part, operand[s], b0, b1, T());
            else  // elements 0 and 2, and 1 and 3, like the codes
              tile::multiply(sum[n], operand[s], __byte_perm(b0, b1, 0x5410), __byte_perm(b0, b1, 0x7632), T());
          }
          if constexpr (NF4) {
#pragma unroll
            for (int e = 0; e < 4; e++) sum[n][e] += part[e] * (signed8[nested[u][e / 2]] * blockScale[u][e / 2] + factor[e / 2]);
          }
        }
      }
    }

    // Start loading the next tile, and add up the warps' sums. A thread gets the sums that it has held itself.
    const int done = tile;
    const float rowScale[2] = {factor[0], factor[1]};
    tile += gridDim.x;
    if (tile < all) {
      select(tile);
      loadW(warp);
    }
#pragma unroll
    for (int n = 0; n < tiles; n++) sums[(warp * tiles + n) * kWarp + lane] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
    __syncthreads();
    if (warp < tiles) {
      float total[4] = {};
      for (int v = 0; v < kPackedWarps; v++) {
        const float4 s = sums[(v * tiles + warp) * kWarp + lane];
        total[0] += s.x, total[1] += s.y, total[2] += s.z, total[3] += s.w;
      }
      if constexpr (!NF4) {
#pragma unroll
        for (int e = 0; e < 4; e++) total[e] *= rowScale[e / 2];
      }
#pragma unroll
      for (int e = 0; e < (Gated ? 2 : 4); e++) {
        const int column = done * perTile + group + (Gated ? 0 : e / 2 * 8), r = warp * 8 + quarter * 2 + e % 2;
        if (r >= a.rows || column >= a.n) continue;
        const int64_t i = int64_t(r) * a.n + column;
        float v = total[e];
        if constexpr (Gated)
          v = a.isGELU ? gateMul<T, true>(total[e], total[e + 2]) : gateMul<T, false>(total[e], total[e + 2]);
        else if (c)
          v += toFloat(c[i]);
        y[i] = fromFloat<T>(v);
      }
    }
    __syncthreads();  // the sums have been read
  }
}

#define DEFINE_KERNEL(T, format, NF4, op, Gated, tiles)                                                           \
  extern "C" __global__ void __launch_bounds__(kPackedWarps * kWarp) decode_packed##op##_##format##_##tiles##_##T(const __grid_constant__ Args a) { \
    multiplyPacked<T, NF4, tiles, Gated>(a);                                                                     \
  }
#define DEFINE_TILES(T, format, NF4, op, Gated)                                                                  \
  DEFINE_KERNEL(T, format, NF4, op, Gated, 1) DEFINE_KERNEL(T, format, NF4, op, Gated, 2)                       \
  DEFINE_KERNEL(T, format, NF4, op, Gated, 4) DEFINE_KERNEL(T, format, NF4, op, Gated, 8)
#define DEFINE(T)                                                                                                \
  DEFINE_TILES(T, float8, false, , false) DEFINE_TILES(T, float8, false, _gated, true)                          \
  DEFINE_TILES(T, nf4, true, , false) DEFINE_TILES(T, nf4, true, _gated, true)
DEFINE(bf16)
DEFINE(f16)
