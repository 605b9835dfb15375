// Matrix products on Hopper (sm_90a) whose results pass through the gate of a SiLU MLP on their way to memory, for bf16 and f16:
//
//   forward:   [gate | up] = x·weightsᵀ,  h = silu(gate) ⊙ up,  silu(a) = a·σ(a)
//   backward:  dh = g·down,  dgate = dh ⊙ up ⊙ σ(gate)(1 + gate(1 − σ(gate))),  dup = dh ⊙ silu(gate),  and h again
//
// with x and g [rows, depth], weights [2f, depth], down [depth, f], [gate | up] and [dgate | dup] [rows, 2f] and h [rows, f].
// gate, up and dh are rounded to T before they are used, as if they had been in memory; dh never is.
//
// A block owns 128 rows by 256 columns at a time (of the forward pass 128 of gate and the same of up), a cluster of two blocks
// 256 rows: each copies its own rows of the left operand and half of the right one, which goes to both. Blocks stay on their
// multiprocessor and take tiles until there are none. In a block
//
//   two warpgroups   multiply 64 rows each, leave the sums in shared memory, rounded, and go on with the next tile;
//   Finishers warps  take them from there to memory meanwhile: depth is so short in these models that a multiplier could not
//                    hide that itself;
//   one thread       copies the operands, 64 of the depth at a time, kStages ahead.
//
// Three finishers do for the forward pass, and for the backward pass of a long depth. With seven there are too many threads for
// products of 256 columns, since the compiler wants room for their registers in every thread: the multipliers then read the left
// operand twice.
//
// Needs: f and depth multiples of 8, pointers of 16 bytes.
#include "attention_hopper.cuh"

namespace gemm {

// The launcher fills it.
struct Params {
  const void *ab;  // backward: [gate | up]
  void *dab, *h;
  int rows, f, depth;
  int section;     // rows of clusters that are worked on together, so that both operands stay in L2
};

#if defined(HOPPER)
using namespace attention;

constexpr int kRows = 128, kColumns = 256, kDepth = 64, kStages = 3, kWorkers = 2, kCluster = 2;
constexpr int kLeftBytes = kRows * kDepth * 2, kRightBytes = kColumns * kDepth * 2, kStageBytes = kLeftBytes + kRightBytes;
constexpr int kPanelBytes = 64 * 128;                   // 64 rows of 64 columns
constexpr int kSumBytes = kColumns / 64 * kPanelBytes;  // of a worker

// Rows of gate and up on their way to the finishers of the backward pass, who share them evenly: 512 bytes of each.
constexpr int kGates = 18, kGateBytes = 2 * 512;

// Shared memory: the stages, each worker's sums, the gates, then the barriers.
struct Memory {
  uint32_t base;
  Ring<kStages> ring;
  uint32_t barriers;
  __device__ explicit Memory(uint32_t at)
      : base(at), ring{at + kStages * kStageBytes + kWorkers * kSumBytes + kGates * kGateBytes}, barriers(ring.barriers + ring.bytes) {}
  __device__ uint32_t left(int i) const { return base + ring.slot(i) * kStageBytes; }
  __device__ uint32_t right(int i) const { return left(i) + kLeftBytes; }
  __device__ uint32_t sums(int worker) const { return base + kStages * kStageBytes + worker * kSumBytes; }
  __device__ uint32_t gates() const { return sums(kWorkers); }
  __device__ uint32_t summed(int worker) const { return barriers + 16 * worker; }  // the sums are there
  __device__ uint32_t taken(int worker) const { return summed(worker) + 8; }       // and may be overwritten
};

// Where a tile begins. Of the cluster's tiles, one below the other, a block has that of its rank.
struct Tile {
  int row, column;
};

// The tiles of a cluster, one a turn: down the rows of a section, then on to the next columns. A tile has Step columns of
// the f.
template <int Step> struct Schedule {
  int rows, columns, section, rank, next, stride;
  __device__ explicit Schedule(const Params &p)
      : rows((p.rows + kCluster * kRows - 1) / (kCluster * kRows)), columns((p.f + Step - 1) / Step), section(p.section),
        rank(blockIdx.x % kCluster), next(blockIdx.x / kCluster), stride(gridDim.x / kCluster) {}
  __device__ bool take(Tile &t) {
    if (next >= rows * columns) return false;
    const int first = next / (section * columns) * section, r = next % (section * columns), n = min(section, rows - first);
    t = {(kCluster * (first + r % n) + rank) * kRows, r / n * Step};
    next += stride;
    return true;
  }
};

// ---- Copies ----

// Into this block, or with All at the same place of all; bytes arrive at the barrier of each.
template <bool All> __device__ inline void copyBox(uint32_t to, const TensorMap &map, uint32_t barrier, int x, int y, int z) {
  if (All)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"((uint16_t)((1 << kCluster) - 1))
        : "memory");
  else
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                     to),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// What lies outside the matrices becomes zero.
template <bool Forward> __device__ inline void copyTiles(const Params &p, const TensorMap &left, const TensorMap &right, const Memory &m) {
  Schedule<Forward ? kColumns / 2 : kColumns> schedule(p);
  Tile t;
  for (int i = 0; schedule.take(t);)
    for (int k = 0; k < p.depth; k += kDepth, i++) {
      const uint32_t barrier = m.ring.fill(i, kStageBytes), half = m.right(i) + schedule.rank * (kRightBytes / kCluster);
      copyBox<false>(m.left(i), left, barrier, k, t.row, 0);
      if (Forward) {  // one block brings gate, the other up
        copyBox<true>(half, right, barrier, k, t.column, schedule.rank);
      } else {
        const int column = t.column + schedule.rank * (kColumns / kCluster);
        copyBox<true>(half, right, barrier, column, k, 0);
        copyBox<true>(half + kPanelBytes, right, barrier, column + 64, k, 0);
      }
    }
}

