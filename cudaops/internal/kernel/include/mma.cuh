// Matrix products of tiles by the tensor cores of a warp (mma.sync), for compute capability 8.0 and
// later.
//
// All lanes of a warp must take part in a product, but the compiler does not know this. If some lanes load
// an operand and others set it to zero, it may copy the product into both branches. The warp then waits
// for itself forever. To avoid such branches, predicate the load in inline assembly; loading from an
// address that depends on the condition is not enough. The machine code must have as many HMMA
// instructions as the source has products.
#pragma once
#include "tile.cuh"

namespace tile {

__device__ inline uint32_t pack(float lo, float hi, bf16) {
  __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *(uint32_t *)&v;
}

__device__ inline uint32_t pack(float lo, float hi, f16) {
  __half2 v = __floats2half2_rn(lo, hi);
  return *(uint32_t *)&v;
}

__device__ inline void loadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ inline void loadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// multiply adds a (16×16) · b (16×8) to c (16×8).
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Accumulator is a warp's accumulator of 16·M rows and N columns. In every 16×8 piece a lane holds
// columns 2·(lane%4) and 2·(lane%4)+1, with elements 0 and 1 in row lane/4 and elements 2 and 3 in
// row lane/4 + 8.
template <int M, int N> struct Accumulator {
  float c[M][N / 8][4];

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[m][n][e] = 0;
  }

  // addNT adds A·Bᵀ. A is 16·M rows, from aRow on, of a tile in shared memory, and B is N rows, from bRow on, of
  // another. Both tiles have D columns.
  template <typename T, int D> __device__ void addNT(uint32_t aTile, int aRow, uint32_t bTile, int bRow) {
    int lane = threadIdx.x % 32;
    int ar = aRow + lane % 16, br = bRow + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t a[M][4];
#pragma unroll
      for (int m = 0; m < M; m++) loadMatrices(a[m], chunkAt<D>(aTile, ar + 16 * m, 2 * k + lane / 16));
#pragma unroll
      for (int n = 0; n < N / 16; n++) {
        uint32_t b[4];
        loadMatrices(b, chunkAt<D>(bTile, br + 16 * n, 2 * k + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < M; m++) {
          multiply(c[m][2 * n], a[m], b[0], b[1], T());
          multiply(c[m][2 * n + 1], a[m], b[2], b[3], T());
        }
      }
    }
  }

  // addNN adds A·B. A is in registers: an accumulator, rounded here, has the register layout of an operand. B
  // is K rows, from bRow on, of a tile in shared memory with N columns.
  template <typename T, int K> __device__ void addNN(const Accumulator<M, K> &a, uint32_t bTile, int bRow) {
    int lane = threadIdx.x % 32;
    int br = bRow + lane % 16;
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
      uint32_t ra[M][4];
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          ra[m][i] = pack(a.c[m][2 * k + i / 2][i % 2 * 2], a.c[m][2 * k + i / 2][i % 2 * 2 + 1], T());
#pragma unroll
      for (int n = 0; n < N / 16; n++) {
        uint32_t b[4];
        loadMatricesTransposed(b, chunkAt<N>(bTile, br + 16 * k, 2 * n + lane / 16));
#pragma unroll
        for (int m = 0; m < M; m++) {
          multiply(c[m][2 * n], ra[m], b[0], b[1], T());
          multiply(c[m][2 * n + 1], ra[m], b[2], b[3], T());
        }
      }
    }
  }

  // roundTo multiplies each row by its factor f[m][half], and writes the rounded results to a tile in shared
  // memory with N columns, from the given row on.
  template <typename T> __device__ void roundTo(uint32_t tile, int row, const float (&f)[M][2]) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
          uint32_t to = chunkAt<N>(tile, row + 16 * m + 8 * half + lane / 4, n) + lane % 4 * 4;
          uint32_t v = pack(c[m][n][2 * half] * f[m][half], c[m][n][2 * half + 1] * f[m][half], T());
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v));
        }
  }
};

}  // namespace tile
