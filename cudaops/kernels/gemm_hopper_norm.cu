// A matrix product on Hopper (sm_90a) with the residual that is added to it and the RMSNorm of the sum, for bf16 and f16:
//
//   s = x·wᵀ + c,  rstd = 1/sqrt(mean(s²) + eps) of its rows,  y = s·rstd ⊙ g
//
// with w [columns, depth], x [rows, depth], g [columns] in float32, and s, c and y [rows, columns]. Sums, c among them, are rounded once,
// and what is rounded is normalised.
//
// gemm_hopper.cuh says how a block goes about it. A norm needs whole rows, and a tile has 256 columns of them. But all tiles of a row are
// worked on at once, each by another cluster, and what they must know of one another is a number a row: the sum of its squares in that
// tile. So a warp leaves those of its 16 rows in memory as soon as it can, stores s while the others do the same, then reads theirs and
// adds them up in the order of the columns; and of the rounded sums, which its registers still hold, makes y. Nothing is read again.
//
// A number lies there with a tag, 8 bytes that are written and read at once, and a number with another tag has not come yet: no order
// of accesses is asked for. Tags count the launches that the memory has served; the last cluster to end counts on.
//
// Warps wait for others, which must not wait for them. A tile's squares are there when its cluster has begun its next turn (Schedule), and
// warps wait only for tiles of the turn before the one in which they wait, so that nobody waits in a circle, whatever the order in which
// clusters come to run. All must get to run, as they do: there are no more than fit, and kernels beside them end by themselves. Rows whose
// last tile is of a later turn than one of their others are finished at the end, for which the latter's sums are fetched again.
//
// Needs: columns and depth multiples of 8, matrices at multiples of 16 bytes.
#include "gemm_hopper.cuh"

namespace gemm {

// What tiles know of one another, behind one another in memory: this, and for each 16 rows and each column of tiles a Tagged for each row.
// It is to be zeros at first, and to be kept from launch to launch; launches that share it follow one another.
struct Launches {
  unsigned ended;  // clusters
  unsigned before;
};
struct Tagged {
  float v;
  unsigned tag;
};

// The launcher fills it.
struct Params {
  Launches *launches;
  float *rstd;
  const float *g;
  int rows, columns, depth;
  int section;  // of Schedule
  float eps;
  int whole;  // whether all tiles of a row are of one turn
};

#if defined(HOPPER)

constexpr int kColumns = 256, kStages = 4, kParts = kColumns / 64;

using Shared = Memory<kColumns, kStages, 2 * kPanel>;
using Order = Schedule<kColumns>;

__device__ inline void put(Tagged *to, float v, unsigned tag) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(__float_as_uint(v)), "r"(tag) : "memory");
}

__device__ inline Tagged get(const Tagged *from) {
  uint32_t v, tag;
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(v), "=r"(tag) : "l"(from) : "memory");
  return {__uint_as_float(v), tag};
}

__device__ inline unsigned launchesBefore(const Launches *l) {
  unsigned n;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(&l->before) : "memory");
  return n;
}

// The sum over the four lanes that have columns of the same rows.
__device__ inline float quadSum(float v) {
  v += __shfl_xor_sync(kAllLanes, v, 1);
  return v + __shfl_xor_sync(kAllLanes, v, 2);
}

