// Asynchronous matrix products by a warpgroup of four warps (wgmma).
#pragma once
#include "mma.cuh"
#include "panel.cuh"

#ifdef HOPPER
namespace tile {

// Descriptor describes an operand of a product: an address in a tile of panels with RowBytes bytes
// per row. `across` is the distance between panels in bytes, which matters only if the product runs
// over rows. plus returns the descriptor moved by a number of bytes.
template <int RowBytes = 128> struct Descriptor {
  uint32_t low;
  __device__ Descriptor(uint32_t address, int across) : low(address >> 4 | across >> 4 << 16) {}
  __device__ uint64_t plus(int bytes) const {
    static_assert(RowBytes == 128 || RowBytes == 64, "the two swizzles that panels have");
    constexpr uint32_t rows = 8 * RowBytes >> 4, swizzle = (RowBytes == 128 ? 1u : 2u) << 30;
    return (uint64_t)(rows | swizzle) << 32 | (low + (bytes >> 4));
  }
};

#define REGISTERS_32                                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define REGISTERS_48                                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "  \
  "%42, %43, %44, %45, %46, %47}"
#define REGISTERS_64                                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "  \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "  \
  "%62, %63}"
#define FOUR(m, i) m(c[i][0]), m(c[i][1]), m(c[i][2]), m(c[i][3])
#define SIXTEEN(m, i) FOUR(m, i), FOUR(m, i + 1), FOUR(m, i + 2), FOUR(m, i + 3)
#define OUTPUTS_32(m) SIXTEEN(m, 0), SIXTEEN(m, 4)
#define OUTPUTS_48(m) SIXTEEN(m, 0), SIXTEEN(m, 4), SIXTEEN(m, 8)
#define OUTPUTS_64(m) SIXTEEN(m, 0), SIXTEEN(m, 4), SIXTEEN(m, 8), SIXTEEN(m, 12)

// setSS and addSS compute c (64×N) = A·B and c += A·B with both operands in shared memory; addRS
// takes A in registers. With TransposeB, the product runs over 16 rows of B's tile; otherwise it
// runs over 16 columns. TransposeA is the same for A. In the assembly, the operands are numbered
// after the registers of c.
#define DEFINE_SS(function, m, add, N, R, a, b, flag, transpose, T, name)                                      \
  template <int TransposeA, int TransposeB>                                                                    \
  __device__ inline void function(float (&c)[N / 8][4], uint64_t x, uint64_t y, T) {                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " " REGISTERS_##R             \
                 ", " a ", " b ", p, 1, 1, " transpose ";\n}\n"                                                \
                 : OUTPUTS_##R(m)                                                                              \
                 : "l"(x), "l"(y), "r"(add), "n"(TransposeA), "n"(TransposeB));                                \
  }
#define DEFINE_RS(N, R, a, b, flag, transpose, T, name)                                                        \
  template <int TransposeB>                                                                                    \
  __device__ inline void addRS(float (&c)[N / 8][4], const uint32_t (&x)[4], uint64_t y, T) {                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " " REGISTERS_##R             \
                 ", " a ", " b ", p, 1, 1, " transpose ";\n}\n"                                                \
                 : OUTPUTS_##R("+f")                                                                           \
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(1), "n"(TransposeB));               \
  }
#define DEFINE_PRODUCTS(T, name)                                                              \
  DEFINE_SS(setSS, "=f", 0, 64, 32, "%32", "%33", "%34", "%35, %36", T, name)                 \
  DEFINE_SS(addSS, "+f", 1, 64, 32, "%32", "%33", "%34", "%35, %36", T, name)                 \
  DEFINE_SS(addSS, "+f", 1, 96, 48, "%48", "%49", "%50", "%51, %52", T, name)                 \
  DEFINE_SS(setSS, "=f", 0, 128, 64, "%64", "%65", "%66", "%67, %68", T, name)                \
  DEFINE_SS(addSS, "+f", 1, 128, 64, "%64", "%65", "%66", "%67, %68", T, name)                \
  DEFINE_RS(64, 32, "{%32, %33, %34, %35}", "%36", "%37", "%38", T, name)                     \
  DEFINE_RS(96, 48, "{%48, %49, %50, %51}", "%52", "%53", "%54", T, name)                     \
  DEFINE_RS(128, 64, "{%64, %65, %66, %67}", "%68", "%69", "%70", T, name)
