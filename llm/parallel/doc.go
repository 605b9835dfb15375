// Package parallel trains a model on several processes, called ranks. The result is bit-identical to a
// single process's.
//
//	world, err := comm.Join(ctx, place, options)
//	team, err := parallel.Join(ctx, world)
//	trainer, err := llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{Engine: team.Engine, …})
//	err = trainer.Run(ctx)
//	err = errors.Join(err, team.Close(err))
//
// This example trains on CPUs. For GPUs, use Join and Parallel of package llm/gpu. Every rank creates
// the same model, loader, optimizer and callbacks. A run starts by comparing them, and if a rank's
// data, options, parameters or seeds differ, it fails with an error that names the rank.
//
// # A step
//
// A step consists of M = TrainConfig.Accumulate batches, whatever the number N of ranks. The loader
// of every rank returns all M batches, so that the loaders stay synchronized. Rank m mod N computes
// batch m.
//
//  1. After each round of N batches, every rank sends each owner the owner's shard of its gradient
//     while it computes the next batch. The owner adds the shards in batch order (comm.OrderedSum).
//     The step's gradients are therefore bit-identical to those of a single rank that accumulates M
//     batches.
//  2. The ranks exchange losses and the telemetry of the lattices, and merge both in batch order.
//     Lattices merge moments, never averages, so they are equal on all ranks. On GPUs, this happens
//     during stage 4, after the ranks have agreed during stage 1 that an update is possible (see
//     [Team.Step]). The same messages carry everything else the ranks need to know, such as requests
//     to stop, so ranks do not communicate between ordinary steps.
//  3. The norm of the gradient is the root of a sum over fixed blocks of optim.PartGrain elements. Each
//     owner computes the sums of its blocks, and every rank adds them in the same order.
//  4. Each owner clips and updates its shard. Shards consist of whole blocks, and a matrix updated by
//     Muon lies in a single shard, so each element is computed as on a single rank.
//  5. The owners send the new weights to all ranks.
//
// This corresponds to stage 2 of ZeRO: a rank holds all weights, but only the gradient sums and moments
// of its shard. (Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
// models", 2020.)
//
// # Reproducibility
//
// Parameters, moments and lattices are bit-identical for every N, and also to those of
// [llm.CPUEngine] with the same M, so either can resume the other's checkpoints.
//
// There is one exception. With M > 1, the Strict mode and the adaptive clipping of Kasmina layers use
// telemetry up to the previous step, while llm.CPUEngine uses telemetry up to the previous batch. Such a run
// has a different engine name, so that the checkpoints are not confused.
//
// # Failures
//
// An error in a batch is returned on all ranks. If a rank dies or terminates its run with an error
// (see [Team.Close]), the run fails on all ranks with a *comm.RankError that names it, even if they
// are waiting for that rank. The same happens if a rank hangs for longer than comm.Options.Deadline.
//
// Steps, evaluations and samples report progress. Saving a checkpoint and creating an engine are
// declared as long work, for which the other ranks wait without a time limit. Callbacks that may take
// longer than the deadline must declare this with [Team.Busy].
package parallel