// A tile leaves 64 columns of s at a time, then 64 columns of y at a time, behind which c comes.
template <typename T> struct Normed : AddedSums<T, kColumns> {
  using Sums = AddedSums<T, kColumns>;
  using Sums::v, Sums::row, Sums::column, Sums::panels;
  static constexpr int kSlots = 2 * kParts + 1;
  const Params &p;
  const TensorMap &s, &c, &y;
  const int across, first;  // tiles of a row; the warp's first row of a block's
  const unsigned tag;
  Tagged asked[2][2];  // tiles, rows
  float rstd[2];
  bool early;  // the last tile of the same rows is of a later turn than this one

  __device__ Normed(const Params &p, const TensorMap &s, const TensorMap &c, const TensorMap &y, const Shared &m, int warp)
      : Sums(p.rows, m.panels(warp), m.barriers(warp)), p(p), s(s), c(c), y(y), across((p.columns + kColumns - 1) / kColumns),
        first(16 * warp), tag(launchesBefore(p.launches) + 1) {}

  // Where this lane's first row lies, in a column of tiles; the other one is 8 further on.
  __device__ Tagged *squares(int tile) const {
    return (Tagged *)(p.launches + 1) + (row / 16 * across + tile) * 16 + threadIdx.x % 32 / 4;
  }

  __device__ void leaveSquares() const {
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 f = unpack(v[n][half], T());
        sum[half] = fmaf(f.x, f.x, sum[half]);
        sum[half] = fmaf(f.y, f.y, sum[half]);
      }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sum[half] = quadSum(sum[half]);
      if (threadIdx.x % 4 == 0) put(squares(column / kColumns) + 8 * half, sum[half], tag);
    }
  }

  // Asks for the squares of this lane's next two tiles, which may be one, or none.
  __device__ void askSquares(int tile) {
    if (tile >= across) return;
    const Tagged *one = squares(tile), *other = tile + 4 < across ? squares(tile + 4) : one;
#pragma unroll
    for (int half = 0; half < 2; half++) asked[0][half] = get(one + 8 * half), asked[1][half] = get(other + 8 * half);
  }

  // Waits for the squares of all tiles, of which the first have been asked for.
  __device__ void addSquares() {
    float sum[2] = {};
#pragma unroll 1
    for (int tile = threadIdx.x % 4; tile < across;) {
      while (asked[0][0].tag != tag || asked[0][1].tag != tag || asked[1][0].tag != tag || asked[1][1].tag != tag) askSquares(tile);
#pragma unroll
      for (int half = 0; half < 2; half++) sum[half] += tile + 4 < across ? asked[0][half].v + asked[1][half].v : asked[0][half].v;
      tile += 8;
      askSquares(tile);
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      rstd[half] = rsqrtf(quadSum(sum[half]) / p.columns + p.eps);
      const int r = row + threadIdx.x % 32 / 4 + 8 * half;
      if (column == 0 && threadIdx.x % 4 == 0 && r < p.rows) p.rstd[r] = rstd[half];
    }
  }

  // Puts 64 columns of y into a panel.
  __device__ void leaveNormed(int part, uint32_t panel) const {
    const float *g = p.g + column + 64 * part + threadIdx.x % 4 * 2;
    float2 of[8];
#pragma unroll
    for (int n = 0; n < 8; n++) of[n] = column + 64 * part + 8 * n < p.columns ? __ldg((const float2 *)(g + 8 * n)) : float2{};
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t w[2][2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 weights = of[n + i];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 f = unpack(v[8 * part + n + i][half], T());
          w[i][half] = pack(f.x * rstd[half] * weights.x, f.y * rstd[half] * weights.y, T());
        }
      }
      storeMatrices(chunkOf<64>(panel) ^ n * 16, w[0], w[1]);
    }
    store(y, panel, column + 64 * part, row, 0);
  }

  __device__ bool isEarly() const {
    if (p.whole) return false;
    const Order order(p.rows, p.columns, p.section);
    const int cluster = row / (kCluster * kRows), first = cluster / p.section * p.section, n = min(p.section, order.rows - first);
    const int at = first * across + cluster - first;
    return (at + n * (column / kColumns)) / order.stride != (at + n * (across - 1)) / order.stride;
  }

  __device__ void finish(int slot, int nextRow, int nextColumn, bool more) {
    const bool some = row < p.rows;
    if (slot == 0 && some) leaveSquares();
    if (slot < kParts) {
      const uint32_t panel = panels + slot % 2 * kPanel;
      storesRead<1>();
      leaveColumns(v, 8 * slot, panel);
      store(s, panel, column + 64 * slot, row, 0);
      if (slot == kParts - 1) {
        early = isEarly();
        if (some && !early) askSquares(threadIdx.x % 4);
      }
    } else if (slot < 2 * kParts) {
      if (slot == kParts && some && !early) addSquares();
      storesRead<0>();
      if (some && !early) leaveNormed(slot - kParts, panels);
    }
    if (more) {
      if (slot > kParts) this->accept(slot - kParts - 1);
      if (slot >= kParts && slot < 2 * kParts) this->ask(c, slot - kParts, nextRow, nextColumn);
      __syncwarp();
    } else if (slot == kSlots - 1) {
      finishEarly();
    }
  }

  __device__ void finishEarly() {
    if (threadIdx.x % 32 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // s has been written
    __syncwarp();
    Order order(p.rows, p.columns, p.section);
#pragma unroll 1
    for (Tile t; order.take(t);) {
      row = t.row + first, column = t.column;
      if (row >= p.rows || !isEarly()) continue;
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        this->ask(s, part, row, column);
        this->accept(part);
      }
      askSquares(threadIdx.x % 4);
      addSquares();
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        storesRead<0>();
        leaveNormed(part, panels);
      }
    }
  }

  __device__ void take(Accumulator<1, kColumns> &sums, int row, int column) {
    this->add(sums);
    Sums::take(sums, row, column);
  }
};

template <typename T>
__device__ inline void run(const Params &p, const TensorMap &x, const TensorMap &w, const TensorMap &s, const TensorMap &c,
                           const TensorMap &y) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Shared m(sharedAddress(shared));
  multiply<T, 0>(m, Order(p.rows, p.columns, p.section), p.depth, x, Right<0>{w},
                 [&](int warp) { return Normed<T>(p, s, c, y, m, warp); });
  if (threadIdx.x == 0 && blockIdx.x % kCluster == 0 && atomicInc(&p.launches->ended, gridDim.x / kCluster - 1) == gridDim.x / kCluster - 1)
    p.launches->before++;  // all have read it
}

#endif  // HOPPER
}  // namespace gemm

// Launch: clusters of kCluster blocks of 384 threads, no more than run at once. Dynamic shared memory: see Memory.
#define DEFINE(T)                                                                                                             \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                        \
      gemm_hopper_norm_##T(const __grid_constant__ gemm::Params p, const __grid_constant__ TensorMap x,                       \
                           const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap s,                          \
                           const __grid_constant__ TensorMap c, const __grid_constant__ TensorMap y) {                        \
    BODY(run<T>(p, x, w, s, c, y));                                                                                           \
  }
DEFINE(bf16)
DEFINE(f16)