// ---- Products ----

#define REGISTERS_128                                                                                             \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "        \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "         \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "         \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "         \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, "       \
  "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "       \
  "%119, %120, %121, %122, %123, %124, %125, %126, %127}"
#define OUTPUTS_128(m) OUTPUTS_64(m), SIXTEEN(m, 16), SIXTEEN(m, 20), SIXTEEN(m, 24), SIXTEEN(m, 28)

// c (64×N) = A·B, or += with add. With TransposeB the product runs over rows of B's tile.
#define DEFINE_PRODUCT(N, R, a, b, flag, transpose, T, name)                                                             \
  template <int TransposeB>                                                                                              \
  __device__ inline void product(float (&c)[N / 8][4], uint64_t x, uint64_t y, bool add, T) {                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " " REGISTERS_##R                       \
                 ", " a ", " b ", p, 1, 1, 0, " transpose ";\n}\n"                                                       \
                 : OUTPUTS_##R("+f")                                                                                     \
                 : "l"(x), "l"(y), "r"((int)add), "n"(TransposeB));                                                      \
  }
#define DEFINE_BOTH(T, name)                                              \
  DEFINE_PRODUCT(128, 64, "%64", "%65", "%66", "%67", T, name)            \
  DEFINE_PRODUCT(256, 128, "%128", "%129", "%130", "%131", T, name)
DEFINE_BOTH(bf16, "bf16")
DEFINE_BOTH(f16, "f16")

// Tells the cluster's blocks, whose copies write there, that this warp is done with the slot of fill i.
__device__ inline void releaseAll(const Ring<kStages> &ring, int i) {
  const int lane = threadIdx.x % 32;
  if (lane < kCluster)
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [at];\n}\n" ::"r"(ring.freed(i)),
        "r"(lane)
        : "memory");
}

// Rounds a warp's 16 rows into the panels of its worker.
template <typename T> __device__ inline void leaveSums(const Accumulator<1, kColumns> &sums, uint32_t panels) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 2) {
    const uint32_t at = panels + n / 8 * kPanelBytes + row * 128 + ((n % 8 + lane / 16) ^ row % 8) * 16;
    const float(&a)[4] = sums.c[0][n], (&b)[4] = sums.c[0][n + 1];
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pack(a[0], a[1], T())),
                 "r"(pack(a[2], a[3], T())), "r"(pack(b[0], b[1], T())), "r"(pack(b[2], b[3], T()))
                 : "memory");
  }
}

__device__ inline void arriveOfWarp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrierArrive(barrier);
}

template <typename T, bool Forward, int Finishers>
__device__ inline void multiplyTiles(const Params &p, const Memory &m, int worker) {
  using Half = float[kColumns / 16][4];
  constexpr uint32_t kOffset = 0x3ffff;  // of an address in the block: in front of it is the block's rank
  constexpr int across = Forward ? 16 : kPanelBytes, step = Forward ? 32 : 16 * 128;  // of the right operand, for 16 of the depth
  Schedule<Forward ? kColumns / 2 : kColumns> schedule(p);
  Accumulator<1, kColumns> sums;
  sums.clear();
  Tile t;
  for (int turn = 0, i = 0; schedule.take(t); turn++) {
    const int end = i + (p.depth + kDepth - 1) / kDepth;
    hold(sums);
    for (const int first = i; i < end; i++) {
      m.ring.wait(i);
      const Descriptor a((m.left(i) & kOffset) + worker * kPanelBytes, 16), b(m.right(i) & kOffset, across);
      productsBegin();
#pragma unroll
      for (int k = 0; k < kDepth / 16; k++) {
        const bool add = k > 0 || i > first;
        if constexpr (Finishers == 3) {
          product<!Forward>(sums.c[0], a.plus(k * 32), b.plus(k * step), add, T());
        } else {
          product<!Forward>(*(Half *)&sums.c[0][0], a.plus(k * 32), b.plus(k * step), add, T());
          product<!Forward>(*(Half *)&sums.c[0][kColumns / 16], a.plus(k * 32), b.plus(k * step + kRightBytes / 2), add, T());
        }
      }
      productsCommit();
      if (i > first) {
        productsWait<1>();
        releaseAll(m.ring, i - 1);
      }
    }
    productsWait<0>();
    hold(sums);
    releaseAll(m.ring, i - 1);
    barrierWait(m.taken(worker), turn + 1 & 1);
    leaveSums<T>(sums, m.sums(worker));
    if (Forward) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    arriveOfWarp(m.summed(worker));
  }
}

