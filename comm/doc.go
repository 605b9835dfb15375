// Package comm connects the processes of a run, one per GPU. It determines the place of each process
// in the run, provides a rendezvous, and defines the collectives for exchanging data.
//
//   - [FromEnvironment] reads a process's [Place] from the variables set by torchrun, Slurm, Open
//     MPI or a Kubernetes operator. Package launch starts the processes of one host itself.
//   - [Join] meets the other processes at rank 0, over TCP, and returns a [World]. The World gathers
//     small values and notifies every rank when one fails, dies or hangs.
//   - A [Group] provides the collectives on device memory. Package nccl implements it for GPUs, and
//     package loopback, over TCP, for the CPUs of one host and for tests.
//   - [Watch] connects the two: when a rank dies, it aborts the work that waits for that rank.
//
// # Security
//
// The processes of a run share a [Secret]. Package launch creates one for each run and passes it in
// the environment. If another launcher starts the processes, it must provide the secret; there is no
// default.
//
// All connections of this package and of package loopback use TLS 1.3 between two processes that
// know the secret. Without it, a process on the network cannot join, read or modify the traffic, or
// fail the run, except by breaking connections or occupying ports. Ranks refuse connections that
// are relayed from another port of rank 0's host, and rank 0 stops listening once all ranks have
// joined.
//
// NCCL uses separate connections between GPUs on different hosts, and does not encrypt them by
// default. See docs/CLUSTER.md.
//
// # Deadlines
//
// If [Options.Deadline] is set, every rank sends its state to rank 0 several times per deadline; see
// [World.Report], [World.Busy] and [World.Wait]. Rank 0 fails the run if it receives nothing from a
// rank, if no rank makes progress, or if all ranks wait for each other. The other ranks fail the run
// if they receive nothing from rank 0. This detects processes that hang without limiting the
// duration of legitimate work.
//
// # Reproducibility of collectives
//
// Send, Recv, AllGather, Broadcast and [GatherShards] copy: the received bits equal those sent,
// including NaN payloads and signs of zeros. Max and Min have a unique result, except for NaN. So
// do sums of integers.
//
// Sums of floating-point numbers depend on their order, which for AllReduce and ReduceScatter
// depends on the number of ranks, the length, and the algorithm that NCCL chooses. Two runs with
// the same ranks may agree; runs with 2 and 4 ranks do not. Package loopback also adds in an order
// that depends on the number of ranks, so that tests detect code that relies on it.
//
// # Sums in order
//
// [OrderedSum] computes sums with bits that do not depend on the number of ranks. A batch consists
// of M micro-batches. With N ranks, micro-batch m belongs to rank m mod N in round m / N. After
// each round, every rank sends to each owner the owner's shard of its gradient, all in one Batch of
// sends and receives. With one kernel, the owner then adds the contributions in the order of the
// ranks: one kernel:
//
//	acc = (((acc + g₀) + g₁) + …) + gₙ₋₁
//
// Over all rounds this is the sum over m = 0, 1, …, M−1 from left to right, each step rounded once,
// for every N. On a single GPU the same kernel adds one contribution at a time. Three rules make
// this work: the sum starts with a copy of the first contribution; contributions have the same type
// on a single GPU as when they are sent; and no rank adds its own micro-batches before sending
// them, because that would change the order.
//
// If N does not divide M, the last round has contributions from the first M mod N ranks only.
//
// A round transfers (N−1)/N of a gradient out of and into each rank, like a ReduceScatter. In
// addition, each rank needs memory for N−1 contributions to its own shard.
package comm
