// Package comm connects the processes of a run, one per GPU. It determines the place of each process
// in the run, provides a rendezvous, and defines the collectives for exchanging data.
//
//   - [FromEnvironment] reads a process's [Place] from the variables set by torchrun, Slurm, Open
//     MPI or a Kubernetes operator. Package launch starts the processes of one host itself.
//   - [Join] meets the other processes at rank 0, over TCP, and returns a [World]. The World
//     exchanges small values, and notifies every rank when one fails, dies or hangs.
//   - A [Group] provides the collectives on device memory. Package nccl implements it for GPUs, and
//     package loopback, over TCP, for the CPUs of one host and for tests.
//   - [Watch] connects the two, aborting work that waits for a rank when that rank dies.
//
// # Security
//
// The processes of a run share a [Secret]. Package launch creates one for each run and passes it in
// the environment. If another launcher starts the processes, it must provide the secret; there is no
// default.
//
// All connections of this package and of package loopback use TLS 1.3 between two processes that know
// the secret. Without it, a process on the network cannot join, read or modify the traffic, or fail
// the run, except by breaking connections or occupying ports. Ranks reject connections that are
// relayed from another port of rank 0's host, and rank 0 stops listening once all ranks have joined.
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
// Send, Recv, AllGather, Broadcast and [GatherShards] copy their data bit for bit, including NaN
// payloads and signs of zeros. The results of Max, Min and integer sums are unique, except for NaN.
//
// Sums of floating-point numbers depend on their order, which for AllReduce and ReduceScatter depends
// on the number of ranks, the length, and the algorithm that NCCL chooses. Two runs on the same ranks
// may agree, but runs on 2 and on 4 ranks do not. Package loopback also adds in an order that depends
// on the number of ranks, so that tests detect code that relies on it.
//
// # Sums in order
//
// [OrderedSum] computes sums whose bits do not depend on the number of ranks. A batch consists of M
// micro-batches. With N ranks, rank m mod N computes micro-batch m in round m / N. After each round,
// every rank sends to each owner the owner's shard of its gradient, all in one Batch of sends and
// receives. The owner then adds the contributions in rank order, using a single kernel:
//
//	acc = (((acc + g₀) + g₁) + …) + gₙ₋₁
//
// Over all rounds this is the sum over m = 0, 1, …, M−1 from left to right, each step rounded once,
// for every N. On a single GPU the same kernel adds one contribution at a time. This works because of
// three rules: the sum starts with a copy of the first contribution; contributions on a single GPU
// have the same type as transmitted ones; and no rank sums its own micro-batches before sending them,
// which would change the order.
//
// If N does not divide M, only the first M mod N ranks contribute to the last round.
//
// A round transfers (N−1)/N of a gradient out of and into each rank, like a ReduceScatter. In
// addition, each rank needs memory for N−1 contributions to its own shard.
package comm