// ---- From the sums to memory ----

// σ(a), as exact as T shows; what is below the smallest normal number is 0.
__device__ inline float gateOf(float a) {
  float s;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + exp2Approx(-kLog2e * a)));
  return s;
}

__device__ inline float2 unpack(uint32_t v, bf16) { return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)}; }
__device__ inline float2 unpack(uint32_t v, f16) { return __half22float2(*(__half2 *)&v); }

// Eight columns of a row, packed.
struct Chunk {
  uint32_t v[4];
};

__device__ inline Chunk loadSums(uint32_t panels, int row, int chunk) {
  Chunk c;
  loadWords(c.v, panels + chunk / 8 * kPanelBytes + row * 128 + (chunk ^ row) % 8 * 16);
  return c;
}

template <typename T> __device__ inline void storeChunk(T *to, const Chunk &c) {
  *(uint4 *)to = {c.v[0], c.v[1], c.v[2], c.v[3]};
}

// gate and up leave through the copy engine while h is formed, two rows at a time.
template <typename T, int Finishers>
__device__ inline void finishForward(const Params &p, const TensorMap &ab, const Memory &m, int warp) {
  const int lane = threadIdx.x % 32, chunk = lane % 16;
  Schedule<kColumns / 2> schedule(p);
  Tile t;
  for (int turn = 0; schedule.take(t); turn++)
    for (int worker = 0; worker < kWorkers; worker++) {
      const uint32_t panels = m.sums(worker);
      const int first = t.row + 64 * worker, column = t.column + 8 * chunk;
      barrierWait(m.summed(worker), turn & 1);
      if (warp == 0 && lane == 0) {
#pragma unroll
        for (int panel = 0; panel < 4; panel++)
          asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&ab),
                       "r"(panels + panel * kPanelBytes), "r"(t.column + panel % 2 * 64), "r"(panel / 2), "r"(first)
                       : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
#pragma unroll 2
      for (int r = 2 * warp + lane / 16; r < 64; r += 2 * Finishers) {
        const Chunk a = loadSums(panels, r, chunk), b = loadSums(panels, r, chunk + 16);
        Chunk h;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 gate = unpack(a.v[j], T()), up = unpack(b.v[j], T());
          h.v[j] = pack(gate.x * gateOf(gate.x) * up.x, gate.y * gateOf(gate.y) * up.y, T());
        }
        if (first + r < p.rows && column < p.f) storeChunk((T *)p.h + (int64_t)(first + r) * p.f + column, h);
      }
      if (warp == 0 && lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      arriveOfWarp(m.taken(worker));
    }
}

// Asks for the tile's gate and up in L2, 128 bytes at a time.
template <typename T, int Finishers> __device__ inline void expect(const Params &p, const Tile &t, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int r = warp * 4 + lane / 8; r < kRows; r += 4 * Finishers) {
    const int row = t.row + r, column = t.column + lane % 4 * 64;
    if (row < p.rows && column < p.f)
      asm volatile("prefetch.global.L2 [%0];" ::"l"((const T *)p.ab + ((int64_t)row * 2 + lane / 4 % 2) * p.f + column));
  }
}

// The rows that a warp finishes, of one tile after the other.
template <int Finishers> struct Rows {
  Schedule<kColumns> schedule;
  int warp, row;
  bool more;
  Tile t;
  __device__ Rows(const Params &p, int warp) : schedule(p), warp(warp), row(warp), more(schedule.take(t)) {}
  // Reports whether the next row is of another tile.
  __device__ bool next() {
    row += Finishers;
    if (row < kRows) return false;
    row = warp;
    more = schedule.take(t);
    return true;
  }
};

