// Package parallel trains a model on several processes, its ranks, with the bits of one.
//
//	world, err := comm.Join(ctx, place, options)
//	team, err := parallel.Join(ctx, world)
//	trainer, err := llm.NewTrainer(model, loader, optimizer, llm.TrainConfig{Engine: team.Engine, …})
//	err = trainer.Run(ctx)
//	err = errors.Join(err, team.Close(err))
//
// That is on CPUs: package llm/gpu has Join and Parallel for GPUs. Every rank makes the same model,
// loader, optimiser and callbacks. A run begins with a comparison: a rank with other data, options,
// parameters or seeds is named, and nobody trains.
//
// # A step
//
// A step is M = TrainConfig.Accumulate batches, on any number N of ranks. Every rank's loader deals
// out all of them, which costs little, so that all loaders stand at the same place. Rank m mod N
// computes batch m.
//
//  1. After each round of N batches every rank sends to each owner the owner's shard of its
//     gradient, while it computes its next batch. The owner adds in the order of batches
//     (comm.OrderedSum). So the gradients of a step have the bits of a run that accumulates M
//     batches on one rank.
//  2. Ranks exchange losses, and what the passes have measured of the lattices. All take that in, in
//     the order of batches: lattices merge moments, never averages, and are the same everywhere. On
//     GPUs they do so beside 4, having agreed beside 1 that there can be an update ([Team.Step]).
//     What else they have to tell each other, such as a wish to stop, they say there: between
//     ordinary steps they do not meet.
//  3. The norm of the gradient is made of sums over fixed blocks of optim.PartGrain elements. Owners
//     form those of their blocks, and everyone adds all of them in one order.
//  4. Each owner clips and updates its shard. Shards end where blocks do, and a matrix of Muon is in
//     one shard, so each element is computed as on one rank.
//  5. New weights come back to all.
//
// This is ZeRO's stage 2. Beside the weights, a rank holds the sums of gradients of its shard, and
// uses the moments of its shard alone. (Rajbhandari et al., "ZeRO: Memory optimizations toward
// training trillion parameter models", 2020.)
//
// # What is equal
//
// Parameters, moments and lattices have the same bits for every N. They are those of
// [llm.CPUEngine] at the same M, whose checkpoints go on here and the other way round. One thing
// sets the two apart. With M above 1, the Strict mode and adaptive clipping of Kasmina layers go by
// what was measured up to the step before. The batch before does not count yet. Such a run has
// another engine's name.
//
// # What fails
//
// An error in a batch is returned on all ranks. If a rank dies or ends its run with an error (see
// [Team.Close]), the run ends on all ranks with a *comm.RankError that names it, even if they are
// waiting for that rank. The same happens if a rank hangs for longer than comm.Options.Deadline.
//
// Steps, evaluations and samples report progress. Saving a checkpoint and making an engine are
// declared as long work, for which the other ranks wait without limit. Callbacks that may take
// longer than the deadline must declare this with [Team.Busy].
package parallel
