// Package comm joins the processes of a run, one for each GPU. It finds out where each stands, lets
// them meet, and has the collectives by which they exchange data.
//
//   - [FromEnvironment] reads a process's [Place] from the variables that torchrun, Slurm, Open MPI
//     or a Kubernetes operator sets. Package launch starts the processes of one host itself.
//   - [Join] meets the others at rank 0, over TCP, and returns the [World]. It gathers small
//     values, and every rank learns when one fails, dies or falls silent.
//   - A [Group] has the collectives on device memory: package nccl for GPUs, package loopback over
//     TCP for CPUs of one host and for tests.
//   - [Watch] ties both together: the death of a rank aborts the work that waits for it.
//
// # Who may join
//
// The processes of a run share a [Secret], which package launch makes for each run and passes on in
// the environment. Where something else starts the processes, their environment must have one;
// there is no default. All connections of this package and of package loopback are TLS 1.3 between
// two processes that know the secret. Anybody else can neither join, nor read or change what the
// ranks say, nor fail the run, except by cutting connections or occupying ports. Rank 0 tells the
// port at which it listens, so that nobody who listens nearby can slip in between, and stops
// listening once all ranks have joined.
//
// NCCL's own connections, by which GPUs of several hosts exchange data, are NCCL's concern. It does
// not encrypt them. See docs/CLUSTER.md for what that means.
//
// # Who is alive
//
// With [Options.Deadline], every rank says a few times within the deadline that it is alive, and
// what it does: [World.Report], [World.Busy], [World.Wait]. Rank 0 ends the run when nothing comes
// from a rank, when no rank makes progress, or when all wait for one another; the ranks end it when
// nothing comes from rank 0. So a process that hangs is found, and one that works is not ended, no
// matter how long it takes.
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
