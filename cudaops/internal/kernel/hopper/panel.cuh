// Tiles made up of panels, and the copies by the tensor memory accelerator that fill them.
//
// A tile of R rows and D columns (16-bit) consists of panels of R rows and 64 columns, or 32
// columns if D is not a multiple of 64. A row of a panel therefore has 128 or 64 bytes. Its 16-byte
// chunks are swizzled in groups of eight rows, in the pattern that both copies and products use.
// Tiles start at multiples of 1 KiB.
#pragma once
#include "common.cuh"
#include "target.cuh"

// The driver's CUtensorMap.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

namespace tile {

// The panels of a tile with D columns.
template <int D> struct Panels {
  static constexpr int columns = D % 64 ? 32 : 64, count = D / columns, rowBytes = 2 * columns;
};

#ifdef HOPPER

// Copies rows of one head to a tile of Rows rows, 64 at a time. Elements outside the sequence or
// the head become zero.
template <int D, int Rows>
__device__ inline void copyTile(uint32_t tile, const TensorMap &map, uint32_t barrier, int row, int head, int batch) {
  using P = Panels<D>;
#pragma unroll
  for (int panel = 0; panel < P::count; panel++)
#pragma unroll
    for (int r = 0; r < Rows; r += 64)
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
              tile + panel * Rows * P::rowBytes + r * P::rowBytes),
          "l"(&map), "r"(barrier), "r"(panel * P::columns), "r"(row + r), "r"(head), "r"(batch)
          : "memory");
}

__device__ inline void copyBytes(uint32_t to, const void *from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

#endif  // HOPPER
}  // namespace tile