// A lane has eight columns. It starts copies of gate and up some rows before it needs them.
template <typename T, int Finishers> __device__ inline void finishBackward(const Params &p, const Memory &m, int warp) {
  constexpr int slots = kGates / Finishers;
  const int lane = threadIdx.x % 32;
  const uint32_t gates = m.gates() + warp * slots * kGateBytes + lane * 16;
  Rows<Finishers> now(p, warp), ahead = now;
  if (now.more) expect<T, Finishers>(p, now.t, warp);
  auto copy = [&](uint32_t to) {
    if (ahead.more) {
      const int row = ahead.t.row + ahead.row, column = ahead.t.column + 8 * lane;
      const bool there = row < p.rows && column < p.f;
      const T *from = (const T *)p.ab + (there ? (int64_t)row * 2 * p.f + column : 0);
      copyAsync<16>(to, from, there);
      copyAsync<16>(to + 512, from + p.f, there);
      if (ahead.next() && ahead.more) expect<T, Finishers>(p, ahead.t, warp);
    }
    copyCommit();
  };
  for (int slot = 0; slot < slots; slot++) copy(gates + slot * kGateBytes);
  int worker = -1;
#pragma unroll 1
  for (int turn = 0, slot = 0; now.more; slot = slot == slots - 1 ? 0 : slot + 1) {
    if (now.row / 64 > worker) {
      if (worker >= 0) arriveOfWarp(m.taken(worker));
      barrierWait(m.summed(++worker), turn & 1);
    }
    copyWait<slots - 1>();
    Chunk a, b, h, da, db;
    const Chunk dh = loadSums(m.sums(worker), now.row % 64, lane);
    loadWords(a.v, gates + slot * kGateBytes);
    loadWords(b.v, gates + slot * kGateBytes + 512);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 x = unpack(a.v[j], T()), y = unpack(b.v[j], T()), g = unpack(dh.v[j], T());
      const float2 s = {gateOf(x.x), gateOf(x.y)}, silu = {x.x * s.x, x.y * s.y};
      h.v[j] = pack(silu.x * y.x, silu.y * y.y, T());
      db.v[j] = pack(g.x * silu.x, g.y * silu.y, T());
      da.v[j] = pack(g.x * y.x * (s.x + fmaf(-silu.x, s.x, silu.x)), g.y * y.y * (s.y + fmaf(-silu.y, s.y, silu.y)), T());
    }
    const int row = now.t.row + now.row, column = now.t.column + 8 * lane;
    if (row < p.rows && column < p.f) {
      T *to = (T *)p.dab + (int64_t)row * 2 * p.f + column;
      storeChunk(to, da);
      storeChunk(to + p.f, db);
      storeChunk((T *)p.h + (int64_t)row * p.f + column, h);
    }
    copy(gates + slot * kGateBytes);
    if (now.next()) {
      arriveOfWarp(m.taken(worker));
      worker = -1;
      turn++;
    }
  }
}

__device__ inline void meetCluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

template <typename T, bool Forward, int Finishers>
__device__ inline void run(const Params &p, const TensorMap &left, const TensorMap &right, const TensorMap &ab) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Memory m(sharedAddress(shared));
  if (threadIdx.x == 0) {
    m.ring.init(kCluster * kWorkers);
    for (int worker = 0; worker < kWorkers; worker++) {
      barrierInit(m.summed(worker), 4);
      barrierInit(m.taken(worker), Finishers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  meetCluster();
  constexpr int others = Finishers == 3 ? 128 : 256;
  if (threadIdx.x < others) {
    giveRegisters<Finishers == 3 ? 152 : 80>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp > 0 && warp <= Finishers) {
      if constexpr (Forward)
        finishForward<T, Finishers>(p, ab, m, warp - 1);
      else
        finishBackward<T, Finishers>(p, m, warp - 1);
    } else if (threadIdx.x == 0) {
      copyTiles<Forward>(p, left, right, m);
    }
    __syncwarp();
  } else {
    takeRegisters<176>();
    multiplyTiles<T, Forward, Finishers>(p, m, uniform((threadIdx.x - others) / 128));
  }
  meetCluster();  // the other block may still write here
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, of 512 with seven finishers; as many as run at once. Dynamic shared memory:
// see Memory.
#undef BODY
#if defined(HOPPER)
#define BODY(...) gemm::__VA_ARGS__
#else
#define BODY(...)
#endif
#define FORWARD(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(384, 1) gemm_hopper_silu_mul_3_##T(                             \
      const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x,                             \
      const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap ab) {                       \
    BODY(run<T, true, 3>(p, x, weights, ab));                                                                  \
  }
#define BACKWARD(T, finishers, threads)                                                                        \
  extern "C" __global__ void __launch_bounds__(threads, 1) gemm_hopper_silu_mul_backward_##finishers##_##T(    \
      const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap g,                             \
      const __grid_constant__ TensorMap down) {                                                                \
    BODY(run<T, false, finishers>(p, g, down, down));                                                          \
  }
#define DEFINE(T) FORWARD(T) BACKWARD(T, 3, 384) BACKWARD(T, 7, 512)
DEFINE(bf16)
DEFINE(f16)