DEFINE_PRODUCTS(bf16, "bf16")
DEFINE_PRODUCTS(f16, "f16")

// Between productsBegin and productsWait, other instructions must not touch the registers that
// products read or write. hold keeps the compiler from moving instructions into that range.
__device__ inline void productsBegin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void productsCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> __device__ inline void productsWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

template <int N> __device__ inline void hold(Accumulator<1, N> &a) {
#pragma unroll
  for (int n = 0; n < N / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) asm volatile("" : "+f"(a.c[0][n][e])::"memory");
}

// Operand is a 64×K operand in registers: an accumulator, rounded.
template <int K> struct Operand {
  uint32_t r[K / 16][4];

  template <typename T> __device__ void set(const Accumulator<1, K> &a, T) {
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) r[k][i] = pack(a.c[0][2 * k + i / 2][i % 2 * 2], a.c[0][2 * k + i / 2][i % 2 * 2 + 1], T());
  }
};

// startNT starts c = A·Bᵀ or, with Add, c += A·Bᵀ. A is 64 rows, from aRow on, of a tile of ARows
// rows; B is all N rows of another tile. Both tiles have D columns.
template <typename T, int D, int ARows, int N, bool Add = false>
__device__ inline void startNT(Accumulator<1, N> &c, uint32_t aTile, int aRow, uint32_t bTile) {
  using P = Panels<D>;
  const Descriptor<P::rowBytes> a(aTile + aRow * P::rowBytes, 16), b(bTile, 16);
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const int panel = k * 16 / P::columns, column = k * 32 % P::rowBytes;
    const uint64_t x = a.plus(panel * ARows * P::rowBytes + column), y = b.plus(panel * N * P::rowBytes + column);
    if (!Add && k == 0)
      setSS<0, 0>(c.c[0], x, y, T());
    else
      addSS<0, 0>(c.c[0], x, y, T());
  }
}

// startNN starts c += A·B, for A in registers and the K rows of a tile with D columns.
template <typename T, int D, int K>
__device__ inline void startNN(Accumulator<1, D> &c, const Operand<K> &a, uint32_t bTile) {
  constexpr int rowBytes = Panels<D>::rowBytes;
  const Descriptor<rowBytes> b(bTile, K * rowBytes);
#pragma unroll
  for (int k = 0; k < K / 16; k++) addRS<1>(c.c[0], a.r[k], b.plus(k * 16 * rowBytes), T());
}

// startNN starts c += A·B. A is 64 rows, from aRow on, of a tile with 64 columns. B is the 64 rows
// of a tile with D columns.
template <typename T, int D>
__device__ inline void startNN(Accumulator<1, D> &c, uint32_t aTile, int aRow, uint32_t bTile) {
  constexpr int rowBytes = Panels<D>::rowBytes;
  const Descriptor a(aTile + aRow * 128, 16);
  const Descriptor<rowBytes> b(bTile, 64 * rowBytes);
#pragma unroll
  for (int k = 0; k < 4; k++) addSS<0, 1>(c.c[0], a.plus(k * 32), b.plus(k * 16 * rowBytes), T());
}

// startTN starts c = Aᵀ·B. A is a tile of K rows and 64 columns. B is 64 columns of a tile of K
// rows and D columns.
template <typename T, int D, int K> __device__ inline void startTN(Accumulator<1, 64> &c, uint32_t aTile, uint32_t bTile) {
  constexpr int rowBytes = Panels<D>::rowBytes;
  const Descriptor a(aTile, 16);
  const Descriptor<rowBytes> b(bTile, D % 64 ? K * rowBytes : 16);
#pragma unroll
  for (int k = 0; k < K / 16; k++)
    if (k == 0)
      setSS<1, 1>(c.c[0], a.plus(0), b.plus(0), T());
    else
      addSS<1, 1>(c.c[0], a.plus(k * 2048), b.plus(k * 16 * rowBytes), T());
}

}  // namespace tile
#endif  // HOPPER
