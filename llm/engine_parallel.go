package llm

import (
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// Parallel is an engine that trains a model together with those of other processes, its ranks. Each
// has the same model, data, settings and callbacks. The batches of a step are divided among them.
// Package llm/parallel has one.
//
// All ranks call Batches, Update, Exchange and Gather in the same order. A trainer of such an
// engine sees to it that they decide alike. What is submitted to the lattices of one takes effect
// at all between the same two steps. The controller and the clock of rank 0 hold for all. Where one
// fails or is asked to stop, all end behind the same step. Rank 0 alone writes checkpoints.
type Parallel interface {
	Engine
	// Rank counts from 0 to Ranks−1.
	Rank() int
	Ranks() int
	// Batches gathers the gradients of n batches, in the place of Gradients, and returns their
	// losses. next returns one batch after the other, in memory that it uses again.
	Batches(n int, next func() (data.Batch, error)) (losses []float64, err error)
	// Exchange hands a value to all ranks, and returns those of all, by rank.
	Exchange(value []byte) ([][]byte, error)
	// Gather makes the optimiser's state on this host that of the whole model.
	Gather() error
	// Own makes the optimiser's state on this host right in the parts that this rank updates. It
	// returns those, in the order in which all ranks' parts stand one behind the other. It waits
	// for no other rank. The optimiser is an [optim.Partial].
	Own() ([]optim.Part, error)
}

// Busier is a Parallel engine whose run fails if its ranks make no progress.
type Busier interface {
	Parallel
	// Busy declares long work outside a step, such as "writing a checkpoint". The work ends when
	// done is called.
	Busy(what string) (done func())
}

// ParallelStepper is an engine of several ranks whose update does not wait on the host for the
// losses of a step. The ranks tell each other of these while it goes on.
type ParallelStepper interface {
	Parallel
	// StepBatches is Batches and Update in one. Its errors are theirs. With none there has been an
	// update unless a loss is not finite. Before the update all ranks have heard the words of all.
	StepBatches(n int, next func() (data.Batch, error), word []byte) (StepResult, error)
}

// StepResult is what a step of several ranks has come to.
type StepResult struct {
	Losses []float64 // of its batches
	Norm   float64   // of the gradient
	Made   bool      // the update has been made, or may have been
	Words  [][]byte  // by rank; nil where they have not agreed on an update
}
