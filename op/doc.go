// Package op adds to Gorgonia the ops of a Llama-style language model and the Kasmina layer.
//
// Every op is a node like any other, and mixes with Gorgonia's own ops in one graph. gorgonia.Grad
// differentiates through it, and Gorgonia's tape machine runs it on the CPU, in float32 or float64.
// Its LispMachine differentiates it too, once. Activations are matrices [rows, features] whose rows
// are the positions of one sequence after another; weights of linear layers are [out, in].
//
// Constructors return an error that names the op, the argument, what was given and what fits. What
// only values can show, such as a token id outside the vocabulary, is an error of the run.
// errors.Is finds what it wraps, such as [ErrNonFinite], in errors of cpuops.Machine and
// cudaops.Machine as they are. In those of Gorgonia's machines [RunError] finds it:
//
//	err := op.RunError(machine.RunAll())
//
// Each op is a forward op and a backward op. A backward op with several results packs them into one
// vector, of which part nodes are views. A forward op may keep small figures for its backward op,
// such as the normalizers of attention or a norm's 1/rms. So a graph must not run on two machines at
// the same time.
package op
