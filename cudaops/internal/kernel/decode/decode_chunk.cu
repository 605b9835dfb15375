// Attention of a prompt's tokens to themselves and the tokens before them, on the tensor cores, with keys and values in
// pages. A chunk is a group of consecutive tokens of one sequence (see Chunk in decode_grouped.cuh). decode_append must
// have stored the keys and values of these tokens.
//
// A block computes one key-value head for all tokens of a chunk. A row of the tensor cores' tiles is a token with one of
// the query heads that share the key-value head, so each key and value is read once for kRows such pairs. Every warp has
// 16 rows, and attends from them to all keys. As in decode_grouped.cu, tiles of kKeys keys and values are copied to
// shared memory with cp.async, into a ring of kStages tiles, while the warps multiply earlier tiles.
//
// The rotated queries and the attention weights are rounded to the storage type.
#include "decode_grouped.cuh"
#include "mma.cuh"

constexpr int kWarps = 4, kThreads = kWarps * kWarp, kKeys = 64, kStages = 3, kRows = 16 * kWarps;

// Launch: kThreads threads, [chunks, kvHeads] blocks, with shared memory for kStages tiles of keys and of values. Each
// of the grouped.tokens tokens of a chunk has kRows/grouped.tokens rows, of which the first heads/kvHeads are used.
template <class T, int D> __device__ __forceinline__ void attendChunk(const Grouped& grouped) {
  extern __shared__ __align__(128) char memory[];
  __shared__ __align__(128) T queries[kRows * D];
  constexpr int tileBytes = kKeys * D * 2, chunks = D / 8;
  const Paged& a = grouped.paged;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, kv = blockIdx.y, perToken = kRows / grouped.tokens;
  const int group = a.heads / a.kvHeads, width = a.kvHeads * D, head0 = kv * group;
  await(a);
  const Chunk chunk(a, blockIdx.x * grouped.tokens, grouped.tokens);
  if (chunk.count == 0) return;

  const int64_t* row = a.table + int64_t(chunk.first) * a.columns;
  const int position = row[0], last = position + chunk.count - 1;
  const int from = a.window > 0 ? max(0, position + 1 - a.window) : 0, tiles = (last + 1 - from + kKeys - 1) / kKeys;
  const PagedRows<false> rowOf(row + int64_t(chunk.count - 1) * a.columns + 1);  // the last token's table has all pages
  const uint32_t base = tile::sharedAddress(memory), queryTile = tile::sharedAddress(queries);
  const auto copyTile = [&](int t) {
    const uint32_t keyTile = base + t % kStages * 2 * tileBytes;
#pragma unroll
    for (int i = 0; i < kKeys * chunks / kThreads; i++) {
      const int at = i * kThreads + threadIdx.x, key = at / chunks, piece = at % chunks, j = from + t * kKeys + key;
      const bool valid = j <= last;
      const int64_t of = rowOf(valid ? j : from) * width + kv * D + piece * 8;
      tile::copyAsync<16>(tile::chunkAt<D>(keyTile, key, piece), static_cast<const T*>(a.keys) + of, valid);
      tile::copyAsync<16>(tile::chunkAt<D>(keyTile + tileBytes, key, piece), static_cast<const T*>(a.values) + of, valid);
    }
  };
  for (int t = 0; t < kStages - 1; t++) {
    if (t < tiles) copyTile(t);
    tile::copyCommit();
  }

  // Store the rotated queries, with zeros in rows without a token or a head.
  for (int at = threadIdx.x; at < kRows * chunks; at += kThreads) {
    const int i = at / chunks, piece = at % chunks, token = i / perToken, head = i % perToken;
    float f[kElements] = {};
    if (token < chunk.count && head < group) {
      const int64_t angles = int64_t(position + token) * (D / 2);
      turnedFeatures(f, static_cast<const T*>(a.q) + int64_t(chunk.first + token) * a.queryStride + (head0 + head) * D, piece * kElements,
                     D, a.cosines ? a.cosines + angles : nullptr, a.sines + angles, a.packed);
    }
    const uint32_t to = tile::chunkAt<D>(queryTile, i, piece);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(tile::pack(f[0], f[1], T())),
                 "r"(tile::pack(f[2], f[3], T())), "r"(tile::pack(f[4], f[5], T())), "r"(tile::pack(f[6], f[7], T()))
                 : "memory");
  }

  // As in the accumulators of mma, this lane has parts of rows 16·warp + lane/4 and 16·warp + lane/4 + 8, and shares them
  // with the other three lanes of its quad. h selects the row.
  tile::Accumulator<1, D> out;
  out.clear();
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  int own[2];  // the position of the row's token
#pragma unroll
  for (int h = 0; h < 2; h++) own[h] = position + (warp * 16 + lane / 4 + h * 8) / perToken;
  const float scale = a.scale * kLog2E;
  for (int t = 0; t < tiles; t++) {
    tile::copyWait<kStages - 2>();
    __syncthreads();  // the tile has arrived, and all warps are done with the one before it
    if (t + kStages - 1 < tiles) copyTile(t + kStages - 1);
    tile::copyCommit();
    const uint32_t keyTile = base + t % kStages * 2 * tileBytes;
    tile::Accumulator<1, kKeys> score;
    score.clear();
    score.template addNT<T, D>(queryTile, warp * 16, keyTile, 0);

    float keep[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float m = maximum[h];
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& s = score.c[0][n][2 * h + e];
          const int j = from + t * kKeys + n * 8 + lane % 4 * 2 + e;
          s = j <= own[h] && (a.window <= 0 || j > own[h] - a.window) ? s * scale : -INFINITY;
          m = fmaxf(m, s);
        }
      m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
      m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
      const float of = m == -INFINITY ? 0.0f : m;  // before the first key, all weights are 0
      keep[h] = exp2f(maximum[h] - of);
      maximum[h] = m, sum[h] *= keep[h];
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& s = score.c[0][n][2 * h + e];
          s = exp2f(s - of);
          sum[h] += s;
        }
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) out.c[0][n][e] *= keep[e / 2];
    out.template addNN<T, kKeys>(score, keyTile + tileBytes, 0);
  }

  // Divide by the sums of the weights. Rows of the table without a sequence get zeros.
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
    const int i = warp * 16 + lane / 4 + h * 8, token = i / perToken, head = i % perToken;
    if (head >= group || chunk.first + token >= a.rows) continue;
    const float factor = token < chunk.count ? 1 / sum[h] : 0.0f;
    T* y = static_cast<T*>(a.y) + (int64_t(chunk.first + token) * a.heads + head0 + head) * D + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<uint32_t*>(y + n * 8) = tile::pack(out.c[0][n][2 * h] * factor, out.c[0][n][2 * h + 1] * factor, T());
  }
}

#define DEFINE(T)                                                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_chunk_64_##T(Grouped a) { attendChunk<T, 64>(a); } \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_chunk_128_##T(Grouped a) { attendChunk<T, 128>(a); }
DEFINE(bf16)
DEFINE(f16)
