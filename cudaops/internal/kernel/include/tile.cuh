// Tiles in shared memory: their layout, and loads and stores.
#pragma once
#include "common.cuh"

namespace tile {

// chunkAt returns the address of a chunk. A tile holds D elements (16-bit) per row, in chunks of 16
// bytes. Chunk c of row r is stored at position c ^ (r % 8), so that the chunks of eight rows that
// ldmatrix reads together are in different banks.
template <int D> __device__ inline uint32_t chunkAt(uint32_t tile, int row, int chunk) {
  return tile + row * (D * 2) + ((chunk ^ (row & 7)) << 4);
}

__device__ inline uint32_t sharedAddress(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

template <int Bytes> __device__ inline void copyAsync(uint32_t to, const void *from, bool valid) {
  int n = valid ? Bytes : 0; // the rest is filled with zeros
  if (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes), "r"(n));
}

__device__ inline void copyCommit() { asm volatile("cp.async.commit_group;"); }

template <int N> __device__ inline void copyWait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

// loadTile starts copying Rows rows of one head to a tile. Rows from `rows` on and columns from headDim on
// become zero.
template <typename T, int D, int Rows, int Threads>
__device__ inline void loadTile(uint32_t tile, const T *from, int64_t stride, int rows, int headDim) {
  constexpr int chunks = D / 8, step = Threads / chunks;
  static_assert(Threads % chunks == 0 && Rows % step == 0, "every thread copies the same chunk of each of its rows");
  int chunk = threadIdx.x % chunks, first = threadIdx.x / chunks;
  bool column = chunk * 8 < headDim;
#pragma unroll
  for (int i = 0; i < Rows / step; i++) {
    int row = first + i * step;
    bool valid = column && row < rows;
    copyAsync<16>(chunkAt<D>(tile, row, chunk), valid ? from + row * stride + chunk * 8 : from, valid);
  }
}

__device__ inline void loadWords(uint32_t *v, uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address));
}

// storeWords stores 16 bytes at once. The compiler would split an assignment into four stores.
__device__ inline void storeWords(void *to, const uint32_t (&v)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// storeRows copies Rows rows of a warp's tile in shared memory to global memory. Each lane moves 16 bytes
// at a time, and adjacent lanes have adjacent chunks of a row.
template <typename T, int D, int Rows>
__device__ inline void storeRows(uint32_t tile, int tileRow, T *to, int64_t stride, int rows, int headDim) {
  constexpr int chunks = D / 8, step = 32 / chunks;
  const int lane = threadIdx.x % 32, chunk = lane % chunks, first = lane / chunks;
  uint32_t v[Rows / step][4];
#pragma unroll
  for (int i = 0; i < Rows / step; i++) loadWords(v[i], chunkAt<D>(tile, tileRow + first + i * step, chunk));
  if (chunk * 8 >= headDim) return;
#pragma unroll
  for (int i = 0; i < Rows / step; i++)
    if (const int row = first + i * step; row < rows) storeWords(to + row * stride + chunk * 8, v[i]);
}

__device__ inline void loadPair(float (&v)[2], uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(address));
}

// Rows of 96 columns have 192 bytes. The chunks of eight rows are in different banks if the order
// changes with every second row.
template <> __device__ inline uint32_t chunkAt<96>(uint32_t tile, int row, int chunk) {
  return tile + row * 192 + ((chunk ^ (row >> 1 & 3)) << 4);
}

// storeResult does the same as storeRows, for any number of columns.
template <typename T, int D, int Rows>
__device__ inline void storeResult(uint32_t tile, int tileRow, T *to, int64_t stride, int rows, int headDim) {
  constexpr int chunks = D / 8;
  if constexpr (32 % chunks == 0) {
    storeRows<T, D, Rows>(tile, tileRow, to, stride, rows, headDim);
  } else {
    static_assert(Rows * chunks % 32 == 0, "every lane has as many chunks");
    uint32_t v[Rows * chunks / 32][4];
#pragma unroll
    for (int i = 0; i < Rows * chunks / 32; i++) {
      const int at = i * 32 + threadIdx.x % 32;
      loadWords(v[i], chunkAt<D>(tile, tileRow + at / chunks, at % chunks));
    }
#pragma unroll
    for (int i = 0; i < Rows * chunks / 32; i++) {
      const int at = i * 32 + threadIdx.x % 32, row = at / chunks, column = at % chunks * 8;
      if (row < rows && column < headDim) storeWords(to + row * stride + column, v[i]);
    }
  }
}

}  // namespace tile
