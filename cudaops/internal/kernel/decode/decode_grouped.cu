// Attention to pages on the tensor cores. It computes the same as decode_paged.cu, for 16-bit types, heads of 64 or 128
// features, and up to kHeads query heads per key-value head.
//
// A block computes one row (the token of a sequence) for a key-value head and a slice of the positions. The query heads
// that share the key-value head are the rows of the tensor cores' tiles, so each key and value is read once for all of
// them. Tiles of kKeys keys and values are copied to shared memory with cp.async, into a ring of kStages tiles, while the
// warps multiply earlier tiles: registers would hold too few of them to keep the memory busy.
//
// All warps have the same heads, and divide the keys of a tile. Each warp has its own softmax over its keys. These are
// merged at the end of the slice, and the last block of a row and key-value head to finish merges the slices.
//
// decode_append must have stored the rows' own keys and values. The rotated queries and the attention weights are rounded
// to the storage type.
#include "decode_grouped.cuh"
#include "mma.cuh"

constexpr int kWarps = 4, kThreads = kWarps * kWarp, kKeys = 64, kHeads = 16, kStages = 3;

// Launch: kThreads threads, [slices, kvHeads, rows] blocks, with shared memory for kStages tiles of keys and of values.
template <class T, int D> __device__ __forceinline__ void attendGrouped(const Grouped& grouped) {
  const Paged& a = grouped.paged;
  extern __shared__ __align__(128) char memory[];
  __shared__ __align__(128) T queries[kHeads * D];
  __shared__ Merging<kHeads> merging;
  constexpr int tileBytes = kKeys * D * 2, chunks = D / 8, perWarp = kKeys / kWarps;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, kv = blockIdx.y, r = blockIdx.z;
  const int group = a.heads / a.kvHeads, width = a.kvHeads * D, first = kv * group;
  await(a);
  if (grouped.tokens > 0 && Chunk(a, r, grouped.tokens).count > 0) return;

  const int64_t* row = a.table + int64_t(r) * a.columns;
  const int64_t position = row[0];
  T* y = static_cast<T*>(a.y) + (int64_t(r) * a.heads + first) * D;
  if (position < 0 || position >= a.capacity) {
    if (blockIdx.x == 0)
      for (int i = threadIdx.x; i < group * D; i += kThreads) y[i] = fromFloat<T>(0);
    return;
  }
  const int from = a.window > 0 ? max(0, int(position) + 1 - a.window) : 0;
  int keys;
  const int slices = slicesOf(int(position) + 1 - from, a.slices, &keys), slice = blockIdx.x;
  if (slice >= slices) return;
  const int begin = from + slice * keys, end = min(begin + keys, int(position) + 1), tiles = (end - begin + kKeys - 1) / kKeys;

  const PagedRows<false> rowOf(row + 1);
  const uint32_t base = tile::sharedAddress(memory), queryTile = tile::sharedAddress(queries);
  const auto copyTile = [&](int t) {
    const uint32_t keyTile = base + t % kStages * 2 * tileBytes;
#pragma unroll
    for (int i = 0; i < kKeys * chunks / kThreads; i++) {
      const int at = i * kThreads + threadIdx.x, key = at / chunks, chunk = at % chunks, j = begin + t * kKeys + key;
      const bool valid = j < end;
      const int64_t of = rowOf(valid ? j : begin) * width + kv * D + chunk * 8;
      tile::copyAsync<16>(tile::chunkAt<D>(keyTile, key, chunk), static_cast<const T*>(a.keys) + of, valid);
      tile::copyAsync<16>(tile::chunkAt<D>(keyTile + tileBytes, key, chunk), static_cast<const T*>(a.values) + of, valid);
    }
  };
  for (int t = 0; t < kStages - 1; t++) {
    if (t < tiles) copyTile(t);
    tile::copyCommit();
  }

  // Store the rotated queries, with zeros in place of missing heads.
  const float *cosines = a.cosines, *sines = a.sines;
  if (cosines) cosines += position * (D / 2), sines += position * (D / 2);
  for (int at = threadIdx.x; at < kHeads * chunks; at += kThreads) {
    const int head = at / chunks, chunk = at % chunks;
    float f[kElements] = {};
    if (head < group)
      turnedFeatures(f, static_cast<const T*>(a.q) + int64_t(r) * a.queryStride + (first + head) * D, chunk * kElements, D, cosines,
                     sines, a.packed);
    const uint32_t to = tile::chunkAt<D>(queryTile, head, chunk);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(tile::pack(f[0], f[1], T())),
                 "r"(tile::pack(f[2], f[3], T())), "r"(tile::pack(f[4], f[5], T())), "r"(tile::pack(f[6], f[7], T()))
                 : "memory");
  }

  // As in the accumulators of mma, this lane has parts of rows lane/4 and lane/4 + 8, which are heads, and shares them with
  // the other three lanes of its quad. h selects the row.
  tile::Accumulator<1, D> out;
  out.clear();
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  const float scale = a.scale * kLog2E;
  for (int t = 0; t < tiles; t++) {
    tile::copyWait<kStages - 2>();
    __syncthreads();  // the tile has arrived, and all warps are done with the one before it
    if (t + kStages - 1 < tiles) copyTile(t + kStages - 1);
    tile::copyCommit();
    const uint32_t keyTile = base + t % kStages * 2 * tileBytes;
    tile::Accumulator<1, perWarp> score;
    score.clear();
    score.template addNT<T, D>(queryTile, 0, keyTile, warp * perWarp);

    const int left = end - begin - t * kKeys - warp * perWarp;  // how many keys remain from this warp's first key on
    float keep[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float m = maximum[h];
#pragma unroll
      for (int n = 0; n < perWarp / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& s = score.c[0][n][2 * h + e];
          s = n * 8 + lane % 4 * 2 + e < left ? s * scale : -INFINITY;
          m = fmaxf(m, s);
        }
      m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
      m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
      const float of = m == -INFINITY ? 0.0f : m;  // before the first key, all weights are 0
      keep[h] = exp2f(maximum[h] - of);
      maximum[h] = m, sum[h] *= keep[h];
#pragma unroll
      for (int n = 0; n < perWarp / 8; n++)
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
    out.template addNN<T, perWarp>(score, keyTile + tileBytes, warp * perWarp);
  }

  // Merge the results of the warps, in the memory of the tiles.
  tile::copyWait<0>();
  __syncthreads();
  float(*merged)[kHeads][D + 2] = reinterpret_cast<float(*)[kHeads][D + 2]>(memory);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
    float* to = merged[warp][lane / 4 + h * 8];
    if (lane % 4 == 0) to[0] = maximum[h], to[1] = sum[h];
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) to[2 + n * 8 + lane % 4 * 2 + e] = out.c[0][n][2 * h + e];
  }
  __syncthreads();

  float* parts = a.parts + (int64_t(r) * a.heads + first) * a.slices * (D + 2);
  for (int e = threadIdx.x; e < group * D; e += kThreads) {
    const int g = e / D, i = e % D;
    const Merged all = mergeAll<kWarps>(merged[0][g], kHeads * (D + 2), i);
    if (slices == 1) {
      y[e] = fromFloat<T>(all.weighted / all.sum);
      continue;
    }
    float* to = parts + (int64_t(g) * a.slices + slice) * (D + 2);
    if (i == 0) to[0] = all.maximum, to[1] = all.sum;
    to[2 + i] = all.weighted;
  }
  if (slices == 1) return;

  mergeSlices<T, kThreads>(merging, parts, a.arrived + r * a.kvHeads + kv, group, D, a.slices, slices, y);
}

#define DEFINE(T)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_grouped_64_##T(Grouped a) { attendGrouped<T, 64>(a); } \
  extern "C" __global__ void __launch_bounds__(kThreads) decode_grouped_128_##T(Grouped a) { attendGrouped<T, 128>(a); }
DEFINE(bf16)
DEFINE(f16)
