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
// NCCL uses connections of its own between GPUs on different hosts, and does not encrypt them by
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
// # What has the same bits
//
// Send, Recv, AllGather, Broadcast and [GatherShards] copy: what arrives has the bits that left,
// NaN payloads and signs of zeros included. Max and Min have one result, apart from NaN. Sums of
// integers have one result too.
//
// Sums of floating-point numbers depend on their order. That of AllReduce and ReduceScatter depends
// on the number of ranks, on the length and on the way that NCCL takes. Two runs on the same ranks
// may agree; runs on 2 and 4 ranks do not. Package loopback, too, adds in an order that depends on
// the number of ranks, so that tests notice who relies on it.
//
// # Sums in order
//
// [OrderedSum] makes sums whose bits do not depend on the number of ranks. A batch is M
// micro-batches, and micro-batch m belongs to rank m mod N in round m / N, N being the number of
// ranks. After each round every rank sends to each owner the owner's shard of its gradient, all in
// one Batch of sends and receives. The owner then adds what arrived, in the order of ranks, with
// one kernel:
//
//	acc = (((acc + g₀) + g₁) + …) + gₙ₋₁
//
// Round after round this is the sum over m = 0, 1, …, M−1 from left to right, each step rounded
// once, for every N. On one GPU the same kernel adds one contribution at a time. Three things are
// needed for it. The sum starts with a copy of the first contribution. Contributions have the type
// in which they travel on one GPU, too. And no rank adds its own micro-batches before it sends
// them: that would be another order.
//
// Where N does not divide M the last round has fewer contributors: the first M mod N ranks.
//
// A round moves (N−1)/N of a gradient out of and into each rank, as a ReduceScatter does. What it
// costs beside that is room for N−1 contributions to the owner's shard.
package comm
