// The vocabulary of kernels for Hopper (sm_90a): barriers in shared memory, tiles copied by the tensor memory accelerator,
// and products that a warpgroup of four warps starts and waits for.
//
// A tile of R rows by D columns (16-bit) is panels, each R rows of 64 columns or, where D is no multiple of 64, of 32: 128 or 64 bytes
// a row, whose 16-byte chunks are swizzled in groups of eight rows as both the copies and the products understand it. Tiles begin
// at multiples of 1 KiB.
#pragma once
#include "attention.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER 1
// What a kernel does where it can; other GPUs never launch it.
#define BODY(...) attention::__VA_ARGS__
#else
#define BODY(...)
#endif

// What the driver calls a CUtensorMap.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

namespace attention {

// The panels of a tile with D columns.
template <int D> struct Panels {
  static constexpr int columns = D % 64 ? 32 : 64, count = D / columns, rowBytes = 2 * columns;
};

// Rows of 96 columns, 192 bytes: eight rows of one chunk fall on different banks if every second row changes the order.
template <> __device__ inline uint32_t chunkAt<96>(uint32_t tile, int row, int chunk) {
  return tile + row * 192 + ((chunk ^ (row >> 1 & 3)) << 4);
}

// Workers warpgroups own 64 rows each and walk over Loop rows at a time. There is room for the own tiles of Turns turns and
// for Stages of the others.
template <int D_, int Workers_, int Loop_, int Turns_, int Stages_> struct Shape {
  static constexpr int D = D_, Workers = Workers_, Loop = Loop_, Turns = Turns_, Stages = Stages_, Own = 64 * Workers;
  static constexpr int WorkerThreads = 128 * Workers, Threads = 128 + WorkerThreads, CopierRegisters = Workers == 2 ? 24 : 32,
                       WorkerRegisters = Workers == 2 ? 240 : 160;
  static constexpr int OwnBytes = Own * D * 2, LoopBytes = Loop * D * 2;
};

#ifdef HOPPER

// Tells the compiler that a value is the same in all lanes: what follows from it then costs no vector instructions.
__device__ inline int uniform(int v) { return __shfl_sync(kAllLanes, v, 0); }

__device__ inline uint32_t loadWord(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ inline void storeWord(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// Blocks take work in turns, every second turn in reverse: work comes in order of length, and the turns even out.
__device__ inline int workOf(int turn) {
  return turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// The tiles of keys that queries up to `last` see.
template <class S> __device__ inline int keyTiles(const Params &p, int last) {
  return (min(p.causal ? last + 1 : p.seq, p.seq) + S::Loop - 1) / S::Loop;
}

// ---- Barriers: a phase ends when `count` arrivals have come, and all bytes that were announced ----

__device__ inline void barrierInit(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ inline void barrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void barrierExpect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of a phase of this parity; on a new barrier parity 1 passes at once.
__device__ inline void barrierWait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Orders what a thread has read or written in shared memory before what copies and products do there after its next arrival.
__device__ inline void fenceAsync() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A ring of Slots slots that the copier fills and the workers free, in shared memory at `barriers`; fill i goes into slot
// i % Slots, whose barriers these are.
template <int Slots> struct Ring {
  uint32_t barriers;
  static constexpr int bytes = 16 * Slots;
  __device__ uint32_t filled(int i) const { return barriers + i % Slots * 16; }
  __device__ uint32_t freed(int i) const { return filled(i) + 8; }
  __device__ static int slot(int i) { return i % Slots; }

  // A slot is free again after so many arrivals.
  __device__ void init(int arrivals) const {
    for (int i = 0; i < Slots; i++) {
      barrierInit(filled(i), 1);
      barrierInit(freed(i), arrivals);
    }
  }
  // The copier waits for the slot of fill i to be free and announces that many bytes; they arrive at the returned barrier.
  __device__ uint32_t fill(int i, int bytes) const {
    waitFree(i);
    return announce(i, bytes);
  }
  __device__ void waitFree(int i) const { barrierWait(freed(i), i / Slots + 1 & 1); }
  __device__ uint32_t announce(int i, int bytes) const {
    barrierExpect(filled(i), bytes);
    return filled(i);
  }
  __device__ void wait(int i) const { barrierWait(filled(i), i / Slots & 1); }
  // Every worker's thread frees what it has read itself: it costs no more than an arrival for the whole warp, and tools that
  // look for races follow no thread's reads through another's arrival.
  __device__ void release(int i) const { barrierArrive(freed(i)); }
};

// Where the documents of each warpgroup's rows begin or end, in tiles or rows of the walk: the copier looks it up, some turns ahead,
// and the workers find it in shared memory once the turn's tiles are there.
template <class S> struct Reach {
  uint32_t words;
  __device__ uint32_t word(int turn, int group) const { return words + turn % S::Turns * 16 + group * 4; }
  __device__ void set(int turn, const int (&reach)[S::Workers]) const {
    for (int g = 0; g < S::Workers; g++) storeWord(word(turn, g), reach[g]);
  }
  __device__ int get(int turn, int group) const { return uniform(loadWord(word(turn, group))); }
};

// ---- Copies ----

// Rows of one head go into a tile of Rows rows, 64 at a time; what lies outside the sequence or the head becomes zero.
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

// One warp writes Rows rows of its tile of results from shared memory: storeRows for any number of columns.
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

// ---- Products ----

// Where products find an operand: at an address in a tile of panels with so many bytes a row, which are `across` bytes apart (that
// matters only where a product runs over rows). Plus moves it by bytes.
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

// setSS, addSS: c (64×N) = or += A·B with both in shared memory; addRS has A in registers. With TransposeB, the product runs
// over 16 rows of B's tile, otherwise over 16 of its columns; TransposeA is the same for A. The operands' numbers come after
// those of the registers of c.
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

// Registers that products read or write may be touched by other instructions only before productsBegin and after
// productsWait; hold keeps the compiler from moving such instructions across.
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

// A 64×K operand in registers: an accumulator, rounded.
template <int K> struct Operand {
  uint32_t r[K / 16][4];

  template <typename T> __device__ void set(const Accumulator<1, K> &a, T) {
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) r[k][i] = pack(a.c[0][2 * k + i / 2][i % 2 * 2], a.c[0][2 * k + i / 2][i % 2 * 2 + 1], T());
  }
};

// Starts c = A·Bᵀ or, to add, c += A·Bᵀ: 64 rows of a tile of ARows from aRow on, and all N rows of another; both have D columns.
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

// Starts c += A·B for A in registers and the K rows of a tile with D columns.
template <typename T, int D, int K>
__device__ inline void startNN(Accumulator<1, D> &c, const Operand<K> &a, uint32_t bTile) {
  constexpr int rowBytes = Panels<D>::rowBytes;
  const Descriptor<rowBytes> b(bTile, K * rowBytes);
#pragma unroll
  for (int k = 0; k < K / 16; k++) addRS<1>(c.c[0], a.r[k], b.plus(k * 16 * rowBytes), T());
}

// Starts c += A·B for 64 rows of a tile of ARows rows and 64 columns, from aRow on, and the 64 rows of a tile with D columns.
template <typename T, int D>
__device__ inline void startNN(Accumulator<1, D> &c, uint32_t aTile, int aRow, uint32_t bTile) {
  constexpr int rowBytes = Panels<D>::rowBytes;
  const Descriptor a(aTile + aRow * 128, 16);
  const Descriptor<rowBytes> b(bTile, 64 * rowBytes);
#pragma unroll
  for (int k = 0; k < 4; k++) addSS<0, 1>(c.c[0], a.plus(k * 32), b.plus(k * 16 * rowBytes), T());
}

// Starts c = Aᵀ·B for a tile of K rows and 64 columns, and 64 columns of another of K rows with panels as D columns have.
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

// The cosines and sines of RoPE, [seq, D/2] both; null where nothing is to be turned.
struct Angles {
  const float *cosines, *sines;
};

// Where the angles of the rows begin of which a lane has parts, in a warp whose first is at the given position.
template <int D> __device__ inline int64_t anglesAt(int position, int half, int seq) {
  const int lane = threadIdx.x % 32;
  return (int64_t)min(position + 8 * half + lane / 4, seq - 1) * (D / 2) + lane % 4 * 2;
}

// Turns two neighbouring pairs back. Both elements of a pair, D/2 apart, are in the same lane.
__device__ inline void turnBack(float *a, float *b, float2 cosine, float2 sine) {
  const float a0 = a[0], a1 = a[1];
  a[0] = a0 * cosine.x + b[0] * sine.x;
  a[1] = a1 * cosine.y + b[1] * sine.y;
  b[0] = b[0] * cosine.x - a0 * sine.x;
  b[1] = b[1] * cosine.y - a1 * sine.y;
}

// Turns the rows of a warp's gradients, of which the first is at the given position, back by their angles.
template <int D> __device__ inline void turnBack(Accumulator<1, D> &d, const Angles &angles, int position, int seq) {
  if (!angles.cosines) return;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int64_t at = anglesAt<D>(position, half, seq);
#pragma unroll
    for (int x = 0; x < D / 16; x++) {
      const float2 cosine = *(const float2 *)(angles.cosines + at + 8 * x), sine = *(const float2 *)(angles.sines + at + 8 * x);
      turnBack(d.c[0][x] + 2 * half, d.c[0][x + D / 16] + 2 * half, cosine, sine);
    }
  }
}

// The same in two steps, where there are registers for it: the angles come from far, and are asked for while products or stores are
// under way.
template <int D> struct TurnBack {
  float2 cosines[2][D / 16], sines[2][D / 16];
  bool turns;

  __device__ TurnBack(const Angles &angles, int position, int seq) : turns(angles.cosines) {
    if (!turns) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t at = anglesAt<D>(position, half, seq);
#pragma unroll
      for (int x = 0; x < D / 16; x++) {
        cosines[half][x] = *(const float2 *)(angles.cosines + at + 8 * x);
        sines[half][x] = *(const float2 *)(angles.sines + at + 8 * x);
      }
    }
  }

  __device__ void turn(Accumulator<1, D> &d) const {
    if (!turns) return;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int x = 0; x < D / 16; x++)
        turnBack(d.c[0][x] + 2 * half, d.c[0][x + D / 16] + 2 * half, cosines[half][x], sines[half][x]);
  }
};

// A warpgroup's registers a thread: the copier gives up what the workers take.
template <int Registers> __device__ inline void takeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> __device__ inline void giveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

#endif  // HOPPER
}  // namespace attention
